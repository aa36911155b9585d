"""The Triton kernels compiled for a Hopper GPU, on any machine, at the sizes of real models:
`make test-kernels`. They must fit the GPU's shared memory and registers; nothing runs."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(
        find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
        reason="needs Triton: make test-kernels",
    ),
]

SHARED_MEMORY = 227 * 1024  # bytes of a program, at most
PROCESSORS = 132
TYPES = {
    torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64", torch.int64: "i64",
    torch.uint8: "u8",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "launch_pdl", "maxnreg")


class Compiling:
    """In place of a kernel: compiles it for the arguments of a launch, as Triton would."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(0 < size < 2**16 for size in grid[1:]) and 0 < grid[0] < 2**31
        return self.launch

    def launch(self, *args: Any, **kwargs: Any) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        names = self.kernel.arg_names
        values = dict(zip(names, args, strict=False)) | kwargs
        types, constants, aligned = {}, {}, {}
        for i, name in enumerate(names):
            value = values[name]
            if name in kwargs or value is None or (type(value) is int and value == 1):
                types[name], constants[i,] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                types[name] = f"*{TYPES[value.dtype]}"
            else:
                types[name] = "fp32" if isinstance(value, float) else "i32"
            number = value.data_ptr() if isinstance(value, torch.Tensor) else value
            if types[name] not in ("constexpr", "fp32") and number % 16 == 0:
                aligned[i,] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, types, constants, aligned)
        target = GPUTarget("cuda", 90, 32)
        made = triton.compile(source, target=target, options=options)
        assert made.metadata.shared <= SHARED_MEMORY
        assert spilled(made.asm["cubin"]) == 0


def spilled(cubin: bytes) -> int:
    """Bytes of registers that are kept in memory."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True)
    return sum(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", usage.stdout)))


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Replaces kernels of a module."""
    monkeypatch.setattr(torch.cuda, "device_of", lambda _: nullcontext())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))

    def replace(module: ModuleType, *names: str) -> None:
        for name in names:
            monkeypatch.setattr(module, name, Compiling(getattr(module, name)))

    return replace


def empty(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(size, dtype=dtype)


@pytest.mark.parametrize(
    "width, heads, groups, inner",
    [(2048, 16, 2, 11008), (3584, 28, 4, 18944), (4096, 32, 8, 14336)],
    ids=["Qwen2.5-VL-3B", "Qwen2.5-VL-7B", "Llama-3-8B"],
)
def test_a_decoding_step(
    width: int, heads: int, groups: int, inner: int, compiling: Any, monkeypatch: Any
) -> None:
    from gesso.models.tokens import step_kernels

    compiling(step_kernels, "_projected", "_add_norm", "_attend")
    monkeypatch.setattr(step_kernels, "processors", lambda _: PROCESSORS)
    n, size, x = 64, 128, empty(64, width)
    total = (heads + 2 * groups) * size
    projected = step_kernels.projected(x, empty(total, width))
    keys, cos = empty(n, groups, 576, size), empty(n, size)
    lengths = empty(n, dtype=torch.long)
    norms = (empty(size), empty(size)) if width == 2048 else None  # as in Qwen3
    past = keys, keys, lengths, 0.1
    step_kernels.attend(projected, empty(total), norms, 1e-6, cos, cos, *past)
    change = step_kernels.projected(empty(n, heads * size), empty(width, heads * size))
    step_kernels.add_norm(x, change, empty(width), 1e-6, torch.bfloat16)
    gated = step_kernels.gated(x, empty(2 * inner, width))
    step_kernels.projected(gated, empty(width, inner))


def test_attention_of_one_token(compiling: Any) -> None:
    from gesso.models.tokens import kernels

    compiling(kernels, "_one_token")
    cache, new = empty(64, 4, 576, 128), empty(64, 4, 128)
    lengths = empty(64, dtype=torch.long)
    kernels.one_token(empty(64, 28, 128), new, new, cache, cache, lengths, 0.1)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_vocabulary(temperature: float, compiling: Any) -> None:
    from gesso.models.tokens import head_kernels

    compiling(head_kernels, "_scored")
    raw, allowed = empty(64, 151_936), empty(151_936, dtype=torch.bool)
    head_kernels.scored(raw, empty(64, dtype=torch.long), temperature, allowed)


def test_spilled_registers_are_found() -> None:
    from gesso.models.tokens import head_kernels

    raw, ids = empty(64, 151_936), empty(64, dtype=torch.long)
    numbers = empty(64, dtype=torch.float32)
    tensors = raw, ids, empty(151_936, dtype=torch.uint8), numbers, numbers, raw
    with pytest.raises(AssertionError, match="spilled"):
        Compiling(head_kernels._scored).launch(
            *tensors, 1.5, 151_936, AT_ONCE=2048, STAGES=3, num_warps=8, maxnreg=24
        )


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("n, longest, ends", [(64, 4096, 2), (512, 4096, 5), (64, 1, 0)])
def test_next_tokens(n: int, longest: int, ends: int, temperature: float, compiling: Any) -> None:
    from gesso.samplers import next_token_kernels
    from gesso.samplers.buffers import Buffers

    compiling(next_token_kernels, "_sum_blocks", "_add_tokens")
    raw, allowed = empty(n, 151_936), empty(151_936, dtype=torch.bool)
    buffers = Buffers(n, longest, torch.device("cpu"), range(ends))
    next_token_kernels.add_next_tokens(raw, temperature, allowed, buffers, 128)


@pytest.mark.parametrize("rank", [16, 32, 300])
def test_folding(rank: int, compiling: Any) -> None:
    from gesso.weights import folding_kernels

    compiling(folding_kernels, "_folded")
    a, b = empty(rank, 3072, dtype=torch.float32), empty(1536, rank, dtype=torch.float32)
    folding_kernels.folded(empty(1536, 3072), a, b, 2.0)


def test_gradients_of_repeated_keys(compiling: Any) -> None:
    from gesso.models.tokens import repeating_kernels

    compiling(repeating_kernels, "_summed")
    copies, starts = empty(4000, dtype=torch.long), empty(2001, dtype=torch.long)
    for heads in (2, 4, 8, 128):
        repeating_kernels.summed(empty(4000, heads, 128), copies, starts)


def test_rotation(compiling: Any) -> None:
    from gesso.models.flow import rotation_kernels

    compiling(rotation_kernels, "_rotated")
    rotation_kernels.rotated(empty(2, 1024, 24, 128), empty(1024, 64, 2), True)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("width", [64, 128])
def test_attention_of_compiled_networks(width: int, masked: bool, compiling: Any) -> None:
    from gesso.models.flow import attention_kernels

    compiling(attention_kernels, "_attention", "_deltas", "_key_grads", "_query_grads")
    x = empty(2, 24, 1229, width)
    mask = empty(2, 1, 1, 1229, dtype=torch.bool)
    out, logsumexp = attention_kernels.masked_attention(x, x, x, mask)
    given = x, x, x, mask if masked else None, out, logsumexp
    attention_kernels.attention_grads(x, *given)

"""Settings with which a run on a GPU is the same twice, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch


@cache
def kernel_options() -> dict[str, str | int | bool | Callable[..., object]]:
    """Options of `torch.compile`; empty if this version of torch has none. By default inductor
    times several configurations of a reduction and takes the fastest, so the order of summation
    can differ between processes. The environment variable TORCHINDUCTOR_DETERMINISTIC is not
    enough: dynamo resets it after the first graph (torch 2.11)."""
    from torch._inductor import config

    return {"deterministic": True} if hasattr(config, "deterministic") else {}


def settle_attention(device: torch.device) -> None:
    """Disables cuDNN's attention in the whole process, as its backward is not repeatable; compiled
    networks call its forward directly (models/flow/attention.py)."""
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


@contextmanager
def deterministic_algorithms(model: object) -> Iterator[None]:
    """Torch's deterministic operators, among them the backward of flash attention, for models with
    `strict = True`. Forward and backward of a compiled graph must run under the same setting, and
    passes under another one run another graph."""
    if not getattr(model, "strict", False):
        yield
        return
    torch.utils.deterministic.fill_uninitialized_memory = False  # by default NaN is written first
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)

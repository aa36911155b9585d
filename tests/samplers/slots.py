"""The state of slots between two turns of decoding, to compare implementations of a turn."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import torch
from torch import Tensor

from gesso.samplers.buffers import Buffers

ABOVE_ALL = 1 - 2**-53
"""The largest uniform number."""


def filled(n: int, longest: int, device: str = "cpu") -> Buffers:
    """Slots that run have no token, some, or all but one; idle slots have none, some or all. One
    slot has the smallest uniform numbers and one the largest: where the last id is improbable, the
    largest may give one of its neighbours."""
    half = longest // 2
    running = [(0, longest), (1, longest), (longest - 1, longest), (1, half), (half - 1, half)]
    idle = [(0, longest), (1, longest), (longest, longest), (half, half)]
    order = torch.randperm(n) % (len(running) + len(idle))
    count, limit = torch.tensor(running + idle)[order].T
    runs = order < len(running)
    uniform = torch.rand(n, longest, dtype=torch.float64)
    first, second = runs.nonzero()[:2]
    uniform[first], uniform[second] = 0.0, ABOVE_ALL
    values = {
        "tokens": torch.randint(50, (n, longest)),
        "logp": -torch.rand(n, longest),
        "uniform": uniform,
        "count": count,
        "limit": limit,
        "last": torch.randint(50, (n,)),
        "position": torch.randint(50, (n,)),
        "runs": runs,
        "report": torch.randint(50, (2, n)),
    }
    buffers = Buffers(n, longest, torch.device(device))
    for name, value in values.items():
        vars(buffers)[name].copy_(value)
    return buffers


def after(
    buffers: Buffers, end: Tensor, add_next_tokens: Callable[..., None], *given: object
) -> Buffers:
    """The buffers after a turn of one implementation; these stay as they are. `given`: logits,
    temperature and allowed ids."""
    turned = deepcopy(buffers)
    turned.end = end
    raw, temperature, allowed, *more = given
    add_next_tokens(raw, temperature, allowed, turned, *more)
    return turned


def end_ids(n: int, buffers: Buffers) -> Tensor:
    """n ids; the last of them is the last token of a slot that runs."""
    last = buffers.last[buffers.runs][0]
    return torch.arange(1 - n, 1, device=last.device) + last


def assert_equal(found: Buffers, expected: Buffers, rounding: float = 1e-5) -> None:
    """`rounding`: of log-probs."""
    for name, values in vars(expected).items():
        tolerance = rounding if name == "logp" else 0.0
        torch.testing.assert_close(vars(found)[name], values, rtol=tolerance, atol=tolerance)

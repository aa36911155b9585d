"""The state of slots between two turns of decoding, to compare implementations of a turn."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import torch
from torch import Tensor

from gesso.samplers.buffers import Buffers

ABOVE_ALL = 1 - 2**-53
"""The largest uniform number."""


class Slots:
    """Slots that run have no token, some, or all but one; idle slots have none, some or all. One
    slot has the smallest uniform numbers and one the largest: where the last id is improbable, the
    largest may give one of its neighbours."""

    def __init__(self, n: int, longest: int, device: str = "cpu") -> None:
        half = longest // 2
        running = [(0, longest), (1, longest), (longest - 1, longest), (1, half), (half - 1, half)]
        idle = [(0, longest), (1, longest), (longest, longest), (half, half)]
        order = torch.randperm(n) % (len(running) + len(idle))
        count, limit = torch.tensor(running + idle)[order].T
        random = {
            "tokens": torch.randint(50, (n, longest)),
            "logp": -torch.rand(n, longest),
            "uniform": torch.rand(n, longest, dtype=torch.float64),
            "last": torch.randint(50, (n,)),
            "position": torch.randint(50, (n,)),
        }
        self.buffers = Buffers(n, longest, torch.device(device))
        for name, values in (random | {"count": count, "limit": limit}).items():
            vars(self.buffers)[name].copy_(values)
        self.runs = (order < len(running)).to(device)
        first, second = self.runs.nonzero()[:2]
        self.buffers.uniform[first], self.buffers.uniform[second] = 0.0, ABOVE_ALL
        self.report = torch.randint(50, (2, n), device=device)

    @property
    def state(self) -> dict[str, Tensor]:
        return vars(self.buffers) | {"runs": self.runs, "report": self.report}

    def after(
        self,
        add_next_tokens: Callable[..., None],
        raw: Tensor,
        temperature: float,
        allowed: Tensor,
        end: Tensor,
        *more: int,
    ) -> Slots:
        """The slots after a turn of one implementation; these stay as they are."""
        slots = deepcopy(self)
        state = slots.buffers, slots.runs, end, slots.report
        add_next_tokens(raw, temperature, allowed, *state, *more)
        return slots

    def end_ids(self, n: int) -> Tensor:
        """n ids; the last of them is the last token of a slot that runs."""
        last = self.buffers.last[self.runs][0]
        return torch.arange(1 - n, 1, device=last.device) + last


def assert_equal(found: Slots, expected: Slots, rounding: float = 1e-5) -> None:
    """`rounding`: of log-probs."""
    for name, values in expected.state.items():
        tolerance = rounding if name == "logp" else 0.0
        torch.testing.assert_close(found.state[name], values, rtol=tolerance, atol=tolerance)

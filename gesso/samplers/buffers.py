"""What the decoding loop stores for every slot: the tokens sampled so far, and the uniform numbers
to sample the next ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from gesso.devices import HAS_TRITON
from gesso.models.repeatable import kernel_options


class Buffers:
    def __init__(self, slots: int, longest: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.tokens = zeros(slots, longest)
        self.logp = zeros(slots, longest, dtype=torch.float32)
        self.uniform = zeros(slots, longest, dtype=torch.float64)
        self.count = zeros(slots)  # tokens sampled
        self.limit = zeros(slots)  # tokens at which it leaves the slot
        self.last = zeros(slots)  # next input token
        self.position = zeros(slots)  # position of that token

    @property
    def of_turn(self) -> tuple[Tensor, ...]:
        """The last arguments of `add_tokens`."""
        return self.tokens, self.logp, self.count, self.limit, self.last, self.position

    def move(self, source: int, target: int) -> None:
        numbers = (self.count, self.limit, self.last, self.position)
        for buffer in (self.tokens, self.logp, self.uniform, *numbers):
            buffer[target] = buffer[source]


def add_tokens(
    new: Tensor,  # (slots,) sampled tokens
    new_logp: Tensor,
    at: Tensor,  # (slots, 1) their positions in the responses
    idle: Tensor,
    end: Tensor,
    report: Tensor,
    tokens: Tensor,  # from here on, of `Buffers`
    logp: Tensor,
    count: Tensor,
    limit: Tensor,
    last: Tensor,
    position: Tensor,
) -> None:
    """Adds the sampled tokens to the slots that are not idle; updates `idle` and `report`. In
    place."""
    runs = ~idle
    for buffer, values in ((tokens, new), (logp, new_logp)):
        buffer.scatter_(1, at, torch.where(runs[:, None], values[:, None], buffer.gather(1, at)))
    last.copy_(torch.where(runs, new, last))
    position += runs
    count += runs
    idle |= (new[:, None] == end).any(1) | (count == limit)
    report.copy_(torch.stack([torch.where(idle, count, 0), last]))


@cache
def add_tokens_on(device: str) -> Callable[..., None]:
    """`add_tokens`; on CUDA compiled, since its two dozen operations on a few numbers each would be
    kernels of their own."""
    if device != "cuda" or not HAS_TRITON:
        return add_tokens
    return torch.compile(add_tokens, dynamic=True, options=kernel_options())

"""What the decoding loop stores for every slot: the tokens sampled so far, and the uniform numbers
to sample the next ones."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Buffers:
    def __init__(
        self, slots: int, longest: int, device: torch.device, end: Iterable[int] = ()
    ) -> None:
        """`end`: the ids that end a response."""

        def zeros(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.tokens = zeros(slots, longest)
        self.logp = zeros(slots, longest, dtype=torch.float32)
        self.uniform = zeros(slots, longest, dtype=torch.float64)
        self.count = zeros(slots)  # tokens sampled
        self.limit = zeros(slots)  # tokens at which it leaves the slot
        self.last = zeros(slots)  # next input token
        self.position = zeros(slots)  # position of that token
        # Where every turn has the same shape:
        self.runs = zeros(slots, dtype=torch.bool)  # the other slots are idle
        self.end = torch.tensor(sorted(end), dtype=torch.long, device=device)
        # Lengths of the responses that do not run, else 0; and the tokens added last.
        self.report = zeros(2, slots)

    @property
    def next_column(self) -> Tensor:
        """(slots, 1): where the next token belongs; a full slot, which is idle, gives its last."""
        return self.count.clamp(max=self.tokens.shape[1] - 1)[:, None]

    def move(self, source: int, target: int) -> None:
        numbers = (self.count, self.limit, self.last, self.position)
        for buffer in (self.tokens, self.logp, self.uniform, *numbers):
            buffer[target] = buffer[source]

    def add_tokens(self, new: Tensor, new_logp: Tensor) -> None:
        """Adds a token, (slots,), to each slot that runs; updates which slots run, and the
        report."""
        at, runs = self.next_column, self.runs
        for buffer, values in ((self.tokens, new), (self.logp, new_logp)):
            kept = torch.where(runs[:, None], values[:, None], buffer.gather(1, at))
            buffer.scatter_(1, at, kept)
        self.last.copy_(torch.where(runs, new, self.last))
        self.position += runs
        self.count += runs
        runs &= ~((new[:, None] == self.end).any(1) | (self.count == self.limit))
        self.report.copy_(torch.stack([torch.where(runs, 0, self.count), self.last]))

"""Sequences of different lengths in batches of few tokens, without padding."""

from __future__ import annotations

from collections.abc import Sequence


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices in batches of at most `budget` tokens, by first-fit decreasing: the longest first,
    each into the first batch with room for it. A sequence longer than the budget has a batch of
    its own. Within a batch, and between batches by their first index, the order is that given."""
    assert budget >= 1
    batches: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = next((b for b, free in enumerate(room) if free >= lengths[i]), None)
        if at is None:
            batches.append([i])
            room.append(budget - lengths[i])
        else:
            batches[at].append(i)
            room[at] -= lengths[i]
    return sorted(sorted(batch) for batch in batches)

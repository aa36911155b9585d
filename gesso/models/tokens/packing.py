"""Packs sequences of different lengths into batches with a token budget, without padding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices in batches of at most `budget` tokens, by first-fit decreasing: the longest first,
    each into the first batch with enough space. A sequence longer than the budget gets a separate
    batch. The indices of a batch are sorted, and batches are sorted by their first index."""
    assert budget >= 1
    batches: list[list[int]] = []
    space: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = next((b for b, free in enumerate(space) if free >= lengths[i]), None)
        if at is None:
            batches.append([i])
            space.append(budget - lengths[i])
        else:
            batches[at].append(i)
            space[at] -= lengths[i]
    return sorted(sorted(batch) for batch in batches)


def pack_evenly(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Batches of similar lengths, so that workers that divide them finish together: the longest
    first, each into the batch with the fewest tokens. `even_count` of what `pack` makes; where one
    of them would exceed the budget, the batches of `pack`."""
    packed = pack(lengths, budget)
    count = even_count(len(packed), len(lengths))
    batches: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = tokens.index(min(tokens))
        batches[at].append(i)
        tokens[at] += lengths[i]
    fits = max(tokens, default=0) <= budget
    return sorted(sorted(batch) for batch in batches) if fits else packed


def even_count(count: int, sequences: int) -> int:
    """One batch more than an odd number above 1: most runs have 1, 2, 4 or 8 workers."""
    return count + count % 2 if 1 < count < sequences else count


def pack_responses(
    prompts: Sequence[int], row: Sequence[int], responses: Sequence[int], budget: int
) -> list[list[int]]:
    """Packs responses, response i after prompts[row[i]]. A batch contains a prompt once for all its
    responses, so these stay together as far as the budget allows."""
    bundles: list[list[int]] = []
    lengths: list[int] = []
    by_prompt = defaultdict(list)
    for i, r in enumerate(row):
        by_prompt[r].append(i)
    for r, members in by_prompt.items():
        space = budget - prompts[r]
        for part in pack([responses[i] for i in members], max(1, space)):
            bundles.append([members[i] for i in part])
            lengths.append(prompts[r] + sum(responses[i] for i in bundles[-1]))
    packed = pack_evenly(lengths, budget)
    return sorted(sorted(i for b in batch for i in bundles[b]) for batch in packed)

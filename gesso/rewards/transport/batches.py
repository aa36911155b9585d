"""Scores samples in concurrent batches."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from gesso.types import Sample, Score


async def score_batches(
    score: Callable[[Sequence[Sample]], Awaitable[list[Score]]],
    samples: Sequence[Sample],
    size: int,
) -> list[Score]:
    batches = [samples[i : i + size] for i in range(0, len(samples), size)]
    scored = await asyncio.gather(*(score(batch) for batch in batches))
    return [score for batch in scored for score in batch]

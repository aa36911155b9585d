"""A reward that runs on servers: `Workers` over HTTP."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gesso.config import RemoteEntry
from gesso.rewards.transport import protocol
from gesso.rewards.transport.pool import Pool, Unanswered
from gesso.types import Sample, Score, UserError


@dataclass(frozen=True)
class Protocol:
    path: str
    pack: Callable[[Sequence[Sample]], bytes]
    read: Callable[[Any, int], list[Score]]


PROTOCOLS = {
    "gesso": Protocol("/score", protocol.pack_score_request, protocol.read_scores),
    "openrlhf": Protocol("/get_reward", protocol.pack_get_reward, protocol.read_rewards),
}


class Remote:
    processes = 0
    hits = 0
    random = False  # until a server says so

    def __init__(self, entry: RemoteEntry) -> None:
        self.speaks = PROTOCOLS[entry.protocol]
        self.batch = entry.batch
        self.pool = Pool(
            [url.rstrip("/").removesuffix(self.speaks.path) for url in entry.urls],
            token_from(entry.token_env),
            entry.timeout,
            entry.retries,
            entry.in_flight,
        )

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        parts = [samples[i : i + self.batch] for i in range(0, len(samples), self.batch)]
        scored = await asyncio.gather(*(self._score(part) for part in parts))
        return [score for part in scored for score in part]

    async def _score(self, samples: Sequence[Sample]) -> list[Score]:
        """The scores of one request. However often it is sent, one answer counts, and whole."""
        try:
            body = await protocol.aside(protocol.weight_of(samples), self.speaks.pack, samples)
            answer = await self.pool.post(self.speaks.path, body)
            if isinstance(answer, dict) and answer.get("random") is True:
                self.random = True
            return self.speaks.read(answer, len(samples))
        except (Unanswered, UserError) as error:
            return [Score.failed(str(error))] * len(samples)

    async def close(self) -> None:
        await self.pool.close()


def token_from(variable: str | None) -> str | None:
    """Tokens stand in the environment, never in a recipe, which is copied into the run folder."""
    if variable is None:
        return None
    token = os.environ.get(variable, "").strip()
    if not token:
        raise UserError(f'token_env = "{variable}": there is no such environment variable')
    return token

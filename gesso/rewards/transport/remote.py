"""A reward that runs on servers, reached over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gesso.config import RemoteEntry
from gesso.rewards.transport import protocol
from gesso.rewards.transport.batches import score_batches
from gesso.rewards.transport.pool import NoResponse, ServerPool, token_from
from gesso.types import Sample, Score, UserError


@dataclass(frozen=True)
class HttpProtocol:
    path: str
    pack: Callable[[Sequence[Sample]], bytes]
    read: Callable[[Any, int], list[Score]]


PROTOCOLS = {
    "gesso": HttpProtocol("/score", protocol.pack_score_request, protocol.read_scores),
    "openrlhf": HttpProtocol("/get_reward", protocol.pack_get_reward, protocol.read_rewards),
}
GROUPS = HttpProtocol("/score", protocol.pack_group_request, protocol.read_scores)


class RemoteScorer:
    processes = 0
    hits = 0
    random = False  # until a server reports otherwise

    def __init__(self, entry: RemoteEntry, groupwise: bool = False) -> None:
        self.protocol = GROUPS if groupwise else PROTOCOLS[entry.protocol]
        self.groupwise = groupwise
        self.batch = entry.batch
        self.pool = ServerPool(
            [url.rstrip("/").removesuffix(self.protocol.path) for url in entry.urls],
            token_from(entry.token_env),
            entry.timeout,
            entry.retries,
            entry.in_flight,
        )

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        size = len(samples) if self.groupwise else self.batch
        return await score_batches(self._score, samples, size)

    async def _score(self, samples: Sequence[Sample]) -> list[Score]:
        """The scores of one request, which may be retried; only one response counts."""
        try:
            size = protocol.payload_bytes(samples)
            body = await protocol.offload(size, self.protocol.pack, samples)
            response = await self.pool.post(self.protocol.path, body)
            if isinstance(response, dict) and response.get("random") is True:
                self.random = True
            return self.protocol.read(response, len(samples))
        except (NoResponse, UserError) as error:
            return [Score.failed(str(error))] * len(samples)

    async def close(self) -> None:
        await self.pool.close()

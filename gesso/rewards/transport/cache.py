"""A cache of scores by content.

The key is a hash of everything a score may depend on: the reward and its options, the prompt with
all columns, messages and images, the sample's pixels, or its text and number of tokens. An image
file is identified by its path: files do not change during a run. `seed` and `where` are not part
of the key; a reward that depends on them must declare `random = True`.

Failures are not cached. If a sample is already being scored, the pending score is awaited, so a
request that is sent twice is computed once.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence

from gesso.rewards.base import Scorer
from gesso.rewards.wrapper import ScorerWrapper
from gesso.types import Prompt, Sample, Score

MAX_ENTRIES = 16_384


class CachedScorer(ScorerWrapper):
    """Wraps another scorer."""

    hits = 0

    def __init__(self, inner: Scorer, identity: str, entries: int = MAX_ENTRIES) -> None:
        super().__init__(inner)
        self.identity = identity.encode()
        self.entries = entries
        self._scores: OrderedDict[bytes, Score] = OrderedDict()
        self._pending: dict[bytes, asyncio.Future[Score]] = {}

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        keys = [self.key(sample) for sample in samples]
        results: dict[bytes, Score | asyncio.Future[Score]] = {}
        new: dict[bytes, Sample] = {}
        for key, sample in zip(keys, samples, strict=True):
            if key in self._scores:
                self._scores.move_to_end(key)
                results[key] = self._scores[key]
            elif key in self._pending:
                results[key] = self._pending[key]
            else:
                new[key] = sample
                self._pending[key] = asyncio.get_running_loop().create_future()
                results[key] = self._pending[key]
        self.hits += len(samples) - len(new)
        if new:
            await self._score(new)
        scores = {k: r if isinstance(r, Score) else await _result(r) for k, r in results.items()}
        return [scores[key] for key in keys]

    async def _score(self, new: dict[bytes, Sample]) -> None:
        try:
            scores = await self.inner.score(list(new.values()))
        except BaseException as error:
            for key in new:
                future = self._pending.pop(key)
                future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
                future.exception()  # marks it as retrieved: there may be no other waiter
            raise
        for key, score in zip(new, scores, strict=True):
            self._pending.pop(key).set_result(score)
            if score.error is None and not self.inner.random:
                self._scores[key] = score
        while len(self._scores) > self.entries:
            self._scores.popitem(last=False)

    def key(self, sample: Sample) -> bytes:
        prompt, image = sample.prompt, sample.image
        columns = json.dumps(prompt.columns, sort_keys=True, default=str)
        shape = "" if image is None else str(image.shape)
        text = "" if sample.text is None else f"{sample.tokens} tokens:{sample.text}"
        digest = hashlib.blake2b(digest_size=20)
        parts = [prompt.text, prompt.negative, columns, shape, text, _conversation(prompt)]
        for part in (self.identity, *(p.encode(errors="surrogatepass") for p in parts)):
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)
        if image is not None:
            digest.update(image.tobytes())
        return digest.digest()


def _conversation(prompt: Prompt) -> str:
    if not prompt.messages and not prompt.images:
        return ""
    images = [[p.path, hashlib.blake2b(p.data).hexdigest()] for p in prompt.images]
    return json.dumps([prompt.messages, images], sort_keys=True, default=str)


async def _result(pending: asyncio.Future[Score]) -> Score:
    """Shielded: a cancelled waiter must not cancel the others."""
    return await asyncio.shield(pending)

"""A cache of scores by content.

The key is a hash of everything a score may depend on: the reward and its options, the prompt with
all columns, messages and images, the sample's pixels, or its text and number of tokens. An image
file is identified by its path: files do not change during a run. `seed` and `where` are not part
of the key; a reward that depends on them must declare `random = True`.

Of a groupwise reward a whole group is one entry: its key is that of its members, in order.

Failures are not cached. If a sample is already being scored, the pending score is awaited, so a
request that is sent twice is computed once.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
from collections import OrderedDict
from collections.abc import Sequence

from gesso.rewards.base import Scorer
from gesso.rewards.wrapper import ScorerWrapper
from gesso.types import Prompt, Sample, Score

MAX_ENTRIES = 16_384

Scores = list[Score]  # of one sample, or of one group


class CachedScorer(ScorerWrapper):
    """Wraps another scorer."""

    hits = 0

    def __init__(self, inner: Scorer, identity: str, entries: int = MAX_ENTRIES) -> None:
        super().__init__(inner)
        self.identity = identity.encode()
        self.entries = entries
        self._scores: OrderedDict[bytes, Scores] = OrderedDict()
        self._pending: dict[bytes, asyncio.Future[Scores]] = {}

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        units = [samples] if self.groupwise else [[sample] for sample in samples]
        keys = [b"".join(self.key(sample) for sample in unit) for unit in units]
        results: dict[bytes, Scores | asyncio.Future[Scores]] = {}
        new: dict[bytes, Sequence[Sample]] = {}
        for key, unit in zip(keys, units, strict=True):
            if key in self._scores:
                self._scores.move_to_end(key)
                results[key] = self._scores[key]
            elif key in self._pending:
                results[key] = self._pending[key]
            else:
                new[key] = unit
                self._pending[key] = asyncio.get_running_loop().create_future()
                results[key] = self._pending[key]
        self.hits += len(samples) - sum(len(unit) for unit in new.values())
        if new:
            await self._score(new)
        scores = {k: r if isinstance(r, list) else await _result(r) for k, r in results.items()}
        return [score for key in keys for score in scores[key]]

    async def _score(self, new: dict[bytes, Sequence[Sample]]) -> None:
        try:
            scored = await self.inner.score([sample for unit in new.values() for sample in unit])
        except BaseException as error:
            for key in new:
                future = self._pending.pop(key)
                future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
                future.exception()  # marks it as retrieved: there may be no other waiter
            raise
        rest = iter(scored)
        for key, unit in new.items():
            scores = list(itertools.islice(rest, len(unit)))
            self._pending.pop(key).set_result(scores)
            if all(score.error is None for score in scores) and not self.inner.random:
                self._scores[key] = scores
        while len(self._scores) > self.entries:
            self._scores.popitem(last=False)

    def key(self, sample: Sample) -> bytes:
        prompt, image = sample.prompt, sample.image
        columns = json.dumps(prompt.columns, sort_keys=True, default=str)
        shape = "" if image is None else str(image.shape)
        fps = "" if sample.fps is None else str(sample.fps)
        text = "" if sample.text is None else f"{sample.tokens} tokens:{sample.text}"
        digest = hashlib.blake2b(digest_size=20)
        parts = [prompt.text, prompt.negative, columns, shape + fps, text, _conversation(prompt)]
        for part in (self.identity, *(p.encode(errors="surrogatepass") for p in parts)):
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)
        if image is not None:
            digest.update(image.tobytes())
        return digest.digest()


def _conversation(prompt: Prompt) -> str:
    if not prompt.messages and not prompt.images:
        return ""
    images = [[p.path, hashlib.blake2b(p.data).hexdigest()] for p in prompt.for_rewards]
    names = list(prompt.image_columns)
    return json.dumps([prompt.messages, images, names], sort_keys=True, default=str)


async def _result(pending: asyncio.Future[Scores]) -> Scores:
    """Shielded: a cancelled waiter must not cancel the others."""
    return await asyncio.shield(pending)

"""Scores by content: what was scored once is not scored again.

The key is a hash of all that a score may depend on: the reward and its options, the prompt with
all columns, messages and pictures, the sample's pixels, or its text and number of tokens. A picture
that lies in a file is known by its path: files do not change during a run. `seed` and `where` say
how a sample came about, not what it is; a reward that looks at them is random in this sense and
says `random = True`.
Failures are not kept. A sample that is being scored already is waited for, so a request that is
sent twice is worked on once.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence

from gesso.rewards.base import Scorer
from gesso.types import Prompt, Sample, Score

ENTRIES = 16_384


class Cached:
    """In front of another scorer."""

    def __init__(self, inner: Scorer, identity: str, entries: int = ENTRIES) -> None:
        self.inner = inner
        self.identity = identity.encode()
        self.entries = entries
        self.hits = 0
        self._known: OrderedDict[bytes, Score] = OrderedDict()
        self._coming: dict[bytes, asyncio.Future[Score]] = {}

    @property
    def processes(self) -> int:
        return self.inner.processes

    @property
    def random(self) -> bool:
        return self.inner.random

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        keys = [self.key(sample) for sample in samples]
        found: dict[bytes, Score | asyncio.Future[Score]] = {}
        new: dict[bytes, Sample] = {}
        for key, sample in zip(keys, samples, strict=True):
            if key in self._known:
                self._known.move_to_end(key)
                found[key] = self._known[key]
            elif key in self._coming:
                found[key] = self._coming[key]
            else:
                new[key] = sample
                self._coming[key] = asyncio.get_running_loop().create_future()
                found[key] = self._coming[key]
        self.hits += len(samples) - len(new)
        if new:
            await self._score(new)
        scores = {k: f if isinstance(f, Score) else await _result(f) for k, f in found.items()}
        return [scores[key] for key in keys]

    async def _score(self, new: dict[bytes, Sample]) -> None:
        try:
            scores = await self.inner.score(list(new.values()))
        except BaseException as error:
            for key in new:
                waiting = self._coming.pop(key)
                waiting.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
                waiting.exception()  # seen: nobody else may be waiting
            raise
        for key, score in zip(new, scores, strict=True):
            self._coming.pop(key).set_result(score)
            if score.error is None and not self.inner.random:
                self._known[key] = score
        while len(self._known) > self.entries:
            self._known.popitem(last=False)

    def key(self, sample: Sample) -> bytes:
        prompt, image = sample.prompt, sample.image
        columns = json.dumps(prompt.columns, sort_keys=True, default=str)
        shape = "" if image is None else str(image.shape)
        text = "" if sample.text is None else f"{sample.tokens} tokens:{sample.text}"
        digest = hashlib.blake2b(digest_size=20)
        parts = [prompt.text, prompt.negative, columns, shape, text, _asked(prompt)]
        for part in (self.identity, *(p.encode(errors="surrogatepass") for p in parts)):
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)
        if image is not None:
            digest.update(image.tobytes())
        return digest.digest()

    async def close(self) -> None:
        await self.inner.close()


def _asked(prompt: Prompt) -> str:
    if not prompt.messages and not prompt.images:
        return ""
    pictures = [[p.path, hashlib.blake2b(p.data).hexdigest()] for p in prompt.images]
    return json.dumps([prompt.messages, pictures], sort_keys=True, default=str)


async def _result(coming: asyncio.Future[Score]) -> Score:
    """Whoever gives up waiting must not take the answer from the others."""
    return await asyncio.shield(coming)

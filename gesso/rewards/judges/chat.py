"""Chat judges: a served vision-language model receives the image and a question; its response is
parsed.

Works with any server that has OpenAI's `/v1/chat/completions` (vLLM, SGLang, `transformers serve`,
…). Temperature 0, one request per sample or pair, many in flight. Parsing is strict: a response
with no number, two numbers, a number off the scale, or a truncated response is a failure, never a
score.

The requests go through transport's HTTP pool. Judges are the only rewards that use transport.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import os
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field, model_validator

from gesso.config import Strict, Urls
from gesso.rewards.base import Scorer
from gesso.rewards.transport.pool import NoResponse, ServerPool, token_from
from gesso.rewards.transport.protocol import base64_png, offload, payload_bytes
from gesso.types import Prompt, Sample, Score, UserError
from gesso.video_files import spread

MAX_TEXT_KEPT = 2_000  # characters of a response, kept as the score's text
_PLACEHOLDER = re.compile(r"\{(\w+)\}")  # {prompt}, {text}, {negative}, or a column of the row


FIRST_TOKEN: Mapping[str, Any] = {"max_tokens": 1, "logprobs": True, "top_logprobs": 20}
"""Options of a request for `first_token`."""


class Unanswered(Exception):
    """A judge gave no usable response; the message is the reason."""


class ServedJudge(Strict):
    """Base class of all judges. A judge sets `TEMPLATE`."""

    urls: Urls = Field([])
    """Addresses of OpenAI-compatible servers, with or without /v1. Empty: from an environment
    variable (see the reward)."""
    model: str = ""
    """Model name. Empty: from an environment variable (see the reward), otherwise the only model
    served."""
    prompt: str = ""
    """File with the question; "" uses the built-in one. Required for `judge` without `template`."""
    token_env: str | None = None
    """Environment variable with the bearer token."""
    timeout: float = Field(120.0, gt=0)
    """Seconds per attempt."""
    retries: int = Field(6, ge=0)
    """Further attempts after transport errors, 429 and 5xx."""
    in_flight: int = Field(32, ge=1)
    """Maximum concurrent requests per server."""
    max_tokens: int = Field(512, ge=1)
    """Maximum length of the judge's response."""
    max_frames: int = Field(8, ge=1)
    """Of a video without `frames`: how many frames the judge sees, spread evenly from the first to
    the last."""

    of_videos: ClassVar[bool] = True
    URL_ENV: ClassVar[str] = ""
    MODEL_ENV: ClassVar[str] = ""
    TEMPLATE: ClassVar[str] = ""

    OF_SAMPLES: ClassVar[tuple[str, ...]] = ("text",)  # placeholders that samples fill in

    @model_validator(mode="after")
    def _has_wording(self) -> ServedJudge:
        if not self.wording:
            raise ValueError('"prompt" is missing; expected a file with the question template')
        return self

    @property
    def wording(self) -> str:
        """The question, with placeholders."""
        return read_template(self.prompt) if self.prompt else self.TEMPLATE

    @abstractmethod
    def scorer(self) -> Scorer: ...

    def unfit(self, prompt: Prompt) -> str | None:
        known = {"prompt", "negative", *self.OF_SAMPLES, *prompt.columns}
        missing = [name for name in _PLACEHOLDER.findall(self.wording) if name not in known]
        return f'the question template requires a column "{missing[0]}"' if missing else None

    def filled(self, wording: str, prompt: Prompt, of_samples: Mapping[str, str]) -> str:
        values = {**prompt.columns, "prompt": prompt.text, "negative": prompt.negative}
        values |= of_samples
        return _PLACEHOLDER.sub(
            lambda match: str(values[match[1]]) if match[1] in values else match[0], wording
        )

    async def score_once(self, samples: Sequence[Sample]) -> list[Score]:
        scorer = self.scorer()
        try:
            return await scorer.score(samples)
        finally:
            await scorer.close()

    def servers(self) -> list[str]:
        from_env = os.environ.get(self.URL_ENV, "")
        urls = self.urls or [url.strip() for url in from_env.split(",") if url.strip()]
        if not urls:
            or_env = f", or the environment variable {self.URL_ENV}" if self.URL_ENV else ""
            raise UserError(
                f"{type(self).__name__} requires a served model: set its address, e.g. "
                f'urls = ["http://127.0.0.1:8000/v1"]{or_env}'
            )
        return [url.rstrip("/").removesuffix("/v1") for url in urls]


class ChatJudge(ServedJudge):
    """Base class of judges of single samples. A judge implements `read`."""

    def scorer(self) -> Scorer:
        return ChatScorer(self)

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return asyncio.run(self.score_once(samples))

    def question(self, sample: Sample) -> str:
        return self.filled(self.wording, sample.prompt, {"text": sample.text or ""})

    @abstractmethod
    def read(self, response: str, sample: Sample) -> Score: ...


class ChatClient:
    """Sends requests to a judge's servers from the event loop, without worker processes."""

    OPTIONS: ClassVar[Mapping[str, Any]] = {}  # of a request

    processes = 0
    hits = 0
    random = False

    def __init__(self, judge: ServedJudge) -> None:
        self.settings = judge
        self.pool = ServerPool(
            judge.servers(),
            token_from(judge.token_env),
            judge.timeout,
            judge.retries,
            judge.in_flight,
        )
        self._model = judge.model or os.environ.get(judge.MODEL_ENV, "")
        self._lookup: asyncio.Task[str] | None = None

    async def ask(self, question: str, samples: Sequence[Sample]) -> str:
        """The response to a question about samples of one prompt, whose images come first. Raises
        `Unanswered`."""
        return _content(await self.complete(question, samples))

    async def complete(self, question: str, samples: Sequence[Sample]) -> Any:
        """The server's answer, not checked."""
        try:
            model = await self._model_name()
            size = payload_bytes(samples)
            body = await offload(size, self._request, question, samples, model)
            return await self.pool.post("/v1/chat/completions", body)
        except (NoResponse, UserError) as error:  # UserError: also a missing image file
            raise Unanswered(str(error)) from error

    def _request(self, question: str, samples: Sequence[Sample], model: str) -> bytes:
        content = [_image(np.asarray(image.open())) for image in samples[0].prompt.images]
        for number, sample in enumerate(samples, 1):
            if sample.image is not None:
                content += self._shown(sample, number)
        content.append({"type": "text", "text": question})
        request: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": self.settings.max_tokens,
            "stream": False,
        }
        return json.dumps({**request, **self.OPTIONS}).encode()

    def _shown(self, sample: Sample, number: int) -> list[dict[str, Any]]:
        """An image, or frames of a video under a line that says what they are."""
        if not sample.is_video:
            return [_image(sample.pixels)]
        assert sample.fps is not None, "a video has fps"
        index = spread(len(sample.frames), self.settings.max_frames)
        times = ", ".join(f"{i / sample.fps:.2f}" for i in index)
        title = f"Video {number}, frames at {times} seconds:"
        return [{"type": "text", "text": title}, *(_image(sample.frames[i]) for i in index)]

    async def _model_name(self) -> str:
        """Looks the name up once for all samples; a failed lookup is repeated."""
        if self._model:
            return self._model
        if self._lookup is None:
            self._lookup = asyncio.ensure_future(self._look_up_model())
        lookup = self._lookup
        try:
            self._model = await asyncio.shield(lookup)
        finally:
            if self._lookup is lookup and lookup.done():
                self._lookup = None
        return self._model

    async def _look_up_model(self) -> str:
        response = await self.pool.get("/v1/models")
        rows = response["data"] if isinstance(response, dict) and "data" in response else []
        names = [row["id"] for row in rows if isinstance(row, dict) and "id" in row]
        if len(names) != 1:
            raise UserError(f"the server has {len(names)} models {names[:4]}; set `model`")
        return str(names[0])

    async def close(self) -> None:
        await self.pool.close()


class ChatScorer(ChatClient):
    """Runs a judge of single samples."""

    groupwise = False

    def __init__(self, judge: ChatJudge) -> None:
        super().__init__(judge)
        self.judge = judge

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        return list(await asyncio.gather(*(self._score(sample) for sample in samples)))

    async def _score(self, sample: Sample) -> Score:
        try:
            response = await self.ask(self.judge.question(sample), [sample])
            return self.judge.read(response, sample)
        except (Unanswered, UserError) as error:
            return Score.failed(str(error))


def _image(pixels: np.ndarray) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64_png(pixels)}"
    return {"type": "image_url", "image_url": {"url": url}}


def _content(completion: Any) -> str:
    """The text of the only choice; raises if it was truncated."""
    try:
        (choice,) = completion["choices"]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    except (TypeError, KeyError, ValueError, IndexError):
        raise Unanswered(
            f"returned {str(completion)[:120]!r}; expected a chat completion"
        ) from None
    if not isinstance(text, str):
        raise Unanswered(f"returned {str(text)[:80]!r}; expected text")
    if reason == "length":
        raise Unanswered(f"the response was truncated at max_tokens: …{text[-80:]!r}")
    return text


def first_token(completion: Any) -> list[tuple[str, float]]:
    """The likeliest first tokens, without spaces around them, and their probabilities."""
    try:
        tokens = completion["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        return [(str(each["token"]).strip(), math.exp(float(each["logprob"]))) for each in tokens]
    except (TypeError, KeyError, ValueError, IndexError, OverflowError):
        raise Unanswered(
            f"returned {str(completion)[:120]!r}; expected the log-probs of the first token"
        ) from None


@functools.lru_cache(maxsize=16)
def read_template(path: str) -> str:
    try:
        return Path(os.path.expanduser(path)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"prompt = {path!r} cannot be read: {error}") from None

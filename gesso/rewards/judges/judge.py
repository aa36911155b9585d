"""Judges: a served vision-language model is shown the picture, asked, and its answer is read.

Any server with OpenAI's `/v1/chat/completions` will do (vLLM, SGLang, `transformers serve`, …).
Temperature 0, one request a sample, many in flight, answers read strictly: one that says no number,
two numbers, a number off the scale, or was cut short is a failure, never a number.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field, model_validator

from gesso.config import Strict, Urls
from gesso.rewards.image import ocr
from gesso.rewards.transport.pool import Pool, Unanswered
from gesso.rewards.transport.protocol import aside, base64_png, weight_of
from gesso.rewards.transport.remote import token_from
from gesso.types import Prompt, Sample, Score, UserError

KEPT = 2_000  # characters of an answer, for people to look at
_PLACE = re.compile(r"\{(\w+)\}")  # {prompt}, {text}, {negative}, or a column of the row


class Asks(Strict):
    """What all judges share; `TEMPLATE` and `read` are their own."""

    urls: Urls = Field([])  # OpenAI-compatible servers, with or without /v1; none: from URL_ENV
    model: str = ""  # as the server names it; empty: from MODEL_ENV, else the only one it has
    prompt: str = ""  # file with another template
    token_env: str | None = None
    timeout: float = Field(120.0, gt=0)  # seconds of one attempt
    retries: int = Field(6, ge=0)
    in_flight: int = Field(32, ge=1)  # requests at a time, for each server
    max_tokens: int = Field(512, ge=1)  # of an answer

    URL_ENV: ClassVar[str] = ""
    MODEL_ENV: ClassVar[str] = ""
    TEMPLATE: ClassVar[str] = ""

    @model_validator(mode="after")
    def _has_template(self) -> Asks:
        if self.prompt:
            _file(self.prompt)
        elif not self.TEMPLATE:
            raise ValueError('"prompt" is missing; expected the file with the question to ask')
        return self

    @property
    def template(self) -> str:
        return _file(self.prompt) if self.prompt else self.TEMPLATE

    def unfit(self, prompt: Prompt) -> str | None:
        known = {"prompt", "negative", "text", *prompt.columns}
        missing = [name for name in _PLACE.findall(self.template) if name not in known]
        return f'its question needs a column "{missing[0]}"' if missing else None

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return asyncio.run(self._score_once(samples))

    async def _score_once(self, samples: Sequence[Sample]) -> list[Score]:
        bench = Bench(self)
        try:
            return await bench.score(samples)
        finally:
            await bench.close()

    def servers(self) -> list[str]:
        from_env = os.environ.get(self.URL_ENV, "")
        found = self.urls or [url.strip() for url in from_env.split(",") if url.strip()]
        if not found:
            or_env = f", or the environment variable {self.URL_ENV}" if self.URL_ENV else ""
            raise UserError(
                f"{type(self).__name__} asks a served model: give its address, as in "
                f'urls = ["http://127.0.0.1:8000/v1"]{or_env}'
            )
        return [url.rstrip("/").removesuffix("/v1") for url in found]

    def question(self, sample: Sample) -> str:
        places = {**sample.prompt.columns, "prompt": sample.prompt.text}
        places |= {"negative": sample.prompt.negative, "text": sample.text or ""}
        return _PLACE.sub(lambda m: str(places[m[1]]) if m[1] in places else m[0], self.template)

    @abstractmethod
    def read(self, answer: str, sample: Sample) -> Score: ...


class Judge(Asks):
    """Your own question: `prompt` is its file, `pattern` finds the number in the answer."""

    pattern: str = r"Final Score:\s*(-?\d+(?:\.\d+)?)"
    lowest: float = 1.0
    highest: float = 5.0  # the value is the number / highest

    @model_validator(mode="after")
    def _has_scale(self) -> Judge:
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ValueError(
                f"pattern {self.pattern!r} is no regular expression: {error}"
            ) from None
        if groups != 1:
            raise ValueError(
                f"pattern {self.pattern!r} has {groups} groups; expected 1, the number"
            )
        if not self.lowest < self.highest or self.highest <= 0:
            raise ValueError("lowest must lie below highest, and highest above 0")
        return self

    def read(self, answer: str, sample: Sample) -> Score:
        return rated(answer, self.pattern, self.lowest, self.highest)


class UnifiedReward(Asks):
    """UnifiedReward's pointwise score, 1 to 5 (Wang et al. 2025). value = score / 5. The question
    is ours, in the form of the one it was trained on: put that into a file and name it as `prompt`
    to ask word for word."""

    URL_ENV: ClassVar[str] = "UNIFIED_REWARD_VLLM_URL"
    MODEL_ENV: ClassVar[str] = "UNIFIED_REWARD_PATH"
    TEMPLATE: ClassVar[str] = (
        "Caption: [{prompt}]\n"
        "The picture was generated from this caption. Rate it by two things: whether it shows what "
        "the caption says (objects, their attributes and relations), and how good it looks (sharp, "
        "detailed, right colours, pleasing).\n"
        "List the elements of the caption, one a line, as 'element (type): value', where value is "
        "1 if the picture has it and 0 if not. Then end with 'Final Score:' and a number from 1 to "
        "5."
    )

    def read(self, answer: str, sample: Sample) -> Score:
        return rated(answer, r"Final Score:\s*([1-5](?:\.\d+)?)", 1, 5)


class QwenVlScore(Asks):
    """How good a picture looks to a general model: <Score> from 1 to 5. value = score / 5."""

    URL_ENV: ClassVar[str] = "QWEN_VL_VLLM_URL"
    MODEL_ENV: ClassVar[str] = "QWEN_VL_PATH"
    TEMPLATE: ClassVar[str] = (
        "You judge how good generated pictures look, on this scale:\n"
        "1: bad, broken or hard to make out. 2: poor, with plain flaws. 3: fair, ordinary. "
        "4: good, clear and well composed. 5: excellent, as by a professional.\n"
        "First weigh its strengths and flaws between <Thought> and </Thought>. Then give one "
        "number from 1 to 5 between <Score> and </Score>."
    )

    def read(self, answer: str, sample: Sample) -> Score:
        return rated(answer, r"<Score>\s*([1-5](?:\.\d+)?)\s*</Score>", 1, 5)


class QwenVlOcr(Asks):
    """What a served model reads in the picture, scored like `ocr`."""

    max_tokens: int = Field(256, ge=1)

    URL_ENV: ClassVar[str] = "QWEN_VL_OCR_VLLM_URL"
    MODEL_ENV: ClassVar[str] = "QWEN_VL_OCR_PATH"
    TEMPLATE: ClassVar[str] = (
        "Write down only the text that is in the image, without any description or formatting."
    )

    def unfit(self, prompt: Prompt) -> str | None:
        return super().unfit(prompt) or ocr.Ocr().unfit(prompt)

    def read(self, answer: str, sample: Sample) -> Score:
        return ocr.spelled(answer, sample.prompt)


class Bench:
    """Where a judge sits: its requests go out from the event loop, so it needs no process."""

    processes = 0
    hits = 0
    random = False

    def __init__(self, judge: Asks) -> None:
        self.judge = judge
        self.pool = Pool(
            judge.servers(),
            token_from(judge.token_env),
            judge.timeout,
            judge.retries,
            judge.in_flight,
        )
        self._model = judge.model or os.environ.get(judge.MODEL_ENV, "")
        self._finding: asyncio.Task[str] | None = None

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        return list(await asyncio.gather(*(self._score(sample) for sample in samples)))

    async def _score(self, sample: Sample) -> Score:
        try:
            model = await self._model_name()
            body = await aside(weight_of([sample]), self._request, sample, model)
            answer = _content(await self.pool.post("/v1/chat/completions", body))
            return self.judge.read(answer, sample)
        except (Unanswered, UserError, OSError) as error:  # OSError: a picture that is gone
            return Score.failed(str(error))

    def _request(self, sample: Sample, model: str) -> bytes:
        content: list[dict[str, Any]] = [{"type": "text", "text": self.judge.question(sample)}]
        seen = [base64_png(np.asarray(picture.open())) for picture in sample.prompt.images]
        seen += [] if sample.image is None else [base64_png(sample.image)]
        for i, png in enumerate(seen):
            url = f"data:image/png;base64,{png}"
            content.insert(i, {"type": "image_url", "image_url": {"url": url}})
        request = {
            "model": model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": self.judge.max_tokens,
            "stream": False,
        }
        return json.dumps(request).encode()

    async def _model_name(self) -> str:
        """Asked once, whoever comes first; a failure may be different next time."""
        if self._model:
            return self._model
        if self._finding is None:
            self._finding = asyncio.ensure_future(self._find_model())
        finding = self._finding
        try:
            self._model = await asyncio.shield(finding)
        finally:
            if self._finding is finding and finding.done():
                self._finding = None
        return self._model

    async def _find_model(self) -> str:
        answer = await self.pool.get("/v1/models")
        rows = answer["data"] if isinstance(answer, dict) and "data" in answer else []
        names = [row["id"] for row in rows if isinstance(row, dict) and "id" in row]
        if len(names) != 1:
            raise UserError(f"the server has {len(names)} models {names[:4]}; name one by `model`")
        return str(names[0])

    async def close(self) -> None:
        await self.pool.close()


def rated(answer: str, pattern: str, lowest: float, highest: float) -> Score:
    """number / highest. The number must stand there once, whole, and lie on the scale."""
    found = {m[1] for m in re.finditer(rf"(?:{pattern})(?!\.?\d)", answer)}
    told = answer[-200:].strip()
    if len(found) != 1:
        what = "says no score" if not found else f"says {len(found)} different scores"
        return Score.failed(f"the answer {what}: …{told!r}")
    try:
        number = float(found.pop())
    except ValueError as error:
        return Score.failed(f"the answer's score is no number: {error}")
    if not lowest <= number <= highest:
        return Score.failed(f"the answer's score {number:g} is not in [{lowest:g}, {highest:g}]")
    return Score(number / highest, text=answer[:KEPT])


def _content(answer: Any) -> str:
    """The text of the one choice, whole."""
    try:
        (choice,) = answer["choices"]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    except (TypeError, KeyError, ValueError, IndexError):
        raise UserError(f"answered {str(answer)[:120]!r}; expected a chat completion") from None
    if not isinstance(text, str):
        raise UserError(f"answered {str(text)[:80]!r}; expected text")
    if reason == "length":
        raise UserError(f"the answer was cut at max_tokens: …{text[-80:]!r}")
    return text


@functools.lru_cache(maxsize=16)
def _file(path: str) -> str:
    try:
        return Path(os.path.expanduser(path)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"prompt = {path!r} cannot be read: {error}") from None

"""What goes over HTTP between a run and a reward's server: JSON, pictures as base64. No pickle.

gesso:     POST /score       {"samples": [{"prompt", "negative", "columns", "where", "seed",
                             "image", "text", "images", "messages"}, …]} → {"scores": [{"value",
                             "parts", "text", "error"}, …]}. "image" is the sample, "images" are
                             the prompt's; what a prompt has not is not sent
openrlhf:  POST /get_reward  {"query": […], "prompts": […], "labels": […]} → {"rewards": […]}, as
                             OpenRLHF and LMM-R1 have it. A query is prompt and reply in one text;
                             a label is the row's answer. "images" (base64) is our addition, for
                             models that draw; the prompt's pictures stay at home.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import dataclasses
import io
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
from pydantic import Field

from gesso.config import Strict
from gesso.config.parsing import parse
from gesso.rewards.base import plain
from gesso.rewards.text import answers
from gesso.types import PICTURE_FORMATS, Picture, Prompt, Sample, Score, UserError

ASIDE = 2**17  # bytes, about 2 ms of work
MAX_PIXELS = 2**26  # of all pictures of a request together: one of 8192 × 8192
FORMATS = ("PNG", "JPEG", "WEBP")


T = TypeVar("T")


class SampleForm(Strict):
    prompt: str
    negative: str = ""
    columns: dict[str, Any] = Field({})
    where: str = ""
    seed: int = 0
    image: str | None = None
    text: str | None = None
    tokens: int | None = None
    images: list[str] = Field([])
    messages: list[dict[str, Any]] = Field([])


class ScoreRequest(Strict):
    samples: list[SampleForm] = Field(min_length=1)


class GetRewardRequest(Strict):
    """Unknown keys are refused here too: a server that ignores one would score something else."""

    query: list[str] = Field(min_length=1)
    prompts: list[str] | None = None
    labels: list[Any] | None = None
    images: list[str | None] | None = None


class ScoreForm(Strict):
    value: float | None = Field(allow_inf_nan=True)  # None without an error: it does not apply
    parts: dict[str, float] = Field({})
    text: str = ""
    error: str | None = None


async def aside(size: int, call: Callable[..., T], *arguments: Any) -> T:
    """`call`, in a thread where it takes so long that others would wait: coding `size` bytes. For
    less, handing over costs more than it saves."""
    if size < ASIDE:
        return call(*arguments)
    return await asyncio.to_thread(call, *arguments)


def weight_of(samples: Sequence[Sample]) -> int:
    made = sum(0 if s.image is None else s.image.nbytes for s in samples)
    shown = sum(len(p.data) or ASIDE for s in samples for p in s.prompt.images)  # a file to be read
    return made + shown


def png(image: np.ndarray) -> bytes:
    """Fast rather than small: it goes over a local network once."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def base64_png(image: np.ndarray) -> str:
    return base64.b64encode(png(image)).decode()


def picture(data: bytes) -> np.ndarray:
    """(height, width, 3) uint8 from a PNG, JPEG or WebP."""
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise UserError(f"a picture of {width}×{height} is above {MAX_PIXELS:,} pixels")
        return np.asarray(image.convert("RGB"))
    except UserError:
        raise
    except Exception as error:  # damaged files make Pillow fail in many ways
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"a picture cannot be read ({reason}); expected one of {FORMATS}") from None


def check_pixels(images: Iterable[bytes | None]) -> None:
    """Before any is decoded: a few kilobytes may hold a great many pixels."""
    from PIL import Image

    sizes = []
    for data in images:
        if data is not None:
            with contextlib.suppress(Exception), Image.open(io.BytesIO(data), formats=FORMATS) as i:
                sizes.append(i.width * i.height)  # what cannot be read is told when it is decoded
    total = sum(sizes)
    if len(sizes) > 1 and total > MAX_PIXELS:  # a single one is told by its sides
        raise UserError(
            f"the pictures of a request have {total:,} pixels, above {MAX_PIXELS:,}; send fewer"
        )


def prompt_picture(data: bytes) -> Picture:
    """Not decoded here, as few rewards look at it, but known to be one and not too large."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=PICTURE_FORMATS) as image:
            width, height = image.size
    except Exception as error:  # as above
        reason = f"{type(error).__name__}: {error}"
        told = f"expected one of {PICTURE_FORMATS}"
        raise UserError(f"a prompt's picture cannot be read ({reason}); {told}") from None
    if width * height > MAX_PIXELS:
        raise UserError(f"a prompt's picture of {width}×{height} is above {MAX_PIXELS:,} pixels")
    return Picture(data=data)


def from_base64(text: str) -> bytes:
    """With or without the head of a data URL."""
    try:
        return base64.b64decode(text.partition("base64,")[2] or text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise UserError(f"a picture is not base64: {error}") from None


# gesso


def pack_score_request(samples: Sequence[Sample]) -> bytes:
    rows = []
    for s in samples:
        image = None if s.image is None else base64_png(s.image)
        prompt = {"prompt": s.prompt.text, "negative": s.prompt.negative, "where": s.prompt.where}
        rest = {"columns": dict(s.prompt.columns), "seed": s.seed, "image": image, "text": s.text}
        if s.tokens is not None:
            rest["tokens"] = s.tokens
        if s.prompt.images:
            rest["images"] = [base64.b64encode(p.read()).decode() for p in s.prompt.images]
        if s.prompt.messages:
            rest["messages"] = s.prompt.messages
        rows.append(prompt | rest)
    return json.dumps({"samples": rows}).encode()


def read_score_request(body: bytes) -> list[Sample]:
    forms = parse(ScoreRequest, _object(body), "request").samples
    images = [None if form.image is None else from_base64(form.image) for form in forms]
    check_pixels(images)
    return [sample_of(form, image) for form, image in zip(forms, images, strict=True)]


def sample_of(form: SampleForm, image: bytes | None) -> Sample:
    images = tuple(prompt_picture(from_base64(text)) for text in form.images)
    messages = tuple(form.messages)
    prompt = Prompt(form.prompt, form.negative, form.columns, form.where, images, messages)
    seen = None if image is None else picture(image)
    return Sample(prompt, seen, form.seed, form.text, form.tokens)


def pack_scores(scores: Sequence[Score], random: bool = False) -> dict[str, Any]:
    """`random`: whoever asks must not remember them."""
    told = {"random": True} if random else {}
    return {"scores": [dataclasses.asdict(score) for score in scores], **told}


def read_scores(answer: Any, count: int) -> list[Score]:
    """Strict about the form; a value that is not finite fails its sample alone."""
    rows = _list_of(answer, "scores", count)
    return [_score(row) for row in rows]


def _score(row: Any) -> Score:
    if not isinstance(row, dict):
        return Score.failed(f"answered {row!r:.80}, not a score")
    try:
        form = parse(ScoreForm, row, "score")
    except UserError as error:
        return Score.failed(f"answered no score: {error}")
    return plain(Score(form.value, form.parts, form.text, form.error))


# openrlhf


def pack_get_reward(samples: Sequence[Sample]) -> bytes:
    request: dict[str, Any] = {
        "query": [s.prompt.text + (s.text or "") for s in samples],
        "prompts": [s.prompt.text for s in samples],
        "labels": [answers.label(s.prompt) for s in samples],
    }
    if any(s.image is not None for s in samples):
        images = [None if s.image is None else base64_png(s.image) for s in samples]
        request["images"] = images
    return json.dumps(request).encode()


def read_get_reward(body: bytes) -> list[Sample]:
    form = parse(GetRewardRequest, _object(body), "request")
    count = len(form.query)
    prompts = form.prompts if form.prompts is not None else [""] * count
    labels = form.labels if form.labels is not None else [None] * count
    images = form.images if form.images is not None else [None] * count
    for name, column in (("prompts", prompts), ("labels", labels), ("images", images)):
        if len(column) != count:
            raise UserError(f'request: {len(column)} "{name}" for {count} of "query"')
    pictures = [None if image is None else from_base64(image) for image in images]
    check_pixels(pictures)
    return [_of_query(*row) for row in zip(form.query, prompts, labels, pictures, strict=True)]


def _of_query(query: str, prompt: str, label: Any, image: bytes | None) -> Sample:
    columns = {} if label is None else {name: label for name in answers.LABELS}
    seen = None if image is None else picture(image)
    reply = query.removeprefix(prompt)
    text = None if seen is not None and not reply else reply
    return Sample(Prompt(prompt, columns=columns), seen, 0, text)


def read_rewards(answer: Any, count: int) -> list[Score]:
    return [_number(value) for value in _list_of(answer, "rewards", count)]


def _number(value: Any) -> Score:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return Score.failed(f"answered {value!r:.80}, not a number")
    return plain(value)


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise UserError(f"request: not JSON ({error})") from None
    if not isinstance(found, dict):
        raise UserError(f"request: expected an object, got a {type(found).__name__}")
    return found


def _list_of(answer: Any, key: str, count: int) -> list[Any]:
    if not isinstance(answer, dict) or not isinstance(answer.get(key), list):
        raise UserError(f'answered {str(answer)[:80]!r}; expected an object with a list "{key}"')
    if len(answer[key]) != count:
        raise UserError(f"answered {len(answer[key])} {key} for {count} samples")
    return answer[key]

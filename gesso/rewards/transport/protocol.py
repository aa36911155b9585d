"""The HTTP protocols between a run and a reward server: JSON, images as base64. No pickle.

gesso:     POST /score       {"samples": [{"prompt", "negative", "columns", "where", "seed",
                             "image", "text", "images", "messages", "image_columns"}, …]} →
                             {"scores": [{"value", "parts", "text", "error"}, …]}. "image" is the
                             sample, or "frames" and "fps" if it is a video; "images" are the
                             prompt's images, "image_columns" its mask and target_image by name;
                             absent fields are not sent. With "group": true the samples are one
                             whole group, for a groupwise reward
openrlhf:  POST /get_reward  {"query": […], "prompts": […], "labels": […]} → {"rewards": […]}, as
                             in OpenRLHF and LMM-R1. A query is prompt and response in one text;
                             a label is the row's answer. "images" (base64) is Gesso's extension
                             for image models; the prompt's images are not sent.
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
from gesso.image_files import MAX_PIXELS
from gesso.rewards.base import plain
from gesso.rewards.labels import LABEL_COLUMNS, label_of
from gesso.types import Prompt, PromptImage, Sample, Score, UserError

OFFLOAD_BYTES = 2**17  # about 2 ms of encoding
FORMATS = ("PNG", "JPEG", "WEBP")


T = TypeVar("T")


class SampleForm(Strict):
    prompt: str
    negative: str = ""
    columns: dict[str, Any] = Field({})
    where: str = ""
    seed: int = 0
    image: str | None = None
    frames: list[str] = Field([])
    fps: float | None = Field(None, gt=0)
    text: str | None = None
    tokens: int | None = None
    images: list[str] = Field([])
    messages: list[dict[str, Any]] = Field([])
    image_columns: dict[str, str] = Field({})


class ScoreRequest(Strict):
    samples: list[SampleForm] = Field(min_length=1)
    group: bool = False


class GetRewardRequest(Strict):
    """Unknown keys are rejected here too: ignoring one could change the scores."""

    query: list[str] = Field(min_length=1)
    prompts: list[str] | None = None
    labels: list[Any] | None = None
    images: list[str | None] | None = None


class ScoreForm(Strict):
    value: float | None = Field(allow_inf_nan=True)  # None without an error: does not apply
    parts: dict[str, float] = Field({})
    text: str = ""
    error: str | None = None


async def offload(size: int, call: Callable[..., T], *arguments: Any) -> T:
    """Runs `call`, in a thread if it encodes or decodes enough bytes (`size`) to block the event
    loop. For fewer, the thread costs more than it saves."""
    if size < OFFLOAD_BYTES:
        return call(*arguments)
    return await asyncio.to_thread(call, *arguments)


def payload_bytes(samples: Sequence[Sample]) -> int:
    pixels = sum(0 if s.image is None else s.image.nbytes for s in samples)
    prompt_images = (image for s in samples for image in s.prompt.for_rewards)
    return pixels + sum(len(i.data) or OFFLOAD_BYTES for i in prompt_images)  # or: a file to read


def encode_png(image: np.ndarray) -> bytes:
    """Favours speed over size: it is sent once, over a local network."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def base64_png(image: np.ndarray) -> str:
    return base64.b64encode(encode_png(image)).decode()


def decode_image(data: bytes) -> np.ndarray:
    """(height, width, 3) uint8 from a PNG, JPEG or WebP."""
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise UserError(f"an image of {width}×{height} exceeds {MAX_PIXELS:,} pixels")
        return np.asarray(image.convert("RGB"))
    except UserError:
        raise
    except Exception as error:  # damaged files make Pillow fail in many ways
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"cannot decode an image ({reason}); expected one of {FORMATS}") from None


def check_pixels(images: Iterable[bytes | None]) -> None:
    """Called before decoding: a few kilobytes may decompress to very many pixels."""
    from PIL import Image

    sizes = []
    for data in images:
        if data is not None:
            with contextlib.suppress(Exception), Image.open(io.BytesIO(data), formats=FORMATS) as i:
                sizes.append(i.width * i.height)  # invalid images fail later, in decode_image
    total = sum(sizes)
    if len(sizes) > 1 and total > MAX_PIXELS:  # decode_image checks a single image
        raise UserError(
            f"the images of a request have {total:,} pixels, more than {MAX_PIXELS:,}; send fewer"
        )


def prompt_image(data: bytes) -> PromptImage:
    """Checks format and size without decoding: few rewards use prompt images."""
    image = PromptImage(data=data)
    fault = image.fault(decode=False) if data else "expected a file, got 0 bytes"
    if fault:
        raise UserError(f"prompt image: {fault}")
    return image


def from_base64(text: str) -> bytes:
    """Decodes base64 with or without the prefix of a data URL."""
    try:
        return base64.b64decode(text.partition("base64,")[2] or text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise UserError(f"an image is not base64: {error}") from None


# gesso


@dataclasses.dataclass(frozen=True)
class Received:
    """The samples of a request; `group`: they are one whole group."""

    samples: Sequence[Sample]
    group: bool = False


def pack_group_request(samples: Sequence[Sample]) -> bytes:
    return pack_score_request(samples, group=True)


def pack_score_request(samples: Sequence[Sample], group: bool = False) -> bytes:
    rows = []
    for s in samples:
        image = None if s.image is None or s.is_video else base64_png(s.image)
        prompt = {"prompt": s.prompt.text, "negative": s.prompt.negative, "where": s.prompt.where}
        rest = {"columns": dict(s.prompt.columns), "seed": s.seed, "image": image, "text": s.text}
        if s.is_video:
            rest |= {"frames": [base64_png(frame) for frame in s.frames], "fps": s.fps}
        if s.tokens is not None:
            rest["tokens"] = s.tokens
        if s.prompt.images:
            rest["images"] = [_base64(image) for image in s.prompt.images]
        if s.prompt.image_columns:
            columns = s.prompt.image_columns.items()
            rest["image_columns"] = {key: _base64(image) for key, image in columns}
        if s.prompt.messages:
            rest["messages"] = s.prompt.messages
        rows.append(prompt | rest)
    return json.dumps({"samples": rows, **({"group": True} if group else {})}).encode()


def _base64(image: PromptImage) -> str:
    return base64.b64encode(image.read()).decode()


def read_score_request(body: bytes) -> Received:
    request = parse(ScoreRequest, _object(body), "request")
    forms = request.samples
    files = [sample_files(form) for form in forms]
    check_pixels(file for each in files for file in each)
    samples = [sample_of(form, each) for form, each in zip(forms, files, strict=True)]
    return Received(samples, request.group)


def sample_files(form: SampleForm) -> list[bytes]:
    """The image of a sample, or the frames of a video."""
    if bool(form.frames) != (form.fps is not None) or (form.frames and form.image is not None):
        raise UserError('request: a video has "frames" and "fps", and no "image"')
    images = form.frames if form.image is None else [form.image]
    return [from_base64(image) for image in images]


def sample_of(form: SampleForm, files: Sequence[bytes]) -> Sample:
    images = tuple(prompt_image(from_base64(text)) for text in form.images)
    others = {key: prompt_image(from_base64(text)) for key, text in form.image_columns.items()}
    prompt = Prompt(
        form.prompt,
        form.negative,
        form.columns,
        form.where,
        images,
        tuple(form.messages),
        image_columns=others,
    )
    decoded = [decode_image(file) for file in files]
    if len({frame.shape for frame in decoded}) > 1:
        raise UserError("request: the frames of a video differ in size")
    pixels = np.stack(decoded) if form.frames else decoded[0] if decoded else None
    return Sample(prompt, pixels, form.seed, form.text, form.tokens, fps=form.fps)


def pack_scores(scores: Sequence[Score], random: bool = False) -> dict[str, Any]:
    """`random`: the client must not cache the scores."""
    flag = {"random": True} if random else {}
    return {"scores": [dataclasses.asdict(score) for score in scores], **flag}


def read_scores(response: Any, count: int) -> list[Score]:
    """Strict about the structure; a non-finite value fails only its sample."""
    rows = _list_of(response, "scores", count)
    return [_score(row) for row in rows]


def _score(row: Any) -> Score:
    if not isinstance(row, dict):
        return Score.failed(f"returned {row!r:.80}, not a score")
    try:
        form = parse(ScoreForm, row, "score")
    except UserError as error:
        return Score.failed(f"returned an invalid score: {error}")
    return plain(Score(form.value, form.parts, form.text, form.error))


# openrlhf


def pack_get_reward(samples: Sequence[Sample]) -> bytes:
    if any(s.is_video for s in samples):
        raise UserError('protocol = "openrlhf" has no videos; use protocol = "gesso"')
    request: dict[str, Any] = {
        "query": [s.prompt.text + (s.text or "") for s in samples],
        "prompts": [s.prompt.text for s in samples],
        "labels": [label_of(s.prompt) for s in samples],
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
            raise UserError(
                f'request: expected {count} "{name}", one per "query", got {len(column)}'
            )
    files = [None if image is None else from_base64(image) for image in images]
    check_pixels(files)
    return [_sample_of_query(*row) for row in zip(form.query, prompts, labels, files, strict=True)]


def _sample_of_query(query: str, prompt: str, label: Any, image: bytes | None) -> Sample:
    columns = {} if label is None else {name: label for name in LABEL_COLUMNS}
    pixels = None if image is None else decode_image(image)
    response = query.removeprefix(prompt)
    text = None if pixels is not None and not response else response
    return Sample(Prompt(prompt, columns=columns), pixels, 0, text)


def read_rewards(response: Any, count: int) -> list[Score]:
    return [_number(value) for value in _list_of(response, "rewards", count)]


def _number(value: Any) -> Score:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return Score.failed(f"returned {value!r:.80}, not a number")
    return plain(value)


def _object(body: bytes) -> dict[str, Any]:
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise UserError(f"request: not JSON ({error})") from None
    if not isinstance(data, dict):
        raise UserError(f"request: expected an object, got a {type(data).__name__}")
    return data


def _list_of(response: Any, key: str, count: int) -> list[Any]:
    if not isinstance(response, dict) or not isinstance(response.get(key), list):
        raise UserError(f'returned {str(response)[:80]!r}; expected an object with a list "{key}"')
    if len(response[key]) != count:
        raise UserError(f"returned {len(response[key])} {key} for {count} samples")
    return response[key]

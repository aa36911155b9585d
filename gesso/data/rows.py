"""Converts one row of a table to a Prompt. The columns determine the format.

text-to-image         `prompt`
EasyR1                `problem` with an <image> for each of `images`
LMM-R1                `message`, JSON text: messages with embedded images
TRL, Flow-Factory     `prompt`, a text or messages, with `image` or `images`
VeRL-Omni             as TRL, with `negative_prompt` as messages
UniRL                 `media`, a list of {"modality": "image", "role", "uri"}

Editing data may have a `mask` and a `target_image`, which rewards receive as images.

This module checks the row itself; `images.check_images` checks its images.
"""

from __future__ import annotations

import datetime
import decimal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gesso.config import DataSource
from gesso.data import chat
from gesso.data.given import GivenColumns
from gesso.data.images import InvalidRow, load_clips, load_image, load_images, short
from gesso.types import Prompt, PromptImage, UserError, bad_text

PROMPT_COLUMNS = ("prompt", "problem", "message", "messages", "question")  # in order of precedence
MESSAGE_COLUMNS = ("message", "messages")
IMAGE_COLUMNS = ("images", "image")
MEDIA = "media"
OF_EDITS = ("mask", "target_image")  # images for rewards, in rows that have input images
COLUMN_OF_ROLE = {"target": "target_image", "mask": "mask"}  # of `media`; others are input images
MAX_DEPTH = 100  # of nested lists and objects

Row = dict[str, Any]


def prompt_of(
    row: Row,
    where: str,
    source: DataSource,
    folder: Path | None,
    chat_format: chat.ChatFormat = chat.PLAIN,
    given: GivenColumns | None = None,
) -> Prompt:
    """Raises InvalidRow for a fault of this row only, UserError for one that other rows share."""
    _check_texts(row)
    rest, samples = dict(row), list[Any]()
    if given is not None:
        name = source.column or next((c for c in PROMPT_COLUMNS if c in row), PROMPT_COLUMNS[0])
        split = given.split(row, name, where)
        rest, samples = split.rest, split.samples
    column = _prompt_column(rest, where, source)
    prompt, negative = rest.pop(column), rest.pop("negative_prompt", None) or ""
    _split_media(rest)
    attached = _attached(rest, where, source)
    of_edits = {key: rest.pop(key) for key in OF_EDITS if attached and key in rest}
    if not _is_prompt(prompt):
        raise InvalidRow(f'expected text as "{column}", got {short(prompt)}')
    if not _is_prompt(negative):
        raise UserError(f'{where}: expected text as "negative_prompt", got {short(negative)}')
    negative = _text_of(chat.parse_messages(negative, required=False))
    columns = {key: _plain(value, key, where) for key, value in rest.items()}
    _check_weight(columns.get("weight"), where)

    must_be_messages = source.column is None and column in MESSAGE_COLUMNS
    prompt = chat.parse_messages(prompt, required=must_be_messages)
    plain = isinstance(prompt, str) and chat.TAG not in prompt
    shown = _samples(samples, given, folder)
    clips = shown[:1] if given is not None and given.continued else ()
    first = tuple(clip for clip in clips if isinstance(clip, PromptImage))
    if plain and not attached and chat_format == chat.PLAIN:
        return Prompt(prompt, negative, columns, where, first, given=shown)
    conversation = chat.conversation(prompt)
    messages = chat.apply_format(conversation.messages, chat_format, columns, where)
    messages, images = chat.match_images(messages, conversation.images, attached)
    text = prompt if plain else chat.question(conversation.messages)
    loaded = load_images(images, folder) or first
    others = {key: load_image(value, key, folder) for key, value in of_edits.items() if value}
    return Prompt(text, negative, columns, where, loaded, tuple(messages), shown, others)


def _text_of(prompt: str | list[Any]) -> str:
    if isinstance(prompt, str):
        return prompt
    return chat.question(chat.conversation(prompt).messages)


def _split_media(rest: Row) -> None:
    """Replaces UniRL's `media` by `images` and, by their role, `target_image` and `mask`."""
    media = rest.get(MEDIA)
    if not isinstance(media, list) or any(name in rest for name in IMAGE_COLUMNS):
        return
    images = []
    for i, item in enumerate(rest.pop(MEDIA), 1):
        fields = item if isinstance(item, dict) else {}
        if fields.get("modality", "image") != "image" or not fields.get("uri"):
            raise InvalidRow(
                f'{MEDIA} {i}: expected {{"modality": "image", "role", "uri"}}, got {short(item)}'
            )
        column = COLUMN_OF_ROLE.get(str(fields.get("role")))
        if column is not None:
            rest[column] = fields["uri"]
        else:
            images.append(fields["uri"])
    rest[IMAGE_COLUMNS[0]] = images


def _samples(
    values: Sequence[Any], given: GivenColumns | None, folder: Path | None
) -> tuple[PromptImage | str, ...]:
    if given is not None and given.kind == "image":
        return load_images(values, folder)
    if given is not None and given.kind == "video":
        return load_clips(values, folder, given.frames, given.fps)
    for value in values:
        if not value:
            raise InvalidRow(f"expected a text to train on, got {short(value)}")
    return tuple(values)


def _check_texts(value: Any, column: str = "", depth: int = 0) -> None:
    """Raises if any text in the row cannot be encoded (NUL can), or if lists and objects are nested
    too deep to traverse."""
    if depth > MAX_DEPTH:
        raise InvalidRow(f'column "{column}" is nested more than {MAX_DEPTH} levels deep')
    if isinstance(value, str):
        fault = bad_text(value.replace("\0", ""))
        if fault is not None:
            raise InvalidRow(f'column "{column}" {fault}')
    elif isinstance(value, dict):
        for name, part in value.items():
            _check_texts(str(name), column)
            _check_texts(part, column or str(name), depth + 1)
    elif isinstance(value, list | tuple):
        for part in value:
            _check_texts(part, column, depth + 1)


def _prompt_column(row: Row, where: str, source: DataSource) -> str:
    names = PROMPT_COLUMNS if source.column is None else (source.column,)
    for name in names:
        if name in row:
            return name
    *most, last = (f'"{name}"' for name in names)
    expected = f"{', '.join(most)} or {last}" if most else last
    raise UserError(
        f"{where}: expected a text column {expected}, got {', '.join(row) or 'no columns'}; set "
        'the prompt column with column = "…" in [[data.train]] or [[data.eval]]'
    )


def _is_prompt(value: Any) -> bool:
    """A text, or a list of messages."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(message, dict) for message in value)
    return isinstance(value, str)


def _attached(rest: Row, where: str, source: DataSource) -> list[Any]:
    """Removes the image column from the row and returns its images."""
    names = IMAGE_COLUMNS if source.images is None else (source.images,)
    values = {name: rest.pop(name) for name in names if name in rest}
    filled = {name: value for name, value in values.items() if value not in (None, [], "")}
    if len(filled) > 1:
        raise UserError(
            f"{where}: images in two columns, {' and '.join(filled)}; choose one with images = "
            '"…" and skip the other with drop'
        )
    value: Any = next(iter(filled.values()), [])
    return value if isinstance(value, list) else [value]


def _check_weight(weight: Any, where: str) -> None:
    number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if weight is not None and not (number and 0 < weight <= sys.float_info.max):
        raise UserError(
            f'{where}: expected a positive number as "weight", got {short(weight)}; '
            "it is the sampling weight of the row relative to the others"
        )


def weight_of(prompt: Prompt) -> float:
    """The row's sampling weight relative to the others of its source: its column "weight"."""
    weight = prompt.columns.get("weight")
    return 1.0 if weight is None else float(weight)


def _plain(value: Any, column: str, where: str) -> Any:
    """The value as JSON types: rewards run in other processes, and nothing is pickled."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_plain(part, column, where) for part in value]
    if isinstance(value, dict):
        return {str(key): _plain(part, column, where) for key, part in value.items()}
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return float(value)
    raise UserError(
        f'{where}: column "{column}" contains {type(value).__name__}, which cannot be passed to '
        f'rewards; skip it with drop = ["{column}"], or set images = "{column}" if it contains '
        "images"
    )

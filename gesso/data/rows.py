"""One row of a table → Prompt. The row names its format by its columns.

a model that draws    `prompt`
EasyR1                `problem` with an <image> for each of `images`
LMM-R1                `message`, a text that is JSON: messages with their pictures in them
TRL                   `prompt`, a text or messages, with `image` or `images`

What a row says is checked here; whether its pictures can be decoded is `pictures.faults`.
"""

from __future__ import annotations

import datetime
import decimal
import sys
from pathlib import Path
from typing import Any

from gesso.config import DataSource
from gesso.data import chat
from gesso.data.pictures import Unsound, pictures, short
from gesso.types import Prompt, UserError, bad_text

PROMPTS = ("prompt", "problem", "message", "messages", "question")  # looked for in this order
MESSAGES = ("message", "messages")
IMAGES = ("images", "image")
MAX_DEPTH = 100  # lists and objects within each other

Row = dict[str, Any]


def prompt_of(
    row: Row, where: str, source: DataSource, folder: Path | None, form: chat.Form = chat.PLAIN
) -> Prompt:
    """Raises Unsound where the row alone is to blame, UserError where others will be like it."""
    _check_texts(row)
    rest = dict(row)
    column = _prompt_column(row, where, source)
    asked, negative = rest.pop(column), rest.pop("negative_prompt", None) or ""
    attached = _attached(rest, where, source)
    if not _may_be_asked(asked):
        raise Unsound(f'expected text as "{column}", got {short(asked)}')
    if not isinstance(negative, str):
        raise UserError(f'{where}: expected text as "negative_prompt", got {short(negative)}')
    columns = {key: _plain(value, key, where) for key, value in rest.items()}
    _check_weight(columns.get("weight"), where)

    asked = chat.parsed(asked, must=source.column is None and column in MESSAGES)
    bare = isinstance(asked, str) and chat.TAG not in asked
    if bare and not attached and form == chat.PLAIN:
        return Prompt(asked, negative, columns, where)
    talk = chat.conversation(asked)
    messages = chat.formed(talk.messages, form, columns, where)
    messages, given = chat.placed(messages, talk.pictures, attached)
    text = asked if bare else chat.question(talk.messages)
    return Prompt(text, negative, columns, where, pictures(given, folder), tuple(messages))


def _check_texts(value: Any, column: str = "", depth: int = 0) -> None:
    """Raises for a text that cannot be encoded, wherever in the row (NUL can), and for lists and
    objects that are nested too deep to be walked through."""
    if depth > MAX_DEPTH:
        raise Unsound(f'column "{column}" is nested more than {MAX_DEPTH} levels deep')
    if isinstance(value, str):
        fault = bad_text(value.replace("\0", ""))
        if fault is not None:
            raise Unsound(f'column "{column}" {fault}')
    elif isinstance(value, dict):
        for name, part in value.items():
            _check_texts(str(name), column)
            _check_texts(part, column or str(name), depth + 1)
    elif isinstance(value, list | tuple):
        for part in value:
            _check_texts(part, column, depth + 1)


def _prompt_column(row: Row, where: str, source: DataSource) -> str:
    names = PROMPTS if source.column is None else (source.column,)
    for name in names:
        if name in row:
            return name
    *most, last = (f'"{name}"' for name in names)
    expected = f"{', '.join(most)} or {last}" if most else last
    raise UserError(
        f"{where}: expected a text {expected}, found only {', '.join(row) or 'nothing'}; "
        'name the column of the prompts with column = "…" in [[data.train]] or [[data.eval]]'
    )


def _may_be_asked(value: Any) -> bool:
    """A text, or a list of messages."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(message, dict) for message in value)
    return isinstance(value, str)


def _attached(rest: Row, where: str, source: DataSource) -> list[Any]:
    """What the row's column of pictures holds; the column leaves the row."""
    names = IMAGES if source.images is None else (source.images,)
    held = {name: rest.pop(name) for name in names if name in rest}
    filled = {name: value for name, value in held.items() if value not in (None, [], "")}
    if len(filled) > 1:
        raise UserError(
            f"{where}: pictures in {' and '.join(filled)}; say which column with images = "
            '"…" and leave out the other with drop'
        )
    value: Any = next(iter(filled.values()), [])
    return value if isinstance(value, list) else [value]


def _check_weight(weight: Any, where: str) -> None:
    number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if weight is not None and not (number and 0 < weight <= sys.float_info.max):
        raise UserError(
            f'{where}: expected a positive number as "weight", got {short(weight)}; '
            "it says how often the row is drawn relative to the others"
        )


def weight_of(prompt: Prompt) -> float:
    """How often the row is drawn, relative to the others of its source: its column "weight"."""
    weight = prompt.columns.get("weight")
    return 1.0 if weight is None else float(weight)


def _plain(value: Any, column: str, where: str) -> Any:
    """What JSON can say: rewards run in other processes, and no pickle goes there."""
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
        f'{where}: column "{column}" holds {type(value).__name__}, which cannot be handed to '
        f'rewards; leave it out with drop = ["{column}"], or name it with images = "{column}" if '
        "it holds pictures"
    )

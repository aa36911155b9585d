"""Tables of a recipe → typed sections; every mistake is answered in one sentence."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Tag, ValidationError

from gesso.types import UserError

S = TypeVar("S", bound=BaseModel)


def parse(kind: type[S], data: Mapping[str, Any], where: str) -> S:
    """`data` as `kind`, or a UserError of one sentence that names the key, what is allowed and
    the nearest match."""
    try:
        return kind.model_validate(dict(data))
    except ValidationError as error:
        raise UserError(_sentence(kind, error, where)) from None


def _sentence(kind: type[BaseModel], error: ValidationError, where: str) -> str:
    first = error.errors(include_url=False)[0]
    path = [str(part) for part in first["loc"]]
    key = ".".join(_walk(kind, path)[1])
    got = first.get("input")
    if first["type"] == "extra_forbidden":
        known = _fields(kind, path[:-1])
        return f'{where}: unknown key "{key}"{nearest(path[-1], known)}'
    if first["type"] == "missing":
        return f'{where}: "{key}" is missing; {_expected(kind, path)}'
    if first["type"] == "value_error":
        reason = str(first["ctx"]["error"])
        return f"{where}: {key + ': ' if key else ''}{reason}"
    return f'{where}: "{key}" = {got!r} does not fit; {_expected(kind, path, first["msg"])}'


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean "x"? allowed: …`"""
    known = list(known)
    match = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    hint = f'; did you mean "{match[0]}"?' if match else ";"
    return f"{hint} allowed: {', '.join(known) or 'nothing'}"


def _expected(kind: type[BaseModel], path: list[str], message: str = "") -> str:
    fields = _fields_of(_walk(kind, path[:-1])[0])
    if path and path[-1] in fields:
        annotation = fields[path[-1]].annotation
        expected = f"expected {_describe(annotation)}"
    else:
        expected = "expected something else"
    return f"{expected} ({message[0].lower() + message[1:]})" if message else expected


def _describe(annotation: Any) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return "one of " + ", ".join(repr(a) for a in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("nothing" if a is type(None) else _describe(a) for a in args)
    if origin is not None:
        inner = ", ".join(_describe(a) for a in args)
        return f"a {origin.__name__} of {inner}"
    names = {int: "a whole number", float: "a number", str: "text in quotes", bool: "true or false"}
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"a table with {', '.join(annotation.model_fields)}"
    return names.get(annotation, str(annotation))


def _walk(kind: type[BaseModel], path: list[str]) -> tuple[type[BaseModel] | None, list[str]]:
    """The section at the end of a path of pydantic's; and the path as a recipe has it, without
    what pydantic calls the members of a union."""
    at: type[BaseModel] | None = kind
    members: dict[str, type[BaseModel]] = {}  # of the union that the last part of the path is
    written = []
    for part in path:
        if part in members:
            at, members = members[part], {}
            continue
        written.append(part)
        if part.isdigit():
            continue
        fields = _fields_of(at)
        found = fields[part].annotation if part in fields else None
        tagged = _tagged(found)
        candidates = [found, *typing.get_args(found), *tagged.values()]
        models = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        kinds = {m.model_fields["kind"].default: m for m in models if "kind" in m.model_fields}
        members = tagged | kinds
        at = models[0] if models else None
    return at, written


def _tagged(annotation: Any) -> dict[str, type[BaseModel]]:
    """Of a union of Annotated[Kind, Tag(…)], the kinds by their tags."""
    parts = [typing.get_args(part) for part in typing.get_args(annotation)]
    return {part[1].tag: part[0] for part in parts if len(part) == 2 and isinstance(part[1], Tag)}


def _fields_of(kind: type[BaseModel] | None) -> dict[str, Any]:
    return dict(kind.model_fields) if kind is not None else {}


def _fields(kind: type[BaseModel], path: list[str]) -> list[str]:
    return list(_fields_of(_walk(kind, path)[0]))

"""Tables of a recipe → typed sections; every error is reported in one sentence."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Tag, ValidationError

from gesso import imports
from gesso.types import UserError, bad_text

S = TypeVar("S", bound=BaseModel)
MAX_DEPTH = 32  # of nested tables and lists
MAX_LISTED = 12  # names that an error lists in full


def parse(kind: type[S], data: Mapping[str, Any], where: str) -> S:
    """`data` as `kind`, or a UserError with the key, the allowed values and the nearest match."""
    check_values(data, where)
    try:
        return kind.model_validate(dict(data))
    except ValidationError as error:
        raise UserError(_message(kind, error, where)) from None


def check_values(data: Any, where: str, path: tuple[str, ...] = ()) -> None:
    """Raises for values that are valid in TOML and Python but not in files, paths or tensors."""
    key = ".".join(path[:MAX_DEPTH])
    if len(path) > MAX_DEPTH:
        raise UserError(f'{where}: "{key}" is nested more than {MAX_DEPTH} levels deep')
    if isinstance(data, Mapping):
        for name, value in data.items():
            if fault := bad_text(name):
                raise UserError(f"{where}: a key {fault}: {name!r:.60}")
            check_values(value, where, (*path, name))
    elif isinstance(data, list | tuple):
        for i, value in enumerate(data):
            check_values(value, where, (*path, str(i)))
    elif isinstance(data, str) and (fault := bad_text(data)):
        raise UserError(f'{where}: "{key}" {fault}: {data!r:.60}')
    elif isinstance(data, int) and abs(data) >= 2**63:
        raise UserError(f'{where}: "{key}" = {data:.3e} does not fit into 64 bits')


def _message(kind: type[BaseModel], error: ValidationError, where: str) -> str:
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
    only_type = first["type"].endswith("_type") or first["type"] == "literal_error"
    message = "" if only_type else first["msg"]
    return f'{where}: "{key}" = {got!r:.80} is not valid; {_expected(kind, path, message)}'


def nearest(word: str, known: Iterable[str], listing: str = "") -> str:
    """`; did you mean "x"? allowed: …`. For a long list only the five nearest, and `listing`, the
    command that prints all of it."""
    known = list(known)
    match = difflib.get_close_matches(word, known, n=5, cutoff=0.5)
    hint = f'; did you mean "{match[0]}"?' if match else ";"
    if not listing or len(known) <= MAX_LISTED:
        return f"{hint} allowed: {', '.join(known) or '(none)'}"
    similar = f" similar: {', '.join(match[1:])};" if match[1:] else ""
    return f"{hint}{similar} `{listing}` lists all {len(known)}"


def _expected(kind: type[BaseModel], path: list[str], message: str = "") -> str:
    while path and _walk(kind, path)[1] == _walk(kind, path[:-1])[1]:  # a member of a union
        path = path[:-1]
    index = path[-1] if path and path[-1].isdigit() else None  # of a list's element
    field = path[:-1] if index is not None else path
    fields = _fields_of(_walk(kind, field[:-1])[0])
    if field and field[-1] in fields:
        annotation = fields[field[-1]].annotation
        if index is not None:
            annotation = _element(annotation, int(index))
        expected = f"expected {_describe(annotation)}"
    else:
        expected = "expected another value"
    limit = message.removeprefix("Input should be ")
    if limit.startswith(("a ", "an ")):  # "a finite number"
        return f"expected {limit}"
    if limit != message:  # "greater than 0"
        return f"{expected} {limit}"
    return f"{expected} ({message[0].lower() + message[1:]})" if message else expected


def _element(annotation: Any, index: int) -> Any:
    """The annotation of an element of a list or tuple, or of the list in a union."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        lists = [a for a in args if typing.get_origin(a) in (list, tuple)]
        return _element(lists[0], index) if lists else annotation
    if not args:
        return annotation
    return args[min(index, len(args) - 1)] if origin is tuple else args[0]


def _describe(annotation: Any) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _describe(args[0])
    if origin is Literal:
        return "one of " + ", ".join(repr(a) for a in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("no value" if a is type(None) else _describe(a) for a in args)
    if origin is tuple:
        return f"a list of {len(args)}: {', '.join(_describe(a) for a in args)}"
    if origin is list:
        return f"a list in which each element is {_describe(args[0])}"
    if origin is not None:
        return "a table"
    names = {int: "an integer", float: "a number", str: "a string in quotes", bool: "true or false"}
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"a table with {', '.join(annotation.model_fields)}"
    return names.get(annotation, str(annotation))


def _walk(kind: type[BaseModel], path: list[str]) -> tuple[type[BaseModel] | None, list[str]]:
    """The section at the end of a pydantic error path, and the path as written in a recipe, without
    the names that pydantic inserts for members of a union."""
    at: type[BaseModel] | None = kind
    members: dict[str, type[BaseModel]] = {}  # of the union at the last part of the path
    written = []
    named = False  # whether the part is a name that the user chose: a key of a table of sections
    for part in path:
        if part in members:
            at, members = members[part], {}
            continue
        written.append(part)
        if part.isdigit() or named:
            named = False
            continue
        fields = _fields_of(at)
        annotation = fields[part].annotation if part in fields else None
        tagged = _tagged(annotation)
        candidates = [annotation, *typing.get_args(annotation), *tagged.values()]
        models = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        kinds = {m.model_fields["kind"].default: m for m in models if "kind" in m.model_fields}
        members = tagged | kinds
        at = models[0] if models else None
        named = at is not None and typing.get_origin(annotation) is dict
    return at, written


def _tagged(annotation: Any) -> dict[str, type[BaseModel]]:
    """The kinds of a union of Annotated[Kind, Tag(…)], by their tags."""
    parts = [typing.get_args(part) for part in typing.get_args(annotation)]
    return {part[1].tag: part[0] for part in parts if len(part) == 2 and isinstance(part[1], Tag)}


def _fields_of(kind: type[BaseModel] | None) -> dict[str, Any]:
    return dict(kind.model_fields) if kind is not None else {}


def _fields(kind: type[BaseModel], path: list[str]) -> list[str]:
    return list(_fields_of(_walk(kind, path)[0]))


def named(table: Mapping[str, str], name: str, what: str) -> str:
    """The reference of a name in a recipe; a name with a colon is already a reference."""
    if imports.is_user_code(name):
        return name
    if name not in table:
        raise UserError(
            f'unknown {what} "{name}"{nearest(name, table)}, or "module:Name" for your code'
        )
    return table[name]

"""A recipe as nested tables: read from TOML, merged with its base, fitted to a GPU by a card table,
changed by overrides. `build.py` resolves the names in it."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gesso.config import PACKAGE
from gesso.config.parsing import check_values, nearest
from gesso.types import UserError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RECIPES = PACKAGE / "recipes"
NOTHING = "none"  # in a recipe with a base, or in an override, this value removes the key. No
# option of an algorithm may have it as a value
SHORT = {"on_symptom": "reward-hacking"}  # a string instead of the table sets this key of it


@dataclass(frozen=True)
class RecipeTables:
    """A recipe merged over its base, and its sizes: for a GPU of 24 GB ("24") or for 8 of them
    ("8x24"), the keys that differ.

    A recipe inherits the card tables of its base; its own table for the same size is merged over
    the inherited one, and "none" removes it. The order is base, recipe, card (inherited, own),
    key=value overrides.
    """

    name: str
    recipe: dict[str, Any]
    cards: dict[str, dict[str, Any]]

    @property
    def sizes(self) -> str:
        return ", ".join(self.cards)

    def for_card(self, size: int | str | None) -> dict[str, Any]:
        """The recipe's tables with one of its sizes merged in; None: without any."""
        if size is None:
            return self.recipe
        card = str(size)
        if not self.cards:
            raise UserError(
                f"recipe {self.name} has no card tables; leave --card out, or add a "
                f"[card.{card}] table to your own recipe file"
            )
        gpus, memory = parse_card(card) or (0, 0)
        if card in self.cards:
            table = dict(self.cards[card])
        elif str(memory) in self.cards:  # each GPU is used as a single one would be
            table = over(self.cards[str(memory)], {"cluster": {"workers": gpus}})
        else:
            raise UserError(
                f"recipe {self.name} has no settings for --card {card}; use one of {self.sizes}"
            )
        about = self.recipe.get("about", "")
        if isinstance(about, str) and isinstance(table.get("about"), str):
            table["about"] = f"{about} {card.replace('x', ' × ')} GB: {table['about']}".lstrip()
        return _merged(self.recipe, table)


class UnknownRecipe(UserError):
    """Neither the name of a bundled recipe nor a file."""


def bundled_recipes() -> dict[str, str]:
    """Name → description."""
    paths = sorted(RECIPES.glob("*.toml"), key=lambda path: path.stem)
    return {path.stem: read_toml(path)["about"] for path in paths}


def read_recipe(source: str, above: tuple[Path, ...] = ()) -> RecipeTables:
    """The tables of a recipe, merged with those of its `base`: a bundled name, or a file relative
    to the recipe."""
    path = _file(source, above)
    data = _expanded(read_toml(path))
    cards = _cards(data.pop("card", {}), path.stem)
    base = data.pop("base", None)
    if base is None:
        return RecipeTables(path.stem, data, _ordered(cards))
    if not isinstance(base, str):
        raise UserError(
            f'recipe {path.stem}: "base" = {base!r} is not valid; expected a name or a file'
        )
    below = read_recipe(base, (*above, path))
    inherited = without_judges(below.recipe, data)
    inherited.pop("expect", None)  # other settings, other results
    for card, table in below.cards.items():
        own = cards.get(card, {})
        cards[card] = own if own == NOTHING else over(table, own)
    return RecipeTables(path.stem, _merged(inherited, data), _ordered(cards))


def without_judges(recipe: Mapping[str, Any], changes: Collection[str]) -> dict[str, Any]:
    """A recipe before `changes` (keys at the top level): with other rewards, those of its
    evaluations and the figures that they are expected to have no longer fit."""
    unfit = {"expect"} if "eval_reward" in changes else set()
    unfit = {"expect", "eval_reward"} if "reward" in changes else unfit
    return {key: value for key, value in recipe.items() if key not in unfit}


def _file(source: str, above: tuple[Path, ...]) -> Path:
    if not source:
        raise UserError("the recipe's name is empty; `gesso recipes` lists the bundled recipes")
    path = RECIPES / f"{source}.toml"
    try:
        if not path.is_file():
            path = above[-1].parent / source if above else Path(source)
        is_dir = path.is_dir()
    except OSError as error:  # a name that is too long, a folder without permission
        raise UserError(f"recipe {source:.80}: {error.strerror}") from error
    if is_dir:
        raise UserError(
            f"recipe {path} is a folder; expected a TOML file or the name of a bundled recipe"
        )
    if not path.is_file() and path.suffix == ".toml":
        raise UserError(f"recipe {path}: no such file")
    if not path.is_file():
        known = bundled_recipes()
        raise UnknownRecipe(_renamed(source, known, bool(above)) or _unknown(source, known))
    if path in above:
        raise UserError(f"recipe {path.stem} has itself as its base; change or remove base")
    return path


def _unknown(source: str, known: Mapping[str, str]) -> str:
    known_names = nearest(source, known, "gesso recipes")
    return f'unknown recipe "{source}"{known_names}; a TOML file is also accepted'


def _renamed(source: str, known: Mapping[str, str], as_base: bool) -> str | None:
    """For the names that sizes had when each was a recipe, such as flux-pickscore-24gb."""
    old = re.fullmatch(r"(.+)-([1-9][0-9]{0,3})gb", source)
    if old is None or old[1] not in known or old[2] not in read_recipe(old[1]).cards:
        return None
    train = f"`gesso train {old[1]} --card {old[2]}`"
    use = f'base = "{old[1]}", and --card {old[2]} to train it' if as_base else train
    return f'unknown recipe "{source}"; use {use}'


def parse_card(size: str) -> tuple[int, int] | None:
    """The number of GPUs and GB of each, or None: "24" has 1 and 24, "8x24" 8 and 24."""
    known = re.fullmatch("(?:([1-9][0-9]{0,2})x)?([1-9][0-9]{0,3})", size)
    return None if known is None else (int(known[1] or 1), int(known[2]))


def _ordered(cards: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    ordered = sorted(cards, key=lambda card: parse_card(card) or (0, 0))
    return {card: cards[card] for card in ordered if cards[card] != NOTHING}


def _cards(tables: Any, name: str) -> dict[str, Any]:
    """The `[card.N]` tables of one file, checked as far as they can be without the recipe."""
    if not isinstance(tables, dict):
        raise UserError(
            f'recipe {name}: "card" = {tables!r:.80} is not valid; expected tables, [card.24]'
        )
    for key, table in tables.items():
        if parse_card(key) is None:
            raise UserError(
                f'recipe {name}: "card.{key:.40}" is not a size; expected GB of GPU memory, a '
                "positive whole number as in [card.24], or [card.8x24] for 8 GPUs"
            )
        if table == NOTHING:
            continue
        if not isinstance(table, dict):
            raise UserError(
                f'recipe {name}: "card.{key}" = {table!r:.80} is not valid; expected a table of '
                f"keys that differ, [card.{key}]"
            )
        for unfit in ("card", "base"):
            if unfit in table:
                raise UserError(
                    f'recipe {name}: "card.{key}.{unfit}" is not allowed; write "{unfit}" at the '
                    "top level of the recipe"
                )
    return dict(tables)


def _merged(base: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = over(base, changes)
    kept = {"algorithm": merged["algorithm"]} if "algorithm" in merged else {}
    return without_nothing(merged) | kept  # `build.algorithm` handles "none" in this table


def read_toml(path: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except RecursionError:
        raise UserError(f"{path}: tables or lists are nested too deeply") from None
    except ValueError as error:  # not UTF-8, not TOML, a number with thousands of digits
        raise UserError(f"{path} is not valid TOML: {error}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    check_values(content, str(path))
    return content


def over(base: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`changes` merged into `base`, table by table. A table with another name or kind takes no
    options from the base."""
    if any(changes.get(key, base.get(key)) != base.get(key) for key in ("name", "kind")):
        return dict(changes)
    merged = dict(base)
    for key, value in changes.items():
        below = base.get(key)
        both_tables = isinstance(value, dict) and isinstance(below, dict)
        merged[key] = over(below, value) if both_tables else value  # type: ignore[arg-type]
    return merged


def without_nothing(table: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: without_nothing(value) if isinstance(value, dict) else value
        for key, value in table.items()
        if value != NOTHING
    }


def changed(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A recipe's tables with `key=value` overrides applied."""
    for override in overrides:
        _put(data, override)
    return data


def _put(data: dict[str, Any], override: str) -> None:
    """Sets `a.b=value` in nested tables; a number in the key is a list index, `none` removes the
    key."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f'override "{override}": expected key=value, e.g. optimizer.lr=1e-4')
    if key.strip() in SHORT and isinstance(_value(text), str) and text.strip() != NOTHING:
        key = f"{key.strip()}.{SHORT[key.strip()]}"
    *path, last = key.strip().split(".")
    node: Any = data
    for part in path:
        node = _child(node, part, key)
    if isinstance(node, list):
        if not last.isdigit() or int(last) >= len(node):
            raise UserError(
                f'override "{override}": {".".join(path)} is a list of {len(node)}; expected an '
                f"index from 0 to {len(node) - 1}, got {last}"
            )
        node[int(last)] = _value(text)
    elif not isinstance(node, dict):
        raise UserError(f'override "{override}": {".".join(path)} is a value, not a table')
    elif text.strip() == NOTHING and path[:1] != ["algorithm"]:
        node.pop(last, None)
    else:
        node[last] = _value(text)


def _expanded(data: dict[str, Any]) -> dict[str, Any]:
    """Values that are short for a table, as tables, so that other keys can be added to them."""
    short = {key: {SHORT[key]: data[key]} for key in SHORT if isinstance(data.get(key), str)}
    return data | {key: table for key, table in short.items() if data[key] != NOTHING}


def _child(node: Any, part: str, key: str) -> Any:
    if isinstance(node, list) and part.isdigit() and int(part) < len(node):
        return node[int(part)]
    if isinstance(node, dict):
        return node.setdefault(part, {})
    raise UserError(f'override "{key}": there is no table or list entry "{part}"')


def _value(text: str) -> Any:
    """A TOML value if it parses, else a string: `lr=1e-4`, `name=ocr`, `betas=[0.9, 0.99]`."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text

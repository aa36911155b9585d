"""Names in a recipe → objects. The only tables of names; user code comes in as "module:Name"."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gesso.config import PACKAGE, Recipe, nearest, parse
from gesso.rewards import base
from gesso.rewards.compose import Weighted
from gesso.rewards.service import RewardService
from gesso.rewards.workers import Workers
from gesso.types import Prompt, UserError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from gesso.algorithms.base import Algorithm
    from gesso.models.flow.base import FlowModel

ALGORITHMS = {
    "flow-grpo": "gesso.algorithms.flow_grpo:FlowGRPO",
    "diffusion-nft": "gesso.algorithms.diffusion_nft:DiffusionNFT",
}
MODELS = {"sd3": "gesso.models.flow.sd3:SD3"}
REWARDS = {
    "ocr": "gesso.rewards.ocr:Ocr",
    "jpeg-compressibility": "gesso.rewards.jpeg:JpegCompressibility",
}
RECIPES = PACKAGE / "recipes"


def recipe(source: str, overrides: Sequence[str] = ()) -> Recipe:
    """A bundled recipe's name or a TOML file, with `key=value` overrides by dotted keys."""
    path = RECIPES / f"{source}.toml"
    if not path.is_file():
        path = Path(source)
    if not path.is_file():
        raise UserError(f'no recipe "{source}"{nearest(source, bundled_recipes())}, or a TOML file')
    data = read_toml(path)
    for override in overrides:
        _override(data, override)
    return recipe_from(data, f"recipe {path.stem}")


def recipe_from(data: Mapping[str, Any], where: str = "recipe") -> Recipe:
    """The recipe with every option of its algorithm and rewards filled in and checked."""
    found = parse(Recipe, data, where)
    chosen = algorithm(found)
    options = [
        reward.model_dump() if isinstance(reward := _reward(e), base.Strict) else e.options
        for e in found.reward
    ]
    guidance = chosen.spec(0, found.model.height, found.model.width).guidance
    watched = found.eval.model_dump()
    filled = found.model_dump() | {
        "eval": watched | ({"guidance": guidance} if watched["guidance"] is None else {}),
        "algorithm": chosen.model_dump(),  # type: ignore[attr-defined]
        "reward": [
            {"name": e.name, "weight": e.weight, "workers": e.workers, **o}
            for e, o in zip(found.reward, options, strict=True)
        ],
    }
    return parse(Recipe, filled, where)


def bundled_recipes() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def algorithm(found: Recipe) -> Algorithm:
    entry = found.algorithm
    kind = _import(_reference(ALGORITHMS, entry.name, "algorithm"))
    options = {"name": entry.name, **entry.options}
    return parse(kind, options, f"algorithm {entry.name}")


def model(found: Recipe) -> FlowModel:
    kind = _import(_reference(MODELS, found.model.name, "model"))
    return kind(found.model, found.seed)


@dataclass(frozen=True)
class Rewards:
    service: RewardService
    readers: Mapping[str, base.Reward]

    def unfit(self, prompt: Prompt) -> str | None:
        """Why some reward cannot score this prompt, or None."""
        for name, reward in self.readers.items():
            if reason := reward.unfit(prompt):
                return f"{name}: {reason}"
        return None


def rewards(found: Recipe) -> Rewards:
    readers = {entry.name: _reward(entry) for entry in found.reward}
    weighted = [
        Weighted(
            entry.name,
            entry.weight,
            Workers(_reference(REWARDS, entry.name, "reward"), entry.options, entry.workers),
        )
        for entry in found.reward
    ]
    return Rewards(RewardService(weighted), readers)


def _reward(entry: Any) -> base.Reward:
    return base.load(_reference(REWARDS, entry.name, "reward"), entry.options)


def _reference(table: Mapping[str, str], name: str, what: str) -> str:
    if ":" in name:
        return name
    if name not in table:
        raise UserError(f'no {what} "{name}"{nearest(name, table)}, or "module:Name" of your own')
    return table[name]


def _import(reference: str) -> type:
    module, _, name = reference.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UserError(f'"{reference}" cannot be imported: {error}') from error


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from error


def _override(data: dict[str, Any], override: str) -> None:
    """`a.b=value` into nested tables; a number in the key picks from a list, `none` removes."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f'override "{override}": expected key=value, as in optimizer.lr=1e-4')
    *path, last = key.strip().split(".")
    node: Any = data
    for part in path:
        node = _child(node, part, key)
    if isinstance(node, list):
        if not last.isdigit() or int(last) >= len(node):
            raise UserError(f'override "{override}": {".".join(path)} has {len(node)} entries')
        node[int(last)] = _value(text)
    elif not isinstance(node, dict):
        raise UserError(f'override "{override}": {".".join(path)} is a value, not a table')
    elif text.strip() == "none":
        node.pop(last, None)
    else:
        node[last] = _value(text)


def _child(node: Any, part: str, key: str) -> Any:
    if isinstance(node, list) and part.isdigit() and int(part) < len(node):
        return node[int(part)]
    if isinstance(node, dict):
        return node.setdefault(part, {})
    raise UserError(f'override "{key}": there is no "{part}" to set something in')


def _value(text: str) -> Any:
    """A TOML value where it is one, else text: `lr=1e-4`, `name=ocr`, `betas=[0.9, 0.99]`."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text

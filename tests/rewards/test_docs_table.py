"""The table in docs/reference/rewards.md lists every reward, with every option and its default."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic_core import PydanticUndefined

from gesso import imports
from gesso.config.tables import tomllib
from gesso.rewards import assembly
from gesso.rewards.image.networks import NetworkReward
from gesso.rewards.judges.chat import ChatJudge

PAGE = Path(__file__).parents[2] / "docs" / "rewards.md"


def rows() -> dict[str, list[str]]:
    """Reward → the cells of its row; rows with a column of options only."""
    cells_by_reward = {}
    for table in PAGE.read_text(encoding="utf-8").split("\n\n"):
        if table.startswith("| reward | value | range | needs | options | source |"):
            for line in table.splitlines()[2:]:
                cells = re.split(r"(?<!\\)\|", line.strip("|"))
                for name in re.findall(r"`([\w-]+)`", cells[0]):
                    cells_by_reward[name] = cells
    return cells_by_reward


def local() -> list[str]:
    kinds = {name: imports.load(reference, "model") for name, reference in assembly.REWARDS.items()}
    return [name for name, kind in kinds.items() if not issubclass(kind, ChatJudge)]


@pytest.mark.parametrize("name", local())
def test_options_and_defaults(name: str) -> None:
    kind = imports.load(assembly.REWARDS[name], "model")
    cells = rows()[name]
    assert ("◈" in cells[0]) == issubclass(kind, NetworkReward)
    shared = NetworkReward.model_fields if issubclass(kind, NetworkReward) else {}
    documented: dict[str, object] = dict.fromkeys(re.findall(r"`(\w+)`, required", cells[4]))
    for key, value in re.findall(r"`(\w+)` = `([^`]+)`", cells[4]):
        documented[key] = tomllib.loads(f"x = {value}")["x"]
    assert documented == {
        key: None if field.default is PydanticUndefined else field.default
        for key, field in kind.model_fields.items()
        if key not in shared
    }


def test_no_row_is_left_over() -> None:
    assert set(rows()) <= set(assembly.REWARDS)

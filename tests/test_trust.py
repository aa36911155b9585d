"""What docs/explanation/security.md states: whose code runs when, and where modules are found."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tomli_w

import gesso
from gesso import build, cli, families, imports
from gesso.config import TokenModel
from gesso.families import classes
from gesso.rewards.transport.workers import WorkerScorer
from gesso.track.run_folder import RunFolder
from gesso.types import Prompt, Sample, UserError
from gesso.viewer.playground import PlaygroundRequest
from gesso.viewer.studio import Studio
from tests import tokens
from tests.test_studio import PROMPT, Heard
from tests.use import runs

SHADOWS = ("random", "math", "json", "types", "torch", "numpy", "typing", "re", "site")
NOTICE = 'runs code that is not part of Gesso: reward "mine:reward"'
MARK = "imported.txt"  # a module that leaves it here was imported
USER_MODULE = f"""
open({MARK!r}, "a").write(__name__ + "\\n")
def reward(samples): return [0.5 for _ in samples]
"""


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with a module of the user's, as the CLI would see it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", imports.import_path())
    (tmp_path / "mine.py").write_text(USER_MODULE)
    yield tmp_path
    sys.modules.pop("mine", None)


@pytest.fixture
def foreign_run(recipe_data: dict, workplace: Path) -> RunFolder:
    """A run that somebody else has made, with a reward of theirs."""
    data = recipe_data | {"model": recipe_data["model"] | {"name": "sd3"}}
    made = runs.make(data, workplace / "runs" / "theirs")
    config = made.path / "config.toml"
    config.write_text(config.read_text().replace('"jpeg-compressibility"', '"mine:reward"'))
    return made


def shadowed(folder: Path) -> None:
    for name in SHADOWS:
        (folder / f"{name}.py").write_text("X = 1\n")


@pytest.mark.parametrize("command", [["gesso"], [sys.executable, "-m", "gesso"]])
def test_files_named_like_standard_modules_break_no_command(
    command: list[str], tmp_path: Path
) -> None:
    for name in {*SHADOWS} - {"re", "typing", "types", "site"}:  # -m imports those before us
        (tmp_path / f"{name}.py").write_text("X = 1\n")
    if command == ["gesso"]:
        shadowed(tmp_path)
        command = [str(Path(sys.executable).with_name("gesso"))]
    done = subprocess.run([*command, "recipes"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("demos"), done.stderr


def test_workers_find_their_modules_beside_files_named_like_standard_ones(workplace: Path) -> None:
    shadowed(workplace)
    workers = WorkerScorer("mine:reward", {}, 1)
    sample = Sample(Prompt("a"), np.zeros((8, 8, 3), np.uint8), 0)

    async def scored() -> list:
        try:
            return await workers.score([sample])
        finally:
            await workers.close()

    (score,) = asyncio.run(scored())
    assert score.error is None and score.value == 0.5


def test_a_module_that_is_shadowed_gets_one_sentence(workplace: Path) -> None:
    (workplace / "math.py").write_text("def score(samples): return [1.0] * len(samples)\n")
    with pytest.raises(UserError, match=r'math\.py in the working folder .* write "math\.py:Name"'):
        imports.load("math:score", "reward")
    assert imports.load("math.py:score", "reward")([0, 0]) == [1.0, 1.0]
    assert imports.load("math:sqrt", "reward")(4) == 2  # Python's own, as named
    assert imports.load("math.py:score", "reward") is imports.load("./math.py:score", "reward")


BROKEN_MODULES = [
    ("nothing_here:f", "No module named 'nothing_here'"),
    ("nothing/here.py:f", "no such file"),
    ("fails:f", "ZeroDivisionError"),
    ("exits.py:f", "SystemExit: 3"),
    ("mine:absent", 'has no "absent"'),
    ("mine:", "text on both sides"),
    (":f", "text on both sides"),
    ("mine", "text on both sides"),
    ("folder.py:f", "no such file"),
]


@pytest.mark.parametrize("reference, words", BROKEN_MODULES)
def test_modules_that_cannot_be_imported(workplace: Path, reference: str, words: str) -> None:
    (workplace / "fails.py").write_text("1 / 0\n")
    (workplace / "exits.py").write_text("import sys; sys.exit(3)\n")
    (workplace / "folder.py").mkdir()
    with pytest.raises(UserError, match=words) as caught:
        imports.load(reference, "reward")
    assert "\n" not in str(caught.value)


def test_a_folder_without_code_is_no_package(workplace: Path) -> None:
    (workplace / "leftover").mkdir()  # as wandb leaves one
    assert not imports.is_installed("leftover") and imports.is_installed("numpy")


INDEXES = [
    {"scheduler": ["evil", "X"]},
    {"scheduler": ["evil.inner", "X"], "vae": ["diffusers", "AutoencoderKL"]},
    {"tokenizer": ["os", "system"]},
    {"tokenizer": []},
    {"tokenizer": [["transformers"], "X"]},
]


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("options", [[], ["--memory"]])
def test_a_model_folder_imports_no_code(
    index: dict, options: list[str], workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (workplace / "evil.py").write_text(USER_MODULE)
    folder = workplace / "model"
    folder.mkdir()
    about = {"_class_name": "StableDiffusion3Pipeline", **index}
    (folder / "model_index.json").write_text(json.dumps(about))
    assert cli.main(["check", "demo", "model.path=model", *options]) == 2
    assert "only classes of diffusers and transformers are loaded" in capsys.readouterr().err
    assert not (workplace / MARK).exists()


def test_the_page_of_a_foreign_run_runs_none_of_its_code(
    foreign_run: RunFolder, workplace: Path
) -> None:
    assert cli.main(["view", "runs", "--report", "page.html"]) == 0
    assert "theirs" in (workplace / "page.html").read_text()
    ask, heard = PlaygroundRequest(run="theirs", prompt=PROMPT, seed=1, n=1), Heard()
    studio = Studio()
    drawn = studio.generate(foreign_run.path, ask, heard)
    studio.close()
    assert drawn["trained"][0]["image"] and "reward" not in drawn["trained"][0]
    assert any("--trust-code" in note for note in heard.notes)
    assert not (workplace / MARK).exists()


@pytest.mark.parametrize("key", ["model", "algorithm"])
def test_the_playground_refuses_a_model_or_algorithm_of_the_runs_own(
    foreign_run: RunFolder, workplace: Path, key: str
) -> None:
    config = build.recipe_from({**_tables(foreign_run)}).model_dump(exclude_none=True)
    config[key]["name"] = "mine:Thing"
    (foreign_run.path / "config.toml").write_text(tomli_w.dumps(config))
    (workplace / MARK).unlink(missing_ok=True)  # building the recipe has imported the reward
    sys.modules.pop("mine", None)
    with pytest.raises(UserError, match=f'the {key} "mine:Thing" .* --trust-code'):
        Studio().generate(
            foreign_run.path, PlaygroundRequest(run="theirs", prompt=PROMPT, seed=1, n=1), Heard()
        )
    assert not (workplace / MARK).exists()


def test_a_trusted_page_scores_by_the_runs_own_reward(foreign_run: RunFolder) -> None:
    studio = Studio(trust_code=True)
    ask = PlaygroundRequest(run="theirs", prompt=PROMPT, seed=1, n=1)
    drawn = studio.generate(foreign_run.path, ask, Heard())
    studio.close()
    assert drawn["trained"][0]["reward"] == 0.5


USES = [
    ["sample", "runs/theirs", PROMPT, "--out", "out"],
    ["eval", "runs/theirs", "--first", "1"],
    ["export", "runs/theirs", "--to", "exported"],
    ["train", "--resume", "runs/theirs"],
]


@pytest.mark.parametrize("arguments", USES, ids=[use[0] for use in USES])
def test_commands_say_first_which_code_they_run(
    foreign_run: RunFolder,
    workplace: Path,
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    (workplace / "mine.py").write_text("raise RuntimeError('imported')\n")
    with contextlib.redirect_stderr(sys.stdout):  # one stream: the order counts
        cli.main(arguments)
    said = capsys.readouterr().out
    if arguments[0] in ("sample", "export"):  # they need no reward
        assert NOTICE not in said and "RuntimeError" not in said
    else:
        assert said.index(NOTICE) < said.index("RuntimeError: imported")


def test_the_note_cannot_be_switched_off(
    foreign_run: RunFolder, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither by --quiet nor by the run itself, which may ask for no display; nor in Python."""
    (workplace / "mine.py").write_text("raise RuntimeError('imported')\n")
    data = _tables(foreign_run) | {"track": []}
    (foreign_run.path / "config.toml").write_text(tomli_w.dumps(data))
    cli.main(["train", "--resume", "runs/theirs"])
    assert NOTICE in capsys.readouterr().err
    cli.main(["eval", "runs/theirs", "--first", "1", "--quiet"])
    assert NOTICE in capsys.readouterr().err
    with pytest.raises(UserError):
        gesso.resume(foreign_run.path, quiet=True)
    assert NOTICE in capsys.readouterr().err
    with pytest.raises(UserError):
        gesso.load(foreign_run.path).evaluate(first=1)
    assert NOTICE in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["qwen2", "qwen2.5-vl"])
def test_code_beside_a_language_model_is_ignored(
    kind: str, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """auto_map in every config of the folder: transformers would import it, or ask whether to."""
    folder = tokens.build(kind, workplace / "model")
    (folder / "evil.py").write_text(USER_MODULE + "class X: pass\n")
    for name in ("config", "tokenizer_config", "preprocessor_config"):
        file = folder / f"{name}.json"
        about = json.loads(file.read_text()) if file.exists() else {}
        kinds = ("AutoConfig", "AutoTokenizer", "AutoModelForCausalLM", "AutoImageProcessor")
        about |= {"auto_map": {auto: "evil.X" for auto in kinds}, "tokenizer_class": "X"}
        file.write_text(json.dumps(about))
    monkeypatch.setattr("builtins.input", lambda text="": "y")  # whoever asks is told yes
    name = "causal" if kind == "qwen2" else "vision-language"
    with contextlib.suppress(UserError):
        classes.load(families.BY_NAME["language"], name)(TokenModel(name=name, path=str(folder)), 0)
    assert not (workplace / MARK).exists()


def _tables(run: RunFolder) -> dict:
    from gesso.config import tables

    return tables.read_toml(run.path / "config.toml")


def test_a_working_folder_that_is_gone(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workplace / "gone").mkdir()
    os.chdir(workplace / "gone")
    (workplace / "gone").rmdir()
    assert cli.main(["recipes"]) == 2
    assert "the working folder no longer exists" in capsys.readouterr().err

"""What docs/export.md shows is typed here, in a folder with the two runs that it speaks of."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from gesso import cli
from gesso.config import tables
from tests.use import runs

PAGE = (Path(__file__).parents[2] / "docs" / "export.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("documented")
    data = tables.read_toml(tables.RECIPES / "demo.toml")
    data["eval"]["prompts"], data["reward"][0]["workers"] = 4, 1
    data["model"]["name"] = "sd3"
    data["learner"]["ema"] = {}
    for name in ("demo-001", "demo-nft-001"):
        runs.make(data, folder / "runs" / name, 0.002)
    return folder


def commands() -> list[str]:
    found = re.findall(r"^\$ (gesso .*)$", PAGE, re.MULTILINE)
    assert {command.split()[1] for command in found} == {"export", "sample", "eval"}
    return found


def test_the_page_does_what_it_says(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(workplace)
    for command in commands():
        capsys.readouterr()
        assert cli.main(shlex.split(command)[1:]) == 0, command
        shown = PAGE.partition(f"$ {command}\n")[2].partition("```")[0]
        told = capsys.readouterr().out
        if " eval " in command:
            assert "minus" in told and re.search(r"ocr/exact +[+-]?\d\.\d{3} ", told)
        elif not shown.startswith("$") and shown:
            assert told == shown, command
    made = {file.name for file in (workplace / "compared").iterdir()}
    assert made == {"eval.json", "samples.jsonl", "pictures", "sheet.png"}
    assert (workplace / "compared" / "pictures" / "0" / "0003-1.png").is_file()
    assert (workplace / "kite.png").is_file()
    (python,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    left: dict = {}
    exec(compile(python, "export.md", "exec"), left)
    assert len(left["pictures"]) == 2 and left["pairs"] == 4 and left["found"].errors == []
    assert (left["folder"] / "model_index.json").is_file()


def test_the_options_of_the_page_are_the_commands() -> None:
    for action in ("export", "sample", "eval"):
        with pytest.raises(SystemExit):
            cli._parser().parse_args([action, "--help"])
    parser: Any = cli._parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    for action in ("export", "sample", "eval"):
        known = {flag for one in parser[action]._actions for flag in one.option_strings}
        for flag in known - {"-h", "--help", "--to"}:
            assert f"`{flag}" in PAGE or f" {flag}" in PAGE, f"gesso {action} {flag}"

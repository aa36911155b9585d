"""Runs the commands of docs/how-to/use-a-trained-model.md in a folder with the runs they name."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from gesso import cli
from gesso.config import tables
from tests import pages
from tests.use import runs

PAGE = "how-to/use-a-trained-model.md"


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    data = tables.read_toml(tables.RECIPES / "demo.toml")
    data["eval"]["prompts"], data["reward"][0]["workers"] = 4, 1
    data["model"]["name"] = "sd3"
    data["learner"]["ema"] = {}
    for name in ("demo-001", "demo-nft-001"):
        runs.make(data, tmp_path / "runs" / name, 0.002)
    return tmp_path


def sessions() -> list[tuple[str, str]]:
    """Commands with the output that the page shows."""
    text = "".join(block.code for block in pages.blocks("console", PAGE))
    found = re.findall(r"^\$ (gesso .*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE)
    assert {command.split()[1] for command, _ in found} == {"export", "sample", "eval"}
    return found


def test_the_page_shows_what_is_printed(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(workplace)
    for command, shown in sessions():
        capsys.readouterr()
        assert cli.main(shlex.split(command)[1:]) == 0, command
        printed = capsys.readouterr().out
        if " eval " in command:
            assert "minus" in printed and re.search(r"ocr/exact +[+-]?\d\.\d{3} ", printed)
        elif not shown.startswith("…"):
            assert printed == re.sub(r"-step\d+", f"-step{runs.STEPS[-1]}", shown), command
    written = {file.name for file in (workplace / "compared").iterdir()}
    assert written == {"eval.json", "samples.jsonl", "images", "sheet.png"}
    assert (workplace / "kite.png").is_file()
    (python,) = pages.blocks("python", PAGE)
    left: dict = {}
    exec(compile(python.code, str(python), "exec"), left)
    assert len(left["images"]) == 2 and left["pairs"] == 4 and left["trained"].errors == []
    assert (left["folder"] / "model_index.json").is_file()

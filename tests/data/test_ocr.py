from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gesso import cli
from gesso.config import DataSource
from gesso.data import ocr
from gesso.data.readers import read
from gesso.formulas.text import normalised
from gesso.rewards.image.ocr import Ocr, target_of
from gesso.types import Prompt, UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The set that `gesso data ocr` writes by default."""
    out = tmp_path_factory.mktemp("made") / "deep" / "ocr"
    assert cli.main(["data", "ocr", "--out", str(out)]) == 0
    return out


def lines(folder: Path, split: str) -> list[str]:
    return (folder / f"{split}.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("split, count", [("train", 20_000), ("test", 1_000)])
def test_every_line_quotes_one_text(folder: Path, split: str, count: int) -> None:
    prompts = lines(folder, split)
    assert len(prompts) == len(set(prompts)) == count
    for line in prompts:
        assert line.count('"') == 2 and "{" not in line and line == line.strip()
        (text,) = re.findall('"(.*)"', line)
        assert 2 <= len(text) <= 40 and text == text.strip() and text.isascii()
        assert target_of(Prompt(line)) == text and Ocr().unfit(Prompt(line)) is None


def test_train_and_test_have_no_text_in_common(folder: Path) -> None:
    """Compared as in the reward: ignoring case and spaces."""
    train, test = (
        {normalised(ocr.text_of(line)) for line in lines(folder, split)}
        for split in ("train", "test")
    )
    assert not train & test
    assert len(train) > 8_000 and len(test) > 800
    numbers = [{t for t in texts if re.search(r"\d", t)} for texts in (train, test)]
    assert all(numbers)  # both have numbers, and they are disjoint


def test_numbers_stay_disjoint_if_the_test_set_has_most_of_them() -> None:
    test = ocr.prompts("test", 30_000, 0)
    train = ocr.prompts("train", 3_000, 0, test)
    test_texts = {normalised(ocr.text_of(line)) for line in test}
    assert not test_texts & {normalised(ocr.text_of(line)) for line in train}
    alone = ocr.prompts("train", 3_000, 0)
    assert test_texts & {normalised(ocr.text_of(line)) for line in alone}  # else this shows nothing


def test_scenes_and_texts_vary(folder: Path) -> None:
    assert len(set(ocr.SCENES)) == len(ocr.SCENES) >= 60
    assert all(scene.count("{}") == 1 and '"' not in scene for scene in ocr.SCENES)
    train = lines(folder, "train")
    for scene in ocr.SCENES:
        before, after = scene.split("{}")
        pattern = re.compile(re.escape(before) + '"[^"]+"' + re.escape(after))
        assert sum(1 for line in train if pattern.match(line)) > 100, scene
    words = [len(ocr.text_of(line).split()) for line in train]
    shares = [words.count(n) / len(words) for n in (1, 2, 3)]
    assert shares[0] > 0.45 and shares[1] > 0.2 and shares[2] > 0.1


def test_prompts_depend_only_on_the_seed() -> None:
    assert ocr.prompts("train", 50, 1) == ocr.prompts("train", 50, 1)
    assert ocr.prompts("train", 50, 1) != ocr.prompts("train", 50, 2)
    assert ocr.prompts("train", 30, 1) == ocr.prompts("train", 50, 1)[:30]
    assert ocr.prompts("train", 2, 0) == [
        'a pair of sneakers with "Soft" on the sole, seen from below',
        'a silver locket engraved with "BEAN"',
    ]  # on every machine and in every release: runs name the set by its command


def test_command_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gesso.cli", "data", "ocr", "--out", "made"]
    sizes = ["--train", "30", "--test", "10", "--seed", "4"]
    done = subprocess.run([*command, *sizes], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "made/train.txt",
        "made/test.txt",
        'use in a recipe: data.train = "made@train", data.eval = "made@test"',
    ]
    test = read(DataSource(path=f"{tmp_path / 'made'}@test")).prompts
    assert [p.text for p in test] == ocr.prompts("test", 10, 4)
    before = (tmp_path / "made" / "train.txt").read_bytes()
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 2
    assert again.stderr == (
        "error: made/train.txt exists already; remove it or choose another --out\n"
    )
    assert (tmp_path / "made" / "train.txt").read_bytes() == before


def test_a_test_file_alone_is_not_overwritten_either(tmp_path: Path) -> None:
    (tmp_path / "test.txt").write_text("mine\n")
    with pytest.raises(UserError, match=r"test.txt exists already"):
        ocr.write(tmp_path, 3, 3, 0)
    assert [p.name for p in tmp_path.iterdir()] == ["test.txt"]


@pytest.mark.parametrize("train, test", [(0, 1), (1, 0), (-5, 1), (ocr.MAX_PROMPTS + 1, 1)])
def test_impossible_sizes(tmp_path: Path, train: int, test: int) -> None:
    with pytest.raises(UserError, match=r"--t\w+ -?\d+: expected a number of prompts from 1 to"):
        ocr.write(tmp_path / "x", train, test, 0)
    assert not (tmp_path / "x").exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--out .*file cannot be written"):
        ocr.write(tmp_path / "file", 3, 3, 0)

"""docs/custom-reward.md: the files it shows are those of examples/, and each example runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest

from gesso import cli
from tests.rewards.servers import Misbehaving, Served
from tests.rewards.test_judge import completion
from tests.test_examples import EXAMPLES, ROOT, TINY, gesso_here, typed_in

PAGE = (ROOT / "docs" / "custom-reward.md").read_text(encoding="utf-8")
FILES = {
    "python": [
        "custom_reward.py",
        *(f"ported/from_{name}.py" for name in ("easyr1", "openrlhf", "trl")),
    ],
    "toml": ["custom_reward.toml", "served.toml", "judge.toml", "ported.toml"],
    "text": ["judge.txt"],
}


def blocks(kind: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return [block for language, block in found if language == kind]


def last_row(run: Path) -> dict:
    return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.mark.parametrize("kind", FILES)
def test_the_page_shows_what_the_files_hold(kind: str) -> None:
    files = [(EXAMPLES / name).read_text(encoding="utf-8") for name in FILES[kind]]
    assert blocks(kind)
    for block in blocks(kind):
        assert any(block in file for file in files), block


def test_the_commands_of_the_page_parse() -> None:
    lines = [line.removeprefix("$ ") for block in blocks("") for line in block.splitlines()]
    commands = [line for line in lines if line.startswith("gesso ")]
    assert len(commands) == 5
    for command in commands:
        cli._parser().parse_args(command.split()[1:])


def test_a_function_and_a_class(tmp_path: Path) -> None:
    arguments = ("custom_reward.toml", *TINY, "--run", str(tmp_path / "run"), "--quiet")
    gesso_here("train", *arguments, cwd=EXAMPLES)
    row = last_row(tmp_path / "run")
    one, two = row["reward/custom_reward:contrast"], row["reward/custom_reward:LikeReference"]
    assert 0 < one <= 1 and 0 < two <= 1
    assert row["reward"] == pytest.approx(0.5 * one + two) and row["failed"] == 0


def test_check_tries_them(capsys: pytest.CaptureFixture[str]) -> None:
    gesso_here("check", "custom_reward.toml", "sampler.batch=4", *TINY, cwd=EXAMPLES)
    told = capsys.readouterr().out
    assert "all answered" in told and "custom_reward:LikeReference/colours" in told


def test_a_served_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_TOKEN", "s3cret")
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES))
    reference = EXAMPLES / "reference.png"
    arguments = ("custom_reward:LikeReference", f"path={reference}", "--token-env", "REWARD_TOKEN")
    server = Served(*arguments)
    try:
        urls = f'reward.0.remote.urls=["{server.url}"]'
        folder = tmp_path / "run"
        gesso_here("train", "served.toml", *TINY, urls, "--run", folder, "--quiet", cwd=EXAMPLES)
        row = last_row(folder)
        assert 0 < row["reward/like-reference"] <= 1 and row["failed"] == 0
        assert "s3cret" not in (folder / "config.toml").read_text()
        told = httpx.post(  # as curl does it in docs/rewards.md
            f"{server.url}/score",
            headers={"Authorization": "Bearer s3cret"},
            data={"samples": '[{"prompt": "a red sign"}]'},
            files={"image": reference.read_bytes()},
        ).text
        answer = '{"scores":[{"value":1.0,"parts":{"colours":2.0},"text":"","error":null}]}'
        assert told == answer and answer in (ROOT / "docs" / "rewards.md").read_text("utf-8")
    finally:
        server.end()


def test_a_judge(tmp_path: Path) -> None:
    answers = [completion(f"It is a sign. Grade: {n}") for n in (7, 8, 9)] * 9
    with Misbehaving([answers[0], *answers]) as server:
        settings = (f'reward.0.urls=["{server.url}/v1"]', "reward.0.model=any", "max_failed=0.5")
        folder = tmp_path / "run"
        arguments = ("judge.toml", *TINY, *settings, "--run", str(folder), "--quiet")
        gesso_here("train", *arguments, cwd=EXAMPLES)
        question = server.requests[0]["messages"][0]["content"][1]["text"]
    assert question.startswith("The image was generated for this prompt: a ")
    assert question.endswith("Grade: n\n")
    row = last_row(folder)
    assert 0.7 <= row["reward/judge"] <= 0.9 and row["failed"] == 0
    assert "It is a sign. Grade:" in (folder / "report.html").read_text(encoding="utf-8")


def test_the_class_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    from gesso.rewards import base
    from gesso.types import Prompt, Sample

    monkeypatch.syspath_prepend(EXAMPLES)
    reward = base.load("custom_reward:LikeReference", {"path": str(EXAMPLES / "reference.png")})
    assert reward.unfit(Prompt("a cat")) == "is not about a sign"
    half: np.ndarray = np.zeros((4, 6, 3), dtype=np.uint8)
    half[:, :3] = (200, 30, 30)  # the reference's ground, 85% of it
    pictures: list[np.ndarray] = [half * 0, half]
    blank, near = base.checked(reward, [Sample(Prompt("a sign"), p, 0) for p in pictures])
    assert blank.error == "the image is blank"
    assert near.value == 0.5 and near.parts == {"colours": 1.0}


def test_functions_of_other_frameworks(tmp_path: Path) -> None:
    folder, more = tmp_path / "run", ("data.groups=4", "algorithm.group=4", "sampler.batch=16")
    gesso_here("train", "ported.toml", *TINY, *more, "--run", folder, "--quiet", cwd=EXAMPLES)
    row = last_row(folder)
    easyr1, openrlhf, trl = (
        row[f"reward/ported.from_{name}"]
        for name in ("easyr1:compute_score", "openrlhf:reward_func", "trl:brief")
    )
    right = row["reward/ported.from_easyr1:compute_score/accuracy"]
    assert row["failed"] == 0 and "`reward/ported.from_easyr1:compute_score/accuracy`" in PAGE
    assert right == openrlhf == row["reward/ported.from_openrlhf:reward_func/scores"]
    assert 0.8 * right <= easyr1 <= 0.8 * right + 0.2 and 0 < trl < 1
    assert row["reward"] == pytest.approx(easyr1 + 0.5 * openrlhf + 0.1 * trl)
    assert "expected: " in (folder / "samples" / "000001.jsonl").read_text()


def test_a_function_of_another_style(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = (block for block in blocks("") if "did you mean style" in block)
    command, sentence = block.splitlines()
    with typed_in(EXAMPLES, *command.removeprefix("$ ").split()):
        assert cli.main() == 2
    assert capsys.readouterr().err == f"{sentence}\n"

"""The examples of docs/how-to/write-a-reward.md and serve-rewards.md run, and the pages show them
as they are."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from gesso import cli
from gesso.rewards import base
from tests import pages
from tests.rewards.servers import Misbehaving, grey, served
from tests.rewards.test_judge import completion
from tests.test_examples import EXAMPLES, TINY, gesso_here, typed_in

WRITE, SERVE = "how-to/write-a-reward.md", "how-to/serve-rewards.md"
NO_EXAMPLE = ("envs/hpsv3.txt", "combine = ", 'name = "verifier"')  # fragments that no file has


def last_row(run: Path) -> dict:
    return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.mark.parametrize("kind, suffix", [("python", "py"), ("toml", "toml"), ("text", "txt")])
def test_the_pages_show_what_the_files_contain(kind: str, suffix: str) -> None:
    files = [file.read_text(encoding="utf-8") for file in EXAMPLES.rglob(f"*.{suffix}")]
    shown = [block for block in pages.blocks(kind, WRITE, SERVE)]
    assert shown
    for block in shown:
        if not any(text in block.code for text in NO_EXAMPLE):
            assert any(block.code in file for file in files), str(block)


def test_a_function_and_a_class(tmp_path: Path) -> None:
    arguments = ("custom_reward.toml", *TINY, "--run", str(tmp_path / "run"), "--quiet")
    gesso_here("train", *arguments, cwd=EXAMPLES)
    row = last_row(tmp_path / "run")
    one, two = row["reward/custom_reward:contrast"], row["reward/custom_reward:LikeReference"]
    assert 0 < one <= 1 and 0 < two <= 1
    assert row["reward"] == pytest.approx(0.5 * one + two) and row["failed"] == 0


def test_a_groupwise_function() -> None:
    with typed_in(EXAMPLES):
        reward = base.load("custom_reward.py:brightest", {})
        assert base.is_groupwise(reward)
        scores = base.checked(reward, [grey(10), grey(30), grey(20)])
    assert [score.value for score in scores] == [0.0, 1.0, 0.0]


def test_a_differentiable_class(tmp_path: Path) -> None:
    gesso_here("train", "bright.toml", *TINY, "--run", tmp_path / "run", "--quiet", cwd=EXAMPLES)
    row = last_row(tmp_path / "run")
    assert row["update/grad_norm"] > 0
    assert row["update/reward"] == pytest.approx(row["reward/custom_reward:Bright"], abs=2e-3)


def test_check_scores_a_batch(capsys: pytest.CaptureFixture[str]) -> None:
    gesso_here("check", "custom_reward.toml", "sampler.batch=4", *TINY, cwd=EXAMPLES)
    assert "custom_reward:LikeReference/colours" in capsys.readouterr().out


def test_a_served_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_TOKEN", "s3cret")
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES))
    reference = EXAMPLES / "reference.png"
    arguments = ("custom_reward:LikeReference", f"path={reference}", "--token-env", "REWARD_TOKEN")
    with served(*arguments) as server:
        urls = f'reward.0.remote.urls=["{server.url}"]'
        folder = tmp_path / "run"
        gesso_here("train", "served.toml", *TINY, urls, "--run", folder, "--quiet", cwd=EXAMPLES)
        row = last_row(folder)
        assert 0 < row["reward/like-reference"] <= 1 and row["failed"] == 0
        assert "s3cret" not in (folder / "config.toml").read_text()
        answer = httpx.post(  # as the page does it with curl
            f"{server.url}/score",
            headers={"Authorization": "Bearer s3cret"},
            data={"samples": '[{"prompt": "a red sign"}]'},
            files={"image": reference.read_bytes()},
        ).text
        health = httpx.get(f"{server.url}/health").json()
    assert answer in pages.page(SERVE) and '"value":1.0' in answer
    assert list(health) == ["reward", "requests", "scored", "failed"]


def test_a_judge(tmp_path: Path) -> None:
    answers = [completion(f"It is a sign. Grade: {n}") for n in (7, 8, 9)] * 9
    with Misbehaving([answers[0], *answers]) as server:
        settings = (f'reward.0.urls=["{server.url}/v1"]', "reward.0.model=any", "max_failed=0.5")
        folder = tmp_path / "run"
        arguments = ("judge.toml", *TINY, *settings, "--run", str(folder), "--quiet")
        gesso_here("train", *arguments, cwd=EXAMPLES)
        question = server.requests[0]["messages"][0]["content"][1]["text"]
    assert question.startswith("This image was generated for the prompt: a ")
    assert question.endswith("Grade: n\n")
    row = last_row(folder)
    assert 0.7 <= row["reward/judge"] <= 0.9 and row["failed"] == 0
    assert "It is a sign. Grade:" in (folder / "report.html").read_text(encoding="utf-8")


def test_the_class_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    from gesso.types import Prompt, Sample

    monkeypatch.syspath_prepend(EXAMPLES)
    reward = base.load("custom_reward:LikeReference", {"path": str(EXAMPLES / "reference.png")})
    assert reward.unfit(Prompt("a cat")) == "is not about a sign"
    half: np.ndarray = np.zeros((4, 6, 3), dtype=np.uint8)
    half[:, :3] = (200, 30, 30)  # the reference's background, 85% of it
    images: list[np.ndarray] = [half * 0, half]
    blank, near = base.checked(reward, [Sample(Prompt("a sign"), image, 0) for image in images])
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
    accuracy = "reward/ported.from_easyr1:compute_score/accuracy"
    assert row["failed"] == 0 and f"`{accuracy}`" in pages.page(WRITE)
    right = row[accuracy]
    assert right == openrlhf == row["reward/ported.from_openrlhf:reward_func/scores"]
    assert 0.8 * right <= easyr1 <= 0.8 * right + 0.2 and 0 < trl < 1
    assert row["reward"] == pytest.approx(easyr1 + 0.5 * openrlhf + 0.1 * trl)
    assert "expected: " in (folder / "samples" / "000001.jsonl").read_text()


def test_a_function_of_another_style(capsys: pytest.CaptureFixture[str]) -> None:
    with typed_in(EXAMPLES, "gesso", "check", "ported.toml", "reward.0.style=gesso"):
        assert cli.main() == 2
    assert 'style = "easyr1"?' in capsys.readouterr().err

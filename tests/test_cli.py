"""The command line. Training runs in a new process, as a user starts it; the other actions run in
this one, where torch and diffusers are imported already."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w
import torch

from gesso import cli
from gesso.config import Recipe
from tests.typed import sure


@pytest.fixture(autouse=True)
def same_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command changes it."""
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def recipe_file(recipe_data: dict, tmp_path: Path) -> str:
    file = tmp_path / "recipe.toml"
    file.write_text(tomli_w.dumps(recipe_data | {"about": "small"}))
    return str(file)


def test_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("  demo ") and any(line.startswith("  demo-nft ") for line in lines)


def test_check_tries_everything(recipe_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", recipe_file]) == 0
    lines = capsys.readouterr().out.splitlines()
    for word in ("recipe", "data", "model", "rewards", "ratio", "repeats  yes", "memory", "time"):
        assert any(line.startswith(word) for line in lines), word
    assert any("3 training prompts, 3 held-out" in line for line in lines)
    (warning,) = (line for line in lines if line.startswith("warning"))
    assert "3 of 3 held-out prompts are also training prompts" in warning  # one file for both


def test_negative_prompts_that_guidance_leaves_unread_are_noted(
    recipe_data: dict, tmp_path: Path
) -> None:
    from gesso import build
    from gesso.run import assemble

    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a", "negative_prompt": "b"}\n{"prompt": "c"}\n')
    data = recipe_data | {"data": {"train": str(file), "eval": str(file), "groups": 2}}
    for guidance, eval_guidance, keys in (
        (1.0, None, ["algorithm.guidance", "eval.guidance"]),
        (1.0, 2.0, ["algorithm.guidance"]),
        (2.0, 1.0, ["eval.guidance"]),
        (2.0, None, []),
    ):
        algorithm = data["algorithm"] | {"guidance": guidance}
        chosen = data | {"algorithm": algorithm, "eval": {"guidance": eval_guidance, "steps": 4}}
        job = assemble(build.recipe_from(chosen))
        job.close()
        notes = [note for note in job.notes if "have a negative prompt, which" in note]
        assert [note.partition(" because ")[2].partition(" = ")[0] for note in notes] == keys


def test_check_repeats_a_gradient(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here with a loss that is another one every time."""
    from gesso.algorithms.flow_grpo import FlowGRPO
    from gesso.check import _repeats, check

    plain, calls = FlowGRPO.loss, []

    def loss(self: FlowGRPO, *args: Any) -> Any:
        calls.append(args)
        result = plain(self, *args)
        return replace(result, loss=result.loss * len(calls))

    monkeypatch.setattr(FlowGRPO, "loss", loss)
    assert dict(check(recipe).facts)["repeats"].startswith("no: two backward passes")
    sampler = recipe.sampler.model_copy(update={"engine": "vllm"})
    job: Any = SimpleNamespace(recipe=recipe.model_copy(update={"sampler": sampler}))
    assert _repeats(job, True).startswith("no: vLLM")
    job = SimpleNamespace(recipe=recipe, model=SimpleNamespace(device=torch.device("cuda")))
    assert _repeats(job, True).startswith("yes")
    monkeypatch.setattr("gesso.check.kernel_options", dict)  # as of an older torch
    assert _repeats(job, True).startswith("no: torch")


def test_check_tries_the_whole_update(recipe_data: dict) -> None:
    """Teachers and preferences have passes of their own before the loss."""
    from gesso import build
    from gesso.check import check

    teachers = {"base": {"path": recipe_data["model"]["path"], "guidance": 2.0}}
    for algorithm in ({"name": "flow-opd", "teachers": teachers}, {"name": "dgpo", "times": 1}):
        recipe_data["algorithm"] = algorithm | {"group": 2, "steps": 7, "guidance": 1.0}
        facts = dict(check(build.recipe_from(recipe_data)).facts)
        assert facts["ratio"] == "not used by this algorithm" and facts["repeats"].startswith("yes")


def test_check_warns_of_a_clip_under_the_noise_floor(recipe: Recipe) -> None:
    from gesso import build
    from gesso.check import Findings, _ratio

    job = SimpleNamespace(recipe=recipe, algorithm=build.algorithm(recipe))  # clip .2
    for gap, warnings in ((1e-3, 0), (0.5, 1)):
        found = Findings()
        _ratio(job, gap, found)  # type: ignore[arg-type]
        assert len(found.warnings) == warnings
    assert "clip = 0.2 is below the noise floor of the ratio, 5.0e-01" in found.warnings[0]


def test_check_finds_a_reward_that_fails(
    recipe_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    reward = 'reward=[{name="tests.rewards.user_rewards:raises"}]'
    assert cli.main(["check", recipe_file, reward]) == 2
    message = capsys.readouterr().err
    assert "a reward failed on" in message and "no such model" in message


def test_check_tries_the_rewards_of_evaluations(
    recipe_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    judge = 'eval_reward=[{name="tests.rewards.user_rewards:raises", weight=0.0}]'
    assert cli.main(["check", recipe_file, judge]) == 2
    message = capsys.readouterr().err
    assert "eval_reward: " in message and "no such model; make it available, or use" in message


def test_train_sample_export_and_resume(
    recipe_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "run")
    assert cli.main(["train", recipe_file, "--run", run, "steps=2"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "step 2/2" in printed.out and f"report  {run}/report.html" in printed.out
    assert "held-out" in printed.out
    assert cli.main(["train", "--resume", run, "steps=3", "--quiet"]) == 0
    assert "step 3" in capsys.readouterr().out
    assert cli.main(["sample", run, "a sign", "--n", "2", "--out", str(tmp_path / "pictures")]) == 0
    sampled = capsys.readouterr().out.split()
    assert [Path(line).exists() for line in sampled] == [True, True]
    assert cli.main(["export", run, "--to", str(tmp_path / "out"), "--quiet"]) == 0
    assert (tmp_path / "out" / "model_index.json").exists()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["train"], "error: train expects a recipe"),
        (["train", "nope"], 'error: unknown recipe "nope"'),
        (["train", "demo", "optimizer.lrr=1"], 'error: recipe demo: unknown key "optimizer.lrr"'),
        (["train", "--resume", "/nowhere"], "error: /nowhere is not a run folder"),
        (
            ["train", "--resume", "/nowhere", "optimizer.lr=1"],
            "only steps=N and the keys of cluster",
        ),
        (["export", "demo", "--to", "x"], "error: demo is not a run folder"),
        (
            ["sample", "nope", "a sign"],
            'error: nope is neither a run nor a model folder; unknown recipe "nope"',
        ),
        (
            ["sample", "zoo:edits", "x"],
            "value of model.path; expected a run, a recipe such as demo-edit",
        ),
        (["train", "demo", "--runn", "x"], "unrecognized arguments: --runn"),
        (["sample", "nope", "a sign", "--sede=1"], "unrecognized arguments: --sede=1"),
        (["train", "demo", "data.train=missing.txt", "--run", "RUN"], "missing.txt: no such file"),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = cli.main([str(tmp_path / "run") if a == "RUN" else a for a in arguments])
    except SystemExit as error:  # argparse
        status = sure(int, error.code)
    message = capsys.readouterr().err
    assert status == 2 and sentence in message and "Traceback" not in message
    assert not (tmp_path / "run").exists()  # nothing is left behind


def test_run_folders_that_cannot_be_made(tmp_path: Path) -> None:
    from gesso.track.run_folder import RunFolder
    from gesso.types import UserError

    (tmp_path / "file").touch()
    for path, sentence in (
        (tmp_path / ("r" * 300), "cannot be created: File name too long"),
        (tmp_path / "file" / "run", "cannot be created: file is a file"),
        (tmp_path / "file", "exists and is not a run"),
    ):
        with pytest.raises(UserError, match=sentence):
            RunFolder.must_be_new(path)
    RunFolder.must_be_new(tmp_path / "new" / "run")

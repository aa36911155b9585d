"""The loop with real parts: runs, kills, resumes and the ways a run can go wrong."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import tomli_w
import torch

from gesso import build, cli, run
from gesso.cluster import local
from gesso.cluster.local import Local
from gesso.rollout import Rollout
from gesso.track import checkpoints
from gesso.track.run_folder import RunFolder
from gesso.types import Scales, StopRun, UserError
from gesso.viewer import files
from tests import forked
from tests.conftest import small_recipe
from tests.typed import sure
from tests.waiting import LIMIT, until

USER = "tests.rewards.user_rewards"
NOT_TIMED = ("time/", "memory/", "samples_per_s")


def shortened(pipeline_folder: Path, prompt_file: Path) -> dict:
    """Of 2 denoising steps; evaluations of 2 prompts, before and after the run."""
    data = small_recipe(pipeline_folder, prompt_file) | {"steps": 3}
    data["algorithm"]["steps"] = 2
    data["eval"] = {"every": 0, "prompts": 2, "steps": 2}
    return data


@pytest.fixture
def recipe_data(pipeline_folder: Path, prompt_file: Path) -> dict:
    return shortened(pipeline_folder, prompt_file)


def comparable(rows: list[dict]) -> list[dict]:
    return [{k: v for k, v in row.items() if not k.startswith(NOT_TIMED)} for row in rows]


def go(data: dict, folder: Path) -> RunFolder:
    return run.train(build.recipe_from(data), folder=folder, quiet=True)


@dataclass(frozen=True)
class Finished:
    run: RunFolder
    encoded: list[tuple]  # images of all reports


def final_state(folder: Path) -> dict[str, torch.Tensor]:
    found = RunFolder.open(folder)
    state, _ = found.load(sure(int, found.latest()))
    return state


@pytest.fixture(scope="module")
def evaluated(pipeline_folder: Path, prompt_file: Path) -> dict:
    """A recipe with an evaluation during the run, whose batches have several parts."""
    data = shortened(pipeline_folder, prompt_file)
    data["eval"]["every"] = 2
    data["sampler"] = {"batch": 2}
    return data


@pytest.fixture(scope="module")
def finished(evaluated: dict, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run that several tests read."""
    encode = Mock(wraps=files.encode)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "encode", encode)
        found = go(evaluated, tmp_path_factory.mktemp("finished") / "run")
    return Finished(found, [call.args for call in encode.call_args_list])


def test_a_run_and_its_folder(finished: Finished) -> None:
    folder, rows = finished.run.path, finished.run.rows()
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [("eval/reward" in row) for row in rows] == [True, False, True, True]
    assert all(row["update/abs_dlogp_max"] < 1e-5 for row in rows[1:])  # ratio 1 on-policy
    assert all(row["age"] == 0 for row in rows[1:])
    assert sorted(p.name for p in (folder / "samples").glob("*.jsonl")) == [
        "000000.jsonl", "000002.jsonl", "000003.jsonl",
    ]  # fmt: skip
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["000002", "000003"]
    assert "<html" in (folder / "report.html").read_text()
    made = finished.encoded
    assert len(made) == len(set(made)) > 0  # for all reports together, each picture once
    assert run.recipe_of(finished.run).algorithm.options["clip"] == 0.2
    first, last = ((folder / f"samples/{s:06d}.jsonl").read_text() for s in (0, 3))
    seeds = [[json.loads(line)["seed"] for line in text.splitlines()] for text in (first, last)]
    assert seeds[0] == seeds[1]


def test_a_clip_range_under_the_noise_floor_is_reported_once(
    recipe_data: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gesso.formulas.flow_steps import Transition

    recipe_data["algorithm"]["clip"] = 1e-5
    recipe_data["steps"] = 2
    honest = Transition.logp  # as a model in low precision would: replay is off by 1e-3
    monkeypatch.setattr(
        Transition, "logp", lambda self, x: honest(self, x) + 1e-3 * torch.is_grad_enabled()
    )
    go(recipe_data, tmp_path / "run")
    log = (tmp_path / "run" / "log.txt").read_text()
    assert log.count("clip = 1e-05 is below the noise floor of the ratio, 1.0e-03") == 1


def test_scoring_overlaps_with_sampling(finished: Finished) -> None:
    for row in finished.run.rows()[1:]:
        assert 0 < row["time/overlap"] <= min(row["time/sample"], row["time/score"]) + 1e-6


@pytest.mark.parametrize("algorithm", ["flow-grpo", "diffusion-nft"])
def test_lag_one_trains_on_samples_one_update_old(
    recipe_data: dict, tmp_path: Path, algorithm: str
) -> None:
    if algorithm == "diffusion-nft":
        recipe_data["algorithm"] = {
            "name": algorithm, "group": 3, "steps": 2, "times": 2, "updates": 1,
        }  # fmt: skip
    rows = go(recipe_data | {"lag": 1}, tmp_path / "run").rows()
    assert [row["age"] for row in rows[1:]] == [0, 1, 1]
    if algorithm == "flow-grpo":
        assert rows[1]["update/abs_dlogp_max"] < 1e-5
        assert rows[2]["update/abs_dlogp_max"] > 1e-5  # the policy moved on: the ratio is not 1


def test_the_same_seed_gives_the_same_run(
    finished: Finished, evaluated: dict, tmp_path: Path
) -> None:
    again = go(evaluated, tmp_path / "again")
    other = go(evaluated | {"seed": 1, "steps": 2}, tmp_path / "other")
    assert comparable(finished.run.rows()) == comparable(again.rows())
    a, b = final_state(finished.run.path), final_state(again.path)
    assert all(torch.equal(a[k], b[k]) for k in a)
    a, c = (found.load(2)[0] for found in (finished.run, other))
    assert any(not torch.equal(a[k], c[k]) for k in a)


def wait_for(condition: Callable[[], bool], process: ForkServerProcess, output: Path) -> None:
    def printed() -> str:
        return output.read_text() if output.exists() else ""

    until(condition, lambda: process.exitcode, printed, every=0.002)


@pytest.mark.slow
def test_killed_anywhere_and_resumed_it_ends_the_same(recipe_data: dict, tmp_path: Path) -> None:
    """SIGKILL before the first checkpoint, while one is being written, and with rows that are newer
    than the last one; the end is the same to the bit, and that of a run in another process. What
    each algorithm keeps in a checkpoint is tested where it is resumed in one process."""
    recipe_data |= {"steps": 4, "learner": {"micro_batch": 6, "ema": {"every": 2}}}
    recipe_data["save"] = {"every": 2, "keep": 2}
    recipe_data["model"]["path"] = "zoo:signs"  # takes long enough to save to be killed meanwhile
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(tomli_w.dumps(recipe_data))
    calm, folder, output = tmp_path / "calm", tmp_path / "killed", tmp_path / "output.txt"
    go(recipe_data, calm)

    metrics, checkpoints = folder / "metrics.jsonl", folder / "checkpoints"
    moments: list[Callable[[], bool]] = [
        lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 2,
        lambda: any(checkpoints.glob(".saving-*")),
        lambda: metrics.read_bytes().count(b"\n") >= 4,
    ]
    for i, moment in enumerate(moments):
        what = ("--resume", folder) if i else (recipe, "--run", folder)
        with forked.gesso("train", *what, "--quiet", output=output) as process:
            wait_for(moment, process, output)
            os.kill(sure(int, process.pid), signal.SIGKILL)
            process.join()
            assert process.exitcode == -signal.SIGKILL
    with forked.gesso("train", "--resume", folder, "--quiet", output=output) as process:
        process.join(LIMIT)
        assert process.exitcode == 0, output.read_text()

    rows, expected_rows = (comparable(RunFolder.open(f).rows()) for f in (folder, calm))
    assert len(rows) == len(expected_rows)
    for row, expected_row in zip(rows, expected_rows, strict=True):
        assert row == expected_row
    expected, got = final_state(calm), final_state(folder)
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[k], got[k]) for k in expected)


@pytest.mark.slow
def test_ctrl_c_stops_cleanly_and_resume_goes_on(recipe_data: dict, tmp_path: Path) -> None:
    recipe_data |= {"steps": 200, "save": {"every": 100, "keep": 1}}
    recipe, folder, output = (tmp_path / name for name in ("recipe.toml", "run", "output.txt"))
    recipe.write_text(tomli_w.dumps(recipe_data))
    metrics = folder / "metrics.jsonl"
    with forked.gesso("train", recipe, "--run", folder, output=output) as process:
        wait_for(
            lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 3, process, output
        )
        os.kill(sure(int, process.pid), signal.SIGINT)
        process.join(LIMIT)
        text = output.read_text()
        assert process.exitcode == 0, text
    assert "stopping after this step" in text and f"gesso train --resume {folder}" in text
    stopped = RunFolder.open(folder).latest()
    assert stopped is not None and stopped == RunFolder.open(folder).rows()[-1]["step"] < 200


def test_an_interrupted_run_says_how_to_continue(
    recipe_data: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """By SIGTERM in the second step, after a checkpoint; by a second Ctrl-C in the first."""
    recipe_data["save"]["every"] = 1
    (tmp_path / "recipe.toml").write_text(tomli_w.dumps(recipe_data))
    honest = Local.train

    for last, saved in ((1, "the last checkpoint is step 1"), (0, "there is no checkpoint")):

        def train(self: Local, rollout: Rollout, step: int, *rest: Any, last: int = last) -> Any:
            if step == last == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            elif step == last:
                raise KeyboardInterrupt
            return honest(self, rollout, step, *rest)

        monkeypatch.setattr(Local, "train", train)
        folder = tmp_path / f"run-{last}"
        assert cli.main(["train", str(tmp_path / "recipe.toml"), "--run", str(folder)]) == 130
        expected = f"interrupted; {saved}; to continue: gesso train --resume {folder}"
        assert expected in capsys.readouterr().err.splitlines()


def test_a_run_is_trained_by_one_process(recipe_data: dict, tmp_path: Path) -> None:
    folder = go(recipe_data, tmp_path / "run")
    before = (folder.path / "metrics.jsonl").read_bytes()
    with folder.locked(), pytest.raises(UserError, match="is being trained by another process"):
        run.resume(folder.path, steps=3, quiet=True)
    assert (folder.path / "metrics.jsonl").read_bytes() == before
    run.resume(folder.path, steps=3, quiet=True)
    assert folder.latest() == 3


def test_checkpoints_are_written_while_the_next_step_trains(
    recipe_data: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a copy of the weights. A checkpoint counts when all is written, at the latest before the
    next one; an error is raised then."""
    recipe_data["save"] |= {"background": True, "keep": 3}
    expected = go(recipe_data | {"save": {"every": 1, "keep": 3}}, tmp_path / "calm")
    trained = threading.Event()
    written: list[int] = []
    train, write = Local.train, checkpoints.write_tensors

    def next_step(self: Local, rollout: Any, step: int, scales: Scales) -> Any:
        if step == 1:
            assert not written and (tmp_path / "run/checkpoints/.saving-000001").exists()
        update = train(self, rollout, step, scales)
        if step:
            trained.set()
        return update

    def slow(folder: Path, state: Any) -> None:
        assert trained.wait(60)
        write(folder, state)
        written.append(int(folder.name[-6:]))

    monkeypatch.setattr(Local, "train", next_step)
    monkeypatch.setattr(local, "write_tensors", slow)
    finished = go(recipe_data, tmp_path / "run")
    assert written == finished.steps == [1, 2, 3]
    for step in finished.steps:
        (state, _), (calm, _) = finished.load(step), expected.load(step)
        assert state.keys() == calm.keys()
        assert [name for name in state if not torch.equal(state[name], calm[name])] == []

    def full(folder: Path, state: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(local, "write_tensors", full)
    with pytest.raises(StopRun, match=r"checkpoint of step 1 .* No space left .* is none; free"):
        go(recipe_data, tmp_path / "full")


def test_a_run_folder_that_exists_is_left_alone(recipe_data: dict, tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("x")
    with pytest.raises(UserError, match="exists and is not a run; choose another"):
        go(recipe_data, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["precious.txt"]


def test_resuming_what_is_not_a_run_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a run folder"):
        run.resume(tmp_path)


def test_a_reward_that_always_fails_stops_the_run(recipe_data: dict, tmp_path: Path) -> None:
    recipe_data["reward"] = [{"name": f"{USER}:raises"}]
    with pytest.raises(StopRun, match=r"2 of 2 scores of the evaluation failed.*no such model"):
        go(recipe_data, tmp_path / "run")
    assert (tmp_path / "run" / "report.html").exists()


def test_too_many_failed_scores_stop_the_run_and_save_it(recipe_data: dict, tmp_path: Path) -> None:
    train = tmp_path / "train.txt"
    train.write_text("a red sign\na blue sign\n")
    recipe_data["data"] |= {"train": str(train)}
    recipe_data |= {"reward": [{"name": f"{USER}:fails_on_training"}]}
    with pytest.raises(StopRun, match=r"of 6 scores failed .* too dark") as caught:
        go(recipe_data | {"steps": 20}, tmp_path / "run")
    found = RunFolder.open(tmp_path / "run")
    assert f"gesso train --resume {found.path}" in str(caught.value)
    assert found.latest() == 0 and len(found.rows()) == 1


def test_some_failed_scores_leave_the_batch_and_are_counted(
    recipe_data: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gesso.learner.learner import Learner, Update

    trained_on: list[int] = []
    honest = Learner.update

    def update(self: Learner, rollout: Rollout, step: int, scales: Scales) -> Update:
        trained_on.append(len(rollout.samples))
        return honest(self, rollout, step, scales)

    monkeypatch.setattr(Learner, "update", update)
    recipe_data |= {"reward": [{"name": f"{USER}:some_fail"}], "max_failed": 0.9}
    rows = go(recipe_data | {"steps": 2}, tmp_path / "run").rows()[1:]
    assert sum(row["failed"] for row in rows) > 0
    assert trained_on == [6 - row["failed"] for row in rows]  # never as a number
    assert all(row["update/grad_norm"] is not None for row in rows)
    assert "too dark" in (tmp_path / "run" / "log.txt").read_text()


def test_details_that_differ_between_samples(recipe_data: dict, tmp_path: Path) -> None:
    recipe_data |= {"steps": 1, "reward": [{"name": f"{USER}:details_differ"}]}
    row = go(recipe_data, tmp_path / "run").rows()[1]
    assert row[f"reward/{USER}:details_differ/odd"] == 1.0
    assert row[f"reward/{USER}:details_differ/even"] == 2.0


def test_a_finished_run_can_go_further(finished: Finished, evaluated: dict, tmp_path: Path) -> None:
    go(evaluated | {"steps": 2}, tmp_path / "run")
    further = run.resume(tmp_path / "run", quiet=True, steps=3)
    assert run.recipe_of(further).steps == 3
    with pytest.raises(UserError, match=r"is already at step 3; .* got steps=1"):
        run.resume(tmp_path / "run", steps=1)
    assert comparable(further.rows()) == comparable(finished.run.rows())
    a, b = final_state(finished.run.path), final_state(tmp_path / "run")
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_losses_that_are_not_finite_stop_the_run_after_three(
    recipe_data: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gesso.algorithms.base import TermLosses
    from gesso.algorithms.flow_grpo import FlowGRPO

    honest = FlowGRPO.loss
    monkeypatch.setattr(
        FlowGRPO,
        "loss",
        lambda self, model, terms: TermLosses(
            (r := honest(self, model, terms)).loss * float("inf"), r.stats
        ),
    )
    with pytest.raises(StopRun, match="not finite in 3 consecutive iterations"):
        go(recipe_data | {"steps": 9}, tmp_path / "run")
    found = RunFolder.open(tmp_path / "run")
    assert len(found.rows()) == 4 and found.rows()[-1]["update/skipped"] == 1
    assert "not finite" in (tmp_path / "run" / "log.txt").read_text()


def test_a_full_disk_while_saving_loses_nothing(
    recipe_data: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import safetensors.torch

    real, calls = safetensors.torch.save_file, []

    def full(tensors: dict, path: Path) -> None:
        calls.append(path)
        if len(calls) == 2:
            Path(path).write_bytes(b"half a checkpoint")
            raise OSError(28, "No space left on device")
        real(tensors, path)

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(StopRun, match=r"No space left .* complete checkpoint is step 1; free disk"):
        go(recipe_data | {"steps": 2}, tmp_path / "run")
    found = RunFolder.open(tmp_path / "run")
    assert found.latest() == 1
    assert not list(found.checkpoints.glob(".*"))
    monkeypatch.setattr(safetensors.torch, "save_file", real)
    run.resume(tmp_path / "run", quiet=True)
    assert [row["step"] for row in found.rows()] == [0, 1, 2]


def test_a_full_disk_anywhere_else_is_one_sentence_too(
    recipe_data: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gesso.viewer import report

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    honest = RunFolder.append
    monkeypatch.setattr(
        RunFolder, "append", lambda self, row: full() if row["step"] == 2 else honest(self, row)
    )
    monkeypatch.setattr(
        report, "write", lambda path, to, made: full() if (path / "x").exists() else to
    )
    with pytest.raises(StopRun, match=r"could not write to .* No space left .* is step 1; free"):
        go(recipe_data | {"steps": 2}, tmp_path / "run")
    (tmp_path / "run" / "x").touch()  # now the report cannot be written either: same sentence
    with pytest.raises(StopRun, match="could not write to"):
        run.resume(tmp_path / "run", quiet=True)
    monkeypatch.undo()
    assert len(run.resume(tmp_path / "run", quiet=True).rows()) == 3


def test_a_damaged_checkpoint_is_named(finished: Finished, tmp_path: Path) -> None:
    shutil.copytree(finished.run.path, tmp_path / "run")
    file = tmp_path / "run" / "checkpoints" / "000003" / "learner.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"3/learner\.safetensors cannot .* to resume from step 2"):
        run.resume(tmp_path / "run", quiet=True)


def test_unquoted_prompts_are_skipped_and_reported(recipe_data: dict, tmp_path: Path) -> None:
    prompts = tmp_path / "p.txt"
    prompts.write_text('a red sign that says "KITE"\na red sign\na blue sign that says "WIND"\n')
    recipe_data["data"] |= {"train": str(prompts), "eval": str(prompts)}
    recipe_data |= {"steps": 1, "reward": [{"name": "ocr", "detect": False}]}
    go(recipe_data, tmp_path / "run")
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "1 of 3 prompts" in log and "p.txt:2: ocr: expected a double-quoted text" in log


def test_load_and_sample_take_the_trained_weights(finished: Finished) -> None:
    trained = run.load(finished.run.path)
    first, again = (trained.sample('a red sign that says "KITE"', n=2, seed=3) for _ in range(2))
    assert first[0].size == (48, 32)
    assert first[0].tobytes() == again[0].tobytes() != first[1].tobytes()
    state = final_state(finished.run.path)
    for name, weight in trained.model.policy.tensors().items():
        assert torch.equal(weight, state[f"current/{name}"])

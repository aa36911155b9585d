"""Checkpoints whose tensors somebody else writes and reads: whole or not at all, and verified."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from gesso.track import checkpoints
from gesso.track.checkpoints import read_tensors, write_tensors
from gesso.track.run_folder import RunFolder
from gesso.types import StopRun, UserError

STATE = {
    "current/a": torch.arange(6.0).reshape(2, 3),
    "ema/a": torch.ones(3, dtype=torch.bfloat16),
    "optimizer_steps": torch.tensor(3),
}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run")
    for step in (1, 2):
        run.save(step, partial(write_tensors, state=STATE), {"seed": 7}, keep=2)
    return run


def test_tensors_come_back_by_the_folder_alone(run: RunFolder) -> None:
    folder = run.checkpoint(2)
    for tensors in (read_tensors(folder), run.load(2)[0]):
        assert tensors.keys() == STATE.keys()
        assert all(torch.equal(tensors[name], STATE[name]) for name in STATE)
    assert read_tensors(folder, "ema/").keys() == {"ema/a"}
    assert run.meta(2) == run.load(2)[1] == {"step": 2, "seed": 7, "verified": True}


def test_a_finished_checkpoint_has_its_digests_in_state_json(run: RunFolder) -> None:
    folder = run.checkpoint(2)
    assert sorted(file.name for file in folder.iterdir()) == ["learner.safetensors", "state.json"]
    state = json.loads((folder / "state.json").read_text())
    assert list(state) == ["step", "seed", "tables", "digest"]
    assert state["tables"].keys() == {"current", "ema", "optimizer_steps"}


def test_state_json_is_read_without_the_tensors(run: RunFolder) -> None:
    (run.checkpoint(2) / "learner.safetensors").write_bytes(b"x")
    assert run.meta(2)["seed"] == 7
    with pytest.raises(UserError, match=r"learner.safetensors cannot be read: .* from step 1$"):
        read_tensors(run.checkpoint(2))
    (run.checkpoint(2) / "state.json").write_bytes(b"{}")
    for read in (lambda: run.meta(2), lambda: read_tensors(run.checkpoint(2))):
        with pytest.raises(UserError, match=r'state.json is damaged: "step" is missing; delete'):
            read()


def test_a_writer_that_fails_leaves_the_last_checkpoint(run: RunFolder) -> None:
    def full(folder: Path) -> None:
        write_tensors(folder, STATE)
        raise OSError("the disk is full")

    with pytest.raises(StopRun, match=r"step 3 .*: the disk is full; the last complete .* 2"):
        run.save(3, full, {}, keep=1)
    assert run.steps == [1, 2]
    assert sorted(file.name for file in run.checkpoints.iterdir()) == ["000001", "000002"]


def test_a_snapshot_is_kept_until_the_next_checkpoint(run: RunFolder) -> None:
    """It does not count among those that are kept."""
    (run.checkpoints / ".saving-000003").mkdir()  # by a process that was killed
    write, remaining = partial(write_tensors, state=STATE), []
    for step, snapshot in ((4, True), (5, True), (6, False), (7, True)):
        run.save(step, write, {"seed": 7} | ({"snapshot": True} if snapshot else {}), keep=2)
        remaining.append(run.steps)
    assert remaining == [[1, 2, 4], [1, 2, 5], [2, 6], [2, 6, 7]]
    assert not list(run.checkpoints.glob(".saving-*"))


def test_a_checkpoint_without_digests_is_not_saved(run: RunFolder) -> None:
    with pytest.raises(StopRun, match=r"could not save the checkpoint of step 3 .*digests\.json"):
        run.save(3, lambda folder: None, {}, keep=1)
    assert run.steps == [1, 2]


def test_large_tensors_are_hashed_as_small_ones_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """In threads."""
    state = {f"current/{name}": torch.randn(30) for name in "abc"} | {"ema/a": torch.ones(2)}
    found = checkpoints.digests(state)
    monkeypatch.setattr(checkpoints, "LARGE", 100)
    assert checkpoints.digests(state) == found
    state["current/b"][7] += 1
    changed = checkpoints.digests(state)
    assert changed["current"] != found["current"] and changed["ema"] == found["ema"]

"""A short run of the bundled recipe learns, compared with untrained models. The rows of other
recipes are pinned (test_pinned.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from gesso import run

SHORT = ["eval.prompts=32", "eval.every=0", "eval.shown=0", "reward.0.workers=1"]
UNTRAINED = (0.66, 0.69)  # held-out reward of the untrained model: the range of three seeds
TRAINED = ["steps=2", "data.groups=6", "optimizer.lr=4e-4"]  # .67 → .80


@pytest.mark.slow
def test_the_held_out_reward_rises_beyond_the_controls_spread(tmp_path: Path) -> None:
    rows = run.train("demo", [*SHORT, *TRAINED], tmp_path / "run", quiet=True).rows()
    first, last = rows[0], rows[-1]
    assert UNTRAINED[0] - 0.01 < first["eval/reward"] < UNTRAINED[1] + 0.01, "measure them again"
    rise, spread = last["eval/reward"] - first["eval/reward"], UNTRAINED[1] - UNTRAINED[0]
    assert rise > 2 * spread, f"rose by {rise:.3f}, the control's seeds differ by {spread:.3f}"
    assert last["eval/ocr/exact"] > first["eval/ocr/exact"]


@pytest.mark.slow
def test_learning_rate_zero_learns_nothing(tmp_path: Path) -> None:
    few = ["steps=1", "data.groups=2", "algorithm.group=4", "eval.prompts=4", "optimizer.lr=0.0"]
    rows = run.train("demo", [*SHORT, *few], tmp_path / "run", quiet=True)
    first, *_, last = rows.rows()
    assert first["eval/reward"] == last["eval/reward"]

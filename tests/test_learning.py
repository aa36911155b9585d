"""Learning, shown and not assumed: short runs of the bundled recipes against untrained controls."""

from __future__ import annotations

from pathlib import Path

import pytest

from gesso import run

SHORT = ["eval.prompts=32", "eval.every=0", "eval.shown=0", "reward.0.workers=1"]
# The untrained model has a held-out reward of .66 to .69 (three seeds).
TRAINED = {
    "demo": ["steps=2", "data.groups=6", "optimizer.lr=4e-4"],  # .67 → .80
    "demo-nft": ["steps=2", "data.groups=4", "optimizer.lr=4e-4"],  # .67 → .78
}


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Held-out reward of the untrained model under two seeds; trained runs start with a third."""
    folder = tmp_path_factory.mktemp("control")
    runs = [
        run.train("demo", [*SHORT, "steps=0", f"seed={s}"], folder / str(s), quiet=True)
        for s in (1, 2)
    ]
    return [each.rows()[0]["eval/reward"] for each in runs]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", TRAINED)
def test_the_held_out_reward_rises_beyond_the_controls_spread(
    recipe: str, control: list[float], tmp_path: Path
) -> None:
    rows = run.train(recipe, [*SHORT, *TRAINED[recipe]], tmp_path / "run", quiet=True).rows()
    untrained = [*control, rows[0]["eval/reward"]]
    rise = rows[-1]["eval/reward"] - untrained[-1]
    spread = max(untrained) - min(untrained)
    assert rise > spread, f"rose by {rise:.3f}, the control's seeds differ by {spread:.3f}"
    assert rows[-1]["eval/ocr/exact"] > rows[0]["eval/ocr/exact"]


@pytest.mark.slow
def test_learning_rate_zero_learns_nothing(tmp_path: Path) -> None:
    few = ["steps=1", "data.groups=2", "algorithm.group=4", "eval.prompts=4", "optimizer.lr=0.0"]
    rows = run.train("demo", [*SHORT, *few], tmp_path / "run", quiet=True)
    first, *_, last = rows.rows()
    assert first["eval/reward"] == last["eval/reward"]

"""A tracker that is slow by the call gets the rows that wait for it together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gesso.config import Tracker as Settings
from gesso.track.run_folder import RunFolder
from gesso.track.trackers.base import Logged, Setup
from gesso.track.trackers.process import Tracked
from gesso.types import Prompt, Sample, Score

ROWS = "tests.track.bad_trackers:RecordsRows"


def test_rows_that_wait_come_together_and_none_after_samples(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", {})
    folder.save_samples(5, [Sample(Prompt("how many?"), None, 7, "two")], [Score(1.0)])
    for step in range(41):
        folder.append({"step": step, "health": []})
    tracker = Tracked(ROWS, ROWS, folder.path, {}, Settings(), lambda text: None)
    tracker.start()
    tracker.finish(ok=True)
    tracker.join()
    place = folder.path / "trackers" / ROWS.replace(":", ".")
    told = [json.loads(line) for line in (place / "told.jsonl").read_text().splitlines()]
    steps = [[step for step, _ in batch] for batch in told]
    assert steps == [[*range(6)], [*range(6, 38)], [38, 39, 40]]
    assert told[0][-1] == [5, 1]
    assert json.loads(place.with_name(f"{place.name}.json").read_text())["step"] == 40


def test_mlflow_takes_more_metrics_than_a_call_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed: pip install 'gesso[mlflow]'")
    from gesso.track.trackers.mlflow import MAX_METRICS, MLflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    settings = Settings(uri=str(tmp_path / "store"))
    tracker = MLflow(Setup(tmp_path, tmp_path, "run", {}, settings, None))
    figures = {f"part/{i}": float(i) for i in range(40)}
    assert 26 * len(figures) > MAX_METRICS  # which the package refuses in one call
    tracker.log_rows([Logged(step, figures, []) for step in range(26)])
    for name in ("part/0", "part/39"):
        history = tracker.client.get_metric_history(tracker.id, name)
        assert [m.step for m in history] == [*range(26)]

"""MLflow: a server, or a database and files in the run folder."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gesso.track.samples import Shown
from gesso.track.trackers.base import Logged, Setup, image_of, image_path, score

MAX_VALUE = 500  # characters of a parameter's value that every version accepts
MAX_PARAMS = 100  # parameters per call that every server accepts
MAX_METRICS = 1_000  # metrics per call that every server accepts


class MLflow:
    def __init__(self, setup: Setup) -> None:
        os.environ |= {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_ALLOW_FILE_STORE": "true"}
        from mlflow import MlflowClient

        self.dir = setup.run
        local_uri = f"sqlite:///{setup.folder.resolve() / 'mlflow.db'}"
        uri = setup.settings.uri or os.environ.get("MLFLOW_TRACKING_URI") or local_uri
        self.client = MlflowClient(tracking_uri=uri)
        project = setup.settings.project
        known = self.client.get_experiment_by_name(project)
        # A database cannot store images; by default MLflow would use the working directory.
        files = (
            (setup.folder / "artifacts").resolve().as_uri() if uri.startswith("sqlite") else None
        )
        experiment = known.experiment_id if known else self.client.create_experiment(project, files)
        if setup.id is None:
            self.id = self.client.create_run(experiment, run_name=setup.name).info.run_id
            self._parameters(setup.config)
        else:
            self.id = setup.id
            self.client.update_run(self.id, status="RUNNING")
        self.where = uri

    def log_rows(self, rows: Sequence[Logged]) -> None:
        """Batched, since a database takes much longer per call than per metric."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(key, x, now, row.step) for row in rows for key, x in row.figures.items()]
        for at in range(0, len(metrics), MAX_METRICS):
            self.client.log_batch(self.id, metrics=metrics[at : at + MAX_METRICS])
        for row in rows:
            self._samples(row.step, row.samples)

    def _samples(self, step: int, samples: Sequence[Shown]) -> None:
        for sample in samples:
            if sample.image:
                image = image_of(self.dir, sample)
                self.client.log_image(self.id, image, key=f"samples/{sample.index:03d}", step=step)
            if sample.video:
                file = image_path(self.dir, sample.video)
                self.client.log_artifact(self.id, file, f"samples/{step:06d}")
        if samples:
            columns = ["index", "prompt", "response", "expected", "reward"]
            data = [[s.index, s.prompt, s.response, s.answer, score(s)] for s in samples]
            table = {"columns": columns, "data": data}
            self.client.log_dict(self.id, table, f"samples/{step:06d}.json")

    def finish(self, ok: bool) -> None:
        self.client.set_terminated(self.id, "FINISHED" if ok else "FAILED")

    def _parameters(self, config: Mapping[str, Any]) -> None:
        """Logs the recipe as parameters with dotted keys and truncated values, and complete as a
        file."""
        from mlflow.entities import Param

        flat = [Param(key, str(value)[:MAX_VALUE]) for key, value in _flat(config)]
        for at in range(0, len(flat), MAX_PARAMS):
            self.client.log_batch(self.id, params=flat[at : at + MAX_PARAMS])
        self.client.log_dict(self.id, dict(config), "config.json")


def _flat(config: Mapping[str, Any], above: str = "") -> list[tuple[str, Any]]:
    pairs = []
    for key, value in config.items():
        if isinstance(value, Mapping):
            pairs += _flat(value, f"{above}{key}.")
        else:
            pairs.append((f"{above}{key}", value))
    return pairs

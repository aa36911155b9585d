"""A tiny language model and worker processes, for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from gesso.cluster import workers
from gesso.cluster.channel import Channel
from gesso.cluster.placement import Placement
from gesso.cluster.processes import Processes, Worker
from gesso.config import Recipe
from gesso.track.progress import SILENT, Progress
from gesso.track.run_folder import RunFolder
from tests import forked, tokens
from tests.cluster.pools import MOST, Borrowed, Forked
from tests.cluster.runs import go, language_recipe


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tokens")
    tokens.build("qwen2", root / "qwen2")
    (root / "prompts.txt").write_text("what is 2 + 3?\nhow many?\nhello there\nwhy?\n")
    return root


@pytest.fixture(scope="module")
def pool() -> Iterator[Processes]:
    processes = Forked(MOST + 1, lambda rank: {}, 300.0, SILENT)
    yield processes
    processes.close()


@pytest.fixture
def borrowing(pool: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(recipe: Recipe, placement: Placement, progress: Progress) -> Processes:
        processes = Borrowed(pool, placement.workers, progress)
        workers.begin(processes, recipe, placement.samplers)
        return processes

    monkeypatch.setattr(workers, "start", start)


@pytest.fixture
def pids(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Rank → process of the newest workers. They are forked: imports take most of a start."""
    found: dict[int, int] = {}

    def start(self: Processes, rank: int, environment: Mapping[str, str]) -> Worker:
        connection, life, found[rank] = forked.worker()
        return Worker(rank, Channel(connection), life)

    monkeypatch.setattr(Processes, "_start", start)
    return found


@pytest.fixture(scope="module")
def alone(language: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The undisturbed run, in one process."""
    return go(language_recipe(language, {"name": "grpo"}), tmp_path_factory.mktemp("alone") / "run")

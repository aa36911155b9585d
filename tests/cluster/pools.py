"""Worker processes that several runs of a test file share: to start one takes seconds."""

from __future__ import annotations

from collections.abc import Mapping

from gesso.cluster.channel import Channel
from gesso.cluster.processes import Processes, Worker
from gesso.track.progress import Progress
from tests import forked

MOST = 4  # workers of a run; one more can be a sampler apart


class Forked(Processes):
    """Imports would take 8 s in each of them. They end by themselves."""

    def _start(self, rank: int, environment: Mapping[str, str]) -> Worker:
        connection, life, pid = forked.worker()
        self.pids = [*getattr(self, "pids", []), pid]
        return Worker(rank, Channel(connection), life)


class Borrowed(Processes):
    """Some workers of a pool, which stay alive for the next run."""

    def __init__(self, pool: Processes, count: int, progress: Progress) -> None:
        self.__dict__ = pool.part(0, count).__dict__
        self.progress = progress

    def close(self) -> None:
        """They stay."""

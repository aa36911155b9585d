"""Moments of a run at which tests inject faults: events, never times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from gesso.cluster.collecting import PendingStep
from gesso.cluster.processes import Processes

MOMENTS = ["evaluate", "sample", "score", "update", "publish", "save"]
"""In the order of a run that evaluates before its first step."""


def at_moments(
    patched: pytest.MonkeyPatch,
    moments: Sequence[str],
    happens: Callable[[str], object],
    when: Callable[[], bool] = lambda: True,
    rank: int = 1,
) -> list[str]:
    """Calls `happens` when this worker gets the first of these tasks, then when it gets the next
    one, …, all of them while `when()` is true. "score": when all samples are finished, and the
    driver waits for scores. Returns those that are left."""
    left = list(moments)
    send, result = Processes.send, PendingStep.result

    def reached(moment: str) -> None:
        if left[:1] == [moment] and when():
            happens(left.pop(0))

    def sent(self: Processes, to: int, task: str, content: Any, *data: bytes) -> None:
        send(self, to, task, content, *data)
        if to == rank:
            evaluates = task in ("open", "sample") and content["key"].startswith("None")
            begins = task == "publish" and content["version"] == 0
            reached("evaluate" if evaluates else "begin" if begins else task)

    def waited(self: PendingStep) -> Any:
        reached("score")
        return result(self)

    patched.setattr(Processes, "send", sent)
    patched.setattr(PendingStep, "result", waited)
    return left

"""A run's state of health, and why it stopped, from its log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gesso.health import SERIOUS


def health(kinds: Sequence[str], log: Sequence[str], reason: str) -> dict[str, Any]:
    """green, amber or red, with the sentences that the run logged."""
    sentences = [_sentence(kind, log) for kind in kinds]
    level = "green"
    if kinds:
        level = "red" if SERIOUS.intersection(kinds) else "amber"
    if reason:
        level, sentences = "red", [reason, *sentences]
    return {"level": level, "kinds": list(kinds), "sentences": sentences}


def _sentence(kind: str, log: Sequence[str]) -> str:
    mark = f"warning ({kind}): "
    sentences = [line.split(mark, 1)[1] for line in log if mark in line]
    return sentences[-1] if sentences else kind


def why_stopped(log: Sequence[str]) -> str:
    """Why the run stopped, or "": the last that it noted, but for trackers that end after it."""
    for line in reversed(log):
        text = "".join(line.split(" ", 2)[2:])  # after the date and the time
        if not text.startswith("tracker "):
            return text.removeprefix("stopped: ") if text.startswith("stopped: ") else ""
    return ""

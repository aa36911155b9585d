"""The health of a run, and why it stopped, from its log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gesso.health import SERIOUS


def health(kinds: Sequence[str], log: Sequence[str], reason: str) -> dict[str, Any]:
    """Green, amber or red, with the messages that the run logged."""
    sentences = [_message(kind, log) for kind in kinds]
    level = "green"
    if kinds:
        level = "red" if SERIOUS.intersection(kinds) else "amber"
    if reason:
        level, sentences = "red", [reason, *sentences]
    return {"level": level, "kinds": list(kinds), "sentences": sentences}


def _message(kind: str, log: Sequence[str]) -> str:
    prefix = f"warning ({kind}): "
    messages = [line.split(prefix, 1)[1] for line in log if prefix in line]
    return messages[-1] if messages else kind


def why_stopped(log: Sequence[str]) -> str:
    """Why the run stopped, or "": its last note, ignoring trackers, which finish after it."""
    for line in reversed(log):
        text = "".join(line.split(" ", 2)[2:])  # after the date and the time
        if not text.startswith("tracker "):
            return text.removeprefix("stopped: ") if text.startswith("stopped: ") else ""
    return ""

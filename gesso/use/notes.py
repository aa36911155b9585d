"""Notes about prompts, each delivered once."""

from __future__ import annotations

from collections.abc import Sequence

from gesso.track.progress import Progress
from gesso.types import Prompt
from gesso.use.source import ModelSource
from gesso.zoo import limits


class Once:
    """Passes every note on once: two models that draw the same prompts give the same notes."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._noted: set[str] = set()

    def phase(self, text: str, total: int = 0) -> None:
        self._progress.phase(text, total)

    def advance(self, done: int = 1) -> None:
        self._progress.advance(done)

    def note(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            self._progress.note(text)


def outside(source: ModelSource, prompts: Sequence[Prompt]) -> list[str]:
    """At most one note: prompts unlike those that a bundled model was trained on. An export with
    all its weights says what it was trained from."""
    origin = source.untrained or source.recipe
    known = limits.of(origin.model.path)
    note = known.note(prompts) if known is not None else None
    return [] if note is None else [note]

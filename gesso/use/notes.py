"""Notes about prompts, without repetition."""

from __future__ import annotations

from collections.abc import Sequence

from gesso.track.progress import Progress
from gesso.types import Prompt
from gesso.use.source import ModelSource
from gesso.zoo import limits


class Once:
    """Passes each note on only once: models that sample the same prompts produce the same notes."""

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
    """At most one note: prompts unlike the training data of a bundled model. A full export keeps
    the path of its base model in its recipe."""
    origin = source.untrained or source.recipe
    known = limits.of(origin.model.path)
    note = known.note(prompts) if known is not None else None
    return [] if note is None else [note]

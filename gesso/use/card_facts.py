"""What a model card reports, and its Markdown."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gesso.config import Recipe
from gesso.track.console import held_out_key
from gesso.track.run_folder import RunFolder
from gesso.track.samples import Shown
from gesso.use.loaded import LoadedModel
from gesso.use.source import ModelSource

FOLD = 700  # longer responses are truncated to this number of characters


@dataclass(frozen=True)
class CardFacts:
    """The content of a model card."""

    loaded: LoadedModel
    folder: Path  # of the finished export
    whole: bool  # all weights, not an adapter
    rows: Sequence[Mapping[str, Any]]  # of metrics.jsonl, up to the exported step
    shown: Mapping[int, Sequence[Shown]]  # samples of the first and the last evaluation
    hashes: Mapping[str, tuple[int, str]]

    @property
    def source(self) -> ModelSource:
        return self.loaded.source

    @property
    def recipe(self) -> Recipe:
        assert self.source.training is not None, "only runs are exported"
        return self.source.training

    @property
    def run(self) -> RunFolder:
        assert self.source.run is not None, "only runs are exported"
        return self.source.run

    @property
    def has_images(self) -> bool:
        """Whether samples are images rather than texts."""
        return self.recipe.model.output == "image"

    @property
    def metric(self) -> str:
        """The main held-out metric of the run."""
        return held_out_key(key for row in self.rows for key in row)


def md(text: str) -> str:
    """Escapes text for Markdown, on one line, also within a table."""
    return re.sub(r"([\\`*_{}\[\]<>#|!&])", r"\\\1", " ".join(text.split()))


def fenced(text: str, language: str = "") -> str:
    """A code block whose fence is longer than any run of backticks in its content."""
    shown = text if language or len(text) <= FOLD else text[:FOLD] + " …"
    longest = max((len(run) for run in re.findall("`+", shown)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{shown}\n{fence}"

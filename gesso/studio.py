"""The playground's hands: draws from a run's base and trained weights, with the same seeds, and
scores both by the run's rewards. The model and rewards of the run last asked for stay loaded."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gesso import build
from gesso.track.progress import Progress
from gesso.types import Prompt, Sample, Score, UserError, Which
from gesso.use.source import find
from gesso.use.trained import Drawing, Trained, opened, picture_seeds
from gesso.viewer.play import Ask

SIDES: tuple[Which, Which] = ("reference", "current")  # base and trained


@dataclass(frozen=True)
class Loaded:
    path: Path
    trained: Trained
    rewards: build.Rewards


class Studio:
    def __init__(self) -> None:
        self._loaded: Loaded | None = None

    def draw(self, path: Path, asked: Ask, progress: Progress) -> dict[str, Any]:
        ready = self._load(path, progress)
        prompt = ready.trained.ask(asked.prompt, _pictures(asked))
        if asked.answer:
            prompt = replace(prompt, columns={**prompt.columns, "answer": asked.answer})
        rows, seeds = [0] * asked.n, picture_seeds(asked.seed, asked.n)
        drawn: list[Sample] = []
        for which in SIDES:
            drawing = Drawing(weights=which)
            drawn += ready.trained.draw([prompt], rows, seeds, drawing, progress)
        scores = self._score(ready, prompt, drawn, progress) if asked.score else [None] * len(drawn)
        cells = [_cell(sample, score) for sample, score in zip(drawn, scores, strict=True)]
        step = ready.trained.source.step
        return {"step": step, "base": cells[: asked.n], "trained": cells[asked.n :]}

    def _load(self, path: Path, progress: Progress) -> Loaded:
        source = find(path)
        known = self._loaded
        if known is not None and (known.path, known.trained.source.step) == (path, source.step):
            return known
        self.close()
        trained = opened(source, progress, base=True)
        self._loaded = Loaded(path, trained, build.rewards(trained.recipe))
        return self._loaded

    def _score(
        self, ready: Loaded, prompt: Prompt, drawn: Sequence[Sample], progress: Progress
    ) -> Sequence[Score | None]:
        if refused := ready.rewards.held_out.unfit(prompt):
            progress.note(f"not scored: {refused}")
            return [None] * len(drawn)
        progress.phase("scoring")
        return ready.rewards.service.submit(drawn, held_out=True).result().scores

    def close(self) -> None:
        if self._loaded is not None:
            self._loaded.rewards.service.close()
            self._loaded = None


def _pictures(asked: Ask) -> list[bytes]:
    if not asked.image:
        return []
    try:
        return [base64.b64decode(asked.image, validate=True)]
    except ValueError as error:
        raise UserError(f"the picture is not base64: {error}") from None


def _cell(sample: Sample, score: Score | None) -> dict[str, Any]:
    from PIL import Image

    cell: dict[str, Any] = {"reply": sample.text}
    if sample.image is not None:
        data = io.BytesIO()
        Image.fromarray(sample.image).save(data, "png")
        uri = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
        cell = {"image": uri}
    if score is not None:
        cell |= {"reward": score.value, "parts": dict(score.parts), "text": score.text}
        cell["error"] = score.error
    return cell

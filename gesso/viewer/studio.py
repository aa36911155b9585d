"""What draws for the playground: samples of a run's base and trained weights, with the same seeds,
scored by the run's rewards. The model and rewards of the last run stay loaded."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gesso import build
from gesso.rewards import assembly
from gesso.track.progress import Progress
from gesso.types import Prompt, Sample, Score, UserError, Which
from gesso.use.loaded import Drawing, LoadedModel, open_model, sample_seeds
from gesso.use.notes import Once
from gesso.use.source import find
from gesso.viewer.playground import PlaygroundRequest

SIDES: tuple[Which, Which] = ("reference", "current")  # base and trained


@dataclass(frozen=True)
class LoadedRun:
    path: Path
    trained: LoadedModel
    rewards: assembly.Rewards | None  # None: they are user code, which is not trusted


class Studio:
    """`trust_code`: whether code that a run names as "module:Name" may be imported. The page shows
    runs of others, too, and a click must not run their code."""

    def __init__(self, trust_code: bool = False) -> None:
        self.trust_code = trust_code
        self._loaded: LoadedRun | None = None

    def draw(self, path: Path, request: PlaygroundRequest, progress: Progress) -> dict[str, Any]:
        progress = Once(progress)  # both sides draw the same prompt
        ready = self._load(path, progress)
        prompt = ready.trained.ask(request.prompt, _pictures(request))
        if request.answer:
            prompt = replace(prompt, columns={**prompt.columns, "answer": request.answer})
        rows, seeds = [0] * request.n, sample_seeds(request.seed, request.n)
        drawn: list[Sample] = []
        for which in SIDES:
            drawing = Drawing(weights=which)
            drawn += ready.trained.draw([prompt], rows, seeds, drawing, progress)
        scores = (
            self._score(ready, prompt, drawn, progress) if request.score else [None] * len(drawn)
        )
        cells = [_cell(sample, score) for sample, score in zip(drawn, scores, strict=True)]
        step = ready.trained.source.step
        return {"step": step, "base": cells[: request.n], "trained": cells[request.n :]}

    def _load(self, path: Path, progress: Progress) -> LoadedRun:
        source = find(path)
        known = self._loaded
        if known is not None and (known.path, known.trained.source.step) == (path, source.step):
            return known
        self.close()
        code = {} if self.trust_code else dict(build.user_code(source.recipe))
        for what in ("model", "algorithm"):
            if what in code:
                raise UserError(
                    f'the {what} "{code[what]}" of this run is not part of Gesso; if you trust its '
                    "code, start the page with `gesso view --trust-code`"
                )
        trained = open_model(source, progress, base=True)
        assert source.training is not None, "the page shows runs"
        rewards = None if "reward" in code else assembly.rewards(source.training)
        self._loaded = LoadedRun(path, trained, rewards)
        return self._loaded

    def _score(
        self, ready: LoadedRun, prompt: Prompt, drawn: Sequence[Sample], progress: Progress
    ) -> Sequence[Score | None]:
        if ready.rewards is None:
            progress.note(
                "not scored: a reward of this run is not part of Gesso; if you trust its code, "
                "start the page with `gesso view --trust-code`"
            )
            return [None] * len(drawn)
        if refused := ready.rewards.held_out.unfit(prompt):
            progress.note(f"not scored: {refused}")
            return [None] * len(drawn)
        progress.phase("scoring")
        return ready.rewards.service.submit(drawn, held_out=True).result().scores

    def close(self) -> None:
        if self._loaded is not None:
            if self._loaded.rewards is not None:
                self._loaded.rewards.service.close()
            self._loaded = None


def _pictures(request: PlaygroundRequest) -> list[bytes]:
    if not request.image:
        return []
    try:
        return [base64.b64decode(request.image, validate=True)]
    except ValueError as error:
        raise UserError(f"the picture is not base64: {error}") from None


def _cell(sample: Sample, score: Score | None) -> dict[str, Any]:
    from PIL import Image

    cell: dict[str, Any] = {"response": sample.text}
    if sample.image is not None:
        data = io.BytesIO()
        Image.fromarray(sample.image).save(data, "png")
        uri = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
        cell = {"image": uri}
    if score is not None:
        cell |= {"reward": score.value, "parts": dict(score.parts), "text": score.text}
        cell["error"] = score.error
    return cell

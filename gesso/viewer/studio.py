"""The backend of the playground: samples from a run's base and trained weights with the same seeds,
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
from gesso.track import media
from gesso.track.progress import Progress
from gesso.types import Prompt, Sample, Score, StopRun, UserError, Which
from gesso.use.loaded import SampledModel, SamplingOptions, sample_seeds
from gesso.use.notes import Once
from gesso.use.opening import open_to_sample
from gesso.use.source import find
from gesso.video_files import encode_mp4
from gesso.viewer.playground import PlaygroundRequest

SIDES: tuple[Which, Which] = ("reference", "current")  # base and trained


@dataclass(frozen=True)
class LoadedRun:
    path: Path
    trained: SampledModel
    rewards: assembly.Rewards | None  # None: they include user code that is not trusted


class Studio:
    """`trust_code`: whether user code that a run refers to as "module:Name" may be imported. The
    page may also show runs of other users, and a click must not run their code."""

    def __init__(self, trust_code: bool = False) -> None:
        self.trust_code = trust_code
        self._loaded: LoadedRun | None = None

    def generate(
        self, path: Path, request: PlaygroundRequest, progress: Progress
    ) -> dict[str, Any]:
        try:
            return self._generate(path, request, Once(progress))  # both sides use the same prompt
        except StopRun as error:  # a worker process has ended
            self.close()
            raise StopRun(f"{error}; the next request starts the workers again") from error

    def _generate(
        self, path: Path, request: PlaygroundRequest, progress: Progress
    ) -> dict[str, Any]:
        loaded = self._load(path, progress)
        prompt = loaded.trained.ask(request.prompt, _images(request))
        if request.answer:
            prompt = replace(prompt, columns={**prompt.columns, "answer": request.answer})
        rows, seeds = [0] * request.n, sample_seeds(request.seed, request.n)
        samples: list[Sample] = []
        for which in SIDES:
            settings = SamplingOptions(weights=which)
            samples += loaded.trained.draw([prompt], rows, seeds, settings, progress)
        scores: Sequence[Score | None] = [None] * len(samples)
        if request.score:
            scores = self._score(loaded, prompt, samples, progress)
        cells = [_cell(sample, score) for sample, score in zip(samples, scores, strict=True)]
        step = loaded.trained.source.step
        return {"step": step, "base": cells[: request.n], "trained": cells[request.n :]}

    def _load(self, path: Path, progress: Progress) -> LoadedRun:
        source = find(path)
        last = self._loaded
        if last is not None and (last.path, last.trained.source.step) == (path, source.step):
            return last
        self.close()
        code = {} if self.trust_code else dict(build.user_code(source.recipe))
        for what in ("model", "algorithm"):
            if what in code:
                raise UserError(
                    f'the {what} "{code[what]}" of this run is user code; if you trust it, start '
                    "the page with `gesso view --trust-code`"
                )
        trained = open_to_sample(source, progress, base=True)
        assert source.training is not None, "the page shows runs"
        rewards = None if "reward" in code else assembly.rewards(source.training)
        self._loaded = LoadedRun(path, trained, rewards)
        return self._loaded

    def _score(
        self, loaded: LoadedRun, prompt: Prompt, samples: Sequence[Sample], progress: Progress
    ) -> Sequence[Score | None]:
        if loaded.rewards is None:
            progress.note(
                "not scored: a reward of this run is user code; if you trust it, start the page "
                "with `gesso view --trust-code`"
            )
            return [None] * len(samples)
        service, n = loaded.rewards.service, len(samples) // len(SIDES)
        reason = loaded.rewards.held_out.unfit(prompt)
        if n < 2 and (names := service.groupwise(held_out=True)):
            reason = f"{names[0]} compares the samples of a prompt; generate at least 2"
        if reason:
            progress.note(f"not scored: {reason}")
            return [None] * len(samples)
        progress.phase("scoring")
        scoring = service.begin([i // n for i in range(len(samples))], held_out=True)
        scoring.add(range(len(samples)), samples)
        return scoring.result().scores

    def close(self) -> None:
        if self._loaded is not None:
            self._loaded.trained.close()
            if self._loaded.rewards is not None:
                self._loaded.rewards.service.close()
            self._loaded = None


def _images(request: PlaygroundRequest) -> list[bytes]:
    try:
        return [base64.b64decode(image, validate=True) for image in request.images]
    except ValueError as error:
        raise UserError(f"an image is not valid base64: {error}") from None


def _uri(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _cell(sample: Sample, score: Score | None) -> dict[str, Any]:
    cell: dict[str, Any] = {"response": sample.text}
    if sample.image is not None:
        data = io.BytesIO()
        media.still(sample).save(data, "png")
        cell = {"image": _uri("image/png", data.getvalue())}
    if sample.is_video:
        assert sample.fps is not None, "a video has fps"
        cell |= {"video": _uri("video/mp4", encode_mp4(sample.frames, sample.fps))}
        cell["fps"] = sample.fps
    if score is not None:
        cell |= {"reward": score.value, "parts": dict(score.parts), "text": score.text}
        cell["error"] = score.error
    return cell

"""Samples of some prompts from one model or several, with the same seeds: drawn, scored if
requested, and written to files whose names say what they are."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gesso.config import MAX_SAMPLES, DataSource
from gesso.data import prompts as data
from gesso.data.chat import ChatFormat
from gesso.rewards import assembly
from gesso.track.progress import SILENT, Progress
from gesso.types import Prompt, Sample, Score, UserError
from gesso.use.evaluate import drawn_and_scored, free, reward_entry
from gesso.use.loaded import AS_EVALUATED, Drawing, LoadedModel, open_model, sample_seeds
from gesso.use.notes import Once
from gesso.use.source import ModelSource


@dataclass(frozen=True)
class Wanted:
    prompts: Sequence[str] = ()
    file: Path | None = None  # of more prompts
    images: Sequence[Path] = ()  # to look at, with each of `prompts`
    n: int = 1
    seed: int = 0
    rewards: Sequence[str] = ()
    drawing: Drawing = AS_EVALUATED

    def __post_init__(self) -> None:
        if not 1 <= self.n <= MAX_SAMPLES:
            raise UserError(f"sample wants --n from 1 to {MAX_SAMPLES:,}, got {self.n}")
        if not self.prompts and self.file is None:
            raise UserError("sample wants a prompt, or --prompts FILE")


@dataclass(frozen=True)
class Drawn:
    """n samples of each prompt, prompt by prompt."""

    source: ModelSource
    texts: bool  # the samples are texts; else images
    n: int
    seed: int
    samples: Sequence[Sample]
    scores: Sequence[Score]  # none without rewards

    def __iter__(self) -> Iterator[tuple[int, int, Sample, Score | None]]:
        """(prompt, which of its n, sample, score)"""
        for i, sample in enumerate(self.samples):
            yield *divmod(i, self.n), sample, self.scores[i] if self.scores else None


def draw_all(
    sources: Sequence[ModelSource], wanted: Wanted, progress: Progress = SILENT
) -> list[Drawn]:
    """Each model is loaded, sampled from and released before the next."""
    progress, first = Once(progress), sources[0]
    entries = [reward_entry(name, first.training) for name in wanted.rewards]
    rewards = assembly.of_entries(entries, entries, first.recipe.model) if entries else None
    drawn = []
    try:
        for source in sources:
            loaded = open_model(source, progress)
            drawn.append(_drawn(loaded, wanted, rewards, progress))
            del loaded
            free()
    finally:
        if rewards is not None:
            rewards.service.close()
    return drawn


def _drawn(
    loaded: LoadedModel, wanted: Wanted, rewards: assembly.Rewards | None, progress: Progress
) -> Drawn:
    prompts = _prompts(loaded, wanted, progress)
    row = [i for i in range(len(prompts)) for _ in range(wanted.n)]
    seeds = sample_seeds(wanted.seed, wanted.n) * len(prompts)
    scores: list[Score] = []
    if rewards is None:
        samples = loaded.draw(prompts, row, seeds, wanted.drawing, progress)
    else:
        samples, scores = drawn_and_scored(
            loaded, rewards.service, prompts, row, seeds, wanted.drawing, progress
        )
    return Drawn(loaded.source, loaded.gives_text, wanted.n, wanted.seed, samples, scores)


def _prompts(loaded: LoadedModel, wanted: Wanted, progress: Progress) -> list[Prompt]:
    prompts = [loaded.ask(text, wanted.images) for text in wanted.prompts]
    if wanted.file is None:
        return prompts
    source = DataSource(path=str(wanted.file))
    form = ChatFormat.of(loaded.recipe.data)
    more, report = data.from_sources([source], form, lambda prompt: None)
    more = loaded.fitting(more, source.path, report)
    for note in report.notes:
        progress.note(note)
    return prompts + more


def save(drawn_all: Sequence[Drawn], folder: Path) -> dict[tuple[str, int, int], Path]:
    """Pictures into files; (model, prompt, which) → file. The name says prompt, seed and model; so
    does what PNG keeps beside the pixels."""
    try:
        return _save(drawn_all, folder)
    except OSError as error:
        raise UserError(f"pictures cannot be written to {folder}: {error}") from error


def _save(drawn_all: Sequence[Drawn], folder: Path) -> dict[tuple[str, int, int], Path]:
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for drawn in drawn_all:
        several = len(drawn.samples) > drawn.n
        for i, j, sample, _ in drawn:
            number = f"{i + 1:03d}-" if several else ""
            seed = f"seed{drawn.seed}-{j}"
            file = folder / f"{number}{slug(sample.prompt.text)}_{seed}_{drawn.source.label}.png"
            about = PngInfo()
            metadata = {"prompt": sample.prompt.text, "seed": seed, "model": drawn.source.name}
            for key, value in metadata.items():
                about.add_itxt(key, value)
            Image.fromarray(sample.pixels).save(file, pnginfo=about)
            files[drawn.source.name, i, j] = file
    return files


def slug(text: str, most: int = 48) -> str:
    words = re.findall(r"[a-z0-9]+", text.lower())
    return "-".join(words)[:most].strip("-") or "prompt"


def save_sheet(drawn_all: Sequence[Drawn], file: Path) -> None:
    if drawn_all[0].texts:
        raise UserError("this model writes; a sheet is of pictures, leave out --sheet")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        _sheet(drawn_all).save(file)
    except (OSError, ValueError) as error:
        raise UserError(f"the sheet {file} cannot be written: {error}") from error


def _sheet(drawn_all: Sequence[Drawn]) -> Any:
    """Of one model a row a prompt; of several a row a picture, the models side by side."""
    from PIL import Image

    from gesso.use.sheets import Cell, Row, sheet

    def cell(drawn: Drawn, i: int) -> Cell:
        caption = (
            caption_of(drawn.scores[i]) if drawn.scores else f"seed {drawn.seed}-{i % drawn.n}"
        )
        return Cell(Image.fromarray(drawn.samples[i].pixels), caption)

    first = drawn_all[0]
    count = len(first.samples)
    if len(drawn_all) > 1:
        rows = [
            Row(first.samples[i].prompt.text, [cell(d, i) for d in drawn_all]) for i in range(count)
        ]
        return sheet(rows, [drawn.source.name for drawn in drawn_all])
    starts = range(0, count, first.n)
    return sheet(
        [
            Row(first.samples[s].prompt.text, [cell(first, i) for i in range(s, s + first.n)])
            for s in starts
        ],
        [first.source.name],
    )


def caption_of(score: Score) -> str:
    if not score.ok:
        return f"no score: {score.error or 'it does not apply'}"
    parts = [f"{name} {value:.3f}" for name, value in score.parts.items() if "/" not in name]
    return ", ".join(parts)


def report(
    drawn_all: Sequence[Drawn], files: dict[tuple[str, int, int], Path]
) -> tuple[str, dict[str, Any]]:
    """What the command answers: lines for a person, and the same for a program."""
    lines, rows = [], []
    many = len(drawn_all) > 1 or len(drawn_all[0].samples) > drawn_all[0].n
    for drawn in drawn_all:
        for i, j, sample, score in drawn:
            key = drawn.source.name, i, j
            scored = "" if score is None else f"  {caption_of(score)}"
            if drawn.texts:
                head = [f"# {drawn.source.name}: {sample.prompt.text}"] if many and j == 0 else []
                lines += [*head, sample.response, *([scored.strip()] if scored else [])]
            else:
                lines.append(f"{files[key]}{scored}")
            rows.append(_row(drawn, j, sample, score) | _where(drawn, files.get(key), sample))
    return "\n".join(lines), {"samples": rows}


def _row(drawn: Drawn, j: int, sample: Sample, score: Score | None) -> dict[str, Any]:
    row = {
        "model": drawn.source.name,
        "prompt": sample.prompt.text,
        "seed": drawn.seed,
        "sample": j,
    }
    if score is None:
        return row
    value = score.value if score.ok else None
    return row | {"reward": value, "parts": dict(score.parts), "error": score.error}


def _where(drawn: Drawn, file: Path | None, sample: Sample) -> dict[str, Any]:
    return {"response": sample.response} if drawn.texts else {"file": str(file)}

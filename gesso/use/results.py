"""The files of `gesso eval --out`: metrics, every sample with its score, images, contact sheet."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gesso.track import media
from gesso.types import Sample, Score, UserError
from gesso.use.evaluate import Evaluation, summary
from gesso.use.sampling import caption_of

SHOWN = 24  # prompts on the sheet


def write(evaluations: Sequence[Evaluation], folder: Path) -> None:
    """eval.json, samples.jsonl; for image models also images/N/PROMPT-SAMPLE.png (of videos .mp4
    next to it) and sheet.png."""
    try:
        _write(evaluations, folder)
    except OSError as error:
        raise UserError(f"the results cannot be written to {folder}: {error}") from error


def _write(evaluations: Sequence[Evaluation], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number, result in enumerate(evaluations):
        n = len(result.samples) // len(result.prompts)
        for i, (sample, score) in enumerate(zip(result.samples, result.scores, strict=True)):
            name = f"{result.row[i]:04d}-{i % n}.png"
            file = _save(sample, folder / "images" / str(number) / name)
            image = str(file.relative_to(folder)) if file else None
            lines.append(json.dumps(_row(result.name, sample, score, image)) + "\n")
    (folder / "samples.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "eval.json").write_text(
        json.dumps(summary(evaluations), indent=2) + "\n", encoding="utf-8"
    )
    if evaluations[0].samples[0].image is not None:
        _sheet(evaluations).save(folder / "sheet.png")


def _save(sample: Sample, file: Path) -> Path | None:
    if sample.image is None:
        return None
    file.parent.mkdir(parents=True, exist_ok=True)
    return media.save(sample, file)


def _row(name: str, sample: Sample, score: Score, image: str | None) -> dict[str, Any]:
    return {
        "model": name,
        "prompt": sample.prompt.text,
        "seed": sample.seed,
        "image": image,
        "response": sample.text,
        "reward": score.value if score.ok else None,
        "parts": dict(score.parts),
        "text": score.text,
        "error": score.error,
    }


def _sheet(evaluations: Sequence[Evaluation]) -> Any:
    """The first sample of the first prompts, the models side by side."""
    from gesso.use.sheets import Cell, Row, sheet

    n = len(evaluations[0].samples) // len(evaluations[0].prompts)
    rows = []
    for p, prompt in enumerate(evaluations[0].prompts[:SHOWN]):
        i = p * n
        cells = [Cell(media.shown(e.samples[i]), caption_of(e.scores[i])) for e in evaluations]
        rows.append(Row(prompt.text, cells))
    sources = [[i.open() for i in p.images] for p in evaluations[0].prompts[:SHOWN]]
    return sheet(rows, [evaluation.name for evaluation in evaluations], sources)

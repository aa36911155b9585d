"""Samples of a model card, before and after training."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from gesso.track.run_folder import RunFolder
from gesso.track.samples import Shown, input_images
from gesso.use.card_facts import CardFacts, fenced, md
from gesso.use.sheets import Cell, Row, sheet

SHEET = "samples.png"
IMAGES, RESPONSES = 8, 4  # prompts shown


def samples(facts: CardFacts, aside: Path) -> str:
    if not facts.shown:
        return ""
    first, last = min(facts.shown), max(facts.shown)
    before = {row.index: row for row in facts.shown[first]}
    pairs = [(before.get(row.index, row), row) for row in facts.shown[last]]
    head = f"## Samples\n\nThe first prompts of the evaluation, without selection, at step {first}"
    head += f" and step {last}, from the same seeds." if last != first else "."
    if facts.has_images:
        return f"{head}\n\n{_sheet(facts, pairs[:IMAGES], (first, last), aside)}"
    return f"{head}\n\n{_responses(facts, pairs[:RESPONSES], (first, last), aside)}"


def _sheet(
    facts: CardFacts, pairs: Sequence[tuple[Shown, Shown]], steps: tuple[int, int], aside: Path
) -> str:
    """A contact sheet, and its prompts as text, since its font does not support all characters."""
    ends = steps if steps[0] != steps[1] else steps[:1]
    rows = [
        Row(f"{i}. {pair[0].prompt}", [_cell(facts.run, s, shown) for s, shown in _of(ends, pair)])
        for i, pair in enumerate(pairs, 1)
    ]
    sources = [input_images(facts.run.path, pair[0]) for pair in pairs]
    sheet(rows, [f"step {step}" for step in ends], sources).save(aside / SHEET)
    prompts = "\n".join(f"{i}. {md(pair[0].prompt)}" for i, pair in enumerate(pairs, 1))
    return f"![images before and after training]({SHEET})\n\n{prompts}"


def _of(steps: Sequence[int], pair: Sequence[Shown]) -> list[tuple[int, Shown]]:
    return list(zip(steps, pair, strict=False))


def _cell(run: RunFolder, step: int, row: Shown) -> Cell:
    from PIL import Image

    reward = "no score" if row.reward is None else f"{row.reward:.3f}"
    text = f'   "{row.text}"' if row.text else ""
    try:
        with Image.open(run.path / "samples" / f"{step:06d}" / Path(row.strip).name) as opened:
            return Cell(opened.convert("RGB"), reward + text)
    except Exception:  # Pillow raises many types for damaged files; show the others anyway
        return Cell(None, f"{row.image} cannot be read")


def _responses(
    facts: CardFacts, pairs: Sequence[tuple[Shown, Shown]], steps: tuple[int, int], aside: Path
) -> str:
    parts = []
    for number, (before, after) in enumerate(pairs, 1):
        answer = f" (expected answer: {md(after.answer)})" if after.answer else ""
        lines = [f"**{md(after.prompt)}**{answer}", ""]
        for k, name in enumerate(after.shown, 1):
            file = facts.run.path / "samples" / "prompts" / Path(name).name
            if file.is_file():
                copy = f"prompt-{number}-{k}.png"
                shutil.copyfile(file, aside / copy)
                lines += [f"![image {k} of the prompt]({copy})", ""]
        for step, row in dict(zip(steps, (before, after), strict=True)).items():
            reward = "no score" if row.reward is None else f"reward {row.reward:.3f}"
            lines += [f"Step {step}, {reward}:", fenced(row.response)]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)

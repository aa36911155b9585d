"""Contact sheets, and curves over the steps of a run. Rendered with Pillow only; its default font
supports little more than ASCII."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gesso.track.figures import Points, ticks

if TYPE_CHECKING:
    from PIL.Image import Image

CELL = 240  # px: small images are enlarged by an integer factor to at most this size
LARGEST = 384  # px: larger images are shrunk to this size
GAP, LINE = 12, 20  # px between images, and per line of text
PAPER, INK, FAINT, GRID = "#ffffff", "#17171a", "#6b6b73", "#e4e4e9"
SOURCE = "source"  # caption of an input image
COLOURS = ("#c2410c", "#1d4ed8", "#15803d", "#a21caf")
FINE = 3  # supersampling factor of curves, since Pillow's lines are not antialiased


@dataclass(frozen=True)
class Cell:
    image: Image | None  # None if there is no image; the caption gives the reason
    caption: str = ""


@dataclass(frozen=True)
class Row:
    label: str
    cells: Sequence[Cell]


def sheet(
    rows: Sequence[Row], columns: Sequence[str] = (), sources: Sequence[Sequence[Image]] = ()
) -> Image:
    """A row of images under each label; `columns` are the headings, `sources` the input images of
    each row, which come first."""
    from PIL import Image, ImageDraw

    most = max(map(len, sources), default=0)
    if most:
        pairs = zip(rows, sources, strict=True)
        rows = [Row(row.label, [*_source_cells(each, most), *row.cells]) for row, each in pairs]
        columns = [*[""] * most, *columns] if columns else ()
    scaled = [[_scaled(cell.image) for cell in row.cells] for row in rows]
    sizes = [p.size for line in scaled for p in line if p is not None] or [(CELL, CELL // 2)]
    width = max(w for w, _ in sizes) + GAP
    texts = 2 * LINE + GAP  # label and captions
    heights = [max((p.height for p in line if p), default=CELL // 2) + texts for line in scaled]
    across = max(len(row.cells) for row in rows)
    top = GAP + (LINE if columns else 0)
    image = Image.new("RGB", (GAP + width * across, top + sum(heights)), PAPER)
    pen = ImageDraw.Draw(image)
    for column, title in enumerate(columns):
        pen.text((GAP + column * width, GAP // 2), _fit(title, width, 15), fill=INK, font=_font(15))
    for row, images, height in zip(rows, scaled, heights, strict=True):
        pen.text((GAP, top), _fit(row.label, width * across, 13), fill=INK, font=_font(13))
        for column, (cell, cell_image) in enumerate(zip(row.cells, images, strict=True)):
            left, below = GAP + column * width, top + LINE
            if cell_image is not None:
                image.paste(cell_image, (left, below))
                below += cell_image.height
            caption = _fit(cell.caption, width, 13)
            pen.text((left, below + 2), caption, fill=FAINT, font=_font(13))
        top += height
    return image


def _source_cells(images: Sequence[Image], count: int) -> list[Cell]:
    missing = [Cell(None)] * (count - len(images))
    return [*(Cell(image, SOURCE) for image in images), *missing]


def _scaled(image: Image | None) -> Image | None:
    from PIL.Image import Resampling

    if image is None:
        return None
    longest = max(image.size)
    if longest > LARGEST:
        factor = LARGEST / longest
        size = max(1, round(image.width * factor)), max(1, round(image.height * factor))
        return image.resize(size, Resampling.LANCZOS)
    zoom = max(1, CELL // longest)
    return image.resize((image.width * zoom, image.height * zoom), Resampling.NEAREST)


def curve(title: str, lines: Mapping[str, Points], size: tuple[int, int] = (640, 320)) -> Image:
    """Values over steps, one colour per line, labelled with the last value."""
    from PIL import Image, ImageDraw
    from PIL.Image import Resampling

    lines = {name: points for name, points in lines.items() if points}
    steps = [step for points in lines.values() for step, _ in points]
    values = [value for points in lines.values() for _, value in points]
    marks = ticks(min(values), max(values), 4)
    start, reach = min(steps), max(max(steps) - min(steps), 1)
    (width, height), (left, right, head, foot) = size, (56, 72, 46, 34)

    def at(step: int, value: float) -> tuple[float, float]:
        x = left + (step - start) / reach * (width - left - right)
        share = (marks[-1] - value) / (marks[-1] - marks[0])
        return x * FINE, (head + share * (height - head - foot)) * FINE

    image = Image.new("RGB", (width * FINE, height * FINE), PAPER)
    pen = ImageDraw.Draw(image)
    gap = marks[1] - marks[0]

    def write(x: float, y: float, text: str, colour: str, anchor: str, points: int = 12) -> None:
        pen.text((x, y), plain(text), fill=colour, font=_font(points * FINE), anchor=anchor)

    for mark in marks:
        y = at(start, mark)[1]
        pen.line([left * FINE, y, (width - right) * FINE, y], fill=GRID, width=FINE)
        write((left - 8) * FINE, y, f"{mark:.{_digits(gap)}f}", FAINT, "rm")
    for step in dict.fromkeys((start, start + reach)):
        write(at(step, marks[0])[0], (height - foot + 8) * FINE, f"step {step}", FAINT, "mt")
    write(left * FINE, 10 * FINE, title, INK, "lt", 14)
    x, labels = float(left), list[float]()
    for (name, points), colour in zip(lines.items(), COLOURS, strict=False):
        path = [at(*point) for point in points]
        pen.line(path, fill=colour, width=2 * FINE, joint="curve")
        for px, py in path if len(path) <= 24 else (path[0], path[-1]):
            pen.ellipse([px - 3 * FINE, py - 3 * FINE, px + 3 * FINE, py + 3 * FINE], fill=colour)
        y = path[-1][1]
        while any(abs(y - other) < 13 * FINE for other in labels):  # no overlap
            y += 13 * FINE
        labels.append(y)
        write(path[-1][0] + 8 * FINE, y, f"{points[-1][1]:.3f}", colour, "lm")
        if len(lines) > 1:
            write(x * FINE, 29 * FINE, name, colour, "lt")
            x += _font(12).getlength(plain(name)) + 18
    return image.resize(size, Resampling.LANCZOS)


def _digits(gap: float) -> int:
    return next((n for n in range(6) if gap * 10**n >= 0.999), 6)


def plain(text: str) -> str:
    """The text in characters that the font supports, with "?" for all others."""
    marks = {"→": "->", "–": "-", "—": "-", "−": "-", "…": "...", "“": '"', "”": '"', "’": "'"}
    for mark, ascii_mark in marks.items():
        text = text.replace(mark, ascii_mark)
    letters = unicodedata.normalize("NFKD", " ".join(text.split()))
    letters = "".join(c for c in letters if not unicodedata.combining(c))
    return letters.encode("ascii", "replace").decode()


def _fit(text: str, width: int, size: int) -> str:
    """The text, shortened to `width` pixels."""
    text, font = plain(text), _font(size)
    if font.getlength(text) <= width - GAP:
        return text
    while text and font.getlength(text + "...") > width - GAP:
        text = text[:-1]
    return text + "..."


def _font(size: int) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size)

"""Renders words on signs, clean or spoiled (degraded), with a font that matplotlib ships.

The font is DejaVu Sans Bold (Bitstream Vera licence; the changes of the DejaVu project are in the
public domain). The model contains no font data, only what it learned from rendered images.

An image is uint8 (32, 96, 3), RGB. The word fills the sign, and the sign's colour determines the
letter colour. Only the position (± 1 pixel) and the spoiling are random.
"""

import random
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gesso.zoo.words import COLOURS, PAINT, prompt_for

HEIGHT, WIDTH = 32, 96
FONT = "DejaVuSans-Bold.ttf"
SPOILINGS = ("tiny", "blurred", "crowded", "turned", "pixelated", "struck")


class RenderJob(NamedTuple):
    """A batch of words for one worker; its seed makes it independent of the others."""

    words: list[str]
    spoiled: bool
    seed: int


class Rendered(NamedTuple):
    prompts: list[str]
    images: np.ndarray  # uint8 (N, 32, 96, 3)


def draw_job(job: RenderJob) -> Rendered:
    rng = random.Random(job.seed)
    prompts, images = [], []
    for word in job.words:
        colour = rng.choice(COLOURS)
        spoiling = rng.choice(SPOILINGS) if job.spoiled else None
        prompts.append(prompt_for(word, colour))
        images.append(draw(word, colour, rng, spoiling))
    return Rendered(prompts, np.stack(images))


def draw(
    word: str,
    colour: str,
    rng: random.Random,
    spoiling: str | None = None,
    pitch: float | None = None,
) -> np.ndarray:
    """Renders `word` on a sign; `spoiling` (None or one of SPOILINGS) makes it hard to read.

    `pitch`: pixels from a letter to the next. By default each letter takes its own width, and the
    word is not exactly in the middle.
    """
    if spoiling is not None and spoiling not in SPOILINGS:
        raise ValueError(f"unknown spoiling {spoiling!r}; use None or one of {SPOILINGS}")
    mask = _write(word, rng, spoiling, pitch)
    if spoiling == "blurred":
        mask = _blurred(mask, rng.uniform(2.8, 4.0))
    elif spoiling == "pixelated":
        mask = _pixelated(mask, 4)
    elif spoiling == "struck":
        _strike(mask, rng, lines=7)
    sign, letters = (np.array(paint, dtype=np.float32) for paint in PAINT[colour])
    alpha = np.asarray(mask, dtype=np.float32)[..., None] / 255
    return (sign + alpha * (letters - sign)).round().astype(np.uint8)


def letters(word: str, pitch: float) -> np.ndarray:
    """Where the letters are, from 0 to 255: uint8 (32, 96)."""
    return np.asarray(_write(word, random.Random(0), None, pitch))


def _write(word: str, rng: random.Random, spoiling: str | None, pitch: float | None) -> Any:
    """Renders a greyscale mask, letter by letter, so that letters can be crowded or turned."""
    from PIL import Image

    size = rng.randint(6, 7) if spoiling == "tiny" else 24 if pitch is None else round(pitch - 2)
    spread = rng.uniform(0.52, 0.62) if spoiling == "crowded" else 1.0
    if pitch is None:
        while sum(advances := _advances(word, size, spread)) > WIDTH - 6:
            size -= 1
    else:
        advances = [spread * pitch] * len(word)
    jitter = 1 if pitch is None else 0
    x = (WIDTH - sum(advances)) / 2 + rng.uniform(-jitter, jitter)
    y = HEIGHT / 2 + rng.uniform(-jitter, jitter)
    mask = Image.new("L", (WIDTH, HEIGHT), 0)
    for letter, advance in zip(word, advances, strict=True):
        angle = rng.choice((-1, 1)) * rng.uniform(30, 60) if spoiling == "turned" else 0.0
        _stamp(mask, letter, _font(size), x + advance / 2, y, angle)
        x += advance
    return mask


def _advances(word: str, size: int, spread: float) -> list[float]:
    font = _font(size)
    return [spread * font.getlength(letter) for letter in word]


def _stamp(mask: Any, letter: str, font: Any, x: float, y: float, angle: float) -> None:
    """Draws one letter centred at (x, y), turned by `angle` degrees."""
    from PIL import Image, ImageChops, ImageDraw

    layer = Image.new("L", mask.size, 0)
    ImageDraw.Draw(layer).text((x, y), letter, font=font, anchor="mm", fill=255)
    if angle:
        layer = layer.rotate(angle, resample=Image.Resampling.BILINEAR, center=(x, y))
    mask.paste(ImageChops.lighter(mask, layer))


def _blurred(mask: Any, radius: float) -> Any:
    from PIL import ImageFilter

    return mask.filter(ImageFilter.GaussianBlur(radius))


def _pixelated(mask: Any, factor: int) -> Any:
    from PIL import Image

    small = mask.resize((WIDTH // factor, HEIGHT // factor), Image.Resampling.BOX)
    return small.resize((WIDTH, HEIGHT), Image.Resampling.NEAREST)


def _strike(mask: Any, rng: random.Random, lines: int) -> None:
    from PIL import ImageDraw

    draw_on = ImageDraw.Draw(mask)
    for _ in range(lines):
        ends = ((0, rng.uniform(4, HEIGHT - 4)), (WIDTH, rng.uniform(4, HEIGHT - 4)))
        draw_on.line(ends, fill=255, width=2)


@cache
def _font(size: int) -> Any:
    import matplotlib
    from PIL import ImageFont

    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts/ttf" / FONT), size)

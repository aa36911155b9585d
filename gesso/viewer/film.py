"""An evolution for download: an animation of one prompt (GIF or MP4), or a contact sheet of all
prompts."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gesso.use import sheets
from gesso.video_files import encode_mp4
from gesso.viewer.files import NotShown, image_file
from gesso.viewer.reading import RunReader
from gesso.viewer.thinning import spread

if TYPE_CHECKING:
    from PIL import Image

FILM = 384  # px: width of frames; smaller images are magnified by an integer factor
CAPTION = 22  # px: height of the caption below an image
PER_SECOND = 3  # frames per second
REST = 4  # duration of the last frame, in frames
ROWS, COLUMNS = 24, 12  # maximum size of a contact sheet
PAPER, FAINT = (255, 255, 255), (110, 110, 110)


def frames(reader: RunReader, prompt: int) -> list[Image.Image]:
    """Images of one prompt over training, with step and reward below each."""
    evolution = reader.evolution()
    of_index = [row for row in evolution["prompts"] if row["index"] == prompt]
    if not of_index:
        raise NotShown(f"{reader.path.name} has no samples of prompt {prompt}")
    captioned = []
    for step, cell in zip(evolution["steps"], of_index[0]["cells"], strict=True):
        if cell and "image" in cell:
            shown = _as_wide(_open(reader.path, cell["image"]), FILM)
            captioned.append(_captioned(shown, f"step {step}   {_score(cell)}"))
    if not captioned:
        raise NotShown(f"prompt {prompt} of {reader.path.name} has no images for an animation")
    widest = max(frame.width for frame in captioned), max(frame.height for frame in captioned)
    return [_even(frame, *widest) for frame in captioned]


def gif(frames: Sequence[Image.Image]) -> bytes:
    data = io.BytesIO()
    shown = [1000 // PER_SECOND] * (len(frames) - 1) + [REST * 1000 // PER_SECOND]
    first, *rest = frames
    first.save(data, "gif", save_all=True, append_images=rest, duration=shown, loop=0)
    return data.getvalue()


def mp4(frames: Sequence[Image.Image]) -> bytes:
    import numpy as np

    shown = [*frames, *[frames[-1]] * (REST - 1)]
    return encode_mp4(np.stack([np.asarray(frame) for frame in shown]), PER_SECOND)


def sheet(reader: RunReader) -> bytes:
    """All prompts, one per row, with the evaluations from left to right; as PNG."""
    evolution = reader.evolution()
    columns = spread(range(len(evolution["steps"])), COLUMNS)
    prompts = [p for p in evolution["prompts"] if any(c and "image" in c for c in p["cells"])]
    if not prompts:
        raise NotShown(f"{reader.path.name} has no images for a contact sheet")
    rows = [
        sheets.Row(_one_line(p["prompt"]), [_cell(reader.path, p["cells"][i]) for i in columns])
        for p in prompts[:ROWS]
    ]
    data = io.BytesIO()
    sources = [[_open(reader.path, name) for name in p["shown"]] for p in prompts[:ROWS]]
    sheets.sheet(rows, [f"step {evolution['steps'][i]}" for i in columns], sources).save(
        data, "png"
    )
    return data.getvalue()


def _cell(run: Path, cell: dict[str, Any] | None) -> sheets.Cell:
    if not cell or "image" not in cell:
        return sheets.Cell(None, "no image")
    return sheets.Cell(_open(run, cell["image"]), _score(cell))


def _open(run: Path, name: str) -> Image.Image:
    """A grey image if the file cannot be read."""
    from PIL import Image

    try:
        with Image.open(image_file(run, name)) as opened:
            return opened.convert("RGB")
    except Exception:  # a damaged image must not prevent the export of the others
        return Image.new("RGB", (FILM // 2, FILM // 4), (200, 200, 200))


def _as_wide(image: Image.Image, width: int) -> Image.Image:
    """Downscales smoothly, upscales by an integer factor."""
    from PIL import Image

    if image.width > width:
        height = max(1, round(image.height * width / image.width))
        return image.resize((width, height), Image.Resampling.LANCZOS)
    factor = max(1, width // image.width)
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)


def _captioned(image: Image.Image, text: str) -> Image.Image:
    from PIL import Image, ImageDraw

    canvas = Image.new("RGB", (image.width, image.height + CAPTION), PAPER)
    canvas.paste(image, (0, 0))
    ImageDraw.Draw(canvas).text((2, image.height + 3), text, fill=FAINT, font=_font())
    return canvas


def _even(image: Image.Image, width: int, height: int) -> Image.Image:
    """Pads to a canvas of this size, rounded up to even numbers as H.264 requires."""
    from PIL import Image

    canvas = Image.new("RGB", (width + width % 2, height + height % 2), PAPER)
    canvas.paste(image, (0, 0))
    return canvas


def _score(cell: dict[str, Any]) -> str:
    return "no score" if cell["reward"] is None else f"{cell['reward']:.3f}"


def _one_line(text: str, most: int = 110) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


def _font() -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(13)

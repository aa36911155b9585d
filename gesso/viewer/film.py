"""An evolution to take away: a film of one prompt (GIF or MP4), or a sheet of all of them."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gesso.types import UserError
from gesso.viewer.files import NotShown, picture
from gesso.viewer.reading import Reader, spread

if TYPE_CHECKING:
    from PIL import Image

CELL = 192  # px: the width of a sheet's pictures
FILM = 384  # px: of a film's; smaller ones are magnified by a whole factor
CAPTION = 22  # px under a picture
GAP = 8
PER_SECOND = 3  # pictures of a film
REST = 4  # times as long is the last one shown
ROWS, COLUMNS = 24, 12  # of a sheet, at most
INK, PAPER, FAINT = (23, 23, 23), (255, 255, 255), (110, 110, 110)


def frames(reader: Reader, prompt: int) -> list[Image.Image]:
    """Pictures of one prompt over training, with step and reward under each."""
    found = reader.evolution()
    of_index = [row for row in found["prompts"] if row["index"] == prompt]
    if not of_index:
        raise NotShown(f"no prompt {prompt} among the samples of {reader.path.name}")
    made = []
    for step, cell in zip(found["steps"], of_index[0]["cells"], strict=True):
        if cell and "image" in cell:
            made.append(_captioned(_open(reader.path, cell["image"], FILM), _says(step, cell)))
    if not made:
        raise NotShown(f"prompt {prompt} of {reader.path.name} has no pictures to make a film of")
    widest = max(frame.width for frame in made), max(frame.height for frame in made)
    return [_even(frame, *widest) for frame in made]


def gif(pictures: Sequence[Image.Image]) -> bytes:
    data = io.BytesIO()
    shown = [1000 // PER_SECOND] * (len(pictures) - 1) + [REST * 1000 // PER_SECOND]
    first, *rest = pictures
    first.save(data, "gif", save_all=True, append_images=rest, duration=shown, loop=0)
    return data.getvalue()


def mp4(pictures: Sequence[Image.Image]) -> bytes:
    """H.264, as browsers and chat programs play it."""
    try:
        import av
    except ImportError as error:
        raise UserError('a film as MP4 needs PyAV: pip install "gesso[viewer]"') from error
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "film.mp4"
        with av.open(str(path), "w") as film:
            stream: Any = film.add_stream("libx264", rate=PER_SECOND)
            stream.width, stream.height = pictures[0].size
            stream.pix_fmt = "yuv420p"
            for shown in [*pictures, *[pictures[-1]] * (REST - 1)]:
                film.mux(stream.encode(av.VideoFrame.from_image(shown)))
            film.mux(stream.encode(None))
        return path.read_bytes()


def sheet(reader: Reader) -> bytes:
    """All prompts: a row each, the evaluations from left to right; as PNG."""
    from PIL import Image, ImageDraw

    found = reader.evolution()
    columns = spread(range(len(found["steps"])), COLUMNS)
    rows = [p for p in found["prompts"] if any(c and "image" in c for c in p["cells"])][:ROWS]
    if not rows:
        raise NotShown(f"{reader.path.name} has no pictures to make a sheet of")
    lines = []
    for prompt in rows:
        cells = [(found["steps"][c], prompt["cells"][c]) for c in columns]
        lines.append([_sheet_cell(reader.path, step, cell) for step, cell in cells])
    width = max(cell.width for line in lines for cell in line) + GAP
    heights = [max(cell.height for cell in line) + CAPTION + GAP for line in lines]
    made = Image.new("RGB", (GAP + width * len(columns), GAP + sum(heights)), PAPER)
    pen, top = ImageDraw.Draw(made), GAP
    for prompt, line, height in zip(rows, lines, heights, strict=True):
        pen.text((GAP, top), _one_line(prompt["prompt"]), fill=INK, font=_font())
        for place, cell in enumerate(line):
            made.paste(cell, (GAP + place * width, top + CAPTION))
        top += height
    data = io.BytesIO()
    made.save(data, "png")
    return data.getvalue()


def _sheet_cell(run: Path, step: int, cell: dict[str, Any] | None) -> Image.Image:
    from PIL import Image

    if not cell or "image" not in cell:
        return _captioned(Image.new("RGB", (CELL, CELL // 3), PAPER), f"step {step}: none")
    return _captioned(_open(run, cell["image"], CELL), _says(step, cell))


def _open(run: Path, name: str, width: int) -> Image.Image:
    """Scaled to the width: down smoothly, up by a whole factor; grey where it cannot be read."""
    from PIL import Image

    try:
        with Image.open(picture(run, name)) as opened:
            image = opened.convert("RGB")
    except Exception:  # a damaged picture must not cost the others their film; it shows as grey
        return Image.new("RGB", (width, width // 2), (200, 200, 200))
    if image.width > width:
        height = max(1, round(image.height * width / image.width))
        return image.resize((width, height), Image.Resampling.LANCZOS)
    factor = max(1, width // image.width)
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)


def _captioned(image: Image.Image, text: str) -> Image.Image:
    from PIL import Image, ImageDraw

    made = Image.new("RGB", (image.width, image.height + CAPTION), PAPER)
    made.paste(image, (0, 0))
    ImageDraw.Draw(made).text((2, image.height + 3), text, fill=FAINT, font=_font())
    return made


def _even(image: Image.Image, width: int, height: int) -> Image.Image:
    """On paper of this size, made even: H.264 takes no other."""
    from PIL import Image

    made = Image.new("RGB", (width + width % 2, height + height % 2), PAPER)
    made.paste(image, (0, 0))
    return made


def _says(step: int, cell: dict[str, Any]) -> str:
    reward = "no score" if cell["reward"] is None else f"{cell['reward']:.3f}"
    return f"step {step}   {reward}"


def _one_line(text: str, most: int = 110) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


def _font() -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(13)

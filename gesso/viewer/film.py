"""An evolution to take away: a film of one prompt (GIF or MP4), or a sheet of all of them."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gesso.types import UserError
from gesso.use import sheets
from gesso.viewer.files import NotShown, picture
from gesso.viewer.reading import RunReader
from gesso.viewer.thinning import spread

if TYPE_CHECKING:
    from PIL import Image

FILM = 384  # px: of a film's; smaller ones are magnified by a whole factor
CAPTION = 22  # px under a picture
PER_SECOND = 3  # pictures of a film
REST = 4  # times as long is the last one shown
ROWS, COLUMNS = 24, 12  # of a sheet, at most
PAPER, FAINT = (255, 255, 255), (110, 110, 110)


def frames(reader: RunReader, prompt: int) -> list[Image.Image]:
    """Pictures of one prompt over training, with step and reward under each."""
    evolution = reader.evolution()
    of_index = [row for row in evolution["prompts"] if row["index"] == prompt]
    if not of_index:
        raise NotShown(f"no prompt {prompt} among the samples of {reader.path.name}")
    captioned = []
    for step, cell in zip(evolution["steps"], of_index[0]["cells"], strict=True):
        if cell and "image" in cell:
            shown = _as_wide(_open(reader.path, cell["image"]), FILM)
            captioned.append(_captioned(shown, f"step {step}   {_score(cell)}"))
    if not captioned:
        raise NotShown(f"prompt {prompt} of {reader.path.name} has no pictures to make a film of")
    widest = max(frame.width for frame in captioned), max(frame.height for frame in captioned)
    return [_even(frame, *widest) for frame in captioned]


def gif(frames: Sequence[Image.Image]) -> bytes:
    data = io.BytesIO()
    shown = [1000 // PER_SECOND] * (len(frames) - 1) + [REST * 1000 // PER_SECOND]
    first, *rest = frames
    first.save(data, "gif", save_all=True, append_images=rest, duration=shown, loop=0)
    return data.getvalue()


def mp4(frames: Sequence[Image.Image]) -> bytes:
    """H.264, as browsers and chat programs play it."""
    try:
        import av
    except ImportError as error:
        raise UserError('a film as MP4 needs PyAV: pip install "gesso[viewer]"') from error
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "film.mp4"
        with av.open(str(path), "w") as film:
            stream: Any = film.add_stream("libx264", rate=PER_SECOND)
            stream.width, stream.height = frames[0].size
            stream.pix_fmt = "yuv420p"
            for shown in [*frames, *[frames[-1]] * (REST - 1)]:
                film.mux(stream.encode(av.VideoFrame.from_image(shown)))
            film.mux(stream.encode(None))
        return path.read_bytes()


def sheet(reader: RunReader) -> bytes:
    """All prompts: a row each, the evaluations from left to right; as PNG."""
    evolution = reader.evolution()
    places = spread(range(len(evolution["steps"])), COLUMNS)
    drawn = [p for p in evolution["prompts"] if any(c and "image" in c for c in p["cells"])][:ROWS]
    if not drawn:
        raise NotShown(f"{reader.path.name} has no pictures to make a sheet of")
    rows = [
        sheets.Row(_one_line(p["prompt"]), [_cell(reader.path, p["cells"][i]) for i in places])
        for p in drawn
    ]
    data = io.BytesIO()
    sheets.sheet(rows, [f"step {evolution['steps'][i]}" for i in places]).save(data, "png")
    return data.getvalue()


def _cell(run: Path, cell: dict[str, Any] | None) -> sheets.Cell:
    if not cell or "image" not in cell:
        return sheets.Cell(None, "not drawn")
    return sheets.Cell(_open(run, cell["image"]), _score(cell))


def _open(run: Path, name: str) -> Image.Image:
    """Grey where it cannot be read."""
    from PIL import Image

    try:
        with Image.open(picture(run, name)) as opened:
            return opened.convert("RGB")
    except Exception:  # a damaged picture must not cost the others their film; it shows as grey
        return Image.new("RGB", (FILM // 2, FILM // 4), (200, 200, 200))


def _as_wide(image: Image.Image, width: int) -> Image.Image:
    """Down smoothly, up by a whole factor."""
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
    """On paper of this size, made even: H.264 takes no other."""
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

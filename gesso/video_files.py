"""Video files: MP4 from and to frames, (F, height, width, 3) uint8, and strips of frames. The
only place that calls PyAV."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gesso.image_files import MAX_PIXELS, ImageFault
from gesso.types import UserError

if TYPE_CHECKING:
    import numpy as np

VIDEO_SUFFIXES = (".mp4", ".webm", ".mov", ".mkv", ".gif")
ENCODERS = ("libx264", "libopenh264", "libvpx-vp9", "mpeg4")
"""Encoders of an MP4, best first: H.264, VP9 (browsers play both), MPEG-4."""
QUALITY = {"libx264": {"crf": "16", "preset": "fast"}, "libvpx-vp9": {"crf": "20", "b": "0"}}
BIT_RATE = 8_000_000  # of encoders without a quality
STRIP, GAP = 5, 2  # frames of a strip, and px between them


@dataclass(frozen=True)
class Clip:
    """A video: its frames, and frames per second."""

    frames: np.ndarray
    fps: float

    def save(self, file: str | Path) -> None:
        """As MP4."""
        Path(file).write_bytes(encode_mp4(self.frames, self.fps))


def encoder() -> str:
    """The first of `ENCODERS` that PyAV has."""
    av = _pyav()
    known = [name for name in ENCODERS if name in av.codecs_available]
    if not known:
        raise UserError(
            f"PyAV {av.__version__} has no encoder for MP4 (one of {', '.join(ENCODERS)}); install "
            "it from a wheel: pip install --only-binary av --force-reinstall av"
        )
    return known[0]


def _pyav() -> Any:
    try:
        import av
    except ImportError as error:
        raise UserError('videos require PyAV: pip install "gesso[video]"') from error
    return av


def encode_mp4(frames: np.ndarray, fps: float) -> bytes:
    """Odd sizes grow by a row or a column, which repeats the last one: the codecs store colour at
    half the resolution."""
    import numpy as np

    name, av = encoder(), _pyav()
    _, height, width, _ = frames.shape
    frames = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    data = io.BytesIO()
    with av.open(data, "w", format="mp4") as file:
        rate = Fraction(fps).limit_denominator(1001)
        stream: Any = file.add_stream(name, rate=rate, options=QUALITY.get(name, {}))
        if name not in QUALITY:
            stream.bit_rate = BIT_RATE
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode(None))
    return data.getvalue()


def encode_gif(clip: Clip) -> bytes:
    from PIL import Image

    first, *rest = (Image.fromarray(frame) for frame in clip.frames)
    data = io.BytesIO()
    duration = round(1000 / clip.fps)  # ms
    first.save(data, "GIF", save_all=True, append_images=rest, duration=duration, loop=0)
    return data.getvalue()


def read_clip(source: str | bytes) -> Clip:
    """All frames of a file, or of its content. Raises `ImageFault`."""
    import numpy as np

    av = _pyav()
    frames: list[np.ndarray] = []
    try:
        with av.open(io.BytesIO(source) if isinstance(source, bytes) else source) as file:
            if not file.streams.video:
                raise ImageFault("has no video")
            stream = file.streams.video[0]
            most = MAX_PIXELS // max(1, stream.width * stream.height)
            for frame in file.decode(stream):
                if len(frames) >= most:
                    raise ImageFault(f"has more than {MAX_PIXELS:,} pixels; shorten or resize it")
                frames.append(frame.to_ndarray(format="rgb24"))
            rate = stream.average_rate
    except ImageFault:
        raise
    except Exception as error:  # damaged files make FFmpeg fail in many ways
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ImageFault(f"cannot be decoded as a video: {reason.splitlines()[0]}") from error
    if not frames or not rate:
        raise ImageFault("cannot be decoded as a video: it has no frames")
    return Clip(np.stack(frames), float(rate))


def spread(count: int, chosen: int) -> list[int]:
    """Indices of at most `chosen` of `count` frames, evenly from the first to the last."""
    if chosen >= count:
        return list(range(count))
    if chosen == 1:
        return [count // 2]
    return [round(i * (count - 1) / (chosen - 1)) for i in range(chosen)]


def strip(frames: np.ndarray, chosen: int = STRIP) -> np.ndarray:
    """(height, width, 3): some frames from left to right."""
    import numpy as np

    picked = [frames[i] for i in spread(len(frames), chosen)]
    gap = np.full((frames.shape[1], GAP, 3), 255, dtype=np.uint8)
    row: Sequence[np.ndarray] = [part for frame in picked for part in (gap, frame)][1:]
    return np.concatenate(row, axis=1)

"""Video files: MP4 from and to frames, (F, height, width, 3) uint8, and strips of frames. The
only place that calls PyAV."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from gesso.image_files import MAX_PIXELS, ImageFault, fitted
from gesso.types import PromptImage, UserError

T = TypeVar("T")

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

MP4 = ".mp4"
VIDEO_SUFFIXES = (MP4, ".webm", ".mov", ".mkv", ".gif")
ENCODERS = ("libx264", "libopenh264", "libvpx-vp9", "mpeg4")
"""Encoders of an MP4, best first: H.264, VP9 (browsers play both), MPEG-4."""
QUALITY = {"libx264": {"crf": "16", "preset": "fast"}, "libvpx-vp9": {"crf": "20", "b": "0"}}
BIT_RATE = 8_000_000  # of encoders without a quality
TOLERANCE = 1e-3  # seconds: files round the times of frames
STRIP, GAP = 5, 2  # frames of a strip, and px between them


@dataclass(frozen=True)
class Clip:
    """A video: its frames, and frames per second."""

    frames: np.ndarray
    fps: float

    def save(self, file: str | Path) -> None:
        """Writes an MP4 file."""
        if Path(file).suffix.lower() != MP4:
            raise UserError(
                f"videos are saved as MP4: expected a name that ends in {MP4}, got {file}"
            )
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

    frames: list[np.ndarray] = []
    with _opened(source) as (file, stream):
        most = MAX_PIXELS // max(1, stream.width * stream.height)
        for frame in file.decode(stream):
            if len(frames) >= most:
                raise ImageFault(f"has more than {MAX_PIXELS:,} pixels; shorten or resize it")
            frames.append(frame.to_ndarray(format="rgb24"))
        rate = stream.average_rate
    if not frames or not rate:
        raise ImageFault(NO_FRAMES)
    return Clip(np.stack(frames), float(rate))


@dataclass(frozen=True)
class PromptClip(PromptImage):
    """A clip of a row, not yet decoded. A run uses `count` frames from its start, at `fps` frames
    per second."""

    kind: ClassVar[str] = "clip"

    count: int = 1
    fps: float = 16.0

    def open(self) -> Image:
        """The first frame, upright."""
        (first,) = self._read(lambda source: _frames(source, 1, self.fps, lambda frame: frame))
        return first

    def fitted(self, height: int, width: int) -> np.ndarray:
        """(frames, height, width, 3) uint8: cropped and resized as images are."""
        import numpy as np

        def fit(frame: Image) -> Image:
            return fitted(frame, height, width)

        return np.stack(self._read(lambda source: _frames(source, self.count, self.fps, fit)))

    @cached_property
    def size(self) -> tuple[int, int]:
        return self._read(self._header)

    @property
    def rate(self) -> float:
        """Frames per second of the file; `fps` if the file does not have them."""

        def average(source: str | bytes) -> float:
            with _opened(source) as (_, stream):
                return float(stream.average_rate or self.fps)

        return self._read(average)

    def fault(self, decode: bool = True) -> str | None:
        """Why the clip cannot be used, or None. Without `decode` only its header is read."""
        try:
            self._read(self._header)
            if decode:
                self._read(lambda source: _frames(source, self.count, self.fps, lambda _: None))
        except UserError as error:
            return str(error)
        return None

    def _header(self, source: str | bytes) -> tuple[int, int]:
        """Height and width. Raises for a clip that is too short, if its header has a duration."""
        with _opened(source) as (_, stream):
            if stream.duration is not None:
                seconds = float(stream.duration * stream.time_base)
                _check_length(seconds, self.count, self.fps)
            return stream.height, stream.width


NO_FRAMES = "cannot be decoded as a video: it has no frames"


@contextmanager
def _opened(source: str | bytes) -> Iterator[tuple[Any, Any]]:
    """The file and its first video stream. Raises `ImageFault` for errors inside the context."""
    av = _pyav()
    try:
        with av.open(io.BytesIO(source) if isinstance(source, bytes) else source) as file:
            if not file.streams.video:
                raise ImageFault("has no video")
            stream = file.streams.video[0]
            if stream.width * stream.height > MAX_PIXELS:
                raise ImageFault(f"has frames of more than {MAX_PIXELS:,} pixels; resize it")
            # By default FFmpeg hides damaged parts under copies of others, or green.
            stream.codec_context.options = {"err_detect": "explode"}
            yield file, stream
    except ImageFault:
        raise
    except Exception as error:  # damaged files make FFmpeg fail in many ways
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ImageFault(f"cannot be decoded as a video: {reason.splitlines()[0]}") from error


def _frames(source: str | bytes, count: int, fps: float, change: Callable[[Image], T]) -> list[T]:
    """The frames that a player shows at the times 0, 1/fps, … (count − 1)/fps. `change` is applied
    to each frame at once, since many large frames need much memory."""
    found: list[T] = []
    with _opened(source) as (file, stream):
        start = seconds = 0.0
        shown = None
        for frame in file.decode(stream):
            if shown is None:
                start = frame.time
            seconds = frame.time - start
            while shown is not None and len(found) / fps < seconds - TOLERANCE:
                found.append(change(_upright(shown)))
                if len(found) == count:
                    return found
            shown = frame
        if shown is None or not stream.average_rate:
            raise ImageFault(NO_FRAMES)
        seconds += float(1 / stream.average_rate)
        _check_length(seconds, count, fps)
        return [*found, *(change(_upright(shown)) for _ in range(count - len(found)))]


def _check_length(seconds: float, count: int, fps: float) -> None:
    if (count - 1) / fps >= seconds - TOLERANCE:
        raise ImageFault(
            f"lasts {seconds:.3g} seconds, shorter than model.frames = {count} at model.fps = "
            f"{fps:g}; use longer clips or fewer frames"
        )


def _upright(frame: Any) -> Image:
    """Applies the rotation that phones store in the metadata of a clip."""
    return frame.to_image().rotate(frame.rotation, expand=True)


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

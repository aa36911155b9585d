"""The files of a sample that is an image or a video."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gesso.types import Sample
from gesso.video_files import MP4, Clip, strip

if TYPE_CHECKING:
    from PIL.Image import Image

VIDEO, STRIP = MP4, "-strip.png"


def still(sample: Sample) -> Image:
    """The image, or the first frame of a video."""
    from PIL import Image

    return Image.fromarray(sample.frames[0])


def shown(sample: Sample) -> Image:
    """What a sheet shows: the image, or a strip of frames."""
    from PIL import Image

    return Image.fromarray(strip(sample.frames) if sample.is_video else sample.pixels)


def without_image(sample: Sample) -> Sample:
    return replace(sample, image=None, fps=None)


def smaller(sample: Sample, side: int) -> Sample:
    """A video whose longest side has at most `side` pixels; a text is returned as it is."""
    import numpy as np
    from PIL import Image

    if sample.image is None:
        return sample
    height, width = sample.frames.shape[1:3]
    factor = side / max(height, width)
    if factor >= 1:
        return sample
    size = max(1, round(width * factor)), max(1, round(height * factor))
    frames = [
        np.asarray(Image.fromarray(f).resize(size, Image.Resampling.BOX)) for f in sample.frames
    ]
    return replace(sample, image=np.stack(frames))


def save(sample: Sample, file: Path, **options: Any) -> Path:
    """Writes the image to `file`, a PNG. Of a video that is the first frame; the video (NAME.mp4)
    and a strip of its frames (NAME-strip.png) are written next to it. Returns the file of the image
    or of the video."""
    still(sample).save(file, **options)
    if not sample.is_video:
        return file
    shown(sample).save(file.with_name(file.stem + STRIP), **options)
    return save_video(sample, file.with_suffix(VIDEO))


def save_video(sample: Sample, file: Path) -> Path:
    clip(sample).save(file)
    return file


def content(sample: Sample) -> Image | Clip:
    return clip(sample) if sample.is_video else still(sample)


def clip(sample: Sample) -> Clip:
    assert sample.fps is not None, "a video has fps"
    return Clip(sample.frames, sample.fps)

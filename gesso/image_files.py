"""Image files: the only place where the images of rows, requests and uploads are decoded."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats that are accepted. Pillow supports more, some of which run external programs."""
OTHER_FORMATS = {
    "AVIF": (4, b"ftypavi"),
    "HEIC": (4, b"ftyphei"),
    "HEIF": (4, b"ftypmif1"),
    "JPEG XL": (4, b"JXL "),
    "JPEG 2000": (4, b"jP  "),
    "PSD": (0, b"8BPS"),
    "PDF": (0, b"%PDF"),
    "SVG": (0, b"<svg"),
}
"""Formats that are not accepted → offset and bytes by which they are recognised."""
MAX_PIXELS = 2**26  # 8192 × 8192; a decompression bomb of a few kilobytes has more
WHITE = (255, 255, 255, 255)
ON_THEIR_SIDE = (5, 6, 7, 8)  # EXIF orientations that swap height and width


class ImageFault(ValueError):
    """Why a file cannot be used; follows its name in a sentence."""


def read_rgb(source: str | bytes) -> Image:
    """The image of a file or its content, as RGB and upright. Transparent parts become white, 16
    bits a channel become 8, and of an animation the first frame is used. Colour profiles are
    ignored."""
    from PIL import ImageOps

    with _opened(source) as image, _faults("cannot be decoded"):
        image.load()
        if _has_orientation(image):
            ImageOps.exif_transpose(image, in_place=True)
        return _rgb(image)


def fitted(image: Image, height: int, width: int) -> Image:
    """The largest centred part of the image with this aspect ratio, resized by Lanczos. An image of
    exactly this size is not changed."""
    from PIL import Image as Pillow
    from PIL import ImageOps

    return ImageOps.fit(image, (width, height), Pillow.Resampling.LANCZOS)


def read_size(source: str | bytes) -> tuple[int, int]:
    """Height and width of the upright image, from the header alone."""
    with _opened(source) as image, _faults("cannot be read"):
        width, height = image.size
        if image.format != "TIFF" and _has_orientation(image):  # Pillow has turned a TIFF's size
            swapped = image.getexif().get(_orientation()) in ON_THEIR_SIDE
            return (width, height) if swapped else (height, width)
        return height, width


def check_pixels(source: str | bytes) -> None:
    """Raises if the pixels cannot be decoded. Faster than decoding: a JPEG is decoded at an eighth
    of its size."""
    with _opened(source) as image, _faults("cannot be decoded"):
        _check_mode(image)
        image.draft("RGB", (1, 1))
        image.load()  # verify() would check only headers and checksums
        _check_range(image)


def _opened(source: str | bytes) -> Image:
    """Reads only the header."""
    from PIL import Image, UnidentifiedImageError

    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # see MAX_PIXELS
    with _faults("cannot be read"):
        try:
            file = io.BytesIO(source) if isinstance(source, bytes) else source
            image = Image.open(file, formats=IMAGE_FORMATS)
        except UnidentifiedImageError:
            raise ImageFault(
                f"{_other_format(source)}; expected one of {', '.join(IMAGE_FORMATS)}"
            ) from None
        except Image.DecompressionBombError:  # Pillow's own limit, which is higher
            raise ImageFault(f"has more than {MAX_PIXELS:,} pixels; resize it") from None
    if image.width * image.height > MAX_PIXELS:
        image.close()
        size = f"{image.width}×{image.height}"
        raise ImageFault(f"has {size} pixels, more than {MAX_PIXELS:,}; resize it")
    return image


def _other_format(source: str | bytes) -> str:
    if isinstance(source, str):
        with open(source, "rb") as file:
            source = file.read(16)
    for name, (offset, magic) in OTHER_FORMATS.items():
        if source[offset:].startswith(magic):
            return f"is {name}, which is not supported"
    return "is not an image" if source else "is empty"


@contextmanager
def _faults(what: str) -> Iterator[None]:
    """Damaged files make Pillow fail in many ways."""
    try:
        yield
    except ImageFault:
        raise
    except Exception as error:
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        reason = (text.strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ImageFault(f"{what}: {reason}") from error


def _orientation() -> int:
    from PIL import ExifTags

    return ExifTags.Base.Orientation


def _has_orientation(image: Image) -> bool:
    """A PNG's EXIF after the pixels is ignored: Pillow would decode the whole file to find it."""
    return image.format != "PNG" or "exif" in image.info


def _rgb(image: Image) -> Image:
    from PIL import Image

    _check_mode(image)
    if image.mode.startswith("I"):
        return _eight_bits(image).convert("RGB")
    if image.has_transparency_data:
        transparent = image.convert("RGBA")
        white = Image.new("RGBA", transparent.size, WHITE)
        return Image.alpha_composite(white, transparent).convert("RGB")
    return image.convert("RGB")


def _check_mode(image: Image) -> None:
    if image.mode in ("F", "LAB"):
        kind = "floating-point" if image.mode == "F" else "L*a*b*"
        raise ImageFault(f"has {kind} pixels; convert it to 8 or 16 bits a channel of RGB or grey")


def _check_range(image: Image) -> None:
    """Only mode I, of 32 bits, can have other values."""
    import numpy as np

    if image.mode != "I":
        return
    values = np.asarray(image)
    if values.min() < 0 or values.max() > 65535:
        raise ImageFault("has more than 16 bits a channel; convert it to 8 or 16 bits")


def _eight_bits(image: Image) -> Image:
    """Pillow's own conversion clips instead: nearly every grey becomes white."""
    import numpy as np
    from PIL import Image

    _check_range(image)
    values = np.asarray(image).astype(np.int64)
    return Image.fromarray(((values + 128) // 257).astype(np.uint8))

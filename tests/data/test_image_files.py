"""Image files of every kind become upright RGB images, or one sentence says why not."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image

from gesso import image_files
from gesso.types import PromptImage, UserError

PIXELS = np.random.default_rng(0).integers(0, 256, (16, 24, 3), dtype=np.uint8)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> PromptImage:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return PromptImage(data=buffer.getvalue())


def pixels(image: PromptImage) -> np.ndarray:
    opened = image.open()
    assert opened.mode == "RGB" and (opened.height, opened.width) == image.size
    return np.asarray(opened)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation, turned", [(3, 2), (6, -1), (8, 1)])
def test_a_rotated_photo_is_upright(kind: str, orientation: int, turned: int) -> None:
    """Orientation 6: the stored rows must be turned clockwise by 90°."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    options = {"lossless": True} if kind == "WEBP" else {"quality": 100, "subsampling": 0}
    smooth = Image.fromarray(PIXELS).resize((24, 16)).reduce(4).resize((24, 16))
    image = encoded(smooth, kind, exif=exif, **({} if kind in ("PNG", "TIFF") else options))
    expected = np.rot90(np.asarray(smooth), turned).astype(int)
    assert np.abs(pixels(image) - expected).max() <= (4 if kind == "JPEG" else 0)


def test_transparent_parts_are_white() -> None:
    """The colour under a transparent pixel is arbitrary."""
    alpha = np.array([[0, 255, 128]], dtype=np.uint8)
    rgba = np.dstack([np.full((1, 3, 3), 100, np.uint8), alpha])
    assert pixels(encoded(Image.fromarray(rgba)))[0, :, 0].tolist() == [255, 100, 177]
    palette = Image.fromarray(np.array([[0, 1]], np.uint8), "L").convert("P")
    assert pixels(encoded(palette, transparency=0))[0, :, 0].tolist() == [255, 1]
    grey = Image.merge("LA", (Image.new("L", (1, 1), 9), Image.new("L", (1, 1), 0)))
    assert pixels(encoded(grey)).tolist() == [[[255, 255, 255]]]


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_become_eight(kind: str) -> None:
    """v · 255 / 65535, rounded; Pillow's own conversion clips."""
    values = np.array([[0, 128, 129, 257, 32896, 65535]], dtype=np.uint16)
    grey = pixels(encoded(Image.fromarray(values), kind))
    assert grey[0, :, 0].tolist() == [0, 0, 1, 1, 128, 255]


def test_other_colour_spaces() -> None:
    red = Image.new("RGB", (8, 8), (255, 0, 0))
    for image in (encoded(red.convert("CMYK"), "TIFF"), encoded(red.convert("P"))):
        assert pixels(image)[0, 0].tolist() == [255, 0, 0]
    assert np.abs(pixels(encoded(red.convert("CMYK"), "JPEG"))[0, 0] - [255.0, 0, 0]).max() < 4
    assert pixels(encoded(Image.new("1", (2, 2), 1)))[0, 0].tolist() == [255, 255, 255]


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_the_first_frame_of_an_animation(kind: str) -> None:
    first, second = (Image.new("RGB", (8, 8), colour) for colour in ("red", "blue"))
    options = {"lossless": True} if kind == "WEBP" else {}
    image = encoded(first, kind, save_all=True, append_images=[second], **options)
    assert pixels(image)[0, 0].tolist() == [255, 0, 0]


def test_a_photo_with_a_second_image() -> None:
    """Phones write MPO files, which are named .jpg."""
    one = Image.new("RGB", (8, 8), "red")
    image = encoded(one, "MPO", save_all=True, append_images=[one])
    assert image.fault() is None and pixels(image).shape == (8, 8, 3)


def truncated() -> PromptImage:
    return PromptImage(data=encoded(Image.fromarray(PIXELS), "JPEG").data[:-200])


@pytest.mark.parametrize(
    "image, sentence",
    [
        (PromptImage(data=b"hello"), "the image of 5 bytes is not an image; expected one of PNG"),
        (
            PromptImage(data=b"\0\0\0 ftypavif"),
            "is AVIF, which is not supported; expected one of PNG",
        ),
        (PromptImage(path="/no/such.png"), "^/no/such.png cannot be read: No such file"),
        (PromptImage(path="/"), "^/ cannot be read: Is a directory$"),
        (truncated(), "cannot be decoded: .*truncated"),
        (encoded(Image.new("F", (2, 2)), "TIFF"), "has floating-point pixels; convert it"),
        (encoded(Image.new("LAB", (2, 2)), "TIFF"), r"has L\*a\*b\* pixels; convert it"),
    ],
)
def test_a_fault_is_one_sentence(image: PromptImage, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as error:
        image.open()
    assert image.fault() == str(error.value) and "\n" not in str(error.value)


def test_more_than_sixteen_bits() -> None:
    wide = encoded(Image.fromarray(np.array([[70_000]], dtype=np.int32)), "TIFF")
    with pytest.raises(UserError, match="has more than 16 bits a channel; convert it"):
        wide.open()
    assert "has more than 16 bits" in str(wide.fault())
    assert encoded(Image.fromarray(np.array([[60_000]], dtype=np.int32)), "TIFF").fault() is None


def test_an_image_bomb(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejected by its header, before memory is allocated."""
    image = encoded(Image.fromarray(PIXELS))
    monkeypatch.setattr(image_files, "MAX_PIXELS", 16 * 24 - 1)
    with pytest.raises(UserError, match=r"has 24×16 pixels, more than 383; resize it$"):
        image.open()
    assert "24×16" in (image.fault(decode=False) or "")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # twice as many stop Pillow itself
    with pytest.raises(UserError, match=r"has more than 383 pixels; resize it$"):
        image.open()


@pytest.mark.filterwarnings("ignore")  # Pillow's
def test_damaged_headers_never_raise_anything_else() -> None:
    random = np.random.default_rng(0)
    for kind in image_files.IMAGE_FORMATS:
        data = encoded(Image.fromarray(PIXELS), kind).data
        for _ in range(40):
            damaged = bytearray(data)
            for at in random.integers(0, min(len(data), 200), 4):
                damaged[at] = random.integers(256)
            PromptImage(data=bytes(damaged)).fault()

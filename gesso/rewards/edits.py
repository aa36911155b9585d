"""What rewards of edits see: the source, the result and the mask at the size of the result."""

from __future__ import annotations

import functools
import math

import numpy as np

from gesso.types import Prompt, PromptImage, Sample, UserError

MAX_DIFFERENCE = 0.02  # of the log aspect ratios of image and mask: their sizes were rounded
ALL_WHITE = "the mask is white everywhere; expected black where nothing may change"
ALL_BLACK = "the mask is black everywhere; expected white where the image may change"


def no_source(prompt: Prompt) -> str | None:
    """Why a prompt has no source, or None."""
    return None if prompt.images else "the prompt has no input image to compare with"


def wrong_mask(prompt: Prompt) -> str | None:
    """Why the mask of a prompt with an input image cannot be used, or None."""
    mask = prompt.image_columns.get("mask")
    if mask is None:
        return None
    try:
        return _another_ratio(mask, prompt.images[0]) or _one_shade(mask)
    except UserError as error:
        return str(error)


def _another_ratio(mask: PromptImage, image: PromptImage) -> str | None:
    (height, width), (tall, wide) = mask.size, image.size
    difference = abs(math.log(width * tall / (height * wide)))
    if difference <= max(MAX_DIFFERENCE, 1 / min(height, width)):  # or one pixel of a small mask
        return None
    return (
        f"the mask of {width}×{height} pixels has another aspect ratio than its image of "
        f"{wide}×{tall}; crop or draw it for that image"
    )


@functools.lru_cache(maxsize=4096)  # an optional reward asks again for each sample
def _one_shade(mask: PromptImage) -> str | None:
    darkest, lightest = mask.open().convert("L").getextrema()
    return ALL_WHITE if darkest == 255 else ALL_BLACK if lightest == 0 else None


@functools.lru_cache(maxsize=16)  # the samples of a group have the same ones
def _fitted(image: PromptImage, height: int, width: int) -> np.ndarray:
    found = image.fitted(height, width)
    found.flags.writeable = False
    return found


def source(sample: Sample) -> np.ndarray:
    """(height, width, 3) uint8: the first image of the prompt."""
    if not sample.prompt.images:
        raise UserError(no_source(sample.prompt) or "")
    return _fitted(sample.prompt.images[0], *sample.pixels.shape[:2])


def outside(sample: Sample) -> np.ndarray | None:
    """(height, width) in [0, 1]: 1 where the row's mask is black, so that nothing may change; None
    without a mask."""
    mask = sample.prompt.image_columns.get("mask")
    if mask is None:
        return None
    grey = _fitted(mask, *sample.pixels.shape[:2]).mean(-1) / 255
    if grey.min() == 1:
        raise UserError(ALL_WHITE)
    return 1 - grey

"""What rewards of edits see: the source, the result and the mask at the size of the result."""

from __future__ import annotations

import math

import numpy as np

from gesso.types import Prompt, PromptImage, Sample, UserError

MAX_DIFFERENCE = 0.02  # of the log aspect ratios of image and mask: their sizes were rounded


def no_source(prompt: Prompt) -> str | None:
    """Why a prompt is not an edit, or None."""
    return None if prompt.images else "the prompt has no input image that the sample edits"


def wrong_mask(prompt: Prompt) -> str | None:
    """Why the mask of a prompt with an input image does not fit that image, or None. Reads only
    headers: a mask that is white everywhere is found when a sample is scored."""
    mask = prompt.image_columns.get("mask")
    if mask is None:
        return None
    try:
        (height, width), (tall, wide) = mask.size, prompt.images[0].size
    except UserError as error:
        return str(error)
    difference = abs(math.log(width * tall / (height * wide)))
    if difference <= max(MAX_DIFFERENCE, 1 / min(height, width)):  # or one pixel of a small mask
        return None
    return (
        f"the mask of {width}×{height} pixels has another aspect ratio than its image of "
        f"{wide}×{tall}; crop or draw it for that image"
    )


def source(sample: Sample) -> np.ndarray:
    """(height, width, 3) uint8: the first image of the prompt."""
    if not sample.prompt.images:
        raise UserError(no_source(sample.prompt) or "")
    return _fitted(sample.prompt.images[0], sample.pixels)


def outside(sample: Sample) -> np.ndarray | None:
    """(height, width) in [0, 1]: 1 where the row's mask is black, so that nothing may change; None
    without a mask."""
    mask = sample.prompt.image_columns.get("mask")
    if mask is None:
        return None
    grey = _fitted(mask, sample.pixels).mean(-1) / 255
    if grey.min() == 1:
        raise UserError("the mask is white everywhere; expected black where nothing may change")
    return 1 - grey


def _fitted(image: PromptImage, result: np.ndarray) -> np.ndarray:
    """The largest centred part with the aspect ratio of the result, resized to its size."""
    from PIL import Image, ImageOps

    height, width = result.shape[:2]
    return np.asarray(ImageOps.fit(image.open(), (width, height), Image.Resampling.LANCZOS))

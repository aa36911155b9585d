"""What image processors of transformers do with PIL, for tensors and with gradient: no rounding to
bytes, otherwise the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def clip_inputs(images: Tensor, processor: Any) -> Tensor:
    """(N, 3, height, width) in [0, 1] → (N, 3, side, side): the shorter side resized, the centre
    cropped, normalised."""
    import torch

    height, width = images.shape[-2:]
    short, side = processor.size.shortest_edge, processor.crop_size.height
    assert short >= side == processor.crop_size.width, "CLIP's processors crop a square"
    scale = short / min(height, width)
    size = (short, int(width * scale)) if height <= width else (int(height * scale), short)
    resized = resize(images, size)
    top, left = (size[0] - side) // 2, (size[1] - side) // 2
    cropped = resized[:, :, top : top + side, left : left + side]
    mean, std = (
        torch.tensor(values, dtype=images.dtype, device=images.device).view(1, 3, 1, 1)
        for values in (processor.image_mean, processor.image_std)
    )
    return (cropped - mean) / std


def resize(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Bicubic, with PIL's antialiasing and its limits of the result."""
    from torch.nn.functional import interpolate

    if tuple(images.shape[-2:]) == size:
        return images
    return interpolate(images, size=size, mode="bicubic", antialias=True).clamp(0, 1)


def padded_to_square(images: Tensor, side: int) -> Tensor:
    """The whole image, resized, in the centre of a black square."""
    from torch.nn.functional import pad

    height, width = images.shape[-2:]
    scale = side / max(height, width)
    h, w = max(1, round(height * scale)), max(1, round(width * scale))
    top, left = (side - h) // 2, (side - w) // 2
    return pad(resize(images, (h, w)), (left, side - w - left, top, side - h - top))

"""Sign colour: does the sign have the colour that the prompt names? A rule for the bundled task.

Every pixel is assigned to the nearest, in RGB, of the eight colours of the bundled signs. The most
frequent colour is the sign's colour; black and white, unless most frequent, are letters and are
ignored. value = the share of the target colour among the remaining pixels; range [0, 1]. Details:
"right" (the target is the sign's colour) and "share" (of the target among all pixels). A prompt
must contain `red sign` or the like, with one of the eight colours. No dependencies.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import Field

from gesso.config import Strict
from gesso.types import Prompt, Sample, Score
from gesso.zoo.words import PAINT

if TYPE_CHECKING:
    from torch import Tensor

NAMES = tuple(PAINT)
_PALETTE = np.array([PAINT[name][0] for name in NAMES], dtype=np.int64)  # (8, 3)
_LETTERS = ("black", "white")
_COLOURED_SIGN = re.compile(rf"\b({'|'.join(NAMES)}) sign\b", re.IGNORECASE)


class SignColour(Strict):
    """Share of the pixels, letters excluded, whose nearest colour is the one the prompt names. For
    the bundled model. Range [0, 1]. `sign-colour/right`: that colour is the most frequent one."""

    softness: float = Field(0.05, gt=0)
    """Of the gradient's version: a pixel belongs to each colour by softmax(−distance² / softness),
    where channels are in [0, 1]."""

    differentiable: ClassVar[bool] = True

    def unfit(self, prompt: Prompt) -> str | None:
        if target_colour(prompt):
            return None
        return f'no coloured sign in the prompt; expected one of {", ".join(NAMES)} before "sign"'

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> Score:
        target = target_colour(sample.prompt)
        if target is None:
            return Score.failed(self.unfit(sample.prompt) or "")
        return colour_score(sample.pixels, target)

    def values(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Like `score`, with soft shares. Choosing the most frequent colour has no gradient."""
        import torch

        palette = torch.tensor(_PALETTE, device=images.device, dtype=images.dtype) / 255
        pixels = images.flatten(2).transpose(1, 2)[:, :, None]  # (N, height · width, 1, 3)
        distance = (pixels - palette).square().sum(-1)
        shares = (-distance / self.softness).softmax(-1).mean(1)  # (N, 8)
        dominant = torch.nn.functional.one_hot(distance.argmin(-1), len(NAMES)).sum(1).argmax(-1)
        board = torch.tensor([name not in _LETTERS for name in NAMES], device=images.device)
        counted = board | torch.nn.functional.one_hot(dominant, len(NAMES)).bool()
        target = torch.tensor([NAMES.index(target_colour(p) or "") for p in prompts])[:, None]
        shares = shares * counted
        return shares.gather(1, target.to(images.device))[:, 0] / shares.sum(1)


def target_colour(prompt: Prompt) -> str | None:
    """Quoted text is the text on the sign, not its colour."""
    match = _COLOURED_SIGN.search(re.sub(r'"[^"]*"', "", prompt.text))
    return match.group(1).lower() if match else None


def colour_score(image: np.ndarray, target: str) -> Score:
    shares = colour_shares(image)
    dominant = most_frequent(shares)
    board = {name: s for name, s in shares.items() if name == dominant or name not in _LETTERS}
    value = board.get(target, 0.0) / sum(board.values())
    details = {"right": float(dominant == target), "share": shares[target]}
    return Score(value, details, dominant)


def most_frequent(shares: Mapping[str, float]) -> str:
    return max(shares, key=shares.__getitem__)


def colour_shares(image: np.ndarray) -> dict[str, float]:
    """The share of the pixels nearest to each colour."""
    pixels: np.ndarray = image.reshape(-1, 1, 3).astype(np.int64)
    nearest = ((pixels - _PALETTE) ** 2).sum(-1).argmin(1)  # (height · width,)
    counts = np.bincount(nearest, minlength=len(NAMES)) / len(nearest)
    return dict(zip(NAMES, counts.tolist(), strict=True))

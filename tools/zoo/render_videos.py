"""Renders videos of words that slide over a sign, right or faulty, as tensors on any device.

A video is the mask of a word (`render.letters`), cut out at five places that are 2 pixels apart,
and painted. Everything is a tensor operation without a synchronisation: a training step draws its
own videos, also inside a CUDA graph.

Shapes: W words, B videos, F = 5 frames, L text tokens.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gesso.zoo.videos import FRAMES, LENGTH, PITCH, SPEED
from gesso.zoo.words import COLOURS, PAINT
from tools.zoo.render import WIDTH

BLURRED, PIXELATED, MISSPELT, STILL, REVERSED = range(5)  # the faults
FAULTS = 5
MARGIN = SPEED * (FRAMES // 2)  # pixels that the word moves to each side


class World(NamedTuple):
    masks: Tensor  # (W, 32, 96) in [0, 1]
    ids: Tensor  # (W, colours, directions, L): the tokens of the prompts
    paints: Tensor  # (colours, 2, 3) in [-1, 1]: sign and letters


class Videos(NamedTuple):
    pixels: Tensor  # (B, 3, F, 32, 96) in [-1, 1]
    ids: Tensor  # (B, L)


def draw_videos(world: World, batch: int, faulty: float) -> Videos:
    """Random videos; a share of `faulty` of them is wrong, each fault equally often."""
    device = world.masks.device

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(high, (batch, *shape), device=device)

    word, colour, direction = integers(len(world.masks)), integers(len(COLOURS)), integers(2)
    wrong = torch.rand(batch, device=device) < faulty
    fault = integers(FAULTS).masked_fill(~wrong, FAULTS)
    mask = world.masks[word]
    replaced = torch.rand(batch, LENGTH, device=device) < 0.5
    replaced = replaced | (torch.arange(LENGTH, device=device) == integers(LENGTH, 1))
    replaced = replaced & (fault == MISSPELT)[:, None]
    mask = misspell(mask, world.masks[integers(len(world.masks))], replaced)
    frames = cut(mask, places(direction, fault, integers(FRAMES)))
    bad = torch.rand(batch, FRAMES, device=device) < 0.5
    bad = bad | (torch.arange(FRAMES, device=device) == integers(FRAMES, 1))
    frames = torch.where(_of(bad & (fault == BLURRED)[:, None]), blur(frames), frames)
    frames = torch.where(_of(bad & (fault == PIXELATED)[:, None]), pixelate(frames), frames)
    return Videos(paint(frames, world.paints[colour]), world.ids[word, colour, direction])


def _of(frames: Tensor) -> Tensor:
    """(B, F) → (B, F, 1, 1)."""
    return frames[..., None, None]


def misspell(mask: Tensor, other: Tensor, replaced: Tensor) -> Tensor:
    """(B, 32, 96): with letters of another word where `replaced` (B, 4) is true."""
    column = torch.arange(WIDTH, device=mask.device)
    first = (WIDTH - LENGTH * PITCH) // 2
    letter = ((column - first) // PITCH).clamp(0, LENGTH - 1)  # (96,)
    return torch.where(replaced[:, letter][:, None], other, mask)


def places(direction: Tensor, fault: Tensor, still_at: Tensor) -> Tensor:
    """(B, F): which of the five cuts each frame shows; 0, 1, 2, 3, 4 slides to the left."""
    left = torch.arange(FRAMES, device=direction.device).expand(len(direction), FRAMES)
    to_left = ((direction == 0) != (fault == REVERSED))[:, None]
    moving = torch.where(to_left, left, FRAMES - 1 - left)
    return torch.where((fault == STILL)[:, None], still_at[:, None], moving)


def cut(mask: Tensor, places: Tensor) -> Tensor:
    """(B, 32, 96) → (B, F, 32, 96)."""
    cuts = F.pad(mask, (MARGIN, MARGIN)).unfold(-1, WIDTH, SPEED).transpose(1, 2)
    rows = torch.arange(len(mask), device=mask.device)[:, None]
    return cuts[rows, places]


def blur(frames: Tensor) -> Tensor:
    return F.avg_pool2d(frames, 13, stride=1, padding=6)


def pixelate(frames: Tensor, size: int = 8) -> Tensor:
    cells = F.avg_pool2d(frames, size)
    return cells.repeat_interleave(size, -1).repeat_interleave(size, -2)


def all_paints() -> Tensor:
    """(colours, 2, 3) in [-1, 1]."""
    return torch.tensor([PAINT[name] for name in COLOURS]) / 127.5 - 1


def paint(frames: Tensor, paints: Tensor) -> Tensor:
    """(B, F, 32, 96) in [0, 1] and (B, 2, 3) → (B, 3, F, 32, 96) in [-1, 1]."""
    sign, letters = paints.unbind(1)  # (B, 3)
    sign, letters = (each[:, :, None, None, None] for each in (sign, letters))
    return sign + frames[:, None] * (letters - sign)


def to_bytes(pixels: Tensor) -> Tensor:
    """(B, 3, F, 32, 96) in [-1, 1] → uint8 (B, F, 32, 96, 3)."""
    scaled = ((pixels + 1) * 127.5).round().clamp(0, 255)
    return scaled.byte().permute(0, 2, 3, 4, 1).contiguous()

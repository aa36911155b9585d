"""Rewards with a gradient: functions of float images, computed in the learner's process.

A class declares `differentiable = True` and has a method `values(images, prompts)` in addition to
`score`. Both compute the same number, except for the rounding of pixels to bytes and for what must
be softened to have a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from gesso import imports
from gesso.rewards.base import AnyReward, Reward, source, unfit
from gesso.rewards.frames import FrameChoice
from gesso.rewards.untrusted import raised_message
from gesso.types import Prompt, UserError, out_of_memory

if TYPE_CHECKING:
    from torch import Tensor


class DifferentiableReward(Reward, Protocol):
    differentiable: ClassVar[bool]

    def values(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """(N, 3, height, width) in [0, 1], with gradient → (N,). With `of_videos = True`
        (N, 3, frames, height, width)."""


def fault(target: Any) -> str | None:
    """Why a function or class has no gradient, or None."""
    if not isinstance(target, type) or imports.attribute(target, "differentiable") is not True:
        return "is not differentiable"
    if not callable(imports.attribute(target, "values")):
        return "has no method values(images, prompts)"
    return None


def of_videos(target: Any) -> bool:
    """Whether a class of rewards declares that it reads all frames of a video."""
    return isinstance(target, type) and imports.attribute(target, "of_videos") is True


@dataclass(frozen=True)
class WeightedValues:
    name: str
    weight: float
    reward: AnyReward  # its source is a DifferentiableReward
    bounds: tuple[float, float] | None = None  # no gradient outside
    optional: bool = False  # only for prompts that it can score
    frames: FrameChoice | None = None  # how a reward of images scores videos

    def __call__(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """(N,); 0 for prompts that it cannot score."""
        total = images.new_zeros(len(images))
        rows = [i for i, p in enumerate(prompts) if not self.optional or not self._unfit(p)]
        if not rows:
            return total
        kept: DifferentiableReward = source(self.reward)
        try:
            values = self._values(kept, images[rows], [prompts[i] for i in rows])
        except Exception as error:
            if isinstance(error, UserError) or out_of_memory(error):
                raise
            raise UserError(
                f'reward "{self.name}": values(images, prompts) {raised_message(error)}'
            ) from error
        if values.shape != (len(rows),) or values.requires_grad != images.requires_grad:
            raise UserError(
                f'reward "{self.name}": values(images, prompts) must return one value per image '
                f"with gradient, got shape {tuple(values.shape)} for {len(rows)} images, "
                f"{'with' if values.requires_grad else 'without'} gradient"
            )
        if self.bounds is not None:
            values = values.clamp(*self.bounds)
        index = images.new_tensor(rows).long()
        return total.index_add(0, index, self.weight * values.to(total))

    def _values(
        self, reward: DifferentiableReward, images: Tensor, prompts: Sequence[Prompt]
    ) -> Tensor:
        if images.ndim == 4 or of_videos(type(reward)):
            return reward.values(images, prompts)
        if self.frames is None:
            raise UserError(f'reward "{self.name}" scores images, not videos; set frames = "mean"')
        index = self.frames.scored(images.shape[2])
        frames = images[:, :, index].transpose(1, 2).flatten(0, 1)  # (N·index, 3, height, width)
        values = reward.values(frames, [prompt for prompt in prompts for _ in index])
        return self.frames.value(values.unflatten(0, (len(images), len(index))))

    def _unfit(self, prompt: Prompt) -> str | None:
        return unfit(self.reward, prompt, self.name)


@dataclass(frozen=True)
class RewardSum:
    """Σ weight·value, with gradient."""

    rewards: Sequence[WeightedValues]

    def __call__(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """(N, 3, height, width) in [0, 1] → (N,)."""
        total = images.new_zeros(len(images))
        for reward in self.rewards:
            total = total + reward(images, prompts)
        return total

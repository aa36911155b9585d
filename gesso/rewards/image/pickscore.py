"""PickScore: predicted human preference for the image, given its prompt.

value = s·cos(text, image)/26 with s the model's logit scale (Kirstain et al. 2023, "Pick-a-Pic";
the divisor 26 is Flow-GRPO's); in practice .6 to .9. The prompt is truncated to 77 tokens. Requires
a CLIP ViT-H/14 in transformers format, 4 GB.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from gesso.rewards.image import networks
from gesso.rewards.image.clip import load_clip
from gesso.types import Prompt, Sample, Score

if TYPE_CHECKING:
    from torch import Tensor


class PickScore(networks.NetworkReward):
    """Logit scale · cos(prompt, image) / 26 (Kirstain et al. 2023), typically 0.6 to 0.9. Prompts
    are truncated at 77 tokens."""

    path: str = "yuvalkirstain/PickScore_v1"
    """Model folder or hub name."""
    processor: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    """Processor folder or hub name."""

    differentiable: ClassVar[bool] = True

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return networks.in_batches(self._values, samples, self.batch)

    def _values(self, samples: Sequence[Sample]) -> list[float]:
        clip = load_clip(self.path, self.processor, self.device)
        cosines = clip.cosines([s.prompt.text for s in samples], [s.pixels for s in samples])
        return (clip.model.logit_scale.exp() * cosines / 26).tolist()

    def values(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        clip = load_clip(self.path, self.processor, self.device)
        cosines = clip.differentiable_cosines([p.text for p in prompts], images)
        return clip.model.logit_scale.exp() * cosines / 26

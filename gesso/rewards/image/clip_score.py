"""CLIPScore: does the image match the prompt?

value = s·cos(text, image)/30 with s the model's logit scale (100 for OpenAI's), as in Flow-GRPO's
scorer; in practice .5 to 1.2. Hessel et al. 2021 ("CLIPScore") define 2.5·max(cos, 0): the same
ranking while the cosine is positive. The prompt is truncated to 77 tokens. Requires a CLIP in
transformers format; ViT-L/14 is 1.7 GB.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from gesso.rewards.image import networks
from gesso.rewards.image.clip import load_clip
from gesso.types import Prompt, Sample, Score

if TYPE_CHECKING:
    from torch import Tensor


class ClipScore(networks.NetworkReward):
    """Logit scale · cos(prompt, image) / 30 (Hessel et al. 2021), typically 0.5 to 1.2. Prompts are
    truncated at 77 tokens."""

    path: str = "openai/clip-vit-large-patch14"
    """Model folder or hub name."""

    differentiable: ClassVar[bool] = True

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return networks.in_batches(self._values, samples, self.batch)

    def _values(self, samples: Sequence[Sample]) -> list[float]:
        clip = load_clip(self.path, self.path, self.device)
        cosines = clip.cosines([s.prompt.text for s in samples], [s.pixels for s in samples])
        return (clip.model.logit_scale.exp() * cosines / 30).tolist()

    def values(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        clip = load_clip(self.path, self.path, self.device)
        cosines = clip.differentiable_cosines([p.text for p in prompts], images)
        return clip.model.logit_scale.exp() * cosines / 30

"""LAION's aesthetic score: predicted human rating of the image. Ignores the prompt.

value = head(e) with e the image's normalised CLIP ViT-L/14 embedding and the head five linear
layers, 768 → 1024 → 128 → 64 → 16 → 1 (Schuhmann 2022, "improved-aesthetic-predictor"); not scaled,
as in Flow-GRPO: trained on ratings from 1 to 10, in practice 3 to 8. Requires that CLIP in
transformers format, 1.7 GB, and the file with the head, 4 MB.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from gesso.rewards.image import checkpoints, networks
from gesso.rewards.image.clip import load_clip
from gesso.types import Prompt, Sample, Score

if TYPE_CHECKING:
    from torch import Tensor, nn

HEAD = "sac+logos+ava1-l14-linearMSE.pth"


class Aesthetic(networks.NetworkReward):
    """LAION aesthetic predictor on the CLIP embedding of the image (Schuhmann 2022), typically 3 to
    8. Ignores the prompt."""

    path: str = "openai/clip-vit-large-patch14"
    """CLIP folder or hub name."""
    head: str = "camenduru/improved-aesthetic-predictor"
    """Hub name or .pth/.safetensors file of the head."""

    differentiable: ClassVar[bool] = True

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return networks.in_batches(self._values, samples, self.batch)

    def _values(self, samples: Sequence[Sample]) -> list[float]:
        import torch

        clip = load_clip(self.path, self.path, self.device)
        head = _head(self.path, self.head, self.device)
        with torch.inference_mode():
            return head(clip.images([s.pixels for s in samples]))[:, 0].tolist()

    def values(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        clip = load_clip(self.path, self.path, self.device)
        head = _head(self.path, self.head, self.device)
        return head(clip.differentiable_images(images))[:, 0]


@networks.once
def _head(path: str, file: str, device: str) -> nn.Sequential:
    clip = load_clip(path, path, device)
    head = checkpoints.preference_head(clip.model.config.projection_dim)
    tensors = checkpoints.read(file, HEAD)
    named = {name.removeprefix("layers."): tensor for name, tensor in tensors.items()}
    checkpoints.fill(head, named, f'the head "{file}"')
    return head.to(clip.device).eval()

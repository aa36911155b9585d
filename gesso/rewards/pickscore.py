"""PickScore: how well people would like the picture for its prompt.

value = s·cos(text, image)/26, s being the model's logit scale (Kirstain et al. 2023, "Pick-a-Pic";
the 26 is Flow-GRPO's). The prompt is cut at 77 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from gesso.config import Strict
from gesso.rewards import networks
from gesso.types import Prompt, Sample, Score


class PickScore(Strict):
    path: str = "yuvalkirstain/PickScore_v1"  # a folder or a name of the hub
    processor: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"  # its tokenizer and image processor
    device: str = "auto"
    batch: int = Field(16, ge=1)  # pictures at a time

    def unfit(self, prompt: Prompt) -> str | None:
        return None

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        values: list[float] = []
        for first in range(0, len(samples), self.batch):
            values += self._values(samples[first : first + self.batch])
        return [Score(value) for value in values]

    def _values(self, samples: Sequence[Sample]) -> list[float]:
        clip = networks.clip(self.path, self.processor, self.device)
        texts = list(dict.fromkeys(s.prompt.text for s in samples))  # a group shares its prompt
        row = [texts.index(s.prompt.text) for s in samples]
        cosines = (clip.texts(texts)[row] * clip.images([s.image for s in samples])).sum(-1)  # (N,)
        return (clip.model.logit_scale.exp() * cosines / 26).tolist()

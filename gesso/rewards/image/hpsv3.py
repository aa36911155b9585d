"""HPS v3: predicted human preference for the image, given its prompt.

value = the mean μ of the score that a Qwen2-VL-7B with a ranking head predicts (arXiv 2508.03789);
detail "sigma" is the deviation that it predicts. Not scaled; in practice 0 to 15. The authors'
package pins versions that conflict with Gesso's, so that it needs an environment of its own:
`reward.env`, a file with the line "hpsv3". Requires the weights, 16 GB.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from gesso.rewards.image import networks
from gesso.types import Sample, Score, UserError


class HpsV3(networks.NetworkReward):
    """Mean score of HPS v3 (arXiv 2508.03789), typically 0 to 15. Requires `env`, a file with the
    line `hpsv3`. `hpsv3/sigma`: the predicted deviation."""

    device: str = "cuda"
    """Device of the network."""
    batch: int = Field(8, ge=1)
    """Images per forward pass."""
    path: str | None = None
    """Weight file. None: download it."""

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        scorer = _scorer(self.path, self.device)
        scores = []
        for i in range(0, len(samples), self.batch):
            part = samples[i : i + self.batch]
            images = networks.to_pil([s.pixels for s in part])
            rows = scorer.reward(prompts=[s.prompt.text for s in part], image_paths=images)
            scores += [Score(float(row[0]), {"sigma": float(row[1])}) for row in rows]
        return scores


@functools.cache
def _scorer(path: str | None, device: str) -> Any:
    try:
        from hpsv3 import HPSv3RewardInferencer
    except ImportError as error:
        raise UserError(
            f"the package hpsv3 cannot be imported ({error}); set reward.env to a file with the "
            "line `hpsv3`, and run `gesso env FILE`"
        ) from error
    return HPSv3RewardInferencer(checkpoint_path=path, device=device)

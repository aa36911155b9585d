"""UnifiedReward (Wang et al. 2025), on a server."""

from __future__ import annotations

from typing import ClassVar

from gesso.rewards.judges.chat import ChatJudge
from gesso.rewards.judges.judge import parse_rating
from gesso.types import Sample, Score


class UnifiedReward(ChatJudge):
    """UnifiedReward's pointwise score divided by 5 (Wang et al. 2025). The question has the form of
    its training data; put the exact wording into a file and set `prompt` to use it. Environment:
    `UNIFIED_REWARD_VLLM_URL`, `UNIFIED_REWARD_PATH`."""

    URL_ENV: ClassVar[str] = "UNIFIED_REWARD_VLLM_URL"
    MODEL_ENV: ClassVar[str] = "UNIFIED_REWARD_PATH"
    TEMPLATE: ClassVar[str] = (
        "Caption: [{prompt}]\n"
        "The image was generated from this caption. Rate it by two things: whether it shows what "
        "the caption says (objects, their attributes and relations), and how good it looks (sharp, "
        "detailed, right colours, pleasing).\n"
        "List the elements of the caption, one a line, as 'element (type): value', where value is "
        "1 if the image has it and 0 if not. Then end with 'Final Score:' and a number from 1 to "
        "5."
    )

    def read(self, response: str, sample: Sample) -> Score:
        return parse_rating(response, r"Final Score:\s*([1-5](?:\.\d+)?)", 1, 5)

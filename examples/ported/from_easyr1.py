"""A reward function as in EasyR1's examples, for docs/how-to/write-a-reward.md."""

import re

REWARD_NAME = "counting"
REWARD_TYPE = "batch"


def compute_score(reward_inputs, format_weight=0.1):
    scores = []
    for reward_input in reward_inputs:
        found = re.search(r"<answer>\s*(.*?)\s*</answer>", reward_input["response"])
        right = found is not None and found.group(1) == reward_input["ground_truth"]
        overall = (1 - format_weight) * right + format_weight * (found is not None)
        scores.append({"overall": overall, "accuracy": float(right)})
    return scores

"""A reward function as in EasyR1's examples, for docs/how-to/write-a-reward.md."""

import re

REWARD_NAME = "counting"
REWARD_TYPE = "batch"


def compute_score(reward_inputs, format_weight=0.1):
    scores = []
    for reward_input in reward_inputs:
        match = re.search(r"<answer>\s*(.*?)\s*</answer>", reward_input["response"])
        correct = match is not None and match.group(1) == reward_input["ground_truth"]
        overall = (1 - format_weight) * correct + format_weight * (match is not None)
        scores.append({"overall": overall, "accuracy": float(correct)})
    return scores

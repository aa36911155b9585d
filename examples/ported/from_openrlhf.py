"""A reward function for OpenRLHF's --reward.remote_url, for docs/how-to/write-a-reward.md."""

import torch


def reward_func(queries, prompts, labels, **kwargs):
    rows = zip(queries, labels, strict=True)
    rewards = torch.tensor([float(f"<answer>{label}</answer>" in query) for query, label in rows])
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"letters": len(queries[0])}}

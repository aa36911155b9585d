"""A reward function for TRL's GRPOTrainer, for docs/how-to/write-a-reward.md."""


def brief(prompts, completions, completion_ids, answer, log_extra=None, **kwargs):
    """Fewer tokens are better; `answer` is a column of the data."""
    if log_extra is not None:
        log_extra("expected", answer)
    short = [1.0 / (1 + len(ids)) for ids in completion_ids]
    empty = [completion[-1]["content"].strip() == "" for completion in completions]
    return [None if blank else value for value, blank in zip(short, empty, strict=True)]

"""A reward in a process of its own: `python -m gesso.rewards.worker module:Name '{options}'`.

Frames of `wire.py` come in on stdin and go out on stdout; when stdin closes, also because the
parent was killed, the worker ends. What the reward prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from gesso.rewards import base, wire
from gesso.types import Prompt, Sample, Score


class Broken:
    """Stands for a reward that could not be made."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def unfit(self, prompt: Prompt) -> str | None:
        return None

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return [Score.failed(self.reason)] * len(samples)


def main() -> None:
    reference, options = sys.argv[1], json.loads(sys.argv[2])
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a reward that prints must not break the frames
    sys.path.insert(0, os.getcwd())
    reward: base.Reward
    try:
        reward = base.load(reference, options)
    except Exception as error:  # told with every score: the run needs to know, not only stderr
        reward = Broken(f"{error}")
    while header := sys.stdin.buffer.readline():
        samples = wire.read_samples(header, sys.stdin.buffer.read)
        answers.write(wire.pack_scores(base.checked(reward, samples)))
        answers.flush()


if __name__ == "__main__":
    main()

"""A reward in its own process, started by `imports.command` with "module:Name", its options and its
style.

Frames of `wire.py` come in on stdin and go out on stdout; when stdin closes, also because the
parent was killed, the worker ends. What the reward prints goes to stderr, and it has no input.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from gesso.rewards import base
from gesso.rewards.transport import wire
from gesso.rewards.transport.untrusted import raised
from gesso.types import Prompt, Sample, Score, UserError


class Broken:
    """Stands for a reward that could not be made."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def unfit(self, prompt: Prompt) -> str | None:
        return None

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return [Score.failed(self.reason)] * len(samples)


def main() -> None:
    reference, options, style = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a reward that reads, prints or closes its
    os.dup2(2, 1)  # streams must not break the frames
    reward: base.Reward
    try:
        reward = base.load(reference, options, style=style)
    except BaseException as error:  # every score says so: the run must know, not only stderr
        reward = Broken(str(error) if isinstance(error, UserError) else raised(error))
    while header := requests.readline():
        samples = wire.read_samples(header, requests.read)
        answers.write(wire.pack_scores(_scored(reward, samples)))
        answers.flush()


def _scored(reward: base.Reward, samples: list[Sample]) -> list[Score]:
    """Ctrl-C does not reach this process, so a KeyboardInterrupt is the reward's."""
    try:
        return base.checked(reward, samples)
    except KeyboardInterrupt as error:
        return [Score.failed(raised(error))] * len(samples)


if __name__ == "__main__":
    main()

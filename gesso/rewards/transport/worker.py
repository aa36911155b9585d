"""Runs a reward in a worker process, started by `imports.command` with "module:Name", options and
style.

Reads frames of `wire.py` from stdin and writes frames to stdout; exits when stdin closes, which
also happens if the parent is killed. The reward prints to stderr and cannot read stdin.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from gesso.rewards import base
from gesso.rewards.transport import wire
from gesso.rewards.untrusted import raised_message
from gesso.types import Prompt, Sample, Score, UserError


class FailedReward:
    """Replaces a reward that could not be created: fails every sample with the reason."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def unfit(self, prompt: Prompt) -> str | None:
        return None

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return [Score.failed(self.reason)] * len(samples)


def main() -> None:
    reference, options, style = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
    requests, responses = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a reward that reads, prints or closes
    os.dup2(2, 1)  # standard streams must not break the frames
    reward: base.AnyReward
    try:
        reward = base.load(reference, options, style=style)
    except BaseException as error:  # reported by every score, not only on stderr
        reward = FailedReward(str(error) if isinstance(error, UserError) else raised_message(error))
    while header := requests.readline():
        samples = wire.read_samples(header, requests.read)
        responses.write(wire.pack_scores(_scored(reward, samples)))
        responses.flush()


def _scored(reward: base.AnyReward, samples: list[Sample]) -> list[Score]:
    """Ctrl-C does not reach this process, so a KeyboardInterrupt comes from the reward."""
    try:
        return base.checked(reward, samples)
    except KeyboardInterrupt as error:
        return [Score.failed(raised_message(error))] * len(samples)


if __name__ == "__main__":
    main()

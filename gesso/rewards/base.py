"""What a reward is: an object with `unfit` and `score`, or just a function of the user's.

A reward is plain synchronous code; where it runs (worker processes, later HTTP) is not its
business. It sees everything: the prompt, all columns of its row and the picture.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from gesso.config import Strict, parse
from gesso.types import Prompt, Sample, Score, UserError


class Reward(Protocol):
    def unfit(self, prompt: Prompt) -> str | None:
        """Why this prompt cannot be scored, or None. Asked once, before the run."""

    def score(self, samples: Sequence[Sample]) -> Sequence[Score]:
        """One score a sample, in order."""


class FunctionReward:
    """`f(samples, **options)` → a list of numbers or of Scores."""

    def __init__(self, function: Callable[..., Sequence[Any]], options: Mapping[str, Any]) -> None:
        self.function = function
        self.options = options

    def unfit(self, prompt: Prompt) -> str | None:
        return None

    def score(self, samples: Sequence[Sample]) -> Sequence[Score]:
        answers = self.function(samples, **self.options)
        return [a if isinstance(a, Score) else Score(float(a)) for a in answers]


def load(reference: str, options: Mapping[str, Any]) -> Reward:
    """ "module:Name" → a ready reward. A Strict class checks its options, a function takes them
    as keyword arguments."""
    module, _, name = reference.partition(":")
    if not name:
        raise UserError(f'reward "{reference}": expected "module:function", found no colon')
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UserError(f'reward "{reference}" cannot be imported: {error}') from error
    if isinstance(found, type) and issubclass(found, Strict):
        return parse(found, options, f"reward {reference}")  # type: ignore[return-value]
    if isinstance(found, type):
        return found(**options)
    if callable(found):
        return FunctionReward(found, options)
    raise UserError(f'reward "{reference}" is {type(found).__name__}; expected a function or class')


def checked(reward: Reward, samples: Sequence[Sample]) -> list[Score]:
    """Score, whatever the reward does: raising, a wrong count or a number that is not finite
    become `Score.error`."""
    try:
        scores = list(reward.score(samples))
    except Exception as error:
        return [Score.failed(f"raised {type(error).__name__}: {error}")] * len(samples)
    if len(scores) != len(samples):
        return [Score.failed(f"returned {len(scores)} scores for {len(samples)} samples")] * len(
            samples
        )
    return [_finite(score) for score in scores]


def _finite(score: Score) -> Score:
    if score.error is None and (score.value is None or not math.isfinite(score.value)):
        return Score.failed(f"returned {score.value}")
    return score

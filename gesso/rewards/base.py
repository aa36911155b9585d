"""What a reward is: an object with `unfit` and `score`, or just a function of the user's.

A reward is plain synchronous code; where it runs is a Scorer's business: worker processes, servers
over HTTP, or requests on the event loop. It sees everything: the prompt, all columns of its row and
the picture or text.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from gesso.config import Strict
from gesso.parsing import parse
from gesso.types import Prompt, Sample, Score, UserError


class Reward(Protocol):
    def unfit(self, prompt: Prompt) -> str | None:
        """Why this prompt cannot be scored, or None. Asked once, before the run."""

    def score(self, samples: Sequence[Sample]) -> Sequence[Score]:
        """One score a sample, in order; None for a value: it does not apply to this sample."""


class Scorer(Protocol):
    """Where a reward runs. Every sample gets a score, in order, whatever goes wrong."""

    @property
    def processes(self) -> int:
        """How many it keeps busy on this machine."""

    @property
    def hits(self) -> int:
        """Scores it remembered, so far, and did not ask for again."""

    @property
    def random(self) -> bool:
        """Whether its answers must not be remembered, as far as it knows by now."""

    async def score(self, samples: Sequence[Sample]) -> list[Score]: ...

    async def close(self) -> None: ...


class FunctionReward:
    """`f(samples, **options)` → a list of numbers, None or Scores; it takes every prompt."""

    def __init__(self, function: Callable[..., Sequence[Any]], options: Mapping[str, Any]) -> None:
        self.function = function
        self.options = options

    def unfit(self, prompt: Prompt) -> str | None:
        return None

    def score(self, samples: Sequence[Sample]) -> Sequence[Score]:
        return self.function(samples, **self.options)


class Elsewhere:
    """Stands for a reward that only its server knows; it takes every prompt."""

    def unfit(self, prompt: Prompt) -> str | None:
        return None

    def score(self, samples: Sequence[Sample]) -> Sequence[Score]:
        raise AssertionError("it runs on a server")


def find(reference: str, options: Mapping[str, Any]) -> Any:
    """ "module:Name" → the function or class, which takes these options. Nothing is made of it."""
    module, _, name = reference.partition(":")
    if not name:
        raise UserError(f'reward "{reference}": expected "module:function", found no colon')
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # a module of the user's may fail in any way
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f'reward "{reference}" cannot be imported: {reason}') from error
    if isinstance(found, type):
        if not issubclass(found, Strict):
            _fits(found, reference, options)
        if not callable(getattr(found, "score", None)):
            raise UserError(f'reward "{reference}" has no method score(samples)')
    elif callable(found):
        _fits(found, reference, options, None)
    else:
        kind = type(found).__name__
        raise UserError(f'reward "{reference}" is {kind}; expected a function or class')
    return found


def load(reference: str, options: Mapping[str, Any], name: str = "") -> Reward:
    """ "module:Name" → a ready reward. A Strict class checks its options, a function takes them
    as keyword arguments. `name` is what a recipe calls it."""
    found = find(reference, options)
    if not isinstance(found, type):
        return FunctionReward(found, options)
    if issubclass(found, Strict):
        return parse(found, options, f"reward {name or reference}")  # type: ignore[return-value]
    try:
        made: Any = found(**options)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f'reward "{reference}" cannot be made: {reason}') from error
    return made if callable(getattr(made, "unfit", None)) else FunctionReward(made.score, {})


def _fits(
    call: Callable[..., Any], reference: str, options: Mapping[str, Any], *first: Any
) -> None:
    try:
        inspect.signature(call).bind(*first, **options)
    except TypeError as error:
        raise UserError(f'reward "{reference}" does not take these options: {error}') from error


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
    return [plain(score) for score in scores]


def plain(answer: Any) -> Score:
    """A user's answer, a number, None or a Score, as a Score of plain finite floats."""
    score = answer if isinstance(answer, Score) else Score(answer)
    if score.error is not None:
        return Score.failed(str(score.error))
    text = str(score.text).encode("utf-8", "replace").decode()
    if score.value is None:
        return Score(None, text=text)
    try:
        value = float(score.value)
    except (TypeError, ValueError, OverflowError):
        return Score.failed(f"returned {score.value!r:.80}, not a number")
    if not math.isfinite(value):
        return Score.failed(f"returned {value}")
    try:
        parts = {str(name): float(part) for name, part in score.parts.items()}
    except (TypeError, ValueError, OverflowError, AttributeError):
        return Score.failed(f"returned {score.parts!r:.80} as details, not numbers by name")
    odd = [name for name, part in parts.items() if not math.isfinite(part)]
    if odd:
        return Score.failed(f'returned {parts[odd[0]]} as its detail "{odd[0]}"')
    return Score(value, parts, text)


def is_random(reward: Reward) -> bool:
    """Whether the function or class says `random = True`: two looks at a sample may differ."""
    source: Any = reward.function if isinstance(reward, FunctionReward) else reward
    source = getattr(source, "__self__", source)  # a plain class's method: its object
    return getattr(source, "random", False) is True

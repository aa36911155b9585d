"""The reward interface: an object with `unfit` and `score` or `score_group`, or a custom function.

A reward is plain synchronous code; a Scorer determines where it runs: in worker processes, on
servers over HTTP, or as requests on the event loop. A reward receives the prompt, all columns of
its row and the image or text.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from gesso import imports
from gesso.rewards.functions import FunctionReward, GroupFunction
from gesso.rewards.styles import adapt
from gesso.rewards.untrusted import (
    InvalidScores,
    clean_text,
    one_line,
    raised_message,
    score_list,
    short_repr,
)
from gesso.types import Prompt, Sample, Score, UserError

MAX_VALUE = 1e15  # of a reward; its square (in the critic's loss) still fits into float32
MAX_NAME = 100  # characters in the name of a detail


class Reward(Protocol):
    def unfit(self, prompt: Prompt) -> str | None:
        """Why this prompt cannot be scored, or None. Called once, before the run."""

    def score(self, samples: Sequence[Sample]) -> Sequence[Score]:
        """One score per sample, in order. A value of None: the reward does not apply."""


class GroupReward(Protocol):
    """A reward that compares the samples of a prompt."""

    def unfit(self, prompt: Prompt) -> str | None: ...

    def score_group(self, samples: Sequence[Sample]) -> Sequence[Score]:
        """One score per sample of a whole group, in order: all samples of one prompt."""


AnyReward = Reward | GroupReward


class Scorer(Protocol):
    """Runs a reward. Returns one score per sample, in order; failures are `Score.error`."""

    @property
    def groupwise(self) -> bool:
        """Whether `score` takes exactly one whole group at a time."""

    @property
    def processes(self) -> int:
        """Processes on this machine."""

    @property
    def hits(self) -> int:
        """Scores from a cache, so far."""

    @property
    def random(self) -> bool:
        """Whether scores must not be cached, as far as is known."""

    async def score(self, samples: Sequence[Sample]) -> list[Score]: ...

    async def close(self) -> None: ...


class RemoteReward:
    """Placeholder of a reward that only its server has; accepts every prompt."""

    def unfit(self, prompt: Prompt) -> str | None:
        return None

    def score(self, samples: Sequence[Sample]) -> Sequence[Score]:
        raise AssertionError("this reward runs on a server")


def find(reference: str, options: Mapping[str, Any], style: str = "gesso") -> Any:
    """Loads the function or class "module:Name" and checks its options; does not instantiate it."""
    target = imports.load(reference, "reward")
    _check_options(reference, options)
    if isinstance(target, type):
        from gesso.config import Strict  # imports pydantic, which functions do not need

        if style != "gesso":
            raise UserError(
                f'reward "{reference}" is a class; style = "{style}" requires a function or a '
                "callable object"
            )
        if not issubclass(target, Strict):
            _check_signature(target, reference, options)
        _method_name(target, reference)
    elif callable(target):
        adapt(target, reference, options, style)
        if _marked(target) and style != "gesso":
            raise UserError(
                f'reward "{reference}" is groupwise, but style = "{style}" scores samples '
                'one by one; use style = "gesso"'
            )
    else:
        kind = type(target).__name__
        raise UserError(f'reward "{reference}" is of type {kind}; expected a function or class')
    return target


def _method_name(target: type, reference: str) -> str:
    """The method that scores: `score` or `score_group`."""
    names = [n for n in ("score", "score_group") if callable(getattr(target, n, None))]
    if not names:
        raise UserError(
            f'reward "{reference}" has no method score(samples), nor score_group(samples)'
        )
    if len(names) > 1:
        raise UserError(
            f'reward "{reference}" has both score and score_group; expected only one: score for '
            "samples one by one, score_group to compare the samples of a prompt"
        )
    return names[0]


def load(
    reference: str, options: Mapping[str, Any], name: str = "", style: str = "gesso"
) -> AnyReward:
    """Loads the reward "module:Name". A Strict class validates its options, a function receives
    them as keyword arguments. `name` is its name in a recipe."""
    target = find(reference, options, style)
    if not isinstance(target, type):
        function = adapt(target, reference, options, style)
        return GroupFunction(function) if _marked(target) else function
    from gesso.config import Strict
    from gesso.config.parsing import parse

    if issubclass(target, Strict):
        reward: Any = parse(target, options, f"reward {name or reference}")
    else:
        try:
            reward = target(**options)
        except (Exception, SystemExit) as error:
            raise UserError(
                f'reward "{reference}" cannot be created: it {raised_message(error)}'
            ) from error
    called = _method_name(target, reference)
    method = adapt(getattr(reward, called), f"{reference}.{called}", {}, "gesso")
    if callable(getattr(reward, "unfit", None)):
        return reward
    return GroupFunction(method) if called == "score_group" else method


def _check_options(reference: str, options: Mapping[str, Any]) -> None:
    """Options are sent to other processes as JSON."""
    for name, value in options.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            raise UserError(
                f'reward "{reference}": option {name} = {short_repr(value)} is a '
                f"{type(value).__name__}; expected text, a number, true, false, a list or a table"
            ) from None


def _check_signature(call: Callable[..., Any], reference: str, options: Mapping[str, Any]) -> None:
    try:
        inspect.signature(call).bind(**options)
    except TypeError as error:
        raise UserError(f'reward "{reference}" does not accept these options: {error}') from error
    except ValueError:  # some C classes have no signature
        return


def unfit(reward: AnyReward, prompt: Prompt, name: str) -> str | None:
    """Calls `reward.unfit`, which may be user code: a UserError if it raises or returns anything
    but a text or None. An empty text counts as None."""
    copy = dataclasses.replace(prompt, columns=dict(prompt.columns))  # it may change the columns
    try:
        reason = reward.unfit(copy)
    except (Exception, SystemExit) as error:
        fault = raised_message(error)
    else:
        if reason is None:
            return None
        if isinstance(reason, str):
            return one_line(reason) or None
        if inspect.iscoroutine(reason):
            reason.close()
        fault = f"returned {short_repr(reason)}; expected a text (the reason) or None"
    where = f"{prompt.where}: " if prompt.where else ""
    raise UserError(f'reward "{name}": unfit {fault} (prompt: {where}{prompt.text[:60]!r})')


def checked(reward: AnyReward, samples: Sequence[Sample]) -> list[Score]:
    """Calls `reward.score`, or `score_group` with one whole group: an exception, a wrong count or a
    non-finite number becomes `Score.error`. The reward receives a copy of the list and may change
    it."""
    count = len(samples)
    call: Any = reward
    score = call.score_group if is_groupwise(call) else call.score
    try:
        results = score_list(score(list(samples)), count)
    except KeyboardInterrupt:
        raise
    except InvalidScores as error:
        return [Score.failed(str(error))] * count
    except BaseException as error:
        return [Score.failed(raised_message(error))] * count
    return [_score_of(result) for result in results]


def _score_of(result: Any) -> Score:
    try:
        return plain(result)
    except Exception as error:  # a property of user code
        return Score.failed(f"returned {short_repr(result)}, which {raised_message(error)}")


def plain(result: Any) -> Score:
    """Converts a result of user code (a number, None or a Score) to a Score of plain floats that
    can be summed and squared."""
    score = result if isinstance(result, Score) else Score(result)
    if score.error is not None:
        return Score.failed(one_line(score.error) or "failed without a reason")
    text = clean_text(score.text)
    if score.value is None:
        return Score(None, text=text)
    value = _number(score.value)
    if value is None:
        return Score.failed(f"returned {short_repr(score.value)}, not a number")
    if fault := _fault(value):
        return Score.failed(f"returned {fault}")
    parts: dict[str, float] = {}
    if not isinstance(score.parts, Mapping):
        return Score.failed(
            f"returned {short_repr(score.parts)} as details; expected a mapping of names to numbers"
        )
    for key, detail in score.parts.items():
        name, number = clean_text(key), _number(detail)
        if number is None:
            return Score.failed(
                f"returned {short_repr(detail)} as detail {short_repr(name)}, not a number"
            )
        if fault := _fault(number):
            return Score.failed(f'returned {fault} as detail "{one_line(name, MAX_NAME)}"')
        if not name.isprintable() or not all(name.split("/")) or len(name) > MAX_NAME:
            return Score.failed(
                f"returned a detail named {short_repr(key)}; expected a name of at most "
                f"{MAX_NAME} printable characters"
            )
        parts[name] = number
    return Score(value, parts, text)


def _number(value: Any) -> float | None:
    """None if it is not a number. Text never is, even if float() would parse it."""
    if isinstance(value, str | bytes | bytearray):
        return None
    try:
        return float(value)
    except (
        TypeError,
        ValueError,
        OverflowError,
        RuntimeError,
    ):  # RuntimeError: torch
        return None


def _fault(value: float) -> str | None:
    """Describes a number that is not finite or too large; else None."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:g}, outside ±{MAX_VALUE:g}" if abs(value) > MAX_VALUE else None


def is_groupwise(reward: Any) -> bool:
    """Whether a reward, or the class or function of one, scores whole groups."""
    return callable(getattr(reward, "score_group", None)) or _marked(reward)


def _marked(target: Any) -> bool:
    """Whether a function is marked by `gesso.types.groupwise`."""
    return not isinstance(target, type) and getattr(target, "groupwise", False) is True


def is_random(reward: AnyReward) -> bool:
    """Whether the function or class declares `random = True`: scores of one sample may differ."""
    return getattr(source(reward), "random", False) is True


def source(reward: AnyReward) -> Any:
    """The function, or the instance of the class, that a reward was made of."""
    found: Any = reward
    if isinstance(reward, FunctionReward | GroupFunction):
        found = reward.function
    return getattr(found, "__self__", found)  # the instance of a bound method

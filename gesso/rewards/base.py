"""What a reward is: an object with `unfit` and `score`, or just a function of the user's.

A reward is plain synchronous code; where it runs is a Scorer's business: worker processes, servers
over HTTP, or requests on the event loop. It sees everything: the prompt, all columns of its row and
the picture or text.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from gesso import imports
from gesso.config import Strict
from gesso.config.parsing import parse
from gesso.rewards.functions import FunctionReward
from gesso.rewards.styles import adapted
from gesso.rewards.transport.untrusted import Unreadable, clean, line, listed, raised, shown
from gesso.types import Prompt, Sample, Score, UserError

MAX_VALUE = 1e15  # of a reward: its square, as the critic's loss has it, still fits into float32
MAX_NAME = 100  # characters of a detail's name


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


class Elsewhere:
    """Stands for a reward that only its server knows; it takes every prompt."""

    def unfit(self, prompt: Prompt) -> str | None:
        return None

    def score(self, samples: Sequence[Sample]) -> Sequence[Score]:
        raise AssertionError("it runs on a server")


def find(reference: str, options: Mapping[str, Any], style: str = "gesso") -> Any:
    """ "module:Name" → the function or class, which takes these options. Nothing is made of it."""
    found = imports.load(reference, "reward")
    _check_options(reference, options)
    if isinstance(found, type):
        if style != "gesso":
            raise UserError(
                f'reward "{reference}" is a class; style = "{style}" takes a function, or an '
                "object that can be called"
            )
        if not issubclass(found, Strict):
            _fits(found, reference, options)
        if not callable(getattr(found, "score", None)):
            raise UserError(f'reward "{reference}" has no method score(samples)')
    elif callable(found):
        adapted(found, reference, options, style)
    else:
        kind = type(found).__name__
        raise UserError(f'reward "{reference}" is {kind}; expected a function or class')
    return found


def load(
    reference: str, options: Mapping[str, Any], name: str = "", style: str = "gesso"
) -> Reward:
    """ "module:Name" → a ready reward. A Strict class checks its options, a function takes them
    as keyword arguments. `name` is what a recipe calls it."""
    found = find(reference, options, style)
    if not isinstance(found, type):
        return adapted(found, reference, options, style)
    if issubclass(found, Strict):
        made: Any = parse(found, options, f"reward {name or reference}")
    else:
        try:
            made = found(**options)
        except (Exception, SystemExit) as error:
            raise UserError(f'reward "{reference}" cannot be made: it {raised(error)}') from error
    method = adapted(made.score, f"{reference}.score", {}, "gesso")
    return made if callable(getattr(made, "unfit", None)) else method


def _check_options(reference: str, options: Mapping[str, Any]) -> None:
    """They go to other processes as JSON."""
    for name, value in options.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            raise UserError(
                f'reward "{reference}": option {name} = {shown(value)} is a '
                f"{type(value).__name__}; expected text, a number, true, false, a list or a table"
            ) from None


def _fits(call: Callable[..., Any], reference: str, options: Mapping[str, Any]) -> None:
    try:
        inspect.signature(call).bind(**options)
    except TypeError as error:
        raise UserError(f'reward "{reference}" does not take these options: {error}') from error
    except ValueError:  # some classes of C have no signature
        return


def unfit(reward: Reward, prompt: Prompt, name: str) -> str | None:
    """`reward.unfit`, which is the user's: raises a UserError where it gives anything but a text or
    None. An empty text is no reason."""
    theirs = dataclasses.replace(prompt, columns=dict(prompt.columns))  # ours stay as they are
    try:
        reason = reward.unfit(theirs)
    except (Exception, SystemExit) as error:
        fault = raised(error)
    else:
        if reason is None:
            return None
        if isinstance(reason, str):
            return line(reason) or None
        if inspect.iscoroutine(reason):
            reason.close()
        fault = f"returned {shown(reason)}; expected the reason as a text, or None"
    where = f"{prompt.where}: " if prompt.where else ""
    raise UserError(f'reward "{name}": its unfit {fault} (asked about {where}{prompt.text[:60]!r})')


def checked(reward: Reward, samples: Sequence[Sample]) -> list[Score]:
    """Score, whatever the reward does: raising, a wrong count or a number that is not finite
    become `Score.error`. The reward has its own list of the samples and may empty it."""
    count = len(samples)
    try:
        answers = listed(reward.score(list(samples)), count)
    except KeyboardInterrupt:
        raise
    except Unreadable as error:
        return [Score.failed(str(error))] * count
    except BaseException as error:
        return [Score.failed(raised(error))] * count
    return [_readable(answer) for answer in answers]


def _readable(answer: Any) -> Score:
    try:
        return plain(answer)
    except Exception as error:  # a property of the user's
        return Score.failed(f"returned {shown(answer)}, which {raised(error)}")


def plain(answer: Any) -> Score:
    """A user's answer, a number, None or a Score, as a Score of plain numbers that can be summed
    and squared."""
    score = answer if isinstance(answer, Score) else Score(answer)
    if score.error is not None:
        return Score.failed(line(score.error) or "failed without a reason")
    text = clean(score.text)
    if score.value is None:
        return Score(None, text=text)
    value = _number(score.value)
    if value is None:
        return Score.failed(f"returned {shown(score.value)}, not a number")
    if fault := _fault(value):
        return Score.failed(f"returned {fault}")
    parts: dict[str, float] = {}
    if not isinstance(score.parts, Mapping):
        return Score.failed(f"returned {shown(score.parts)} as details, not numbers by name")
    for given, detail in score.parts.items():
        name, number = clean(given), _number(detail)
        if number is None:
            told = f"returned {shown(detail)} as its detail {shown(name)}, not a number"
            return Score.failed(told)
        if fault := _fault(number):
            return Score.failed(f'returned {fault} as its detail "{line(name, MAX_NAME)}"')
        if not name.isprintable() or not all(name.split("/")) or len(name) > MAX_NAME:
            return Score.failed(
                f"returned a detail called {shown(given)}; expected a name of at most {MAX_NAME} "
                "printable characters"
            )
        parts[name] = number
    return Score(value, parts, text)


def _number(value: Any) -> float | None:
    """None where it is none: a text is not, though float() might read it."""
    if isinstance(value, str | bytes | bytearray):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # torch's for several elements
        return None


def _fault(value: float) -> str | None:
    """What is wrong with a number, or None."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:g}, beyond ±{MAX_VALUE:g}" if abs(value) > MAX_VALUE else None


def is_random(reward: Reward) -> bool:
    """Whether the function or class says `random = True`: two looks at a sample may differ."""
    source: Any = reward.function if isinstance(reward, FunctionReward) else reward
    source = getattr(source, "__self__", source)  # a plain class's method: its object
    return getattr(source, "random", False) is True

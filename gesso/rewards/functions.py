"""Custom functions as rewards: how they are called, and how their signature is inspected."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gesso.rewards.untrusted import clean_text, raised_message
from gesso.types import Prompt, Sample, Score

Function = Callable[..., Any]
Options = Mapping[str, Any]


class FunctionReward:
    """`f(samples, **options)` → a list of numbers, None or Scores; accepts every prompt."""

    call = "(samples, **options)"  # in error messages
    text_only = False

    def __init__(self, function: Function, options: Options, reference: str = "") -> None:
        self.function = function
        self.options = options

    def unfit(self, prompt: Prompt) -> str | None:
        return None

    def score(self, samples: Sequence[Sample]) -> Sequence[Score]:
        return self.function(samples, **self.options)

    @staticmethod
    def bind(signature: inspect.Signature, options: Options) -> None:
        """Raises TypeError if a function with this signature cannot be called in this style."""
        signature.bind(None, **options)

    @staticmethod
    def recognises(names: Sequence[str], takes_any: bool) -> bool:
        """Whether these parameter names match this style; `takes_any`: it has **kwargs."""
        return names[:1] == ["samples"]


class GroupFunction:
    """A function that receives one whole group at a time."""

    def __init__(self, reward: FunctionReward) -> None:
        self.reward = reward
        self.function = reward.function

    def unfit(self, prompt: Prompt) -> str | None:
        return self.reward.unfit(prompt)

    def score_group(self, samples: Sequence[Sample]) -> Sequence[Score]:
        return self.reward.score(samples)


def score_texts(
    reward: FunctionReward, score: Callable[[list[Sample]], list[Score]], samples: Sequence[Sample]
) -> list[Score]:
    """Scores the texts that fit; each other sample fails with a reason, because a server's
    batch may contain samples of several clients."""
    reasons = [
        "the sample is an image; expected text" if s.text is None else reward.unfit(s.prompt)
        for s in samples
    ]
    fit = [sample for sample, reason in zip(samples, reasons, strict=True) if reason is None]
    scores = iter(score(fit) if fit else [])
    return [next(scores) if reason is None else Score.failed(reason) for reason in reasons]


def score_alone(call: Callable[[Sample], Score], sample: Sample) -> Score:
    """Calls the function for one sample; an exception fails only that sample."""
    try:
        return call(sample)
    except Exception as error:
        return Score.failed(raised_message(error))


def scalar_of(value: Any) -> Any:
    """The number in a tensor, an array or a list of one element; anything else unchanged."""
    if hasattr(value, "tolist"):  # torch and numpy, without importing them
        value = value.tolist()
    for _ in range(3):  # at most three dimensions
        if isinstance(value, list | tuple) and len(value) == 1:
            value = value[0]
    return value


def signature_of(function: Function) -> inspect.Signature | None:
    """None for functions without a signature, such as some C functions."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def parameter_names(signature: inspect.Signature) -> tuple[list[str], bool]:
    """Returns (parameters that can be passed by name, whether there is **kwargs)."""
    parameters = signature.parameters.values()
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    return [p.name for p in parameters if p.kind in _BY_NAME], takes_any


def required_parameters(signature: inspect.Signature) -> list[str]:
    """Named parameters without a default."""
    parameters = signature.parameters.values()
    return [p.name for p in parameters if p.kind in _BY_NAME and p.default is p.empty]


def format_parameters(signature: inspect.Signature) -> str:
    """The parameters without types: (samples, scale=1.0)."""
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return clean_text(signature.replace(parameters=bare, return_annotation=signature.empty), 200)

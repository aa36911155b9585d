"""A function of the user's as a reward: how it is called, and what its signature says."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gesso.rewards.transport.untrusted import clean, raised
from gesso.types import Prompt, Sample, Score

Function = Callable[..., Any]
Options = Mapping[str, Any]


class FunctionReward:
    """`f(samples, **options)` → a list of numbers, None or Scores; it takes every prompt."""

    call = "(samples, **options)"  # for errors
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
        """Raises TypeError where a function of this signature cannot be called so."""
        signature.bind(None, **options)

    @staticmethod
    def recognises(names: Sequence[str], takes_any: bool) -> bool:
        """Whether parameters of these names are those of this style; `takes_any`: **kwargs."""
        return names[:1] == ["samples"]


def of_texts(
    reward: FunctionReward, score: Callable[[list[Sample]], list[Score]], samples: Sequence[Sample]
) -> list[Score]:
    """Scores of the samples that can be scored; the others fail, each with its reason. A server's
    batch may hold samples of several callers."""
    reasons = [
        "is an image; expected a text" if s.text is None else reward.unfit(s.prompt)
        for s in samples
    ]
    fit = [sample for sample, reason in zip(samples, reasons, strict=True) if reason is None]
    scores = iter(score(fit) if fit else [])
    return [next(scores) if reason is None else Score.failed(reason) for reason in reasons]


def alone(call: Callable[[Sample], Score], sample: Sample) -> Score:
    """A function that is called sample by sample fails for that sample only."""
    try:
        return call(sample)
    except Exception as error:
        return Score.failed(raised(error))


def single(value: Any) -> Any:
    """The number in a tensor, an array or a list of one; anything else as it is."""
    if hasattr(value, "tolist"):  # torch's and numpy's, without importing them
        value = value.tolist()
    for _ in range(3):  # dimensions
        if isinstance(value, list | tuple) and len(value) == 1:
            value = value[0]
    return value


def signature_of(function: Function) -> inspect.Signature | None:
    """None where there is none, as for some functions of C."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def names_of(signature: inspect.Signature) -> tuple[list[str], bool]:
    """Parameters that have a name, and whether any other keyword argument is taken."""
    parameters = signature.parameters.values()
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    return [p.name for p in parameters if p.kind in _BY_NAME], takes_any


def required_of(signature: inspect.Signature) -> list[str]:
    """Names without which it cannot be called."""
    given = signature.parameters.values()
    return [p.name for p in given if p.kind in _BY_NAME and p.default is p.empty]


def shown_parameters(signature: inspect.Signature) -> str:
    """As in a call, without types: (samples, scale=1.0)."""
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return clean(signature.replace(parameters=bare, return_annotation=signature.empty), 200)

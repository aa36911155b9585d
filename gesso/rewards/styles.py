"""`style`: the framework that a reward function was written for.

gesso     f(samples, **options)
easyr1    f(reward_inputs, **options), or f(reward_input, **options)     EasyR1 0.3.3
openrlhf  f(queries, prompts, labels, **options)                         OpenRLHF 0.11
trl       f(prompts=, completions=, completion_ids=, **columns)          TRL 1.10, in trl.py

The last three score text only. Signatures are checked when a function is loaded.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from gesso import imports
from gesso.rewards.functions import (
    Function,
    FunctionReward,
    Options,
    format_parameters,
    parameter_names,
    required_parameters,
    scalar_of,
    score_alone,
    score_texts,
    signature_of,
)
from gesso.rewards.labels import as_text, label_of, missing_label
from gesso.rewards.trl import TRL
from gesso.rewards.untrusted import clean_text, score_list, short_repr
from gesso.types import Prompt, Sample, Score, UserError


class EasyR1(FunctionReward):
    """Takes a list of dicts and returns one dict each: "overall" is the value, other items are
    details. Called with one dict at a time if the function's module sets REWARD_TYPE =
    "sequential", or if it does not set it (before EasyR1 0.3.3) and the parameter is named
    `reward_input`."""

    call = "(reward_inputs, **options)"
    text_only = True

    def __init__(self, function: Function, options: Options, reference: str = "") -> None:
        super().__init__(function, options)
        signature = signature_of(function)
        first = parameter_names(signature)[0][:1] if signature else []
        default = "sequential" if first == ["reward_input"] else "batch"
        kind = _constant(reference, "REWARD_TYPE", default)
        if kind not in ("batch", "sequential"):
            raise UserError(
                f'reward "{reference}": its module sets REWARD_TYPE = {short_repr(kind)}; expected '
                '"batch" or "sequential"'
            )
        self.sequential = kind == "sequential"

    def unfit(self, prompt: Prompt) -> str | None:
        return None if label_of(prompt) is not None else missing_label(prompt)

    def score(self, samples: Sequence[Sample]) -> Sequence[Score]:
        return score_texts(
            self, self._score_each if self.sequential else self._score_batch, samples
        )

    def _score_batch(self, samples: Sequence[Sample]) -> list[Score]:
        inputs = [_reward_input(sample) for sample in samples]
        results = score_list(self.function(inputs, **self.options), len(samples))
        return [_overall(result) for result in results]

    def _score_each(self, samples: Sequence[Sample]) -> list[Score]:
        def one(sample: Sample) -> Score:
            return _overall(self.function(_reward_input(sample), **self.options))

        return [score_alone(one, sample) for sample in samples]

    @staticmethod
    def recognises(names: Sequence[str], takes_any: bool) -> bool:
        return bool(names) and names[0] in ("reward_inputs", "reward_input")


class OpenRLHF(FunctionReward):
    """Called with one query at a time, as in OpenRLHF: prompt and response in one text. Returns the
    reward, or a dict with "rewards"; "scores" and the items of "extra_logs" become details.
    Numbers may be tensors of one element."""

    call = "(queries, prompts, labels, **options)"
    text_only = True

    def score(self, samples: Sequence[Sample]) -> Sequence[Score]:
        each = functools.partial(score_alone, self._one)
        return score_texts(self, lambda fit: [each(sample) for sample in fit], samples)

    def _one(self, sample: Sample) -> Score:
        prompt, label = sample.prompt.text, label_of(sample.prompt)
        query = prompt + sample.response
        result = self.function([query], [prompt], ["" if label is None else label], **self.options)
        if not isinstance(result, Mapping):
            result = {"rewards": result}
        value = scalar_of(result.get("rewards"))
        if value is None:
            return Score.failed(f'returned {short_repr(result)}; expected a value for "rewards"')
        details = dict(result.get("extra_logs") or {})
        if result.get("scores") is not None:
            details["scores"] = result["scores"]
        return Score(value, {name: scalar_of(detail) for name, detail in details.items()})

    @staticmethod
    def bind(signature: inspect.Signature, options: Options) -> None:
        signature.bind(None, None, None, **options)

    @staticmethod
    def recognises(names: Sequence[str], takes_any: bool) -> bool:
        return {"queries", "prompts", "labels"} <= set(names)


STYLES: dict[str, type[FunctionReward]] = {
    "gesso": FunctionReward,
    "easyr1": EasyR1,
    "openrlhf": OpenRLHF,
    "trl": TRL,
}


def adapt(function: Function, reference: str, options: Options, style: str) -> FunctionReward:
    """Wraps the function as a reward; raises if its signature does not match the style."""
    kind = STYLES[style]
    if _is_async(function) and kind is not TRL:
        raise UserError(
            f'reward "{reference}" is async; style = "{style}" requires a plain function, only '
            'style = "trl" may be async'
        )
    signature = signature_of(function)
    if signature is not None:
        _check(signature, reference, options, style)
    return kind(function, options, reference)


def _is_async(function: Function) -> bool:
    called = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
    return any(
        test(one)
        for test in (inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        for one in (function, called)
    )


def _check(signature: inspect.Signature, reference: str, options: Options, style: str) -> None:
    kind, fault = STYLES[style], ""
    try:
        kind.bind(signature, options)
    except TypeError as error:
        fault = f": {error}{_reserved_key_hint(signature, options)}"
    others = [n for n, other in STYLES.items() if other.recognises(*parameter_names(signature))]
    likely = others[0] if others else style
    if not fault and likely in (style, "gesso"):  # other styles may have a parameter `samples` too
        return
    hint = f'; did you mean style = "{likely}"?' if likely != style else ""
    takes = format_parameters(signature)
    raise UserError(
        f'reward "{reference}" takes {takes}; style = "{style}" calls it with {kind.call}'
        f"{fault}{hint}"
    )


def _reserved_key_hint(signature: inspect.Signature, options: Options) -> str:
    """A hint about a parameter that no option can set, or ""."""
    from gesso.config import RewardEntry

    taken = [
        n
        for n in required_parameters(signature)
        if n in RewardEntry.model_fields and n not in options
    ]
    if not taken:
        return ""
    return f'; "{taken[0]}" is a key of [[reward]] itself; rename the parameter'


def _constant(reference: str, name: str, default: str) -> Any:
    """A constant of the module of `reference`, such as REWARD_TYPE."""
    try:
        return imports.load(f"{reference.rpartition(':')[0]}:{name}", "reward")
    except UserError:
        return default


def _reward_input(sample: Sample) -> dict[str, Any]:
    label = label_of(sample.prompt)
    number = isinstance(label, int | float) and not isinstance(label, bool)
    ground_truth = as_text(label) if number else label
    inputs = {"response": sample.response, "ground_truth": ground_truth}
    return inputs if sample.tokens is None else inputs | {"response_length": sample.tokens}


def _overall(result: Any) -> Score:
    if not isinstance(result, Mapping):
        return Score.failed(f'returned {short_repr(result)}; expected a dict with "overall"')
    if result.get("overall") is None:
        keys = ", ".join(clean_text(key, 80) for key in result) or "none"
        return Score.failed(f'returned a dict without "overall"; its keys: {keys}')
    details = {k: scalar_of(v) for k, v in result.items() if k != "overall" and v is not None}
    return Score(scalar_of(result["overall"]), details)

"""Which framework a reward function was written for: `style`.

gesso     f(samples, **options)
easyr1    f(reward_inputs, **options), or f(reward_input, **options)     EasyR1 0.3.3
openrlhf  f(queries, prompts, labels, **options)                         OpenRLHF 0.11
trl       f(prompts=, completions=, completion_ids=, **columns)          TRL 1.10, in trl.py

The last three score text. Signatures are checked when a function is loaded.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from gesso import imports
from gesso.config import RewardEntry
from gesso.rewards.functions import (
    Function,
    FunctionReward,
    Options,
    alone,
    names_of,
    of_texts,
    required_of,
    shown_parameters,
    signature_of,
    single,
)
from gesso.rewards.text import answers
from gesso.rewards.transport.untrusted import clean, listed, shown
from gesso.rewards.trl import TRL
from gesso.types import Prompt, Sample, Score, UserError


class EasyR1(FunctionReward):
    """A list of dicts in, a dict each out: "overall" is the value, the others are details. One dict
    at a time where the function's module says REWARD_TYPE = "sequential"; or where it does not say,
    as before EasyR1 0.3.3, and the parameter is called `reward_input`."""

    call = "(reward_inputs, **options)"
    text_only = True

    def __init__(self, function: Function, options: Options, reference: str = "") -> None:
        super().__init__(function, options)
        signature = signature_of(function)
        first = names_of(signature)[0][:1] if signature else []
        default = "sequential" if first == ["reward_input"] else "batch"
        kind = _constant(reference, "REWARD_TYPE", default)
        if kind not in ("batch", "sequential"):
            raise UserError(
                f'reward "{reference}": its module says REWARD_TYPE = {shown(kind)}; expected '
                '"batch" or "sequential"'
            )
        self.sequential = kind == "sequential"

    def unfit(self, prompt: Prompt) -> str | None:
        return None if answers.label(prompt) is not None else answers.no_label(prompt)

    def score(self, samples: Sequence[Sample]) -> Sequence[Score]:
        return of_texts(self, self._each if self.sequential else self._together, samples)

    def _together(self, samples: Sequence[Sample]) -> list[Score]:
        inputs = [_reward_input(sample) for sample in samples]
        found = listed(self.function(inputs, **self.options), len(samples))
        return [_overall(answer) for answer in found]

    def _each(self, samples: Sequence[Sample]) -> list[Score]:
        def one(sample: Sample) -> Score:
            return _overall(self.function(_reward_input(sample), **self.options))

        return [alone(one, sample) for sample in samples]

    @staticmethod
    def recognises(names: Sequence[str], takes_any: bool) -> bool:
        return bool(names) and names[0] in ("reward_inputs", "reward_input")


class OpenRLHF(FunctionReward):
    """Called for one query at a time, as OpenRLHF does: prompt and response in one text. Returns a
    dict with "rewards", and as details "scores" and what is in "extra_logs"; or the reward alone.
    Numbers may be tensors of one element."""

    call = "(queries, prompts, labels, **options)"
    text_only = True

    def score(self, samples: Sequence[Sample]) -> Sequence[Score]:
        each = functools.partial(alone, self._one)
        return of_texts(self, lambda fit: [each(sample) for sample in fit], samples)

    def _one(self, sample: Sample) -> Score:
        prompt, label = sample.prompt.text, answers.label(sample.prompt)
        query = prompt + sample.reply
        answer = self.function([query], [prompt], ["" if label is None else label], **self.options)
        if not isinstance(answer, Mapping):
            answer = {"rewards": answer}
        value = single(answer.get("rewards"))
        if value is None:
            return Score.failed(f'returned no "rewards", but {shown(answer)}')
        details = dict(answer.get("extra_logs") or {})
        if answer.get("scores") is not None:
            details["scores"] = answer["scores"]
        return Score(value, {name: single(detail) for name, detail in details.items()})

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


def adapted(function: Function, reference: str, options: Options, style: str) -> FunctionReward:
    """The function as a reward; raises where its signature is not that of the style."""
    kind = STYLES[style]
    if _is_async(function) and kind is not TRL:
        raise UserError(
            f'reward "{reference}" is async; style = "{style}" calls a plain function, and only '
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
        fault = f": {error}{_own_key(signature, options)}"
    others = [n for n, other in STYLES.items() if other.recognises(*names_of(signature))]
    likely = others[0] if others else style
    if not fault and likely in (style, "gesso"):  # `samples` may be anybody's name
        return
    hint = f'; did you mean style = "{likely}"?' if likely != style else ""
    takes = shown_parameters(signature)
    raise UserError(
        f'reward "{reference}" takes {takes}; style = "{style}" calls it with {kind.call}'
        f"{fault}{hint}"
    )


def _own_key(signature: inspect.Signature, options: Options) -> str:
    """What to say of a parameter that an option cannot reach."""
    taken = [
        n for n in required_of(signature) if n in RewardEntry.model_fields and n not in options
    ]
    if not taken:
        return ""
    return f'; "{taken[0]}" is a key of [[reward]] itself, so give that parameter another name'


def _constant(reference: str, name: str, default: str) -> Any:
    """What the module of a reference says, for instance REWARD_TYPE."""
    try:
        return imports.load(f"{reference.rpartition(':')[0]}:{name}", "reward")
    except UserError:
        return default


def _reward_input(sample: Sample) -> dict[str, Any]:
    label = answers.label(sample.prompt)
    number = isinstance(label, int | float) and not isinstance(label, bool)
    found = {"response": sample.reply, "ground_truth": answers.as_text(label) if number else label}
    return found if sample.tokens is None else found | {"response_length": sample.tokens}


def _overall(answer: Any) -> Score:
    if not isinstance(answer, Mapping):
        return Score.failed(f'returned {shown(answer)}; expected a dict with "overall"')
    if answer.get("overall") is None:
        keys = ", ".join(clean(key, 80) for key in answer) or "nothing"
        return Score.failed(f'returned a dict without "overall", only with {keys}')
    details = {k: single(v) for k, v in answer.items() if k != "overall" and v is not None}
    return Score(single(answer["overall"]), details)

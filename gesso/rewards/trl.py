"""Reward functions of TRL's GRPOTrainer, as of TRL 1.10."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from gesso.rewards.functions import (
    Function,
    FunctionReward,
    Options,
    parameter_names,
    required_parameters,
    scalar_of,
    score_texts,
    signature_of,
)
from gesso.rewards.labels import describe_columns
from gesso.rewards.untrusted import clean_text, score_list
from gesso.types import Prompt, Sample, Score, UserError

if TYPE_CHECKING:
    import asyncio

    from PIL.Image import Image


class TRL(FunctionReward):
    """Called with keyword arguments only, each a list: prompts and completions (messages if the
    prompt has messages, else texts), the row's columns, its images as Pillow images. Returns a list
    of numbers and None; may be async. Values passed to `log_metric` become details, values passed
    to `log_extra` become the text of the score.

    `completion_ids` have only a length: the ids are not sent to rewards. There is no
    `trainer_state`: scores are cached, so they must not depend on the step.
    """

    call = "(prompts=, completions=, completion_ids=, **columns, **options)"
    text_only = True

    provided = ("prompts", "completions", "completion_ids", "log_extra", "log_metric")
    unavailable = ("trainer_state", "environments")
    image_columns = ("image", "images")

    def __init__(self, function: Function, options: Options, reference: str = "") -> None:
        super().__init__(function, options)
        signature = signature_of(function)
        self.names, self.takes_any = parameter_names(signature) if signature else ([], True)
        self.columns = [
            name
            for name in (required_parameters(signature) if signature else [])
            if name not in (*self.provided, *options)
        ]
        self._loop: asyncio.AbstractEventLoop | None = None

    def unfit(self, prompt: Prompt) -> str | None:
        available = {*prompt.columns, *(self.image_columns if prompt.images else ())}
        missing = [name for name in self.columns if name not in available]
        if not missing:
            return None
        return f'the function requires the column "{missing[0]}", got {describe_columns(prompt)}'

    def score(self, samples: Sequence[Sample]) -> Sequence[Score]:
        return score_texts(self, self._score_batch, samples)

    def _score_batch(self, samples: Sequence[Sample]) -> list[Score]:
        log = _CallLog()
        result = self.function(**self._arguments(samples, log))
        if inspect.isawaitable(result):
            result = self._run(result)
        values = score_list(result, len(samples))
        return [Score(value, log.details, log.text(i)) for i, value in enumerate(values)]

    def _arguments(self, samples: Sequence[Sample], log: _CallLog) -> dict[str, Any]:
        prompts = [sample.prompt for sample in samples]
        opened = {image: image.open() for prompt in prompts for image in prompt.images}
        images = [[opened[image] for image in prompt.images] for prompt in prompts]
        names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
        arguments: dict[str, Any] = {
            name: [prompt.columns.get(name) for prompt in prompts] for name in names
        }
        if any(images):
            arguments["images"] = images
            arguments["image"] = [row[0] if row else None for row in images]
        arguments |= {
            "prompts": [_prompt(p, row) for p, row in zip(prompts, images, strict=True)],
            "completions": [_completion(sample) for sample in samples],
            "completion_ids": [_UnknownIds(sample.tokens) for sample in samples],
            "log_extra": log.log_extra,
            "log_metric": log.log_metric,
            **self.options,
        }
        if self.takes_any:
            return arguments
        return {name: value for name, value in arguments.items() if name in self.names}

    def _run(self, result: Any) -> Any:
        """All calls share one event loop: clients that the function keeps are bound to it."""
        if self._loop is None:
            import asyncio

            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(result)

    @staticmethod
    def bind(signature: inspect.Signature, options: Options) -> None:
        names, takes_any = parameter_names(signature)
        if not takes_any and not {"prompts", "completions", "completion_ids"} & set(names):
            raise TypeError("none of its parameters is prompts, completions or completion_ids")
        for name in required_parameters(signature):
            if name in TRL.unavailable:
                raise TypeError(f"Gesso does not provide '{name}'; make the parameter optional")
        for name in options:
            if name in (*TRL.provided, *TRL.unavailable):
                raise TypeError(f"'{name}' cannot be an option")
        provided = [name for name in TRL.provided if takes_any or name in names]
        signature.bind(**dict.fromkeys([*provided, *required_parameters(signature), *options]))

    @staticmethod
    def recognises(names: Sequence[str], takes_any: bool) -> bool:
        if takes_any and {"completions", "completion_ids"} & set(names):
            return True
        return {"prompts", "completions"} <= set(names)


class _UnknownIds(Sequence[int]):
    """Token ids of a completion: only their number is known."""

    def __init__(self, tokens: int | None) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        if self.tokens is None:
            raise UserError("the number of tokens of this sample is unknown")
        return self.tokens

    def __getitem__(self, index: Any) -> Any:
        raise UserError(
            'style = "trl": only the number of completion_ids is available, not the ids; '
            "use completions"
        )

    def __iter__(self) -> Any:
        return self[0]


class _CallLog:
    """Collects the values that a function logs during one call."""

    def __init__(self) -> None:
        self.metrics: dict[str, list[float]] = {}
        self.extra: dict[str, list[Any]] = {}

    def log_metric(self, name: str, value: float) -> None:
        self.metrics.setdefault(name, []).append(scalar_of(value))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        self.extra.setdefault(column, []).extend(values)

    @property
    def details(self) -> dict[str, float]:
        """The same for all samples of the call, so that their mean is the batch mean."""
        return {name: fmean(values) for name, values in self.metrics.items()}

    def text(self, index: int) -> str:
        columns = {name: values for name, values in self.extra.items() if len(values) > index}
        return "\n".join(f"{name}: {clean_text(values[index])}" for name, values in columns.items())


def _prompt(prompt: Prompt, images: Sequence[Image]) -> Any:
    """The prompt's text, or its messages: texts as strings, images filled in as in TRL."""
    if not prompt.messages:
        return prompt.text
    remaining = iter(images)
    return [
        dict(message) | {"content": _content(message, remaining)} for message in prompt.messages
    ]


def _content(message: Mapping[str, Any], images: Any) -> Any:
    parts = message["content"]
    if isinstance(parts, str):
        return parts
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return [
        {"type": "image", "image": next(images)} if part["type"] == "image" else dict(part)
        for part in parts
    ]


def _completion(sample: Sample) -> Any:
    if not sample.prompt.messages:
        return sample.response
    return [{"role": "assistant", "content": sample.response}]

"""Reward functions of TRL's GRPOTrainer, as of TRL 1.10."""

from __future__ import annotations

import asyncio
import inspect
import io
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from gesso.rewards.functions import (
    Function,
    FunctionReward,
    Options,
    names_of,
    of_texts,
    required_of,
    signature_of,
    single,
)
from gesso.rewards.transport.untrusted import clean, listed
from gesso.types import PICTURE_FORMATS, Prompt, Sample, Score, UserError

if TYPE_CHECKING:
    from PIL.Image import Image


class TRL(FunctionReward):
    """Keyword arguments only, each a list: prompts and completions (messages where the prompt has
    messages, else texts), the row's columns, its images as Pillow's. Returns a list of numbers and
    None; may be async. What it gives to `log_metric` are details, to `log_extra` texts to look at.

    Only the number of `completion_ids` can be asked for: rewards are not sent the ids. There is no
    `trainer_state`: scores are cached, so they must not depend on the step.
    """

    call = "(prompts=, completions=, completion_ids=, **columns, **options)"
    text_only = True

    given = ("prompts", "completions", "completion_ids", "log_extra", "log_metric")
    absent = ("trainer_state", "environments")
    pictures = ("image", "images")

    def __init__(self, function: Function, options: Options, reference: str = "") -> None:
        super().__init__(function, options)
        signature = signature_of(function)
        self.names, self.takes_any = names_of(signature) if signature else ([], True)
        self.columns = [
            name
            for name in (required_of(signature) if signature else [])
            if name not in (*self.given, *options)
        ]
        self._loop: asyncio.AbstractEventLoop | None = None

    def unfit(self, prompt: Prompt) -> str | None:
        there = {*prompt.columns, *(self.pictures if prompt.images else ())}
        missing = [name for name in self.columns if name not in there]
        if not missing:
            return None
        others = f" among {', '.join(prompt.columns)}" if prompt.columns else ""
        return f'the function takes the column "{missing[0]}", found no such column{others}'

    def score(self, samples: Sequence[Sample]) -> Sequence[Score]:
        return of_texts(self, self._together, samples)

    def _together(self, samples: Sequence[Sample]) -> list[Score]:
        log = _Log()
        answer = self.function(**self._arguments(samples, log))
        if inspect.isawaitable(answer):
            answer = self._awaited(answer)
        found = listed(answer, len(samples))
        return [Score(value, log.details, log.text(i)) for i, value in enumerate(found)]

    def _arguments(self, samples: Sequence[Sample], log: _Log) -> dict[str, Any]:
        prompts = [sample.prompt for sample in samples]
        images = [[_opened(picture.read()) for picture in prompt.images] for prompt in prompts]
        names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
        arguments: dict[str, Any] = {
            name: [prompt.columns.get(name) for prompt in prompts] for name in names
        }
        if any(images):
            arguments["images"] = images
            arguments["image"] = [some[0] if some else None for some in images]
        arguments |= {
            "prompts": [_asked(p, some) for p, some in zip(prompts, images, strict=True)],
            "completions": [_completed(sample) for sample in samples],
            "completion_ids": [_Ids(sample.tokens) for sample in samples],
            "log_extra": log.log_extra,
            "log_metric": log.log_metric,
            **self.options,
        }
        if self.takes_any:
            return arguments
        return {name: value for name, value in arguments.items() if name in self.names}

    def _awaited(self, answer: Any) -> Any:
        """All calls use one event loop: a client that the function keeps belongs to it."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(answer)

    @staticmethod
    def bind(signature: inspect.Signature, options: Options) -> None:
        names, takes_any = names_of(signature)
        if not takes_any and not {"prompts", "completions", "completion_ids"} & set(names):
            raise TypeError("it takes none of prompts, completions and completion_ids")
        for name in required_of(signature):
            if name in TRL.absent:
                raise TypeError(f"Gesso has no '{name}' to give; make the parameter optional")
        for name in options:
            if name in (*TRL.given, *TRL.absent):
                raise TypeError(f"'{name}' cannot be an option")
        given = [name for name in TRL.given if takes_any or name in names]
        signature.bind(**dict.fromkeys([*given, *required_of(signature), *options]))

    @staticmethod
    def recognises(names: Sequence[str], takes_any: bool) -> bool:
        if takes_any and {"completions", "completion_ids"} & set(names):
            return True
        return {"prompts", "completions"} <= set(names)


class _Ids(Sequence[int]):
    """As many token ids as a completion has, without the ids."""

    def __init__(self, tokens: int | None) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        if self.tokens is None:
            raise UserError("this sample came without its number of tokens")
        return self.tokens

    def __getitem__(self, index: Any) -> Any:
        raise UserError(
            'style = "trl": rewards know the number of completion_ids, not the ids; use completions'
        )

    def __iter__(self) -> Any:
        return self[0]


class _Log:
    """What a function logs during one call."""

    def __init__(self) -> None:
        self.metrics: dict[str, list[float]] = {}
        self.extra: dict[str, list[Any]] = {}

    def log_metric(self, name: str, value: float) -> None:
        self.metrics.setdefault(name, []).append(single(value))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        self.extra.setdefault(column, []).extend(values)

    @property
    def details(self) -> dict[str, float]:
        """The same for all samples of the call, so that their mean is that of the batch."""
        return {name: fmean(values) for name, values in self.metrics.items()}

    def text(self, index: int) -> str:
        columns = {name: values for name, values in self.extra.items() if len(values) > index}
        return "\n".join(f"{name}: {clean(values[index])}" for name, values in columns.items())


def _asked(prompt: Prompt, images: Sequence[Image]) -> Any:
    """The prompt's text, or its messages: texts as strings, images filled in as TRL does."""
    if not prompt.messages:
        return prompt.text
    rest = iter(images)
    return [dict(message) | {"content": _content(message, rest)} for message in prompt.messages]


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


def _completed(sample: Sample) -> Any:
    if not sample.prompt.messages:
        return sample.reply
    return [{"role": "assistant", "content": sample.reply}]


def _opened(data: bytes) -> Image:
    """Decoded when somebody looks at it."""
    from PIL import Image

    return Image.open(io.BytesIO(data), formats=PICTURE_FORMATS)

"""Shared by all samplers of language models, whichever engine generates the responses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gesso.formulas import diversity
from gesso.models.tokens.base import TokenModel
from gesso.rollout import Rollout
from gesso.samplers.base import Piece
from gesso.samplers.partial import Begun, PartialResponse
from gesso.traces.tokens import TokenPrompt, TokenTrace
from gesso.types import Prompt, Sample


@dataclass(frozen=True)
class Response:
    index: int  # of the sample in the request's range
    tokens: Tensor  # (s,)
    logp: Tensor  # (s,)
    cut: bool  # does not end with an id of `end`
    done: bool = True
    versions: Tensor | None = None  # (s,) on the CPU, if it may be continued


@dataclass(frozen=True)
class ResponseRequest:
    """A response to prompts[row[i]] from seeds[i] for every i of a range."""

    prompts: Sequence[Prompt]
    encoded: Sequence[TokenPrompt]
    row: Sequence[int]
    seeds: Sequence[int]
    index: range
    begun: Begun | None = None

    @property
    def rows_and_seeds(self) -> tuple[list[int], list[int]]:
        return [self.row[i] for i in self.index], [self.seeds[i] for i in self.index]

    @property
    def begun_here(self) -> Begun | None:
        """Those of the range."""
        if self.begun is None:
            return None
        return Begun([self.begun.responses[i] for i in self.index], self.begun.limit)

    def piece(self, responses: Sequence[Response], model: TokenModel) -> Piece[TokenTrace]:
        index = [self.index[response.index] for response in responses]
        lengths = torch.tensor([len(response.tokens) for response in responses])
        tokens = pad_sequence([response.tokens for response in responses], batch_first=True).cpu()
        trace = TokenTrace(
            self.encoded,
            row=torch.tensor([self.row[i] for i in index]),
            tokens=tokens,
            mask=torch.arange(tokens.shape[1]) < lengths[:, None],
            cut=torch.tensor([response.cut for response in responses]),
            versions=None if self.begun is None else _padded([r.versions for r in responses]),
        )
        ids = tokens.tolist()
        texts = [model.decode(row[: len(r.tokens)]) for row, r in zip(ids, responses, strict=True)]
        samples = [
            Sample(self.prompts[self.row[i]], None, self.seeds[i], text, len(r.tokens))
            for i, r, text in zip(index, responses, texts, strict=True)
        ]
        logp = pad_sequence([response.logp for response in responses], batch_first=True)
        partial = [] if self.begun is None else [_partial(r) for r in responses]
        return Piece(index, samples, trace, logp.cpu(), partial)


def _padded(versions: Sequence[Tensor | None]) -> Tensor:
    return pad_sequence([each for each in versions if each is not None], batch_first=True)


def _partial(response: Response) -> PartialResponse:
    assert response.versions is not None
    tokens, logp, versions = response.tokens, response.logp, response.versions
    return PartialResponse(tokens.cpu(), logp.cpu(), versions, response.done)


class EncodedPrompts(Sequence[TokenPrompt]):
    """The prompts of a call, encoded when they are first read: each of several workers reads only
    those that it samples, and receives the others with their samples."""

    def __init__(self, model: TokenModel, prompts: Sequence[Prompt]) -> None:
        self._model = model
        self._prompts = prompts
        self._encoded: dict[int, TokenPrompt] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def __iter__(self) -> Iterator[TokenPrompt]:
        self.encode(range(len(self)))
        return (self._encoded[row] for row in range(len(self)))

    def __getitem__(self, row: Any) -> Any:
        assert isinstance(row, int), "no slices"
        self.encode([row])
        return self._encoded[row]

    def encode(self, rows: Iterable[int]) -> None:
        """Together, so that they can share threads."""
        new = [row for row in dict.fromkeys(rows) if row not in self._encoded]
        prompts = [self._prompts[row] for row in new]
        self._encoded |= zip(new, _encoded(self._model, prompts), strict=True)

    def add(self, row: int, prompt: TokenPrompt) -> None:
        """One that another process has encoded."""
        self._encoded.setdefault(row, prompt)


def _encoded(model: TokenModel, prompts: Sequence[Prompt]) -> list[TokenPrompt]:
    """Uses threads if there are images: each takes milliseconds, mostly outside of Python. As many
    as torch uses: several workers share the cores."""
    threads = torch.get_num_threads()
    if threads == 1 or not any(prompt.images for prompt in prompts):
        return [model.encode(prompt) for prompt in prompts]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(model.encode, prompts))


def piece_size(batch: int) -> int:
    """Minimum number of responses in a piece, except the last piece of a call."""
    return max(1, batch // 8)


def describe(rollout: Rollout) -> dict[str, float]:
    lengths = rollout.mask.sum(1).float()
    return {
        "diversity": diversity.distinct([s.response for s in rollout.samples], rollout.group),
        "response/length": float(lengths.mean()),
        "response/max_length": float(lengths.max()),
        "response/truncated": float(rollout.token_trace.cut.float().mean()),
        "response/logp": float(rollout.logp.sum() / lengths.sum()),
    }

"""Samples of the data instead of generated ones: for SFT and offline DPO.

Prompts of training rows have given samples; the first one has score 1, the others 0. Prompts
without any, of evaluations, go to the built-in sampler.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from gesso.models.flow.base import ImageEncoder
from gesso.models.tokens.base import ResponseEncoder
from gesso.rollout import Rollout
from gesso.samplers.base import Piece, Sampler, parts
from gesso.samplers.denoise import DenoisingSampler
from gesso.samplers.recording import Recorded
from gesso.samplers.responses import Response, ResponseRequest
from gesso.traces.flow import FlowContext, FlowTrace
from gesso.traces.tokens import TokenPrompt, TokenTrace
from gesso.types import Prompt, Sample, SampleSpec, UserError, Which
from gesso.weights.publish import Publication


@dataclass(frozen=True)
class GivenCall:
    """Sample place[i] of those that prompts[row[i]] gives, for every i."""

    prompts: Sequence[Prompt]
    row: Sequence[int]
    seeds: Sequence[int]
    place: Sequence[int]

    def prompt(self, i: int) -> Prompt:
        return self.prompts[self.row[i]]

    def sample(self, i: int) -> Any:
        """An image, a clip or a text, as the model requires."""
        return self.prompt(i).given[self.place[i]]

    def score(self, i: int) -> float:
        return float(self.place[i] == 0)


class GivenSampler(ABC):
    def __init__(self, inner: Sampler, batch: int) -> None:
        self.inner = inner  # generates the samples of evaluations
        self.model, self.weights = inner.model, inner.weights
        self.batch = batch

    @abstractmethod
    def piece(self, call: GivenCall, index: range, shared: Any, spec: Any) -> Piece: ...

    def sample(
        self,
        prompts: Sequence[Prompt],
        row: Sequence[int],
        seeds: Sequence[int],
        spec: Any,
        shared: Any = None,
        only: range | None = None,
    ) -> Iterator[Piece]:
        if not all(prompt.given for prompt in prompts):
            yield from self.inner.sample(prompts, row, seeds, spec, shared, only)
            return
        shared = shared or self.shared(prompts, spec)
        call = GivenCall(prompts, row, seeds, _places(row))
        for index in [only] if only else parts(row, self.batch, spec, prompts):
            yield self.piece(call, index, shared, spec)

    def describe(self, rollout: Rollout) -> dict[str, float]:
        """Nothing: these samples do not change with the model."""
        return {}

    def accept(self, publication: Publication) -> None:
        self.inner.accept(publication)

    def prepare(self, which: Which) -> None:
        self.inner.prepare(which)

    def rest(self) -> None:
        self.inner.rest()

    def shared(self, prompts: Sequence[Prompt], spec: Any) -> Any:
        return self.inner.shared(prompts, spec)

    def close(self) -> None:
        self.inner.close()


class GivenImages(GivenSampler):
    """Images or clips, encoded to clean latents; there is no trajectory."""

    inner: DenoisingSampler

    def piece(
        self, call: GivenCall, index: range, shared: FlowContext, spec: SampleSpec
    ) -> Piece[FlowTrace]:
        model: ImageEncoder = self.model
        sized = self.inner.sized(spec, call.prompt(index[0]))
        with ThreadPoolExecutor() as threads:
            opened = threads.map(lambda i: _pixels(call, i, sized), index)
            images = np.stack(list(opened))
        clean = model.encode_images(torch.from_numpy(images))
        rows = torch.tensor([call.row[i] for i in index], device=clean.device)
        recorded = Recorded()
        trace = recorded.trace(shared, rows, range(0), clean)
        fps = spec.fps if images.ndim == 5 else None  # (n, frames, height, width, 3)
        samples = [
            Sample(call.prompt(i), image, call.seeds[i], given=call.score(i), fps=fps)
            for i, image in zip(index, images, strict=True)
        ]
        return Piece(list(index), samples, trace, recorded.logp(clean))


class GivenResponses(GivenSampler):
    """Responses as tokens, up to the one that ends them. Their log-probs are not known: 0."""

    def piece(
        self, call: GivenCall, index: range, shared: Sequence[TokenPrompt], spec: Any
    ) -> Piece[TokenTrace]:
        model: ResponseEncoder = self.model
        responses = []
        for k, i in enumerate(index):
            tokens = model.encode_response(call.prompt(i), call.sample(i))
            logp = torch.zeros(len(tokens))
            responses.append(Response(k, tokens, logp, cut=False))
        request = ResponseRequest(call.prompts, shared, call.row, call.seeds, index)
        piece = request.piece(responses, self.model)
        scored = [
            replace(s, given=call.score(i)) for s, i in zip(piece.samples, index, strict=True)
        ]
        return replace(piece, samples=scored)


def _pixels(call: GivenCall, i: int, spec: SampleSpec) -> np.ndarray:
    try:
        return call.sample(i).fitted(spec.height, spec.width)
    except UserError as error:  # deleted since the data was read
        raise UserError(f"{call.prompt(i).where}: {error}") from error


def _places(row: Sequence[int]) -> list[int]:
    """For each sample, how many samples of its prompt come before it."""
    seen: Counter[int] = Counter()
    places = []
    for r in row:
        places.append(seen[r])
        seen[r] += 1
    return places

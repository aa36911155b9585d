"""Batches whose responses are sampled in rounds, one per update (`partial = true`).

In each round every unfinished response of every batch gets up to max_tokens / lag more tokens. A
batch starts `lag` updates before it is trained on, so that its responses are finished by then. What
a round contains depends only on the step, not on time. Checkpoints contain the unfinished
responses, which a resumed run continues.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gesso import clock
from gesso.cluster.collecting import Request
from gesso.samplers.base import Piece
from gesso.samplers.partial import Begun, PartialResponse, responses_of, tensors_of
from gesso.track.atomic import flush
from gesso.track.checkpoints import digests
from gesso.track.progress import Progress
from gesso.types import Prompt, ResponseSpec, StopRun, UserError

FILE = "in_flight.tensors"
"""The file of unfinished responses in a checkpoint."""


@dataclass
class PartialBatch:
    batch: Any  # the driver's DriverBatch
    request: Request
    drawn: Mapping[str, float]  # metrics about the choice of its prompts
    responses: list[PartialResponse]
    started: float = 0.0  # time at which its last round started

    @property
    def done(self) -> bool:
        return all(response.done for response in self.responses)

    @property
    def whole(self) -> Request:
        """A request that returns the finished responses without sampling."""
        return replace(self.request, begun=Begun(self.responses, 0))

    def metrics(self) -> dict[str, float]:
        """The metric `age`, which the loop computes, is the age of the oldest token."""
        versions = torch.cat([response.versions for response in self.responses])
        continued = [len(response.versions.unique()) > 1 for response in self.responses]
        return {
            "age/mean": self.batch.step - float(versions.double().mean()),
            "age/continued": sum(continued) / len(continued),
        }


@dataclass(frozen=True)
class Round:
    request: Request
    places: Sequence[tuple[PartialBatch, int]]  # per sample: its batch, and its position there

    def put(self, piece: Piece) -> None:
        for i, response in zip(piece.index, piece.responses, strict=True):
            partial, at = self.places[i]
            partial.responses[at] = response


class PartialBatches:
    def __init__(
        self, rounds: int, generate: Callable[[Request], Iterator[Piece]], progress: Progress
    ) -> None:
        self.rounds = rounds  # per batch
        self.generate = generate
        self.progress = progress
        self.clear()

    def clear(self) -> None:
        self.by_step: dict[int, PartialBatch] = {}
        self._restored: dict[int, list[PartialResponse]] = {}

    def __contains__(self, step: int) -> bool:
        """Whether the restored checkpoint contains this batch."""
        return step in self._restored

    def begin(self, batch: Any, request: Request, drawn: Mapping[str, float]) -> None:
        new = [PartialResponse.new() for _ in request.row]
        restored = self._restored.pop(batch.step, new)
        self.by_step[batch.step] = PartialBatch(batch, request, drawn, restored)

    def finish(self, step: int) -> None:
        """Samples until the batch is finished; the first batches of a run need extra rounds."""
        partial = self.by_step[step]
        while partial.batch.pending is None and partial.batch.error is None:
            if partial.done:
                partial.batch.sample()
            else:
                self.sample_round()

    def sample_round(self, only: int | None = None) -> None:
        """Samples the next tokens of all unfinished responses, or of those of one batch, and sends
        batches that are then finished to the rewards."""
        following = self._round([*self.by_step] if only is None else [only])
        if following is None:
            return
        started, request = clock.seconds(), following.request
        self.progress.phase(f"sampling {request.label}", len(request.row))
        unfinished = {id(partial): partial for partial, _ in following.places}.values()
        try:
            for piece in self.generate(request):
                following.put(piece)
                self.progress.advance(len(piece.index))
        except (UserError, StopRun) as error:  # raised by `DriverBatch.result`
            for partial in unfinished:
                partial.batch.error = error
            return
        for partial in unfinished:
            partial.started = started
            if partial.done:
                partial.batch.sample()

    def _round(self, steps: Sequence[int]) -> Round | None:
        """All unfinished responses of these batches, oldest batch first."""
        prompts: list[Prompt] = []
        row: list[int] = []
        places: list[tuple[PartialBatch, int]] = []
        unfinished = [self.by_step[step] for step in steps if not self.by_step[step].done]
        for partial in unfinished:
            request = partial.request
            number: dict[int, int] = {}  # its row → prompt of the round
            for i, response in enumerate(partial.responses):
                if response.done:
                    continue
                if request.row[i] not in number:
                    number[request.row[i]] = len(prompts)
                    prompts.append(request.prompts[request.row[i]])
                row.append(number[request.row[i]])
                places.append((partial, i))
        if not unfinished:
            return None
        spec = unfinished[0].request.spec
        assert isinstance(spec, ResponseSpec)
        begun = [partial.responses[i] for partial, i in places]
        seeds = [partial.request.seeds[i] for partial, i in places]
        limit = math.ceil(spec.max_tokens / self.rounds)
        label = f"the next {limit} tokens of batches {unfinished[0].batch.step + 1} and later"
        step = unfinished[0].batch.step
        return Round(
            Request(prompts, row, seeds, spec, label, step, begun=Begun(begun, limit)), places
        )

    def save(self, folder: Path) -> None:
        """With a digest, like every file of a checkpoint."""
        from safetensors.torch import save_file

        tensors = {
            f"{step}/{name}": tensor
            for step, partial in self.by_step.items()
            for name, tensor in tensors_of(partial.responses).items()
        }
        if tensors:
            save_file(tensors, folder / FILE, digests(tensors))
            flush(folder / FILE)

    def load(self, folder: Path) -> None:
        from safetensors import safe_open

        self.clear()
        file = folder / FILE
        if not file.exists():
            return
        try:
            with safe_open(file, "pt") as opened:
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
                damaged = digests(tensors) != opened.metadata()
        except Exception:  # safetensors has a separate error type
            damaged = True
        if damaged:
            raise UserError(
                f"{file} is damaged; restore it from a backup, or delete it: its batches are then "
                "sampled again, with newer weights"
            )
        for step in {name.partition("/")[0] for name in tensors}:
            own = {name.partition("/")[2]: t for name, t in tensors.items() if _of(name, step)}
            self._restored[int(step)] = responses_of(own)


def _of(name: str, step: str) -> bool:
    return name.startswith(f"{step}/")

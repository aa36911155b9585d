"""Batches whose responses are sampled in rounds, one per update (`partial`).

In each round every unfinished response in flight gets up to max_tokens / lag more tokens. A batch
is begun `lag` updates before it is trained on, so its responses are done by then, and a round
ends after that number of tokens, however long a response is. What the rounds contain depends on the
steps alone, not on time. Checkpoints have the responses so far: a resumed run continues them.
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
"""In a checkpoint."""


@dataclass
class Flight:
    batch: Any  # of the driver
    request: Request
    drawn: Mapping[str, float]  # metrics of how its prompts were drawn
    responses: list[PartialResponse]
    started: float = 0.0  # of its last round

    @property
    def done(self) -> bool:
        return all(response.done for response in self.responses)

    @property
    def whole(self) -> Request:
        """Returns the finished responses."""
        return replace(self.request, begun=Begun(self.responses, 0))

    def metrics(self) -> dict[str, float]:
        """`age` is that of the oldest token."""
        versions = torch.cat([response.versions for response in self.responses])
        swapped = [len(response.versions.unique()) > 1 for response in self.responses]
        return {
            "age/mean": self.batch.step - float(versions.double().mean()),
            "age/continued": sum(swapped) / len(swapped),
        }


@dataclass(frozen=True)
class Round:
    request: Request
    places: Sequence[tuple[Flight, int]]  # of each of its samples

    def put(self, piece: Piece) -> None:
        for i, response in zip(piece.index, piece.responses, strict=True):
            flight, at = self.places[i]
            flight.responses[at] = response


class Flights:
    def __init__(
        self, rounds: int, generate: Callable[[Request], Iterator[Piece]], progress: Progress
    ) -> None:
        self.rounds = rounds  # of a batch
        self.generate = generate
        self.progress = progress
        self.clear()

    def clear(self) -> None:
        self.by_step: dict[int, Flight] = {}
        self._restored: dict[int, list[PartialResponse]] = {}

    def __contains__(self, step: int) -> bool:
        """Whether a checkpoint has this batch."""
        return step in self._restored

    def begin(self, batch: Any, request: Request, drawn: Mapping[str, float]) -> None:
        new = [PartialResponse.new() for _ in request.row]
        restored = self._restored.pop(batch.step, new)
        self.by_step[batch.step] = Flight(batch, request, drawn, restored)

    def finish(self, step: int) -> None:
        """Until the batch is sampled: the first ones of a run need further rounds."""
        flight = self.by_step[step]
        while flight.batch.pending is None and flight.batch.error is None:
            if flight.done:
                flight.batch.sample()
            else:
                self.sample_round()

    def sample_round(self, only: int | None = None) -> None:
        """The next tokens of all unfinished responses, or of those of one batch. Batches that are
        then done are passed on to the rewards."""
        following = self._round([*self.by_step] if only is None else [only])
        if following is None:
            return
        started, request = clock.seconds(), following.request
        self.progress.phase(f"sampling {request.label}", len(request.row))
        flights = {id(flight): flight for flight, _ in following.places}.values()
        try:
            for piece in self.generate(request):
                following.put(piece)
                self.progress.advance(len(piece.index))
        except (UserError, StopRun) as error:  # for `result`
            for flight in flights:
                flight.batch.error = error
            return
        for flight in flights:
            flight.started = started
            if flight.done:
                flight.batch.sample()

    def _round(self, steps: Sequence[int]) -> Round | None:
        """Of all unfinished responses of these batches, those of the oldest batch first."""
        prompts: list[Prompt] = []
        row: list[int] = []
        places: list[tuple[Flight, int]] = []
        flights = [self.by_step[step] for step in steps if not self.by_step[step].done]
        for flight in flights:
            request = flight.request
            number: dict[int, int] = {}  # its row → prompt of the round
            for i, response in enumerate(flight.responses):
                if response.done:
                    continue
                if request.row[i] not in number:
                    number[request.row[i]] = len(prompts)
                    prompts.append(request.prompts[request.row[i]])
                row.append(number[request.row[i]])
                places.append((flight, i))
        if not flights:
            return None
        spec = flights[0].request.spec
        assert isinstance(spec, ResponseSpec)
        begun = [flight.responses[i] for flight, i in places]
        seeds = [flight.request.seeds[i] for flight, i in places]
        limit = math.ceil(spec.max_tokens / self.rounds)
        label = f"the next {limit} tokens of batches {flights[0].batch.step + 1} and later"
        step = flights[0].batch.step
        return Round(
            Request(prompts, row, seeds, spec, label, step, begun=Begun(begun, limit)), places
        )

    def save(self, folder: Path) -> None:
        """With a digest, as every file of a checkpoint."""
        from safetensors.torch import save_file

        tensors = {
            f"{step}/{name}": tensor
            for step, flight in self.by_step.items()
            for name, tensor in tensors_of(flight.responses).items()
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

"""The sampler protocol and its output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from gesso.rollout import Rollout
from gesso.traces.flow import FlowTrace
from gesso.traces.tokens import TokenTrace
from gesso.types import Prompt, ResponseSpec, Sample, SampleSpec, Which
from gesso.weights.publish import HeldWeights, Publication

Trace = TypeVar("Trace", FlowTrace, TokenTrace)


@dataclass(frozen=True)
class Piece(Generic[Trace]):
    """Finished samples. Pieces arrive while other samples are still being generated, and not always
    in order: `index` contains their positions in the call."""

    index: list[int]  # n
    samples: list[Sample]  # n
    trace: Trace
    logp: Tensor  # (n, S)
    responses: Sequence[Any] = ()  # n `PartialResponse`s, of a call that continues some


def parts(
    row: Sequence[int],
    batch: int,
    spec: SampleSpec | ResponseSpec,
    prompts: Sequence[Prompt] = (),
) -> list[range]:
    """How a call is cut into batches on a CPU, and into the work of several workers. The last bits
    of a sample depend on the others in its batch, so every cluster cuts in the same way. The
    responses to one prompt stay together if they fit, as they share its prefill. Images of
    different prompts are apart if their windows or the sizes of their input images differ."""
    sizes: list[tuple[tuple[int, int], ...]] = []
    if isinstance(spec, SampleSpec):
        sizes = [tuple(image.size for image in prompt.images) for prompt in prompts]
    mixed = len(set(sizes)) > 1
    found: list[range] = []
    start = 0
    while start < len(row):
        stop = min(start + batch, len(row))
        if isinstance(spec, ResponseSpec) and stop < len(row) and row[stop] != row[start]:
            while row[stop - 1] == row[stop]:
                stop -= 1
        if isinstance(spec, SampleSpec) and spec.starts:
            while row[stop - 1] != row[start]:
                stop -= 1
        if mixed:
            same = [sizes[r] == sizes[row[start]] for r in row[start:stop]]
            stop = start + [*same, False].index(False)
        found.append(range(start, stop))
        start = stop
    return found


class Sampler(Protocol):
    model: Any
    weights: HeldWeights

    def accept(self, publication: Publication) -> None:
        """Uses this version of the weights from now on."""

    def prepare(self, which: Which) -> None:
        """Called before the `sample` calls of a batch, on every rank: sharded weights are gathered
        here, not in `sample`, whose calls differ between ranks."""

    def rest(self) -> None:
        """Called before an update: frees memory that is needed only while sampling."""

    def shared(self, prompts: Sequence[Prompt], spec: Any) -> Any:
        """What the traces of all samples of a call share: the encoded prompts."""

    def sample(
        self,
        prompts: Sequence[Prompt],
        row: Sequence[int],
        seeds: Sequence[int],
        spec: Any,
        shared: Any = None,
        only: range | None = None,
    ) -> Iterator[Piece]:
        """One sample of prompts[row[i]] from seeds[i] for every i, under an algorithm's spec.
        `only`: for one of the `parts` of the call. `shared`: if it has been computed before."""

    def describe(self, rollout: Rollout) -> dict[str, float]:
        """Metrics of these samples, except their rewards."""

    def close(self) -> None:
        """Releases all resources except the model."""

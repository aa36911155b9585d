"""Transfer of new weights from the learner to the samplers.

After an update the learner publishes a version: every copy of the weights that a sampler may use
("current", DiffusionNFT's "old", an evaluation's "ema"), and a digest of all of them. A sampler
that shares the learner's module already has them, and no data is transferred. Any other sampler
copies them, and the digest of its copies is checked then and before every batch: a stale, missing
or damaged tensor stops the run instead of training on samples of unknown weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, cast

import torch
from torch import Tensor

from gesso.types import StopRun, Weights, Which
from gesso.weights.copies import same_memory

CHUNK = 2**22
"""Words that are hashed at once, in a temporary tensor."""


class Readable(Protocol):
    """Weights that can be published."""

    def tensors(self, which: Which = "current") -> Weights: ...


class Writable(Readable, Protocol):
    """Weights that a publication can be copied into."""

    @property
    def copies(self) -> Mapping[Which, Mapping[str, Tensor]]: ...

    def snapshot(self, which: Which) -> None: ...

    def load(self, weights: Weights, which: Which = "current") -> None: ...


@dataclass(frozen=True)
class Publication:
    """One version of the weights: the learner's tensors, not copies of them."""

    version: int
    copies: Mapping[Which, Weights]

    @cached_property
    def digest(self) -> str:
        """Computed on first use; not needed if no data is transferred."""
        return digest(self.copies)


def publish(policy: Readable, copies: Collection[Which], version: int) -> Publication:
    """Publishes the current values of the weights. The "reference" of a LoRA policy is the module
    with its adapters off and is never published."""
    return Publication(version, {which: policy.tensors(which) for which in sorted(copies)})


class HeldWeights:
    """The published weights that a sampler holds. Only this class changes them: the sampler has
    read-only access to its model's policy, by type."""

    def __init__(self, policy: Readable) -> None:
        self._policy = cast(Writable, policy)
        self._publication: Publication | None = None

    @property
    def version(self) -> int:
        """0 before the first publication."""
        return 0 if self._publication is None else self._publication.version

    def accept(self, publication: Publication) -> None:
        """Loads a version; copies values unless the module is shared with the learner."""
        try:
            for which, tensors in publication.copies.items():
                if which != "current" and which not in self._policy.copies:
                    self._policy.snapshot(which)
                self._policy.load(tensors, which)
        except ValueError as error:
            raise StopRun(
                f"the sampler cannot load version {publication.version} of the weights: {error}"
            ) from error
        self._publication = publication

    def verify(self, publication: Publication) -> None:
        """Raises StopRun unless exactly this version is held."""
        if self._publication is None or self.version != publication.version:
            raise StopRun(
                f"the sampler holds version {self.version} of the weights, expected version "
                f"{publication.version}; its samples would not come from the trained policy"
            )
        held = {which: self._policy.tensors(which) for which in publication.copies}
        if _shared(held, publication.copies):
            return
        if digest(held) != publication.digest:
            raise StopRun(
                f"the sampler's weights differ from version {publication.version} published by the "
                f"learner: got digest {digest(held)}, expected {publication.digest}"
            )


def _shared(held: Mapping[Which, Weights], published: Mapping[Which, Weights]) -> bool:
    """Whether these are the same tensors in memory."""
    return all(
        held[which].keys() == tensors.keys()
        and all(same_memory(held[which][name], t) for name, t in tensors.items())
        for which, tensors in published.items()
    )


class Digest:
    """Digest of the names, dtypes, shapes and bits of tensors, in order; the same on every device.
    It detects errors, not tampering."""

    def __init__(self) -> None:
        self._rows: list[list[str | list[int]]] = []
        self._sums: list[Tensor] = []

    def add(self, which: Which, name: str, tensor: Tensor) -> None:
        self._rows.append([which, name, str(tensor.dtype), list(tensor.shape)])
        self._sums.append(_checksum(tensor))

    def __str__(self) -> str:
        sums = torch.stack(self._sums).tolist() if self._sums else []
        rows = [[*row, value] for row, value in zip(self._rows, sums, strict=True)]
        return hashlib.blake2b(json.dumps(rows).encode(), digest_size=16).hexdigest()


def in_order(copies: Mapping[Which, Weights]) -> Iterator[tuple[Which, str, Tensor]]:
    """Tensors in the order in which they are hashed and sent."""
    for which, tensors in sorted(copies.items()):
        for name, tensor in sorted(tensors.items()):
            yield which, name, tensor


def digest(copies: Mapping[Which, Weights]) -> str:
    found = Digest()
    for which, name, tensor in in_order(copies):
        found.add(which, name, tensor)
    return str(found)


def _checksum(tensor: Tensor) -> Tensor:
    """Σ (2i + 1)·word_i modulo 2⁶⁴: integers, so that the order of summation does not matter. The
    factors are odd, so that a change of any single word changes the sum."""
    words = _words(tensor)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(words), CHUNK):
        part = words[start : start + CHUNK]
        end = start + len(part)
        total += (part * torch.arange(2 * start + 1, 2 * end, 2, device=part.device)).sum()
    return total


def _words(tensor: Tensor) -> Tensor:
    """The bits as integers of 64 bits, or of an element's size if their number is no multiple."""
    flat = tensor.detach().contiguous().flatten()
    size = flat.element_size()
    if flat.nbytes % 8:
        return flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[size])
    aligned = flat.storage_offset() * size % 8 == 0
    return (flat if aligned else flat.clone()).view(torch.int64)

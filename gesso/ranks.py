"""Ranks: the processes that share an update. Every rank has the whole rollout, and all weights or a
shard of each. Ranks divide the forward and backward passes, sum their gradients and take the same
optimizer step."""

from __future__ import annotations

import heapq
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from gesso.timeline.recorder import phase

Values = Mapping[str, Tensor]
ALONE_FROM = 2**18
"""Elements from which copying a tensor to join it with others takes longer than a collective."""


class Ranks(Protocol):
    rank: int
    count: int
    in_step: bool
    """Whether every rank must run equally many passes, as those of sharded weights do."""
    slowness: Sequence[float]
    """Time that each rank takes for the same work, relative to the others."""

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Adds up the tensors of all ranks, in place."""

    def merge(self, parts: Mapping[int, Values], owners: Sequence[int]) -> list[Values]:
        """All parts in order. Rank owners[i] passes part i and every rank receives it."""


class Alone:
    """One process without others."""

    rank = 0
    count = 1
    in_step = False
    slowness: Sequence[float] = (1.0,)

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Nothing to do: there is one process."""

    def merge(self, parts: Mapping[int, Values], owners: Sequence[int]) -> list[Values]:
        return [parts[i] for i in range(len(owners))]


ALONE = Alone()


class Group:
    """The ranks of torch's default process group."""

    def __init__(self, device: torch.device, in_step: bool = False) -> None:
        from torch import distributed

        self.distributed = distributed
        self.device = device
        self.rank = distributed.get_rank()
        self.count = distributed.get_world_size()
        self.in_step = in_step
        self.slowness: Sequence[float] = [1.0] * self.count
        self.waited = 0.0  # seconds in collectives
        self.sent = 0  # bytes that this rank passed to collectives

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Sums large tensors in place, and all others in one collective per dtype."""
        if self.count == 1:
            return
        large = [t for t in tensors if t.numel() >= ALONE_FROM and t.is_contiguous()]
        for tensor in large:
            with self._collective(tensor.nbytes):
                self.distributed.all_reduce(tensor)
        small = [t for t in tensors if t.numel() < ALONE_FROM or not t.is_contiguous()]
        for dtype in dict.fromkeys(tensor.dtype for tensor in small):
            alike = [tensor for tensor in small if tensor.dtype == dtype]
            flat = torch.cat([tensor.flatten() for tensor in alike])
            with self._collective(flat.nbytes):
                self.distributed.all_reduce(flat)
            for tensor, total in zip(alike, flat.split([t.numel() for t in alike]), strict=True):
                tensor.copy_(total.view_as(tensor))

    def merge(self, parts: Mapping[int, Values], owners: Sequence[int]) -> list[Values]:
        merged: dict[int, dict[str, Tensor]] = {i: {} for i in range(len(owners))}
        named = {f"{i}/{name}": t for i, values in parts.items() for name, t in values.items()}
        for values, _ in self.gather(named):
            for key, tensor in values.items():
                i, _, name = key.partition("/")
                merged[int(i)][name] = tensor
        return list(merged.values())

    def gather(self, values: Values, about: Any = None) -> list[tuple[Values, Any]]:
        """The tensors of every rank by name, and its JSON value `about`. Takes two collectives: the
        sizes, and all headers and tensors as bytes."""
        if self.count == 1:
            return [(values, about)]
        columns = [(n, str(t.dtype), list(t.shape)) for n, t in values.items()]
        header = _bytes(json.dumps([columns, about]), self.device)
        body = [t.to(self.device).contiguous().flatten().view(torch.uint8) for t in values.values()]
        mine = torch.cat([header, *body])
        sizes = torch.tensor([len(header), len(mine)], device=self.device)
        found = [size.tolist() for size in self._gather(sizes)]
        longest = max(size for _, size in found)
        received = self._gather(pad(mine, (0, longest - len(mine))))
        return [
            (values, about) if rank == self.rank else _unpacked(data[:end], start)
            for rank, (data, (start, end)) in enumerate(zip(received, found, strict=True))
        ]

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, which have the same shape."""
        received = [torch.empty_like(tensor) for _ in range(self.count)]
        with self._collective(tensor.nbytes):
            self.distributed.all_gather(received, tensor)
        return received

    @contextmanager
    def _collective(self, size: int) -> Iterator[None]:
        started = time.perf_counter()
        self.before_waiting()
        try:
            with phase("wait"):
                yield
                if self.device.type == "cuda":  # NCCL only enqueues the collective
                    torch.cuda.current_stream(self.device).synchronize()
        finally:
            self.after_waiting()
            self.waited += time.perf_counter() - started
            self.sent += size

    def before_waiting(self) -> None:
        """Called before this rank waits for the others."""

    def after_waiting(self) -> None:
        """Called when this rank continues."""


def _bytes(text: str, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)


def _unpacked(data: Tensor, start: int) -> tuple[Values, Any]:
    """The tensors and the JSON value of a rank, from its bytes; its header ends at `start`."""
    columns, about = json.loads(bytes(data[:start].cpu().numpy()))
    dtypes = [getattr(torch, dtype.removeprefix("torch.")) for _, dtype, _ in columns]
    sizes = [
        math.prod(shape) * dtype.itemsize
        for (_, _, shape), dtype in zip(columns, dtypes, strict=True)
    ]
    values = {}
    for (name, _, shape), dtype, part in zip(
        columns, dtypes, data[start:].split(sizes), strict=True
    ):
        values[name] = part.clone().view(dtype).view(shape)  # aligned, in its own memory
    return values, about


@dataclass(frozen=True)
class Deal:
    """Which rank computes each part, and the passes of this rank."""

    owners: Sequence[int]
    mine: Sequence[int]  # parts in order
    spare: int  # extra passes with unused results, so that all ranks run the same number


def deal(costs: Sequence[float], ranks: Ranks) -> Deal:
    """Assigns the most expensive part first, each to the rank that has the least work so far. A
    slow rank gets its first part once the others have that much more work."""
    most = math.ceil(len(costs) / ranks.count) if ranks.in_step else len(costs)
    slowness = [1.0] * ranks.count if ranks.in_step else ranks.slowness
    mean = sum(costs) / max(1, len(costs))
    load = [((slow - 1) * mean, rank) for rank, slow in enumerate(slowness)]
    heapq.heapify(load)
    owners = [0] * len(costs)
    dealt = [0] * ranks.count
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        work, rank = heapq.heappop(load)
        owners[i] = rank
        dealt[rank] += 1
        if dealt[rank] < most:
            heapq.heappush(load, (work + costs[i] * slowness[rank], rank))
    mine = [i for i, owner in enumerate(owners) if owner == ranks.rank]
    return Deal(owners, mine, max(dealt) - len(mine) if ranks.in_step else 0)


def fill(
    out: Tensor,
    parts: Sequence[Tensor],
    costs: Sequence[float],
    compute: Callable[[Tensor], Tensor],
    ranks: Ranks,
) -> None:
    """out[part, :s] = compute(part), of shape (n, s), for each part; every part is computed by one
    rank and received by all."""
    dealt = deal(costs, ranks)
    mine = {i: {"rows": compute(parts[i])} for i in dealt.mine}
    for _ in range(dealt.spare):
        compute(parts[0])
    for part, computed in zip(parts, ranks.merge(mine, dealt.owners), strict=True):
        out[part, : computed["rows"].shape[1]] = computed["rows"].to(out)

"""Transfers between samplers and learners by torch.distributed: weights from the first learner to
all samplers, traces from a sampler to one learner.

Weights are sent in buckets and received in place. Traces are sent asynchronously: they stay in the
memory of the sampler, which continues to sample, until the learner receives them.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from gesso.types import Weights, Which
from gesso.weights.copies import same_memory
from gesso.weights.publish import Digest, in_order
from gesso.weights.shards import gathered

BUCKET = 64 * 2**20
"""Bytes of small tensors that are sent together."""
WEIGHTS = 0
"""Tag of messages with weights; traces have other tags."""
Named = tuple[Which, str, Tensor]


@dataclass(frozen=True)
class Parcel:
    """Identifies tensors that a sampler sends to a learner."""

    sampler: int
    learner: int
    tag: int
    header: int  # bytes
    body: int

    @property
    def size(self) -> int:
        return self.header + self.body


class WeightTransfer:
    """Digest, size and time of the weights sent or received. Both sides hash a bucket at the same
    time."""

    def __init__(self) -> None:
        self._digest = Digest()
        self.bytes = 0
        self.seconds = 0.0  # without hashing

    @contextmanager
    def timed(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - started

    def add(self, bucket: Sequence[Named]) -> None:
        for which, name, tensor in bucket:
            self.bytes += tensor.nbytes
            self._digest.add(which, name, tensor)

    def answer(self) -> dict[str, Any]:
        return {"digest": str(self._digest), "bytes": self.bytes, "seconds": self.seconds}


@dataclass
class _Sending:
    buffers: Sequence[Tensor]  # in use until the learner has received them
    works: Sequence[Any]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


@dataclass
class Transfers:
    rank: int
    device: torch.device
    weights: Any  # of the first learner and the samplers; None in other learners
    traces: Any  # gloo, of all processes
    left: Sequence[int] = ()  # remaining samplers, once one was lost
    _tag: int = 0
    _sending: dict[str, list[_Sending]] = field(default_factory=dict)
    _received: set[tuple[int, int]] = field(default_factory=set)  # sampler, tag

    @staticmethod
    def open(
        rank: int,
        device: torch.device,
        learners: int,
        count: int,
        store: distributed.Store,
        timeout: timedelta,
    ) -> Transfers:
        """Every process must call this. On GPUs weights are sent by NCCL; traces are in host
        memory.

        `torch.distributed`'s functions need parts of the default process group, which consists of
        either the learners or the samplers. So the methods of these groups are called directly."""
        members = [0, *range(learners, count)]
        weights = None
        if rank in members:
            at = members.index(rank), len(members)
            weights = _group(device.type, distributed.PrefixStore("weights", store), *at, timeout)
        traces = _group("cpu", distributed.PrefixStore("traces", store), rank, count, timeout)
        return Transfers(rank, device, weights, traces)

    def send_weights(self, copies: Mapping[Which, Weights]) -> WeightTransfer:
        """Every learner must call this, as sharded tensors are gathered, one bucket at a time. Only
        the first learner sends."""
        transfer = WeightTransfer()
        for bucket in buckets(list(in_order(copies))):
            with transfer.timed():
                whole = [(which, name, gathered(tensor)) for which, name, tensor in bucket]
                if self.rank == 0:
                    self._spread(_joined(whole))
            transfer.add(whole)
            del whole  # before the next bucket is gathered
        return transfer

    def receive_weights(self, copies: Mapping[Which, Weights]) -> WeightTransfer:
        """Writes the values of the first learner into the tensors of this sampler."""
        transfer = WeightTransfer()
        for bucket in buckets(list(in_order(copies))):
            with transfer.timed():
                flat = _joined(bucket)
                self._spread(flat)
                _write(flat, bucket)
            transfer.add(bucket)
        return transfer

    def _spread(self, buffer: Tensor) -> None:
        """A broadcast needs all members of the group. Once one is lost, the first learner sends to
        each remaining sampler, through host memory."""
        if not self.left:
            self.weights.broadcast([buffer]).wait()  # from its first member
        elif self.rank == 0:
            host = buffer.cpu()
            for sampler in self.left:
                self.traces.send([host], sampler, WEIGHTS).wait()
        else:
            host = buffer.cpu()
            self.traces.recv([host], 0, WEIGHTS).wait()
            buffer.copy_(host)

    def send(self, call: str, learner: int, values: Mapping[str, Tensor], about: Any) -> Parcel:
        """Returns before the learner has received the tensors. `call`: the sampling call they are
        of."""
        columns = [(n, str(t.dtype), list(t.shape)) for n, t in values.items()]
        text = json.dumps([columns, about]).encode()
        header = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        body = torch.cat([_bytes(t.cpu().contiguous()) for t in values.values()])
        self._tag += 2
        works = [
            self.traces.send([buffer], learner, self._tag + i)
            for i, buffer in enumerate((header, body))
        ]
        self._sending.setdefault(call, []).append(_Sending((header, body), works))
        return Parcel(self.rank, learner, self._tag, len(header), len(body))

    def has(self, parcel: Parcel) -> bool:
        return (parcel.sampler, parcel.tag) in self._received

    def receive(self, parcel: Parcel) -> tuple[dict[str, Tensor], Any]:
        buffers = [torch.empty(size, dtype=torch.uint8) for size in (parcel.header, parcel.body)]
        for i, buffer in enumerate(buffers):
            self.traces.recv([buffer], parcel.sampler, parcel.tag + i).wait()
        self._received.add((parcel.sampler, parcel.tag))
        columns, about = json.loads(bytes(buffers[0].numpy()))
        values, start = {}, 0
        for name, kind, shape in columns:
            dtype: torch.dtype = getattr(torch, kind.removeprefix("torch."))
            size = math.prod(shape) * dtype.itemsize
            part = buffers[1][start : start + size].clone()  # aligned, in its own memory
            values[name] = part.view(dtype).view(shape).to(self.device)
            start += size
        return values, about

    def forget(self, call: str) -> None:
        """Releases the buffers of a call whose traces have been received."""
        for sending in self._sending.pop(call, ()):
            sending.wait()


def _group(kind: str, store: distributed.Store, rank: int, count: int, timeout: timedelta) -> Any:
    if kind == "cpu":
        return distributed.ProcessGroupGloo(store, rank, count, timeout)
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return distributed.ProcessGroupNCCL(store, rank, count, options)


def buckets(tensors: Sequence[Named]) -> Iterator[list[Named]]:
    """Small tensors together, large ones alone, in order."""
    bucket: list[Named] = []
    size = 0
    for named in tensors:
        if bucket and size + named[2].nbytes > BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(named)
        size += named[2].nbytes
    if bucket:
        yield bucket


def layout(weights: Weights) -> str:
    """Digest of names, dtypes and shapes, which must be equal in ranks that exchange weights."""
    rows = [[name, str(t.dtype), list(t.shape)] for name, t in sorted(weights.items())]
    return hashlib.blake2b(json.dumps(rows).encode(), digest_size=16).hexdigest()


def _joined(bucket: Sequence[Named]) -> Tensor:
    """All bytes of a bucket. A single tensor is not copied."""
    tensors = [tensor for _, _, tensor in bucket]
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return _bytes(tensors[0])
    return torch.cat([_bytes(tensor.contiguous()) for tensor in tensors])


def _write(flat: Tensor, bucket: Sequence[Named]) -> None:
    """The reverse of `_joined`, in place."""
    tensors = [tensor for _, _, tensor in bucket]
    if same_memory(flat, tensors[0]):
        return
    parts = flat.split([tensor.nbytes for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().flatten().view(torch.uint8)

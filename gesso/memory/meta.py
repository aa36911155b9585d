"""Counts live bytes on torch's meta device: each tensor from its allocation until it is freed."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from gesso.memory.functions import Replaced, fused_attention

T = TypeVar("T")
Role = Literal["worker", "learner", "sampler"]
"""Workers train and sample, unless `cluster.samplers` divides them."""

MASTER = 4  # bytes: trained weights, their gradients and both Adam moments are float32
NF4_BYTES = 0.5 + 4 / 64  # per weight: four bits, and a float32 scale per 64 weights


@dataclass(frozen=True)
class Load:
    """What one recipe allocates and runs, with its networks on the meta device."""

    networks: dict[str, int]  # bytes per part, the trained one first; quantized as stored
    stored: int  # bytes of a whole rollout
    tensors: list[Tensor]  # allocated before any work
    update: Callable[[], object]  # of one micro-batch, from the loss to the gradients
    works: dict[str, Callable[[], object]]  # the other work of a run, once each, at full size
    host: dict[str, int]  # bytes in host memory
    micro_batches: int | None = None  # of a mini-batch; None: it depends on the responses
    without_network: frozenset[str] = frozenset()  # works that do not run the trained network
    of_learners: frozenset[str] = frozenset()  # works of workers that only train
    of_samplers: frozenset[str] = frozenset()  # works of workers that only sample

    def works_of(self, role: Role) -> dict[str, Callable[[], object]]:
        if role == "worker":
            return self.works
        names = self.of_learners if role == "learner" else self.of_samplers
        return {name: work for name, work in self.works.items() if name in names}


def nbytes(part: nn.Module, quantized: Iterable[nn.Module] = ()) -> int:
    """Bytes of a network's weights and buffers, with frozen linear layers inside `quantized` in 4
    bits."""
    total = sum(t.nbytes for t in (*part.parameters(), *part.buffers()))
    frozen = [
        layer.weight
        for module in quantized
        for layer in module.modules()
        if isinstance(layer, nn.Linear) and not layer.weight.requires_grad
    ]
    return total - sum(int(w.nbytes - w.numel() * NF4_BYTES) for w in frozen)


def tensors_of(modules: Iterable[nn.Module]) -> list[Tensor]:
    return [t for module in modules for t in (*module.parameters(), *module.buffers())]


def peak(allocated: Iterable[Tensor], work: Callable[[], object]) -> int:
    """Peak number of bytes that `work` allocates in addition to `allocated`."""
    known = {t.untyped_storage()._cdata for t in allocated}
    with _fused(), _Live(known) as live:
        work()
    return live.peak


def run(work: Callable[[], T]) -> T:
    """Runs work that is not counted."""
    with _fused(), _Live(set()):
        return work()


def _fused() -> Replaced:
    """On the meta device torch would materialize every attention matrix; real devices do not."""
    return Replaced({nn.functional.scaled_dot_product_attention: fused_attention})


class _Live(TorchDispatchMode):
    """Counts storages on the meta device."""

    # operator and input shapes → output shapes; shared, as the works of a run use the same layers
    results: ClassVar[dict[Any, Any]] = {}

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known = known
        self.set: dict[int, int] = {}  # storage of a mask → number of True values

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunction():  # else function modes intercept every `is_meta`
            if only_views(function):
                result = function(*args, **(kwargs or {}))
            else:
                result = self._run(function, args, kwargs or {})
            for tensor in (result,) if isinstance(result, Tensor) else _tensors((result,)):
                if tensor.is_meta:
                    self._count_storage(tensor.untyped_storage())
        return result

    def _run(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Handles operators whose result depends on values. CPU tensors that are combined with meta
        tensors are moved to the meta device."""
        first: Any = args[0] if args else None
        if function is torch.ops.aten.index.Tensor and first.is_meta:
            mask = args[1][0]
            if mask is not None and mask.dtype == torch.bool:
                return first.new_empty(self._selected(mask), *first.shape[mask.ndim :])
        if function is torch.ops.aten._to_copy.default:
            target = torch.device(kwargs.get("device") or first.device).type
            if (first.device.type, target) == ("meta", "cpu"):
                return torch.zeros(first.shape, dtype=kwargs.get("dtype") or first.dtype)
            if (first.device.type, target, first.dtype) == ("cpu", "meta", torch.bool):
                moved = function(*args, **kwargs)
                self.set[moved.untyped_storage()._cdata] = int(first.sum())
                return moved
        tensors = _tensors((*args, *kwargs.values()))
        if not _same_kind(tensors) and function is not torch.ops.aten.copy_.default:
            args, kwargs = tree_map_only(Tensor, lambda t: t.to("meta"), (args, kwargs))
            tensors = _tensors((*args, *kwargs.values()))
        return self._cached(function, args, kwargs, tensors)

    def _cached(
        self, function: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> Any:
        """Caches output shapes: layers repeat, and a lookup is faster than torch's shape
        inference."""
        if _aliases(function):
            return function(*args, **kwargs)
        key = function, _key(args), *((name, _key(value)) for name, value in kwargs.items())
        shapes = self.results.get(key)
        if shapes is not None:
            return shapes.like() if isinstance(shapes, _Shape) else [s.like() for s in shapes]
        result = function(*args, **kwargs)
        if isinstance(result, Tensor) and _are_new([result], tensors):
            self.results[key] = _Shape.of(result)
        elif isinstance(result, list | tuple) and _are_new(result, tensors):
            self.results[key] = [_Shape.of(tensor) for tensor in result]
        return result

    def _selected(self, mask: Tensor) -> int:
        """Number of elements that a boolean mask selects."""
        if mask.device.type == "cpu":
            return int(mask.sum())
        return self.set.get(mask.untyped_storage()._cdata, mask.numel())

    def _count_storage(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return
        self.known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.set.pop(key, None)
        self.now -= size


class _Shape(NamedTuple):
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> _Shape:
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)

    def like(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


# Operators take and return values and flat lists of values, without deeper nesting. torch's
# pytrees, which handle any nesting, took most of the time of an estimate.


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    tensors = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += [part for part in value if isinstance(part, Tensor)]
    return tensors


def _key(value: Any) -> Any:
    """The part of an operator's input that determines the shape of its output."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    return type(value), value


def _same_kind(tensors: Sequence[Tensor]) -> bool:
    """Whether all or none are on the meta device."""
    return all(t.is_meta == tensors[0].is_meta for t in tensors[1:])


@functools.cache
def only_views(function: Any) -> bool:
    """Whether an operator returns views of one tensor, and does nothing else."""
    schema = function._schema
    tensors = [a for a in schema.arguments if "Tensor" in str(a.type)]
    alias = tensors[0].alias_info if len(tensors) == 1 else None
    return (
        alias is not None
        and not alias.is_write
        and all(value.alias_info is not None for value in schema.returns)
    )


@functools.cache
def _aliases(function: Any) -> bool:
    """Whether an operator modifies an input or may return a view of one."""
    return any(argument.alias_info is not None for argument in function._schema.arguments)


def _are_new(results: Sequence[Any], inputs: Iterable[Tensor]) -> bool:
    """Whether all results are meta tensors in separate storages, which no input shares."""
    if not results or not all(isinstance(t, Tensor) and t.is_meta for t in results):
        return False
    storages = {t.untyped_storage()._cdata for t in results}
    return len(storages) == len(results) and storages.isdisjoint(
        t.untyped_storage()._cdata for t in inputs
    )

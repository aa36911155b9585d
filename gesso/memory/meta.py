"""Counting on torch's meta device: every tensor from the operation that makes it to its end."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

NF4_BYTES = 0.5 + 4 / 64  # a weight: four bits, and a float32 scale for every 64 of them


@dataclass(frozen=True)
class Load:
    """What a family of models says of one recipe, its networks being on the meta device."""

    networks: dict[str, int]  # bytes by part; what the recipe quantizes counts as if it were
    stored: int  # bytes of a whole rollout
    tensors: list[Tensor]  # that are there before any work
    update: Callable[[], object]  # of one micro-batch, from the loss to the gradients
    works: dict[str, Callable[[], object]]  # what else a run does, each once, as large as there
    host: dict[str, int]  # bytes kept in the host's memory


def nbytes(part: nn.Module, quantized: Iterable[nn.Module] = ()) -> int:
    """Of a network's weights and buffers, frozen linear layers within `quantized` in 4 bits."""
    total = sum(t.nbytes for t in (*part.parameters(), *part.buffers()))
    frozen = [
        layer.weight
        for whole in quantized
        for layer in whole.modules()
        if isinstance(layer, nn.Linear) and not layer.weight.requires_grad
    ]
    return total - sum(int(w.nbytes - w.numel() * NF4_BYTES) for w in frozen)


def tensors_of(modules: Iterable[nn.Module]) -> list[Tensor]:
    return [t for module in modules for t in (*module.parameters(), *module.buffers())]


def peak(there: Iterable[Tensor], work: Callable[[], object]) -> int:
    """Most bytes that live at once of what `work` makes."""
    known = {t.untyped_storage()._cdata for t in there}
    # On the meta device torch would write down every attention matrix; devices do not.
    with (
        patch.object(nn.functional, "scaled_dot_product_attention", _attention),
        _Live(known) as live,
    ):
        work()
    return live.peak


class _Live(TorchDispatchMode):
    """Counts storages on the meta device."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known = known
        self.set: dict[int, int] = {}  # storage of a mask → how many of its flags are
        self.made: dict[Any, Any] = {}  # operator and its inputs' shapes → its results' own

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = self._run(function, args, kwargs or {})
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type == "meta":
                self._see(tensor.untyped_storage())
        return result

    def _run(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What depends on numbers is answered without them. Small tensors of the CPU that meet one
        of the meta device follow it there."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        places = {tensor.device.type for tensor in tensors}
        first: Any = args[0] if args else None
        if function is torch.ops.aten.index.Tensor and first.device.type == "meta":
            mask = args[1][0]
            if mask is not None and mask.dtype == torch.bool:
                return first.new_empty(self._count(mask), *first.shape[mask.ndim :])
        if function is torch.ops.aten._to_copy.default:
            target = torch.device(kwargs.get("device") or first.device).type
            if (first.device.type, target) == ("meta", "cpu"):
                return torch.zeros(first.shape, dtype=kwargs.get("dtype") or first.dtype)
            if (first.device.type, target, first.dtype) == ("cpu", "meta", torch.bool):
                moved = function(*args, **kwargs)
                self.set[moved.untyped_storage()._cdata] = int(first.sum())
                return moved
        if places == {"meta", "cpu"} and function is not torch.ops.aten.copy_.default:
            args, kwargs = tree_map_only(Tensor, lambda t: t.to("meta"), (args, kwargs))
        return self._again(function, args, kwargs)

    def _again(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A network's layers are alike, and shapes take torch longer to work out than to remember:
        what made new tensors once makes such tensors again."""
        inputs, spec = tree_flatten((args, kwargs))
        shapes = tuple(
            _Shape.of(leaf) if isinstance(leaf, Tensor) else (type(leaf), leaf) for leaf in inputs
        )
        key = function, str(spec), shapes
        if key in self.made:
            return tree_map_only(_Shape, _Shape.like, self.made[key])
        result = function(*args, **kwargs)
        if _is_new(function, inputs, result):
            self.made[key] = tree_map_only(Tensor, _Shape.of, result)
        return result

    def _count(self, mask: Tensor) -> int:
        if mask.device.type == "cpu":
            return int(mask.sum())
        return self.set.get(mask.untyped_storage()._cdata, mask.numel())

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return
        self.known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.set.pop(key, None)
        self.now -= size


@dataclass(frozen=True)
class _Shape:
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> _Shape:
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)

    def like(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


def _is_new(function: Any, inputs: list[Any], result: Any) -> bool:
    """Tensors of the meta device alone, in storages of their own, from inputs left as they were."""
    found = [result] if isinstance(result, Tensor) else result
    if function._schema.is_mutable or not isinstance(found, list | tuple) or not found:
        return False
    if not all(isinstance(t, Tensor) and t.device.type == "meta" for t in found):
        return False
    given = {t.untyped_storage()._cdata for t in inputs if isinstance(t, Tensor)}
    own = {t.untyped_storage()._cdata for t in found}
    return len(own) == len(found) and not own & given


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    like = value.dtype
    added = None if attn_mask is None else attn_mask.to(like)  # devices add it, as a number
    return _Attention.apply(query.to(like), key.to(like), value, added)


class _Attention(torch.autograd.Function):
    """Shapes of a fused attention: it keeps its inputs and its output for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, added: Tensor | None
    ) -> Tensor:
        out = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, out, *([] if added is None else [added]))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (*(torch.empty_like(t) for t in ctx.saved_tensors[:3]), None)

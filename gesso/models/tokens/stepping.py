"""One decoding step: the arithmetic of transformers' decoder layers with a third of their
operations.

The time of a step with few sequences is that of reading the weights and launching the kernels. So
projections of the same input are one matrix; on CUDA the operations between two GEMMs are compiled
into one kernel, and attention reads each sequence up to its length. On Hopper GPUs, matrix
multiplications of up to 64 sequences are Triton kernels, too (`step_kernels.py`).
`tests/samplers/test_stepping.py` compares it with the layers of transformers, for every supported
model type.

    n sequences · D width · H heads · G groups of heads that share keys · d head width
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gesso.devices import HAS_TRITON
from gesso.models.repeatable import kernel_options
from gesso.weights.lora_folding import LoraFolding

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float], Tensor]


class Stepper:
    """A decoder with its current weights, which are not modified."""

    def __init__(self, decoder: Any, dtype: torch.dtype, folding: LoraFolding) -> None:
        self.rotary = decoder.rotary_emb
        self.layers = [_Layer(layer, dtype, folding) for layer in decoder.layers]
        self.weight, self.eps = decoder.norm.weight, decoder.norm.variance_epsilon
        self.dtype = dtype
        self.kernels = None
        if all(layer.fits_kernels for layer in self.layers):
            self.kernels = hopper_kernels(self.weight.device, dtype)

    def __call__(self, x: Tensor, positions: Tensor, cache: Any) -> Tensor:
        """Embeddings (n, D), positions in the decoder's layout, a `SlotCache` → states (n, D)."""
        cos, sin = self.rotary(x[:, None], positions)  # (n, 1, d)
        if cos.ndim == 4:  # rows for time, height and width, equal for text
            cos, sin = cos[0], sin[0]
        if self.kernels is not None and len(x) <= self.kernels.ROWS:
            return self._with_kernels(x, cos[:, 0].contiguous(), sin[:, 0].contiguous(), cache)
        ops = _ops(x.device.type)
        x = x.contiguous()
        change = torch.zeros_like(x, dtype=self.dtype)
        for layer, slots in zip(self.layers, cache.layers, strict=True):
            x, change = layer(x, change, cos, sin, slots, ops)
        return ops.add_norm(x, change, self.weight, self.eps)[1]

    def _with_kernels(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Any) -> Tensor:
        kernels: Any = self.kernels
        x = x.clone(memory_format=torch.contiguous_format)  # changed in place
        change = x.new_zeros(1, *x.shape, dtype=torch.float32)
        for layer, slots in zip(self.layers, cache.layers, strict=True):
            change = layer.with_kernels(x, change, cos, sin, slots, kernels, self.dtype)
        return kernels.add_norm(x, change, self.weight, self.eps, self.dtype)


class _Layer:
    def __init__(self, layer: Any, dtype: torch.dtype, folding: LoraFolding) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.width, self.scale = attention.head_dim, attention.scaling
        self.before, self.after = layer.input_layernorm, layer.post_attention_layernorm
        self.eps = self.before.variance_epsilon
        self.qkv = joined([attention.q_proj, attention.k_proj, attention.v_proj], dtype, folding)
        self.out = joined([attention.o_proj], dtype, folding)
        self.gate_up = joined([mlp.gate_proj, mlp.up_proj], dtype, folding)
        self.down = joined([mlp.down_proj], dtype, folding)
        self.norms: tuple[Tensor, Tensor] | None = None  # of queries and keys, in Qwen3
        if isinstance(getattr(attention, "q_norm", None), nn.Module):
            self.norms = attention.q_norm.weight, attention.k_norm.weight

    def __call__(
        self,
        x: Tensor,
        change: Tensor,  # (n, D) residual of the previous layer, to be added to x
        cos: Tensor,
        sin: Tensor,
        slots: Any,
        ops: Ops,
    ) -> tuple[Tensor, Tensor]:
        x, normed = ops.add_norm(x, change, self.before.weight, self.eps)
        heads = F.linear(normed, *self.qkv).view(len(x), -1, self.width)  # (n, H + 2 G, d)
        keys, values, lengths = slots.past
        groups = keys.shape[1]
        value = heads[:, -groups:]
        rotated = ops.rotated(heads[:, :-groups], cos, sin, groups, self.norms, self.eps)
        query, key = rotated[:, :-groups], rotated[:, -groups:]
        attended = ops.attend(query, key, value, keys, values, lengths, self.scale)
        change = F.linear(attended, *self.out)
        x, normed = ops.add_norm(x, change, self.after.weight, self.eps)
        gated = ops.gated(F.linear(normed, *self.gate_up))
        return x, F.linear(gated, *self.down)

    @property
    def fits_kernels(self) -> bool:
        biases = self.out[1], self.gate_up[1], self.down[1]
        width = 16 <= self.width <= 128 and self.width.bit_count() == 1
        return width and biases == (None, None, None)

    def with_kernels(
        self,
        x: Tensor,  # changed in place
        change: Tensor,  # (S, n, D) float32: the sum over S is to be added to x
        cos: Tensor,
        sin: Tensor,
        slots: Any,
        kernels: Any,
        dtype: torch.dtype,
    ) -> Tensor:
        """The same with `step_kernels`; returns the next `change`."""
        normed = kernels.add_norm(x, change, self.before.weight, self.eps, dtype)
        heads = kernels.projected(normed, self.qkv[0])
        rotation = self.qkv[1], self.norms, self.eps, cos, sin
        attended = kernels.attend(heads, *rotation, *slots.past, self.scale)
        change = kernels.projected(attended, self.out[0])
        normed = kernels.add_norm(x, change, self.after.weight, self.eps, dtype)
        return kernels.projected(kernels.gated(normed, self.gate_up[0]), self.down[0])


@cache
def hopper_kernels(device: torch.device, dtype: torch.dtype) -> Any:
    """The module `step_kernels`, or None where it was not measured or cannot run."""
    if device.type != "cuda" or dtype == torch.float32:
        return None
    if torch.version.hip or torch.cuda.get_device_capability(device)[0] != 9:
        return None
    if not HAS_TRITON or find_spec("triton.language.extra.cuda.gdc") is None:  # before Triton 3.4
        return None
    from gesso.models.tokens import step_kernels

    return step_kernels


def fits(decoder: Any) -> bool:
    """Whether this file implements the layers of this decoder."""
    return decoder.config.hidden_act == "silu"


def joined(
    layers: Sequence[Any], dtype: torch.dtype, folding: LoraFolding
) -> tuple[Tensor, Tensor | None]:
    """Joint weight and bias of linear layers with the same input. Adapters must be folded."""
    weight = folding.join(layers, dtype)
    plain = [layer if type(layer) is nn.Linear else layer.base_layer for layer in layers]
    if all(layer.bias is None for layer in plain):
        return weight, None
    biases = [
        layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias
        for layer in plain
    ]
    biases = [bias.detach().to(dtype) for bias in biases]
    return weight, biases[0] if len(biases) == 1 else torch.cat(biases)


# Operations between two GEMMs


def add_norm(x: Tensor, change: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + change, and its RMSNorm in the precision of the GEMMs."""
    x = x + change
    return x, _normed(x, weight, eps).to(change.dtype)


def rotated(
    heads: Tensor,  # (n, H + G, d): queries, then keys
    cos: Tensor,  # (n, 1, d)
    sin: Tensor,
    groups: int,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> Tensor:
    """Applies rotary embeddings, after the norms of queries and keys if the model has them."""
    dtype = heads.dtype
    if norms is not None:
        query = _normed(heads[:, :-groups], norms[0], eps)
        heads = torch.cat([query, _normed(heads[:, -groups:], norms[1], eps)], 1)
    low, high = heads.chunk(2, -1)
    return (heads * cos + torch.cat([-high, low], -1) * sin).to(dtype)


def gated(x: Tensor) -> Tensor:
    """(n, 2 F) → (n, F)"""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    scale: float,
) -> Tensor:
    """`kernels.one_token` in torch: for one query per head, two matrix multiplications are faster
    on a CPU than `scaled_dot_product_attention`."""
    n, groups, capacity, width = keys.shape
    rows = torch.arange(n, device=keys.device)
    keys[rows, :, lengths], values[rows, :, lengths] = key, value
    seen = torch.arange(capacity, device=keys.device) <= lengths[:, None]
    grouped = (query * scale).reshape(n, groups, -1, width)
    scores = (grouped @ keys.transpose(-1, -2)).masked_fill_(~seen[:, None, None], float("-inf"))
    return (scores.softmax(-1) @ values).reshape(n, -1)


class Ops(NamedTuple):
    add_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    rotated: Callable[..., Tensor]
    gated: Callable[[Tensor], Tensor]
    attend: Attend


@cache
def _ops(device: str) -> Ops:
    """On CUDA, compiled functions and our attention kernel; elsewhere the functions above."""
    if device != "cuda":
        return Ops(add_norm, rotated, gated, attend)
    from gesso.models.tokens.kernels import one_token

    compiled: Any = partial(torch.compile, options=kernel_options())
    return Ops(compiled(add_norm), compiled(rotated), compiled(gated), one_token)

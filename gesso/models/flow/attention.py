"""Attention of compiled networks on a GPU: cuDNN's forward, or with a mask of the keys one of our
own, and a backward of our own.

The backward passes of cuDNN and of torch's flash attention add up the gradient of the query in an
order that changes from run to run. With a head size of 128 some of cuDNN's gradients are also not
finite (cuDNN 9.19, H200).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gesso.devices import HAS_TRITON

HEAD_SIZES = (64, 128)
PLAIN = functional.scaled_dot_product_attention


@torch.library.custom_op("gesso::attention", mutates_args=())
def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """All (n, H, s, d) → softmax(q kᵀ / √d) v like the query, and (n, H, s) the logarithms of the
    softmax's denominators. `mask` is (n, 1, 1, s) bool: False excludes a key."""
    if mask is not None:
        from gesso.models.flow.attention_kernels import masked_attention

        return masked_attention(query, key, value, mask)
    out, logsumexp, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True
    )
    told = torch.empty_like(query, device="meta").stride()
    if out.stride() != told:
        out = torch.empty_strided(out.shape, told, dtype=out.dtype, device=out.device).copy_(out)
    return out, logsumexp.reshape(query.shape[:-1])


@attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("gesso::attention_backward", mutates_args=())
def attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    from gesso.models.flow.attention_kernels import attention_grads

    return attention_grads(grad, query, key, value, mask, out, logsumexp)


@attention_backward.register_fake
def _(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    return *attention_backward(grad, *ctx.saved_tensors), None


attention.register_autograd(_backward, setup_context=_save)


def has_kernels(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and HAS_TRITON
        and dtype in (torch.bfloat16, torch.float16)
        and head_size in HEAD_SIZES
    )


def replace_attention(traced: torch.fx.GraphModule) -> None:
    """In a graph traced by dynamo: every attention for which there are kernels.
    Checkpointed functions are graphs within the graph."""
    for module in traced.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.find_nodes(op="call_function", target=PLAIN):
                _replace(module.graph, node)
            module.recompile()


def _replace(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    inputs = _inputs(*node.args, **node.kwargs)
    if inputs is None or not _supported(node, inputs):
        return
    with graph.inserting_before(node):
        dtype = node.meta["example_value"].dtype  # autocast may lower that of the inputs
        cast = [graph.call_method("to", (x, dtype)) for x in inputs[:3]]
        both = graph.call_function(torch.ops.gesso.attention.default, (*cast, inputs[3]))
        out = graph.call_function(operator.getitem, (both, 0))
    node.replace_all_uses_with(out)
    graph.erase_node(node)


def _inputs(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Any, Any, Any, Any] | None:
    """The tensors of `scaled_dot_product_attention`, or None if an option is used."""
    plain = not dropout_p and not is_causal and scale is None and not enable_gqa
    return (query, key, value, attn_mask) if plain else None


def _supported(node: torch.fx.Node, inputs: tuple[Any, Any, Any, Any]) -> bool:
    out = node.meta["example_value"]
    *qkv, mask = inputs
    equal = all(x.meta["example_value"].shape == out.shape for x in qkv)
    of_keys = mask is None or _is_key_mask(mask.meta["example_value"], out)
    return equal and of_keys and has_kernels(out.device, out.dtype, out.shape[-1])


def _is_key_mask(mask: Tensor, out: Tensor) -> bool:
    n, _, length, _ = out.shape
    return mask.dtype == torch.bool and mask.shape == (n, 1, 1, length)

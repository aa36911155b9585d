"""The gradient of attention in Triton, without atomic additions: every gradient is summed by one
program in a fixed order. And attention with a mask of the keys.

    n images · H heads · s tokens · d head size
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)  # finite: with −inf, rows whose first keys are all masked become NaN


class Tiles(NamedTuple):
    """Tokens per program and per iteration of its loop, and how a program runs."""

    own: int
    others: int
    num_warps: int
    num_stages: int


KEYS = {64: Tiles(64, 128, 4, 2), 128: Tiles(128, 64, 8, 3)}
QUERIES = {64: Tiles(128, 64, 8, 3), 128: Tiles(128, 64, 8, 3)}
"""By head size: the fastest of eight on an H200."""
FORWARD = {64: Tiles(128, 64, 4, 3), 128: Tiles(128, 64, 8, 3)}


def masked_attention(
    query: Tensor,  # all (n, H, s, d), in any order of n, H and s
    key: Tensor,
    value: Tensor,
    mask: Tensor,  # (n, 1, 1, s) bool: False excludes a key
) -> tuple[Tensor, Tensor]:
    """softmax(q kᵀ / √d) v over the keys that are not masked, like the query; and the logarithms of
    the softmax's denominators, (n, H, s) float32."""
    n, heads, length, width = query.shape
    query, key, value = _rows_contiguous(query, key, value)
    out = torch.empty_like(query)
    logsumexp = query.new_empty(n, heads, length, dtype=torch.float32)
    tiles = FORWARD[width]
    _attention[(triton.cdiv(length, tiles.own), n * heads)](
        query, key, value, _flat(mask), out, logsumexp, width**-0.5, heads, length,
        *(s for x in (query, key, value, out) for s in x.stride()[:3]),
        WIDTH=width, OWN=tiles.own, OTHERS=tiles.others,
        EVEN=length % max(tiles.own, tiles.others) == 0,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out, logsumexp


def _rows_contiguous(*tensors: Tensor) -> list[Tensor]:
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def _flat(mask: Tensor) -> Tensor:
    """(n, s) bytes."""
    return mask.reshape(len(mask), -1).contiguous().view(torch.uint8)


def attention_grads(
    grad: Tensor,  # all (n, H, s, d), in any order of n, H and s
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,  # (n, 1, 1, s) bool: False excludes a key
    out: Tensor,
    logsumexp: Tensor,  # (n, H, s) float32
    keys: Tiles | None = None,
    queries: Tiles | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the query, key and value of softmax(q kᵀ / √d) v."""
    n, heads, length, width = query.shape
    keys, queries = keys or KEYS[width], queries or QUERIES[width]
    grad, query, key, value, out = _rows_contiguous(grad, query, key, value, out)
    masked, keep = mask is not None, logsumexp if mask is None else _flat(mask)
    deltas = torch.empty_like(logsumexp)
    rows = 128
    _deltas[(triton.cdiv(length, rows), n * heads)](
        grad, out, deltas, heads, length, *grad.stride()[:3], *out.stride()[:3],
        WIDTH=width, ROWS=rows, num_warps=4,
    )  # fmt: skip
    dq, dk, dv = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    strides = [s for x in (query, key, value, grad) for s in x.stride()[:3]]
    scale = width**-0.5
    _key_grads[(triton.cdiv(length, keys.own), n * heads)](
        query, key, value, grad, keep, logsumexp, deltas, dk, dv, scale, heads, length, *strides,
        *dk.stride()[:3], *dv.stride()[:3], WIDTH=width, OWN=keys.own, OTHERS=keys.others,
        EVEN=length % max(keys.own, keys.others) == 0, MASKED=masked,
        num_warps=keys.num_warps, num_stages=keys.num_stages,
    )  # fmt: skip
    _query_grads[(triton.cdiv(length, queries.own), n * heads)](
        query, key, value, grad, keep, logsumexp, deltas, dq, scale, heads, length, *strides,
        *dq.stride()[:3], WIDTH=width, OWN=queries.own, OTHERS=queries.others,
        EVEN=length % max(queries.own, queries.others) == 0, MASKED=masked,
        num_warps=queries.num_warps, num_stages=queries.num_stages,
    )  # fmt: skip
    return dq, dk, dv


@triton.jit
def _load(base, at, stride, length, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """(tokens, d); zeros beyond the end."""
    place = base + at[:, None] * stride + tl.arange(0, WIDTH)[None, :]
    if EVEN:
        return tl.load(place)
    return tl.load(place, at[:, None] < length, other=0)


@triton.jit
def _store(base, at, stride, length, x, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    place = base + at[:, None] * stride + tl.arange(0, WIDTH)[None, :]
    x = x.to(base.dtype.element_ty)
    if EVEN:
        tl.store(place, x)
    else:
        tl.store(place, x, at[:, None] < length)


@triton.jit
def _numbers(base, at, length, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(base + at)
    return tl.load(base + at, at < length, other=0)


@triton.jit
def _attention(
    query, key, value, keep, out, logsumexp, scale, heads, length,
    query_n, query_h, query_s, key_n, key_h, key_s, value_n, value_h, value_s,
    out_n, out_h, out_s,
    WIDTH: tl.constexpr, OWN: tl.constexpr, OTHERS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """One program per head and block of queries; it reads all keys."""
    row = tl.program_id(1).to(tl.int64)
    n, head = row // heads, row % heads
    key += n * key_n + head * key_h
    value += n * value_n + head * value_h
    keep += n * length
    own = tl.program_id(0) * OWN + tl.arange(0, OWN)
    q = _load(query + n * query_n + head * query_h, own, query_s, length, WIDTH, EVEN)
    largest = tl.full((OWN,), LOWEST, tl.float32)
    total = tl.zeros((OWN,), tl.float32)
    summed = tl.zeros((OWN, WIDTH), tl.float32)
    for start in range(0, length, OTHERS):
        at = start + tl.arange(0, OTHERS)
        k = _load(key, at, key_s, length, WIDTH, EVEN)
        v = _load(value, at, value_s, length, WIDTH, EVEN)
        kept = _numbers(keep, at, length, EVEN) != 0  # False beyond the end
        score = tl.where(kept[None, :], tl.dot(q, tl.trans(k)) * (scale * LOG2E), float("-inf"))
        larger = tl.maximum(largest, tl.max(score, 1))
        share = tl.exp2(score - larger[:, None])
        before = tl.exp2(largest - larger)
        total = total * before + tl.sum(share, 1)
        summed = summed * before[:, None] + tl.dot(share.to(v.dtype), v)
        largest = larger
    result = summed / total[:, None]
    _store(out + n * out_n + head * out_h, own, out_s, length, result, WIDTH, EVEN)
    tl.store(logsumexp + row * length + own, (largest + tl.log2(total)) / LOG2E, own < length)


@triton.jit
def _deltas(
    grad, out, deltas, heads, length, grad_n, grad_h, grad_s, out_n, out_h, out_s,
    WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Σ grad · out of every token."""
    row = tl.program_id(1).to(tl.int64)
    n, head = row // heads, row % heads
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    g = _load(grad + n * grad_n + head * grad_h, at, grad_s, length, WIDTH, False)
    o = _load(out + n * out_n + head * out_h, at, out_s, length, WIDTH, False)
    total = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
    tl.store(deltas + row * length + at, total, at < length)


@triton.jit
def _key_grads(
    query, key, value, grad, keep, logsumexp, deltas, dk, dv, scale, heads, length,
    query_n, query_h, query_s, key_n, key_h, key_s, value_n, value_h, value_s,
    grad_n, grad_h, grad_s, dk_n, dk_h, dk_s, dv_n, dv_h, dv_s,
    WIDTH: tl.constexpr, OWN: tl.constexpr, OTHERS: tl.constexpr, EVEN: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """One program per head and block of keys; it reads all queries. Padded queries have a gradient
    of 0, so they contribute nothing."""
    row = tl.program_id(1).to(tl.int64)
    n, head = row // heads, row % heads
    query += n * query_n + head * query_h
    grad += n * grad_n + head * grad_h
    logsumexp += row * length
    deltas += row * length
    own = tl.program_id(0) * OWN + tl.arange(0, OWN)
    k = _load(key + n * key_n + head * key_h, own, key_s, length, WIDTH, EVEN)
    v = _load(value + n * value_n + head * value_h, own, value_s, length, WIDTH, EVEN)
    if MASKED:
        kept = _numbers(keep + n * length, own, length, EVEN) != 0
    k_grad = tl.zeros((OWN, WIDTH), tl.float32)
    v_grad = tl.zeros((OWN, WIDTH), tl.float32)
    for start in range(0, length, OTHERS):
        at = start + tl.arange(0, OTHERS)
        q = _load(query, at, query_s, length, WIDTH, EVEN)
        g = _load(grad, at, grad_s, length, WIDTH, EVEN)
        total = _numbers(logsumexp, at, length, EVEN) * LOG2E
        share = tl.exp2(tl.dot(k, tl.trans(q)) * (scale * LOG2E) - total[None, :])
        if MASKED:
            share = tl.where(kept[:, None], share, 0.0)
        v_grad += tl.dot(share.to(g.dtype), g)
        slope = tl.dot(v, tl.trans(g)) - _numbers(deltas, at, length, EVEN)[None, :]
        k_grad += tl.dot((share * slope).to(q.dtype), q)
    _store(dk + n * dk_n + head * dk_h, own, dk_s, length, k_grad * scale, WIDTH, EVEN)
    _store(dv + n * dv_n + head * dv_h, own, dv_s, length, v_grad, WIDTH, EVEN)


@triton.jit
def _query_grads(
    query, key, value, grad, keep, logsumexp, deltas, dq, scale, heads, length,
    query_n, query_h, query_s, key_n, key_h, key_s, value_n, value_h, value_s,
    grad_n, grad_h, grad_s, dq_n, dq_h, dq_s,
    WIDTH: tl.constexpr, OWN: tl.constexpr, OTHERS: tl.constexpr, EVEN: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """One program per head and block of queries; it reads all keys."""
    row = tl.program_id(1).to(tl.int64)
    n, head = row // heads, row % heads
    key += n * key_n + head * key_h
    value += n * value_n + head * value_h
    own = tl.program_id(0) * OWN + tl.arange(0, OWN)
    q = _load(query + n * query_n + head * query_h, own, query_s, length, WIDTH, EVEN)
    g = _load(grad + n * grad_n + head * grad_h, own, grad_s, length, WIDTH, EVEN)
    total = _numbers(logsumexp + row * length, own, length, EVEN) * LOG2E
    delta = _numbers(deltas + row * length, own, length, EVEN)
    q_grad = tl.zeros((OWN, WIDTH), tl.float32)
    for start in range(0, length, OTHERS):
        at = start + tl.arange(0, OTHERS)
        k = _load(key, at, key_s, length, WIDTH, EVEN)
        v = _load(value, at, value_s, length, WIDTH, EVEN)
        share = tl.exp2(tl.dot(q, tl.trans(k)) * (scale * LOG2E) - total[:, None])
        if MASKED:
            kept = _numbers(keep + n * length, at, length, EVEN) != 0  # False beyond the end
            share = tl.where(kept[None, :], share, 0.0)
        elif not EVEN:
            share = tl.where((at < length)[None, :], share, 0.0)
        slope = tl.dot(g, tl.trans(v)) - delta[:, None]
        q_grad += tl.dot((share * slope).to(k.dtype), k)
    _store(dq + n * dq_n + head * dq_h, own, dq_s, length, q_grad * scale, WIDTH, EVEN)

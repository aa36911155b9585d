"""Attention from one new token per sequence to its past, in Triton. Each sequence is read up to its
length, not up to the capacity of its slot, and heads that share keys load them once.

    n sequences · H heads · G groups of heads that share keys and values · d head width
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

AT_ONCE = 64
"""Past tokens that are read at a time."""


def one_token(
    query: Tensor,  # (n, H, d)
    key: Tensor,  # (n, G, d): of the new token; written into the cache after the past
    value: Tensor,
    keys: Tensor,  # (n, G, capacity, d)
    values: Tensor,
    lengths: Tensor,  # (n,) of the past
    scale: float,
) -> Tensor:
    """(n, H · d)"""
    n, heads, width = query.shape
    groups = key.shape[1]
    out = query.new_empty(n, heads, width)
    _one_token[(n, groups)](
        query, key, value, keys, values, lengths, out, scale * 1.4426950408889634,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1),
        value.stride(0), value.stride(1), keys.stride(0), keys.stride(1), keys.stride(2),
        values.stride(0), values.stride(1), values.stride(2),
        SHARING=heads // groups, WIDTH=width,
        ROWS=max(16, triton.next_power_of_2(heads // groups)),
        COLUMNS=max(16, triton.next_power_of_2(width)), AT_ONCE=AT_ONCE,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return out.view(n, heads * width)


@triton.jit
def _one_token(
    query, key, value, keys, values, lengths, out, scale,
    query_n, query_h, key_n, key_g, value_n, value_g, keys_n, keys_g, keys_t,
    values_n, values_g, values_t,
    SHARING: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One program per sequence and group. Softmax in base 2, `scale` includes log2(e); the new
    token is processed first, so that the running maximum is always finite."""
    n = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    real = columns < WIDTH
    inside = (rows < SHARING)[:, None] & real[None, :]
    past = tl.load(lengths + n)
    heads = group * SHARING + rows
    q = tl.load(query + n * query_n + heads[:, None] * query_h + columns[None, :], inside, other=0)
    k_new = tl.load(key + n * key_n + group * key_g + columns, real, other=0)
    v_new = tl.load(value + n * value_n + group * value_g + columns, real, other=0)
    keys += n * keys_n + group * keys_g
    values += n * values_n + group * values_g
    top = tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], 1) * scale
    total = tl.full((ROWS,), 1.0, tl.float32)
    output = tl.zeros((ROWS, COLUMNS), tl.float32) + v_new.to(tl.float32)[None, :]
    for start in range(0, past, AT_ONCE):
        at = start + tl.arange(0, AT_ONCE)
        seen = (at < past)[:, None] & real[None, :]
        k = tl.load(keys + at[:, None] * keys_t + columns[None, :], seen, other=0)
        v = tl.load(values + at[:, None] * values_t + columns[None, :], seen, other=0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        score = tl.where((at < past)[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        share = tl.exp2(score - higher[:, None])
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(share, 1)
        output = output * fade[:, None] + tl.dot(share.to(v.dtype), v, input_precision="ieee")
        top = higher
    tl.store(keys + past * keys_t + columns, k_new.to(keys.dtype.element_ty), real)
    tl.store(values + past * values_t + columns, v_new.to(values.dtype.element_ty), real)
    output = output / total[:, None]
    place = out + n * (tl.num_programs(1) * SHARING * WIDTH)
    tl.store(place + heads[:, None] * WIDTH + columns[None, :], output.to(q.dtype), inside)

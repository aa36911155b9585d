"""The kernels of a decoding step of up to 64 sequences on a Hopper GPU, in Triton.

Such a step takes as long as reading the weights. With one cuBLAS call per projection, the memory is
idle for a third of that time: between kernels, and because a small matrix has too few output tiles
for all processors. Here several programs share the sum of a tile (split-K), a layer is seven
kernels, and each kernel starts before the previous one ends (programmatic dependent launch).

What a kernel does before `gdc_wait` may run beside every earlier kernel of the step. So it reads
only what none of them writes: weights, lengths, past keys and values. Every program must call
`gdc_wait`, as a kernel is known to be finished only by those that waited for it.

Shared sums are stored as float32 parts. The kernel that reads them adds them up in a fixed order,
so that a step is the same every time.

    n sequences · D width · H heads · G groups of heads that share keys · d head width · S parts
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ROWS = 64
"""Maximum number of sequences."""
PARTS = 8
"""Maximum number of programs that share a sum."""


class Tiles(NamedTuple):
    """Of a program: its outputs, at most those of a tile; inputs per iteration; and how it runs."""

    own: int
    tile: int
    depth: int
    num_warps: int
    num_stages: int


PLAIN = (Tiles(64, 64, 128, 4, 4), Tiles(128, 128, 128, 8, 3))
"""The fastest on an H200 for the projections of Qwen2.5-VL-3B and 7B."""


@cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def plain_tiles(outputs: int, inputs: int, processors: int) -> tuple[Tiles, int]:
    """The tiles that keep most processors busy with one program each, and the number of parts."""

    def parts(tiles: Tiles) -> int:
        most = min(PARTS, triton.cdiv(inputs, tiles.depth))
        return max(1, min(most, processors // triton.cdiv(outputs, tiles.own)))

    tiles = max(PLAIN, key=lambda t: min(processors, triton.cdiv(outputs, t.own) * parts(t)))
    return tiles, parts(tiles)


def gated_tiles(outputs: int, processors: int) -> Tiles:
    """Two programs per processor with an equal number of outputs, as their sums are not shared; or
    larger ones, one after the other."""
    if (own := max(16, triton.cdiv(outputs, 2 * processors))) <= 64:
        return Tiles(own, 64, 64, 4, 4)
    rounds = triton.cdiv(outputs, 128 * processors)
    return Tiles(triton.cdiv(outputs, rounds * processors), 128, 64, 8, 5)


def projected(x: Tensor, weight: Tensor) -> Tensor:
    """(n, D) and (outputs, D) → (S, n, outputs) float32, whose sum over S is x weightᵀ."""
    outputs, inputs = weight.shape
    tiles, parts = plain_tiles(outputs, inputs, processors(x.device))
    out = x.new_empty(parts, len(x), outputs, dtype=torch.float32)
    _project(x, weight, out, outputs, tiles, parts, False)
    return out


def gated(x: Tensor, weight: Tensor) -> Tensor:
    """silu(x gateᵀ) · x upᵀ, (n, F), of the joint weight (2 F, D)."""
    outputs = len(weight) // 2
    out = x.new_empty(len(x), outputs)
    _project(x, weight, out, outputs, gated_tiles(outputs, processors(x.device)), 1, True)
    return out


def _project(
    x: Tensor, weight: Tensor, out: Tensor, outputs: int, tiles: Tiles, parts: int, is_gated: bool
) -> None:
    n, inputs = x.shape
    assert n <= ROWS and x.is_contiguous() and weight.is_contiguous()
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _projected[(triton.cdiv(outputs, tiles.own), parts)](
            x, weight, out, n, OUTPUTS=outputs, INPUTS=inputs, PARTS=parts, GATED=is_gated,
            OWN=tiles.own, TILE=tiles.tile, DEPTH=tiles.depth, ROWS=ROWS,
            STAGES=tiles.num_stages, num_warps=tiles.num_warps, launch_pdl=True,
        )  # fmt: skip


@triton.jit
def _block(place, at, rows, columns, ALL_ROWS: tl.constexpr, ALL_COLUMNS: tl.constexpr):
    """A block of a matrix; zeros for other rows and columns."""
    if ALL_ROWS and ALL_COLUMNS:
        return tl.load(place + at)
    if ALL_COLUMNS:
        return tl.load(place + at, rows[:, None], other=0.0)
    return tl.load(place + at, rows[:, None] & columns[None, :], other=0.0)


@triton.jit
def _projected(
    x, weight, out, n,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, PARTS: tl.constexpr, GATED: tl.constexpr,
    OWN: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One program per tile of outputs and part of the sum. The weight is the left matrix, whose
    rows fill the 64 that Hopper's instruction multiplies at once."""
    tile, part = tl.program_id(0), tl.program_id(1)
    BLOCKS: tl.constexpr = (INPUTS + DEPTH - 1) // DEPTH
    ALL_ROWS: tl.constexpr = OWN == TILE and OUTPUTS % TILE == 0
    ALL_COLUMNS: tl.constexpr = INPUTS % DEPTH == 0
    first, last = part * BLOCKS // PARTS, (part + 1) * BLOCKS // PARTS
    local = tl.arange(0, TILE)
    row = tile * OWN + local
    real = (local < OWN) & (row < OUTPUTS)
    sample = tl.arange(0, ROWS)
    column = tl.arange(0, DEPTH)
    weight_at = weight + row[:, None] * INPUTS + column[None, :]
    x_at = x + sample[:, None] * INPUTS + column[None, :]
    total = tl.zeros((TILE, ROWS), tl.float32)
    second = tl.zeros((TILE, ROWS), tl.float32)
    gdc_launch_dependents()
    gdc_wait()
    for block in tl.range(first, last, num_stages=STAGES):
        at = block * DEPTH
        inside = at + column < INPUTS
        values = tl.trans(_block(x_at, at, sample < n, inside, False, ALL_COLUMNS))
        left = _block(weight_at, at, real, inside, ALL_ROWS, ALL_COLUMNS)
        total = tl.dot(left, values, total)
        if GATED:
            up_at = weight_at + OUTPUTS * INPUTS
            left = _block(up_at, at, real, inside, ALL_ROWS, ALL_COLUMNS)
            second = tl.dot(left, values, second)
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * second
    place = (part * n + sample[:, None]) * OUTPUTS + row[None, :]
    inside = (sample < n)[:, None] & real[None, :]
    tl.store(out + place, tl.trans(total).to(out.dtype.element_ty), inside)


@triton.jit
def _summed(parts, stride, at, mask, PARTS: tl.constexpr):
    total = tl.load(parts + at, mask, other=0.0)
    for i in tl.static_range(1, PARTS):
        total += tl.load(parts + i * stride + at, mask, other=0.0)
    return total


def add_norm(x: Tensor, change: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Adds the sum of change (S, n, D), rounded to `dtype`, to x (n, D), and returns the RMSNorm of
    x in `dtype`."""
    parts, n, width = change.shape
    normed = x.new_empty(x.shape, dtype=dtype)
    with torch.cuda.device_of(x):
        _add_norm[(n,)](
            x, change, weight, normed, eps, n, WIDTH=width, PARTS=parts,
            COLUMNS=triton.next_power_of_2(width), num_warps=16, launch_pdl=True,
        )  # fmt: skip
    return normed


@triton.jit
def _add_norm(
    x, change, weight, normed, eps, n,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, COLUMNS)
    real = column < WIDTH
    at = tl.program_id(0) * WIDTH + column
    gdc_launch_dependents()
    gains = tl.load(weight + column, real, other=0.0).to(tl.float32)
    gdc_wait()
    total = _summed(change, n * WIDTH, at, real, PARTS).to(normed.dtype.element_ty)
    value = tl.load(x + at, real, other=0.0).to(tl.float32) + total.to(tl.float32)
    value = value.to(x.dtype.element_ty)
    tl.store(x + at, value, real)
    wide = value.to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    result = gains * wide.to(x.dtype.element_ty).to(tl.float32)
    tl.store(normed + at, result.to(normed.dtype.element_ty), real)


def attend(
    heads: Tensor,  # (S, n, (H + 2 G) d) parts of queries, keys and values
    bias: Tensor | None,  # ((H + 2 G) d,)
    norms: tuple[Tensor, Tensor] | None,  # (d,) gains of queries and keys, if they are normed
    eps: float,
    cos: Tensor,  # (n, d)
    sin: Tensor,
    keys: Tensor,  # (n, G, capacity, d); the new token is written after the past
    values: Tensor,
    lengths: Tensor,  # (n,) of the past
    scale: float,
) -> Tensor:
    """Attention from one new token per sequence to its past, (n, H d)."""
    parts, n, total = heads.shape
    groups, width = keys.shape[1], keys.shape[3]
    sharing = total // width // groups - 2
    out = keys.new_empty(n, groups * sharing * width)
    assert keys.stride() == values.stride() and keys.stride(3) == 1
    assert cos.is_contiguous() and sin.is_contiguous()
    gains = norms or (None, None)
    alone = n * groups <= processors(keys.device)  # one program per processor
    with torch.cuda.device_of(keys):
        _attend[(n, groups)](
            heads, bias, *gains, eps, cos, sin, keys, values, lengths, out,
            scale * 1.4426950408889634, n, *keys.stride()[:3],
            PARTS=parts, SHARING=sharing, GROUPS=groups, WIDTH=width, AT_ONCE=64,
            ROWS=max(16, triton.next_power_of_2(sharing)), STAGES=4 if alone else 3,
            num_warps=8 if alone else 4, launch_pdl=True,
        )  # fmt: skip
    return out


@triton.jit
def _rotated(
    heads, bias, gains, eps, at, partner, gain_at, partner_gain_at, inside, stride, c, s,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Heads (·, d) after bias, norm and rotation; `partner`: the numbers that each is rotated
    with."""
    x = _biased(heads, bias, at, inside, stride, PARTS, KIND)
    other = _biased(heads, bias, partner, inside, stride, PARTS, KIND)
    if gains is not None:
        factor = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / WIDTH + eps)
        x = (x * factor).to(KIND).to(tl.float32) * tl.load(gains + gain_at).to(tl.float32)
        other = (other * factor).to(KIND).to(tl.float32)
        other *= tl.load(gains + partner_gain_at).to(tl.float32)
    return (x * c + other * s).to(KIND)


@triton.jit
def _biased(heads, bias, at, inside, stride, PARTS: tl.constexpr, KIND: tl.constexpr):
    x = _summed(heads, stride, at, inside, PARTS)
    if bias is not None:
        x += tl.load(bias + at, inside, other=0.0).to(tl.float32)
    return x.to(KIND).to(tl.float32)


@triton.jit
def _attend(
    heads, bias, query_gains, key_gains, eps, cos, sin, keys, values, lengths, out, scale, n,
    cache_n, cache_g, cache_t,
    PARTS: tl.constexpr, SHARING: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, AT_ONCE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program per sequence and group. Softmax in base 2, `scale` includes log2(e); the new
    token is processed first, so that the running maximum is always finite.

    The new token is computed within the first iteration, which an idle slot has, too: Triton moves
    the loads of the first iterations to the front, so that past keys and values are loaded before
    `gdc_wait`."""
    KIND: tl.constexpr = keys.dtype.element_ty
    TOTAL: tl.constexpr = (SHARING + 2) * GROUPS * WIDTH
    sample = tl.program_id(0)
    group = tl.program_id(1)
    past = tl.load(lengths + sample).to(tl.int32)
    offset = sample.to(tl.int64) * cache_n + group * cache_g
    keys += offset
    values += offset
    heads += sample * TOTAL
    rows = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (rows < SHARING)[:, None]
    q = tl.zeros((ROWS, WIDTH), KIND)
    top = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    shares = tl.zeros((ROWS, AT_ONCE), tl.float32)  # summed over iterations
    output = tl.zeros((ROWS, WIDTH), tl.float32)
    gdc_launch_dependents()
    for start in tl.range(0, tl.maximum(past, 1), AT_ONCE, num_stages=STAGES):
        at = start + tl.arange(0, AT_ONCE)
        seen = (at < past)[:, None]
        place = at[:, None] * cache_t + column[None, :]
        key = tl.load(keys + place, seen, other=0.0)
        value = tl.load(values + place, seen, other=0.0)
        if start == 0:
            gdc_wait()
            partner = (column + WIDTH // 2) % WIDTH
            c = tl.load(cos + sample * WIDTH + column).to(tl.float32)[None, :]
            s = tl.load(sin + sample * WIDTH + column).to(tl.float32)[None, :]
            s *= tl.where(column < WIDTH // 2, -1.0, 1.0)[None, :]
            lead = ((group * SHARING + rows) * WIDTH)[:, None]
            q = _rotated(
                heads, bias, query_gains, eps, lead + column[None, :], lead + partner[None, :],
                column[None, :], partner[None, :], inside, n * TOTAL, c, s, PARTS, WIDTH, KIND,
            )  # fmt: skip
            one = tl.arange(0, 1)[:, None]  # a matrix of one row
            every = one == 0
            lead = (GROUPS * SHARING + group + one) * WIDTH
            k_new = _rotated(
                heads, bias, key_gains, eps, lead + column[None, :], lead + partner[None, :],
                column[None, :], partner[None, :], every, n * TOTAL, c, s, PARTS, WIDTH, KIND,
            )  # fmt: skip
            lead += GROUPS * WIDTH
            v_new = _biased(heads, bias, lead + column[None, :], every, n * TOTAL, PARTS, KIND)
            new = past * cache_t + column[None, :] + one
            tl.store(keys + new, k_new)
            tl.store(values + new, v_new.to(KIND))
            top = tl.sum(q.to(tl.float32) * k_new.to(tl.float32), 1) * scale
            total = tl.full((ROWS,), 1.0, tl.float32)
            output = tl.zeros((ROWS, WIDTH), tl.float32) + v_new
        score = tl.dot(q, tl.trans(key)) * scale
        score = tl.where((at < past)[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        share = tl.exp2(score - higher[:, None])
        fade = tl.exp2(top - higher)
        total *= fade
        shares = shares * fade[:, None] + share
        output = tl.dot(share.to(KIND), value, output * fade[:, None])
        top = higher
    output /= (total + tl.sum(shares, 1))[:, None]
    place = (sample * GROUPS * SHARING + group * SHARING + rows)[:, None] * WIDTH + column[None, :]
    tl.store(out + place, output.to(KIND), inside)

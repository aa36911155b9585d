"""Attention over packed sequences, registered as an attention function of transformers.

transformers' SDPA detects packed sequences by their positions and then masks a dense T × T matrix:
it computes every pair of tokens of different samples. Here every sequence attends only to itself:
packing adds no cost, and no information leaks between sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gesso.devices import to_device
from gesso.models.tokens.repeating import Repeats

NAME = "gesso"
WINDOWS = "gesso_flash"
"""Vision towers pass all their windows to an attention function with "flash" in its name, and loop
over the windows for any other."""
SEGMENTS = 64
"""The number of segments is padded to a multiple of this, with empty segments."""


def register() -> str:
    """Registers both functions in transformers; returns the name for `attn_implementation`."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    AttentionInterface.register(WINDOWS, attend_windows)
    return NAME


Trees = Sequence[Sequence[int]]
"""Lengths of packed prompts, each followed by the lengths of its responses."""


def segments_of(trees: Trees, device: torch.device, dtype: torch.dtype) -> Segments:
    """The prompts and responses of one pass, in the fastest layout for this device."""
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        return Flat.of(trees, device, dtype)
    return Groups.of(trees, device)


@dataclass(frozen=True)
class Flat:
    """Offsets of the queries and keys of each segment. The keys of a response are those of its
    prompt and of the response itself.

    Maximum lengths and the number of segments are rounded up: values that change from pass to pass
    would cause recompilation."""

    queries: Tensor  # (segments + 1,) int32
    keys: Tensor
    repeats: Repeats  # of tokens as keys of all segments
    most_queries: int  # per segment
    most_keys: int
    dtype: torch.dtype  # half precision; under autocast some inputs are float32

    @staticmethod
    def of(trees: Trees, device: torch.device, dtype: torch.dtype) -> Flat:
        queries, keys, tokens, start = [0], [0], [], 0
        for tree in trees:
            prompt = torch.arange(start, start + tree[0])
            for i, length in enumerate(tree):
                if not length:
                    continue
                response = torch.arange(start, start + length)
                seen = torch.cat([prompt, response]) if i else response
                queries.append(queries[-1] + length)
                keys.append(keys[-1] + len(seen))
                tokens.append(seen)
                start += length
        most = [max(length for tree in trees for length in tree), max(map(len, tokens))]
        for ends in (queries, keys):
            ends += [ends[-1]] * (-len(ends) % SEGMENTS)
        starts = to_device(torch.tensor([queries, keys], dtype=torch.int32), device)
        most_queries, most_keys = (-(-n // 256) * 256 for n in most)
        repeats = Repeats.of(to_device(torch.cat(tokens), device), start)
        return Flat(starts[0], starts[1], repeats, most_queries, most_keys, dtype)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        q, k, v = (t[0].transpose(0, 1).to(self.dtype) for t in (query, key, value))  # (T, h, d)
        starts = self.queries, self.keys, self.most_queries, self.most_keys
        return _flash(q, self.repeats(k), self.repeats(v), *starts, True, scaling)[None]


@dataclass(frozen=True)
class Groups:
    """Segments of similar shape share one call. Shorter ones are padded at their ends, which causal
    attention ignores, to less than twice their length."""

    shapes: Sequence[tuple[int, int, int]]  # per group: segments, queries and keys of a segment
    queries: Tensor  # token index of each query, group after group
    keys: Tensor  # token index of each key; a response has the keys of its prompt and itself
    places: Tensor  # (T,) index of each token among the queries

    @staticmethod
    def of(trees: Trees, device: torch.device) -> Groups:
        groups: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        start = 0
        for tree in trees:
            first = start  # of the prompt
            for i, length in enumerate(tree):
                past = tree[0] if i else 0
                if length:
                    alike = groups.setdefault((past, length.bit_length()), [])
                    alike.append((first, start, length))
                start += length
        shapes, queries, keys, places, before = [], [], [], torch.empty(start, dtype=torch.long), 0
        for (past, _), segments in groups.items():
            new = max(length for _, _, length in segments)
            shapes.append((len(segments), new, past + new))
            for prompt, begin, length in segments:
                filled = begin + torch.arange(new).clamp(max=length - 1)
                queries.append(filled)
                keys += [prompt + torch.arange(past), filled]
                places[begin : begin + length] = before + torch.arange(length)
                before += new
        index = [torch.cat(queries), torch.cat(keys), places]
        return Groups(shapes, *(i.to(device) for i in index))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))  # (T, heads, d)
        new = [n * queries for n, queries, _ in self.shapes]
        seen = [n * keys for n, _, keys in self.shapes]
        laid = q[self.queries].split(new), k[self.keys].split(seen), v[self.keys].split(seen)
        out = []
        for (n, _, _), *parts in zip(self.shapes, *laid, strict=True):
            q, k, v = (t.unflatten(0, (n, -1)).transpose(1, 2) for t in parts)  # (n, heads, ·, d)
            out.append(_causal(q, k, v, scaling).transpose(1, 2).flatten(0, 1))
        return torch.cat(out)[self.places][None]


Segments = Flat | Groups


def attend(
    module: torch.nn.Module,
    query: Tensor,  # (n, heads, q, d)
    key: Tensor,  # (n, groups, k, d): a group of heads shares keys and values
    value: Tensor,
    attention_mask: Tensor | None,  # (n, 1, 1, k) bool
    scaling: float | None = None,
    segments: Segments | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each prompt, and from each response to its prompt and itself;
    without segments, from one new token per row to its unmasked past. A prompt is passed once for
    all of its responses."""
    if segments is None:
        return _one_token(query, key, value, attention_mask, scaling), None
    return segments.attend(query, key, value, scaling), None


def attend_windows(
    module: torch.nn.Module,
    query: Tensor,  # (1, heads, T, d)
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention from every token of an image to its window."""
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    at, most = cu_seq_lens_q.to(torch.int32), int(max_length_q)
    return _flash(q, k, v, at, at, most, most, False, scaling)[None], None


def _flash(
    query: Tensor,  # (T, heads, d)
    key: Tensor,
    value: Tensor,
    queries: Tensor,
    keys: Tensor,
    most_queries: int,
    most_keys: int,
    causal: bool,
    scaling: float | None,
) -> Tensor:
    """Torch's flash attention over segments. If causal, the last key of a segment belongs to its
    last query."""
    starts = queries, keys, most_queries, most_keys
    outputs = torch.ops.aten._flash_attention_forward(
        query, key, value, *starts, 0.0, causal, False, scale=scaling
    )
    return outputs[0]


def _causal(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """The queries are the last tokens of the keys."""
    new, past = query.shape[2], key.shape[2] - query.shape[2]
    mask = None
    if past and new > 1:
        mask = torch.ones(new, past + new, dtype=torch.bool, device=query.device).tril(past)
    return torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=not past,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _one_token(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """The heads of a group become queries to the same keys, which need not be repeated."""
    n, heads, length, d = query.shape
    if mask is None or length != 1:
        raise ValueError(
            "a model loaded by Gesso was called directly; to use it outside of Gesso, load the "
            "folder with transformers' Auto classes"
        )
    grouped = query.reshape(n, key.shape[1], -1, d)
    out = torch.nn.functional.scaled_dot_product_attention(
        grouped, key, value, attn_mask=mask, scale=scaling
    )
    return out.reshape(n, 1, heads, d)

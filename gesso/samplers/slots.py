"""Keys and values of sequences of different lengths, each in a slot of its own: a cache for
transformers' decoders, through its own extension point for cache layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from gesso.models.tokens.base import Read


class Place:
    """Where the next token of every running sequence goes, for all layers at once."""

    def __init__(self, slots: int, capacity: int, device: torch.device) -> None:
        self.lengths = torch.zeros(slots, dtype=torch.long, device=device)
        self.rows = torch.arange(slots, device=device)
        self.columns = torch.arange(capacity, device=device)
        self.running = slots  # only the first so many slots take part in a step,
        self.reach = capacity  # and only so many columns of them

    @property
    def mask(self) -> Tensor:
        """(running, reach) bool: the past of each sequence, and the token that is being added."""
        return self.columns[: self.reach] <= self.lengths[: self.running, None]


class SlotLayer(CacheLayerMixin):
    """Buffers of fixed size, (slots, heads, capacity, head width), and a write position a slot.
    They start as zeros: what a mask hides must still be a number."""

    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor, place: Place) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.place = place
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("made with its buffers")

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """One token a running slot: (running, heads, 1, head width) → all that the mask covers."""
        keys, values, at = self.past
        rows = self.place.rows[: len(at)]
        keys[rows, :, at] = key_states[:, :, 0].to(keys.dtype)
        values[rows, :, at] = value_states[:, :, 0].to(values.dtype)
        return keys, values

    @property
    def past(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of the running slots: keys, values and lengths, as far as a step reads."""
        n, reach = self.place.running, self.place.reach
        return self.keys[:n, :, :reach], self.values[:n, :, :reach], self.place.lengths[:n]

    def get_seq_length(self) -> int:
        return self.place.reach

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.place.reach, 0

    def get_max_length(self) -> int:
        return len(self.place.columns)


class SlotCache(Cache):
    """A `SlotLayer` a layer, all of them parts of two buffers (layers, slots, heads, capacity, head
    width). Slots are filled from prompts that were read, and moved."""

    def __init__(self, like: Read, slots: int, capacity: int) -> None:
        self.place = Place(slots, capacity, like.state.device)

        def buffer(like: Sequence[Tensor]) -> Tensor:
            heads, _, width = like[0].shape
            return like[0].new_zeros(len(like), slots, heads, capacity, width)

        self.keys, self.values = buffer(like.keys), buffer(like.values)
        pairs = zip(self.keys, self.values, strict=True)
        super().__init__(layers=[SlotLayer(k, v, self.place) for k, v in pairs])

    def fill(self, slots: Sequence[int], prompt: Read) -> None:
        """Copy a prompt into those slots."""
        length = prompt.keys[0].shape[1]
        chosen = torch.tensor(slots, device=prompt.state.device)
        self.keys[:, chosen, :, :length] = torch.stack(list(prompt.keys))[:, None]
        self.values[:, chosen, :, :length] = torch.stack(list(prompt.values))[:, None]
        self.place.lengths[chosen] = length

    def move(self, source: int, target: int) -> None:
        length = int(self.place.lengths[source])
        self.keys[:, target, :, :length] = self.keys[:, source, :, :length]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]
        self.place.lengths[target] = self.place.lengths[source]

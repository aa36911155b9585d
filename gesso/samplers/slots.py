"""A key-value cache for transformers' decoders with one slot per sequence, for sequences of
different lengths. It uses transformers' extension point for cache layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from gesso.models.tokens.base import PrefilledPrompt


class Place:
    """Write positions of all running sequences, shared by all layers."""

    def __init__(self, slots: int, capacity: int, device: torch.device) -> None:
        self.lengths = torch.zeros(slots, dtype=torch.long, device=device)
        self.rows = torch.arange(slots, device=device)
        self.columns = torch.arange(capacity, device=device)
        self.running = slots  # number of slots, from the first, that a step runs
        self.reach = capacity  # number of columns that a step reads

    @property
    def mask(self) -> Tensor:
        """(running, reach) bool: the past of each sequence and the token being added."""
        return self.columns[: self.reach] <= self.lengths[: self.running, None]


class SlotLayer(CacheLayerMixin):
    """Buffers of fixed size, (slots, heads, capacity, head width), and a write position per slot.
    They are initialised to zeros, since masked entries must be finite, too."""

    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor, place: Place) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.place = place
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("the buffers are allocated in __init__")

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Adds one token per running slot, (running, heads, 1, head width); returns the keys and
        values that the mask covers."""
        keys, values, at = self.past
        rows = self.place.rows[: len(at)]
        keys[rows, :, at] = key_states[:, :, 0].to(keys.dtype)
        values[rows, :, at] = value_states[:, :, 0].to(values.dtype)
        return keys, values

    @property
    def past(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and lengths of the running slots, up to `reach`."""
        n, reach = self.place.running, self.place.reach
        return self.keys[:n, :, :reach], self.values[:n, :, :reach], self.place.lengths[:n]

    def get_seq_length(self) -> int:
        return self.place.reach

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.place.reach, 0

    def get_max_length(self) -> int:
        return len(self.place.columns)


class SlotCache(Cache):
    """One `SlotLayer` per layer, views of two buffers (layers, slots, heads, capacity, head width).
    Slots can be filled from prefilled prompts, and moved."""

    def __init__(self, like: PrefilledPrompt, slots: int, capacity: int) -> None:
        self.place = Place(slots, capacity, like.state.device)

        def buffer(like: Sequence[Tensor]) -> Tensor:
            heads, _, width = like[0].shape
            return like[0].new_zeros(len(like), slots, heads, capacity, width)

        self.keys, self.values = buffer(like.keys), buffer(like.values)
        pairs = zip(self.keys, self.values, strict=True)
        super().__init__(layers=[SlotLayer(k, v, self.place) for k, v in pairs])

    def fill(self, slots: Sequence[int], prompt: PrefilledPrompt) -> None:
        """Copies a prompt into these slots."""
        length = prompt.keys[0].shape[1]
        index = torch.tensor(slots, device=prompt.state.device)
        self.keys[:, index, :, :length] = torch.stack(list(prompt.keys))[:, None]
        self.values[:, index, :, :length] = torch.stack(list(prompt.values))[:, None]
        self.place.lengths[index] = length

    def move(self, source: int, target: int) -> None:
        length = int(self.place.lengths[source])
        self.keys[:, target, :, :length] = self.keys[:, source, :, :length]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]
        self.place.lengths[target] = self.place.lengths[source]

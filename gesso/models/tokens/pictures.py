"""What a frozen vision tower made of pictures, kept so that it sees each of them once."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable

from torch import Tensor


class Seen:
    """Features by a picture's content, on the CPU up to `limit` bytes; those used longest ago go
    first. Sampling, old, reference and update passes share them."""

    def __init__(self, limit: int = 4 * 2**30) -> None:
        self.limit = limit
        self._bytes = 0
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()

    def features(self, pixels: Tensor, grid: Tensor, see: Callable[[], Tensor]) -> Tensor:
        key = _digest(pixels, grid)
        if key not in self._kept:
            self._kept[key] = see().cpu()
            self._bytes += self._kept[key].nbytes
        self._kept.move_to_end(key)
        found = self._kept[key]
        while self._bytes > self.limit and len(self._kept) > 1:
            self._bytes -= self._kept.popitem(last=False)[1].nbytes
        return found


def _digest(pixels: Tensor, grid: Tensor) -> bytes:
    """Of a picture as the image processor left it; the same patches in another shape differ."""
    digest = hashlib.blake2b(str(grid.tolist()).encode(), digest_size=16)
    digest.update(pixels.contiguous().numpy().data)
    return digest.digest()

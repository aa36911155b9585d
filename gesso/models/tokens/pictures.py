"""What a frozen vision tower made of pictures, kept so that it sees each of them once."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gesso.rollout import TokenPrompt


class Seen:
    """Features by a picture's content, on the CPU up to `limit` bytes; those used longest ago go
    first. Sampling, old, reference and update passes share them."""

    def __init__(self, limit: int = 4 * 2**30) -> None:
        self.limit = limit
        self._bytes = 0
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self._keys = WeakTensorKeyDictionary()  # a prompt's pixels → keys of its pictures

    def __contains__(self, key: bytes) -> bool:
        return key in self._kept

    def features(self, key: bytes, see: Callable[[], Tensor]) -> Tensor:
        if key not in self._kept:
            self.keep(key, see())
        self._kept.move_to_end(key)
        return self._kept[key]

    def keep(self, key: bytes, features: Tensor) -> None:
        self._kept[key] = features.cpu()
        self._bytes += self._kept[key].nbytes
        while self._bytes > self.limit and len(self._kept) > 1:
            self._bytes -= self._kept.popitem(last=False)[1].nbytes

    def keys(self, prompt: TokenPrompt) -> list[bytes]:
        """Of its pictures. Megabytes are digested for each, so a prompt is asked once."""
        if prompt.pixels not in self._keys:
            pictures = pictures_of(prompt)
            self._keys[prompt.pixels] = [_digest(pixels, grid) for pixels, grid in pictures]
        return self._keys[prompt.pixels]


def pictures_of(prompt: TokenPrompt) -> list[tuple[Tensor, Tensor]]:
    """Patches (P, values) and grid (3,) of each."""
    assert prompt.pixels is not None and prompt.grid is not None
    patches = prompt.pixels.split(prompt.grid.prod(-1).tolist())
    return list(zip(patches, prompt.grid, strict=True))


def _digest(pixels: Tensor, grid: Tensor) -> bytes:
    """Of a picture as the image processor left it; the same patches in another shape differ."""
    digest = hashlib.blake2b(str(grid.tolist()).encode(), digest_size=16)
    digest.update(pixels.contiguous().numpy().data)
    return digest.digest()

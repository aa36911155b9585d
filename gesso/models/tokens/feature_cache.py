"""Caches the features of a frozen vision tower, so that it encodes each image once."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gesso.traces.tokens import TokenPrompt


class FeatureCache:
    """Features by image content, on the CPU up to `limit` bytes; the least recently used are
    evicted first. Sampling, old, reference and update passes share them."""

    def __init__(self, limit: int = 4 * 2**30) -> None:
        self.limit = limit
        self._bytes = 0
        self._features: OrderedDict[bytes, Tensor] = OrderedDict()
        self._keys = WeakTensorKeyDictionary()  # a prompt's pixels → keys of its images

    def __contains__(self, key: bytes) -> bool:
        return key in self._features

    def features(self, key: bytes, encode: Callable[[], Tensor]) -> Tensor:
        if key not in self._features:
            self.add(key, encode())
        self._features.move_to_end(key)
        return self._features[key]

    def known(self, prompts: Iterable[TokenPrompt]) -> dict[str, Tensor]:
        """Cached features of the images of these prompts, by their keys as text."""
        keys = {key for prompt in prompts if prompt.grid is not None for key in self.keys(prompt)}
        return {key.hex(): self._features[key] for key in keys if key in self._features}

    def add_known(self, features: Mapping[str, Tensor]) -> None:
        """Those that another process has encoded."""
        for text, found in features.items():
            if (key := bytes.fromhex(text)) not in self._features:
                self.add(key, found)

    def add(self, key: bytes, features: Tensor) -> None:
        self._features[key] = features.cpu()
        self._bytes += self._features[key].nbytes
        while self._bytes > self.limit and len(self._features) > 1:
            self._bytes -= self._features.popitem(last=False)[1].nbytes

    def hash_new(self, prompts: Iterable[TokenPrompt]) -> None:
        """Computes the keys of the prompts that have none, in threads."""
        new = [prompt for prompt in prompts if prompt.pixels not in self._keys]
        if len(new) > 1:
            with ThreadPoolExecutor() as pool:
                list(pool.map(self.keys, new))

    def keys(self, prompt: TokenPrompt) -> list[bytes]:
        """Keys of the prompt's images. Hashing reads megabytes, so it is done once per prompt."""
        if prompt.pixels not in self._keys:
            images = images_of(prompt)
            self._keys[prompt.pixels] = [_digest(pixels, grid) for pixels, grid in images]
        return self._keys[prompt.pixels]


def images_of(prompt: TokenPrompt) -> list[tuple[Tensor, Tensor]]:
    """Patches (P, values) and grid (3,) of each image."""
    assert prompt.pixels is not None and prompt.grid is not None
    patches = prompt.pixels.split(prompt.grid.prod(-1).tolist())
    return list(zip(patches, prompt.grid, strict=True))


def _digest(pixels: Tensor, grid: Tensor) -> bytes:
    """Digest of an image after the image processor; the grid is included, so that the same patches
    in another shape differ."""
    digest = hashlib.blake2b(str(grid.tolist()).encode(), digest_size=16)
    digest.update(pixels.contiguous().numpy().data)
    return digest.digest()

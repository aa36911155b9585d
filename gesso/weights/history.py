"""Earlier versions of the weights, from which batches in flight were sampled.

With `lag = k`, batch i is sampled with version i − k. After a resume the batches that were in
flight at the checkpoint are sampled again, so it contains the last k versions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from gesso.types import Weights, Which
from gesso.weights.publish import Publication, Readable

PREFIX = "sent."  # of the tables in a checkpoint: "sent.VERSION.WHICH/NAME"


class History:
    def __init__(self, lag: int) -> None:
        self.lag = lag
        self._versions: dict[int, dict[Which, dict[str, Tensor]]] = {}  # in host memory

    def add(self, publication: Publication, which: Collection[Which]) -> None:
        """`which`: the copies that batches are sampled with; none: it is not a new version."""
        if not self.lag or not which:
            return
        newest = publication.version
        self._versions[newest] = {name: _copied(publication.copies[name]) for name in which}
        for version in [v for v in self._versions if not newest - self.lag <= v <= newest]:
            del self._versions[version]

    def exchange(self, policy: Readable, version: int) -> bool:
        """Exchanges these values with those of the policy; a second call undoes it. False: this
        version was not kept."""
        if version not in self._versions:
            return False
        with torch.no_grad():
            for which, tensors in self._versions[version].items():
                for name, live in policy.tensors(which).items():
                    held = live.detach().clone()
                    live.copy_(tensors[name])
                    tensors[name].copy_(held)
        return True

    def state(self) -> dict[str, Tensor]:
        """All but the newest version, which is that of the learner."""
        newest = max(self._versions, default=0)
        return {
            f"{PREFIX}{version}.{which}/{name}": tensor
            for version, copies in self._versions.items()
            if version < newest
            for which, tensors in copies.items()
            for name, tensor in tensors.items()
        }

    def restore(
        self, state: dict[str, Tensor], restore: Callable[[dict[str, Tensor]], None]
    ) -> None:
        """Its part of a checkpoint; `restore` gets the rest first, and may raise."""
        restore({key: tensor for key, tensor in state.items() if not key.startswith(PREFIX)})
        versions: dict[int, dict[Which, dict[str, Tensor]]] = defaultdict(dict)
        for key in [key for key in state if key.startswith(PREFIX)]:
            table, _, name = key.removeprefix(PREFIX).partition("/")
            version, _, which = table.partition(".")
            copies: dict = versions[int(version)]
            copies.setdefault(which, {})[name] = state[key]
        self._versions = dict(versions)


def _copied(weights: Weights) -> dict[str, Tensor]:
    return {
        name: tensor.detach().clone() if tensor.device.type == "cpu" else tensor.detach().cpu()
        for name, tensor in weights.items()
    }

"""The part of a worker that writes and reads checkpoints."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import Tensor

from gesso.cluster.copies import Copies
from gesso.config import Recipe
from gesso.learner.learner import EXTRA, Learner
from gesso.ranks import Group
from gesso.track.checkpoints import (
    on_host,
    read_parts,
    read_tensors,
    write_shards,
    write_tensors,
)
from gesso.track.writing import InBackground
from gesso.weights.history import History


class Saving:
    recipe: Recipe
    rank: int
    group: Group
    model: Any
    learner: Learner
    history: History
    writers: Any  # a process group; None if the first rank writes everything
    writing: InBackground[dict[str, dict[str, str]]]  # the newest checkpoint

    @cached_property
    def copies(self) -> Copies:
        return Copies()

    def sees(self, file: str) -> dict[str, Any]:
        return {"sees": os.path.exists(file)}

    def copy(self, *data: bytes, do: str, **about: Any) -> dict[str, Any]:
        return getattr(self.copies, do)(*data, **about)

    def save(self, folder: str, copied: bool) -> dict[str, Any]:
        """Rank 0 writes the tensors; if they are sharded, every rank writes its part. `copied`:
        into a folder on this machine, from which the driver copies them."""
        path = self.copies.path(folder) if copied else Path(folder)
        self.learner.policy.release()
        state = self.learner.state() | self.history.state()
        state = state if self.learner.sharded or self.rank == 0 else {}
        if self.recipe.save.in_background(self.model.device.type):
            self.writing = InBackground(partial(self._write, path, on_host(state)))
        else:
            self.writing = InBackground(partial(self._write, path, state))
            self.writing.wait()  # errors are raised by `written`
        return {}

    def _write(self, folder: Path, state: Mapping[str, Tensor]) -> dict[str, dict[str, str]]:
        if self.learner.sharded:
            return write_shards(folder, state, self.rank, self.group.count, self.writers)
        if self.rank == 0:
            try:
                write_tensors(folder, state)
            except BaseException:  # a copy would keep the disk full
                shutil.rmtree(folder, ignore_errors=True)
                raise
        return {}

    def written(self, wait: bool) -> dict[str, Any]:
        """Raises errors of writing only if `wait` is set."""
        if not wait:
            return {"done": self.writing.done()}
        try:
            return {"shards": self.writing.result()}
        except BaseException as error:  # torch and safetensors wrap a full disk in their own errors
            reason = str(error).strip().splitlines() or [repr(error)]
            raise OSError(reason[-1].strip()) from error

    def load(self, folder: str, copied: bool) -> dict[str, Any]:
        self.learner.policy.release()
        with self._checkpoint(folder, copied) as path:
            sharded = self.learner.sharded
            state = self._read(path) if sharded else read_tensors(path)
            self.history.restore(state, self.learner.restore)
        return {}

    @contextmanager
    def _checkpoint(self, folder: str, copied: bool) -> Iterator[Path]:
        """The driver's folder, or its copy on this machine."""
        yield self.copies.path(folder) if copied else Path(folder)
        if copied:
            self.copies.discard(folder)

    def _read(self, folder: Path, table: str = "") -> dict[str, Tensor]:
        """The tensors of a checkpoint; of sharded tensors, this rank's part."""

        def sharded(name: str) -> Tensor | None:
            table, _, parameter = name.partition("/")
            return None if table == EXTRA else self.learner.sharded.get(parameter)

        return read_parts(folder, sharded, self.rank, self.group.count, table)

    def use(
        self, folder: str | None, table: str, base: bool, copied: bool = False
    ) -> dict[str, Any]:
        """Samples with these weights of a checkpoint instead of those of the base model. `base`:
        keeps the latter as "reference"."""
        policy = self.learner.policy
        if base:
            policy.snapshot("reference")
        if folder is not None:
            with self._checkpoint(folder, copied) as path:
                state = self._read(path, f"{table}/")
            policy.load({name.partition("/")[2]: tensor for name, tensor in state.items()})
        return {}

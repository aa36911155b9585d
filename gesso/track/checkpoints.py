"""Checkpoints of a run: saved atomically, verified when they are read.

checkpoints/000010/learner.safetensors    tensors by name, or one file per rank (shards.py)
checkpoints/000010/state.json             step, seed, data, ranks, and digests of the content

A snapshot is a checkpoint that the next one replaces ("snapshot" in state.json).

A tensor's name is "table/name". state.json has a digest of every table ("tables"), or with several
files of every table in each ("shards"), so that a single table can be read and verified without the
others, and a digest of everything else in state.json.
Checkpoints of earlier versions have no digests; only their types and step are checked.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gesso.track import shards
from gesso.track.atomic import flush, write_atomic
from gesso.track.figures import parsed, short
from gesso.track.writing import WRITTEN, Unfinished, Write, Writing
from gesso.types import StopRun, UserError, WorkerLost, out_of_memory

if TYPE_CHECKING:
    from torch import Tensor

NAME = re.compile(r"[0-9]{6,12}")  # str.isdigit() accepts digits of other scripts, too
STATE = "state.json"
TEMPORARY = ".saving-"
DIGESTS = "digests.json"  # in the temporary folder only
DIGESTED = ("tables", "shards")
KINDS = {"step": int, "seed": int, "data": str, "ranks": int, "digest": str}
KINDS |= dict.fromkeys((*DIGESTED, "curriculum"), dict) | {"snapshot": bool}
WORDS = {int: "an integer", str: "a string", dict: "an object", bool: "true or false"}
EMPTY = "it is empty"
NONE_LEFT = (
    "there is no earlier complete checkpoint; restore the file from a backup, or start the run "
    "again in a new folder"
)
THREADS = 8  # maximum number of threads that hash large tensors
LARGE = 2**20  # bytes; to hash a smaller tensor takes less time than to pass it to a thread


class _Damaged(Exception):
    """The message names the file and the damage."""


class Checkpoints:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        return sorted(int(path.name) for path in self._named() if not _lacks(path))

    def left_out(self, after: int) -> list[str]:
        """Messages about later entries that are named like a checkpoint but are not complete; empty
        folders are ignored."""
        odd = {path: _lacks(path) for path in sorted(self._named()) if int(path.name) > after}
        reasons = {path: reason for path, reason in odd.items() if reason not in ("", EMPTY)}
        return [f"{path} is not a complete checkpoint: {why}" for path, why in reasons.items()]

    def path(self, step: int) -> Path:
        return self.folder / f"{step:06d}"

    def save(self, step: int, write: Write, about: Mapping[str, Any], keep: int) -> None:
        self.begin(step, write, about, keep).finish()

    def begin(self, step: int, write: Write, about: Mapping[str, Any], keep: int) -> Unfinished:
        """`write` writes the tensors to a temporary folder with `write_tensors`, or begins to."""
        temporary = self._temporary(step)
        with self._saving(step):
            for left in self.folder.glob(f"{TEMPORARY}*"):  # by a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            temporary.mkdir(parents=True)
            writing = write(temporary) or WRITTEN
        return Unfinished(writing, partial(self._complete, step, writing, about, keep))

    def _complete(self, step: int, writing: Writing, about: Mapping[str, Any], keep: int) -> None:
        """After the tensors state.json is written, then the folder is renamed. Earlier snapshots,
        and the oldest checkpoints beyond `keep`, are deleted after the new one is complete."""
        temporary = self._temporary(step)
        with self._saving(step):
            writing.finish()
            state = sealed({"step": step, **about, **_take_digests(temporary)})
            write_atomic(temporary / STATE, json.dumps(state).encode())
            self._rename(temporary, self.path(step))
        snapshots = [old for old in self.steps() if self._is_snapshot(old)]
        others = [old for old in self.steps() if old not in snapshots]
        for old in [*(old for old in snapshots if old < step), *others[:-keep]]:
            if not self.path(old).is_symlink():  # a link was created by the user
                shutil.rmtree(self.path(old))

    def _is_snapshot(self, step: int) -> bool:
        try:
            return _state(self.path(step) / STATE, step).get("snapshot", False)
        except _Damaged:
            return False

    def _temporary(self, step: int) -> Path:
        return self.folder / f"{TEMPORARY}{step:06d}"

    @contextmanager
    def _saving(self, step: int) -> Iterator[None]:
        temporary = self._temporary(step)
        try:
            yield
        except Exception as error:  # safetensors wraps a full disk in another error type
            shutil.rmtree(temporary, ignore_errors=True)
            if out_of_memory(error) or isinstance(error, WorkerLost):
                raise
            steps = self.steps()
            raise StopRun(
                f"could not save the checkpoint of step {step} in {self.folder}: {error}; "
                f"the last complete checkpoint is {f'step {steps[-1]}' if steps else 'none'}; "
                f"free disk space and run `gesso train --resume {self.folder.parent}`"
            ) from error

    def _rename(self, temporary: Path, final: Path) -> None:
        """`final` is never a partly deleted folder. Anything that is not a complete checkpoint is
        renamed, not deleted."""
        old = self.folder / f".old-{final.name}"
        shutil.rmtree(old, ignore_errors=True)
        if not _lacks(final):
            os.replace(final, old)
        elif os.path.lexists(final):
            os.replace(final, self.folder / f"{final.name}.incomplete")
        os.replace(temporary, final)
        shutil.rmtree(old, ignore_errors=True)
        flush(self.folder)

    def load(self, step: int, table: str = "") -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors whose names begin with `table` ("ema/"; "" for all), and `meta`. A damaged
        checkpoint raises a UserError that suggests another one."""
        try:
            return self._verified(step, table)
        except _Damaged as error:
            advice = self._others(step) if table else self.remedy(step)
            raise UserError(f"{error}; {advice}") from error

    def meta(self, step: int) -> dict[str, Any]:
        """Contents of state.json, with "verified" (whether it has digests) instead of digests."""
        try:
            state = _state(self.path(step) / STATE, step)
        except _Damaged as error:
            raise UserError(f"{error}; {self.remedy(step)}") from error
        return _without_digests(state)

    def remedy(self, before: int) -> str:
        """Advice on resuming the run from an undamaged checkpoint before this step."""
        steps = self.steps()
        last = max((step for step in steps if step < before and self._opens(step)), default=None)
        if last is None:
            return NONE_LEFT
        later = [f"{step:06d}" for step in steps if step > last]
        which = f"folder {self.folder / later[0]}"
        if len(later) > 1:
            which = f"folders {', '.join(later)} in {self.folder}"
        return f"delete the {which} to resume from step {last}"

    def _others(self, damaged: int) -> str:
        """Advice on which checkpoints can be read instead."""
        good = [step for step in self.steps() if step != damaged and self._opens(step)]
        if not good:
            return NONE_LEFT
        return f"choose another step: {', '.join(map(str, good))} (--step {good[-1]})"

    def _opens(self, step: int) -> bool:
        """Whether state.json is valid and the header of the tensors can be read."""
        try:
            self._verified(step, "optimizer_steps")
        except _Damaged:
            return False
        return True

    def _verified(self, step: int, table: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        folder = self.path(step)
        state = _state(folder / STATE, step)
        ranks = state.get("ranks")
        file = folder / (shards.ONE if ranks is None else "*.safetensors")
        _check_shards(folder, state, table)
        with _reading(file):
            tensors = shards.read(folder, ranks, table)
        if "tables" in state:
            _compare(file, digests(tensors), state["tables"], table)
        return tensors, _without_digests(state)

    def _named(self) -> list[Path]:
        """Entries that are named like a checkpoint."""
        if not os.path.lexists(self.folder):
            return []
        try:
            names = [name for name in os.listdir(self.folder) if NAME.fullmatch(name)]
        except OSError as error:  # a file, a broken link, or no permission
            raise UserError(
                f"{self.folder} cannot be read: {error.strerror}; expected the checkpoint folder "
                "of the run; restore it"
            ) from error
        return [self.folder / name for name in names if name == f"{int(name):06d}"]


def _check_shards(
    folder: Path, state: Mapping[str, Any], table: str = "", rank: int = 0, ranks: int = 1
) -> None:
    """Compares the files of several ranks with their digests, one of `ranks` parts of the files."""
    for name, expected in sorted(state.get("shards", {}).items())[rank::ranks]:
        with _reading(folder / name):
            computed = digests(shards.read_file(folder / name, table))
        _compare(folder / name, computed, expected, table)


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # safetensors has a separate error type
        if out_of_memory(error):
            raise
        raise _Damaged(f"{file} cannot be read: {_first_line(error)}") from error


def _compare(
    file: Path, computed: Mapping[str, str], expected: Mapping[str, str], table: str
) -> None:
    selected = {table.removesuffix("/")} & expected.keys() if table else expected.keys()
    for name in sorted(selected | computed.keys()):
        if problem := _problem(computed.get(name), expected.get(name)):
            raise _Damaged(f"{file} is damaged: the table {short(name)} {problem}")


def write_tensors(folder: Path, state: Mapping[str, Tensor]) -> None:
    """Writes the tensors of a checkpoint, by "table/name", and their digests, which
    `Checkpoints.save` moves to state.json."""
    from safetensors.torch import save_file

    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    with ThreadPoolExecutor(1) as pool:
        tables = pool.submit(digests, on_cpu)  # while the file is written
        save_file(on_cpu, folder / shards.ONE)
        flush(folder / shards.ONE)
    _write_digests(folder, {"tables": tables.result()})


def on_host(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy in host memory, to be written while the original changes."""
    return {
        name: tensor.detach().clone() if tensor.device.type == "cpu" else tensor.detach().cpu()
        for name, tensor in state.items()
    }


def write_shards(
    folder: Path, state: Mapping[str, Tensor], rank: int, ranks: int, group: Any = None
) -> dict[str, dict[str, str]]:
    """Every rank writes its parts of sharded tensors. Returns the digests of some of the files, for
    `record_shards`. `group`: as in `shards.write`."""
    shards.write(folder, state, group)
    found = {}
    for file in shards.files(folder)[rank::ranks]:
        flush(file)
        found[file.name] = digests(shards.read_file(file))
    return found


def record_shards(folder: Path, found: Mapping[str, Mapping[str, str]]) -> None:
    """The digests of all files that ranks have written."""
    _write_digests(folder, {"shards": dict(found), "ranks": len(found)})


def _write_digests(folder: Path, content: Mapping[str, Any]) -> None:
    (folder / DIGESTS).write_text(json.dumps(content), "utf-8")


def read_tensors(folder: Path, table: str = "") -> dict[str, Tensor]:
    """The verified tensors of a checkpoint folder whose names begin with `table`, written by one
    process or by several ranks. A damaged checkpoint raises a UserError that suggests another."""
    return Checkpoints(folder.parent).load(int(folder.name), table)[0]


def read_parts(
    folder: Path, sharded: Callable[[str], Tensor | None], rank: int, ranks: int, table: str = ""
) -> dict[str, Tensor]:
    """Tensors of a checkpoint folder whose names begin with `table`; of those for which `sharded`
    gives a sharded tensor only the part of this rank. Each of `ranks` verifies a part of the files,
    or the first the only one."""
    checkpoints, step = Checkpoints(folder.parent), int(folder.name)
    try:
        state = _state(folder / STATE, step)
        if "tables" in state and rank == 0:
            checkpoints._verified(step, table)
        _check_shards(folder, state, table, rank, ranks)
        with _reading(folder):
            return shards.read_parts(folder, state.get("ranks", 1), sharded, table)
    except _Damaged as error:
        raise UserError(f"{error}; {checkpoints.remedy(step)}") from error


def _take_digests(folder: Path) -> dict[str, Any]:
    """Reads and removes the digests that were written with the tensors; a finished checkpoint has
    them in state.json."""
    file = folder / DIGESTS
    content = json.loads(file.read_text("utf-8"))
    file.unlink()
    return content


def digests(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Digest of every table, over the sorted (name, dtype, shape, bytes) of its tensors."""
    names = sorted(state)
    large = [name for name in names if state[name].nbytes >= LARGE]
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:  # hashing releases the GIL
        hashes = dict(zip(large, pool.map(lambda name: _hash(state[name]), large), strict=True))
    tables: dict[str, Any] = {}
    for name in names:
        tensor = state[name]
        content = hashes.get(name) or _hash(tensor)
        row = [name, str(tensor.dtype), list(tensor.shape), content]
        table = tables.setdefault(name.partition("/")[0], hashlib.blake2b(digest_size=16))
        table.update(json.dumps(row).encode() + b"\n")
    return {name: table.hexdigest() for name, table in tables.items()}


def _hash(tensor: Tensor) -> str:
    """Hash of a tensor's bytes, without copying them."""
    import torch

    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(memoryview(flat.numpy()), digest_size=16).hexdigest()


def sealed(meta: Mapping[str, Any]) -> dict[str, Any]:
    """state.json with a digest of all its other values."""
    rest = {key: value for key, value in meta.items() if key != "digest"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return {**rest, "digest": hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}


def _state(file: Path, step: int) -> dict[str, Any]:
    try:
        meta = parsed(file.read_bytes())
        _check(meta, step)
    except OSError as error:
        raise _Damaged(f"{file} cannot be read: {_first_line(error)}") from error
    except ValueError as error:
        raise _Damaged(f"{file} is damaged: {error}") from error
    return meta


def _without_digests(state: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces the digests by "verified": whether there are digests of the tables."""
    meta = {key: value for key, value in state.items() if key not in (*DIGESTED, "digest")}
    return meta | {"verified": any(key in state for key in DIGESTED)}


def _check(meta: Mapping[str, Any], step: int) -> None:
    for key, kind in KINDS.items():
        if key in meta and type(meta[key]) is not kind:  # a bool is an int, too
            raise ValueError(f'"{key}" is {short(meta[key])}, expected {WORDS[kind]}')
    if "step" not in meta:
        raise ValueError('"step" is missing')
    if meta["step"] != step:
        raise ValueError(f'"step" is {short(meta["step"])}, expected {step} from the folder name')
    if "digest" in meta:
        if sealed(meta)["digest"] != meta["digest"]:
            raise ValueError("its digest does not match its content")
    elif odd := sorted(meta.keys() - KINDS.keys() | meta.keys() & {*DIGESTED}):
        raise ValueError(f'it has {short(odd[0])} but no "digest"')


def _first_line(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) else str(error)
    return (text or str(error) or type(error).__name__).splitlines()[0]


def _problem(digest: str | None, expected: str | None) -> str:
    if digest == expected:
        return ""
    if digest is None:
        return "is missing"
    return "is not in state.json" if expected is None else "does not match its digest in state.json"


def _lacks(path: Path) -> str:
    """Why a folder is not a complete checkpoint; "" if it is one."""
    try:
        names = os.listdir(path)
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    if not names:
        return EMPTY
    if STATE not in names:
        return f"it has no {STATE}"
    return "" if shards.files(path) else "it has no .safetensors file"

"""Checkpoints when workers on other machines do not see the run folder: the driver reads and writes
the files, and each worker has its own copies."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from gesso.cluster.processes import Processes
from gesso.track.atomic import flush

CHUNK = 64 * 2**20  # bytes of a file in one message


class Copies:
    """The folders of a worker, by the names of those of the driver."""

    def __init__(self) -> None:
        self._root = Path(tempfile.mkdtemp(prefix="gesso-"))

    def path(self, folder: str) -> Path:
        path = self._root / Path(folder).name
        path.mkdir(exist_ok=True)
        return path

    def names(self, folder: str) -> dict[str, Any]:
        return {"names": sorted(file.name for file in self.path(folder).iterdir())}

    def read(self, folder: str, name: str, start: int) -> dict[str, Any]:
        with (self.path(folder) / name).open("rb") as file:
            file.seek(start)
            return {"data": [file.read(CHUNK)]}

    def append(self, chunk: bytes, folder: str, name: str) -> dict[str, Any]:
        with (self.path(folder) / name).open("ab") as file:
            file.write(chunk)
        return {}

    def discard(self, folder: str) -> dict[str, Any]:
        shutil.rmtree(self.path(folder))
        return {}


def are_needed(processes: Processes, folder: Path) -> bool:
    """Whether some worker does not see this folder."""
    if processes.same_machine:
        return False
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".seen-") as file:
        answers = processes.all("sees", {"file": str(Path(file.name).resolve())})
    return not all(answer["sees"] for answer in answers)


def fetch(processes: Processes, folder: Path) -> None:
    """Copies the files that the first worker has written to the driver."""
    about = {"folder": folder.name}
    for name in processes.one(0, "copy", {"do": "names", **about})["names"]:
        with (folder / name).open("wb") as file:
            while chunk := processes.data(
                0, "copy", {"do": "read", "name": name, "start": file.tell(), **about}
            ):
                file.write(chunk)
        flush(folder / name)
    processes.one(0, "copy", {"do": "discard", **about})


def send(processes: Processes, folder: Path) -> None:
    """Copies the files of a checkpoint to all workers."""
    about = {"folder": folder.name}
    processes.all("copy", {"do": "discard", **about})
    try:
        for path in sorted(folder.iterdir()):
            with path.open("rb") as file:
                while chunk := file.read(CHUNK):
                    processes.all("copy", {"do": "append", "name": path.name, **about}, chunk)
    except OSError:  # a part of them would keep a disk full
        processes.all("copy", {"do": "discard", **about})
        raise

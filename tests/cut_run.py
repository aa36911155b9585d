"""A run as it is found after it was stopped."""

from __future__ import annotations

import shutil
from pathlib import Path

from gesso.track.run_folder import RunFolder


def cut_after(finished: RunFolder, step: int, to: Path) -> Path:
    """A copy of a run that was stopped before it saved a checkpoint later than `step`."""
    shutil.copytree(finished.path, to)
    copy = RunFolder.open(to)
    later = [path for path in copy.checkpoints.iterdir() if int(path.name) > step]
    assert later and copy.checkpoints / f"{step:06d}" not in later
    for checkpoint in later:
        shutil.rmtree(checkpoint)
    assert copy.latest() == step
    return to

"""The tasks of a worker, by name: what it is doing, and its phase in the timeline."""

from __future__ import annotations

TASKS = {
    "host": "waiting for the other workers",
    "start": "loading the model",
    "fit": "reading the prompts",
    "teach": "loading teachers",
    "open": "encoding prompts",
    "sample": "sampling",
    "take": "receiving samples",
    "share": "exchanging samples",
    "describe": "computing metrics of samples",
    "update": "updating",
    "forget": "dropping samples",
    "publish": "publishing weights",
    "exchange": "restoring earlier weights",
    "leave_out": "excluding a lost sampler",
    "accept": "receiving weights",
    "sees": "looking for the run folder",
    "copy": "copying a checkpoint",
    "save": "saving",
    "written": "saving",
    "load": "loading a checkpoint",
    "use": "loading a checkpoint",
    "unfit": "reading the prompts",
    "inspect": "reading the prompts",
}
"""What a worker is doing, for errors."""

PHASES = {
    "open": ("encode", True),
    "sample": ("sample", False),
    "take": ("exchange", True),
    "share": ("exchange", True),
    "describe": ("describe", True),
    "update": ("update", False),
    "publish": ("publish", True),
    "accept": ("publish", True),
    "save": ("save", True),
    "written": ("save", True),
}
"""The name of the phase, and whether inner phases count as it."""


def phase_of(task: str, step: int | None) -> tuple[str, bool]:
    """`step` of sampling; None: an evaluation."""
    if task in ("open", "sample") and step is None:
        return "evaluate", True
    return PHASES.get(task, ("other", True))

"""Virtual environments of rewards whose packages conflict with those of Gesso or of other rewards.

`reward.env` names a requirements file. `gesso env` installs it once, in a folder named by its
content; the worker processes of the reward then run there.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from gesso.types import UserError

MINIMUM = ("numpy", "pillow", "pydantic>=2.10,<3")  # what a reward worker imports itself
_COMPLETE = ".complete"  # written last


def root() -> Path:
    """$GESSO_ENVS, or gesso/envs in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("GESSO_ENVS") or Path(cache) / "gesso" / "envs")


def folder(requirements: str) -> Path:
    """The folder for the environment of a requirements file, installed or not."""
    file = Path(os.path.expanduser(requirements))
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UserError(
            f'reward.env = "{requirements}" cannot be read: {error.strerror}; expected a '
            "requirements file for pip"
        ) from error
    version = f"{sys.version_info.major}.{sys.version_info.minor}".encode()
    digest = hashlib.blake2b(content + version, digest_size=6).hexdigest()
    return root() / f"{file.stem}-{digest}"


def python(requirements: str) -> str:
    """The interpreter of an installed environment."""
    place = folder(requirements)
    if not (place / _COMPLETE).exists():
        raise UserError(
            f'reward.env = "{requirements}" is not installed; run `gesso env {requirements}`'
        )
    return str(_interpreter(place))


def install(requirements: str) -> Path:
    """Installs the environment unless it is there; what an interrupted installation left is removed
    first."""
    place = folder(requirements)
    if (place / _COMPLETE).exists():
        return place
    shutil.rmtree(place, ignore_errors=True)
    _run([sys.executable, "-m", "venv", "--without-pip", str(place)], requirements)
    pip = [sys.executable, "-m", "pip", "--python", str(_interpreter(place)), "install"]
    quiet = ["--quiet", "--disable-pip-version-check"]
    _run([*pip, *quiet, "-r", os.path.expanduser(requirements), *MINIMUM], requirements)
    (place / _COMPLETE).touch()
    return place


def _interpreter(place: Path) -> Path:
    return place / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def _run(command: list[str], requirements: str) -> None:
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode:
        lines = [line for line in result.stdout.splitlines() if line.strip()]
        errors = [line for line in lines if line.lower().startswith("error")] or lines[-1:]
        reason = errors[0] if errors else f"exit status {result.returncode}"
        raise UserError(f'the environment of "{requirements}" cannot be installed: {reason:.300}')

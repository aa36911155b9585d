"""Gesso: RL post-training for image, video and (vision-)language models.

    run = gesso.train("demo")
    gesso.load(run.path).sample('a red sign that says "KITE"')[0].save("kite.png")

`import gesso` is instant: torch and other heavy packages are imported by the functions.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gesso.track.run_folder import RunFolder
    from gesso.use.trained import Trained

__version__ = "0.1.0"

# OpenMP reads this once, when torch is first imported. Waiting threads must not spin: with reward
# workers on the same cores, spinning slows both down many times over.
if "torch" not in sys.modules:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# The size of cuBLAS's workspace on recent GPUs, which torch's deterministic mode wants to be fixed.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def train(
    recipe: str,
    *overrides: str,
    folder: str | Path | None = None,
    quiet: bool = False,
    card: int | str | None = None,
) -> RunFolder:
    """Train a bundled recipe or a TOML file: `gesso.train("demo", "steps=5", folder="my-run")`, or
    with its settings for a 24 GB GPU: `gesso.train("flux-pickscore", card=24)`."""
    from gesso import run

    return run.train(recipe, overrides, folder, quiet, card=card)


def resume(folder: str | Path, quiet: bool = False) -> RunFolder:
    """Continue a run that was stopped or killed."""
    from gesso import run

    return run.resume(folder, quiet)


def load(
    source: str | Path,
    step: int | None = None,
    weights: str | None = None,
    overrides: Sequence[str] = (),
) -> Trained:
    """Load the model of a run folder, the untrained model of a recipe (`gesso.load("demo")`), or a
    folder saved by Gesso, diffusers or transformers; to sample from, evaluate or export."""
    from gesso.use import trained

    return trained.load(source, step, weights, overrides)


def recipes() -> Sequence[str]:
    """Names of the bundled recipes."""
    from gesso.config import tables

    return list(tables.bundled_recipes())

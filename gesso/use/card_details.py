"""Training details of a model card: settings, versions, files."""

from __future__ import annotations

import importlib.metadata
import subprocess
from collections.abc import Mapping
from typing import Any

import gesso
from gesso.config import PACKAGE
from gesso.use.card_facts import CardFacts, md

LIBRARIES = ("torch", "diffusers", "transformers", "peft", "safetensors")


def continue_training(facts: CardFacts) -> str:
    key = "model.path" if facts.whole else "model.lora.path"
    return (
        "## Continue training\n\n"
        f"From the run, `{facts.run.path.resolve().name}`: `gesso train --resume RUN steps=N`. "
        f"From this folder, DIR, with its recipe: `gesso train DIR/recipe.toml {key}=DIR`."
    )


def details(facts: CardFacts) -> str:
    recipe = facts.recipe
    rewards = "\n".join(
        f"- `{entry.name}`, weight {entry.weight:g}" + _options(entry.options)
        for entry in recipe.reward or recipe.eval_reward
    )
    paths = [
        " and ".join(f"`{s.path}`" for s in part) for part in (recipe.data.train, recipe.data.eval)
    ]
    table = {
        "algorithm": f"`{recipe.algorithm.name}`",
        "learning rate": f"{recipe.optimizer.lr:g}",
        "prompts per step × samples": f"{recipe.data.groups} × {recipe.algorithm.options['group']}",
        "seed": recipe.seed,
        "training prompts": paths[0],
        "evaluation prompts": paths[1],
        "source of the settings": md(recipe.source),
        "exported with": ", ".join(f"{name} {version}" for name, version in versions().items()),
        "git commit": commit(),
    }
    lines = "\n".join(
        f"| {name} | {value} |" for name, value in table.items() if value not in ("", None)
    )
    return (
        "## Training details\n\nAll settings are in [recipe.toml](recipe.toml).\n\n"
        f"| | |\n|---|---|\n{lines}\n\nRewards:\n\n{rewards}"
    )


def _options(options: Mapping[str, Any]) -> str:
    text = ", ".join(f"{key} = {value!r}" for key, value in options.items())
    return f" ({md(text)})" if text else ""


def versions() -> dict[str, str]:
    """Versions at the time of export; a run folder does not record those of the training."""
    installed = {name: importlib.metadata.version(name) for name in LIBRARIES}
    return {"gesso": gesso.__version__} | installed  # Gesso itself need not be installed


def commit() -> str | None:
    """The git commit of Gesso, if it runs from a git checkout."""

    def git(*arguments: str) -> subprocess.CompletedProcess[str] | None:
        command = ["git", "-C", str(PACKAGE), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    head = git("rev-parse", "HEAD")
    return head.stdout.strip() if head is not None else None


def files(facts: CardFacts) -> str:
    lines = "\n".join(
        f"| {name} | {size:,} | `{digest}` |" for name, (size, digest) in facts.hashes.items()
    )
    return f"## Files\n\n| file | bytes | sha256 |\n|---|---|---|\n{lines}"

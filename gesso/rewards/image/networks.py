"""Shared code of rewards with a network: loading from transformers once per process, batching.

Image processors always use the PIL backend: torchvision is not required, and scores do not depend
on whether it is installed.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from pydantic import Field

from gesso.config import Strict
from gesso.quiet import quiet
from gesso.rewards.image.checkpoints import first_line
from gesso.types import Prompt, Sample, Score, UserError

if TYPE_CHECKING:
    pass

T = TypeVar("T")


class NetworkReward(Strict):
    """Options of rewards that run a network."""

    device: str = "auto"
    """Device of the network; "auto" selects CUDA when available."""
    batch: int = Field(16, ge=1)
    """Images per forward pass."""

    def unfit(self, prompt: Prompt) -> str | None:
        return None


def once(load: Callable[..., T]) -> Callable[..., T]:
    """Caches `load` by its arguments, including a UserError: a missing model is not looked up again
    for every batch."""

    @functools.cache
    def attempt(*args: str) -> T | UserError:
        try:
            return load(*args)
        except UserError as error:
            return error

    @functools.wraps(load)
    def cached(*args: str) -> T:
        result = attempt(*args)
        if isinstance(result, UserError):
            raise UserError(str(result))
        return result

    return cached


def in_batches(
    values: Callable[[Sequence[Sample]], Sequence[float]], samples: Sequence[Sample], batch: int
) -> list[Score]:
    """One score per sample, `batch` samples at a time."""
    batches = [samples[i : i + batch] for i in range(0, len(samples), batch)]
    return [Score(value) for part in batches for value in values(part)]


def load_pretrained(kind: Any, path: str, **options: Any) -> Any:
    folder = Path(os.path.expanduser(path))
    if path.startswith((".", "/", "~")) and not folder.is_dir():
        raise UserError(f'{kind.__name__} cannot be loaded from "{path}": no such folder')
    try:
        with quiet():
            if kind.__name__.startswith("Auto"):
                options["trust_remote_code"] = False  # or transformers prompts on the terminal
            return kind.from_pretrained(str(folder), **options)
    except Exception as error:  # a missing file, no network, a missing package, broken weights
        reason = first_line(error)
        raise UserError(
            f'{kind.__name__} cannot be loaded from "{path}": {reason} '
            "(expected a folder, or a hub repository that is cached or reachable)"
        ) from error


def load_network(kind: Any, path: str) -> Any:
    """Loads a network, frozen, in float32 and eval mode. Raises if weights are missing, which would
    be random."""
    import torch

    model, info = load_pretrained(kind, path, dtype=torch.float32, output_loading_info=True)
    names = {name for name, _ in model.named_parameters()}
    missing = sorted(names & set(info["missing_keys"]))
    if missing:
        raise UserError(
            f'"{path}" lacks {len(missing)} of the {len(names)} weights of '
            f"{type(model).__name__}, the first is {missing[0]}; it is a different kind of model"
        )
    return model.eval().requires_grad_(False)


def to_pil(images: Sequence[np.ndarray]) -> list[Any]:
    from PIL import Image

    return [Image.fromarray(image) for image in images]

"""Silences the libraries that load models."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

HUB = "huggingface_hub"  # has no switch for progress bars


@contextmanager
def quiet(*libraries: str) -> Iterator[None]:
    """Hides progress bars, warnings and retry messages of transformers, huggingface_hub and further
    `libraries`; errors are still shown."""
    names = ("transformers", *libraries)
    bars = [importlib.import_module(f"{name}.utils.logging") for name in names]
    loggers = [*bars, importlib.import_module(f"{HUB}.utils.logging")]
    levels = [logger.get_verbosity() for logger in loggers]
    for logger in loggers:
        logger.set_verbosity_error()
    for logger in bars:
        logger.disable_progress_bar()
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.set_verbosity(level)
        for logger in bars:
            logger.enable_progress_bar()

"""Components of tiny pipelines are read from disk once per process; models get copies, which take a
third of the time. Tests of what loading takes (REAL) do it as users do."""

from __future__ import annotations

import os
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

REAL = ("tests/memory/", "tests/track/test_progress.py")
LARGE = 2**23  # bytes of files; a component with more is not kept


def use() -> None:
    """From now on, in this process."""
    from diffusers.pipelines import pipeline_utils

    pipeline_utils.load_sub_model = partial(_load, pipeline_utils.load_sub_model, {})


def _load(load: Callable[..., Any], kept: dict[tuple, Any], **given: Any) -> Any:
    if os.environ.get("PYTEST_CURRENT_TEST", "").startswith(REAL):
        return load(**given)
    files = [file.stat() for file in Path(given["cached_folder"], given["name"]).rglob("*")]
    if given["quantization_config"] is not None or sum(file.st_size for file in files) > LARGE:
        return load(**given)
    state = [(file.st_ino, file.st_mtime_ns, file.st_size) for file in files]
    names = ("cached_folder", "name", "class_name", "dtype", "device_map", "low_cpu_mem_usage")
    key = (*(str(given[name]) for name in names), *sorted(state))
    if key not in kept:
        kept[key] = load(**given)
    return deepcopy(kept[key])

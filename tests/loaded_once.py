"""Components of tiny pipelines, and tiny language models, are read from disk once per process;
models get copies, which take a tenth of the time. Tests of what loading takes (REAL) do it as users
do."""

from __future__ import annotations

import copyreg
import io
import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

REAL = ("tests/memory/", "tests/track/test_progress.py")
LARGE = 2**23  # bytes of files; a component with more is not kept
COMPONENT = ("cached_folder", "name", "class_name", "dtype", "device_map", "low_cpu_mem_usage")
LANGUAGE_MODEL = ("dtype", "attn_implementation")


def use() -> None:
    """From now on, in this process."""
    from diffusers.pipelines import pipeline_utils
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    pipeline_utils.load_sub_model = partial(_component, pipeline_utils.load_sub_model, {})
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        auto.from_pretrained = partial(_language_model, auto.from_pretrained, {})


def _component(load: Callable[..., Any], kept: dict[tuple, Any], **given: Any) -> Any:
    load = partial(load, **given)
    if given["quantization_config"] is not None:
        return load()
    key = tuple(str(given[name]) for name in COMPONENT)
    return _copy(load, kept, key, Path(given["cached_folder"], given["name"]))


def _language_model(
    load: Callable[..., Any], kept: dict[tuple, Any], source: Any, **given: Any
) -> Any:
    load = partial(load, source, **given)
    if not {"config", *LANGUAGE_MODEL} <= {*given} or "quantization_config" in given:
        return load()
    settings = (str(given[name]) for name in LANGUAGE_MODEL)
    key = (str(source), given["config"].to_json_string(), *settings)
    return _copy(load, kept, key, Path(source))


def _copy(load: Callable[[], Any], kept: dict[tuple, Any], key: tuple, folder: Path) -> Any:
    """Of what was loaded from the same files with the same key."""
    if os.environ.get("PYTEST_CURRENT_TEST", "").startswith(REAL):
        return load()
    files = [file.stat() for file in folder.rglob("*")]
    if not files or sum(file.st_size for file in files) > LARGE:
        return load()
    state = sorted((file.st_ino, file.st_mtime_ns, file.st_size) for file in files)
    key = (*key, *state)
    if key not in kept:
        kept[key] = Original(load())
    return kept[key].copy()


_tensors: list[Tensor] = []  # of all originals


class Original:
    """Copies by pickle, five times as fast as `deepcopy`; the pickled bytes refer to tensors by
    their numbers."""

    def __init__(self, value: Any) -> None:
        file = io.BytesIO()
        pickler = pickle.Pickler(file, pickle.HIGHEST_PROTOCOL)
        reducers = dict.fromkeys((Tensor, nn.Parameter), self._number)
        pickler.dispatch_table = {**copyreg.dispatch_table, **reducers}
        pickler.dump(value)
        self.data = file.getvalue()

    def copy(self) -> Any:
        return pickle.loads(self.data)

    @staticmethod
    def _number(tensor: Tensor) -> tuple:
        assert tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes, (
            "it may share memory with another one, which its copy would not"
        )
        _tensors.append(tensor)
        return _copy_of_tensor, (len(_tensors) - 1,)


def _copy_of_tensor(number: int) -> Tensor:
    tensor = _tensors[number]
    if not isinstance(tensor, nn.Parameter):
        return tensor.clone()
    return nn.Parameter(tensor.detach().clone(), tensor.requires_grad)

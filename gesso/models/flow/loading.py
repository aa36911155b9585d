"""Loads diffusers pipelines: with their weights, or by their configs alone."""

from __future__ import annotations

import importlib
import inspect
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from gesso import config
from gesso.models.flow import compiled as speed
from gesso.models.four_bits import require_four_bits
from gesso.models.located import PIPELINE, locate
from gesso.quiet import quiet
from gesso.types import UserError
from gesso.weights.empty import on_meta

LIBRARIES = ("diffusers", "transformers")
"""Libraries whose classes model_index.json may name: diffusers imports any class named there."""
NETWORKS = ("transformer", "transformer_2")
"""Components that may be trained; Wan 2.2 A14B has two."""
ABSENT = [None, None]  # a component that the folder does not have


class Architecture(Protocol):
    """What a model class loads, and onto which device."""

    device: torch.device
    dtype: torch.dtype
    sharded: bool  # the transformer stays in host memory

    @property
    def pipeline(self) -> str:
        """Name of the class in diffusers."""

    @property
    def also_loads(self) -> Sequence[str]:
        """Other pipeline classes whose folders it loads."""

    @property
    def large(self) -> Sequence[str]:
        """Components worth quantizing."""

    @property
    def blocks(self) -> Sequence[str]:
        """Classes of the transformer's repeated blocks."""

    @property
    def replaced(self) -> Sequence[str]:
        """Components that are not loaded: the model does their work."""


def most_parameters(source: str) -> int:
    """Upper bound of the transformer's parameters before it is loaded, at one byte each. A model on
    the hub counts as large."""
    folder = Path(source) / "transformer"
    if not folder.is_dir():
        return speed.LARGE
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def load_pipeline(model: Architecture, settings: config.Model) -> Any:
    """The pipeline with its networks in the model's dtype; a fully fine-tuned transformer in
    float32, large components in 4 bits if the recipe sets model.quantize."""
    source, options = _locate(model, settings)
    if speed.compiles(settings, model.device, most_parameters(source), model.blocks):
        speed.wake_compiler(model.device)  # not earlier: a wrong path fails immediately
    whole = settings.lora is None
    options["dtype"] = {
        **dict.fromkeys(NETWORKS, torch.float32 if whole else model.dtype),
        "default": model.dtype,
    }
    if settings.quantize is not None:
        options["quantization_config"] = _four_bits(model)
    try:
        with quiet("diffusers"):
            import diffusers

            kind = getattr(diffusers, model.pipeline)
            pipe = kind.from_pretrained(source, **options)
            if not model.sharded:
                return pipe.to(model.device)
            for name, part in pipe.components.items():
                if isinstance(part, torch.nn.Module) and name not in NETWORKS:
                    part.to(model.device)
            return pipe
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise UserError(
            f'model.path = "{settings.path}": diffusers cannot load it as a {model.pipeline}: '
            f"{str(error).splitlines()[0]}"
        ) from error


def _four_bits(model: Architecture) -> Any:
    """NF4 by bitsandbytes."""
    require_four_bits(model.device)
    from diffusers import PipelineQuantizationConfig

    return PipelineQuantizationConfig(
        quant_backend="bitsandbytes_4bit",
        quant_kwargs={
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_compute_dtype": model.dtype,
        },
        components_to_quantize=list(model.large),
    )


def empty_pipeline(model: Architecture, settings: config.Model) -> Any:
    """The pipeline built from its configs only: networks with shapes but no values."""
    import diffusers

    source, parts = _locate(model, settings)
    try:
        with quiet("diffusers"):
            index = diffusers.DiffusionPipeline.load_config(source)
            for name, entry in index.items():
                if name in parts:
                    continue
                if isinstance(entry, list | tuple) and entry[0] is not None:
                    parts[name] = _empty_part(entry[0], entry[1], source, name, model, settings)
            kind = getattr(diffusers, model.pipeline)
            # Not only components: Wan has the boundary of its experts there.
            options = inspect.signature(kind).parameters.keys() & index.keys() - parts.keys()
            return kind(**parts, **{name: index[name] for name in options})
    except (OSError, ValueError, AttributeError, TypeError, LookupError, ImportError) as error:
        raise UserError(
            f'model.path = "{settings.path}": its configs cannot be read: '
            f"{str(error).splitlines()[0]}"
        ) from error


def _empty_part(
    library: str, name: str, source: str, folder: str, model: Architecture, settings: config.Model
) -> Any:
    kind = getattr(importlib.import_module(library), name)  # `_locate` checked the library
    if not issubclass(kind, torch.nn.Module):
        return kind.from_pretrained(source, subfolder=folder)
    with on_meta():
        if library == "diffusers":
            part = kind.from_config(kind.load_config(source, subfolder=folder))
        else:
            part = kind(kind.config_class.from_pretrained(source, subfolder=folder))
    whole = settings.lora is None and folder in NETWORKS
    return part.to(torch.float32 if whole else model.dtype)


def _locate(model: Architecture, settings: config.Model) -> tuple[str, dict[str, Any]]:
    """The folder or hub name to load, and the absent components as arguments: diffusers requires
    components that are null in model_index.json (usually T5) to be passed as None."""
    located = locate(settings, PIPELINE)
    kind = located.about.get(PIPELINE.key)
    if kind not in (model.pipeline, *model.also_loads):
        raise UserError(
            f'model.path = "{settings.path}" is a {kind} according to its {PIPELINE.file}, but '
            f'model.name = "{settings.name}" expects a {model.pipeline}; change one of them'
        )
    parts = {name: part for name, part in located.about.items() if isinstance(part, list)}
    for name, part in parts.items():
        if part != ABSENT and (len(part) != 2 or part[0] not in LIBRARIES):
            raise UserError(
                f'model.path = "{settings.path}": {PIPELINE.file} has "{name}": '
                f"{json.dumps(part)}; only classes of {' and '.join(LIBRARIES)} are loaded"
            )
    absent = [name for name, part in parts.items() if part == ABSENT or name in model.replaced]
    return located.source, dict.fromkeys(absent)


def image_processor(settings: config.Model, component: str) -> Any:
    """The image processor of a component that combines it with a tokenizer."""
    import transformers

    source = locate(settings, PIPELINE).source
    try:
        with quiet():
            return transformers.AutoImageProcessor.from_pretrained(
                source, subfolder=component, backend="pil", trust_remote_code=False
            )
    except (OSError, ValueError) as error:
        raise UserError(
            f'model.path = "{settings.path}": its {component} cannot be read: '
            f"{str(error).splitlines()[0]}"
        ) from error


def save_replaced(model: Architecture, settings: config.Model, folder: Path) -> None:
    """Adds the components that were not loaded to a saved pipeline, as they are."""
    index = folder / PIPELINE.file
    if not index.is_file():  # an adapter was saved
        return
    located = locate(settings, PIPELINE)
    source = Path(located.source)
    if not source.is_dir():
        from huggingface_hub import snapshot_download

        wanted = [f"{name}/*" for name in model.replaced]
        source = Path(snapshot_download(located.source, allow_patterns=wanted))
    about = json.loads(index.read_text(encoding="utf-8"))
    for name in model.replaced:
        shutil.copytree(source / name, folder / name, dirs_exist_ok=True)
        about[name] = located.about[name]
    index.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")

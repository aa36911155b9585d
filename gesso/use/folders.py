"""A model folder → the recipe to load it and sample from it.

Exports of Gesso contain the recipe of their run, recipe.toml. For other folders the model is
determined from their files; the rest (steps, guidance, size) are the defaults of their library.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gesso import build, families
from gesso.config import (
    AnyRecipe,
    ChatSettings,
    Data,
    ModelRecipe,
    Recipe,
    resolve_path,
    tables,
)
from gesso.config.parsing import parse
from gesso.families import classes
from gesso.families.base import Family
from gesso.types import UserError

RECIPE = "recipe.toml"
LORA = "pytorch_lora_weights.safetensors"
ADAPTER = "adapter_config.json"
UNTRAINED = {"rank": 1, "alpha": 1}
"""A LoRA without effect: with it the weights of a folder stay frozen, in their stored precision;
without it a model is loaded for full fine-tuning, in float32."""
TRAINING = set(Recipe.model_fields) - set(ModelRecipe.model_fields)
DATA = set(Data.model_fields) - set(ChatSettings.model_fields)
"""Keys that only training uses. The overrides of a comparison apply to all its models; those that
only a run has are ignored for a folder."""


SHARDING = ("sharding", "shard_within", "offload")


@dataclass(frozen=True)
class FolderRecipe:
    recipe: AnyRecipe
    untrained: AnyRecipe | None  # of the base model, if the folder refers to one


def recipe_of(folder: Path, overrides: Sequence[str] = ()) -> FolderRecipe:
    if (folder / RECIPE).is_file():
        return _exported(folder, overrides)
    if (folder / "model_index.json").is_file():
        return _foreign(folder, {"path": str(folder), "lora": dict(UNTRAINED)}, overrides)
    if (folder / ADAPTER).is_file():
        return _foreign(folder, _peft(folder), overrides)
    if (folder / LORA).is_file():
        return _foreign(folder, _diffusers_lora(folder), overrides)
    if (folder / "config.json").is_file():
        return _foreign(folder, {"path": str(folder), "lora": dict(UNTRAINED)}, overrides)
    raise UserError(
        f"{folder} contains no model: expected a run (config.toml), a diffusers pipeline "
        f"(model_index.json), a LoRA ({LORA} or {ADAPTER}) or a model of transformers "
        "(config.json)"
    )


def _exported(folder: Path, overrides: Sequence[str]) -> FolderRecipe:
    """An export of Gesso: the settings of its run, with the weights of this folder."""
    where = str(folder / RECIPE)
    data = tables.changed(tables.read_toml(folder / RECIPE), overrides)
    untrained = parse(Recipe, data, where)  # as for a run: user code is not imported yet
    model = untrained.model.model_dump(exclude_none=True)
    if is_adapter(folder):
        model["lora"]["path"] = str(folder)
    else:
        model |= {"path": str(folder), "lora": dict(UNTRAINED)}
        model.pop("quantize", None)
        cluster = {k: v for k, v in data.get("cluster", {}).items() if k not in SHARDING}
        data = data | {"cluster": cluster}  # sharding = "all" is for full fine-tuning
    return FolderRecipe(parse(Recipe, data | {"model": model}, where), untrained)


def is_adapter(folder: Path) -> bool:
    return (folder / LORA).is_file() or (folder / ADAPTER).is_file()


def _foreign(folder: Path, model: dict[str, Any], overrides: Sequence[str]) -> FolderRecipe:
    """A recipe without training for a `[model]` section."""
    import torch

    model["dtype"] = "bfloat16" if torch.cuda.is_available() else "float32"
    sections = tables.changed({"model": model}, overrides)
    if sections["model"]["path"] is None:
        raise UserError(
            f"{folder} is an adapter without a known base model: expected base_model in its "
            "README.md; set the base model with --set model.path=DIR"
        )
    for section, defaults in _defaults(folder, sections["model"]["path"]).items():
        sections[section] = defaults | sections.get(section, {})
    recipe = build.model_recipe_from(_without_training(sections), str(folder))
    path = sections["model"]["lora"].pop("path", None)
    untrained = None
    if path is not None:
        untrained = build.model_recipe_from(_without_training(sections), str(folder))
    return FolderRecipe(recipe, untrained)


def _without_training(sections: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in sections.items() if key not in TRAINING}
    if isinstance(kept.get("data"), dict):
        kept["data"] = {key: value for key, value in kept["data"].items() if key not in DATA}
    return kept


def _defaults(folder: Path, base: str) -> dict[str, Any]:
    """The model's name, determined from its files, and the sampling defaults of its library."""
    flow, tokens = families.BY_NAME["flow"], families.BY_NAME["language"]
    index = _json(base, "model_index.json", folder)
    if index is not None:
        name = _name(folder, base, _stated(index, "_class_name", base), flow)
        return _as_diffusers(folder, base, index, name, flow)
    config = _json(base, "config.json", folder)
    if config is None:
        raise UserError(
            f"{folder}: its base model {base} has neither model_index.json nor config.json; "
            "set the base model with --set model.path=DIR"
        )
    name = _name(folder, base, _stated(config, "model_type", base), tokens)
    return {"model": {"name": name}, "algorithm": {"name": tokens.default_algorithm}}


def _name(folder: Path, base: str, kind: str, family: Family) -> str:
    """model.name for a pipeline class of diffusers or a model type of transformers."""
    kinds = {name: family.library_kinds(name) for name in family.models}
    for name, known in kinds.items():
        if kind in known:
            return name
    expected = ", ".join(name for known in kinds.values() for name in known)
    raise UserError(f"{folder}: {base} is a {kind}; expected one of {expected}")


def _stated(config: dict[str, Any], key: str, base: str) -> str:
    if not isinstance(config.get(key), str):
        raise UserError(
            f'{base}: expected a string as "{key}" in its config, got {config.get(key)!r:.40}'
        )
    return config[key]


def _as_diffusers(
    folder: Path, base: str, index: dict[str, Any], name: str, family: Family
) -> dict[str, Any]:
    """The pipeline's default steps, guidance and size."""
    import diffusers

    kind = classes.load(family, name)
    parameters = inspect.signature(getattr(diffusers, kind.pipeline).__call__).parameters
    scale = parameters[kind.scale_argument].default + kind.scale_offset
    network, vae = (_json(base, f"{part}/config.json", folder) for part in ("transformer", "vae"))
    if network is None or vae is None:
        part = "transformer" if network is None else "vae"
        raise UserError(f"{folder}: {base} has no {part}/config.json; download it again")
    # Of FLUX.2 klein the first, of FLUX.1 schnell the second.
    if index.get("is_distilled", network.get("guidance_embeds") is False):
        scale = 1.0
    blocks = vae["block_out_channels"] if "block_out_channels" in vae else vae["dim_mult"]
    side = network.get("sample_size", 128) * 2 ** (len(blocks) - 1)  # 128: diffusers' default
    # Pipelines of videos have default sizes, those of images the network's.
    size = {"height": parameters["height"].default, "width": parameters["width"].default}
    if "num_frames" in parameters:
        size["frames"] = parameters["num_frames"].default
    return {
        "model": {"name": name, **{key: value or side for key, value in size.items()}},
        "algorithm": {"name": family.default_algorithm, "guidance": float(scale)},
        "eval": {"steps": parameters["num_inference_steps"].default, "guidance": float(scale)},
    }


def _json(base: str, file: str, folder: Path) -> dict[str, Any] | None:
    """A JSON file of a folder or of a model on the Hub; None if there is no such file."""
    path = resolve_path(base)
    if not path.is_dir():
        downloaded = _from_hub(base, file, folder)
        path = downloaded.parent if downloaded is not None else path
        file = Path(file).name
    if not (path / file).is_file():
        return None
    return _read(path / file)


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not valid JSON: {error}") from error
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error
    if not isinstance(content, dict):
        raise UserError(f"{file}: expected a JSON object, got {content!r:.40}")
    return content


def _from_hub(base: str, file: str, folder: Path) -> Path | None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HFValidationError, RemoteEntryNotFoundError

    try:
        return Path(hf_hub_download(base, file))
    except RemoteEntryNotFoundError:
        return None
    except (OSError, HFValidationError) as error:
        raise UserError(
            f'the base model "{base}" of {folder} is neither a local folder nor could it be loaded '
            "from the Hub; set the base model with --set model.path=DIR"
        ) from error


def _peft(folder: Path) -> dict[str, Any]:
    config = _read(folder / ADAPTER)
    if missing := [key for key in ("r", "lora_alpha") if key not in config]:
        raise UserError(f'{folder / ADAPTER} has no "{missing[0]}"; expected a LoRA of PEFT')
    lora = {"rank": config["r"], "alpha": config["lora_alpha"], "path": str(folder)}
    if isinstance(config.get("target_modules"), list):
        lora["targets"] = sorted(config["target_modules"])
    return {"path": base_model(folder, config.get("base_model_name_or_path")), "lora": lora}


def _diffusers_lora(folder: Path) -> dict[str, Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(folder / LORA, "pt") as file:
            header = json.loads((file.metadata() or {}).get("lora_adapter_metadata", "{}"))
    except (SafetensorError, ValueError) as error:
        raise UserError(f"{folder / LORA} cannot be read: {error}") from error
    if "transformer.r" not in header:
        raise UserError(
            f"{folder / LORA} has no rank and alpha (it was saved without adapter metadata); write "
            "a recipe with model.lora.rank, alpha and path, and use that instead"
        )
    lora = {"rank": header["transformer.r"], "alpha": header["transformer.lora_alpha"]}
    targets = sorted(header["transformer.target_modules"])
    return {
        "path": base_model(folder, None),
        "lora": {**lora, "targets": targets, "path": str(folder)},
    }


def base_model(folder: Path, stated: str | None = None) -> str | None:
    """The base model of an adapter, from its config or its model card."""
    card = folder / "README.md"
    if stated or not card.is_file():
        return stated
    from huggingface_hub import ModelCard

    base = ModelCard.load(card).data.to_dict().get("base_model")
    return base[0] if isinstance(base, list) else base

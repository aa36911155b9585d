"""Recipes: sections (`base`, `model`, `schema`), TOML files (`tables`), validation (`parsing`),
consistency checks (`compatibility`), and the bundled models (`bundled`).

The sections are imported on first access: pydantic takes 0.1 s to compile them, and the worker
processes of rewards do not need them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gesso.config.base import (
    MAX_FRAMES,
    MAX_SAMPLES,
    MAX_SIDE,
    MAX_STEPS,
    PACKAGE,
    ZOO,
    Dtype,
    Named,
    Strict,
    pick_device,
    resolve_path,
)
from gesso.config.bundled import FAMILIES, MODELS, BundledModel, FamilyName

if TYPE_CHECKING:
    from gesso.config.expect import Expect
    from gesso.config.model import AnyModel, Lora, Model, ModelSection, TokenModel, family
    from gesso.config.reward import Ramp, RemoteEntry, RewardEntry, Urls, web_addresses
    from gesso.config.schema import (
        AnyRecipe,
        Beta,
        ChatSettings,
        Cluster,
        Curriculum,
        Data,
        DataSource,
        Ema,
        Eval,
        Learner,
        ModelRecipe,
        Optimizer,
        Recipe,
        Sampler,
        Save,
        Tracker,
        TrainDataSource,
        Vllm,
    )

__all__ = [
    "FAMILIES",
    "MAX_FRAMES",
    "MAX_SAMPLES",
    "MAX_SIDE",
    "MAX_STEPS",
    "MODELS",
    "PACKAGE",
    "ZOO",
    "AnyModel",
    "AnyRecipe",
    "Beta",
    "BundledModel",
    "ChatSettings",
    "Cluster",
    "Curriculum",
    "Data",
    "DataSource",
    "Dtype",
    "Ema",
    "Eval",
    "Expect",
    "FamilyName",
    "Learner",
    "Lora",
    "Model",
    "ModelRecipe",
    "ModelSection",
    "Named",
    "Optimizer",
    "Ramp",
    "Recipe",
    "RemoteEntry",
    "RewardEntry",
    "Sampler",
    "Save",
    "Strict",
    "TokenModel",
    "Tracker",
    "TrainDataSource",
    "Urls",
    "Vllm",
    "family",
    "pick_device",
    "resolve_path",
    "web_addresses",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from gesso.config import model, reward, schema

        return (vars(model) | vars(reward) | vars(schema))[name]

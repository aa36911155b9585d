"""Model classes, bundled and user-defined."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gesso import imports
from gesso.config import MODELS, AnyRecipe, FamilyName, Recipe
from gesso.config.parsing import named
from gesso.types import UserError

if TYPE_CHECKING:
    from gesso.families.base import Family

REFERENCES = {name: model.reference for name, model in MODELS.items()}


def bundled(family: FamilyName) -> dict[str, str]:
    """Names of a family's bundled models → "module:Class"."""
    return {name: model.reference for name, model in MODELS.items() if model.family == family}


def load(family: Family, name: str) -> Any:
    """The class of `model.name`. A user's class must implement the protocol of the family."""
    kind = imports.load(named(REFERENCES, name, "model"), "model")
    if imports.is_user_code(name):
        imports.check_class(kind, family.protocol(), f'model "{name}"')
    return kind


def needs_images(family: Family, name: str) -> bool:
    """Whether every prompt of this flow model has input images. False if its class does not say,
    since it sets `input_images` later."""
    numbers = imports.attribute(load(family, name), "input_images")
    return isinstance(numbers, range) and numbers.start > 0


def accepts(kind: Any, option: str) -> bool:
    """Whether its constructor has this parameter, or that of a base class to which it can pass it
    as one of `**options`."""
    for base in inspect.getmro(kind):
        if base is not object and "__init__" in vars(base):
            parameters = inspect.signature(vars(base)["__init__"]).parameters
            if option in parameters:
                return True
            if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
                return False
    return False


def built(kind: Any, recipe: AnyRecipe, **options: Any) -> Any:
    """The model of a recipe; `options` are further arguments of its class."""
    if isinstance(recipe, Recipe) and recipe.cluster.sharding is not None:
        if not accepts(kind, "sharded"):
            raise UserError(
                f'model "{recipe.model.name}" does not support cluster.sharding: its class has no '
                "parameter `sharded`; remove cluster.sharding"
            )
        options["sharded"] = True
    model = kind(recipe.model, recipe.seed, **options)
    if "sharded" in options and not getattr(model, "sharded", True):
        raise UserError(
            f'model "{recipe.model.name}" does not support cluster.sharding: its class does not '
            "pass the parameter `sharded` to its base class; remove cluster.sharding"
        )
    return model


def family_of(kind: Any, name: str, families: Mapping[str, Family]) -> FamilyName | None:
    """The family of a user's class, by its attribute `family` or by its methods. None if neither
    decides."""
    stated = imports.attribute(kind, "family")
    if isinstance(stated, str):
        if stated not in families:
            raise UserError(
                f'model "{name}" has family = "{stated:.40}"; expected one of {", ".join(families)}'
            )
        return families[stated].name
    fits = [family.name for family in families.values() if family.is_model(kind)]
    return fits[0] if len(fits) == 1 else None

"""The two model families, and the family of a recipe or a model class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gesso import imports
from gesso.config import FAMILIES, AnyRecipe, FamilyName
from gesso.config.parsing import named
from gesso.families import classes
from gesso.families.base import Family
from gesso.families.flow import FlowFamily
from gesso.families.tokens import TokenFamily
from gesso.types import UserError

BY_NAME: Mapping[str, Family] = {"flow": FlowFamily(), "language": TokenFamily()}


def of(recipe: AnyRecipe) -> Family:
    return BY_NAME[recipe.model.family_name]


def with_family(data: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """A recipe's tables with `model.family` filled in for a model in user code. Imports that code:
    only for a recipe that the user passed, not for a run folder."""
    section = data.get("model")
    if not isinstance(section, Mapping) or not isinstance(name := section.get("name"), str):
        return data
    reference = named(classes.REFERENCES, name, "model")  # a typo here would look like unknown keys
    stated = section.get("family")
    if not imports.is_user_code(name) or stated not in (None, *FAMILIES):
        return data
    family = _user_family(imports.load(reference, "model"), name, stated, where)
    classes.load(BY_NAME[family], name)
    return {**data, "model": {**section, "family": family}}


def _user_family(kind: Any, name: str, stated: FamilyName | None, where: str) -> FamilyName:
    imports.check_is_class(kind, f'model "{name}"')
    family = classes.family_of(kind, name, BY_NAME)
    if stated is not None and family is not None and stated != family:
        raise UserError(
            f'{where}: model.family = "{stated}", but the class "{name}" is a {family} model; '
            "remove model.family"
        )
    if stated is None and family is None:
        raise UserError(
            f'{where}: cannot determine the family of model "{name}": expected either a method '
            "velocity (flow model) or a method logp (language model), as in gesso's protocols "
            'FlowModel and TokenModel; or set model.family = "flow" or "language"'
        )
    chosen = stated or family
    assert chosen is not None
    return chosen

"""Checks of recipes and data for flow models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gesso.config import AnyRecipe, Model, Recipe, pick_device
from gesso.types import SampleSpec, UserError

if TYPE_CHECKING:
    from gesso.algorithms.base import Algorithm
    from gesso.data.prompts import LoadedData
    from gesso.models.flow.base import FlowModel


def sample_spec(recipe: AnyRecipe, algorithm: Algorithm) -> SampleSpec:
    """How the first batch of training is drawn."""
    spec = algorithm.spec(0, 0, recipe.model)
    assert isinstance(spec, SampleSpec)
    return spec


def one_pass(recipe: Recipe, algorithm: Algorithm) -> bool:
    """Whether gradients are computed while sampling."""
    return sample_spec(recipe, algorithm).per_sample_grads


def check_model(recipe: AnyRecipe, where: str) -> None:
    if recipe.data.template or recipe.data.system:
        raise UserError(
            f"{where}: data.template and data.system are for models that write, and model.name = "
            f'"{recipe.model.name}" draws; leave them out'
        )
    if recipe.sampler.engine != "built-in":
        raise UserError(
            f'{where}: sampler.engine = "{recipe.sampler.engine}" is for models that write, and '
            f'model.name = "{recipe.model.name}" draws; leave it out'
        )


def check_one_pass(recipe: Recipe, algorithm: Algorithm, where: str) -> None:
    """Gradients that are computed while sampling are those of a LoRA, folded into the weights that
    draw."""
    if not one_pass(recipe, algorithm):
        return
    section, lag = recipe.model, recipe.lag
    wrong = {
        f"lag = {lag}, which learns with later weights than draw; set lag = 0": lag > 0,
        "a full fine-tune; set model.lora.rank": section.lora is None,
        f'quantize = "{section.quantize}"; leave model.quantize out': section.quantize is not None,
        "fold = false; leave model.fold out, or set it to true": section.fold is False,
    }
    for got, is_so in wrong.items():
        if is_so:
            raise UserError(
                f"{where}: algorithm.one_pass = true takes each sample's gradient while it is "
                f"drawn, of a LoRA that is folded into the weights, got {got}"
            )


def check_folds(recipe: Recipe, algorithm: Algorithm) -> None:
    """Raises where gradients are computed while sampling, on a device that does not fold adapters
    by default."""
    if not one_pass(recipe, algorithm):
        return
    from gesso.weights.folding_rule import folds_lora

    assert isinstance(recipe.model, Model)
    device = pick_device(recipe.model.device, "model.device")
    if not folds_lora(recipe.model, device.type):
        raise UserError(
            "algorithm.one_pass = true needs adapters that are folded into the weights, which on "
            f'device "{device}" they are only if asked for; set model.fold = true'
        )


def ragged(recipe: Recipe, algorithm: Algorithm) -> list[str]:
    """At most one note: micro-batches that do not come out even. Gradients that are computed while
    sampling need no micro-batches."""
    if one_pass(recipe, algorithm):
        return []
    terms = recipe.data.groups * algorithm.group // algorithm.updates * algorithm.terms_a_sample
    size = recipe.learner.micro_batch
    if terms <= size or terms % size == 0:
        return []
    divisors = [n for n in range(1, terms + 1) if terms % n == 0]
    below, above = max(n for n in divisors if n < size), min(n for n in divisors if n > size)
    return [
        f"an update has {terms} terms (samples × steps), which micro-batches of {size} do not "
        f"divide: the last holds {terms % size}; learner.micro_batch = {below} or {above} would fit"
    ]


def check_data(
    recipe: Recipe, algorithm: Algorithm, model: FlowModel, data: LoadedData
) -> list[str]:
    """Raises for sizes, guidance and negative prompts that the model does not take; returns notes
    about negative prompts that are not used, and about prompts whose ends it does not see."""
    from gesso.models.flow.base import check_guidance, over_long, unused_negatives

    spec = sample_spec(recipe, algorithm)
    model.latent_shape(spec.height, spec.width)
    train = [prompt for part in data.train for prompt in part.prompts]
    check_guidance(model, spec.guidance, train)
    guidance = spec.guidance if recipe.eval.guidance is None else recipe.eval.guidance
    check_guidance(model, guidance, data.held_out)
    paths = [" and ".join(s.path for s in part) for part in (recipe.data.train, recipe.data.eval)]
    notes = [
        *unused_negatives(model, spec.guidance, train, paths[0], "algorithm.guidance"),
        *unused_negatives(model, guidance, data.held_out, paths[1], "eval.guidance"),
        *over_long(model, train, paths[0]),
        *over_long(model, data.held_out, paths[1]),
    ]
    return list(dict.fromkeys(notes))

"""Checks of the input images of editing models: ratios and lengths in tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gesso.config import Model, Recipe
from gesso.types import Prompt, UserError

if TYPE_CHECKING:
    from gesso.data.prompts import LargestPrompt, LoadedData
    from gesso.models.flow.base import FlowModel

FEW = 8  # lengths that are compiled without a note


def check_match(recipe: Recipe, model: FlowModel) -> None:
    """Raises for a model without input images whose ratio could be matched."""
    assert isinstance(recipe.model, Model)
    if recipe.model.match_input and model.input_images.stop == 1:
        raise UserError(
            "model.match_input = true gives images the aspect ratio of input images, but model "
            f'"{recipe.model.name}" takes none; remove it'
        )


def largest(recipe: Recipe, model: FlowModel, data: LoadedData) -> LargestPrompt | None:
    """The prompt with the most tokens in an editing model. Reads only headers."""
    from gesso.data.prompts import LargestPrompt
    from gesso.models.flow.editing import EditingModel

    section = recipe.model
    assert isinstance(section, Model)
    if not isinstance(model, EditingModel):
        return None
    prompts = [*(prompt for part in data.train for prompt in part.prompts), *data.held_out]
    most = max(prompts, key=lambda p: model.token_count(p, section.height, section.width))
    return LargestPrompt(images=[image.size for image in most.images])


def notes(recipe: Recipe, model: FlowModel, prompts: Sequence[Prompt], path: str) -> list[str]:
    """Raises for input images of more sizes than can be compiled."""
    return [
        _ratios(recipe, prompts, path),
        _extremes(recipe, prompts, path),
        _lengths(recipe, model, prompts, path),
    ]


def _ratios(recipe: Recipe, prompts: Sequence[Prompt], path: str) -> str:
    """A note about input images of other aspect ratios than the output, or of rare ones."""
    from gesso.data.ratios import nearest, ratio_of

    section = recipe.model
    assert isinstance(section, Model)
    ratios = [(p, r) for p in prompts if (r := ratio_of(p)) is not None]
    if section.match_input:
        counts = Counter(str(ratio) for _, ratio in ratios)
        rare = {ratio: n for ratio, n in sorted(counts.items()) if n < recipe.data.groups}
        if not rare:
            return ""
        few = ", ".join(f"{n} of {ratio}" for ratio, n in rare.items())
        return (
            f"{path} has fewer input images of some aspect ratios than data.groups = "
            f"{recipe.data.groups} ({few}): batches of these ratios repeat their prompts"
        )
    output = nearest(section.height, section.width)
    others = [(p, r) for p, r in ratios if r != output]
    if not others:
        return ""
    prompt, ratio = others[0]
    return (
        f"{len(others)} of {len(prompts)} prompts of {path} have an input image of another aspect "
        f"ratio than the {output} of model.height and model.width; the first is {prompt.where}, "
        f"{ratio}; model.match_input = true generates each in the ratio of its input image"
    )


def _extremes(recipe: Recipe, prompts: Sequence[Prompt], path: str) -> str:
    """A note about input images that are longer than any output."""
    from gesso.data.ratios import LONGEST, too_long

    assert isinstance(recipe.model, Model)
    if not recipe.model.match_input:
        return ""
    long = [p for p in prompts if p.images and too_long(*p.images[0].size)]
    if not long:
        return ""
    return (
        f"{len(long)} of {len(prompts)} prompts of {path} have an input image wider than {LONGEST} "
        f"or taller than {LONGEST.height}:{LONGEST.width}, which their outputs get; the first is "
        f"{long[0].where}; crop its image"
    )


def _lengths(recipe: Recipe, model: FlowModel, prompts: Sequence[Prompt], path: str) -> str:
    """A note about the numbers of tokens that the network is compiled for."""
    from gesso.models.flow.compiled import GRAPHS
    from gesso.models.flow.editing import EditingModel

    section = recipe.model
    assert isinstance(section, Model)
    if not isinstance(model, EditingModel) or not model.compiled:
        return ""
    lengths = {model.token_count(prompt, section.height, section.width) for prompt in prompts}
    graphs = len(lengths) * len(model.blocks) * len(model.sizes)
    text = (
        f"input images of {path} have sizes of {len(lengths)} different numbers of tokens, and the "
        f"network is compiled for each, up to {graphs} graphs of seconds each"
    )
    advice = "crop or resize them to fewer sizes, or set model.compile = false"
    if graphs > GRAPHS:
        raise UserError(f"{text}, but at most {GRAPHS}; {advice}")
    return f"{text}; {advice}" if len(lengths) > FEW else ""

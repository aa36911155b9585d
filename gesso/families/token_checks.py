"""Checks of recipes and data for language models."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gesso.config import AnyRecipe, Recipe
from gesso.config.parsing import nearest
from gesso.data import prompts
from gesso.types import Prompt, ResponseSpec, UserError

if TYPE_CHECKING:
    from gesso.algorithms.base import Algorithm
    from gesso.models.tokens.base import TokenModel
    from gesso.track.progress import Progress


def max_tokens(recipe: Recipe, algorithm: Algorithm) -> int:
    """The maximum length of a response in training."""
    spec = algorithm.spec(0, 0, recipe.model)
    assert isinstance(spec, ResponseSpec)
    return spec.max_tokens


def check_model(recipe: AnyRecipe, where: str) -> None:
    if recipe.model.quantize is not None and recipe.sampler.engine == "vllm":
        raise UserError(
            f'{where}: sampler.engine = "{recipe.sampler.engine}" needs unquantized weights, got '
            f'model.quantize = "{recipe.model.quantize}"; remove one of them'
        )


def check_judge(recipe: Recipe, algorithm: Algorithm, where: str) -> None:
    """The reward that decides which groups are flat must be one of the recipe's."""
    from gesso.algorithms.credit import Credit

    advantage = algorithm.advantage
    reward = advantage.flat_by if isinstance(advantage, Credit) else None
    labels = [entry.label for entry in recipe.reward]
    if reward is not None and reward not in labels:
        raise UserError(
            f'{where}: algorithm.advantage.flat_by = "{reward}" is not one of the rewards'
            f"{nearest(reward, labels)}"
        )


def check_samples(recipe: Recipe, where: str) -> None:
    """Several responses of one prompt at temperature 0 would all be equal."""
    if recipe.eval.samples > 1 and recipe.eval.temperature == 0:
        raise UserError(
            f"{where}: eval.samples = {recipe.eval.samples} with eval.temperature = 0 would give "
            "equal responses; set eval.temperature, as in 1.0"
        )


def fit(
    recipe: Recipe,
    algorithm: Algorithm,
    model: TokenModel,
    data: prompts.LoadedData,
    progress: Progress,
) -> prompts.LoadedData:
    """The prompts that are short enough for the model, and the length of the longest."""
    lengths: list[int] = []
    most = max_tokens(recipe, algorithm)

    def unfit(prompt: Prompt) -> str | None:
        progress.advance()
        try:
            tokens = model.length(prompt)
            reason = too_long(model, tokens) or _given_too_long(model, prompt, most)
        except UserError as error:  # an image too narrow, a special token in the text
            return str(error).removeprefix(f"{prompt.where}: ")
        lengths.append(0 if reason else tokens)
        return reason

    count = sum(len(part.prompts) for part in data.train) + len(data.held_out)
    progress.phase("tokenizing prompts", count)
    fitting = prompts.without(data, unfit, recipe.data, "do not fit the model")
    _check_positions(recipe, algorithm, model, max(lengths))
    return replace(fitting, largest=prompts.LargestPrompt(tokens=max(lengths)))


def too_long(model: TokenModel, tokens: int) -> str | None:
    if tokens <= model.max_prompt:
        return None
    return f"{tokens} tokens, more than model.max_prompt = {model.max_prompt}"


def _given_too_long(model: Any, prompt: Prompt, most: int) -> str | None:
    """Why a given response is too long for a model that encodes them, or None."""
    longest = max((len(model.encode_response(prompt, text)) for text in prompt.given), default=0)
    if longest <= most:
        return None
    return f"a response of {longest} tokens, more than algorithm.max_tokens = {most}"


def _check_positions(recipe: Recipe, algorithm: Algorithm, model: TokenModel, longest: int) -> None:
    """Raises if a response can exceed the model's positions: beyond them the model generates noise
    and would be trained on it."""
    positions, most = model.max_positions, max_tokens(recipe, algorithm)
    if positions is None or longest + most <= positions:
        return
    fits = max(positions - longest, 0)
    lower = f"algorithm.max_tokens to {fits}" if fits else "algorithm.max_tokens"
    raise UserError(
        f"the longest prompt has {longest} tokens and a response may have algorithm.max_tokens = "
        f"{most}, in total {longest + most}, but {recipe.model.path} supports only {positions} "
        f"(max_position_embeddings in its config.json); lower {lower}, or model.max_prompt to "
        "skip the longest prompts"
    )

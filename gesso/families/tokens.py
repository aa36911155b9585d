"""Language and vision-language models: through transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gesso import config, imports
from gesso.config import AnyRecipe, Eval, Recipe, Strict
from gesso.families import classes, token_checks
from gesso.families.base import BatchSize
from gesso.types import Prompt, UserError

if TYPE_CHECKING:
    from gesso.algorithms.base import Algorithm
    from gesso.data.prompts import LargestPrompt, LoadedData
    from gesso.memory.meta import Load
    from gesso.models.tokens.base import TokenModel
    from gesso.models.tokens.critic import Critic
    from gesso.samplers.base import Sampler
    from gesso.samplers.decode import DecodingSampler
    from gesso.track.progress import Progress


MICRO_TOKENS, MAX_MICRO_TOKENS = 1024, 32 * 1024
"""Fitted micro-batches are multiples of the first. Matrix multiplications of more tokens than the
second are no faster."""


class TokenFamily:
    name: config.FamilyName = "language"
    section: type[config.AnyModel] = config.TokenModel
    models: Mapping[str, str] = classes.bundled("language")
    activity = "generating responses"
    gathers_to_sample = True
    foreign_options: Sequence[str] = ("steps", "guidance")
    default_algorithm = "grpo"
    tight_clip = False

    def protocol(self) -> type:
        from gesso.models.tokens.base import TokenModel

        return TokenModel

    def is_model(self, kind: type) -> bool:
        return imports.attribute(kind, "logp") is not None

    def model(self, recipe: AnyRecipe) -> TokenModel:
        kind = classes.load(self, recipe.model.name)
        return classes.built(kind, recipe)

    def built_in_sampler(self, recipe: AnyRecipe, model: TokenModel) -> DecodingSampler:
        from gesso.samplers.decode import DecodingSampler

        return DecodingSampler(model, recipe.sampler.batch)

    def sampler(self, recipe: Recipe, algorithm: Algorithm, model: Any) -> Sampler:
        if recipe.sampler.engine != "vllm":
            return self._without_engine(recipe, model)
        from gesso.models.tokens.transformer import TransformerModel
        from gesso.samplers.vllm import VllmSampler

        if not isinstance(model, TransformerModel):
            raise UserError(
                f'sampler.engine = "{recipe.sampler.engine}" loads models of transformers, but '
                f'model "{recipe.model.name}" does not derive from TransformerModel; remove it'
            )
        longest = model.max_prompt + token_checks.max_tokens(recipe, algorithm)
        return VllmSampler(model, recipe.sampler, longest, recipe.seed)

    def _without_engine(self, recipe: Recipe, model: Any) -> Sampler:
        built_in = self.built_in_sampler(recipe, model)
        if recipe.sampler.engine != "data":
            return built_in
        from gesso.models.tokens.base import ResponseEncoder
        from gesso.samplers.given import GivenResponses

        imports.check_class(type(model), ResponseEncoder, f'model "{recipe.model.name}"')
        return GivenResponses(built_in, recipe.sampler.batch)

    def add_critic(
        self, recipe: Recipe, algorithm: Algorithm, model: Any
    ) -> tuple[Algorithm, Critic | None]:
        from gesso.algorithms.ppo import PPO

        if not isinstance(algorithm, PPO):
            return algorithm, None
        from gesso.models.tokens import critic
        from gesso.models.tokens.transformer import TransformerModel

        if not isinstance(model, TransformerModel):
            raise UserError(
                f'algorithm "{recipe.algorithm.name}" has a critic, which requires a model derived '
                f'from TransformerModel; "{recipe.model.name}" is not; use another algorithm'
            )
        assert isinstance(recipe.model, config.TokenModel)
        options = algorithm.critic
        network = critic.make(model, recipe.model, options.trunk, options.lr, recipe.seed)
        return algorithm.with_critic(network), network

    def check_model(self, recipe: AnyRecipe, where: str) -> None:
        token_checks.check_model(recipe, where)

    def check(self, recipe: Recipe, algorithm: Algorithm, where: str) -> None:
        token_checks.check_judge(recipe, algorithm, where)
        token_checks.check_samples(recipe, where)

    def check_machine(self, recipe: Recipe, algorithm: Algorithm) -> None:
        if recipe.sampler.engine == "vllm":
            from gesso.samplers import vllm

            vllm.check_installed()

    def notes(self, recipe: Recipe, algorithm: Algorithm) -> list[str]:
        if not recipe.partial:
            return []  # micro-batches are packed by tokens
        tokens = math.ceil(token_checks.max_tokens(recipe, algorithm) / recipe.lag)
        return [
            f"partial: responses get up to {tokens} tokens per update, and unfinished ones "
            f"continue with the new weights; a token is at most {recipe.lag} updates old"
        ]

    def fit(
        self,
        recipe: Recipe,
        algorithm: Algorithm,
        model: TokenModel,
        data: LoadedData,
        progress: Progress,
    ) -> LoadedData:
        return token_checks.fit(recipe, algorithm, model, data, progress)

    def algorithm_defaults(self, recipe: AnyRecipe, kind: type) -> Mapping[str, Strict]:
        """Another engine rounds differently: its log-probs are not those of the learner."""
        if recipe.sampler.engine != "vllm":
            return {}
        from gesso.algorithms.importance import Importance
        from gesso.algorithms.policy_gradient import PolicyGradient

        return {"importance": Importance()} if issubclass(kind, PolicyGradient) else {}

    def eval_section(self, recipe: AnyRecipe, algorithm: Algorithm) -> Eval:
        return recipe.eval

    def eval_cost(self, recipe: Recipe, algorithm: Algorithm) -> float:
        return 1.0

    def network(self, model: TokenModel) -> str:
        return "model, vision tower included" if self.sees(model) else "model"

    def library_kinds(self, name: str) -> Sequence[str]:
        return list(classes.load(self, name).kinds)

    def library(self, whole: bool) -> str:
        return "transformers" if whole else "peft"

    def task(self, model: TokenModel) -> str:
        return "image-text-to-text" if self.sees(model) else "text-generation"

    def sees(self, model: TokenModel) -> bool:
        from gesso.models.tokens.vision_language import VisionLanguage

        return isinstance(model, VisionLanguage)

    def wraps_library(self, model: TokenModel) -> bool:
        from gesso.models.tokens.transformer import TransformerModel

        return isinstance(model, TransformerModel)

    def assumed_prompts(self, recipe: Recipe, largest: LargestPrompt | None) -> str:
        assert isinstance(recipe.model, config.TokenModel)
        if largest is None:
            return f"prompts of model.max_prompt = {recipe.model.max_prompt} tokens"
        return f"prompts of at most {largest.tokens} tokens"

    def batch_sizes(self, recipe: Recipe, algorithm: Algorithm) -> Sequence[BatchSize]:
        """Responses at a time, and tokens per pass: at least one response, at most an update."""
        assert isinstance(recipe.model, config.TokenModel)
        longest = recipe.model.max_prompt + token_checks.max_tokens(recipe, algorithm)
        samples = recipe.data.groups * algorithm.group
        most = min(samples // algorithm.updates * longest, max(longest, MAX_MICRO_TOKENS))
        first, last = (math.ceil(n / MICRO_TOKENS) for n in (longest, most))
        tokens = [n * MICRO_TOKENS for n in range(first, last + 1)]
        micro = BatchSize(("learner.micro_tokens",), tokens)
        if recipe.sampler.engine == "vllm":  # it has its own batches
            return [micro]
        slots = sorted({n for n in (1, 2, 4, *range(8, samples, 8), samples) if n <= samples})
        return [BatchSize(("sampler.batch",), slots), micro]

    def memory_load(self, recipe: Recipe, algorithm: Any, model: Any) -> Load:
        from gesso.memory.tokens import load

        return load(model, algorithm, recipe)

    def unfit(self, model: TokenModel, prompt: Prompt) -> str | None:
        try:
            return token_checks.too_long(model, model.length(prompt))
        except UserError as error:  # an image too narrow, an image token in the text
            return str(error).removeprefix(f"{prompt.where}: ")

    def check_prompts(self, model: TokenModel, prompts: Sequence[Prompt], spec: Any) -> list[str]:
        for prompt in prompts:
            if reason := self.unfit(model, prompt):
                raise UserError(f"{prompt.where}: {reason}")
        return []

    def truncated(self, model: TokenModel, prompts: Sequence[Prompt]) -> list[str]:
        return []  # `check_prompts` rejects prompts that are too long

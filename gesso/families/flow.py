"""Flow models, which generate images: through diffusers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gesso import config, imports
from gesso.config import AnyRecipe, Eval, Recipe, Strict
from gesso.families import classes, flow_checks, input_images
from gesso.families.base import BatchSize
from gesso.types import Prompt

if TYPE_CHECKING:
    from gesso.algorithms.base import Algorithm
    from gesso.data.prompts import LargestPrompt, LoadedData
    from gesso.memory.meta import Load
    from gesso.models.flow.base import FlowModel
    from gesso.samplers.base import Sampler
    from gesso.samplers.denoise import DenoisingSampler
    from gesso.track.progress import Progress

REQUEST = "this request"  # used instead of a file name in notes


class FlowFamily:
    name: config.FamilyName = "flow"
    section: type[config.AnyModel] = config.Model
    models: Mapping[str, str] = classes.bundled("flow")
    activity = "generating images"
    gathers_to_sample = False
    foreign_options: Sequence[str] = ("temperature",)
    default_algorithm = "flow-grpo"
    tight_clip = True

    def protocol(self) -> type:
        from gesso.models.flow.base import FlowModel

        return FlowModel

    def is_model(self, kind: type) -> bool:
        return imports.attribute(kind, "velocity") is not None

    def model(self, recipe: AnyRecipe) -> FlowModel:
        """A constructor with a parameter `sizes` receives the batch sizes that its network will run
        with, to compile for them."""
        from gesso.models.flow.compiled import sizes

        kind = classes.load(self, recipe.model.name)
        rows = sizes(recipe.sampler.batch, recipe.learner.micro_batch)
        more = {"sizes": rows} if classes.accepts(kind, "sizes") else {}
        return classes.built(kind, recipe, **more)

    def built_in_sampler(self, recipe: AnyRecipe, model: FlowModel) -> DenoisingSampler:
        from gesso.samplers.denoise import DenoisingSampler

        return DenoisingSampler(model, recipe.sampler.batch)

    def sampler(self, recipe: Recipe, algorithm: Algorithm, model: FlowModel) -> Sampler:
        """`check_model` rejects other engines."""
        built_in = self.built_in_sampler(recipe, model)
        if recipe.sampler.engine != "data":
            return built_in
        from gesso.models.flow.base import ImageEncoder
        from gesso.samplers.given import GivenImages

        imports.check_class(type(model), ImageEncoder, f'model "{recipe.model.name}"')
        return GivenImages(built_in, recipe.sampler.batch)

    def add_critic(
        self, recipe: Recipe, algorithm: Algorithm, model: FlowModel
    ) -> tuple[Algorithm, None]:
        from gesso.algorithms.reward_gradient import RewardGradient
        from gesso.rewards import assembly

        if not isinstance(algorithm, RewardGradient):
            return algorithm, None
        flow_checks.check_decodes(recipe, model)
        return algorithm.with_reward(assembly.with_gradient(recipe.reward)), None

    def check_model(self, recipe: AnyRecipe, where: str) -> None:
        flow_checks.check_model(recipe, where)

    def check(self, recipe: Recipe, algorithm: Algorithm, where: str) -> None:
        flow_checks.check_one_pass(recipe, algorithm, where)
        flow_checks.check_ratios(recipe, where)
        flow_checks.check_rewards(recipe, algorithm)

    def check_machine(self, recipe: Recipe, algorithm: Algorithm) -> None:
        flow_checks.check_folds(recipe, algorithm)
        flow_checks.check_encoder(recipe, algorithm)

    def notes(self, recipe: Recipe, algorithm: Algorithm) -> list[str]:
        return flow_checks.ragged(recipe, algorithm)

    def fit(
        self,
        recipe: Recipe,
        algorithm: Algorithm,
        model: FlowModel,
        data: LoadedData,
        progress: Progress,
    ) -> LoadedData:
        data = flow_checks.fit_sizes(recipe, model, data)
        notes = flow_checks.check_data(recipe, algorithm, model, data)
        largest = input_images.largest(recipe, model, data)
        return replace(data, notes=[*data.notes, *notes], largest=largest)

    def algorithm_defaults(self, recipe: AnyRecipe, kind: type) -> Mapping[str, Strict]:
        return {}

    def eval_section(self, recipe: AnyRecipe, algorithm: Algorithm) -> Eval:
        if recipe.eval.guidance is not None:
            return recipe.eval
        guidance = flow_checks.sample_spec(recipe, algorithm).guidance
        return recipe.eval.model_copy(update={"guidance": guidance})

    def eval_cost(self, recipe: Recipe, algorithm: Algorithm) -> float:
        trained = flow_checks.sample_spec(recipe, algorithm)
        evaluated = flow_checks.eval_spec(recipe, algorithm)
        pixels = math.prod(evaluated.size) / math.prod(trained.size)
        return pixels * evaluated.steps / trained.steps

    def network(self, model: FlowModel) -> str:
        return "transformer"

    def library_kinds(self, name: str) -> Sequence[str]:
        return [classes.load(self, name).pipeline]

    def library(self, whole: bool) -> str:
        return "diffusers"

    def task(self, model: FlowModel) -> str:
        return "image-to-image" if self.sees(model) else "text-to-image"

    def sees(self, model: FlowModel) -> bool:
        return model.input_images.stop > 1

    def wraps_library(self, model: FlowModel) -> bool:
        from gesso.models.flow.pipeline import PipelineModel

        return isinstance(model, PipelineModel)

    def assumed_prompts(self, recipe: Recipe, largest: LargestPrompt | None) -> str:
        from gesso.models.flow.editing import EditingModel

        kind = classes.load(self, recipe.model.name)
        if not issubclass(kind, EditingModel):
            return ""
        if largest is not None and largest.images is not None:
            count, least = len(largest.images), "at most "
        else:
            count, least = int(classes.needs_images(self, recipe.model.name)), ""
        if not count:
            return "prompts without input images"
        return f"{least}{count} input image{'s' if count > 1 else ''} per prompt"

    def batch_sizes(self, recipe: Recipe, algorithm: Algorithm) -> Sequence[BatchSize]:
        """One size for sampling and training, which then round alike in half precision. It divides
        the samples of an update, so that all batches are full."""
        samples = recipe.data.groups * algorithm.group // algorithm.updates
        divisors = [n for n in range(1, samples + 1) if samples % n == 0]
        return [BatchSize(("sampler.batch", "learner.micro_batch"), divisors)]

    def memory_load(self, recipe: Recipe, algorithm: Any, model: Any) -> Load:
        """The memory of a run, without the networks of rewards."""
        from gesso.algorithms.reward_gradient import RewardGradient
        from gesso.memory.flow import load

        if isinstance(algorithm, RewardGradient):
            algorithm = algorithm.with_reward(lambda images, prompts: images.mean((1, 2, 3)))
        return load(model, algorithm, recipe)

    def unfit(self, model: FlowModel, prompt: Prompt) -> str | None:
        from gesso.models.flow.base import wrong_images

        return wrong_images(model, prompt)

    def check_prompts(self, model: FlowModel, prompts: Sequence[Prompt], spec: Any) -> list[str]:
        from gesso.models.flow.base import check_guidance, check_images, unused_negatives

        check_images(model, prompts)
        flow_checks.check_rows(prompts, spec, "eval")
        check_guidance(model, spec.guidance, prompts)
        return unused_negatives(model, spec.guidance, prompts, REQUEST, "guidance")

    def truncated(self, model: FlowModel, prompts: Sequence[Prompt]) -> list[str]:
        from gesso.models.flow.base import over_long

        return over_long(model, prompts, REQUEST)

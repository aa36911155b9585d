"""Checks of recipes and data for flow models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gesso import imports, video_files
from gesso.config import AnyRecipe, Model, Recipe, pick_device
from gesso.families import input_images
from gesso.types import Prompt, SampleSpec, UserError

if TYPE_CHECKING:
    from gesso.algorithms.base import Algorithm
    from gesso.data.prompts import LoadedData
    from gesso.models.flow.base import FlowModel

SLOWEST = 0.9  # of model.fps: clips with fewer frames per second are reported


def sample_spec(recipe: AnyRecipe, algorithm: Algorithm) -> SampleSpec:
    """How the first training batch is sampled."""
    spec = algorithm.spec(0, 0, recipe.model)
    assert isinstance(spec, SampleSpec)
    return spec


def eval_spec(recipe: AnyRecipe, algorithm: Algorithm) -> SampleSpec:
    """How samples of evaluations are generated."""
    assert isinstance(recipe.model, Model)
    spec = algorithm.eval_spec(recipe.eval, recipe.model, "current")
    assert isinstance(spec, SampleSpec)
    return spec


def one_pass(recipe: Recipe, algorithm: Algorithm) -> bool:
    """Whether per-sample gradients are computed during sampling."""
    return sample_spec(recipe, algorithm).per_sample_grads


def check_model(recipe: AnyRecipe, where: str) -> None:
    if recipe.data.template or recipe.data.system:
        raise UserError(
            f"{where}: data.template and data.system are for language models, but model.name = "
            f'"{recipe.model.name}" is a flow model; remove them'
        )
    if recipe.sampler.engine == "vllm":
        raise UserError(
            f'{where}: sampler.engine = "{recipe.sampler.engine}" is for language models, but '
            f'model.name = "{recipe.model.name}" is a flow model; remove it'
        )


def check_one_pass(recipe: Recipe, algorithm: Algorithm, where: str) -> None:
    """Per-sample gradients during sampling need a LoRA that is folded into the sampler's
    weights."""
    if not one_pass(recipe, algorithm):
        return
    section, lag = recipe.model, recipe.lag
    wrong = {
        f"lag = {lag}, which updates newer weights than it samples with; set lag = 0": lag > 0,
        "full fine-tuning; set model.lora.rank": section.lora is None,
        f'quantize = "{section.quantize}"; remove model.quantize': section.quantize is not None,
        "fold = false; remove model.fold, or set it to true": section.fold is False,
    }
    for got, applies in wrong.items():
        if applies:
            raise UserError(
                f"{where}: algorithm.one_pass = true computes per-sample gradients during sampling "
                f"and needs a LoRA that is folded into the weights, got {got}"
            )


def check_ratios(recipe: Recipe, where: str) -> None:
    """Batches of one ratio and those of a curriculum are two ways to choose prompts."""
    assert isinstance(recipe.model, Model)
    if recipe.model.match_input and recipe.data.curriculum is not None:
        raise UserError(
            f"{where}: model.match_input = true trains on batches of one aspect ratio and does not "
            "support data.curriculum; remove one of them"
        )


def check_rewards(recipe: Recipe, algorithm: Algorithm) -> None:
    """Raises for rewards without a gradient, if the algorithm needs it."""
    from gesso.algorithms.reward_gradient import RewardGradient
    from gesso.rewards.assembly import check_differentiable

    if isinstance(algorithm, RewardGradient):
        check_differentiable(recipe.reward, recipe.algorithm.name)


def check_decodes(recipe: Recipe, model: FlowModel) -> None:
    """Raises for a model without images(latents)."""
    if not callable(imports.attribute(type(model), "images")):
        raise UserError(
            f'algorithm "{recipe.algorithm.name}" needs the gradient of decoded images, but model '
            f'"{recipe.model.name}" has no method images(latents); use another algorithm'
        )


def check_folds(recipe: Recipe, algorithm: Algorithm) -> None:
    """Raises if gradients are computed during sampling on a device that does not fold adapters by
    default."""
    if not one_pass(recipe, algorithm):
        return
    from gesso.weights.folding_rule import folds_lora

    assert isinstance(recipe.model, Model)
    device = pick_device(recipe.model.device, "model.device")
    if not folds_lora(recipe.model, device.type):
        raise UserError(
            "algorithm.one_pass = true needs adapters that are folded into the weights, which is "
            f'not the default on device "{device}"; set model.fold = true'
        )


def check_encoder(recipe: Recipe, algorithm: Algorithm) -> None:
    """Raises if videos cannot be saved on this machine."""
    specs = sample_spec(recipe, algorithm), eval_spec(recipe, algorithm)
    if any(spec.frames > 1 for spec in specs):
        video_files.encoder()


def check_rows(prompts: Sequence[Prompt], spec: SampleSpec, key: str) -> None:
    """Raises for a row whose columns `frames` or `fps` are not those of the videos of the run."""
    for prompt in prompts if spec.frames > 1 else ():
        for column, value in (("frames", spec.frames), ("fps", spec.fps)):
            given = prompt.columns.get(column)
            if given is None:  # also a missing value of a parquet column
                continue
            if not isinstance(given, int | float):
                raise UserError(
                    f"{prompt.where}: {column} is {given!r:.40}, not a number; expected {value:g}, "
                    "or no such column"
                )
            if given != value:
                setting = f"{key}.frames" if column == "frames" else "model.fps"
                raise UserError(
                    f"{prompt.where}: {column} is {given!r:.40}, but all samples of a run have "
                    f"{setting} = {value:g}; change the setting, or drop the column"
                )


def ragged(recipe: Recipe, algorithm: Algorithm) -> list[str]:
    """At most one note: the micro-batches do not divide the update evenly. Gradients that are
    computed during sampling need no micro-batches."""
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
        f"divide evenly: the last one has {terms % size}; use learner.micro_batch = {below} or "
        f"{above}"
    ]


def _check_teachers(algorithm: Algorithm, model: FlowModel, prompts: Sequence[Prompt]) -> None:
    """Raises for a prompt without a teacher, or guidance that the model would ignore."""
    from gesso.algorithms.flow_opd import FlowOPD
    from gesso.algorithms.teachers import teacher_of
    from gesso.models.flow.base import check_guidance

    if not isinstance(algorithm, FlowOPD):
        return
    for scale in algorithm.scales:
        check_guidance(model, scale, prompts)
    for prompt in prompts:
        teacher_of(prompt, algorithm.column, algorithm.teachers)


def fit_sizes(recipe: Recipe, model: FlowModel, data: LoadedData) -> LoadedData:
    """The prompts without input images of sizes that the model does not accept."""
    from gesso.data import prompts
    from gesso.models.flow.base import wrong_sizes

    def unfit(prompt: Prompt) -> str | None:
        return wrong_sizes(model, prompt)

    return prompts.without(data, unfit, recipe.data, "do not fit the model")


def check_data(
    recipe: Recipe, algorithm: Algorithm, model: FlowModel, data: LoadedData
) -> list[str]:
    """Raises for sizes, input images, guidance and negative prompts that the model does not accept;
    returns notes about negative prompts that are not used and prompts that are truncated."""
    from gesso.models.flow.base import check_guidance, check_images, over_long, unused_negatives

    spec = sample_spec(recipe, algorithm)
    evaluated = eval_spec(recipe, algorithm)
    model.latent_shape(*spec.size)
    _check_eval_size(recipe, model, evaluated)
    train = [prompt for part in data.train for prompt in part.prompts]
    check_rows(train, spec, "model")
    check_rows(data.held_out, evaluated, "model" if recipe.eval.frames is None else "eval")
    _check_first_frames(recipe, [*train, *data.held_out])
    check_images(model, [*train, *data.held_out])
    input_images.check_match(recipe, model)
    check_guidance(model, spec.guidance, train)
    _check_teachers(algorithm, model, train)
    guidance = spec.guidance if recipe.eval.guidance is None else recipe.eval.guidance
    check_guidance(model, guidance, data.held_out)
    paths = [" and ".join(s.path for s in part) for part in (recipe.data.train, recipe.data.eval)]
    notes = [
        *unused_negatives(model, spec.guidance, train, paths[0], "algorithm.guidance"),
        *unused_negatives(model, guidance, data.held_out, paths[1], "eval.guidance"),
        *over_long(model, train, paths[0]),
        *over_long(model, data.held_out, paths[1]),
    ]
    notes += input_images.notes(recipe, model, train, paths[0])
    notes.append(_unused_scale(recipe, max(spec.guidance, guidance)))
    if recipe.sampler.engine == "data":
        notes += [_enlarged(train, spec, paths[0]), _slower(train, spec, paths[0])]
    return [note for note in dict.fromkeys(notes) if note]


def _check_first_frames(recipe: Recipe, prompts: Sequence[Prompt]) -> None:
    """Raises for a row without an image. Latents of the two kinds of TI2V differ in shape."""
    for prompt in prompts if recipe.model.name == "wan-i2v" else ():
        if not prompt.images:
            raise UserError(
                f'{prompt.where}: model.name = "wan-i2v" expects a column "image", the first frame '
                "of the video; with Wan 2.2 TI2V rows without it train in a run of their own, with "
                'model.name = "wan"'
            )


def _check_eval_size(recipe: Recipe, model: FlowModel, spec: SampleSpec) -> None:
    given = recipe.eval.model_dump(include={"height", "width", "frames"}, exclude_none=True)
    try:
        model.latent_shape(*spec.size)
    except UserError as error:
        settings = ", ".join(f"eval.{key} = {value}" for key, value in given.items())
        raise UserError(f"{settings}: {error}") from error


def _unused_scale(recipe: Recipe, guidance: float) -> str:
    """A note about a scale of the second expert without guidance, as in diffusers."""
    assert isinstance(recipe.model, Model)
    if recipe.model.guidance_2 is None or guidance > 1:
        return ""
    return (
        f"model.guidance_2 = {recipe.model.guidance_2:g} is not used: guidance is off; set "
        "algorithm.guidance or eval.guidance above 1"
    )


def _enlarged(prompts: Sequence[Prompt], spec: SampleSpec, path: str) -> str:
    """A note about given images or clips that are smaller than what the model is trained on."""
    images = [image for prompt in prompts for image in prompt.all_images]
    small = [i for i in images if i.size[0] < spec.height or i.size[1] < spec.width]
    if not small:
        return ""
    height, width = small[0].size
    return (
        f"{len(small)} of {len(images)} {small[0].kind}s of {path} are smaller than model.height × "
        f"model.width = {spec.height} × {spec.width} and are enlarged; the first is "
        f"{small[0].path or 'embedded'}, {height} × {width}"
    )


def _slower(prompts: Sequence[Prompt], spec: SampleSpec, path: str) -> str:
    """A note about clips with fewer frames per second than what the model is trained on."""
    given = [clip for prompt in prompts for clip in prompt.given]
    clips = [clip for clip in given if isinstance(clip, video_files.PromptClip)]
    slow = [(clip, rate) for clip in clips if (rate := clip.rate) < SLOWEST * spec.fps]
    if not slow:
        return ""
    first, rate = slow[0]
    return (
        f"{len(slow)} of {len(clips)} clips of {path} have fewer frames per second than model.fps "
        f"= {spec.fps:g} and their frames are repeated; the first is {first.path or 'embedded'} "
        f"with {rate:.4g}; set model.fps to at most {min(rate for _, rate in slow):.4g}"
    )

"""Whether the parts of a recipe go together, with each other and with the machine: what no part can
see by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gesso.config import MAX_SAMPLES, Model, Recipe, family, pick_device
from gesso.config.parsing import nearest
from gesso.types import SampleSpec, UserError

if TYPE_CHECKING:
    from gesso.algorithms.base import Algorithm


def check(found: Recipe, chosen: Algorithm, where: str) -> None:
    """Raises a UserError where they do not."""
    _check_device(found, where)
    _check_family(found, where)
    _check_sizes(found, chosen, where)
    _check_slopes(found, chosen, where)


def _check_device(found: Recipe, where: str) -> None:
    """Gesso itself puts models on torch's meta device, to estimate their memory."""
    device = found.model.device
    if device.partition(":")[0] == "meta":
        raise UserError(
            f'{where}: model.device = "{device}" has shapes and no values; use "auto", "cpu" or '
            '"cuda"'
        )


def _check_family(found: Recipe, where: str) -> None:
    """Sections that a model of the other family would leave unread."""
    own = family(found.model)
    if own == "draws" and (found.data.template or found.data.system):
        raise UserError(
            f"{where}: data.template and data.system are for models that write, and model.name = "
            f'"{found.model.name}" draws; leave them out'
        )
    if own == "draws" and found.sampler.engine != "built-in":
        raise UserError(
            f'{where}: sampler.engine = "{found.sampler.engine}" is for models that write, and '
            f'model.name = "{found.model.name}" draws; leave it out'
        )
    if found.model.quantize is not None and found.sampler.engine != "built-in":
        raise UserError(
            f'{where}: sampler.engine = "{found.sampler.engine}" takes whole weights, and '
            f'model.quantize = "{found.model.quantize}" has none; leave one of them out'
        )


def _check_sizes(found: Recipe, chosen: Algorithm, where: str) -> None:
    """All updates of a rollout must be equally large, and refills of the step's own weights."""
    if chosen.refills and found.lag:
        raise UserError(f"{where}: refills draw anew for this step's weights; use lag = 0")
    judged = chosen.advantage.flat_by if chosen.family == "writes" else None  # type: ignore[attr-defined]
    names = [entry.label for entry in found.reward]
    if judged is not None and judged not in names:
        raise UserError(
            f'{where}: algorithm.advantage.flat_by = "{judged}" is none of the rewards'
            f"{nearest(judged, names)}"
        )
    samples, updates = found.data.groups * chosen.group, chosen.updates
    if samples > MAX_SAMPLES:
        raise UserError(
            f"{where}: data.groups × algorithm.group = {found.data.groups} × {chosen.group} = "
            f"{samples:,} samples a step; at most {MAX_SAMPLES:,} are held in memory"
        )
    if samples % updates:
        fit = [n for n in range(1, samples + 1) if samples % n == 0]
        near = sorted(sorted(fit, key=lambda n: abs(n - updates))[:2])
        raise UserError(
            f"{where}: data.groups × algorithm.group = {found.data.groups} × {chosen.group} = "
            f"{samples} samples cannot be split into {updates} updates; use algorithm.updates = "
            f"{' or '.join(map(str, near))}"
        )


def _takes_slopes(found: Recipe, chosen: Algorithm) -> bool:
    """Whether gradients are taken while sampling."""
    spec = chosen.spec(0, 0, found.model)
    return isinstance(spec, SampleSpec) and spec.per_sample_grads


def _check_slopes(found: Recipe, chosen: Algorithm, where: str) -> None:
    """They are those of a LoRA in the weights that draw, a sample each."""
    if not _takes_slopes(found, chosen):
        return
    section = found.model
    assert isinstance(section, Model)
    wrong = {
        f"lag = {found.lag}, which learns with later weights than draw; set lag = 0": found.lag > 0,
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


def check_folds(found: Recipe, chosen: Algorithm) -> None:
    """Raises where gradients are to be taken while sampling, and the device is none on which
    adapters are folded by themselves."""
    if not _takes_slopes(found, chosen):
        return
    from gesso.weights.folding_rule import folds_lora

    assert isinstance(found.model, Model)
    device = pick_device(found.model.device, "model.device")
    if not folds_lora(found.model, device.type):
        raise UserError(
            "algorithm.one_pass = true needs adapters that are folded into the weights, which on "
            f'device "{device}" they are only if asked for; set model.fold = true'
        )


def ragged(found: Recipe, chosen: Algorithm) -> str | None:
    """A sentence about micro-batches that do not come out even, or None. Replies are packed by
    their tokens and need not, and what is differentiated while it is drawn has none."""
    if chosen.family == "writes" or _takes_slopes(found, chosen):
        return None
    terms = found.data.groups * chosen.group // chosen.updates * chosen.terms_a_sample
    size = found.learner.micro_batch
    if terms <= size or terms % size == 0:
        return None
    fit = [n for n in range(1, terms + 1) if terms % n == 0]
    below, above = max(n for n in fit if n < size), min(n for n in fit if n > size)
    return (
        f"an update has {terms} terms (samples × steps), which micro-batches of {size} do not "
        f"divide: the last holds {terms % size}; learner.micro_batch = {below} or {above} would fit"
    )


def check_engine(found: Recipe) -> None:
    """Raises where the recipe's engine is not installed."""
    if found.sampler.engine == "vllm":
        from gesso.samplers import vllm

        vllm.check_installed()

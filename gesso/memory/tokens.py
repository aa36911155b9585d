"""Memory of language models: an update, a batch of responses, and an image.

Prompts and responses have the greatest length that the recipe allows, and a prompt is an image as
far as possible. So this is an upper bound; a run usually takes less.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from gesso.algorithms.base import Algorithm
from gesso.algorithms.policy_gradient import PolicyGradient, PreparedResponses, ResponseTerms
from gesso.config import Recipe
from gesso.memory.functions import Autocast, Replaced
from gesso.memory.meta import Load, nbytes, tensors_of
from gesso.models.tokens.critic import Critic
from gesso.models.tokens.transformer import TransformerModel
from gesso.models.tokens.vision_language import VisionLanguage
from gesso.rollout import TokenTrace
from gesso.samplers.decode import PREFILL_TOKENS
from gesso.samplers.drawing import inverse_cdf
from gesso.samplers.slots import SlotCache
from gesso.weights.folding_rule import estimated_to_fold

STORED = (
    8 + 1 + 4 + 8 + 4
)  # bytes per response token: id, mask, log-prob, advantage, weight in the loss
STORED_OF_KL, STORED_OF_CRITIC = 4, 4 + 8  # the reference's log-prob; value and return


Work = Callable[[], object]


def load(model: TransformerModel, algorithm: Algorithm, recipe: Recipe) -> Load:
    assert isinstance(algorithm, PolicyGradient)
    trunk = _trunk(algorithm)
    models = [model, *([trunk] if trunk else [])]
    small = recipe.model.quantize is not None
    autocast = _autocast(models)
    return Load(
        networks=_networks(model, trunk, small),
        stored=_stored(algorithm, recipe),
        tensors=tensors_of(m.module for m in models),
        update=autocast(_update(model, algorithm, recipe)),
        works={name: autocast(work) for name, work in _works(model, algorithm, recipe)},
        host=_host(models, recipe),
    )


def _autocast(models: Sequence[TransformerModel]) -> Callable[[Work], Work]:
    """What runs some work under autocast, which torch does not have for the meta device."""
    if not models[0].runs_in_half:
        return lambda work: work
    autocast = Autocast(models[0].dtype)
    for model in models:
        model.use_autocast(autocast.region)

    def wrapped(work: Work) -> Work:
        def run() -> object:
            with Replaced({nn.functional.linear: autocast.linear}):
                return work()

        return run

    return wrapped


def _host(models: Sequence[TransformerModel], recipe: Recipe) -> dict[str, int]:
    """Preprocessed images of a batch, and cached image features."""
    prompts = max(recipe.data.groups, recipe.eval.prompts)
    pixels = models[0].blank(models[0].max_prompt).pixels
    sizes = {
        "features of pictures, up to": sum(model.feature_cache_limit for model in models),
        "pixels of pictures, up to": 0 if pixels is None else prompts * pixels.nbytes,
    }
    return {name: size for name, size in sizes.items() if size}


def _trunk(algorithm: PolicyGradient) -> TransformerModel | None:
    """The critic's network, where it has one of its own."""
    critic = algorithm.critic_network
    is_separate = isinstance(critic, Critic) and isinstance(critic.trunk, TransformerModel)
    return critic.trunk if is_separate else None  # type: ignore[union-attr]


def _networks(
    model: TransformerModel, trunk: TransformerModel | None, small: bool
) -> dict[str, int]:
    """Vision tower and head are never quantized."""
    whole = nbytes(model.module, [model.decoder] if small else [])
    tower = nbytes(model.tower) if model.tower is not None else 0
    critic = nbytes(trunk.module, [trunk.decoder] if small else []) if trunk else 0
    return {"language model": whole - tower, "vision tower": tower, "critic": critic}


def _stored(algorithm: PolicyGradient, recipe: Recipe) -> int:
    tokens = recipe.data.groups * algorithm.group * algorithm.max_tokens
    of_kl = STORED_OF_KL if algorithm.kl else 0
    return tokens * (STORED + of_kl + (STORED_OF_CRITIC if algorithm.critic_network else 0))


def _update(model: TransformerModel, algorithm: PolicyGradient, recipe: Recipe) -> Work:
    terms = _terms(model, algorithm, recipe)

    def update() -> object:
        folded = _folded(model, recipe)
        algorithm.loss(model, terms).loss.sum().backward()
        return folded

    return update


def _works(
    model: TransformerModel, algorithm: PolicyGradient, recipe: Recipe
) -> Iterator[tuple[str, Work]]:
    if recipe.sampler.engine == "built-in":  # another has a share of the device
        yield "writing", lambda: _write(model, algorithm, recipe)
    prompt = model.blank(model.max_prompt)
    if isinstance(model, VisionLanguage) and prompt.grid is not None:

        @torch.no_grad()
        def see() -> object:
            with model.precision():
                return model.tower_features(prompt)

        yield "seeing a picture", see


def _terms(model: TransformerModel, algorithm: PolicyGradient, recipe: Recipe) -> ResponseTerms:
    """A full micro-batch: responses to different prompts, all of one length, so that the mask is
    all ones."""
    longest = model.max_prompt + algorithm.max_tokens
    most = recipe.data.groups * algorithm.group // algorithm.updates * longest
    tokens = min(max(recipe.learner.micro_tokens, longest), most)
    n = math.ceil(tokens / longest)
    response = max(1, algorithm.max_tokens * tokens // (n * longest))
    prompts = [model.blank(max(1, tokens // n - response)) for _ in range(n)]
    mask = torch.ones(n, response, dtype=torch.bool)
    ids = torch.zeros(n, response, dtype=torch.long)
    trace = TokenTrace(prompts, torch.arange(n), ids, mask, torch.zeros(n, dtype=torch.bool))
    fields = dataclasses.fields(PreparedResponses)
    prepared = PreparedResponses(*(torch.empty(n, response, device="meta") for _ in fields))
    return ResponseTerms(1, trace, prepared, torch.empty(n, response, device="meta"))


@torch.no_grad()
def _write(model: TransformerModel, algorithm: PolicyGradient, recipe: Recipe) -> None:
    """As `samplers/decode.py` does it: prompts are read, some at a time, into the slots of a cache,
    and a step of all slots is taken. In evaluation every slot has a prompt of its own."""
    samples = max(recipe.data.groups * algorithm.group, recipe.eval.prompts)
    slots = min(recipe.sampler.batch, samples)
    prompts = max(min(slots, recipe.eval.prompts), math.ceil(slots / algorithm.group))
    prompt = model.blank(model.max_prompt)
    max_length = -(-(model.max_prompt + algorithm.max_tokens) // 64) * 64
    with model.generating("current")():
        copies = _folded(model, recipe) or _joined(model, recipe)
        like = model.prefill([prompt])[0]
        cache = SlotCache(like, slots, max_length)
        at_once = min(prompts, max(1, PREFILL_TOKENS // model.max_prompt))
        kept = [
            torch.empty_like(tensor)
            for _ in range(prompts - at_once)
            for tensor in (*like.keys, *like.values)
        ]
        read = model.prefill([prompt] * at_once)
        del read, kept  # they have entered the cache
        one = torch.zeros(slots, dtype=torch.long, device="meta")
        states = model.step(one, one, cache.place.mask, cache)
        logits = model.logits(states, algorithm.temperature)
        inverse_cdf(logits, torch.empty(slots, dtype=torch.float64, device="meta"))
        del copies


def _folded(model: TransformerModel, recipe: Recipe) -> list[Tensor]:
    """The weights with their adapters in them, as `model.fold` keeps them. A recipe in float32 that
    does not ask for it is taken for one of a CPU, where nothing is folded."""
    if not estimated_to_fold(recipe.model):
        return []
    names = {name.split(".lora_")[0] for name in model.policy.trainable}
    layers = (model.module.get_submodule(name) for name in names)
    return [torch.empty_like(layer.base_layer.weight) for layer in layers]


def _joined(model: TransformerModel, recipe: Recipe) -> list[Tensor]:
    """The weights that `stepping.py` concatenates. None with a LoRA: folded weights are counted
    already, and without folding `stepping.py` is not used."""
    if recipe.model.quantize is not None or recipe.model.lora is not None:
        return []
    parts = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    layers = (m for name, m in model.decoder.named_modules() if name.endswith(parts))
    return [torch.empty_like(m.weight, dtype=model.dtype) for m in layers]

"""Memory of language models: an update, decoding a batch, and encoding an image.

Prompts and responses have the maximum length that the recipe allows, and prompts consist of as many
image tokens as possible. So this is an upper bound; a run usually takes less.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gesso.algorithms.base import Algorithm
from gesso.algorithms.likelihood import LikelihoodAlgorithm, LikelihoodTerms
from gesso.algorithms.opd import OPD
from gesso.algorithms.policy_gradient import PolicyGradient, PreparedResponses, ResponseTerms
from gesso.config import Recipe, TokenModel
from gesso.memory.functions import Autocast, Replaced
from gesso.memory.meta import Load, nbytes, tensors_of
from gesso.models.tokens.critic import Critic
from gesso.models.tokens.teacher import FrozenTeacher, make_teacher
from gesso.models.tokens.transformer import TransformerModel
from gesso.models.tokens.vision_language import VisionLanguage
from gesso.samplers.decode import PREFILL_TOKENS
from gesso.samplers.next_token import inverse_cdf
from gesso.samplers.slots import SlotCache
from gesso.traces.tokens import TokenTrace
from gesso.weights.folding_rule import estimated_to_fold

STORED = (
    8 + 1 + 4 + 8 + 4
)  # bytes per response token: id, mask, log-prob, advantage, weight in the loss
STORED_OF_LIKELIHOOD = 8 + 1 + 4 + 4  # without an advantage
STORED_OF_KL, STORED_OF_CRITIC = 4, 4 + 8  # the reference's log-prob; value and return

TEACHING, DECODING, SEEING = "the teacher's log-probs", "decoding", "encoding an image"

Work = Callable[[], object]
TokenAlgorithm = PolicyGradient | LikelihoodAlgorithm


def load(model: TransformerModel, algorithm: Algorithm, recipe: Recipe) -> Load:
    assert isinstance(algorithm, TokenAlgorithm)
    trunk, teacher = _trunk(algorithm), _teacher(model, algorithm, recipe)
    teacher_network = teacher.network if teacher else None
    models = [m for m in (model, trunk, teacher_network) if m is not None]
    quantized = recipe.model.quantize is not None
    autocast = _autocast(models)
    return Load(
        networks=_networks(model, quantized)
        | {"critic": _size(trunk, quantized), "teacher": _size(teacher_network, quantized)},
        stored=_stored(algorithm, recipe),
        tensors=tensors_of(m.module for m in models),
        update=autocast(_update(model, algorithm, recipe)),
        works={name: autocast(work) for name, work in _works(model, algorithm, recipe, teacher)},
        host=_host(models, recipe),
        of_learners=frozenset({TEACHING, SEEING}),
        of_samplers=frozenset({DECODING, SEEING}),
    )


def _autocast(models: Sequence[TransformerModel]) -> Callable[[Work], Work]:
    """A wrapper that runs work under autocast, which torch lacks for the meta device."""
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
        "image features, up to": sum(model.feature_cache_limit for model in models),
        "image pixels, up to": 0 if pixels is None else prompts * pixels.nbytes,
    }
    return {name: size for name, size in sizes.items() if size}


def _trunk(algorithm: TokenAlgorithm) -> TransformerModel | None:
    """The critic's network, if it is separate from the policy's."""
    critic = algorithm.critic_network if isinstance(algorithm, PolicyGradient) else None
    is_separate = isinstance(critic, Critic) and isinstance(critic.trunk, TransformerModel)
    return critic.trunk if is_separate else None  # type: ignore[union-attr]


def _teacher(
    model: TransformerModel, algorithm: TokenAlgorithm, recipe: Recipe
) -> FrozenTeacher | None:
    """A teacher that is another model."""
    if not isinstance(algorithm, OPD) or algorithm.teacher.path is None:
        return None
    assert isinstance(recipe.model, TokenModel)
    section = recipe.model.model_copy(update={"device": "meta", "quantize": None})
    return make_teacher(model, section, algorithm.teacher.path)


def _networks(model: TransformerModel, quantized: bool) -> dict[str, int]:
    tower = nbytes(model.tower) if model.tower is not None else 0
    return {"language model": _size(model, quantized) - tower, "vision tower": tower}


def _size(model: TransformerModel | None, quantized: bool) -> int:
    """Vision tower and LM head are never quantized."""
    return nbytes(model.module, [model.decoder] if quantized else []) if model else 0


def _stored(algorithm: TokenAlgorithm, recipe: Recipe) -> int:
    tokens = recipe.data.groups * algorithm.group * algorithm.max_tokens
    if isinstance(algorithm, LikelihoodAlgorithm):
        return tokens * STORED_OF_LIKELIHOOD
    of_kl = STORED_OF_KL if algorithm.kl else 0
    return tokens * (STORED + of_kl + (STORED_OF_CRITIC if algorithm.critic_network else 0))


def _update(model: TransformerModel, algorithm: TokenAlgorithm, recipe: Recipe) -> Work:
    terms = _terms(model, algorithm, recipe)

    def update() -> object:
        folded = _folded(model, recipe)
        algorithm.loss(model, terms).loss.sum().backward()
        return folded

    return update


def _works(
    model: TransformerModel,
    algorithm: TokenAlgorithm,
    recipe: Recipe,
    taught_by: FrozenTeacher | None,
) -> Iterator[tuple[str, Work]]:
    if taught_by is not None:
        trace = _terms(model, algorithm, recipe).trace
        scoring = torch.no_grad()(lambda: taught_by.logp(trace, algorithm.temperature))
        yield TEACHING, scoring
    if recipe.sampler.engine != "vllm":  # which reserves a share of the device
        yield DECODING, lambda: _decode(model, algorithm, recipe)
    prompt = model.blank(model.max_prompt)
    if isinstance(model, VisionLanguage) and prompt.grid is not None:

        @torch.no_grad()
        def encode() -> object:
            with model.precision():
                return model.tower_features(prompt)

        yield SEEING, encode


def _terms(model: TransformerModel, algorithm: TokenAlgorithm, recipe: Recipe) -> Any:
    """Terms of a full micro-batch: responses to different prompts, all of the same length, so that
    the mask is all ones."""
    longest = model.max_prompt + algorithm.max_tokens
    most = recipe.data.groups * algorithm.group // algorithm.updates * longest
    tokens = min(max(recipe.learner.micro_tokens, longest), most)
    n = math.ceil(tokens / longest)
    response = max(1, algorithm.max_tokens * tokens // (n * longest))
    prompts = [model.blank(max(1, tokens // n - response)) for _ in range(n)]
    mask = torch.ones(n, response, dtype=torch.bool)
    ids = torch.zeros(n, response, dtype=torch.long)
    trace = TokenTrace(prompts, torch.arange(n), ids, mask, torch.zeros(n, dtype=torch.bool))
    if isinstance(algorithm, LikelihoodAlgorithm):
        one, stats = torch.empty(n, device="meta"), torch.empty(n, len(algorithm.reported))
        weights = torch.empty(n, response, device="meta")
        return LikelihoodTerms(1, trace, weights, one, one, one, stats)
    fields = [f for f in dataclasses.fields(PreparedResponses) if not f.kw_only]
    prepared = PreparedResponses(*(torch.empty(n, response, device="meta") for _ in fields))
    return ResponseTerms(1, trace, prepared, torch.empty(n, response, device="meta"))


@torch.no_grad()
def _decode(model: TransformerModel, algorithm: TokenAlgorithm, recipe: Recipe) -> None:
    """As in `samplers/decode.py`: prefills prompts, a few at a time, into the slots of a KV cache,
    and decodes one token for all slots. In evaluation every slot has a different prompt."""
    held_out = recipe.eval.prompts * recipe.eval.samples
    samples = max(recipe.data.groups * algorithm.group, held_out)
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
    """The folded copy of the adapted weights that `model.fold` keeps. A float32 recipe that does
    not set `model.fold` is assumed to run on a CPU, where nothing is folded."""
    if not estimated_to_fold(recipe.model):
        return []
    names = {name.split(".lora_")[0] for name in model.policy.trainable}
    layers = (model.module.get_submodule(name) for name in names)
    return [torch.empty_like(layer.base_layer.weight) for layer in layers]


def _joined(model: TransformerModel, recipe: Recipe) -> list[Tensor]:
    """The weights that `stepping.py` concatenates. Empty with a LoRA: folded weights are already
    counted, and without folding `stepping.py` is not used."""
    if recipe.model.quantize is not None or recipe.model.lora is not None:
        return []
    parts = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    layers = (m for name, m in model.decoder.named_modules() if name.endswith(parts))
    return [torch.empty_like(m.weight, dtype=model.dtype) for m in layers]

"""What a model that writes does with its memory: an update, a batch of replies and a picture.

A prompt counts as long as the recipe lets it be, and is a picture as far as that goes; a reply
counts as long as it may get. So a run takes this much at most, and usually less.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from gesso.algorithms.base import Algorithm
from gesso.algorithms.policy_gradient import PreparedResponses, ReplyAlgorithm, ReplyTerms
from gesso.config import Recipe
from gesso.memory.meta import Load, nbytes, tensors_of
from gesso.models.tokens.critic import Critic
from gesso.models.tokens.transformer import TransformerModel
from gesso.models.tokens.vision_language import TOWER, VisionLanguage
from gesso.rollout import TokenPrompt, TokenTrace
from gesso.samplers.decode import READ_AT_ONCE
from gesso.samplers.drawing import inverse_cdf
from gesso.samplers.slots import SlotCache

AROUND = 8  # tokens of a prompt that are no picture, at the least: the chat template's own
STORED = 8 + 1 + 4 + 8 + 4  # bytes a reply token: id, mask, log-prob, advantage, weight in the loss
STORED_OF_KL, STORED_OF_CRITIC = 4, 4 + 8  # the reference's log-prob; value and return


def load(model: TransformerModel, algorithm: Algorithm, recipe: Recipe) -> Load:
    assert isinstance(algorithm, ReplyAlgorithm)
    trunk = _trunk(model)
    models = [model, *([trunk] if trunk else [])]
    small = recipe.model.quantize is not None
    return Load(
        networks=_networks(model, trunk, small),
        stored=_stored(model, algorithm, recipe),
        tensors=tensors_of(m.module for m in models),
        update=_as_here(model, _update(model, algorithm, recipe)),
        works={name: _as_here(model, work) for name, work in _works(model, algorithm, recipe)},
        host=_host(models, recipe),
    )


def _host(models: Sequence[TransformerModel], recipe: Recipe) -> dict[str, int]:
    """Pictures of a batch wait there, ready for the vision tower; and what it saw of others."""
    prompts = max(recipe.data.groups, recipe.eval.prompts)
    pixels = _prompt(models[0], models[0].max_prompt).pixels
    seen = [m.seen.limit for m in models if isinstance(m, VisionLanguage) and m.seen is not None]
    found = {
        "features of pictures, up to": sum(seen),
        "pixels of pictures, up to": 0 if pixels is None else prompts * pixels.nbytes,
    }
    return {name: size for name, size in found.items() if size}


def _trunk(model: TransformerModel) -> TransformerModel | None:
    """The critic's network, where it has one of its own."""
    critic = model.critic
    own = isinstance(critic, Critic) and isinstance(critic.trunk, TransformerModel)
    return critic.trunk if own else None  # type: ignore[union-attr]


def _networks(
    model: TransformerModel, trunk: TransformerModel | None, small: bool
) -> dict[str, int]:
    """Vision tower and head are never quantized."""
    whole = nbytes(model.module, [model.decoder] if small else [])
    tower = nbytes(model.module.get_submodule(TOWER)) if isinstance(model, VisionLanguage) else 0
    critic = nbytes(trunk.module, [trunk.decoder] if small else []) if trunk else 0
    return {"language model": whole - tower, "vision tower": tower, "critic": critic}


def _stored(model: TransformerModel, algorithm: ReplyAlgorithm, recipe: Recipe) -> int:
    tokens = recipe.data.groups * algorithm.group * algorithm.max_tokens
    of_kl = STORED_OF_KL if algorithm.kl else 0
    return tokens * (STORED + of_kl + (STORED_OF_CRITIC if model.critic else 0))


Work = Callable[[], object]


def _update(model: TransformerModel, algorithm: ReplyAlgorithm, recipe: Recipe) -> Work:
    terms = _terms(model, algorithm, recipe)

    def update() -> object:
        folded = _folded(model, recipe)
        algorithm.loss(model, terms).loss.sum().backward()
        return folded

    return update


def _works(
    model: TransformerModel, algorithm: ReplyAlgorithm, recipe: Recipe
) -> Iterator[tuple[str, Work]]:
    if recipe.sampler.engine == "built-in":  # another has a share of the device
        yield "writing", lambda: _write(model, algorithm, recipe)
    prompt = _prompt(model, model.max_prompt)
    if isinstance(model, VisionLanguage) and prompt.grid is not None:

        @torch.no_grad()
        def see() -> object:
            with model.precision():
                return _look(model, prompt.pixels, prompt.grid)[0]

        yield "seeing a picture", see


def _terms(model: TransformerModel, algorithm: ReplyAlgorithm, recipe: Recipe) -> ReplyTerms:
    """A full micro-batch: replies to different prompts, all of one length, so that no mask has to
    say where they end."""
    longest = model.max_prompt + algorithm.max_tokens
    most = recipe.data.groups * algorithm.group // algorithm.updates * longest
    tokens = min(max(recipe.learner.micro_tokens, longest), most)
    n = math.ceil(tokens / longest)
    reply = max(1, algorithm.max_tokens * tokens // (n * longest))
    prompts = [_prompt(model, max(1, tokens // n - reply)) for _ in range(n)]
    mask = torch.ones(n, reply, dtype=torch.bool)
    ids = torch.zeros(n, reply, dtype=torch.long)
    trace = TokenTrace(prompts, torch.arange(n), ids, mask, torch.zeros(n, dtype=torch.bool))
    fields = dataclasses.fields(PreparedResponses)
    prepared = PreparedResponses(*(torch.empty(n, reply, device="meta") for _ in fields))
    return ReplyTerms(1, trace, prepared, torch.empty(n, reply, device="meta"))


@torch.no_grad()
def _write(model: TransformerModel, algorithm: ReplyAlgorithm, recipe: Recipe) -> None:
    """As `samplers/decode.py` does it: prompts are read, some at a time, into the slots of a cache,
    and a step of all slots is taken. In evaluation every slot has a prompt of its own."""
    samples = max(recipe.data.groups * algorithm.group, recipe.eval.prompts)
    slots = min(recipe.sampler.batch, samples)
    asked = max(min(slots, recipe.eval.prompts), math.ceil(slots / algorithm.group))
    prompt = _prompt(model, model.max_prompt)
    room = -(-(model.max_prompt + algorithm.max_tokens) // 64) * 64
    with model.writing("current")():
        copies = _folded(model, recipe) or _joined(model, recipe)
        like = model.read([prompt])[0]
        cache = SlotCache(like, slots, room)
        at_once = min(asked, max(1, READ_AT_ONCE // model.max_prompt))
        kept = [
            torch.empty_like(tensor)
            for _ in range(asked - at_once)
            for tensor in (*like.keys, *like.values)
        ]
        read = model.read([prompt] * at_once)
        del read, kept  # they have entered the cache
        one = torch.zeros(slots, dtype=torch.long, device="meta")
        states = model.step(one, one, cache.place.mask, cache)
        logits = model.logits(states, algorithm.temperature)
        inverse_cdf(logits, torch.empty(slots, dtype=torch.float64, device="meta"))
        del copies


def _folded(model: TransformerModel, recipe: Recipe) -> list[Tensor]:
    """The weights with their adapters in them, as `model.fold` keeps them. A recipe in float32 that
    does not ask for it is taken for one of a CPU, where nothing is folded."""
    section = recipe.model
    possible = section.lora is not None and section.quantize is None
    asked = section.fold if section.fold is not None else model.dtype != torch.float32
    if not possible or not asked:
        return []
    names = {name.split(".lora_")[0] for name in model.policy.trained}
    layers = (model.module.get_submodule(name) for name in names)
    return [torch.empty_like(layer.base_layer.weight) for layer in layers]


def _joined(model: TransformerModel, recipe: Recipe) -> list[Tensor]:
    """What `stepping.py` puts side by side. Of a LoRA nothing: folded weights are counted already,
    and where adapters lie beside the weights it takes no part."""
    if recipe.model.quantize is not None or recipe.model.lora is not None:
        return []
    parts = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    found = (m for name, m in model.decoder.named_modules() if name.endswith(parts))
    return [torch.empty_like(m.weight, dtype=model.dtype) for m in found]


# Prompts with pictures


def _prompt(model: TransformerModel, length: int) -> TokenPrompt:
    """A prompt that is one picture as far as the recipe's pixels go, then text."""
    ids = torch.zeros(length, dtype=torch.long)
    if not isinstance(model, VisionLanguage):
        return TokenPrompt(ids, torch.zeros_like(ids))
    images, own = model.images, model.module.config
    pixels = (images.patch_size * images.merge_size) ** 2  # behind each token
    places = min(images.size["longest_edge"] // pixels, length - AROUND)
    if places < 1:
        return TokenPrompt(ids, torch.zeros_like(ids))
    height = math.isqrt(places)
    width = places // height
    ids[0] = own.vision_start_token_id
    ids[1 : 1 + height * width] = own.image_token_id
    grid = torch.tensor([[1, height * images.merge_size, width * images.merge_size]])
    values = model.module.get_submodule(TOWER).patch_embed.proj.weight[0].numel()
    patches = torch.empty(int(grid.prod()), values, device="meta")
    return TokenPrompt(ids, (ids == own.image_token_id).long(), patches, grid)


def _look(model: VisionLanguage, pixels: Tensor | None, grid: Tensor | None) -> list[Tensor]:
    """As the model does it, but that the sizes of pictures stay numbers."""
    assert grid is not None
    seen = model.module.model.get_image_features(pixels, grid, return_dict=True)
    deep = seen.get("deepstack_features") or []
    return [torch.stack([torch.cat(layer) for layer in (seen.pooler_output, *deep)])]


def _remember(model: VisionLanguage, prompt: TokenPrompt, i: int) -> Tensor:
    """The features of a picture that a frozen tower saw before."""
    assert prompt.grid is not None
    grid = prompt.grid[i]
    deep = len(model.module.config.vision_config.to_dict().get("deepstack_visual_indexes", ()))
    places = int(grid.prod()) // model.images.merge_size**2
    width = model.decoder.config.hidden_size
    return torch.empty(1 + deep, places, width, dtype=model.dtype, device="meta")


# What the meta device lacks


def _as_here(model: TransformerModel, work: Work) -> Work:
    """`work` with pictures that have no numbers, and with autocast."""

    def done() -> object:
        with ExitStack() as patches:
            if isinstance(model, VisionLanguage):
                name, instead = ("_look", _look) if model.seen is None else ("_see", _remember)
                patches.enter_context(patch.object(type(model), name, instead))
            if model.runs_in_half:
                cast = _Autocast(model.dtype)
                patches.enter_context(patch.object(nn.functional, "linear", cast.linear))
                patches.enter_context(patch.object(type(model), "precision", cast.precision()))
            return work()

    return done


class _Autocast:
    """torch.autocast for linear layers: a weight is rounded once within `precision`, and lives
    until its end or as long as the backward pass needs it."""

    plain = staticmethod(nn.functional.linear)

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.kept: dict[int, Tensor] = {}
        self.keeping = False

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.plain(
            self._cast(x), self._cast(weight), None if bias is None else self._cast(bias)
        )

    def _cast(self, tensor: Tensor) -> Tensor:
        if tensor.dtype != torch.float32:
            return tensor
        if not (self.keeping and isinstance(tensor, nn.Parameter)):
            return tensor.to(self.dtype)
        if id(tensor) not in self.kept:
            self.kept[id(tensor)] = tensor.to(self.dtype)
        return self.kept[id(tensor)]

    def precision(self) -> Callable[[Any], AbstractContextManager]:
        @contextmanager
        def within(_: Any) -> Iterator[None]:
            before, self.keeping = self.keeping, True
            try:
                yield
            finally:
                self.keeping = before
                if not before:
                    self.kept.clear()

        return within

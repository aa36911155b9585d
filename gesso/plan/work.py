"""The work of a recipe, counted on torch's meta device: FLOPs, operators and bytes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from gesso import families
from gesso.config import Recipe, TokenModel
from gesso.data.prompts import ImageSizes
from gesso.estimate import built_on_meta
from gesso.memory import meta
from gesso.types import SampleSpec, UserError


@dataclass(frozen=True)
class Pass:
    """One pass through a network."""

    flops: float
    operators: int


@dataclass(frozen=True)
class Work:
    """Work per sample. Bytes are bytes of memory."""

    dtype: str
    weights: float  # bytes of the trained network, frozen weights included
    trained: float  # number of trained values
    sharded: float  # bytes that all workers together gather for a pass of a sharded network
    trace: float  # bytes of a sample that every worker receives
    image: float  # bytes that the driver receives
    update: Pass  # one term, forward and backward
    eval_cost: float

    @property
    def longest(self) -> int:
        """Tokens of a response with its share of the prompt; 0 for images."""
        return 0


@dataclass(frozen=True)
class FlowWork(Work):
    steps: float  # denoising steps
    denoise: Pass  # one step, with all branches of guidance
    decode: Pass
    encode: float  # FLOPs of one prompt


@dataclass(frozen=True)
class TokenWork(Work):
    prompt: int  # tokens
    response: int
    group: int
    token: float  # FLOPs of one token, forward
    cache: float  # bytes of a token in the KV cache
    see: float  # FLOPs of a prompt's image
    forwards: int  # passes without gradient over each response before the update

    @property
    def longest(self) -> int:
        return self.response + -(-self.prompt // self.group)


def count(recipe: Recipe, response: int | None = None, images: ImageSizes | None = None) -> Work:
    """`response`: mean tokens of a response; None: the maximum."""
    if recipe.sampler.engine == "data":
        raise UserError(
            'gesso plan does not support sampler.engine = "data", which samples nothing; remove it'
        )
    made, algorithm, model = built_on_meta(recipe, images)
    if getattr(algorithm, "one_pass", False):
        raise UserError(
            "gesso plan does not support algorithm.one_pass, which runs on one device; set it to "
            "false to plan for several"
        )
    family = families.of(recipe)
    algorithm, _ = family.add_critic(made, algorithm, model)
    load = family.memory_load(recipe, algorithm, model)
    for copy in algorithm.needs:
        model.policy.snapshot(copy)
    samples = recipe.data.groups * algorithm.group
    network = sum(p.nbytes for p in model.policy.module.parameters())
    common: dict[str, Any] = {
        "dtype": recipe.model.dtype,
        "weights": network,
        "trained": model.policy.size,
        "sharded": network,
        "trace": load.stored / samples,
        "eval_cost": family.eval_cost(recipe, algorithm),
    }
    if isinstance(recipe.model, TokenModel):
        return _of_tokens(recipe, algorithm, model, load, common, response)
    return _of_images(recipe, algorithm, model, load, common)


def _of_images(
    recipe: Recipe, algorithm: Any, model: Any, load: meta.Load, common: dict[str, Any]
) -> FlowWork:
    spec, section = algorithm.spec(0, 0, recipe.model), recipe.model
    assert isinstance(spec, SampleSpec) and not isinstance(section, TokenModel)
    batch = recipe.sampler.batch
    steps = float(spec.steps)
    if spec.same_noise:  # the first steps run once per group
        shared = spec.stochastic.start
        steps -= shared * (1 - 1 / min(batch, algorithm.group))
    parts = model.pipe.components
    encoders = (p for n, p in parts.items() if isinstance(p, nn.Module) and "text_encoder" in n)
    parameters = sum(p.numel() for encoder in encoders for p in encoder.parameters())
    return FlowWork(
        **common,
        update=_divided(counted(load.update), recipe.learner.micro_batch),
        image=math.prod(spec.size) * 3,
        steps=steps,
        denoise=_divided(counted(load.works["denoising"]), batch),
        decode=_divided(counted(load.works["decoding"]), batch),
        encode=2.0 * parameters * max(77, section.text_length or 77),
    )


def _of_tokens(
    recipe: Recipe,
    algorithm: Any,
    model: Any,
    load: meta.Load,
    common: dict[str, Any],
    response: int | None,
) -> TokenWork:
    section = recipe.model
    assert isinstance(section, TokenModel)
    prompt, most = model.max_prompt, algorithm.max_tokens
    if response is not None and not 1 <= response <= most:
        raise UserError(
            f"--response-tokens expects 1 to algorithm.max_tokens = {most}, got {response}"
        )
    length = response or most
    longest = prompt + most
    samples = recipe.data.groups * algorithm.group // algorithm.updates
    micro = min(max(recipe.learner.micro_tokens, longest), samples * longest)
    update = counted(load.update)
    config = model.module.config.get_text_config()
    heads = config.num_key_value_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dense = sum(p.numel() for p in model.module.parameters())
    dense -= sum(p.numel() for p in model.tower.parameters()) if model.tower is not None else 0
    if not model.module.config.tie_word_embeddings:  # the embedding is looked up
        dense -= config.vocab_size * config.hidden_size
    context = (prompt + length / 2) * 4 * config.num_hidden_layers * config.hidden_size
    encoding = load.works.get("encoding an image")
    forwards = int(algorithm.kl is not None) + int(algorithm.importance is not None)
    per_token = update.flops / micro
    return TokenWork(
        **common,
        update=Pass(per_token * (length + prompt / algorithm.group), update.operators),
        image=length * 8,
        prompt=prompt,
        response=length,
        group=algorithm.group,
        token=2.0 * dense + context,
        cache=2.0 * config.num_hidden_layers * heads * size * 2,
        see=counted(encoding).flops if encoding is not None else 0.0,
        forwards=forwards,
    )


def _divided(work: Pass, rows: int) -> Pass:
    return Pass(work.flops / rows, work.operators)


def counted(work: Callable[[], object]) -> Pass:
    counter = _Counter()

    def run() -> None:
        with counter:
            work()

    meta.run(run)
    return Pass(counter.flops, counter.operators)


class _Counter(TorchDispatchMode):
    """Counts FLOPs of matrix multiplications, convolutions and attention, and the operators that
    start a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0.0
        self.operators = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        packet = function._overloadpacket
        if packet in flop_registry:
            self.flops += flop_registry[packet](*args, **kwargs, out_val=result)
        elif packet is torch.ops.gesso.attention:
            self.flops += 4 * _scores(*args[:2])
        elif packet is torch.ops.gesso.attention_backward:
            self.flops += 10 * _scores(*args[1:3])
        if not meta.only_views(function):
            self.operators += 1
        return result


def _scores(query: torch.Tensor, key: torch.Tensor) -> int:
    """Multiplications of queries with keys: (n, H, s, d) and (n, H, t, d)."""
    n, heads, length, size = query.shape
    return n * heads * length * key.shape[2] * size

"""What makes a large transformer fast: compiled block by block, for few and fixed shapes.

Blocks of one class share their code: what is compiled for one serves all that look like it, so a
start costs seconds in place of the minutes that the whole network takes. Every shape is compiled
once; batches that are not full are filled up to one of the known sizes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from gesso import config
from gesso.formulas.precision import wide
from gesso.types import UserError

LARGE = 500_000_000
"""Parameters from which compiling pays by itself: a start takes a minute longer."""

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
"""Operators that are not run twice; nor are those with "attention" in their names."""

GRAPHS = 64
"""Of a class of blocks: kinds of block × sizes × with and without gradient; torch's limit is 8."""

ROW = 4096
"""Numbers that a norm holds at once. Torch goes over more than 1024 of them twice, and over more
than 64 where it does not know how they lie."""


def compiles(
    settings: config.Model, device: torch.device, parameters: int, blocks: Sequence[str]
) -> bool:
    """What `model.compile` says, or whether it pays here."""
    if settings.compile and not blocks:
        raise UserError(
            f'model.compile = true is not possible with model.name = "{settings.name}": it needs '
            "prompts of one length; leave it out"
        )
    if settings.compile is not None:
        return settings.compile and device.type != "meta"
    if not blocks or settings.quantize is not None or device.type != "cuda":
        return False
    return parameters >= LARGE


def wake_compiler(device: torch.device) -> None:
    """Starts the processes that compile kernels. They import torch for seconds, which a model that
    is about to be loaded takes anyway. A CPU's kernels are compiled without them."""
    if device.type == "cpu":
        return
    from torch._inductor.async_compile import AsyncCompile

    AsyncCompile().use_process_pool()  # whether they are ready: to be asked is what starts them


def compile_blocks(
    network: nn.Module, names: Sequence[str], backend: str | Callable[..., Any] | None = None
) -> None:
    """Compiles the modules of those classes, by `inductor` below unless told otherwise. Past the
    limit torch would go on without compiling and say nothing: it raises instead."""
    from diffusers.models import activations

    from gesso.models.flow.joined import join_projections

    torch._dynamo.config.recompile_limit = GRAPHS
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    # It warns of operators that work in place, which these blocks have none of.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    blocks = [module for module in network.modules() if type(module).__name__ in names]
    assert blocks, f"{type(network).__name__} has none of {names}"
    for module in network.modules():
        if isinstance(module, activations.GELU) and module.approximate == "tanh":
            module.gelu = gelu
    join_projections(network)
    run = torch.compile(_lean, fullgraph=True, dynamic=False, backend=backend or inductor)
    for block in blocks:
        block.forward = partial(run, block.forward)


def inductor(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Any:
    """Torch's own compiler, with wide rows held at once, on the way forth and back."""
    from torch._inductor.choices import InductorChoices
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import V

    across = {ReductionHint.OUTER, ReductionHint.OUTER_TINY}

    class Choices(InductorChoices):
        @staticmethod
        def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
            """Of a block's norms torch often does not know how their rows lie: side by side."""
            hints = {features.reduction_hint(node) for node in features.reduction_nodes()}
            known = V.graph.sizevars
            if not hints & across and known.statically_known_leq(features.reduction_numel, ROW):
                return True
            own = InductorChoices.should_use_persistent_reduction
            return own(features, cooperative_reduction)

    # Torch's caches on disk do not see the choices: by the tag, what was made without them differs.
    own_cache = partial(torch.compiler.config.patch, cache_key_tag=f"rows of {ROW} at once")

    def compiled(*args: Any, **kwargs: Any) -> Any:
        with V.set_choices_handler(Choices()), own_cache():  # for the way back comes later
            return compile_fx_inner(*args, **kwargs)

    with own_cache():
        return compile_fx(graph, inputs, inner_compile=compiled)


def gelu(x: Tensor) -> Tensor:
    """In its tanh form, by a sigmoid: (1 + tanh z) / 2 = σ(2z). A GPU computes that while it reads
    and writes; a tanh takes it longer."""
    z = wide(x)
    return (z * torch.sigmoid(math.sqrt(8 / math.pi) * (z + 0.044715 * z * z * z))).to(x.dtype)


def compile_decoder(decoder: nn.Module, backend: str | Callable[..., Any] = "inductor") -> None:
    """Its residual blocks, but those at the latents' own size: between their convolutions lies
    half of the time of a decoding, and little of it where a picture is still small. A decoder of
    another kind has none."""
    for larger in getattr(decoder, "up_blocks", ())[1:]:
        for block in larger.resnets:
            block.compile(fullgraph=True, dynamic=False, backend=backend)


def _lean(forward: Callable[..., Any], *inputs: Any, **more: Any) -> Any:
    """A block's forward, which keeps for the way back what its products and attentions give: the
    rest is computed again from these, within kernels that run anyway. Left to itself, torch keeps
    a third more, and a pass without gradient would write all of it for nobody."""
    return checkpoint(
        forward,
        *inputs,
        use_reentrant=False,
        context_fn=_contexts,
        preserve_rng_state=False,
        **more,
    )


def _contexts() -> Any:
    return create_selective_checkpoint_contexts(_kept)


def _kept(_: Any, operator: Any, *inputs: Any, **more: Any) -> CheckpointPolicy:
    name = str(operator).removeprefix("aten.").partition(".")[0]
    dear = name in PRODUCTS or "attention" in name
    return CheckpointPolicy.MUST_SAVE if dear else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def one_graph(compiled: bool) -> Iterator[None]:
    """Of a compiled network, a pass without gradient runs the graph of one with gradient, and
    keeps nothing for a way back. Compiled without gradient, its kernels would round otherwise, and
    log-probs of sampling and training would differ by more than a tight clip; and every graph
    would be compiled twice."""
    if not compiled or torch.is_grad_enabled():
        yield
        return
    with torch.enable_grad(), saved_tensors_hooks(_drop, _gone):
        yield


def _drop(kept: Tensor) -> None:
    """In the place of what autograd would keep."""


def _gone(nothing: None) -> Tensor:
    raise AssertionError("a pass that kept nothing has no way back")


def sizes(batch: int, micro_batch: int) -> tuple[int, ...]:
    """Rows of a forward pass: of a sampler's and a learner's batch, with both branches of guidance
    and with one."""
    return tuple(sorted({batch, 2 * batch, micro_batch, 2 * micro_batch}))


def filling(rows: int, sizes: Sequence[int], device: torch.device) -> Tensor | None:
    """Which rows make a batch of the next of those sizes: all of them, and the last again and
    again. None for a batch that is full, or larger than all."""
    wanted = min((size for size in sizes if size >= rows), default=rows)
    return None if wanted == rows else torch.arange(wanted, device=device).clamp(max=rows - 1)

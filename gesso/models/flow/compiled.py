"""Compiles a large transformer block by block, for few and fixed shapes.

Blocks of one class share their compiled code, so a start takes seconds instead of the minutes that
the whole network would take. Every shape is compiled once; batches that are not full are padded to
one of the known sizes.
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
"""Parameters from which compiling is on by default: a start takes a minute longer."""

GEMMS = {"mm", "addmm", "bmm", "baddbmm"}
"""Operators that are never recomputed; neither are those with "attention" in their names."""

GRAPHS = 64
"""Limit of graphs per class of blocks: kinds of block × sizes × gradient or not; torch's is 8."""

ROW = 4096
"""Longest row that a norm reads once. Torch reads rows of more than 1024 values twice, and those of
more than 64 where it does not know their layout."""


def compiles(
    settings: config.Model, device: torch.device, parameters: int, blocks: Sequence[str]
) -> bool:
    """`model.compile`, or without it whether compiling pays here."""
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
    """Starts the processes that compile kernels. They import torch for seconds, while the model
    loads. A CPU's kernels are compiled without them."""
    if device.type == "cpu":
        return
    from torch._inductor.async_compile import AsyncCompile

    AsyncCompile().use_process_pool()  # the query itself starts them


def compile_blocks(
    network: nn.Module, names: Sequence[str], backend: str | Callable[..., Any] | None = None
) -> None:
    """Compiles the modules of those classes, by default with `inductor` below. Past the limit of
    graphs torch would silently continue without compiling: here it raises."""
    from diffusers.models import activations

    from gesso.models.flow.joined import join_projections

    torch._dynamo.config.recompile_limit = GRAPHS
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    # It warns of in-place operators, which these blocks do not have.
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
    """Torch's own compiler, which reads wide rows once, in forward and backward."""
    from torch._inductor.choices import InductorChoices
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import V

    across = {ReductionHint.OUTER, ReductionHint.OUTER_TINY}

    class Choices(InductorChoices):
        @staticmethod
        def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
            """Torch often does not know that the rows of a block's norms are contiguous."""
            hints = {features.reduction_hint(node) for node in features.reduction_nodes()}
            sizes = V.graph.sizevars
            if not hints & across and sizes.statically_known_leq(features.reduction_numel, ROW):
                return True
            default = InductorChoices.should_use_persistent_reduction
            return default(features, cooperative_reduction)

    # Torch's disk caches do not see these choices; the tag keeps other kernels apart.
    own_cache = partial(torch.compiler.config.patch, cache_key_tag=f"rows of {ROW} at once")

    def compiled(*args: Any, **kwargs: Any) -> Any:
        with V.set_choices_handler(Choices()), own_cache():  # backward is compiled later
            return compile_fx_inner(*args, **kwargs)

    with own_cache():
        return compile_fx(graph, inputs, inner_compile=compiled)


def gelu(x: Tensor) -> Tensor:
    """The tanh approximation by a sigmoid: (1 + tanh z) / 2 = σ(2z). On a GPU it takes no longer
    than the memory traffic; a tanh does."""
    z = wide(x)
    return (z * torch.sigmoid(math.sqrt(8 / math.pi) * (z + 0.044715 * z * z * z))).to(x.dtype)


def compile_decoder(decoder: nn.Module, backend: str | Callable[..., Any] = "inductor") -> None:
    """Its residual blocks, except at the latents' own resolution: the operations between their
    convolutions take half of the decoding time, and little of that while an image is small. Other
    kinds of decoders have no such blocks."""
    for larger in getattr(decoder, "up_blocks", ())[1:]:
        for block in larger.resnets:
            block.compile(fullgraph=True, dynamic=False, backend=backend)


def _lean(forward: Callable[..., Any], *inputs: Any, **more: Any) -> Any:
    """A block's forward that saves matmul and attention outputs for backward and recomputes the
    rest, within kernels that run anyway. By default torch saves a third more, and a pass without
    gradient would write it for nothing."""
    return checkpoint(
        forward,
        *inputs,
        use_reentrant=False,
        context_fn=_contexts,
        preserve_rng_state=False,
        **more,
    )


def _contexts() -> Any:
    return create_selective_checkpoint_contexts(_save_or_recompute)


def _save_or_recompute(_: Any, operator: Any, *inputs: Any, **more: Any) -> CheckpointPolicy:
    name = str(operator).removeprefix("aten.").partition(".")[0]
    expensive = name in GEMMS or "attention" in name
    return CheckpointPolicy.MUST_SAVE if expensive else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def one_graph(compiled: bool) -> Iterator[None]:
    """A compiled network runs a pass without gradient through the graph of one with gradient, and
    saves nothing for backward. Kernels compiled without gradient would round differently, so that
    log-probs of sampling and training would differ by more than a tight clip; and every graph
    would be compiled twice."""
    if not compiled or torch.is_grad_enabled():
        yield
        return
    with torch.enable_grad(), saved_tensors_hooks(_drop, _gone):
        yield


def _drop(saved: Tensor) -> None:
    """Takes the place of what autograd would save."""


def _gone(nothing: None) -> Tensor:
    raise AssertionError("a pass that saved nothing has no backward")


def sizes(batch: int, micro_batch: int) -> tuple[int, ...]:
    """Rows of a forward pass: a sampler's and a learner's batch, with both branches of guidance and
    with one."""
    return tuple(sorted({batch, 2 * batch, micro_batch, 2 * micro_batch}))


def filling(rows: int, sizes: Sequence[int], device: torch.device) -> Tensor | None:
    """Indices that pad a batch to the next of those sizes by repeating its last row. None for a
    batch that is full, or larger than all sizes."""
    size = min((size for size in sizes if size >= rows), default=rows)
    return None if size == rows else torch.arange(size, device=device).clamp(max=rows - 1)

"""Compiles a large transformer block by block, for few and fixed shapes.

Blocks of one class share their compiled code, so compilation takes seconds instead of the minutes
that the whole network would take. Every shape is compiled once; batches that are not full are
padded to one of the compiled sizes.
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
from gesso.models.flow.attention import replace_attention
from gesso.models.repeatable import kernel_options
from gesso.types import UserError

LARGE = 500_000_000
"""Number of parameters from which compiling is on by default; it adds a minute to the start."""

GEMMS = {"mm", "addmm", "bmm", "baddbmm"}
"""Operators that are never recomputed, in addition to those with "attention" in their names."""

GRAPHS = 512
"""Maximum number of graphs: kinds of block × batch sizes × numbers of tokens, of which an editing
model has one per size of its input images; the default of torch is 8."""

ROW = 4096
"""Maximum row length that a norm reads only once. By default torch reads rows of more than 1024
values twice, and rows of more than 64 if their layout is unknown."""


def compiles(
    settings: config.Model, device: torch.device, parameters: int, blocks: Sequence[str]
) -> bool:
    """`model.compile`, or if unset whether compiling is worthwhile for this model and device. The
    meta device is that of a memory estimate, which assumes a GPU for half precision."""
    if settings.compile and not blocks:
        raise UserError(
            f'model.compile = true is not supported with model.name = "{settings.name}", which '
            "does not name the blocks to compile; remove model.compile"
        )
    if settings.compile is not None:
        return settings.compile
    on_gpu = device.type == "cuda" or (device.type == "meta" and settings.dtype != "float32")
    return bool(blocks) and on_gpu and settings.quantize is None and parameters >= LARGE


def wake_compiler(device: torch.device) -> None:
    """Starts the processes that compile kernels. They take seconds to import torch, while the model
    loads. Kernels for a CPU are compiled without them."""
    if device.type == "cpu":
        return
    from torch._inductor.async_compile import AsyncCompile

    AsyncCompile().use_process_pool()  # this query starts them


def compile_blocks(
    network: nn.Module, names: Sequence[str], backend: str | Callable[..., Any] | None = None
) -> None:
    """Compiles the modules of those classes, by default with `inductor` below. Beyond the maximum
    number of graphs torch would silently continue without compiling; this raises instead. On the
    meta device the blocks are not compiled, but save the same tensors for backward."""
    from diffusers.models import activations

    from gesso.models.flow.joined import join_projections

    torch._dynamo.config.recompile_limit = GRAPHS
    torch._dynamo.config.accumulated_recompile_limit = GRAPHS
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    # It warns about in-place operators, which these blocks do not use.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    blocks = [module for module in network.modules() if type(module).__name__ in names]
    assert blocks, f"{type(network).__name__} has no modules of the classes {names}"
    join_projections(network)
    run: Callable[..., Any] = _lean
    if next(network.parameters()).is_meta:
        if getattr(network, "gradient_checkpointing", False):
            return  # saves less than these blocks would
    else:
        for module in network.modules():
            if isinstance(module, activations.GELU) and module.approximate == "tanh":
                module.gelu = gelu  # in compiled code one kernel
        run = torch.compile(_lean, fullgraph=True, dynamic=False, backend=backend or inductor)
    for block in blocks:
        block.forward = partial(run, block.forward)


def inductor(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Any:
    """Torch's inductor, with our attention, set to read wide rows only once, in forward and
    backward."""
    from torch._inductor import config as inductor_config
    from torch._inductor.choices import InductorChoices
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import V

    across = {ReductionHint.OUTER, ReductionHint.OUTER_TINY}

    class Choices(InductorChoices):
        @staticmethod
        def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
            """Torch often fails to detect that the rows of a block's norms are contiguous."""
            hints = {features.reduction_hint(node) for node in features.reduction_nodes()}
            sizes = V.graph.sizevars
            if not hints & across and sizes.statically_known_leq(features.reduction_numel, ROW):
                return True
            default = InductorChoices.should_use_persistent_reduction
            return default(features, cooperative_reduction)

    # Torch's disk caches do not take these choices into account; the tag separates the kernels.
    tagged_cache = partial(torch.compiler.config.patch, cache_key_tag=f"rows of {ROW} at once")
    by_rule = partial(inductor_config.patch, kernel_options())

    def compiled(*args: Any, **kwargs: Any) -> Any:  # of backward: later
        with V.set_choices_handler(Choices()), tagged_cache(), by_rule():
            return compile_fx_inner(*args, **kwargs)

    replace_attention(graph)
    with tagged_cache(), by_rule():
        return compile_fx(graph, inputs, inner_compile=compiled)


def gelu(x: Tensor) -> Tensor:
    """The tanh approximation, computed with a sigmoid: (1 + tanh z) / 2 = σ(2z). On a GPU the
    sigmoid is limited by memory bandwidth; a tanh is slower."""
    z = wide(x)
    return (z * torch.sigmoid(math.sqrt(8 / math.pi) * (z + 0.044715 * z * z * z))).to(x.dtype)


def compile_decoder(decoder: nn.Module, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compiles the residual blocks, except at the resolution of the latents: the operations between
    convolutions take half of the decoding time, little of it at low resolution. Other types of
    decoders have no such blocks."""
    from diffusers.models.resnet import ResnetBlock2D

    options = kernel_options() if backend == "inductor" else None
    for larger in getattr(decoder, "up_blocks", ())[1:]:
        for block in larger.modules():
            if isinstance(block, ResnetBlock2D):
                block.compile(fullgraph=True, dynamic=False, backend=backend, options=options)


def _lean(forward: Callable[..., Any], *inputs: Any, **more: Any) -> Any:
    """A block's forward that saves matmul and attention outputs for backward and recomputes the
    rest within kernels that run anyway. By default torch saves a third more, which a pass without
    gradient would write unnecessarily."""
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
    name = str(operator).split(".")[1]  # aten.mm.default
    expensive = name in GEMMS or "attention" in name
    return CheckpointPolicy.MUST_SAVE if expensive else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def one_graph(compiled: bool) -> Iterator[None]:
    """A compiled network runs passes without gradient through the graph with gradient and saves
    nothing for backward. Kernels compiled without gradient would round differently, so that
    log-probs of sampling and training would differ by more than a tight clip range; and every graph
    would be compiled twice."""
    if not compiled or torch.is_grad_enabled():
        yield
        return
    with torch.enable_grad(), saved_tensors_hooks(_drop, _gone):
        yield


def _drop(saved: Tensor) -> None:
    """Replaces the tensors that autograd would save."""


def _gone(nothing: None) -> Tensor:
    raise AssertionError("no tensors were saved in this pass, so it has no backward")


def sizes(batch: int, micro_batch: int) -> tuple[int, ...]:
    """Numbers of rows in a forward pass: the batches of sampler and learner, with one and with both
    branches of guidance."""
    return tuple(sorted({batch, 2 * batch, micro_batch, 2 * micro_batch}))


def filling(rows: int, sizes: Sequence[int], device: torch.device) -> Tensor | None:
    """Indices that pad a batch to the next larger size by repeating its last row. None if the batch
    has one of the sizes, or is larger than all of them."""
    size = min((size for size in sizes if size >= rows), default=rows)
    return None if size == rows else torch.arange(size, device=device).clamp(max=rows - 1)

"""What makes sampling and training fast on a GPU, on a CPU with tiny models: blocks compiled for
fixed sizes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from diffusers import AutoencoderDC, AutoencoderKL, AutoencoderTiny
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor

from gesso import build
from gesso.algorithms.flow_grpo import FlowGRPO
from gesso.config import Model
from gesso.models.flow import compiled, loading
from gesso.models.flow.compiled import (
    GRAPHS,
    LARGE,
    ROW,
    compile_blocks,
    compile_decoder,
    compiles,
    filling,
    gelu,
    inductor,
    one_graph,
    sizes,
    wake_compiler,
)
from gesso.models.flow.qwen_image import _as_real, _rotate
from gesso.models.flow.sd3 import SD3
from gesso.types import Prompt, Size, UserError, Which
from gesso.weights.folding_rule import folds_lora
from tests import pipelines
from tests.models.test_folded import Counted, gradient, stirred
from tests.rollouts import parts_of, rollout_of
from tests.typed import drawing, sure


@pytest.fixture
def data(folding_data: dict) -> dict:
    folding_data["learner"] = {"micro_batch": 6}
    return folding_data


@pytest.mark.parametrize("again", [False, True], ids=["kept", "computed again"])
def test_every_pass_has_a_known_size(data: dict, again: bool) -> None:
    """Of a compiled network; here nothing is compiled, and no pass without gradient keeps one."""
    data["model"] |= {"gradient_checkpointing": again}
    model, algorithm, learner = parts_of(build.recipe_from(data))
    stirred(model)
    plain = rollout_of(model, algorithm)
    assert model.sizes == (4, 6, 8, 12) and not model.compiled
    expected = gradient(learner, plain)
    model.compiled, model.sizes = True, (8, 16)
    counted = Counted(model)
    even = rollout_of(model, algorithm)  # batches of 4 and 2 samples, two branches
    assert not even.flow_trace.clean.requires_grad
    found = gradient(learner, even)
    assert set(counted.rows) == {8, 16}
    assert (even.flow_trace.clean - plain.flow_trace.clean).abs().max() < 1e-4
    assert (found - expected).norm() < 1e-3 * expected.norm()


def test_filled_rows_repeat_the_last() -> None:
    assert sizes(16, 8) == (8, 16, 32)
    here = torch.device("cpu")
    assert sure(torch.Tensor, filling(3, (2, 5, 7), here)).tolist() == [0, 1, 2, 2, 2]
    assert filling(3, (2,), here) is None  # larger than all: as it is
    assert filling(3, (3, 5), here) is None  # full


def test_decoder_batches_are_padded_and_trimmed(data: dict) -> None:
    """Of a compiled network."""
    model = drawing(build.model(build.recipe_from(data)))
    noise = torch.Generator().manual_seed(0)
    latents = torch.randn(3, *model.latent_shape(24, 16), generator=noise)
    cond = model.encode([Prompt("a")], Size(24, 16))
    plain = model.decode(latents, cond)
    torch._dynamo.reset()
    decoder = model.pipe.vae.decoder
    compile_decoder(decoder, backend="eager")
    model.compiled, model.sizes = True, (5,)
    rows: list[int] = []
    decoder.register_forward_pre_hook(lambda _, given: rows.append(len(given[0])))
    counters = torch._dynamo.utils.counters["stats"]
    counters.clear()
    assert (model.decode(latents, cond).int() - plain.int()).abs().max() <= 1
    graphs = counters["unique_graphs"]
    assert graphs > 0
    assert torch.equal(model.decode(latents[:2], cond), model.decode(latents, cond)[:2])
    assert rows == [5, 5, 5] and counters["unique_graphs"] == graphs
    model.sizes = (6,)
    model.decode(latents, cond)
    assert counters["unique_graphs"] == 2 * graphs  # another size has graphs of its own


def test_residual_blocks_above_the_latents_size_are_compiled() -> None:
    kinds = {"down_block_types": ("DownEncoderBlock2D",), "up_block_types": ("UpDecoderBlock2D",)}
    sizes = {"block_out_channels": (8,) * 4, "norm_num_groups": 4}
    network = AutoencoderKL(**sizes, **{name: kind * 4 for name, kind in kinds.items()})
    decoder = network.decoder
    compile_decoder(decoder, backend="eager")
    plainly = [*decoder.mid_block.resnets, *decoder.up_blocks[0].resnets]
    residual = [block for block in decoder.modules() if isinstance(block, ResnetBlock2D)]
    assert len(plainly) == 4 and len(residual) == 10
    for block in residual:
        assert (block._compiled_call_impl is None) == (block in plainly)
    for other in (AutoencoderTiny(), _deep_compression()):  # without such blocks
        compile_decoder(other.decoder)
        compiled = [m for m in other.modules() if m._compiled_call_impl is not None]
        assert not compiled


def _deep_compression() -> AutoencoderDC:
    halves: dict[str, Any] = {"block_out_channels": (8, 8), "layers_per_block": (1, 1)}
    halves |= {"block_types": ("ResBlock",) * 2, "qkv_multiscales": ((), ())}
    both = {f"{half}_{k}": v for half in ("encoder", "decoder") for k, v in halves.items()}
    return AutoencoderDC(latent_channels=4, attention_head_dim=4, **both)


def test_compile_means_the_decoder_too(data: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {name: Mock() for name in ("compile_blocks", "compile_decoder")}
    for name, instead in made.items():
        monkeypatch.setattr(compiled, name, instead)
    drawing(build.model(build.recipe_from(data)))
    assert not any(instead.called for instead in made.values())
    data["model"]["compile"] = True
    model = drawing(build.model(build.recipe_from(data)))
    made["compile_blocks"].assert_called_once_with(model.transformer, model.blocks)
    made["compile_decoder"].assert_called_once_with(model.pipe.vae.decoder)


def test_flux_batches_are_padded_and_trimmed(data: dict, tmp_path: Path) -> None:
    data["model"] |= {"name": "flux", "path": str(pipelines.build("flux-dev", tmp_path / "flux"))}
    model = drawing(build.model(build.recipe_from(data)))
    cond = model.encode([Prompt(text) for text in "abc"], Size(32, 96))
    cond = replace(cond, guidance=torch.tensor([1.0, 3.5, 7.0]))
    shape = model.latent_shape(32, 96)
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    sigma = torch.tensor([0.9, 0.5, 0.2])
    counted = Counted(model)
    with torch.no_grad():
        plain = model.velocity(x, sigma, cond)
        model.compiled, model.sizes = True, (2, 5)
        even = model.velocity(x, sigma, cond)
    assert counted.rows == [3, 5] and even.shape == plain.shape
    assert (even - plain).abs().max() < 1e-5 and not even.requires_grad


def test_a_pass_without_gradient_keeps_nothing() -> None:
    """Though it runs the graph of one with gradient, which a compiled network takes it for."""
    weight = torch.ones(3, requires_grad=True)
    with torch.no_grad(), one_graph(True):
        y = (weight * torch.ones(3)).exp()
    assert y.requires_grad and not torch.is_inference_mode_enabled()
    with pytest.raises(AssertionError, match="no tensors were saved"):
        y.sum().backward()
    with torch.no_grad(), one_graph(False):
        assert not weight.exp().requires_grad
    with one_graph(True):
        weight.exp().sum().backward()
    assert weight.grad is not None


def test_blocks_are_compiled_once(data: dict, tmp_path: Path) -> None:
    """Four blocks of SD3 with joined projections, one size: sampling, reference and training share
    three graphs (the first block, those between, the last), and replay meets sampling to the bit.
    test_repeatable.py compiles the other kind of block, of SD3.5. The backend stops before code is
    made, which takes minutes on a CPU; tests/test_gpu.py has the real one."""
    data["model"]["path"] = str(pipelines.build("sd3", tmp_path / "sd3", num_layers=4))
    data["algorithm"]["beta"] = 0.04
    data["sampler"] = {"batch": 6}
    model, algorithm, learner = parts_of(build.recipe_from(data))
    stirred(model)
    torch._dynamo.reset()
    compile_blocks(model.transformer, model.blocks, backend="aot_eager")
    model.compiled = True
    for block in model.transformer.transformer_blocks:
        assert block.ff.net[0].gelu is gelu and "forward" in vars(block.attn)
    limits = torch._dynamo.config
    assert limits.fail_on_recompile_limit_hit and limits.recompile_limit >= GRAPHS
    counters = torch._dynamo.utils.counters["stats"]
    counters.clear()
    for step in range(2):
        rollout = rollout_of(model, algorithm, step, batch=6, version=step)
        metrics = learner.update(rollout, step).metrics
        assert metrics["update/first_abs_dlogp_max"] == 0.0
        assert counters["unique_graphs"] == 3


def test_compiled_blocks_keep_products_and_compute_the_rest_again(data: dict) -> None:
    """As torch's own partitioner cuts forth from back: fewer bytes kept, no product run twice."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.compilers import nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    model, _, _ = parts_of(build.recipe_from(data))
    block = model.transformer.transformer_blocks[1]
    inner, width = block.forward, model.transformer.inner_dim
    products: list[int] = []
    kept: dict[int, int] = {}

    def counting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        names = [str(node.target) for node in graph.graph.nodes]
        products.append(sum("mm." in name or "attention" in name for name in names))
        return nop(graph, inputs)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    backend = aot_autograd(
        fw_compiler=counting,
        bw_compiler=counting,
        partition_fn=min_cut_rematerialization_partition,
    )
    found = []
    for lean in (True, False):
        torch._dynamo.reset()
        if lean:
            compile_blocks(model.transformer, model.blocks, backend=backend)
        else:
            block.forward = torch.compile(inner, dynamic=False, backend=backend)
        products.clear()
        kept.clear()
        noise = torch.Generator().manual_seed(0)
        image, text = (torch.randn(2, n, width, generator=noise).requires_grad_() for n in (96, 16))
        with model.policy.folded(), model.policy.using("current"):
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                out = block(image, text, torch.randn(2, width, generator=noise))
            (out[0].square().sum() + out[1].square().sum()).backward()
        found.append((sum(kept.values()), list(products), image.grad.clone()))
    (lean_bytes, lean_products, lean_slope), (bytes_, products_, slope) = found
    assert lean_bytes < 0.85 * bytes_
    assert lean_products == products_
    assert (lean_slope - slope).abs().max() < 1e-5 * slope.abs().max()


@pytest.mark.parametrize("dtype, error", [(torch.float64, 1e-12), (torch.bfloat16, 2**-8)])
def test_gelu_by_a_sigmoid_is_gelu_by_a_tanh(dtype: torch.dtype, error: float) -> None:
    """Values and slopes."""
    x = torch.linspace(-8, 8, 1001).to(dtype).requires_grad_()
    found, expected = gelu(x), torch.nn.functional.gelu(x.double(), approximate="tanh")
    slopes = (torch.autograd.grad(y.sum(), x)[0] for y in (found, expected))
    for mine, theirs in ((found, expected), tuple(slopes)):
        assert mine.dtype == dtype or theirs.dtype == dtype
        assert bool(((mine - theirs).abs() <= error * theirs.abs().clamp(min=1)).all())


def test_compiled_blocks_get_our_gelu_and_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another GELU only in the place of one by a tanh; our way to ask inductor, or another one."""
    from diffusers.models.activations import GELU

    told = Mock()
    monkeypatch.setattr(torch, "compile", told)
    for given, expected in ((None, inductor), ("eager", "eager")):
        by_tanh, exact = GELU(4, 4, approximate="tanh"), GELU(4, 4)
        compile_blocks(torch.nn.Sequential(by_tanh, exact), ["GELU"], given)
        assert by_tanh.gelu is gelu and exact.gelu is not gelu
        assert told.call_args.kwargs["backend"] == expected


def test_wide_rows_are_held_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to a width, and where torch does not know that a reduction goes across rows; for the rest
    inductor knows best, and so it does for what others compile. A way back is compiled later."""
    from sympy import Integer
    from torch._inductor import compile_fx
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import V

    inner, unknown, across = ReductionHint.INNER, ReductionHint.DEFAULT, ReductionHint.OUTER

    def held(numbers: int, *hints: ReductionHint) -> bool:
        features = Mock(reduction_numel=Integer(numbers))
        features.reduction_nodes.return_value = hints
        features.reduction_hint.side_effect = lambda node: node
        features.get_reduction_hint.return_value = hints[0] if len({*hints}) == 1 else unknown
        graph = Mock()
        graph.sizevars.statically_known_leq = lambda a, b: bool(a <= b)
        with V.set_graph_handler(graph):
            return V.choices.should_use_persistent_reduction(features, False)

    def answers(*_: Any, **__: Any) -> list[bool]:
        sd3, flux = 1536, 3072
        wide = [held(n, inner) for n in (1024, sd3, flux, ROW, ROW + 1, 2 * flux)]
        others = [(unknown, inner), (inner, across), (ReductionHint.OUTER_TINY,)]
        return wide + [held(n, across) for n in (64, sd3)] + [held(sd3, *of) for of in others]

    told = Mock(return_value="what runs")
    monkeypatch.setattr(compile_fx, "compile_fx", told)
    monkeypatch.setattr(compile_fx, "compile_fx_inner", answers)
    graph, inputs = torch.fx.symbolic_trace(torch.nn.Identity()), [torch.ones(2)]
    assert inductor(graph, inputs) == "what runs" and told.call_args.args == (graph, inputs)
    forth_or_back = told.call_args.kwargs["inner_compile"]
    wide = [True, True, True, True, False, False]
    assert forth_or_back(graph, inputs) == [*wide, True, False, True, False, False]
    passed_on = Mock()
    monkeypatch.setattr(compile_fx, "compile_fx_inner", passed_on)
    inductor(graph, inputs)
    told.call_args.kwargs["inner_compile"](graph, inputs, is_backward=True)
    passed_on.assert_called_once_with(graph, inputs, is_backward=True)
    own = [True, False, False, False, False, False]
    assert answers() == [*own, True, False, False, False, False]


@pytest.mark.slow
def test_inductor_compiles_with_our_backend_and_its_own_cache_entries(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The real one, on a CPU, forward (tests/test_gpu.py runs it backward too); and not by what
    others have left in its cache."""

    def norm(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[-1:]).sin()

    def passed(backend: Any) -> torch.Tensor:
        torch._dynamo.reset()
        return torch.compile(norm, fullgraph=True, dynamic=False, backend=backend)(x)

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    # No vectorized code: g++ compiles a test program per instruction set, which takes most time.
    monkeypatch.setattr(torch._inductor.config.cpp, "vec_isa_ok", False)
    x = torch.randn(3, 1536)
    passed("inductor")
    for known in (False, True):
        torch._dynamo.utils.counters.clear()
        assert torch.allclose(passed(inductor), norm(x), atol=1e-4)
        counted = torch._dynamo.utils.counters["inductor"]
        hit_and_miss = [counted[f"fxgraph_cache_{what}"] for what in ("hit", "miss")]
        assert hit_and_miss == ([1, 0] if known else [0, 1])


def test_the_compiler_wakes_before_a_model_that_needs_it_is_loaded(
    data: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers import StableDiffusion3Pipeline

    order = Mock()
    monkeypatch.setattr(compiled, "wake_compiler", order.wake)
    monkeypatch.setattr(compiled, "compile_blocks", order.blocks)
    monkeypatch.setattr(compiled, "compile_decoder", order.decoder)
    order.load.side_effect = StableDiffusion3Pipeline.from_pretrained
    monkeypatch.setattr(StableDiffusion3Pipeline, "from_pretrained", order.load)
    build.model(build.recipe_from(data))
    assert [call[0] for call in order.mock_calls] == ["load"]
    order.reset_mock()
    data["model"]["compile"] = True
    build.model(build.recipe_from(data))
    assert [call[0] for call in order.mock_calls] == ["wake", "load", "blocks", "decoder"]
    order.wake.assert_called_once_with(torch.device("cpu"))
    order.reset_mock()
    data["model"]["path"] = "/no/such/folder"  # told at once: what is awake delays a process's end
    with pytest.raises(UserError, match="the folder does not exist"):
        build.model(build.recipe_from(data))
    assert not order.mock_calls


def test_what_is_known_of_a_size_before_loading(
    data: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bound, by which the compiler wakes; how large it is decides whether it compiles."""
    told = Mock(return_value=False)
    monkeypatch.setattr(compiled, "compiles", told)
    settings = build.recipe_from(data).model
    model = drawing(build.model(build.recipe_from(data)))
    parameters = sum(p.numel() for p in model.transformer.parameters())
    bound = loading.most_parameters(settings.path)
    assert [call.args[2] for call in told.call_args_list] == [bound, parameters]
    assert parameters <= bound < LARGE
    assert loading.most_parameters("somebody/large-on-the-hub") >= LARGE
    shards = tmp_path / "transformer"
    shards.mkdir()
    for name, size in (("1.safetensors", 3), ("2.safetensors", 4), ("config.json", 5)):
        (shards / name).write_bytes(bytes(size))
    assert loading.most_parameters(str(tmp_path)) == 7


def test_compiler_processes_start_for_cuda_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU's kernels are compiled without those processes; tests/test_gpu.py starts them."""
    from torch._inductor.async_compile import AsyncCompile

    start = Mock()
    monkeypatch.setattr(AsyncCompile, "use_process_pool", start)
    wake_compiler(torch.device("cpu"))
    start.assert_not_called()
    wake_compiler(torch.device("cuda"))
    start.assert_called_once_with()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, kind, sizes",
    [
        ("flux-dev", "flux", {"num_layers": 1, "num_single_layers": 1}),
        ("qwen-image", "qwen-image", {"num_layers": 1}),
    ],
)
def test_folded_and_compiled(
    name: str,
    kind: str,
    sizes: dict[str, int],
    data: dict,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The adapter lies in the feed-forwards, too. Prompts of Qwen-Image are padded and masked.
    Sampling and training share one graph per block."""
    folder = pipelines.build(name, tmp_path / name, **sizes)
    data["model"] |= {"name": kind, "path": str(folder), "text_length": 48}  # no prompt is as long
    data["sampler"] = {"batch": 6}
    model, algorithm, learner = parts_of(build.recipe_from(data))
    stirred(model)
    beside = rollout_of(model, algorithm, batch=6)
    torch._dynamo.reset()
    model.before_compiling()
    compile_blocks(model.transformer, model.blocks, backend="eager")
    model.compiled = True
    lengths = set()
    run = model.run

    def noted(weights: Which, **inputs: Any) -> Tensor:
        mask = inputs.get("encoder_hidden_states_mask")
        lengths.add(None if mask is None else mask.shape[1])
        return run(weights, **inputs)

    monkeypatch.setattr(model, "run", noted)
    counters = torch._dynamo.utils.counters["stats"]
    counters.clear()
    rollout = rollout_of(model, algorithm, batch=6)
    assert (rollout.flow_trace.clean - beside.flow_trace.clean).abs().max() < 1e-4
    metrics = learner.update(rollout, 0).metrics
    assert metrics["update/first_abs_dlogp_max"] == 0.0 and metrics["update/grad_norm"] > 0
    assert lengths in ({None}, {model.text_length})
    assert counters["unique_graphs"] == sum(sizes.values())


def test_rotation_of_real_numbers_is_that_of_complex_ones() -> None:
    from diffusers.models.transformers.transformer_qwenimage import apply_rotary_emb_qwen as plain

    torch.manual_seed(0)
    x = torch.randn(2, 5, 3, 8)
    angles = torch.randn(5, 4)
    rotation = torch.polar(torch.ones(5, 4), angles)
    pairs, _ = _as_real(None, None, (rotation, rotation))
    original = Mock(side_effect=plain)
    expected = plain(x, rotation, use_real=False)
    assert torch.allclose(_rotate(original, x, pairs, use_real=False), expected, atol=1e-6)
    assert torch.equal(_rotate(original, x, rotation, use_real=False), expected)
    assert original.call_count == 1  # for complex numbers


def test_settings_of_folding_and_compiling_that_are_refused(
    data: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    data["model"] |= {"lora": None}
    with pytest.raises(UserError, match=r"fold = true needs a LoRA .* set model.lora.rank"):
        build.recipe_from(data)
    data["model"] |= {"lora": {"rank": 4}, "quantize": "nf4"}
    with pytest.raises(UserError, match=r"fold = true needs .* not quantized"):
        build.recipe_from(data)
    data["model"] |= {"fold": None, "compile": True}
    with pytest.raises(UserError, match=r'compile = true does not support quantize = "nf4"'):
        build.recipe_from(data)
    del data["model"]["quantize"]
    monkeypatch.setattr(SD3, "blocks", ())
    with pytest.raises(UserError, match=r"compile = true .* does not name the blocks to compile"):
        build.model(build.recipe_from(data))


def test_on_a_cpu_neither_is_on_unless_requested(data: dict) -> None:
    data["model"] |= {"fold": None, "device": "cpu"}
    model = drawing(build.model(build.recipe_from(data)))
    assert isinstance(build.algorithm(build.recipe_from(data)), FlowGRPO)
    assert not model.compiled and not model.policy.folds


def test_large_ones_are_compiled_on_cuda_by_themselves(data: dict) -> None:
    cuda, cpu, meta = (torch.device(name) for name in ("cuda", "cpu", "meta"))
    blocks, large, small = ("Block",), LARGE, LARGE - 1
    settings = build.recipe_from(data).model
    assert isinstance(settings, Model)
    auto = settings.model_copy(update={"fold": None})
    assert compiles(auto, cuda, large, blocks) and folds_lora(auto, "cuda")
    assert not compiles(auto, cuda, small, blocks)
    assert not compiles(auto, cpu, large, blocks) and not folds_lora(auto, "cpu")
    assert not compiles(auto, cuda, large, ())
    four_bits = auto.model_copy(update={"quantize": "nf4"})
    assert not compiles(four_bits, cuda, large, blocks) and not folds_lora(four_bits, "cuda")
    asked = auto.model_copy(update={"compile": True, "fold": True})
    assert compiles(asked, cpu, small, blocks) and folds_lora(asked, "cpu")
    half = auto.model_copy(update={"dtype": "bfloat16"})  # estimates assume a GPU for it
    assert compiles(half, meta, large, blocks) and not compiles(half, meta, small, blocks)
    assert compiles(asked, meta, small, blocks) and not compiles(auto, meta, large, blocks)

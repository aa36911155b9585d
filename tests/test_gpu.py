"""On a CUDA device: `pytest -m gpu`. Half precision, 4 bits, and the CPU's results again."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.nn.attention import SDPBackend, sdpa_kernel

from gesso import build
from gesso.algorithms.flow_grpo import FlowGRPO
from gesso.config import Model
from gesso.run import load, train
from gesso.track.run_folder import RunFolder
from gesso.weights.policy import Policy
from tests import editors, pipelines
from tests.gpu_runs import NOT_REPEATED
from tests.rollouts import parts_of, rollout_of
from tests.samplers.test_one_pass import distance, gradients
from tests.typed import sure

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


KINDS = {"sd35": "sd3", "flux-dev": "flux", "qwen-image": "qwen-image"}


def rows_of(run: RunFolder) -> list[dict]:
    return list(run.rows())


def built(name: str, folder: Path, scale: int = 8) -> Path:
    """A pipeline to compile, by default with heads of 64 or 128, as real models have: our kernels
    repeat, so sampling and training share their graphs. Without kernels, training runs torch's
    deterministic operators in graphs of its own. Each kind of layer is a graph for each number of
    tokens: SD3.5 has two kinds, and an editing model several numbers."""
    layers = {"sd35": {"num_layers": 2}, "kontext": {"num_single_layers": 1}}.get(name, {})
    kind = editors if name in editors.EDITORS else pipelines
    return kind.build(name, folder / "pipeline", scale, **layers)


def test_a_run_on_cuda_samples_what_the_cpu_samples(recipe_data: dict, tmp_path: Path) -> None:
    """Noise comes from the CPU's generator on both, so the pictures agree."""
    rewards = {}
    for device in ("cpu", "cuda"):
        recipe_data["model"]["device"] = device
        recipe = build.recipe_from(recipe_data)
        run = train(recipe, folder=tmp_path / device, quiet=True)
        rewards[device] = [row["eval/reward"] for row in rows_of(run) if "eval/reward" in row]
    assert rewards["cuda"] == pytest.approx(rewards["cpu"], rel=0.05)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8}], ids=["full", "lora"])
def test_replay_meets_sampling(recipe_data: dict, dtype: str, lora: dict | None) -> None:
    recipe_data["model"] |= {"device": "cuda", "dtype": dtype, "lora": lora}
    recipe_data["optimizer"] = {"lr": 1e-5}
    model, algorithm, learner = parts_of(build.recipe_from(recipe_data))
    rollout = rollout_of(model, algorithm)
    metrics = learner.update(rollout, 0).metrics
    gap = metrics["update/first_abs_dlogp_max"]
    print(f"replay gap {dtype} {'lora' if lora else 'full'}: {gap:.1e}")
    assert gap < {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.02}[dtype]
    assert metrics["update/skipped"] == 0
    assert {p.dtype for p in learner.policy.trainable.values()} == {torch.float32}


@pytest.mark.parametrize(
    "name, gradient",
    [("sd35", "both"), ("sd35", "conditional"), ("flux-dev", "both"), ("qwen-image", "both")],
)
def test_compiled_and_folded_the_ratio_is_one(
    recipe_data: dict, tmp_path: Path, name: str, gradient: str
) -> None:
    """Sampling and training run one graph with one matrix: log-probs agree to the bit, and nothing
    is compiled after the first iteration."""
    recipe_data["model"] |= {
        "name": KINDS[name], "path": str(built(name, tmp_path)),
        "height": 24, "width": 16, "text_length": 16, "device": "cuda", "dtype": "bfloat16",
        "lora": {"rank": 4, "alpha": 8}, "compile": True, "fold": True,
    }  # fmt: skip
    recipe_data["algorithm"] |= {"guidance": 4.5, "guidance_gradient": gradient, "beta": 0.04}
    recipe_data["sampler"], recipe_data["learner"] = {"batch": 6}, {"micro_batch": 6}
    model, algorithm, learner = parts_of(build.recipe_from(recipe_data))
    gaps = []
    for step in range(3):
        with torch.compiler.set_stance("fail_on_recompile" if step else "default"):
            rollout = rollout_of(model, algorithm, step, 6, version=step)
            metrics = learner.update(rollout, step).metrics
        gaps.append(metrics["update/first_abs_dlogp_max"])
    print(f"replay gaps compiled, {name}, {gradient}: {gaps}")
    assert gaps == [0.0] * 3 and metrics["update/skipped"] == 0


@pytest.mark.parametrize("gradient", ["both", "conditional"])
def test_compiled_in_one_pass_the_update_is_that_of_two(
    recipe_data: dict, tmp_path: Path, gradient: str
) -> None:
    """But for rounding: pictures and log-probs to the bit. Nothing is compiled after the first
    iteration, though batches are full and not, and steps trained and not."""
    recipe_data["model"] |= {
        "path": str(built("sd35", tmp_path, 1)), "height": 24, "width": 16, "text_length": 16,
        "device": "cuda", "dtype": "bfloat16", "lora": {"rank": 4, "alpha": 8}, "compile": True,
        "fold": True,
    }  # fmt: skip
    recipe_data["algorithm"] |= {"guidance": 4.5, "guidance_gradient": gradient, "one_pass": True}
    recipe_data["sampler"], recipe_data["learner"] = {"batch": 4}, {"micro_batch": 4}
    model, algorithm, learner = parts_of(build.recipe_from(recipe_data))
    for step in range(3):
        with torch.compiler.set_stance("fail_on_recompile" if step else "default"):
            rollout = rollout_of(model, algorithm, step, version=step)
            metrics = learner.update(rollout, step).metrics
        assert metrics["update/grad_norm"] > 0 and metrics["update/skipped"] == 0
    one = rollout_of(model, algorithm)
    two = rollout_of(model, sure(FlowGRPO, algorithm).model_copy(update={"one_pass": False}))
    assert torch.equal(one.flow_trace.clean, two.flow_trace.clean) and torch.equal(
        one.logp, two.logp
    )
    apart = distance(gradients(learner, one), gradients(learner, two))
    print(f"one pass and two, {gradient}: gradients {apart:.1e} apart")
    assert apart < 0.05


def untidy() -> None:
    """Leaves numbers in free memory that spoil whatever reads them."""
    sizes = [2**29, *(2**k for k in range(9, 24))]
    nans = [torch.full((n,), float("nan"), device="cuda", dtype=torch.bfloat16) for n in sizes]
    del nans


@pytest.mark.parametrize("scale, size", [(1, (32, 96)), (8, (64, 64))])
@pytest.mark.parametrize("name", KINDS)
def test_gradients_are_those_of_plain_attention(
    name: str, scale: int, size: tuple[int, int], recipe_data: dict, tmp_path: Path
) -> None:
    """With heads of 8 and 64, or of 16 and 128, for which torch's own choice gave gradients that
    are not finite."""
    recipe_data["model"] = {
        "name": KINDS[name], "path": str(pipelines.build(name, tmp_path / "pipeline", scale)),
        "height": size[0], "width": size[1], "text_length": 16, "device": "cuda",
        "dtype": "bfloat16", "lora": {"rank": 4, "alpha": 8},
    }  # fmt: skip
    model, algorithm, learner = parts_of(build.recipe_from(recipe_data))
    rollout = rollout_of(model, algorithm, size=Model(path="", height=size[0], width=size[1]))
    with sdpa_kernel(SDPBackend.MATH):
        plain = gradients(learner, rollout)
    untidy()
    apart = distance(gradients(learner, rollout), plain)
    print(f"gradients {name}, {scale} times as wide: {apart:.1e} apart")
    assert apart < 0.05


def qkv(length: int, head_size: int, layout: str) -> list[torch.Tensor]:
    """Query, key, value and a gradient, as the networks have them."""
    torch.manual_seed(length)
    n, heads = 2, 3
    sizes = {
        "heads first": (n, heads, length, head_size),
        "tokens first": (n, length, heads, head_size),
        "part of a joined projection": (n, length, 2, heads, head_size),
    }
    tensors = [torch.randn(sizes[layout], device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    if layout == "part of a joined projection":
        tensors = [x[:, :, 1] for x in tensors]
    return tensors if layout == "heads first" else [x.transpose(1, 2) for x in tensors]


@pytest.mark.parametrize("layout", ["heads first", "tokens first", "part of a joined projection"])
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_of_compiled_networks(masked: bool, head_size: int, layout: str) -> None:
    """Against float32, and the same every time; lengths that fill the kernels' blocks and not. The
    mask excludes all keys of the first blocks."""
    from gesso.models.flow.attention import attention

    for length in (2, 7, 64, 77, 154, 333, 1024, 1178, 1536, 2049):
        query, key, value, grad = qkv(length, head_size, layout)
        mask = None
        if masked:
            mask = torch.rand(2, 1, 1, length, device="cuda") < 0.7
            mask[..., : min(300, length // 2)] = False
            mask[..., -1] = True
        inputs = [x.requires_grad_() for x in (query, key, value)]
        results = []
        for _ in range(3):
            untidy()
            out = attention(*inputs, mask)[0]
            results.append([out.detach(), *torch.autograd.grad(out, inputs, grad)])
        assert all(
            torch.equal(a, b) for other in results for a, b in zip(other, results[0], strict=True)
        )
        wide = [x.detach().float().requires_grad_() for x in inputs]
        with sdpa_kernel(SDPBackend.MATH):
            expected = torch.nn.functional.scaled_dot_product_attention(*wide, attn_mask=mask)
            grads = torch.autograd.grad(expected, wide, grad.float())
        for a, b in zip(results[0], (expected.detach(), *grads), strict=True):
            # With one key left its gradient is 0, and that of the kernels a rounding error.
            assert float((a.float() - b).norm()) < 1e-2 * float(b.norm()) + 1e-4, length


def test_very_small_scores_have_finite_gradients() -> None:
    """exp(−logsumexp) overflows, and the last block is not full."""
    from gesso.models.flow.attention import attention

    query, key, value, grad = qkv(77, 64, "tokens first")
    inputs = [x.detach().requires_grad_() for x in (query.abs() * 20, -key.abs() * 20, value)]
    grads = torch.autograd.grad(attention(*inputs)[0], inputs, grad)
    assert all(bool(g.isfinite().all()) for g in grads)


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
@pytest.mark.parametrize("name", KINDS)
def test_four_bits(name: str, recipe_data: dict, tmp_path: Path) -> None:
    """The frozen weights are small, the adapter learns, and its export loads into diffusers."""
    folder = pipelines.build(name, tmp_path / "pipeline")
    recipe_data["model"] = {
        "name": KINDS[name], "path": str(folder), "height": 32, "width": 32, "device": "cuda",
        "dtype": "bfloat16", "quantize": "nf4", "lora": {"rank": 4, "alpha": 8},
        "text_length": 16,
    }  # fmt: skip
    recipe_data["algorithm"]["clip"] = 0.2
    run = train(build.recipe_from(recipe_data), folder=tmp_path / "run", quiet=True)
    assert rows_of(run)[-1]["update/grad_norm"] > 0
    trained = load(run.path)
    kinds = {type(layer).__name__ for layer in sure(Policy, trained.model.policy).module.modules()}
    assert "Linear4bit" in kinds
    trained.export(tmp_path / "lora")
    assert list((tmp_path / "lora").glob("*.safetensors"))


# Models that write


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 4, 2, 8, 64), (5, 16, 2, 128, 576), (4, 6, 3, 20, 130)])
def test_attention_of_one_token(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The kernel against torch, from an empty past to a full slot; and what it writes."""
    from gesso.models.tokens import kernels, stepping

    n, heads, groups, width, capacity = shape
    torch.manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, device="cuda", dtype=dtype)

    query, key, value = random(n, heads, width), random(n, 2 * groups, width), random(n, 1, width)
    key, value = key[:, groups:], value.expand(n, groups, width)  # parts of something larger
    keys, values = random(n, groups, capacity, width), random(n, groups, capacity, width)
    lengths = torch.linspace(0, capacity - 1, n, device="cuda").long()
    own = keys.clone(), values.clone()
    found = kernels.one_token(query, key, value, *own, lengths, 0.3)
    exact = keys.float(), values.float()
    new = query.float(), key.float(), value.float()  # rounded, torch would round its scores, too
    expected = stepping.attend(*new, *exact, lengths, 0.3)
    relative = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(found.float(), expected, rtol=relative, atol=relative)
    assert all(torch.equal(a.float(), b) for a, b in zip(own, exact, strict=True))


def test_flash_attention_of_segments() -> None:
    """All at once against group by group, with gradients; a response of no tokens among them."""
    from gesso.models.tokens import attention

    trees = [[37, 5, 0, 130], [300], [12, 12, 12]]
    tokens = sum(map(sum, trees))
    torch.manual_seed(0)
    inputs = [torch.randn(1, h, tokens, 64, device="cuda", requires_grad=True) for h in (8, 2, 2)]
    weight = torch.randn(1, tokens, 8, 64, device="cuda")
    query, key, value = inputs
    groups = attention.Groups.of(trees, torch.device("cuda")).attend(query, key, value, 0.125)
    expected = torch.autograd.grad((groups * weight).sum(), inputs)
    half = [t.detach().bfloat16().requires_grad_() for t in inputs]
    flat = attention.Flat.of(trees, torch.device("cuda"), torch.bfloat16)
    query, key, value = half
    at_once = flat.attend(query, key, value, 0.125)
    found = torch.autograd.grad((at_once * weight).sum(), half)
    for a, b in zip((at_once, *found), (groups, *expected), strict=True):
        assert float((a.float() - b).norm() / b.norm()) <= 1e-2


def test_nothing_is_compiled_after_the_first_iteration(tmp_path: Path) -> None:
    """Two updates and two sampling calls of other prompts and lengths compile nothing new. An
    earlier pass over the tests in this process may have compiled the first, too."""
    from torch._dynamo.utils import counters

    from gesso.config import Lora
    from gesso.samplers.decode import DecodingSampler
    from gesso.traces.tokens import TokenTrace
    from gesso.types import ResponseSpec
    from tests import tokens
    from tests.tokens import Tiny

    tiny = Tiny("qwen2.5-vl", tokens.build("qwen2.5-vl", tmp_path / "model", 64))
    lora = Lora(rank=4, alpha=8)
    model = tiny.model(device="cuda", dtype="bfloat16", lora=lora, compile=True)
    sampler = DecodingSampler(model, 6)
    graphs = []
    for row, seed in (([0, 0, 1, 1, 2, 2], 0), ([2, 1, 1, 1, 0, 2], 50), ([0, 0, 0, 0, 0, 1], 90)):
        pieces = list(sampler.sample(tiny.prompts, row, range(seed, seed + 6), ResponseSpec(16)))
        trace = TokenTrace.concat([piece.trace for piece in pieces])
        with model.policy.folded():
            model.logp(trace, 1.0).logp.sum().backward()
        graphs.append(counters["stats"]["unique_graphs"])
    assert all(layer._compiled_call_impl for layer in model.decoder.layers)
    assert graphs[0] > 0 and graphs == graphs[:1] * 3


def train_twice(recipe_data: dict, tmp_path: Path) -> list[dict]:
    """Rows of a run, the same of two runs."""
    recipe_data["sampler"], recipe_data["learner"] = {"batch": 6}, {"micro_batch": 6}
    recipe_data["steps"] = 2
    results = []
    for run in ("a", "b"):
        folder = train(build.recipe_from(recipe_data), folder=tmp_path / run, quiet=True)
        rows = [
            {k: v for k, v in row.items() if not k.startswith(NOT_REPEATED)}
            for row in rows_of(folder)
        ]
        assert rows[-1]["update/grad_norm"] > 0 and rows[-1]["update/skipped"] == 0
        results.append(rows)
    assert results[0] == results[1]
    return results[0]


HALF_PRECISION = {
    "device": "cuda", "dtype": "bfloat16", "compile": True, "lora": {"rank": 4, "alpha": 8},
    "height": 32, "width": 32, "text_length": 16,
}  # fmt: skip
AS_ABOVE = {"height": 16, "width": 48}  # of rollouts.py: tests of SD3.5 share their graphs


@pytest.mark.parametrize("name", ["draft", "refl", "leap-align", "awm", "dgpo", "flow-dpo"])
def test_algorithms_without_log_probs_repeat(recipe_data: dict, tmp_path: Path, name: str) -> None:
    """Compiled, in half precision, with LoRA: two runs are equal to the bit."""
    recipe_data["model"] |= HALF_PRECISION | AS_ABOVE | {"path": str(built("sd35", tmp_path))}
    recipe_data["algorithm"] = {"name": name, "group": 3, "steps": 4}
    recipe_data["algorithm"] |= {"refl": {"low": 1}, "awm": {"times": 2, "last": 3}}.get(name, {})
    recipe_data["algorithm"] |= {"dgpo": {"times": 2, "last": 3}}.get(name, {})
    recipe_data["reward"] = [{"name": "sign-colour"}]
    train_twice(recipe_data, tmp_path)


NEWER: dict[str, dict] = {
    "flux2-dev": {"name": "flux2"},
    "flux2-klein": {"name": "flux2-klein"},
    "z-image": {"name": "z-image"},
    "sana": {"name": "sana"},
    "kontext": {"name": "kontext"},
    "kontext, match_input": {"name": "kontext", "match_input": True},
    "qwen-edit": {"name": "qwen-edit"},
    "qwen-edit, match_input": {"name": "qwen-edit", "match_input": True},
    "wan": {"name": "wan", "height": 64, "width": 64, "frames": 9, "text_length": 512},
}


WITHOUT_PYAV = pytest.mark.skipif(importlib.util.find_spec("av") is None, reason="needs PyAV")
CASES = [pytest.param(case, marks=WITHOUT_PYAV if case == "wan" else ()) for case in NEWER]


@pytest.mark.parametrize("case", CASES)
def test_newer_models_repeat(recipe_data: dict, tmp_path: Path, case: str) -> None:
    """Compiled, in half precision, with LoRA: two runs are equal to the bit, and replay has the
    log-probs of sampling, up to float32 rounding where batches of two aspect ratios are divided."""
    name = case.partition(",")[0]
    edits = name in editors.EDITORS
    scale = {"sana": 1, "wan": 4}.get(name, 8)  # cross-attention: no kernels
    path = str(built(name, tmp_path, scale))
    for i in range(2):  # two aspect ratios
        Image.new("RGB", (64, 64 + 64 * i), "red").save(tmp_path / f"{i}.png")
    sources = [{"image": f"{i % 2}.png"} if edits else {} for i in range(4)]
    prompts = [json.dumps({"prompt": f"a kite {i}"} | sources[i]) for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(prompts))
    recipe_data["model"] |= HALF_PRECISION | {"path": path} | NEWER[case]
    recipe_data["data"] |= dict.fromkeys(("train", "eval"), str(tmp_path / "rows.jsonl"))
    recipe_data["algorithm"] |= {"guidance": 1.0}
    frames = {"frames": "mean"} if "frames" in NEWER[case] else {}
    recipe_data["reward"] = [{"name": "jpeg-compressibility"} | frames]
    rows = train_twice(recipe_data, tmp_path)
    gaps = [row["update/first_abs_dlogp_max"] for row in rows if "update/ratio" in row]
    divided = edits and "match_input" not in NEWER[case]
    assert len(gaps) == 2 and max(gaps) <= (1e-6 if divided else 0)

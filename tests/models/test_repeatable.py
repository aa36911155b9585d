"""What makes runs on a GPU repeatable. That they are is tested there: `pytest -m gpu`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gesso import build, imports
from gesso.config import Model, TokenModel
from gesso.families import classes
from gesso.models.flow import attention, compiled, pipeline
from gesso.models.flow.attention import replace_attention
from gesso.models.repeatable import deterministic_algorithms, settle_attention
from gesso.models.tokens import transformer
from tests import pipelines, tokens
from tests.models.test_folded import gradient, stirred
from tests.rollouts import parts_of, rollout_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda:1")


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    before = cudnn_enabled()
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


def cudnn_enabled() -> bool:
    return torch.backends.cuda.cudnn_sdp_enabled()


def test_cudnn_attention_is_off_on_cuda() -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    settle_attention(CPU)
    assert cudnn_enabled()
    settle_attention(CUDA)
    assert not cudnn_enabled()


def test_every_model_settles_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[torch.device] = []
    monkeypatch.setattr(pipeline, "settle_attention", devices.append)
    monkeypatch.setattr(transformer, "settle_attention", devices.append)
    for name, kind in (("sd35", "sd3"), ("flux-dev", "flux"), ("qwen-image", "qwen-image")):
        folder = str(pipelines.build(name, tmp_path / name))
        imports.load(classes.REFERENCES[kind], "model")(
            Model(name=kind, path=folder, text_length=16)
        )
    folder = str(tokens.build("qwen2.5-vl", tmp_path / "writer"))
    kind = "vision-language"
    imports.load(classes.REFERENCES[kind], "model")(TokenModel(name=kind, path=folder))
    assert devices == [CPU] * 4


class Strict:
    strict = True


def test_deterministic_algorithms_end_with_the_block() -> None:
    with deterministic_algorithms(object()):
        assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(KeyError), deterministic_algorithms(Strict()):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        raise KeyError
    assert not torch.are_deterministic_algorithms_enabled()
    with deterministic_algorithms(Strict()):
        with deterministic_algorithms(Strict()):
            pass
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("one_pass", [False, True])
def test_gradients_of_strict_models_are_deterministic(
    recipe_data: dict, monkeypatch: pytest.MonkeyPatch, one_pass: bool
) -> None:
    """Every backward pass of an update, and of sampling in one pass."""
    recipe_data["algorithm"]["one_pass"] = one_pass
    if one_pass:
        recipe_data["model"] |= {"lora": {"rank": 2, "alpha": 4}, "fold": True}
    model, algorithm, learner = parts_of(build.recipe_from(recipe_data))
    plain, seen = torch.Tensor.backward, []

    def backward(*args: Any, **kwargs: Any) -> None:
        seen.append(torch.are_deterministic_algorithms_enabled())
        plain(*args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "backward", backward)
    for strict in (True, False):
        seen.clear()
        monkeypatch.setattr(model, "strict", strict)
        learner.update(rollout_of(model, algorithm), 0)
        assert seen and set(seen) == {strict}


def test_all_passes_of_strict_models_have_one_setting(recipe_data: dict) -> None:
    """Otherwise a compiled network would have one graph for sampling and another for updates."""
    model, algorithm, learner = parts_of(build.recipe_from(recipe_data))
    seen = []
    model.transformer.register_forward_pre_hook(
        lambda *_: seen.append(torch.are_deterministic_algorithms_enabled())
    )
    for strict in (True, False):
        seen.clear()
        model.strict = strict
        rollout = rollout_of(model, algorithm)
        assert seen and not torch.are_deterministic_algorithms_enabled()
        learner.update(rollout, 0)
        assert set(seen) == {strict}


def test_kernels_are_chosen_without_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In forward and in backward, whose graph is compiled after dynamo has reset the setting."""
    from torch._inductor import compile_fx, config

    seen = []

    def inner(graph: torch.fx.GraphModule, *_: Any, **__: Any) -> Any:
        seen.append(config.deterministic)
        return graph.forward

    monkeypatch.setattr(compile_fx, "compile_fx_inner", inner)
    block = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    torch._dynamo.reset()
    run = torch.compile(block, backend=compiled.inductor)
    run(torch.randn(3, 4)).sum().backward()
    assert seen == [True, True] and not config.deterministic


def traced(call: Any, *inputs: torch.Tensor) -> torch.fx.GraphModule:
    graphs = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(call, backend=keep, fullgraph=True)(*inputs)
    return graphs[0]


CALLS = {
    "plain": functional.scaled_dot_product_attention,
    "by name": lambda q, k, v: functional.scaled_dot_product_attention(
        query=q, key=k, value=v, attn_mask=None, dropout_p=0.0, is_causal=False
    ),
    "causal": lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True),
    "scaled": lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, scale=0.3),
    "dropout": lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1),
    "masked": lambda q, k, v: functional.scaled_dot_product_attention(
        q, k, v, attn_mask=torch.ones(5, 5, dtype=torch.bool)
    ),
    "keys masked": lambda q, k, v: functional.scaled_dot_product_attention(
        q, k, v, attn_mask=torch.ones(2, 1, 1, 5, dtype=torch.bool)
    ),
    "biased": lambda q, k, v: functional.scaled_dot_product_attention(
        q, k, v, attn_mask=torch.ones(2, 1, 1, 5)
    ),
}
REPLACED = ("plain", "by name", "keys masked")


@pytest.mark.parametrize("call", CALLS)
def test_attention_is_replaced_if_there_are_kernels(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = traced(CALLS[call], *(torch.randn(2, 3, 5, 64) for _ in range(3)))
    replace_attention(graph)
    assert "gesso" not in graph.code, "on a CPU"
    monkeypatch.setattr(attention, "has_kernels", lambda *place: True)
    replace_attention(graph)
    assert ("gesso.attention" in graph.code) == (call in REPLACED)


def like(memory_layout: Tensor, values: Tensor) -> Tensor:
    return torch.empty_like(memory_layout).copy_(values)


def masked_scores(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    return scores if mask is None else scores.masked_fill(~mask, float("-inf"))


def reference(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    scores = masked_scores(query, key, mask)
    return like(query, scores.softmax(-1) @ value), scores.logsumexp(-1)


def reference_grads(grad: Tensor, *saved: Any) -> tuple[Tensor, ...]:
    """From what forward has saved, as the kernels compute it."""
    query, key, value, mask, out, logsumexp = saved
    scale = query.shape[-1] ** -0.5
    shares = (masked_scores(query, key, mask) - logsumexp[..., None]).exp()
    slopes = grad @ value.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)
    scores = shares * slopes * scale
    dq, dk = scores @ key, scores.transpose(-1, -2) @ query
    return like(query, dq), like(key, dk), like(value, shares.transpose(-1, -2) @ grad)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stand-ins for the kernels, which run on a GPU only."""
    monkeypatch.setattr(attention, "has_kernels", lambda *place: True)
    library = torch.library.Library("gesso", "IMPL")
    library.impl("attention", reference, "CPU")
    library.impl("attention_backward", reference_grads, "CPU")
    yield
    library._destroy()


@pytest.mark.parametrize("name, kind", [("sd35", "sd3"), ("qwen-image", "qwen-image")])
def test_compiled_blocks_use_it(
    name: str, kind: str, folding_data: dict, on_cpu: None, tmp_path: Path
) -> None:
    """A block with both kinds of attention of SD3.5, or with a mask of the keys, checkpointed, and
    compiled by the backend of a GPU but for the last stage. Both outputs of attention are saved;
    gradients are those of torch's attention."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    graphs: list[str] = []

    def note(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph.code)
        return make_boxed_func(graph.forward)

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        replace_attention(graph)
        partition = min_cut_rematerialization_partition
        return aot_autograd(fw_compiler=note, bw_compiler=note, partition_fn=partition)(
            graph, inputs
        )

    folding_data["learner"] = {"micro_batch": 6}
    folder = str(pipelines.build(name, tmp_path / name, num_layers=1))
    folding_data["model"] |= {"name": kind, "path": folder}
    model, algorithm, learner = parts_of(build.recipe_from(folding_data))
    stirred(model)
    rollout = rollout_of(model, algorithm)
    expected = gradient(learner, rollout)
    torch._dynamo.reset()
    model.before_compiling()
    compiled.compile_blocks(model.transformer, model.blocks, backend)
    model.compiled = True
    found = gradient(learner, rollout)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    backward = [code for code in graphs if "attention_backward" in code]
    assert backward and not any("gesso.attention.default" in code for code in backward)
    assert not any("scaled_dot_product" in code for code in graphs)

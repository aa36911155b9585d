"""What makes sampling and training fast on a GPU, on a CPU with tiny models: adapters folded into
the weights, the negative branch's velocities kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gesso import build
from gesso.memory.meta import peak
from gesso.rollout import Rollout
from gesso.samplers.denoise import DenoisingSampler
from gesso.types import Prompt
from gesso.weights.folded_linear import FoldedLinear, apply_to_one_input, fold
from gesso.weights.policy import Policy
from tests.rollouts import SIZE, parts_of, rollout_of

PROMPT = Prompt("a red sign")


@pytest.fixture
def data(folding_data: dict) -> dict:
    folding_data["learner"] = {"micro_batch": 6}
    return folding_data


def stirred(model: Any) -> Any:
    """An adapter that does something: B is zero at the start."""
    noise = torch.Generator().manual_seed(3)
    for name, tensor in model.policy.tensors().items():
        if "lora_B" in name:
            tensor.copy_(0.2 * torch.randn(tensor.shape, generator=noise))
    return model


def layers_of(policy: Policy) -> list[FoldedLinear]:
    return list(policy.folding.layers.values())


def velocity(model: Any, rollout: Rollout, weights: Any = "current") -> torch.Tensor:
    trace = rollout.flow_trace
    with torch.no_grad():
        cond = trace.context.cond.rows(trace.row)
        return model.velocity(trace.clean, torch.full((6,), 0.5), cond, weights)


def gradient(learner: Any, rollout: Rollout, update: int = 0) -> torch.Tensor:
    """Of that optimizer step; the weights are put back."""
    before = {n: t.clone() for n, t in learner.policy.tensors().items()}
    seen: list[torch.Tensor] = []
    parameters = learner.policy.trainable.values()
    hook = learner.optimizer.register_step_pre_hook(
        lambda *_: seen.append(torch.cat([_grad(p).flatten() for p in parameters]))
    )
    learner.update(rollout, 0)
    hook.remove()
    learner.policy.load(before)
    return seen[update]


def _grad(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The last block of Qwen-Image does not use its output for the text."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def test_folded_is_the_same_policy_and_leaves_no_trace(data: dict) -> None:
    model, algorithm, learner = parts_of(build.recipe_from(data))
    learner.policy.snapshot("old")
    stirred(model)
    rollout = rollout_of(model, algorithm)
    state = {n: t.clone() for n, t in model.transformer.state_dict().items()}
    beside = {w: velocity(model, rollout, w) for w in ("current", "old", "reference")}
    assert (beside["current"] - beside["reference"]).abs().max() > 0.01
    with model.policy.folded():
        assert all(layer.folded is None for layer in layers_of(model.policy))  # none is asked for
        for which in (*beside, "current"):  # and back again
            assert (velocity(model, rollout, which) - beside[which]).abs().max() < 1e-4
        assert all(layer.folded is not None for layer in layers_of(model.policy))
    after = model.transformer.state_dict()
    assert state.keys() == after.keys() and all(torch.equal(state[n], after[n]) for n in state)
    assert torch.equal(velocity(model, rollout), beside["current"])


def test_folded_and_unfolded_adapters_have_equal_gradients(data: dict) -> None:
    found = []
    for folding in (True, False):
        data["model"]["fold"] = folding
        model, algorithm, learner = parts_of(build.recipe_from(data))
        stirred(model)
        rollout = rollout_of(model, algorithm)
        found.append(gradient(learner, rollout))
        metrics = learner.update(rollout, 0).metrics
        assert metrics["update/first_abs_dlogp_max"] < 1e-5
    folded, beside = found
    assert beside.norm() > 1e-4 and (folded - beside).norm() < 1e-4 * beside.norm()


def test_every_optimizer_step_folds_anew(data: dict) -> None:
    """The second step's gradient is that of the weights which the first has moved."""
    data["algorithm"] |= {"updates": 2}
    data["optimizer"] = {"lr": 0.02}
    found = {}
    for folding in (True, False):
        data["model"]["fold"] = folding
        model, algorithm, learner = parts_of(build.recipe_from(data))
        stirred(model)
        rollout = rollout_of(model, algorithm)
        found[folding] = gradient(learner, rollout, update=1)
    still = gradient(still_learner(learner), rollout, update=1)
    assert (found[True] - found[False]).norm() < 0.02 * found[False].norm()
    assert (still - found[False]).norm() > 0.2 * found[False].norm()


def still_learner(learner: Any) -> Any:
    """One whose steps move nothing."""
    learner.optimizer.param_groups[0]["peak"] = 0.0
    return learner


def test_nested_folded_contexts_share_their_matrices(data: dict) -> None:
    model, _, _ = parts_of(build.recipe_from(data))
    policy = stirred(model).policy

    def has(matrices: list[Any]) -> bool:
        return all(a is b.folded for a, b in zip(matrices, layers_of(policy), strict=True))

    with policy.folded():
        with policy.using("reference"):
            pass
        assert has([None] * len(policy.folding.layers))
        with policy.using("current"):
            before = [layer.folded for layer in layers_of(policy)]
        assert has(before)  # a pass may be run again on its way back
        assert not any(torch.equal(layer.folded, layer.frozen) for layer in layers_of(policy))
        with policy.folded(), policy.using("reference"):
            assert all(torch.equal(layer.folded, layer.frozen) for layer in layers_of(policy))
            with policy.using("current"):
                assert has(before)
            assert all(torch.equal(layer.folded, layer.frozen) for layer in layers_of(policy))
        assert has(before)
    assert has([None] * len(before))


def test_soon_folds_those_weights_at_once(data: dict) -> None:
    """And not yet put in place: a sampler's pieces are waited for by others."""
    _, _, learner = parts_of(build.recipe_from(data))
    policy = learner.policy
    policy.snapshot("ema")
    with policy.folded(soon="ema"):
        assert policy.is_folded and list(policy.folding.matrices) == ["ema"]
        assert all(layer.folded is None for layer in layers_of(policy))
    with policy.folded(soon="reference"):
        assert policy.is_folded and not policy.folding.matrices
    with pytest.raises(KeyError), policy.folded(soon="old"):  # there is none
        raise NotImplementedError
    assert not policy.is_folded


def test_only_what_is_sampled_with_is_folded(data: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix takes the room of a weight: an averaged policy's pictures need the current one's
    no more than the other way round."""
    data["learner"] |= {"ema": {"every": 1}}
    model, algorithm, learner = parts_of(build.recipe_from(data))
    stirred(model)
    folded: list[str] = []
    fold_one = model.policy.folding._fold

    def asked_for(which: Any) -> Any:
        folded.append(which)
        return fold_one(which)

    monkeypatch.setattr(model.policy.folding, "_fold", asked_for)
    average = {n: t.clone() for n, t in learner.policy.copies["ema"].items()}
    spec = algorithm.spec(0, 0, SIZE)
    found = {}
    for which in ("ema", "current"):
        asked = replace(spec, weights=which)
        pieces = DenoisingSampler(model, 4).sample([PROMPT] * 2, [0, 1], [1, 2], asked)
        found[which] = torch.cat([piece.trace.clean for piece in pieces])
    assert set(folded) == {"ema", "current"} and folded == sorted(folded, reverse=True)
    learner.policy.load(average)
    pieces = DenoisingSampler(model, 4).sample([PROMPT] * 2, [0, 1], [1, 2], spec)
    assert torch.equal(torch.cat([piece.trace.clean for piece in pieces]), found["ema"])
    assert (found["ema"] - found["current"]).abs().max() > 0.01


def adapted(
    dtype: torch.dtype, of_b: float, width: int = 96, seed: int = 0, out: int = 64, rank: int = 4
) -> tuple[FoldedLinear, torch.Tensor]:
    """A layer with an adapter, and W + s·BA in float64."""
    from peft import LoraConfig, inject_adapter_in_model

    noise = torch.Generator().manual_seed(seed)
    layers = torch.nn.Sequential(torch.nn.Linear(width, out)).requires_grad_(False).to(dtype)
    layers[0].weight.copy_(torch.randn(out, width, generator=noise))
    lora = LoraConfig(r=rank, lora_alpha=3 * rank, target_modules=["0"])
    lora._register_custom_module({torch.nn.Linear: FoldedLinear})
    layer = inject_adapter_in_model(lora, layers)[0]
    assert isinstance(layer, FoldedLinear)
    for part, size in ((layer.lora_A, 1.0), (layer.lora_B, of_b)):
        weight = part["default"].weight
        weight.data = size * torch.randn(weight.shape, generator=noise)
    a, b = (part["default"].weight.detach().double() for part in (layer.lora_A, layer.lora_B))
    return layer, layer.frozen.double() + 3 * b @ a


def test_in_bfloat16_an_adapters_first_steps_are_not_lost() -> None:
    """Changes of a hundredth of a unit: to the nearest, next to none of them would be left."""
    layer, wanted = adapted(torch.bfloat16, 1e-5)
    frozen = layer.frozen.double()
    change = wanted - frozen
    assert float(change.abs().max() / frozen.abs().mean()) < 2**-9

    def kept(folded: torch.Tensor) -> float:
        return float(((folded.double() - frozen) * change).sum() / change.square().sum())

    assert abs(kept(wanted.bfloat16())) < 0.2
    assert fold([layer])[0].dtype == torch.bfloat16 and abs(kept(fold([layer])[0]) - 1) < 0.3


def test_layers_of_all_shapes_fold_as_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """In their order, whichever of them go together: of two shapes, two scales, two precisions."""
    layers = [
        adapted(dtype, 0.3, width=width, seed=i)[0]
        for i, (width, dtype) in enumerate(
            (w, d) for d in (torch.float32, torch.bfloat16) for w in (96, 64, 96, 96)
        )
    ]
    layers[2].scaling["default"] = 0.5
    alone = [fold([layer])[0] for layer in layers]
    for layer, folded in zip(layers, alone, strict=True):
        a, b = layer.adapter
        wanted = layer.frozen.double() + layer.scaling["default"] * b.double() @ a.double()
        assert folded.dtype == layer.frozen.dtype and folded.shape == wanted.shape
        unit = 2**-7 if folded.dtype == torch.bfloat16 else 1e-6
        assert bool(((folded - wanted).abs() <= unit * wanted.abs() + 1e-6).all())
    for at_once in (1, 2 * 64 * 96, 2**26):
        monkeypatch.setattr("gesso.weights.folded_linear.FOLD_AT_ONCE", at_once)
        assert all(map(torch.equal, fold(layers), alone))


@pytest.mark.parametrize("count", [2, 7])
def test_folding_takes_little_besides_its_result(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers at once, however many there are: of these the sum and its bits, four bytes a
    number each, and two that are rounded. Every matrix then lies by itself: a compiler looks at
    its storage."""
    layers = [adapted(torch.bfloat16, 0.3)[0].to("meta") for _ in range(count)]
    monkeypatch.setattr("gesso.weights.folded_linear.FOLD_AT_ONCE", 2 * 64 * 96)
    there = [t for layer in layers for t in layer.parameters()]
    folded: list[torch.Tensor] = []
    most = peak(there, lambda: folded.extend(fold(layers)))
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in folded)
    result = sum(t.nbytes for t in folded)
    thresholds, adapters = 4 * 64 * 96, 2 * 2 * 4 * (64 + 96) * 4
    assert most <= result + 10 * 2 * 64 * 96 + thresholds + adapters


@pytest.mark.parametrize("bias", [True, False])
def test_a_folded_product_against_plain_autograd(bias: bool) -> None:
    layer, wanted = adapted(torch.float32, 0.3)
    if not bias:
        layer.base_layer.bias = None
    x = torch.randn(2, 5, 96, generator=torch.Generator().manual_seed(1))
    pull = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(2))
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    layer.folded = fold([layer])[0]
    assert float((layer.folded - wanted).abs().max()) < 1e-5
    inputs = x.double().requires_grad_(), *(t.detach().double().requires_grad_() for t in (a, b))
    plain = inputs[0] @ (layer.frozen.double() + 3 * inputs[2] @ inputs[1]).T
    plain = plain + layer.base_layer.bias.double() if bias else plain
    expected = torch.autograd.grad((plain * pull).sum(), inputs)
    x.requires_grad_()
    y = layer(x)
    found = torch.autograd.grad((y * pull).sum(), (x, a, b))
    assert float((y - plain).detach().abs().max()) < 1e-4
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == torch.float32 and float((mine - theirs).abs().max()) < 1e-3


@pytest.mark.parametrize("samples", [0, 2])
@pytest.mark.parametrize("count", [1, 3])
def test_layers_of_one_input_against_plain_autograd(count: int, samples: int) -> None:
    """Together they give what each gives alone, and the sum of their gradients; of every sample by
    itself where each has adapters of its own. No two are alike in width, rank and scale."""
    sizes = [(64, 4), (32, 4), (64, 2)][:count]
    layers = [
        adapted(torch.float32, 0.3, seed=i, out=n, rank=r)[0] for i, (n, r) in enumerate(sizes)
    ]
    layers[-1].base_layer.bias = None
    layers[-1].scaling["default"] = 0.5
    noise = torch.Generator().manual_seed(1)
    x = torch.randn(2, 5, 96, generator=noise).requires_grad_()
    pulls = [torch.randn(2, 5, out, generator=noise) for out, _ in sizes]
    leaves: list[torch.Tensor] = []
    for layer, folded in zip(layers, fold(layers), strict=True):
        layer.folded = folded
        own = list(layer.adapter)
        if samples:
            own = [p.detach().expand(samples, *p.shape).requires_grad_() for p in own]
            layer.per_sample_adapter = own[0], own[1]
        leaves += own
    found = apply_to_one_input(layers, x)
    for layer, mine in zip(layers, found, strict=True):
        assert torch.equal(mine, layer(x))
    slopes = torch.autograd.grad(found, (x, *leaves), pulls)
    to_x = torch.zeros_like(x, dtype=torch.float64)
    for i, (layer, pull) in enumerate(zip(layers, pulls, strict=True)):
        a, b = (p.detach().double() for p in layer.adapter)
        scale = layer.scaling["default"]
        to_x += pull.double() @ (layer.frozen.double() + scale * b @ a)
        for sample in range(max(1, samples)):
            part = slice(sample, sample + 1) if samples else slice(None)
            g, inputs = (t[part].detach().double().flatten(0, 1) for t in (pull, x))
            expected = scale * (g @ b).T @ inputs, scale * g.T @ (inputs @ a.T)
            for mine, theirs in zip(slopes[1 + 2 * i : 3 + 2 * i], expected, strict=True):
                mine = mine[sample] if samples else mine
                assert mine.shape == theirs.shape and (mine - theirs).abs().max() < 1e-3
    assert (slopes[0] - to_x).abs().max() < 1e-3


@pytest.mark.parametrize("rows", [1, 2])
def test_a_folded_product_in_half_precision(rows: int) -> None:
    """Adapters stay in float32, and so do their gradients; products run as the input is."""
    layer, wanted = adapted(torch.bfloat16, 0.3)
    layer.folded = fold([layer])[0]
    noise = torch.Generator().manual_seed(1)
    x = torch.randn(2, 5, 96, generator=noise).bfloat16().requires_grad_()
    pull = torch.randn(2, 5, 64, generator=noise).bfloat16()
    leaves = [p.detach().expand(rows, *p.shape).requires_grad_() for p in layer.adapter]
    layer.per_sample_adapter = (leaves[0], leaves[1])
    to_x, to_a, to_b = torch.autograd.grad(layer(x), (x, *leaves), pull)
    g, inputs = pull.double().flatten(0, 1), x.detach().double().flatten(0, 1)
    a, b = (p.detach().double() for p in layer.adapter)
    expected = (g @ wanted).view(x.shape), 3 * (g @ b).T @ inputs, 3 * g.T @ (inputs @ a.T)
    assert to_x.dtype == torch.bfloat16 and to_a.dtype == to_b.dtype == torch.float32
    assert not any(torch.equal(t, t.bfloat16().float()) for t in (to_a, to_b))  # scaled in float32
    for mine, theirs in zip((to_x, to_a.sum(0), to_b.sum(0)), expected, strict=True):
        assert (mine.double() - theirs).norm() < 0.01 * theirs.norm()


def test_layers_of_which_some_are_folded_run_one_by_one() -> None:
    layers = [adapted(torch.float32, 0.3, seed=i)[0] for i in range(3)]
    layers[1].folded = fold(layers)[1]
    x = torch.randn(2, 5, 96, generator=torch.Generator().manual_seed(1))
    for layer, found in zip(layers, apply_to_one_input(layers, x), strict=True):
        assert torch.equal(found, layer(x))


def test_rows_for_another_number_of_samples_raise() -> None:
    """Three rows of four tokens would part into two halves as well."""
    layer, _ = adapted(torch.float32, 0.3)
    layer.folded = fold([layer])[0]
    a, b = (p.detach().expand(2, *p.shape).requires_grad_() for p in layer.adapter)
    layer.per_sample_adapter = a, b
    with pytest.raises(AssertionError, match="3 rows, adapters for 2"):
        layer(torch.ones(3, 4, 96)).sum().backward()


def test_a_folded_product_computes_only_requested_gradients() -> None:
    """One full product forth; back, another only if the input is differentiated. The rest is
    thin: 10 rows, rank 4."""
    from torch.utils.flop_counter import FlopCounterMode

    layer, _ = adapted(torch.float32, 0.3)
    layer.folded = fold([layer])[0]
    full, thin = 2 * 10 * 96 * 64, 2 * 2 * 10 * 4 * (96 + 64)
    for asked in (True, False):
        x = torch.ones(2, 5, 96, requires_grad=asked)
        with FlopCounterMode(display=False) as counter:
            layer(x).sum().backward()
        assert counter.get_total_flops() == (1 + asked) * full + thin


def test_layers_of_one_input_take_one_product_back() -> None:
    """As much arithmetic as one by one, in fewer products: what the input's gradient takes is one,
    and so are both reads of the input for the adapters."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None):
            if call.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm):
                shapes.append((*args[0].shape, args[1].shape[-1]))
            return call(*args, **(kwargs or {}))

    layers = [adapted(torch.float32, 0.3, seed=i)[0] for i in range(3)]
    for layer, folded in zip(layers, fold(layers), strict=True):
        layer.folded = folded
    shapes: list[tuple[int, ...]] = []
    found = apply_to_one_input(layers, torch.ones(2, 5, 96, requires_grad=True))
    with Products():
        torch.autograd.backward(found, [torch.ones_like(y) for y in found])
    thin = [(10, 64, 4)] * 3 + [(64, 10, 4)] * 3
    assert sorted(shapes) == sorted([(10, 192, 96), (10, 96, 12), (12, 10, 96), *thin])


def test_what_was_folded_is_forgotten_when_weights_move(data: dict) -> None:
    model, algorithm, _ = parts_of(build.recipe_from(data))
    rollout = rollout_of(model, algorithm)
    with model.policy.folded():
        before = velocity(model, rollout)
    stirred(model)
    with model.policy.folded():
        assert (velocity(model, rollout) - before).abs().max() > 0.01
        assert all(layer.folded is not None for layer in layers_of(model.policy))


class Counted:
    """Rows of every pass of a transformer."""

    def __init__(self, model: Any) -> None:
        self.rows: list[int] = []
        model.transformer.register_forward_pre_hook(
            lambda _, __, inputs: self.rows.append(len(inputs["hidden_states"])), with_kwargs=True
        )


def test_the_negative_branch_is_not_run_twice(data: dict) -> None:
    """Where it is not differentiated and the weights have not moved, training has its velocities
    from sampling: the gradient is the same to the bit, for half the passes."""
    data["algorithm"] |= {"guidance_gradient": "conditional", "updates": 2}
    model, algorithm, learner = parts_of(build.recipe_from(data))
    stirred(model)
    rollout = rollout_of(model, algorithm, batch=6)
    assert rollout.flow_trace.negatives is not None and rollout.flow_trace.negatives.shape[1] == 2
    counted = Counted(model)
    known = gradient(learner, rollout)
    assert counted.rows == [6, 6, 6]  # 3 samples × 2 steps an update; by the second, moved
    counted.rows.clear()
    again = gradient(learner, rollout.aged())
    assert counted.rows == [6, 6, 6, 6]
    assert torch.equal(known, again)
    counted.rows.clear()
    learner.update(rollout, 1)  # drawn by the weights of step 0
    assert counted.rows == [6, 6, 6, 6]

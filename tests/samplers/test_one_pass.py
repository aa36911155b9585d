"""Gradients taken while sampling: the same update, without a pass of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gesso import build, cli
from gesso.algorithms.one_pass import OnePassTerms
from gesso.check import check
from gesso.config import Model
from gesso.models.flow.compiled import compile_blocks
from gesso.rollout import Rollout
from gesso.run import assemble, resume, train
from gesso.traces.flow import FlowTrace
from gesso.types import Score, UserError
from gesso.weights.folded_linear import fold
from tests import pipelines
from tests.conftest import folding_recipe
from tests.cut_run import cut_after
from tests.models.test_folded import Counted, adapted, stirred
from tests.rollouts import REWARDS, parts_of, rollout_of

Gradients = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def sd35_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers: the first has a second attention, the last does not return the text."""
    return pipelines.build("sd35", tmp_path_factory.mktemp("sd35") / "sd35", num_layers=2)


def one_pass_recipe(sd35_folder: Path, prompt_file: Path) -> dict:
    data = folding_recipe(sd35_folder, prompt_file)
    data["algorithm"]["one_pass"] = True
    return data


@pytest.fixture
def data(sd35_folder: Path, prompt_file: Path) -> dict:
    return one_pass_recipe(sd35_folder, prompt_file)


@pytest.fixture(scope="module")
def expected(sd35_folder: Path, prompt_file: Path) -> Gradients:
    """The gradient in two passes, and in one, of `data` as it is."""
    return compared(one_pass_recipe(sd35_folder, prompt_file))


def gradients(learner: Any, rollout: Rollout) -> Gradients:
    """Of the one optimizer step, which moves nothing."""
    seen: list[Gradients] = []
    trained = learner.policy.trainable.items()
    hook = learner.optimizer.register_step_pre_hook(
        lambda *_: seen.append({n: p.grad for n, p in trained if p.grad is not None})
    )
    learner.optimizer.param_groups[0]["peak"] = 0.0
    learner.schedule = learner.schedule.model_copy(update={"max_norm": 1e9})
    metrics = learner.update(rollout, 0).metrics
    hook.remove()
    assert metrics["update/skipped"] == 0 and len(seen) == 1
    return seen[0]


def distance(found: Gradients, expected: Gradients) -> float:
    assert found.keys() == expected.keys()
    one, other = (torch.cat([g[name].flatten() for name in expected]) for g in (found, expected))
    assert other.norm() > 1e-4
    return float((one - other).norm() / other.norm())


def compared(
    data: dict, batch: int = 4, rewards: Sequence[float] = REWARDS, size: Model | None = None
) -> Gradients:
    """In one pass as in two: pictures, log-probs, gradient. An update runs no network."""
    found: list[tuple[Rollout, Gradients]] = []
    for one in (False, True):
        data["algorithm"]["one_pass"] = one
        model, algorithm, learner = parts_of(build.recipe_from(data))
        stirred(model)
        rollout = rollout_of(model, algorithm, batch=batch, size=size)
        rollout = replace(rollout, scores=[Score(r, {"made-up": r}) for r in rewards])
        counted = Counted(model)
        found.append((rollout, gradients(learner, rollout)))
        assert (
            bool(counted.rows) != one and (rollout.flow_trace.per_sample_grads is not None) == one
        )
        assert not rollout.logp.requires_grad and not rollout.flow_trace.clean.requires_grad
    (two_passes, expected), (one_pass, gradient) = found
    assert torch.equal(one_pass.flow_trace.clean, two_passes.flow_trace.clean)
    assert torch.equal(one_pass.flow_trace.latents, two_passes.flow_trace.latents)
    assert torch.equal(one_pass.logp, two_passes.logp)
    assert distance(gradient, expected) < 2e-5  # float32; 1.1e-5 was seen on ARM
    return expected


FAST = {"name": "flow-grpo-fast", "group": 3, "steps": 4, "updates": 1, "clip": 0.2}
FAST |= {"window": {"size": 2, "low": 1, "high": 3}}
DANCE = {"name": "dance-grpo", "group": 3, "steps": 3, "updates": 1, "guidance": 4.5, "clip": 0.2}
VARIANTS: dict[str, dict[str, Any]] = {
    "conditional": {"guidance_gradient": "conditional"},
    "unguided": {"guidance": 1.0},
    "a window": FAST,
    "a guided window": FAST | {"guidance": 3.0, "guidance_gradient": "conditional"},
    "one noise, a window": DANCE | {"window": {"size": 1, "low": 1, "high": 2}},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_update_is_that_of_two_passes(data: dict, variant: str) -> None:
    """Two groups, in batches of 4 and 2. The fixture `expected` is one more variant: both branches,
    every step."""
    own = VARIANTS[variant]
    data["algorithm"] = own if "name" in own else data["algorithm"] | own
    compared(data)


def test_a_sample_as_good_as_its_group_has_no_gradient_and_counts(data: dict) -> None:
    compared(data, rewards=[0.0, 0.5, 1.0, 0.3, 0.3, 0.8])


@pytest.mark.parametrize("name", ["flux-dev", "qwen-image"])
def test_of_other_models(data: dict, name: str, tmp_path: Path) -> None:
    """FLUX has no second branch. Of Qwen-Image's last block nothing of the text is used: what its
    adapters there are trained with is no gradient of zeros, but none."""
    path = str(pipelines.build(name, tmp_path / "pipeline"))
    data["model"] |= {"name": name.partition("-dev")[0], "path": path}
    expected = compared(data)
    model = build.model(build.recipe_from(data))
    assert (len(expected) < len(model.policy.trainable)) == (name == "qwen-image")


def test_of_videos(data: dict, tmp_path: Path) -> None:
    path = str(pipelines.build("wan", tmp_path / "wan", num_layers=1))
    data["model"] |= {"name": "wan", "path": path, "height": 16, "width": 32, "frames": 5}
    compared(data, size=Model(**data["model"]))


def test_with_activations_computed_again(data: dict) -> None:
    data["model"]["gradient_checkpointing"] = True
    compared(data, batch=6)


def test_compiled_all_passes_share_their_graphs(data: dict, expected: Gradients) -> None:
    """One per block, as many as two passes take: of steps with gradient and without, of batches
    that are full and that are filled up. Rows that fill leave nothing in the gradient. (Other
    models' blocks are compiled in tests/models/test_compiled.py.)"""
    model, algorithm, learner = parts_of(build.recipe_from(data))
    stirred(model)
    torch._dynamo.reset()
    compile_blocks(model.transformer, model.blocks, backend="eager")
    model.compiled, model.sizes = True, (10,)
    counters = torch._dynamo.utils.counters["stats"]
    counters.clear()
    counted = Counted(model)
    for step in range(2):
        rollout = rollout_of(model, algorithm)
        assert distance(gradients(learner, rollout), expected) < 1e-5
        assert counters["unique_graphs"] == 2, step
    assert set(counted.rows) == {10}


@pytest.mark.parametrize("rows", [8, 10, 11])
def test_a_batch_that_is_filled_up(data: dict, expected: Gradients, rows: int) -> None:
    """4 samples in two branches, then 2. Where an odd number of rows is run, the two of a sample
    gather by themselves first."""
    model, algorithm, learner = parts_of(build.recipe_from(data))
    stirred(model)
    model.compiled, model.sizes = True, (rows,)  # filled as if it were compiled
    counted = Counted(model)
    rollout = rollout_of(model, algorithm)
    assert set(counted.rows) == {rows}
    assert distance(gradients(learner, rollout), expected) < 1e-5


@pytest.mark.parametrize(
    "gradient, rows, leaves", [("both", 8, 4), ("both", 11, 11), ("conditional", 8, 8)]
)
def test_a_sample_has_one_gradient_not_one_a_branch(
    data: dict, gradient: str, rows: int, leaves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are as large as all adapters each; only where rows cannot be paired there are more."""
    data["algorithm"]["guidance_gradient"] = gradient
    model, algorithm, _ = parts_of(build.recipe_from(data))
    model.compiled, model.sizes = True, (rows,)
    per_sample_grads, asked = model.policy.per_sample_grads, []

    def watched(count: int) -> Any:
        asked.append(count)
        return per_sample_grads(count)

    monkeypatch.setattr(model.policy, "per_sample_grads", watched)
    rollout_of(model, algorithm)
    assert asked == [leaves, leaves]


@pytest.mark.parametrize("shape", [(3, 5, 96), (3, 96), (3, 2, 5, 96)])
def test_a_product_by_sample_against_one_by_one(shape: tuple[int, ...]) -> None:
    layer, _ = adapted(torch.float32, 0.3)
    layer.folded = fold([layer])[0]
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    noise = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=noise).requires_grad_()
    pull = torch.randn(*shape[:-1], 64, generator=noise)
    whole = torch.autograd.grad((layer(x) * pull).sum(), x)[0]
    one_by_one = [torch.autograd.grad((layer(x[[i]]) * pull[[i]]).sum(), (a, b)) for i in range(3)]
    rows = tuple(p.detach().expand(3, *p.shape).requires_grad_() for p in (a, b))
    layer.per_sample_adapter = (rows[0], rows[1])
    y = layer(x)
    assert torch.equal(y, torch.nn.functional.linear(x, layer.folded, layer.base_layer.bias))
    to_x, *found = torch.autograd.grad((y * pull).sum(), (x, *rows))
    assert torch.equal(to_x, whole)
    for mine, own in zip(found, zip(*one_by_one, strict=True), strict=True):
        torch.testing.assert_close(mine, torch.stack(own), rtol=1e-5, atol=1e-5)
    doubled = x.repeat_interleave(2, 0)  # two rows to an adapter, side by side
    twice = torch.autograd.grad((layer(doubled) * pull.repeat_interleave(2, 0)).sum(), rows)
    for mine, own in zip(twice, found, strict=True):
        torch.testing.assert_close(mine, 2 * own, rtol=1e-5, atol=1e-5)
    with pytest.raises(AssertionError, match="4 rows, adapters for 3"):
        layer(doubled[:4]).sum().backward()


def test_nothing_is_left_behind(data: dict) -> None:
    model, algorithm, learner = parts_of(build.recipe_from(data))
    policy = model.policy
    with pytest.raises(KeyError), policy.folded(), policy.per_sample_grads(2) as own:
        assert own.keys() == policy.trainable.keys()
        for name, p in policy.trainable.items():
            assert own[name].shape == (2, *p.shape) and own[name].data_ptr() == p.data_ptr()
        raise KeyError("whatever happens within")
    assert all(
        layer.per_sample_adapter is None and layer.folded is None
        for layer in policy.folding.layers.values()
    )
    rollout = rollout_of(model, algorithm)
    assert all(layer.per_sample_adapter is None for layer in policy.folding.layers.values())
    assert all(p.grad is None for p in policy.trainable.values())
    with pytest.raises(AssertionError, match="require folded adapters"), policy.per_sample_grads(2):
        raise NotImplementedError
    assert rollout.aged().flow_trace.per_sample_grads is None
    found = gradients(learner, replace(rollout, trace=replace(rollout.flow_trace, negatives=None)))
    assert distance(gradients(learner, rollout.aged()), found) < 1e-5  # as in two passes


def test_gradients_go_with_their_samples(data: dict) -> None:
    """By reference: a rollout's are gigabytes."""
    model, algorithm, _ = parts_of(build.recipe_from(data))
    trace = rollout_of(model, algorithm).flow_trace
    whole = trace.per_sample_grads
    assert whole is not None and len(whole) == 6
    picked = trace.rows(torch.tensor([4, 1])).per_sample_grads
    assert picked is not None and picked[0] is whole[4] and picked[1] is whole[1]
    joined = FlowTrace.concat([trace, trace]).per_sample_grads
    assert joined is not None and len(joined) == 12 and joined[7] is whole[1]
    without = replace(trace, per_sample_grads=None)
    assert FlowTrace.concat([trace, without]).per_sample_grads is None


def test_gradients_are_weighed_by_their_advantages(data: dict) -> None:
    """−Σ A_i·⟨∇logp_i, θ⟩, by hand; what was gathered stays as it is."""
    model, _, _ = parts_of(build.recipe_from(data))
    trained = stirred(model).policy.trainable
    noise = torch.Generator().manual_seed(4)
    grads = [
        {name: torch.randn(p.shape, generator=noise) for name, p in list(trained.items())[:4]}
        for _ in range(3)
    ]
    kept = [{name: t.clone() for name, t in grad.items()} for grad in grads]
    advantages = torch.tensor([0.5, -2.0, 1.5])
    loss = OnePassTerms(6, grads, advantages).loss(model.policy)
    (2 * loss).backward()
    for grad, before in zip(grads, kept, strict=True):
        assert all(torch.equal(t, before[name]) for name, t in grad.items())
    wanted = {
        name: -sum(a * grad[name] for a, grad in zip(advantages, kept, strict=True))
        for name in kept[0]
    }
    value = sum((wanted[name] * trained[name].detach()).sum() for name in wanted)
    torch.testing.assert_close(loss.detach(), value)
    for name, p in trained.items():
        if name in wanted:
            torch.testing.assert_close(p.grad, 2 * wanted[name])
        else:
            assert p.grad is None


def test_a_batch_without_spread_moves_nothing(data: dict) -> None:
    """As in two passes: not even by Adam's momentum."""
    model, algorithm, learner = parts_of(build.recipe_from(data))
    rollout = rollout_of(model, algorithm)
    learner.update(rollout, 0)
    before = {name: t.clone() for name, t in learner.policy.tensors().items()}
    even = replace(rollout, scores=[Score(0.5, {"made-up": 0.5})] * 6, version=1)
    metrics = learner.update(even, 1).metrics
    assert metrics["update/grad_norm"] == 0
    assert all(torch.equal(t, before[name]) for name, t in learner.policy.tensors().items())


def test_a_run_and_a_resumed_one(data: dict, tmp_path: Path) -> None:
    """To the bit; no row speaks of a ratio, for there is none."""
    data["eval"] |= {"every": 0, "prompts": 1, "steps": 1}
    recipe = build.recipe_from(data | {"steps": 2, "optimizer": {"lr": 1e-3}})
    whole = train(recipe, folder=tmp_path / "whole", quiet=True)
    cut = resume(cut_after(whole, 1, tmp_path / "cut"), quiet=True)
    first, second = whole.load(2)[0], cut.load(2)[0]
    assert first.keys() == second.keys()
    assert all(tensor.equal(second[key]) for key, tensor in first.items())
    assert build.algorithm(recipe).clip_range is None
    rows = list(whole.rows())
    assert rows[-1]["update/grad_norm"] > 0 and rows[-1]["health"] == []
    assert not {"update/ratio", "update/clipped", "update/abs_dlogp"} & rows[-1].keys()


def test_check_tries_it(data: dict) -> None:
    """And has nothing to say of micro-batches, which there are none of."""
    data["learner"]["micro_batch"] = 5
    found = check(build.recipe_from(data))
    facts = dict(found.facts)
    assert facts["ratio"] == "not used by this algorithm" and "per step" in facts["time"]
    assert not any("micro" in told for told in found.warnings)


REFUSED = {
    "algorithm.updates=2": "computes gradients with the weights that sample, so a rollout allows "
    "one optimizer step, got updates = 2; set updates = 1",
    "algorithm.beta=0.04": "does not support a KL to the reference, got beta = 0.04; set beta = 0",
    "algorithm.name=grpo-guard": "but the surrogate of grpo-guard depends on more than the ratio",
    "algorithm.name=flow-dppo": "but the surrogate of flow-dppo depends on more than the ratio",
    "lag=1": r"got lag = 1, which updates newer weights than it samples with; set lag = 0",
    "model.lora=none": "got full fine-tuning; set model.lora.rank",
    "model.quantize=nf4": 'got quantize = "nf4"; remove model.quantize',
    "model.fold=false": "got fold = false; remove model.fold, or set it to true",
}


@pytest.mark.parametrize("change", REFUSED)
def test_what_cannot_be_in_one_pass(change: str) -> None:
    possible = ["model.lora.rank=4", "algorithm.one_pass=true"]
    assert build.recipe("demo", possible)
    with pytest.raises(UserError, match="one_pass = true") as raised:
        build.recipe("demo", [*possible, change])
    assert REFUSED[change] in str(raised.value) and "\n" not in str(raised.value)


def test_on_a_cpu_folding_must_be_requested(capsys: pytest.CaptureFixture) -> None:
    """Before anything is loaded; and what was trained on a GPU can be looked at here."""
    recipe = build.recipe("demo", ["model.lora.rank=4", "algorithm.one_pass=true"])
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"device": "cpu"})})
    with pytest.raises(UserError, match=r'on device "cpu"; set model.fold = true'):
        assemble(recipe)
    changes = ["model.lora.rank=4", "algorithm.one_pass=true", "model.device=cpu"]
    assert cli.main(["check", "demo", *changes]) != 0
    assert "set model.fold = true" in capsys.readouterr().err


def test_the_recipe_of_the_page_on_algorithms(tmp_path: Path) -> None:
    docs = Path(__file__).parents[2] / "docs"
    page = (docs / "explanation" / "algorithms.md").read_text(encoding="utf-8")
    file = tmp_path / "mine.toml"
    file.write_text(page.split("### One pass")[1].split("```toml\n")[1].split("```")[0])
    small = ["steps=1", "data.groups=1", "algorithm.group=4", "sampler.batch=4", "eval.prompts=1"]
    small += ["eval.steps=1"]
    small += ['reward=[{name="jpeg-compressibility"}]', "model.device=cpu"]
    run = train(build.recipe(str(file), small), folder=tmp_path / "run", quiet=True)
    assert list(run.rows())[-1]["update/grad_norm"] > 0

"""The flow family through the real sampler and learner: windows, shared starts, surrogates."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from gesso import build
from gesso.algorithms.base import Algorithm, Prepared
from gesso.algorithms.flow_grpo import FlowGRPO
from gesso.algorithms.stepped import Window
from gesso.formulas import advantages as adv
from gesso.rollout import Rollout
from gesso.run import assemble, resume, train
from gesso.samplers.denoise import DenoisingSampler
from gesso.traces.flow import FlowTrace
from gesso.types import Prompt, SampleSpec, Score, UserError
from tests import pipelines
from tests.conftest import PROMPTS, small_recipe
from tests.cut_run import cut_after
from tests.rollouts import SIZE, parts_of, rollout_of, scored_rollout
from tests.typed import sure

SMALL: dict[str, Any] = {"group": 3, "steps": 4, "updates": 1}
FAMILY: dict[str, dict[str, Any]] = {
    "flow-grpo": {"guidance": 2.0, "clip": 0.2},
    "flow-grpo-fast": {"window": {"size": 2, "low": 0, "high": 3}, "same_noise": True},
    "mix-grpo": {"guidance": 1.0, "window": {"size": 2, "low": 0, "high": 4, "every": 3}},
    "dance-grpo": {"guidance": 1.0},
    "grpo-guard": {"guidance": 1.0, "clip": 0.2},
    "flow-dppo": {"guidance": 1.0, "clip": 0.2},
    "flash-grpo": {"guidance": 1.0, "window": {"size": 1, "low": 0, "high": 4, "per": "prompt"}},
    "tempflow-grpo": {"guidance": 1.0, "window": {"size": 1, "low": 0, "high": 3, "per": "prompt"}},
    "diffusion-nft": {"times": 3},
    "awm": {"times": 2, "last": 3},
    "dgpo": {"times": 2, "last": 2, "guidance": 1.0},
    "flow-dpo": {"times": 2, "guidance": 1.0},
    "flow-rft": {"times": 2},
}
NOISED = ("diffusion-nft", "awm", "dgpo", "flow-dpo", "flow-rft")
RATIO = [name for name in FAMILY if name not in NOISED]
LORA = {"rank": 4, "alpha": 8}


@pytest.fixture(params=FAMILY)
def any_data(request: pytest.FixtureRequest, recipe_data: dict) -> dict:
    return with_algorithm(recipe_data, request.param)


def with_algorithm(recipe_data: dict, name: str, **more: Any) -> dict:
    return recipe_data | {"algorithm": {"name": name, **SMALL, **FAMILY[name], **more}}


def test_every_algorithm_of_the_table_is_tried_here() -> None:
    """Except those without rewards of sampled images, or with their gradients: they have files of
    their own, flow-sft is in test_noised.py."""
    draws = {n for n in build.ALGORITHMS if build.algorithm_class(n).family == "flow"}
    assert FAMILY.keys() | {"flow-sft", "flow-opd", "draft", "refl", "leap-align"} == draws


# Adapters do not depend on the algorithm: one with a reference policy, one without.
UPDATED = [(name, None) for name in RATIO] + [("flow-grpo", LORA), ("flow-grpo-fast", LORA)]


@pytest.mark.parametrize("name, lora", UPDATED)
def test_replay_equals_sampling_and_an_update_prefers_the_better_samples(
    recipe_data: dict, name: str, lora: dict | None
) -> None:
    """One update lowers the loss that its rollout asks for. (NFT's moves its old policy with it;
    tests/learner has its own.)"""
    data = with_algorithm(recipe_data, name)
    data["model"]["lora"] = lora
    data["optimizer"] = {"lr": 1e-4 if lora else 1e-5}
    model, algorithm, learner = parts_of(build.recipe_from(data))
    rollout = rollout_of(model, algorithm, seed=3)
    terms = algorithm.terms(rollout, Prepared(algorithm.advantage(rollout)))
    with torch.no_grad():
        before = algorithm.loss(model, terms)
    assert len(terms) == rollout.logp.numel() > 0
    assert before.stats["abs_dlogp"].max() < 1e-5
    assert (before.stats["ratio"] - 1).abs().max() < 1e-5
    assert rollout.logp.std() > 1e-4  # not trivially equal

    metrics = learner.update(rollout, 0).metrics
    assert metrics["update/grad_norm"] > 0 and metrics["update/skipped"] == 0
    with torch.no_grad():
        after = algorithm.loss(model, terms)
    assert float(after.loss.sum()) < float(before.loss.sum()) - 1e-6


def test_micro_batches_give_the_same_gradient(any_data: dict) -> None:
    model, algorithm, learner = parts_of(build.recipe_from(any_data))
    rollout = rollout_of(model, algorithm, seed=3)
    terms = algorithm.terms(rollout, Prepared(algorithm.advantage(rollout)))
    found = []
    for size in (1, 5, 64):
        learner.settings = learner.settings.model_copy(update={"micro_batch": size})
        learner._accumulate(terms, defaultdict(list))
        found.append(torch.cat([p.grad.flatten() for p in learner.policy.trainable.values()]))
    assert found[0].norm() > 0
    for other in found[1:]:
        assert (other - found[0]).norm() <= 1e-4 * found[0].norm()


@pytest.fixture(scope="module")
def moved(pipeline_folder: Path, prompt_file: Path) -> Callable[[str], tuple[Any, ...]]:
    """Shared by tests that change neither weights nor settings."""
    return cache(lambda name: moved_rollout(small_recipe(pipeline_folder, prompt_file), name))


def moved_rollout(recipe_data: dict, name: str) -> tuple[Any, Any, Any, Rollout]:
    """A rollout, and weights that have moved since: ratios are no longer 1."""
    recipe_data = with_algorithm(recipe_data, name, clip=1e9)
    model, algorithm, learner = parts_of(build.recipe_from(recipe_data))
    rollout = rollout_of(model, algorithm, seed=3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in learner.policy.trainable.values():
            p.add_(3e-3 * torch.randn(p.shape, generator=generator))
    return model, algorithm, learner, rollout


def plain_transitions(model: Any, rollout: Rollout, n: int, j: int) -> tuple[Any, ...]:
    """μ now, the sampled x', σ and dt of trained step j of sample n, through plain diffusers."""
    trace = rollout.flow_trace
    cond = trace.context.cond.rows(trace.row[n : n + 1])
    i = int(trace.steps[n, j])
    sigmas = trace.context.sigmas
    sigma, dt = sigmas[i], sigmas[i + 1] - sigmas[i]
    x, x_next = trace.latents[n : n + 1, j], trace.latents[n : n + 1, j + 1]
    v = model.pipe.transformer(x, cond.embeds, cond.pooled, (sigma * 1000).expand(1)).sample
    s2 = 0.49 * sigma / (1 - (sigmas[1] if sigma == 1 else sigma))
    mean = x * (1 + s2 / (2 * sigma) * dt) + v * (1 + s2 * (1 - sigma) / (2 * sigma)) * dt
    return mean, x_next, torch.sqrt(s2 * -dt), dt


@pytest.mark.parametrize("name", ["grpo-guard", "flow-dppo"])
def test_the_gradient_equals_a_plain_computation(
    moved: Callable[[str], tuple[Any, ...]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, algorithm, learner, rollout = moved(name)
    advantages = algorithm.advantage(rollout)
    terms = algorithm.terms(rollout, Prepared(advantages))
    unclipped = learner.schedule.model_copy(update={"max_norm": 1e9})
    monkeypatch.setattr(learner, "schedule", unclipped)
    learner._accumulate(terms, defaultdict(list))
    got = torch.cat([p.grad.flatten() for p in learner.policy.trainable.values()])

    total = torch.zeros(())
    for n in range(6):
        for j in range(3):
            mean, x_next, c, dt = plain_transitions(model, rollout, n, j)
            old = rollout.flow_trace.means[n : n + 1, j]
            normal = torch.distributions.Normal
            change = (normal(mean, c).log_prob(x_next) - normal(old, c).log_prob(x_next)).mean()
            if name == "grpo-guard":
                b = ((mean - old) ** 2).mean() / (2 * c**2)
                total = total - advantages[n].float() * torch.exp((change + b) * c) / -dt
            else:
                total = total - advantages[n].float() * torch.exp(change)
    learner.optimizer.zero_grad()
    (total / 18).backward()
    plain = torch.cat([p.grad.flatten() for p in learner.policy.trainable.values()])
    assert (got - plain).norm() <= 1e-3 * plain.norm()


def test_stored_means_are_those_of_the_sampled_steps(recipe_data: dict) -> None:
    model, algorithm, _ = parts_of(build.recipe_from(with_algorithm(recipe_data, "grpo-guard")))
    rollout = rollout_of(model, algorithm, seed=3)
    for n, j in ((0, 0), (4, 2)):
        with torch.no_grad():
            mean, x_next, c, _ = plain_transitions(model, rollout, n, j)
        torch.testing.assert_close(
            rollout.flow_trace.means[n : n + 1, j], mean, rtol=1e-4, atol=1e-4
        )
        assert 0.5 < ((x_next - mean) / c).std() < 1.5  # what is left is the drawn noise
    plain = rollout_of(model, build.algorithm(build.recipe_from(recipe_data)))
    assert plain.flow_trace.means.shape[1] == 0  # nobody asked


def test_the_mask_of_dppo_acts_and_its_limit_counts(
    moved: Callable[[str], tuple[Any, ...]],
) -> None:
    model, algorithm, _, rollout = moved("flow-dppo")
    terms = algorithm.terms(rollout, Prepared(algorithm.advantage(rollout)))
    strict = algorithm.model_copy(update={"clip": 1e-12})
    with torch.no_grad():
        free, masked = (a.loss(model, terms).stats for a in (algorithm, strict))
    pushed = ((free["ratio"] > 1) & (terms.advantage > 0)) | (
        (free["ratio"] < 1) & (terms.advantage < 0)
    )
    assert not free["clipped"].any()
    assert masked["clipped"].bool().equal(pushed) and 0 < pushed.sum() < len(pushed)


def test_a_window_sampled_for_a_batch() -> None:
    window = Window(size=2, low=1, high=5)
    places = {window.place(step, seed).start for step in range(3) for seed in range(50)}
    assert places == {1, 2, 3}
    assert all(window.place(step, 9) == window.place(0, 9) for step in range(20))


def test_a_moving_window_moves_by_one_and_wraps() -> None:
    window = Window(size=4, low=0, high=25, every=25)
    assert [window.place(step, 7).start for step in (0, 24, 25, 49, 50)] == [0, 0, 1, 1, 2]
    last = 25 * 21  # the 22nd place is the last
    assert window.place(last, 7) == range(21, 25)
    assert window.place(last + 25, 7) == range(0, 4)


def test_the_step_of_the_run_moves_the_window(recipe_data: dict) -> None:
    recipe = build.recipe_from(with_algorithm(recipe_data, "mix-grpo"))
    algorithm = sure(FlowGRPO, build.algorithm(recipe))
    assert [algorithm.spec(step, 5, SIZE).trained.start for step in range(0, 10, 3)] == [
        0,
        1,
        2,
        0,
    ]


def start_of(model: Any, algorithm: Algorithm, batch: int) -> tuple[FlowTrace, list[int]]:
    """2 prompts × 3 samples, and how many latents each call of the transformer got."""
    calls: list[int] = []
    velocity = model.velocity

    def counted(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        calls.append(len(x))
        return velocity(x, *rest)

    model.velocity = counted
    sampler = DenoisingSampler(model, batch)
    row = [0, 0, 0, 1, 1, 1]
    spec = algorithm.spec(0, 0, SIZE)
    pieces = list(sampler.sample([Prompt(t) for t in PROMPTS[:2]], row, list(range(6)), spec))
    del model.velocity
    latents = torch.cat([p.trace.latents for p in pieces])
    clean = torch.cat([p.trace.clean for p in pieces])
    trace = dataclasses.replace(pieces[0].trace, latents=latents, clean=clean)
    return trace, calls


def test_a_group_shares_its_start_and_the_ode_steps_before_the_window(recipe_data: dict) -> None:
    window = {"size": 1, "low": 2, "high": 3}
    data = with_algorithm(recipe_data, "flow-grpo-fast", window=window)
    model, algorithm, _ = parts_of(build.recipe_from(data))
    trace, calls = start_of(model, algorithm, 6)
    assert calls == [2, 2, 6, 6]  # steps 0 and 1 once a group
    before, after = trace.latents[:, 0], trace.latents[:, 1]
    for group in (slice(0, 3), slice(3, 6)):
        assert before[group].std(0).max() == 0  # one path up to the window
        assert after[group].std(0).min() > 0  # and three after it
    assert (before[0] - before[3]).abs().max() > 0.1
    cut, calls = start_of(model, algorithm, 4)  # the second group lies in both pieces
    assert calls == [2, 2, 4, 4, 1, 1, 2, 2]  # and is computed in both
    assert (cut.clean - trace.clean).abs().max() < 1e-4
    own = sure(FlowGRPO, algorithm).model_copy(update={"same_noise": False})
    apart, calls = start_of(model, own, 6)
    assert calls == [6, 6, 6, 6] and apart.latents[:3, 0].std(0).min() > 0


def test_nft_samples_with_the_second_order_solver(recipe_data: dict) -> None:
    """Against DPM-Solver++(2M) as its paper writes it, in exponentials of the log-SNR."""
    data = with_algorithm(recipe_data, "diffusion-nft", steps=5)
    model, algorithm, _ = parts_of(build.recipe_from(data))
    sampler = DenoisingSampler(model, 2)
    spec = sure(SampleSpec, algorithm.spec(0, 0, SIZE))
    (piece,) = sampler.sample([Prompt(PROMPTS[0])], [0], [5], spec)
    sigmas = piece.trace.context.sigmas.double()
    x = torch.randn((1, *piece.trace.clean.shape[1:]), generator=torch.Generator().manual_seed(5))
    snr = torch.log((1 - sigmas) / sigmas)
    guesses: list[torch.Tensor] = []
    for i in range(5):
        with torch.no_grad():
            v = model.velocity(x, sigmas[i].float()[None], piece.trace.context.cond)
        guesses.append(x - sigmas[i] * v)
        guess = guesses[-1]
        if 2 <= i < 4:  # log-SNR is infinite at σ = 1 and at σ = 0
            r = (snr[i] - snr[i - 1]) / (snr[i + 1] - snr[i])
            guess = (1 + 1 / (2 * r)) * guesses[-1] - guesses[-2] / (2 * r)
        grown = torch.expm1(-(snr[i + 1] - snr[i]))
        x = (sigmas[i + 1] / sigmas[i] * x - (1 - sigmas[i + 1]) * grown * guess).float()
    torch.testing.assert_close(piece.trace.clean, x, rtol=1e-4, atol=1e-4)
    euler = dataclasses.replace(spec, solver="euler")
    (other,) = sampler.sample([Prompt(PROMPTS[0])], [0], [5], euler)
    assert (other.trace.clean - x).abs().max() > 1e-2


def flat(rollout: Rollout, values: list[float]) -> Rollout:
    return dataclasses.replace(rollout, scores=[Score(v, {"made-up": v}) for v in values])


@pytest.mark.parametrize("name", FAMILY)
def test_flat_groups_leave_batch_and_denominator(recipe_data: dict, name: str) -> None:
    data = with_algorithm(recipe_data, name, advantage={"std": "group"})
    data["learner"] = {"micro_batch": 64}
    model, algorithm, learner = parts_of(build.recipe_from(data))
    rollout = rollout_of(model, algorithm, seed=3)
    learner.schedule = learner.schedule.model_copy(update={"max_norm": 1e9})
    learner._step = lambda: None  # type: ignore[method-assign]
    gradients = []
    base: Any = algorithm
    for drop in (False, True):
        advantage = base.advantage.model_copy(update={"drop_flat": drop})
        learner.algorithm = base.model_copy(update={"advantage": advantage})
        some_flat = flat(rollout, [0.1, 0.9, 0.4, 0.5, 0.5, 0.5])
        metrics = learner.update(some_flat, 0).metrics
        picked = {"flow-dpo": 2 / 6, "flow-rft": 1 / 6}.get(name)  # none of a flat group
        assert metrics["advantage/used"] == (picked or (0.5 if drop else 1.0))
        gradients.append(metrics["update/grad_norm"])
    assert gradients[1] > 0
    if name in RATIO and name != "flow-grpo":  # without a KL term the same sum over half as many
        assert gradients[1] == pytest.approx(2 * gradients[0], rel=1e-3)

    # A batch without any spread teaches nothing and breaks nothing.
    del learner._step
    before = {n: t.clone() for n, t in learner.policy.tensors().items()}
    metrics = learner.update(flat(rollout, [0.5] * 6), 0).metrics
    assert metrics["advantage/used"] == 0 and metrics["update/grad_norm"] == 0
    assert all(tensor.equal(before[n]) for n, tensor in learner.policy.tensors().items())
    assert learner.optimizer_steps == 0


def test_samples_without_advantage_leave_loss_kl_and_divisor(recipe_data: dict) -> None:
    """As in Flow-GRPO's SD3 scripts: the gradient is the mean over the samples whose advantage is
    not 0, each taken by itself here; one lies in a group that has spread."""
    data = with_algorithm(recipe_data, "flow-grpo", beta=0.04)
    data["learner"] = {"micro_batch": 64}
    model, algorithm, learner = parts_of(build.recipe_from(data))
    with torch.no_grad():  # away from the reference: the KL has a gradient
        for i, weight in enumerate(learner.policy.trainable.values()):
            weight += 0.01 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(i))
    rollout = flat(rollout_of(model, algorithm, seed=3), [0.25, 0.5, 0.75, 0.5, 0.5, 0.5])
    prepared = algorithm.prepare(model, rollout, learner.settings)
    mean: dict[str, torch.Tensor] = {}
    for i in (0, 2):
        row = torch.tensor([i])
        terms = algorithm.terms(rollout.rows(row), prepared.rows(row))
        alone = algorithm.loss(model, terms).loss.mean()
        trained = learner.policy.trainable
        found = torch.autograd.grad(alone, list(trained.values()))
        for name, gradient in zip(trained, found, strict=True):
            mean[name] = mean.get(name, 0) + gradient / 2
    grads: dict[str, torch.Tensor] = {}
    learner.schedule = learner.schedule.model_copy(update={"max_norm": 1e9})
    learner._step = lambda: grads.update(  # type: ignore[method-assign]
        (name, p.grad.clone()) for name, p in learner.policy.trainable.items() if p.grad is not None
    )
    metrics = learner.update(rollout, 0).metrics
    assert metrics["advantage/used"] == pytest.approx(2 / 6)
    for name, expected in mean.items():
        torch.testing.assert_close(grads[name], expected, rtol=1e-3, atol=1e-6)


def test_what_stays_is_topped_up_to_equal_mini_batches() -> None:
    advantages = torch.tensor([0.0, 1.0, 0.0, -1.0, 2.0, 0.0])
    assert adv.nonzero(advantages, 1).tolist() == [1, 3, 4]
    assert adv.nonzero(advantages, 4).tolist() == [0, 1, 3, 4]
    assert adv.nonzero(torch.zeros(4), 2).tolist() == []


def test_gdpo_reaches_the_advantages(recipe_data: dict) -> None:
    rollout = scored_rollout([[0.0, 0.3], [1.0, 0.1], [0.2, 0.9], [0.2, 0.1]], group=[0, 0, 1, 1])
    summed = build.algorithm(build.recipe_from(recipe_data)).advantage(rollout)
    recipe_data["algorithm"]["advantage"] = {"combine": "gdpo"}
    each = build.algorithm(build.recipe_from(recipe_data)).advantage(rollout)
    assert summed[0] < -0.5 and abs(each[0]) < 1e-2  # one reward up, one down, of equal weight
    doubled = dataclasses.replace(rollout, weights={"0": 2.0, "1": 1.0})
    weighted = build.algorithm(build.recipe_from(recipe_data)).advantage(doubled)
    assert weighted[0] < -0.3


BAD = [
    ({"name": "flow-grpo", "noise": 0.0}, "noise = 0 makes every step deterministic"),
    ({"name": "flow-grpo-fast", "steps": 3}, r"window of 3 steps in \[0, 5\) does not fit into 3"),
    ({"name": "flow-grpo-fast", "noise": 1.2}, "CPS requires noise of at most 1"),
    ({"name": "mix-grpo", "window": {"every": 0}}, "greater than or equal to 1"),
    ({"name": "grpo-guard", "rule": "cps"}, "expected one of 'flow-sde', 'dance'"),
    ({"name": "flow-dppo", "window": {"size": 9, "high": 5}}, "window of 9 steps"),
    ({"name": "flash-grpo", "window": "none"}, '"window" cannot be removed; change its keys'),
    ({"name": "flow-grpo", "group": 1}, "compared with each other; use group = 2 or more"),
    ({"name": "diffusion-nft", "group": 1}, "compared with each other; use group = 2 or more"),
    ({"name": "flow-grpo", "windw": "none"}, 'unknown key "windw"; did you mean "window"'),
    ({"name": "diffusion-nft", "solver": "heun"}, "expected one of 'euler', 'dpm2'"),
    ({"name": "flow-grpo", "advantage": {"combine": "max"}}, "expected one of 'sum', 'gdpo'"),
]


@pytest.mark.parametrize("algorithm, sentence", BAD)
def test_mistakes_are_one_sentence(recipe_data: dict, algorithm: dict, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        build.recipe_from(recipe_data | {"algorithm": algorithm})
    assert "\n" not in str(caught.value)


RESUMED = [
    ("diffusion-nft", None),
    ("diffusion-nft", LORA),
    ("mix-grpo", LORA),
]


@pytest.mark.parametrize("name, lora", RESUMED)
def test_a_resumed_run_ends_as_an_undisturbed_one(
    recipe_data: dict, name: str, lora: dict | None, tmp_path: Path
) -> None:
    """Old policy, EMA, Adam, window and schedules: all of it comes back, to the bit."""
    data = with_algorithm(recipe_data, name, advantage={"drop_flat": True})
    data |= {"steps": 2, "learner": {"micro_batch": 6, "ema": {"every": 1}}}
    data["eval"] |= {"every": 0, "prompts": 1, "steps": 1}
    data["model"]["lora"] = lora
    if name == "diffusion-nft":
        data["algorithm"]["decay"] = 2
    recipe = build.recipe_from(data)
    whole = train(recipe, folder=tmp_path / "whole", quiet=True)
    cut = resume(cut_after(whole, 1, tmp_path / "cut"), quiet=True)
    first, second = whole.load(2)[0], cut.load(2)[0]
    assert first.keys() == second.keys() and any(key.startswith("ema/") for key in first)
    assert all(tensor.equal(second[key]) for key, tensor in first.items())
    if name == "diffusion-nft":
        assert any(key.startswith("old/") for key in first)


def test_the_loop_moves_and_samples_windows(recipe_data: dict) -> None:
    """Through the cluster: MixGRPO's window follows the step, Fast's is drawn anew every step."""
    starts = {}
    for name in ("mix-grpo", "flow-grpo-fast"):
        job = assemble(build.recipe_from(with_algorithm(recipe_data, name)))
        try:
            drawn = [job.cluster.sample_step(step, 1, 1).result()[0] for step in range(7)]
        finally:
            job.close()
        starts[name] = [int(rollout.flow_trace.steps[0, 0]) for rollout in drawn]
    assert starts["mix-grpo"] == [0, 0, 0, 1, 1, 1, 2]
    assert len(set(starts["flow-grpo-fast"])) == 2


def test_the_limit_of_dppo_is_held_against_the_whole_noise(
    moved: Callable[[str], tuple[Any, ...]],
) -> None:
    """The divergence is counted with √−dt: a limit between it and the one without tells."""
    model, algorithm, _, rollout = moved("flow-dppo")
    terms = algorithm.terms(rollout, Prepared(algorithm.advantage(rollout)))
    with torch.no_grad():
        step = algorithm.transition(model, terms, "current")
        error = (step.mean - terms.old_mean).square().flatten(1).mean(1)
        divergence = error / (2 * step.std.flatten().square())
        without = error / (2 * step.s.flatten().square())
        below, above = divergence.sort().values[len(divergence) // 2 - 1 :][:2]
        limit = float((below + above) / 2)  # none lies on it: it is computed a second time
        stats = algorithm.model_copy(update={"clip": limit}).loss(model, terms).stats
    further = (stats["ratio"] - 1) * terms.advantage > 0
    assert not (further & (divergence >= limit)).equal(further & (without >= limit))
    assert stats["clipped"].bool().equal(further & (divergence >= limit))


def test_the_noise_of_a_group_differs_from_all_step_noise(recipe_data: dict) -> None:
    window = {"size": 1, "low": 0, "high": 1}
    data = with_algorithm(recipe_data, "flow-grpo-fast", window=window, rule="flow-sde", noise=0.7)
    model, algorithm, _ = parts_of(build.recipe_from(data))
    trace, _ = start_of(model, algorithm, 6)
    own = torch.randn(trace.clean.shape[1:], generator=torch.Generator().manual_seed(0))
    assert (trace.latents[0, 0] - own).abs().max() > 0.1  # the first sample's own stream


def test_gdpo_keeps_groups_whose_rewards_cancel_in_the_sum(recipe_data: dict) -> None:
    rollout = scored_rollout([[0.0, 1.0], [1.0, 0.0], [0.5, 0.5], [0.5, 0.5]], group=[0, 0, 1, 1])
    for combine, kept in (("sum", []), ("gdpo", [0, 1])):
        recipe_data["algorithm"]["advantage"] = {"combine": combine, "drop_flat": True}
        algorithm = build.algorithm(build.recipe_from(recipe_data))
        assert algorithm.advantage.kept(rollout, 1).tolist() == kept


def test_mini_batches_stay_equal_when_flat_groups_leave(recipe_data: dict) -> None:
    data = with_algorithm(recipe_data, "grpo-guard", updates=2, advantage={"drop_flat": True})
    model, algorithm, learner = parts_of(build.recipe_from(data))
    rollout = flat(rollout_of(model, algorithm, seed=3), [0.1, 0.9, 0.4, 0.5, 0.5, 0.5])
    sizes: list[int] = []
    accumulate = learner._accumulate

    def counted(terms: Any, stats: Any) -> Any:
        sizes.append(terms.total)
        return accumulate(terms, stats)

    learner._accumulate = counted  # type: ignore[method-assign]
    metrics = learner.update(rollout, 0).metrics
    assert sizes == [6, 6]  # 3 samples and one of the flat group, 3 steps each
    assert metrics["advantage/used"] == pytest.approx(4 / 6)


def test_a_negative_prompt_in_the_training_set_alone(recipe_data: dict, tmp_path: Path) -> None:
    folder = pipelines.build("flux-dev", tmp_path / "flux")
    train_file, eval_file = tmp_path / "train.jsonl", tmp_path / "eval.txt"
    train_file.write_text('{"prompt": "a cat", "negative_prompt": "dull"}\n')
    eval_file.write_text("a dog\n")
    recipe_data["model"] = {"name": "flux", "path": str(folder), "height": 32, "width": 32}
    recipe_data["data"] |= {"train": str(train_file), "eval": str(eval_file)}
    with pytest.raises(UserError, match=r"train.jsonl:1: this model does not support negative"):
        assemble(build.recipe_from(recipe_data))


def test_shapes_and_sizes_are_reported_before_anything_is_sampled(recipe_data: dict) -> None:
    recipe_data["learner"] = {"micro_batch": 7}
    job = assemble(build.recipe_from(recipe_data))
    job.close()
    assert any("micro-batches of 7 do not divide" in note for note in job.notes)
    recipe_data["model"]["height"] = 33
    width = recipe_data["model"]["width"]
    with pytest.raises(UserError, match=f"does not support 33×{width} pixels"):
        assemble(build.recipe_from(recipe_data))

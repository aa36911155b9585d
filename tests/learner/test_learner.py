from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from gesso import build
from gesso.algorithms.base import Algorithm, Prepared, TermLosses
from gesso.algorithms.diffusion_nft import DiffusionNFT
from gesso.algorithms.flow_grpo import FlowGRPO, StepTerms
from gesso.algorithms.noised import NoisedTerms
from gesso.formulas import matching, nft
from gesso.learner.learner import Learner
from gesso.rollout import Rollout
from gesso.samplers.denoise import DenoisingSampler
from gesso.types import Prompt
from tests.rollouts import SIZE, parts_of, rollout_of
from tests.typed import sure

NFT = {"name": "diffusion-nft", "group": 3, "steps": 4, "times": 3, "updates": 1}
LORA = {"rank": 4, "alpha": 8}


def gradient(learner: Learner, rollout: Rollout) -> dict[str, torch.Tensor]:
    """The gradient of the first update, before any optimizer step."""
    advantages = learner.algorithm.advantage(rollout)
    terms = learner.algorithm.terms(rollout, Prepared(advantages))
    learner.schedule = learner.schedule.model_copy(update={"max_norm": 1e9})
    learner._accumulate(terms, defaultdict(list))
    return {name: p.grad.clone() for name, p in learner.policy.trainable.items()}


@pytest.mark.parametrize("algorithm", ["flow-grpo", "diffusion-nft"])
def test_any_number_of_micro_batches_gives_the_same_gradient(
    recipe_data: dict, algorithm: str
) -> None:
    if algorithm == "diffusion-nft":
        recipe_data["algorithm"] = NFT
    gradients = []
    model, chosen, learner = parts_of(build.recipe_from(recipe_data))
    rollout = rollout_of(model, chosen)
    for size in (18, 9, 3, 7):  # 1, 2 and 6 micro-batches, and ragged ones, of 18 terms
        learner.settings = learner.settings.model_copy(update={"micro_batch": size})
        gradients.append(gradient(learner, rollout))
    scale = max(g.abs().max() for g in gradients[0].values())
    assert scale > 0
    for other in gradients[1:]:
        for name, value in gradients[0].items():
            assert (value - other[name]).abs().max() <= 1e-5 * scale, name


def test_the_gradient_equals_a_plain_computation(recipe_data: dict) -> None:
    """Flow-GRPO's loss written down once more, sample by sample and step by step."""
    recipe_data["algorithm"] |= {"guidance": 2.0, "beta": 0.5}
    recipe = build.recipe_from(recipe_data)
    model, algorithm, learner = parts_of(recipe)
    with torch.no_grad():  # move away from the reference, so that the KL term has a gradient
        for p in learner.policy.trainable.values():
            p.add_(0.01 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    rollout = rollout_of(model, algorithm)
    got = gradient(learner, rollout)

    rewards = rollout.rewards
    mean = torch.stack([rewards[:3].mean()] * 3 + [rewards[3:].mean()] * 3)
    advantages = (rewards - mean) / (rewards.std(correction=0) + 1e-4)
    pipe, trace = model.pipe, rollout.flow_trace
    sigmas, negative = trace.context.sigmas, trace.context.negative
    assert negative is not None
    total = torch.zeros(())
    for n in range(6):
        cond = trace.context.cond.rows(trace.row[n : n + 1])
        empty = negative.rows(trace.row[n : n + 1])
        for j in range(3):
            x, x_next = trace.latents[n : n + 1, j], trace.latents[n : n + 1, j + 1]
            sigma, dt = sigmas[j], sigmas[j + 1] - sigmas[j]

            def mean_of(x: torch.Tensor, sigma: torch.Tensor, dt: torch.Tensor) -> torch.Tensor:
                t = (sigma * 1000).expand(1)
                c = pipe.transformer(x, cond.embeds, cond.pooled, t).sample  # noqa: B023
                u = pipe.transformer(x, empty.embeds, empty.pooled, t).sample  # noqa: B023
                v = u + 2.0 * (c - u)
                s2 = 0.49 * sigma / (1 - (sigmas[1] if sigma == 1 else sigma))
                return (
                    x * (1 + s2 / (2 * sigma) * dt) + v * (1 + s2 * (1 - sigma) / (2 * sigma)) * dt
                )

            mu = mean_of(x, sigma, dt)
            with torch.no_grad(), learner.policy.using("reference"):
                mu_ref = mean_of(x, sigma, dt)
            s = 0.7 * torch.sqrt(sigma / (1 - (sigmas[1] if sigma == 1 else sigma)))
            logp = torch.distributions.Normal(mu, s * torch.sqrt(-dt)).log_prob(x_next).mean()
            ratio = torch.exp(logp - rollout.logp[n, j])
            a = advantages[n].float()
            surrogate = torch.max(-a * ratio, -a * ratio.clamp(0.8, 1.2))
            total = total + surrogate + 0.5 * ((mu - mu_ref) ** 2).mean() / (2 * s**2)
    learner.optimizer.zero_grad()
    (total / 18).backward()
    scale = max(p.grad.abs().max() for p in learner.policy.trainable.values())
    for name, p in learner.policy.trainable.items():
        assert (p.grad - got[name]).abs().max() <= 1e-4 * scale, name


@pytest.mark.parametrize("again", [False, True], ids=["kept", "computed again"])
@pytest.mark.parametrize("fold", [True, False])
def test_nft_runs_three_policies(folding_data: dict, fold: bool, again: bool) -> None:
    """Each with its own weights, over several micro-batches, folded or not: what is run again on
    the way back runs with the current ones."""
    folding_data["algorithm"] = NFT | {"kl": 0.3}
    folding_data["learner"] = {"micro_batch": 5}
    folding_data["model"] |= {"fold": fold, "gradient_checkpointing": again}
    model, algorithm, learner = parts_of(build.recipe_from(folding_data))
    policy, noise = learner.policy, torch.Generator().manual_seed(1)
    start = {name: t.clone() for name, t in policy.tensors().items()}
    old, current = (
        {name: t + 0.1 * torch.randn(t.shape, generator=noise) for name, t in start.items()}
        for _ in range(2)
    )
    policy.load(old, "old")
    policy.load(current)
    rollout = rollout_of(model, algorithm)
    got = gradient(learner, rollout)

    advantages = algorithm.advantage(rollout)
    terms = algorithm.terms(rollout, Prepared(advantages))
    assert isinstance(terms, NoisedTerms) and isinstance(algorithm, DiffusionNFT)
    x_t = matching.noised(terms.clean, terms.noise, terms.t)
    cond, velocities = terms.context.cond.rows(terms.row), []
    for weights in (old, start, current):  # plainly: as the current ones, beside the weights
        policy.load(weights)
        velocities.append(model.velocity(x_t, terms.t, cond))
    v_old, v_ref, v = velocities
    optimal = nft.optimality(terms.advantage)
    loss = nft.contrast(v, v_old, terms.clean, x_t, terms.t, optimal, algorithm.beta)
    loss = loss + 0.3 * (v - v_ref.detach()).square().flatten(1).mean(1)
    expected = torch.autograd.grad(loss.mean(), list(policy.trainable.values()))
    scale = max(float(slope.abs().max()) for slope in expected)
    for name, slope in zip(policy.trainable, expected, strict=True):
        assert (got[name] - slope).abs().max() <= 1e-3 * scale, name


@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_nft_runs_no_unused_reference(
    recipe_data: dict, kl: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe_data["algorithm"] = NFT | {"kl": kl}
    recipe_data["model"]["lora"] = LORA
    model, algorithm, learner = parts_of(build.recipe_from(recipe_data))
    rollout = rollout_of(model, algorithm)
    run = Mock(wraps=model.run)
    monkeypatch.setattr(model, "run", run)
    metrics = learner.update(rollout, 0).metrics
    assert {call.args[0] for call in run.call_args_list} == {"old", "current"} | (
        {"reference"} if kl else set()
    )
    assert ("update/kl" in metrics) == (kl > 0)


def test_no_step_while_a_sampler_is_half_way(folding_data: dict) -> None:
    """It would go on with the matrices it has, and so would every pass until it ends."""
    model, algorithm, learner = parts_of(build.recipe_from(folding_data))
    rollout = rollout_of(model, algorithm)
    pieces = DenoisingSampler(model, 1).sample(
        [Prompt("a")], [0, 0], [1, 2], algorithm.spec(0, 0, SIZE)
    )
    next(pieces)
    with pytest.raises(AssertionError, match="in the middle of a batch"):
        learner.update(rollout, 0)
    assert len(list(pieces)) == 1
    learner.update(rollout, 0)


APART = {"beta": 0.1, "guidance": 3.0, "guidance_gradient": "conditional", "updates": 2}


@pytest.mark.parametrize("changes", [{"beta": 0.1}, APART, NFT | {"kl": 0.1}])
def test_the_pass_that_keeps_its_activations_is_the_last(
    recipe_data: dict, changes: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others beside them would raise the peak of an update's memory."""
    own = recipe_data["algorithm"]
    recipe_data["algorithm"] = changes if "name" in changes else own | changes
    model, algorithm, learner = parts_of(build.recipe_from(recipe_data))
    rollout = rollout_of(model, algorithm)
    kept, losses = [], []
    velocity, loss = model.velocity, type(algorithm).loss

    def watched(*args: Any, **more: Any) -> torch.Tensor:
        kept.append(torch.is_grad_enabled())
        return velocity(*args, **more)

    def one_loss(*args: Any) -> TermLosses:
        kept.clear()
        found = loss(*args)
        losses.append(list(kept))
        return found

    monkeypatch.setattr(model, "velocity", watched)
    monkeypatch.setattr(type(algorithm), "loss", one_loss)
    learner.update(rollout, 0)
    assert losses and all(len(passes) > 1 for passes in losses)
    assert all(passes == [False] * (len(passes) - 1) + [True] for passes in losses)


def test_guidance_gradient_through_one_branch_or_both(recipe_data: dict) -> None:
    norms = {}
    for which in ("both", "conditional"):
        recipe_data["algorithm"] |= {"guidance": 3.0, "guidance_gradient": which}
        model, algorithm, learner = parts_of(build.recipe_from(recipe_data))
        grads = gradient(learner, rollout_of(model, algorithm))
        norms[which] = torch.cat([g.flatten() for g in grads.values()])
    assert not torch.allclose(norms["both"], norms["conditional"], rtol=1e-2)
    assert norms["conditional"].norm() > 0


@pytest.mark.parametrize("lora", [None, LORA])
@pytest.mark.parametrize("algorithm", [None, NFT])
def test_an_update_moves_towards_the_better_samples(
    recipe_data: dict, lora: dict | None, algorithm: dict | None
) -> None:
    """After some updates on one rollout, good samples are likelier than bad ones: log-probs of
    Flow-GRPO rise with the advantage, NFT's velocity error falls for good samples."""
    recipe_data["model"]["lora"] = lora
    recipe_data["optimizer"] = {"lr": 3e-3 if lora else 3e-4}
    if algorithm:
        recipe_data["algorithm"] = algorithm | {"beta": 1.0}
    model, chosen, learner = parts_of(build.recipe_from(recipe_data))
    rollout = rollout_of(model, chosen)
    advantages = chosen.advantage(rollout).float()

    def preference() -> float:
        with torch.no_grad():
            terms = chosen.terms(rollout, Prepared(advantages.double()))
            if algorithm:
                noised = sure(NoisedTerms, terms)
                x_t = torch.lerp(noised.clean, noised.noise, noised.t.view(-1, 1, 1, 1))
                v = model.velocity(x_t, noised.t, noised.context.cond.rows(noised.row))
                fit = -(v - (noised.noise - noised.clean)).square().flatten(1).mean(1)
                return float((fit.view(6, -1).mean(1) * advantages).sum())
            stepped = sure(StepTerms, terms)
            step = sure(FlowGRPO, chosen).transition(model, stepped, "current")
            return float((step.logp(stepped.x_next).view(6, -1).mean(1) * advantages).sum())

    before = preference()
    for _ in range(4):
        learner.update(rollout, 0)
    assert preference() > before + 1e-4


def test_the_reference_never_moves_and_costs_nothing_with_lora(recipe_data: dict) -> None:
    recipe_data["algorithm"] |= {"beta": 0.1}
    for lora in (None, LORA):
        recipe_data["model"]["lora"] = lora
        model, algorithm, learner = parts_of(build.recipe_from(recipe_data))
        rollout = rollout_of(model, algorithm)
        x, cond = (
            rollout.flow_trace.clean,
            rollout.flow_trace.context.cond.rows(rollout.flow_trace.row),
        )
        sigma = torch.full((6,), 0.5)
        with torch.no_grad():
            base = model.velocity(x, sigma, cond)
        learner.update(rollout, 0)
        learner.update(rollout, 1)
        with torch.no_grad():
            assert (model.velocity(x, sigma, cond) - base).abs().max() > 1e-5
            assert torch.equal(model.velocity(x, sigma, cond, "reference"), base)
        assert ("reference" in learner.policy.copies) is (lora is None)


def test_nft_old_policy_follows_its_schedule(recipe_data: dict) -> None:
    recipe_data["algorithm"] = NFT
    model, algorithm, learner = parts_of(build.recipe_from(recipe_data))
    name = next(iter(learner.policy.trainable))
    old = learner.policy.copies["old"][name].clone()
    for step, (taken, decay) in enumerate([(1, 0.001), (2, 0.002), (3, 0.003), (400, 0.4)]):
        learner.optimizer_steps = taken - 1  # counted in optimizer steps, as in the authors' code
        learner.update(rollout_of(model, algorithm, step), step)
        old = decay * old + (1 - decay) * learner.policy.tensors()[name]
        torch.testing.assert_close(learner.policy.copies["old"][name], old)
        assert not torch.equal(old, learner.policy.tensors()[name])


def test_nft_old_policy_counts_every_update_of_an_iteration(recipe_data: dict) -> None:
    recipe_data["algorithm"] = NFT | {"updates": 3}
    model, algorithm, learner = parts_of(build.recipe_from(recipe_data))
    name = next(iter(learner.policy.trainable))
    before = learner.policy.copies["old"][name].clone()
    learner.update(rollout_of(model, algorithm), 0)
    expected = 0.003 * before + 0.997 * learner.policy.tensors()[name]
    torch.testing.assert_close(learner.policy.copies["old"][name], expected)


def test_ema_counts_optimizer_steps_not_micro_batches(recipe_data: dict) -> None:
    averages = []
    for size in (18, 3):
        recipe_data["learner"] = {"micro_batch": size, "ema": {"decay": 0.9, "every": 2}}
        recipe_data["algorithm"] |= {"updates": 2}
        model, algorithm, learner = parts_of(build.recipe_from(recipe_data))
        start = {n: w.clone() for n, w in learner.policy.tensors().items()}
        learner.update(rollout_of(model, algorithm), 0)
        assert learner.optimizer_steps == 2
        averages.append(learner.policy.copies["ema"])
        decay = 3 / 12  # (1 + 2) / (10 + 2)
        for name, value in learner.policy.copies["ema"].items():
            expected = decay * start[name] + (1 - decay) * learner.policy.tensors()[name]
            torch.testing.assert_close(value, expected)


def test_warmup_and_learning_rate_zero(recipe_data: dict) -> None:
    recipe_data["optimizer"] = {"lr": 1e-3, "warmup": 4}
    model, algorithm, learner = parts_of(build.recipe_from(recipe_data))
    rollout = rollout_of(model, algorithm)
    rates = [learner.update(rollout, i).metrics["update/lr"] for i in range(5)]
    assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3])
    recipe_data["optimizer"] = {"lr": 0.0}
    model, algorithm, learner = parts_of(build.recipe_from(recipe_data))
    start = {n: w.clone() for n, w in learner.policy.tensors().items()}
    learner.update(rollout_of(model, algorithm), 0)
    assert all(torch.equal(w, start[n]) for n, w in learner.policy.tensors().items())


def test_a_step_that_is_not_finite_is_not_taken(
    recipe_data: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, algorithm, learner = parts_of(build.recipe_from(recipe_data))
    rollout = rollout_of(model, algorithm)
    start = {n: w.clone() for n, w in learner.policy.tensors().items()}
    honest = type(algorithm).loss

    def broken(self: Algorithm, model: object, terms: object) -> TermLosses:
        losses = honest(self, model, terms)
        return TermLosses(losses.loss * float("nan"), losses.stats)

    monkeypatch.setattr(type(algorithm), "loss", broken)
    metrics = learner.update(rollout, 0).metrics
    assert metrics["update/skipped"] == 1 and math.isnan(metrics["update/grad_norm"])
    assert all(torch.equal(w, start[n]) for n, w in learner.policy.tensors().items())
    assert learner.optimizer_steps == 0


@pytest.mark.parametrize("algorithm", [None, NFT])
def test_state_restores_to_the_bit(recipe_data: dict, algorithm: dict | None) -> None:
    recipe_data["learner"] |= {"ema": {"every": 1}}
    recipe_data["algorithm"] = algorithm or recipe_data["algorithm"] | {"beta": 0.1}
    recipe = build.recipe_from(recipe_data)
    model, chosen, learner = parts_of(recipe)
    learner.update(rollout_of(model, chosen), 0)
    state = {name: t.clone() for name, t in learner.state().items()}
    rollout = rollout_of(model, chosen, 1)
    learner.update(rollout, 1)
    _, _, fresh = parts_of(recipe)
    fresh.restore(state)
    fresh.update(rollout, 1)
    after, again = learner.state(), fresh.state()
    assert after.keys() == again.keys()
    assert all(torch.equal(after[name], again[name]) for name in after)


def test_samples_without_advantage_are_left_out_and_change_nothing(recipe_data: dict) -> None:
    """A flat group has no gradient; leaving its terms out must not change the divisor."""
    from gesso.types import Score

    flat = [Score(v) for v in (0.1, 0.9, 0.4, 0.3, 0.3, 0.3)]
    gradients = []
    for beta in (0.0, 1e-30):  # with a KL term every term is run
        recipe_data["algorithm"] |= {"beta": beta}
        model, algorithm, learner = parts_of(build.recipe_from(recipe_data))
        rollout = dataclasses.replace(rollout_of(model, algorithm), scores=flat)
        advantages = algorithm.advantage(rollout)
        terms = algorithm.terms(rollout, Prepared(advantages))
        assert (len(terms), terms.total) == ((9, 18) if beta == 0 else (18, 18))
        gradients.append(gradient(learner, rollout))
    for name, value in gradients[0].items():
        torch.testing.assert_close(value, gradients[1][name], rtol=1e-4, atol=1e-7)


def test_a_batch_without_any_spread_moves_nothing_and_does_not_crash(recipe_data: dict) -> None:
    from gesso.types import Score

    recipe_data["optimizer"] = {"weight_decay": 0.0}
    model, algorithm, learner = parts_of(build.recipe_from(recipe_data))
    rollout = dataclasses.replace(rollout_of(model, algorithm), scores=[Score(0.5)] * 6)
    start = {n: w.clone() for n, w in learner.policy.tensors().items()}
    metrics = learner.update(rollout, 0).metrics
    assert metrics["advantage/flat_groups"] == 1 and metrics["update/grad_norm"] == 0
    assert all(torch.equal(w, start[n]) for n, w in learner.policy.tensors().items())

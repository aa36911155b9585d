"""Settings of a recipe take effect. No other test failed when these were broken."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from gesso import build, run
from gesso.algorithms.base import Prepared
from gesso.algorithms.flow_grpo import FlowGRPO
from gesso.algorithms.noised import NoisedTerms
from gesso.formulas import flow_steps
from gesso.models.flow.guidance import guided
from gesso.rewards.transport.cache import CachedScorer
from gesso.rollout import Rollout
from gesso.samplers.denoise import DenoisingSampler
from gesso.track.run_folder import RunFolder
from gesso.types import Prompt, SampleSpec, Score, Size
from tests.conftest import PROMPTS
from tests.rollouts import SIZE, parts_of, rollout_of, scored_rollout
from tests.typed import drawing, sure

NFT = {"name": "diffusion-nft", "group": 3, "steps": 4, "times": 2, "updates": 1}


def move(policy, seed: int, size: float = 0.02) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in policy.trainable.values():
            p.add_(size * torch.randn(p.shape, generator=generator))


def test_evaluation_and_load_take_the_averaged_weights(recipe_data: dict, tmp_path: Path) -> None:
    recipe_data |= {"optimizer": {"lr": 1e-2}, "steps": 2}
    recipe_data["learner"] |= {"ema": {"every": 1, "decay": 0.5}}
    recipe_data["eval"] |= {"shown": 2, "prompts": 3}
    finished = run.train(build.recipe_from(recipe_data), folder=tmp_path / "run", quiet=True)
    state, _ = finished.load(2)
    names = [key.removeprefix("ema/") for key in state if key.startswith("ema/")]
    assert names and all(f"current/{name}" in state for name in names)
    assert any(not torch.equal(state[f"ema/{n}"], state[f"current/{n}"]) for n in names)
    weights = run.load(tmp_path / "run").model.policy.tensors()
    assert all(torch.equal(weights[name], state[f"ema/{name}"]) for name in names)
    job = run.assemble(run.recipe_of(RunFolder(tmp_path / "run")))
    job.learner.restore(state)
    samples, _ = job.cluster.evaluate(job.eval_prompts, "ema")
    current, _ = job.cluster.evaluate(job.eval_prompts, "current")
    job.close()
    from PIL import Image

    kept = sorted((tmp_path / "run" / "samples" / "000002").iterdir())
    assert len(kept) == 2 and len(samples) == 3  # eval.shown of eval.prompts
    assert Image.open(kept[0]).tobytes() == samples[0].pixels.tobytes()
    assert samples[0].pixels.tobytes() != current[0].pixels.tobytes()


def test_a_restored_state_is_all_there_is(recipe_data: dict) -> None:
    recipe_data["learner"] |= {"ema": {"every": 1, "decay": 0.5}}
    recipe_data["algorithm"] = NFT
    model, algorithm, learner = parts_of(build.recipe_from(recipe_data))
    learner.update(rollout_of(model, algorithm), 0)
    state = {name: tensor.clone() for name, tensor in learner.state().items()}
    tables = {name.partition("/")[0] for name in state}
    assert tables >= {"current", "ema", "old", "reference", "adam.exp_avg", "adam.step"}
    *_, fresh = parts_of(build.recipe_from(recipe_data))
    fresh.restore(state)
    for copy in ("ema", "old", "reference"):
        for name, tensor in learner.policy.copies[copy].items():
            assert torch.equal(fresh.policy.copies[copy][name], tensor)


def test_nft_samples_with_the_old_policy(recipe_data: dict) -> None:
    recipe_data["algorithm"] = NFT
    model, algorithm, learner = parts_of(build.recipe_from(recipe_data))
    before = rollout_of(model, algorithm).flow_trace.clean
    move(learner.policy, 1)
    assert torch.equal(rollout_of(model, algorithm).flow_trace.clean, before)


def test_nft_loss_has_its_kl_and_its_times(recipe_data: dict) -> None:
    losses = []
    for kl in (0.0, 1.0):
        recipe_data["algorithm"] = NFT | {"kl": kl}
        model, algorithm, learner = parts_of(build.recipe_from(recipe_data))
        move(learner.policy, 1)
        rollout = rollout_of(model, algorithm)
        terms = sure(NoisedTerms, algorithm.terms(rollout, Prepared(torch.ones(6))))
        with torch.no_grad():
            result = algorithm.loss(model, terms)
        losses.append(result.loss)
    torch.testing.assert_close(losses[1] - losses[0], result.stats["kl"], rtol=1e-3, atol=1e-5)
    times = terms.t.view(6, 2)
    assert (times[:, 0] != times[:, 1]).all() and len(terms.t.unique()) == 4
    assert set(terms.t.tolist()) <= set(rollout.flow_trace.context.sigmas[:-1].tolist())


@pytest.mark.parametrize("name", ["flow-grpo", "diffusion-nft"])
def test_std_of_the_group_or_of_the_batch(name: str) -> None:
    rollout = scored_rollout([[0.0], [1.0], [0.0], [0.1]], group=[0, 0, 1, 1])
    options = f'algorithm={{name="{name}", group=4, advantage.std="STD"}}'
    by_group, by_batch = (
        build.algorithm(build.recipe("demo", [options.replace("STD", std)])).advantage(rollout)
        for std in ("group", "global")
    )
    assert by_group[3] == pytest.approx(0.05 / 0.0501) and by_batch[3] < 0.2


def test_advantages_are_bounded(recipe_data: dict) -> None:
    recipe_data["algorithm"] |= {"advantage": {"clip": 0.25}}
    algorithm = build.algorithm(build.recipe_from(recipe_data))
    rollout = scored_rollout([[0.0], [1.0], [0.0], [0.1]], group=[0, 0, 1, 1])
    assert algorithm.advantage(rollout).abs().max() == 0.25


def test_windows_are_sampled_from_their_range() -> None:
    algorithm = sure(FlowGRPO, build.algorithm(build.recipe("demo")))
    windows = {algorithm.spec(0, seed, SIZE).trained for seed in range(60)}
    assert windows == {range(0, 3), range(1, 4), range(2, 5)}


def test_optimizer_options_reach_adamw(recipe_data: dict) -> None:
    recipe_data["optimizer"] = {
        "lr": 0.1, "betas": [0.5, 0.6], "eps": 1e-3, "weight_decay": 0.3, "max_norm": 1e-4,
    }  # fmt: skip
    model, algorithm, learner = parts_of(build.recipe_from(recipe_data))
    (group,) = learner.optimizer.param_groups
    assert group["betas"] == (0.5, 0.6) and group["eps"] == 1e-3 and group["weight_decay"] == 0.3
    learner.update(rollout_of(model, algorithm), 0)
    moments = [learner.optimizer.state[p]["exp_avg"] for p in learner.policy.trainable.values()]
    norm = torch.cat([m.flatten() for m in moments]).norm() / (1 - 0.5)  # of the clipped gradient
    assert norm == pytest.approx(1e-4, rel=1e-2)


def test_conditional_guidance_detaches_the_unconditional_branch(recipe_data: dict) -> None:
    model = drawing(build.model(build.recipe_from(recipe_data)))
    sampler = DenoisingSampler(model, 4)
    cond, empty = (sampler.embeddings([Prompt(t)], Size(32, 96)) for t in (PROMPTS[0], ""))
    x = torch.randn(1, 8, 8, 24, generator=torch.Generator().manual_seed(0))
    sigma, scale = torch.tensor([0.5]), 3.0
    leaves = []
    for which in (cond, empty):
        leaves.append(dataclasses.replace(which, embeds=which.embeds.clone().requires_grad_()))
    v = guided(model, x, sigma, leaves[0], leaves[1], scale, gradient="conditional")
    v.velocity.sum().backward()
    assert leaves[0].embeds.grad is not None and leaves[1].embeds.grad is None
    plain = cond.embeds.clone().requires_grad_()
    model.velocity(x, sigma, dataclasses.replace(cond, embeds=plain)).sum().backward()
    torch.testing.assert_close(leaves[0].embeds.grad, scale * plain.grad, rtol=1e-3, atol=1e-4)


def test_negative_prompts_are_used(recipe_data: dict) -> None:
    sampler = DenoisingSampler(drawing(build.model(build.recipe_from(recipe_data))), 4)
    spec = SampleSpec(steps=2, height=32, width=96, guidance=3.0)
    ends = [
        next(sampler.sample([Prompt(PROMPTS[0], negative)], [0], [1], spec)).trace.clean
        for negative in ("", 'a blue sign that says "WIND"')
    ]
    assert (ends[0] - ends[1]).abs().max() > 1e-3


def test_cps_reports_its_own_noise_scale() -> None:
    x = torch.zeros(1, 1, 2, 2)
    step = flow_steps.transition("cps", x, x, torch.tensor([0.7]), torch.tensor([0.5]), 0.9, 1.0)
    assert step.s.item() == pytest.approx(0.5) == step.std.item()


def test_failed_samples_leave_statistics_and_loss(recipe_data: dict) -> None:
    model, algorithm, _ = parts_of(build.recipe_from(recipe_data))
    rollout = rollout_of(model, algorithm)
    scores = [*rollout.scores[:2], Score.failed("x"), *rollout.scores[3:]]
    mixed = dataclasses.replace(rollout, scores=scores)
    kept: Rollout = mixed.rows(mixed.scored)
    assert kept.rewards.tolist() == pytest.approx([0.1, 0.9, 0.3, 0.3, 0.8])
    assert kept.group.tolist() == [0, 0, 1, 1, 1] and len(kept.logp) == 5


def test_scoring_starts_with_the_first_piece(recipe_data: dict, tmp_path: Path) -> None:
    """Six pieces: the first is scored long before the last is drawn."""
    recipe_data["sampler"] = {"batch": 1}
    rows = run.train(build.recipe_from(recipe_data), folder=tmp_path / "r", quiet=True).rows()
    assert all(row["time/overlap"] > 0.4 * row["time/sample"] for row in rows[1:])


def test_workers_and_evaluation_settings_reach_their_place(recipe_data: dict) -> None:
    recipe_data["reward"] = [{"name": "jpeg-compressibility", "workers": 3}]
    recipe_data["eval"] |= {"guidance": 2.5, "prompts": 2}
    recipe = build.recipe_from(recipe_data)
    job = run.assemble(recipe)
    spec = sure(SampleSpec, job.algorithm.eval_spec(recipe.eval, recipe.model, "current"))
    assert spec.guidance == 2.5
    assert len(job.eval_prompts) == 2
    assert sure(CachedScorer, job.rewards.service.rewards[0].scorer).inner.processes == 3
    job.close()


def test_evaluation_noise_follows_the_seed_of_the_run(recipe_data: dict) -> None:
    seeds = []
    for seed in (0, 1):
        job = run.assemble(build.recipe_from(recipe_data | {"seed": seed}))
        samples, _ = job.cluster.evaluate(job.eval_prompts, "current")
        seeds.append([s.seed for s in samples])
        job.close()
    assert not set(seeds[0]) & set(seeds[1])


def test_the_prompt_cache_has_a_limit(recipe_data: dict) -> None:
    from gesso.models.flow.base import PromptCache

    cache = PromptCache(drawing(build.model(build.recipe_from(recipe_data))), limit=1)
    prompts = [Prompt(text) for text in PROMPTS]
    cache(prompts, Size(32, 96))
    cache(prompts[:1], Size(32, 96))
    assert cache.encoded == len(PROMPTS) + 1 and len(cache._rows) == 1

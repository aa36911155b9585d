"""AWM and DGPO through the real model and learner, against plain computations."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gesso import build
from gesso.algorithms.awm import AWM
from gesso.algorithms.base import Prepared
from gesso.algorithms.flow_rft import FlowRFT
from gesso.algorithms.noised import NoisedAlgorithm, NoisedTerms
from gesso.algorithms.preference import DGPO, FlowDPO
from gesso.config import Learner as Settings
from gesso.types import Score, UserError
from tests.rollouts import SIZE, parts_of, rollout_of
from tests.typed import sure

ONE: dict[str, Any] = {
    "name": "awm", "group": 3, "steps": 4, "times": 2, "last": 3, "updates": 2, "kl": 0.3,
    "anchor": 0.2, "clip": 0.01,
}  # fmt: skip
OTHER: dict[str, Any] = {
    "name": "dgpo", "group": 3, "steps": 4, "times": 2, "last": 2, "guidance": 1.0, "kl": 0.3,
    "beta": 10.0, "clip": 1e-3,
}  # fmt: skip


def moved(weights: dict[str, Tensor], seed: int, size: float = 0.02) -> dict[str, Tensor]:
    noise = torch.Generator().manual_seed(seed)
    return {n: t + size * torch.randn(t.shape, generator=noise) for n, t in weights.items()}


class Case:
    """A rollout, and four different sets of weights."""

    def __init__(self, recipe_data: dict, algorithm: dict, micro_batch: int = 5) -> None:
        recipe_data |= {"algorithm": algorithm, "learner": {"micro_batch": micro_batch}}
        self.model, built, self.learner = parts_of(build.recipe_from(recipe_data))
        self.algorithm: Any = built
        self.policy = self.learner.policy
        self.rollout = rollout_of(self.model, built)
        self.start = {n: t.clone() for n, t in self.policy.tensors().items()}
        self.prepared = built.prepare(self.model, self.rollout, Settings(micro_batch=micro_batch))
        self.weights: dict[Any, dict[str, Tensor]] = {
            "sampled": self.start,
            "reference": self.start,
            "old": moved(self.start, 1),
            "current": moved(self.start, 2),
        }
        if "old" in self.policy.copies:
            self.policy.load(self.weights["old"], "old")
        self.policy.load(self.weights["current"])
        self.terms = sure(NoisedTerms, built.terms(self.rollout, self.prepared))

    def gradient(self) -> dict[str, Tensor]:
        self.learner.schedule = self.learner.schedule.model_copy(update={"max_norm": 1e9})
        self.learner._accumulate(self.terms, defaultdict(list))
        return {n: p.grad.clone() for n, p in self.policy.trainable.items()}

    def velocity(self, which: str) -> Tensor:
        """Plainly: as the current weights, over all terms at once."""
        self.policy.load(self.weights[which])
        terms = self.terms
        t = terms.t.view(-1, 1, 1, 1)
        x_t = (1 - t) * terms.clean + t * terms.noise
        return self.model.velocity(x_t, terms.t, terms.context.cond.rows(terms.row))

    def compare(self, loss: Tensor, got: dict[str, Tensor]) -> None:
        expected = torch.autograd.grad(loss, list(self.policy.trainable.values()))
        scale = max(float(g.abs().max()) for g in expected)
        assert scale > 0
        for name, g in zip(self.policy.trainable, expected, strict=True):
            assert (got[name] - g).abs().max() <= 1e-3 * scale, name


def squares(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).double().square().flatten(1).mean(1)


def test_awm_equals_a_plain_computation(recipe_data: dict) -> None:
    """The second update of a rollout: the ratio is against the weights before the first."""
    case = Case(recipe_data, ONE)
    got, terms = case.gradient(), case.terms
    target = terms.noise - terms.clean
    with torch.no_grad():
        before, v_old, v_ref = (case.velocity(w) for w in ("sampled", "old", "reference"))
    v = case.velocity("current")
    logp, old_logp = (
        -terms.t * ((squares(u, target) + 1e-10) ** 0.25 - 1e-10**0.25) / 0.25 for u in (v, before)
    )
    ratio = (logp - old_logp).exp()
    a = case.prepared.advantages.repeat_interleave(2) / 5
    loss = torch.max(-a * ratio, -a * ratio.clamp(0.99, 1.01))
    loss = loss + 0.3 * squares(v, v_ref) + 0.2 * squares(v, v_old)
    assert (ratio - 1).abs().max() > 0.01  # some are clipped
    case.compare(loss.mean(), got)


def test_dgpo_equals_a_plain_computation(recipe_data: dict) -> None:
    """Micro-batches of one term: the weight of a group needs all of them."""
    case = Case(recipe_data, OTHER, micro_batch=1)
    got, terms = case.gradient(), case.terms
    target = terms.noise - terms.clean
    with torch.no_grad():
        v_old, v_ref = case.velocity("old"), case.velocity("reference")
    v = case.velocity("current")
    matched, old, reference = (squares(u, target) for u in (v, v_old, v_ref))
    a = case.prepared.advantages.repeat_interleave(2)
    gain = (a * (matched - reference)).detach().view(2, 3, 2).sum(1)  # per prompt and time
    weight = torch.sigmoid(10.0 / 3 * gain)[:, None].expand(2, 3, 2).flatten()
    moved_by = (old - matched.detach()).exp()
    clipped = torch.where(a > 0, moved_by > 1.001, moved_by < 0.999)
    assert 0 < clipped.sum() < len(clipped) and weight.std() > 0
    loss = weight * a * matched * ~clipped + 0.3 * squares(v, v_ref)
    case.compare(loss.mean(), got)


def test_dgpo_is_a_preference_for_the_better_samples(recipe_data: dict) -> None:
    """Without clip and KL, β times its gradient is that of softplus(S)."""
    case = Case(recipe_data, OTHER | {"kl": 0.0, "clip": 1e9})
    got = case.gradient()
    target = case.terms.noise - case.terms.clean
    with torch.no_grad():
        reference = squares(case.velocity("reference"), target)
    gain = case.terms.advantage * (squares(case.velocity("current"), target) - reference)
    preference = F.softplus(10.0 / 3 * gain.view(2, 3, 2).sum(1)).mean()
    case.compare(preference, {name: 10.0 * g for name, g in got.items()})


def levels(algorithm: NoisedAlgorithm) -> list[set[int]]:
    drawn = [algorithm.draw_places(torch.Generator().manual_seed(s)) for s in range(300)]
    return [set(column.tolist()) for column in torch.stack(drawn).T]


def test_awm_draws_a_time_from_each_part_of_the_schedule() -> None:
    """The authors' six parts."""
    assert levels(AWM()) == [{1}, {2, 3}, {4, 5}, {6, 7}, {8, 9}, {10, 11}]
    assert levels(AWM(first=6)) == [{i} for i in range(6, 12)]
    assert levels(AWM(first=0)) == [{0, 1}, {2, 3}, {4, 5}, {6, 7}, {8, 9}, {10, 11}]


@pytest.mark.parametrize(
    "steps, first, last, times", [(10, 1, 9, 9), (14, 3, 9, 3), (10, 2, 9, 4), (10, 1, 4, 4)]
)
def test_awm_never_draws_a_time_twice(steps: int, first: int, last: int, times: int) -> None:
    drawn = levels(AWM(steps=steps, first=first, last=last, times=times))
    assert sum(map(len, drawn)) == len(set().union(*drawn)) == last - first + 1


def test_dgpo_draws_times_without_replacement() -> None:
    drawn = [DGPO().draw_places(torch.Generator().manual_seed(s)).tolist() for s in range(300)]
    assert all(len(set(each)) == 4 for each in drawn)
    assert {i for each in drawn for i in each} == set(range(7))


def test_dgpo_compares_a_group_at_the_same_noise_and_times(recipe_data: dict) -> None:
    case = Case(recipe_data, OTHER)
    for tensor in (case.terms.noise, case.terms.t, case.terms.group):
        by_prompt = tensor.view(2, 3, 2, -1)
        assert by_prompt.equal(by_prompt[:, :1].expand_as(by_prompt))
        assert not by_prompt[0].equal(by_prompt[1])
    order = torch.tensor([4, 3, 5])  # of a mini-batch with one group, in another order
    some = case.algorithm.terms(case.rollout.rows(order), case.prepared.rows(order))
    assert some.noise.equal(case.terms.noise[6:]) and some.t.equal(case.terms.t[6:])


def test_groups_stay_whole_in_mini_batches(recipe_data: dict) -> None:
    case = Case(recipe_data, OTHER | {"updates": 2})
    parts = []
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        batches = case.learner._mini_batches(torch.arange(6), case.rollout.group, generator)
        parts.append([batch.tolist() for batch in batches])
    assert {tuple(part[0]) for part in parts} == {(0, 1, 2), (3, 4, 5)}
    assert all(sorted(i for batch in part for i in batch) == list(range(6)) for part in parts)


def test_the_old_policy_samples_for_dgpo_later() -> None:
    algorithm = DGPO(old_samples_after=3)
    assert [algorithm.spec(i, 0, SIZE).weights for i in (0, 2, 3)] == ["current", "current", "old"]


@pytest.mark.parametrize("algorithm", [ONE, OTHER])
def test_the_old_policy_follows(recipe_data: dict, algorithm: dict) -> None:
    """By min(.001·n, .3) after n optimizer steps."""
    case = Case(recipe_data, algorithm)
    before = {n: t.clone() for n, t in case.policy.tensors("old").items()}
    case.algorithm.finish(case.policy, 200)
    for name, now in case.policy.tensors("old").items():
        expected = 0.2 * before[name] + 0.8 * case.policy.tensors()[name]
        torch.testing.assert_close(now, expected)


def test_awm_needs_no_copy_that_it_does_not_use() -> None:
    assert AWM(kl=0, anchor=0).needs == frozenset()
    assert AWM(kl=0).needs == {"old"} and AWM(anchor=0).needs == {"reference"}


def test_terms_of_one_update_need_no_pass_before_it(recipe_data: dict) -> None:
    case = Case(recipe_data, ONE | {"updates": 1})
    assert type(case.prepared) is Prepared and case.terms.old_loss.numel() == 0


@pytest.mark.parametrize(
    "options, message",
    [
        ({"name": "dgpo", "advantage": {"drop_flat": True}}, "trains on whole groups"),
        ({"name": "dgpo", "updates": 3}, "2 whole groups cannot be split into 3 updates"),
        ({"name": "flow-dpo", "first": 1}, "trains at all noise levels; remove first and last"),
        ({"name": "flow-rft", "advantage": {"drop_flat": True}}, "remove advantage.drop_flat"),
        ({"name": "awm", "steps": 8}, r"last = 11 must be among the 8 steps"),
        ({"name": "dgpo", "first": 9}, r"first = 9 and last = 6 must be among"),
        ({"name": "awm", "times": 12}, r"times = 12 must be at most 11"),
        ({"name": "awm", "weighting": "hubber"}, "'ghuber'"),
    ],
)
def test_settings_that_cannot_work(recipe_data: dict, options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build.recipe_from(recipe_data | {"algorithm": options})


PAIRS: dict[str, Any] = {
    "name": "flow-dpo", "group": 3, "steps": 4, "times": 2, "guidance": 1.0, "beta": 2.0,
}  # fmt: skip


def test_dpo_equals_a_plain_computation(recipe_data: dict) -> None:
    """−log σ(−½β[(L_w − L_w,ref) − (L_l − L_l,ref)]), the mean over pairs."""
    case = Case(recipe_data, PAIRS, micro_batch=1)
    assert case.prepared.advantages.tolist() == [-1, 1, 0, -1, 0, 1]
    got, target = case.gradient(), case.terms.noise - case.terms.clean
    with torch.no_grad():
        reference = squares(case.velocity("reference"), target)
    gain = squares(case.velocity("current"), target) - reference
    one, other = gain.view(2, 2, 2).unbind(1)  # of both prompts the worst comes first
    loss = -F.logsigmoid(-0.5 * 2.0 * (other - one)).mean()
    case.compare(loss, got)
    metrics = case.learner.update(case.rollout, 0).metrics
    assert metrics["update/preference"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["update/accuracy"] == (other < one).float().mean().item()


def test_dpo_at_the_reference_has_a_gradient(recipe_data: dict) -> None:
    """(β/4)·(∇L_w − ∇L_l), not 0."""
    case = Case(recipe_data, PAIRS)
    case.policy.load(case.start)
    got = case.gradient()
    matched = squares(case.velocity("reference"), case.terms.noise - case.terms.clean)
    one, other = matched.view(2, 2, 2).unbind(1)
    case.compare(0.5 * (other - one).mean(), got)


def test_rft_is_supervised_fine_tuning_on_the_best(recipe_data: dict) -> None:
    case = Case(recipe_data, {"name": "flow-rft", "group": 3, "steps": 4, "times": 2})
    assert case.prepared.advantages.tolist() == [0, 1, 0, 0, 0, 1]
    got = case.gradient()
    assert case.terms.clean[::2].equal(case.rollout.flow_trace.clean[[1, 5]])
    matched = squares(case.velocity("current"), case.terms.noise - case.terms.clean)
    case.compare(matched.mean(), got)


def test_sft_counts_every_sample_the_same(recipe_data: dict) -> None:
    recipe_data["sampler"] = {"engine": "data"}
    case = Case(recipe_data, {"name": "flow-sft", "times": 2})
    got, terms = case.gradient(), case.terms
    assert len(terms) == 12 and terms.clean[::2].equal(case.rollout.flow_trace.clean)
    matched = squares(case.velocity("current"), terms.noise - terms.clean)
    case.compare(matched.mean(), got)


@pytest.mark.parametrize("name, share", [("flow-dpo", 4 / 6), ("flow-rft", 2 / 6), ("awm", 1.0)])
def test_the_share_of_trained_samples(recipe_data: dict, name: str, share: float) -> None:
    """Also as the total of the progress that is shown."""
    algorithm = {"name": name, "group": 3, "steps": 4, "times": 2}
    algorithm |= {"first": 0, "last": 3} if name == "awm" else {}
    case = Case(recipe_data, algorithm)
    case.learner.progress = Mock()
    metrics = case.learner.update(case.rollout, 0).metrics
    assert metrics["advantage/used"] == pytest.approx(share)
    total = case.learner.progress.phase.call_args.args[1]
    advanced = sum(call.args[0] for call in case.learner.progress.advance.call_args_list)
    assert total == advanced == round(share * 6) * 2


def test_the_reference_runs_once_for_preference_and_kl(
    recipe_data: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(recipe_data, OTHER)
    passes: list[str] = []
    honest = case.model.velocity

    def velocity(x: Tensor, t: Tensor, cond: Any, weights: Any = "current") -> Tensor:
        passes.append(weights)
        return honest(x, t, cond, weights)

    monkeypatch.setattr(case.model, "velocity", velocity)
    case.gradient()
    parts = len(case.terms.micro_batches(case.learner.settings))
    counts = {which: passes.count(which) for which in ("current", "old", "reference")}
    assert counts == {"current": 2 * parts, "old": parts, "reference": parts}


def test_awm_has_a_ratio_only_with_several_updates() -> None:
    assert AWM(updates=2).clip_range == 1.0
    assert AWM().clip_range is None and DGPO(updates=2).clip_range is None


def test_pairs_are_ranked_by_unclipped_rewards(recipe_data: dict) -> None:
    case = Case(recipe_data, PAIRS | {"advantage": {"clip": 0.01}})
    assert case.prepared.advantages.tolist() == [-1, 1, 0, -1, 0, 1]
    assert DGPO().updates == FlowDPO().updates == FlowRFT().updates == 1


def test_their_times_are_those_of_pretraining(recipe_data: dict) -> None:
    """su/(1 + (s − 1)u) of a logit-normal u and the model's shift s, for any number of sampling
    steps. A shift adds log s to a logit."""
    for steps in (2, 6):
        case = Case(recipe_data, PAIRS | {"steps": steps, "times": 400})
        sigmas = torch.linspace(1, 0, 1001)
        sure(Tensor, case.terms.context.fine).copy_(3 * sigmas / (1 + 2 * sigmas))
        t = case.algorithm.terms(case.rollout, case.prepared).t.double()
        logit = torch.log(t / (1 - t)) - math.log(3)
        assert abs(float(logit.mean())) < 0.12 and abs(float(logit.std()) - 1) < 0.12
        assert t.min() > 0 and t.max() < 1


def test_groups_without_spread_teach_them_nothing(recipe_data: dict) -> None:
    for algorithm in (PAIRS, {"name": "flow-rft", "group": 3, "steps": 4, "times": 2}):
        case = Case(recipe_data, algorithm)
        equal = replace(case.rollout, scores=[Score(0.5, {"made-up": 0.5})] * 6)
        metrics = case.learner.update(equal, 0).metrics
        assert metrics["update/grad_norm"] == metrics["update/skipped"] == 0
        assert case.learner.optimizer_steps == 0
        assert all(t.equal(case.weights["current"][n]) for n, t in case.policy.tensors().items())

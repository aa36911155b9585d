"""GARDO against reward hacking: the gate, the renewed reference, diversity."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from gesso import build, run
from gesso.algorithms.gardo import KLGate, Renewal
from gesso.formulas import advantages as adv
from gesso.formulas import diversity
from gesso.learner.learner import Learner
from gesso.rollout import Rollout
from gesso.track.run_folder import RunFolder
from gesso.types import Scales, Score, UserError
from tests.cut_run import cut_after
from tests.rollouts import parts_of, rollout_of

PROXY = torch.tensor([0.95, 0.6, 0.5, 0.4, 0.3, 0.2])
OTHERS = torch.tensor([[1.0, 6, 5, 4, 3, 2], [0.1, 0.2, 0.9, 0.8, 0.7, 0.6]]).T


# Formulas


def test_doubt_of_the_golden_rows() -> None:
    """The hacked sample, which only the trained reward likes, has the highest U."""
    got = adv.doubt(PROXY, OTHERS)
    assert got[:3].tolist() == pytest.approx([5 / 6, 1 / 6, -0.25])
    assert adv.most_doubted(got, 0.1).tolist() == [True] + 5 * [False]


def test_doubt_equals_a_plain_computation_with_ties_and_gaps() -> None:
    values = torch.tensor([[0.5, 1.0, 2.0], [0.5, 3.0, 2.0], [0.1, 1.0, 9.0], [0.9, 0.0, 2.0]])
    values[1, 2] = float("nan")  # this reward does not apply to sample 1

    def beaten(column: list[float], i: int) -> float:
        known = [x for x in column if x == x]
        return sum(x < column[i] for x in known) / len(known)

    trained, *others = values.T.tolist()
    for i, got in enumerate(adv.doubt(values[:, 0], values[:, 1:]).tolist()):
        ranks = [beaten(column, i) for column in others if column[i] == column[i]]
        assert got == pytest.approx(beaten(trained, i) - sum(ranks) / len(ranks), abs=1e-6)


def test_a_sample_that_no_reward_judges_is_not_doubted() -> None:
    unknown = torch.full((6, 1), float("nan"))
    unknown[2:] = torch.arange(4.0)[:, None]
    got = adv.doubt(PROXY, unknown)
    assert got[:2].isnan().all()
    assert not adv.most_doubted(got, 1.0)[:2].any()


def test_ties_are_gated_together() -> None:
    doubts = torch.tensor([0.3, 0.1, 0.3, -0.5, 0.0])
    assert adv.most_doubted(doubts, 0.1).tolist() == [True, False, True, False, False]
    assert adv.most_doubted(doubts, 1.0).tolist() == [True, True, True, False, True]
    assert not adv.most_doubted(torch.tensor([-0.1, -0.2]), 1.0).any()


def test_the_share_is_rounded_up_but_not_by_rounding_errors() -> None:
    assert int(adv.most_doubted(torch.arange(30.0), 0.1).sum()) == 3
    assert int(adv.most_doubted(torch.arange(31.0), 0.1).sum()) == 4


def test_diverse_advantages_of_the_golden_rows() -> None:
    features = torch.tensor([[1.0, 0], [0.8, 0.6], [0.6, 0.8], [0, 1]])
    group = torch.zeros(4, dtype=torch.long)
    d = diversity.isolation(features, group)
    assert d.tolist() == pytest.approx([0.2, 0.04, 0.04, 0.2], abs=1e-6)
    centred = adv.group_relative(torch.tensor([0.9, 0.2, 0.7, 0.4]), group, "none")
    got = adv.diverse(centred, d, group)
    assert got.tolist() == pytest.approx([0.583333, -0.35, 0.05, -0.15], abs=1e-5)


def test_equal_samples_and_single_ones_keep_their_advantages() -> None:
    features = torch.tensor([[0.1, 0.7, 0.3]] * 3 + [[1.0, 0, 0]])
    group = torch.tensor([0, 0, 0, 1])
    centred = torch.tensor([0.5, -0.25, -0.25, 0.1]).double()
    d = diversity.isolation(features, group)
    assert adv.diverse(centred, d, group).tolist() == pytest.approx(centred.tolist())


# Settings that change with the rows


def row(doubt: float | None, share: float = 0.1) -> dict[str, Any]:
    return {"gate/doubt": doubt, "gate/share": share}


@pytest.mark.parametrize(
    "doubts, share, expected",
    [
        ([], 0.1, 0.1),
        ([0.3], 0.1, 0.1),  # nothing to compare with
        ([0.3, 0.4], 0.1, 0.11),
        ([0.3, 0.2], 0.1, 0.09),
        ([0.2, 0.4, 0.3], 0.1, 0.1),
        ([0.3, 0.4], 0.19, 0.2),
        ([0.3, 0.2], 0.021, 0.02),
        ([0.3, None], 0.1, 0.1),  # no sample was doubted
        ([0.9, *[0.3] * 20, 0.4], 0.1, 0.11),  # the first is out of the window
        ([0.9, *[0.3] * 19, 0.4], 0.1, 0.1),
    ],
)
def test_the_share_follows_the_mean_doubt(
    doubts: list[float | None], share: float, expected: float
) -> None:
    rows = [{"step": 0}, *(row(doubt, share) for doubt in doubts)]
    assert KLGate().next_share(rows) == pytest.approx(expected)


def test_the_reference_is_renewed_by_distance_or_age() -> None:
    renewal = Renewal(above=0.1, after=3)
    steps = [0.0, 0.2, 0.0, 0.0, 0.0, 0.05]  # KL of each iteration
    rows: list[dict[str, Any]] = [{"step": 0}]
    for kl in steps:
        rows.append({"update/renewed": float(renewal.due(rows)), "update/kl": kl})
    assert [row["update/renewed"] for row in rows[1:]] == [0, 0, 1, 0, 0, 1]


# In a run


def gated(recipe_data: dict, **options: Any) -> dict:
    recipe_data["algorithm"] |= {"beta": 0.5, "gate": {"share": 0.1}} | options
    recipe_data["reward"] = [
        {"name": "jpeg-incompressibility"},
        {"name": "jpeg-compressibility", "weight": 0.0},
    ]
    return recipe_data


def judged(rollout: Rollout, others: list[float]) -> Rollout:
    scores = [
        Score(score.value, {**score.parts, "other": other})
        for score, other in zip(rollout.scores, others, strict=True)
    ]
    return dataclasses.replace(rollout, scores=scores, weights={"made-up": 1.0, "other": 0.0})


def away(learner: Learner) -> None:
    with torch.no_grad():
        for p in learner.policy.trainable.values():
            p.add_(0.01 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("algorithm", ["flow-grpo", "diffusion-nft"])
def test_the_kl_of_gated_samples_is_divided_by_all(recipe_data: dict, algorithm: str) -> None:
    """Gradients are linear in the share of each sample: gating sample 1 and then the others adds up
    to the whole KL."""
    if algorithm == "diffusion-nft":
        options = {"name": algorithm, "group": 3, "steps": 4, "times": 3, "updates": 1, "kl": 0.5}
        recipe_data["algorithm"] = options
    model, chosen, learner = parts_of(build.recipe_from(gated(recipe_data)))
    away(learner)
    rollout = judged(rollout_of(model, chosen), [9.0, 1.0, 8.0, 7.0, 6.0, 9.5])
    prepared = chosen.prepare(model, rollout, learner.settings)
    assert prepared.kl_share is not None
    assert prepared.kl_share.tolist() == [0, 1, 0, 0, 0, 0]
    assert prepared.metrics["gate/share"] == 0.1

    def gradient(share: torch.Tensor) -> torch.Tensor:
        learner.optimizer.zero_grad()
        terms = chosen.terms(rollout, dataclasses.replace(prepared, kl_share=share))
        (chosen.loss(model, terms).loss.sum() / terms.total).backward()
        grads = [p.grad for p in learner.policy.trainable.values() if p.grad is not None]
        return torch.cat([grad.flatten() for grad in grads])

    gate = prepared.kl_share
    none, own, rest, every = map(gradient, (torch.zeros(6), gate, 1 - gate, torch.ones(6)))
    scale = (every - none).abs().max()
    assert scale > 0 and (own - none).abs().max() > 0.01 * scale
    assert ((own - none) + (rest - none) - (every - none)).abs().max() < 1e-3 * scale


def test_renewing_moves_the_reference_of_a_lora(folding_data: dict) -> None:
    folding_data["algorithm"] |= {"beta": 0.5, "renew": {"after": 2}}
    model, chosen, learner = parts_of(build.recipe_from(folding_data))
    away(learner)
    rollout = rollout_of(model, chosen)
    first = learner.update(rollout, 0, Scales(renew=False)).metrics
    second = learner.update(rollout, 1, Scales(renew=True)).metrics
    assert first["update/kl"] > 1e-6 and second["update/kl"] == 0
    assert (first["update/renewed"], second["update/renewed"]) == (0, 1)


def test_a_resumed_run_has_the_same_share_and_reference(recipe_data: dict, tmp_path: Path) -> None:
    data = gated(recipe_data, renew={"after": 2, "above": 1e9}) | {"steps": 5}
    data["save"] = {"every": 1, "keep": 9}
    data["algorithm"]["advantage"] = {"std": "one", "diverse": True}
    done = run.train(build.recipe_from(data), folder=tmp_path / "run", quiet=True)
    rows = done.rows()[1:]
    assert [row["update/renewed"] for row in rows] == [0, 0, 1, 0, 1]
    assert len({row["gate/share"] for row in rows}) > 1
    resumed = run.resume(cut_after(done, 3, tmp_path / "cut"), quiet=True)
    same = ("gate/share", "gate/doubt", "update/kl", "update/renewed", "reward")
    for one, other in zip(rows, resumed.rows()[1:], strict=True):
        assert [one[key] for key in same] == [other[key] for key in same]
    states = [RunFolder.open(each.path).load(5)[0] for each in (done, resumed)]
    assert any(name.startswith("renewed/") for name in states[0])
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"gate": {"share": 0.5}}, "low <= share <= high must hold, got low = 0.02, share = 0.5"),
        ({"gate": {}, "beta": 0.0}, 'algorithm.gate changes the KL, but algorithm "flow-grpo" has'),
        ({"renew": {}, "beta": 0.0, "gate": "none"}, "algorithm.renew changes the KL"),
    ],
)
def test_brakes_without_effect_are_refused(recipe_data: dict, changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build.recipe_from(gated(recipe_data, **changes))


def test_a_gate_needs_rewards_of_weight_0(recipe_data: dict) -> None:
    data = gated(recipe_data)
    data["reward"][1]["weight"] = 0.5
    message = "compares the trained reward with rewards of weight 0, got weights 1, 0.5; add a"
    with pytest.raises(UserError, match=message):
        build.recipe_from(data)


def test_dgpo_keeps_its_reference(recipe_data: dict) -> None:
    recipe_data["algorithm"] = {"name": "dgpo", "group": 3, "steps": 7, "renew": {}}
    with pytest.raises(UserError, match="relative to the model before training; remove renew"):
        build.recipe_from(recipe_data)


def test_a_ramp_from_0_is_refused_with_a_gate(recipe_data: dict) -> None:
    data = gated(recipe_data)
    data["reward"][0]["ramp"] = {"start": 0.5, "steps": 4}
    build.recipe_from(data)
    data["reward"][0]["ramp"] = {"steps": 4}
    message = 'the ramp of reward "jpeg-incompressibility" includes a weight of 0'
    with pytest.raises(UserError, match=message):
        build.recipe_from(data)

"""Samplers and losses can run with weights; only the learner can change them. The first functions
are for the type checker: `make lint` fails if it allows a line of `refused`, whose comment would be
unused."""

from __future__ import annotations

import torch

from gesso.models.flow.base import FlowModel, TrainableFlowModel
from gesso.models.tokens.base import TokenModel
from gesso.types import Weights
from gesso.weights.policy import Policy
from gesso.weights.roles import RunnableWeights

CHANGES = {"load", "snapshot", "copies", "add_adapter", "using_adapter", "merged", "module"}


def runs(flow: FlowModel, tokens: TokenModel, policy: Policy) -> RunnableWeights:
    with flow.policy.folded(), flow.policy.using("ema"), tokens.policy.using("old"):
        tokens.policy.tensors("current")
    return policy


def learns(model: TrainableFlowModel, weights: Weights) -> None:
    model.policy.snapshot("old")
    model.policy.load(weights)


def refused(flow: FlowModel, tokens: TokenModel, policy: Policy, weights: Weights) -> None:
    flow.policy.load(weights)  # type: ignore[attr-defined]
    tokens.policy.snapshot("old")  # type: ignore[attr-defined]
    flow.policy.copies["old"].clear()  # type: ignore[attr-defined]
    flow.policy = policy  # type: ignore[misc]


def test_the_role_of_a_sampler_has_no_way_to_change_weights() -> None:
    allowed = {name for name in vars(RunnableWeights) if not name.startswith("_")}
    assert {"using", "folded", "is_folded", "per_sample_grads", "tensors"} <= allowed
    assert not allowed & CHANGES
    assert {name for name in vars(Policy) if not name.startswith("_")} > CHANGES - {"module"}


def test_a_policy_plays_the_role() -> None:
    module = torch.nn.Linear(3, 2)
    policy: RunnableWeights = Policy(module, None, [], 0)
    assert policy.size == 8 and policy.trainable.keys() == policy.tensors().keys()
    assert policy.lora is None and not policy.is_folded
    with policy.folded(), policy.using("current"):
        assert not policy.is_folded  # a full fine-tune has nothing to fold
    with policy.plain("current") as tensors:
        assert dict(tensors).keys() == {"weight", "bias"}

"""Samplers and losses can run with weights; only the learner can change them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gesso.weights.policy import Policy
from gesso.weights.roles import RunnableWeights

ROOT = Path(__file__).parents[2]
CHANGES = {"load", "snapshot", "copies", "add_adapter", "using_adapter", "merged", "module"}
PRELUDE = """
from gesso.models.flow.base import FlowModel, TrainableFlowModel
from gesso.models.tokens.base import TokenModel
from gesso.types import Weights
from gesso.weights.policy import Policy
from gesso.weights.roles import RunnableWeights

def runs(flow: FlowModel, tokens: TokenModel, policy: Policy) -> RunnableWeights:
    with flow.policy.folded(), flow.policy.using("ema"), tokens.policy.using("old"):
        tokens.policy.tensors("current")
    return policy

def learns(model: TrainableFlowModel, weights: Weights) -> None:
    model.policy.snapshot("old")
    model.policy.load(weights)
"""
WRONG = """
def loads(model: FlowModel, weights: Weights) -> None:
    model.policy.load(weights)

def snapshots(model: TokenModel) -> None:
    model.policy.snapshot("old")

def replaces(model: FlowModel, policy: Policy) -> None:
    model.policy = policy

def blends(model: FlowModel) -> None:
    model.policy.copies["old"].clear()
"""


def test_the_role_of_a_sampler_has_no_way_to_change_weights() -> None:
    allowed = {name for name in vars(RunnableWeights) if not name.startswith("_")}
    assert {"using", "folded", "is_folded", "per_sample_grads", "tensors"} <= allowed
    assert not allowed & CHANGES
    assert {name for name in vars(Policy) if not name.startswith("_")} > CHANGES - {"module"}


def test_a_type_checker_refuses_a_sampler_that_changes_weights(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    file = tmp_path / "sampler.py"
    file.write_text(PRELUDE + WRONG, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        str(ROOT / "pyproject.toml"),
        str(file),
    ]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    first = len(PRELUDE.splitlines()) + 1
    wrong = [line for line in told.splitlines() if "error:" in line]
    at = [int(line.rsplit("sampler.py:", 1)[1].split(":")[0]) for line in wrong]
    assert at == [first + 2, first + 5, first + 8, first + 11], told


def test_a_policy_plays_the_role() -> None:
    module = torch.nn.Linear(3, 2)
    policy: RunnableWeights = Policy(module, None, [], 0)
    assert policy.size == 8 and policy.trainable.keys() == policy.tensors().keys()
    assert policy.lora is None and not policy.is_folded
    with policy.folded(), policy.using("current"):
        assert not policy.is_folded  # a full fine-tune has nothing to fold
    with policy.plain("current") as tensors:
        assert dict(tensors).keys() == {"weight", "bias"}

"""Weights that travel: every copy, verified by a digest, or the run stops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from gesso.types import StopRun, Weights, Which
from gesso.weights.publish import HeldWeights, Publication, digest, publish


@dataclass
class Copies:
    """A policy as far as publishing goes."""

    current: dict[str, Tensor]
    copies: dict[Which, dict[str, Tensor]]

    def tensors(self, which: Which = "current") -> Weights:
        return self.current if which == "current" else self.copies[which]

    def snapshot(self, which: Which) -> None:
        self.copies[which] = {name: t.clone() for name, t in self.current.items()}

    def load(self, weights: Weights, which: Which = "current") -> None:
        if self.tensors(which).keys() != weights.keys():
            raise ValueError("weights do not fit")
        for name, tensor in weights.items():
            self.tensors(which)[name].copy_(tensor)


def policy(seed: int = 0) -> Copies:
    generator = torch.Generator().manual_seed(seed)
    return Copies({n: torch.randn(3, 4, generator=generator) for n in "ab"}, {})


def test_a_shared_module_holds_what_is_published_and_nothing_is_hashed() -> None:
    learner = policy()
    learner.snapshot("old")
    sampler = HeldWeights(learner)
    publication = publish(learner, {"current", "old"}, 3)
    sampler.accept(publication)
    learner.current["a"] += 1  # the next update, in the same memory
    sampler.verify(publication)
    assert sampler.version == 3
    assert "digest" not in vars(publication)


def test_a_separate_sampler_receives_every_copy() -> None:
    learner, other = policy(0), policy(1)
    learner.snapshot("old")
    learner.current["a"] += 1
    sampler = HeldWeights(other)
    sampler.accept(publish(learner, {"current", "old"}, 1))
    for which in ("current", "old"):
        for name, tensor in learner.tensors(which).items():
            assert torch.equal(other.tensors(which)[name], tensor)
            assert other.tensors(which)[name].data_ptr() != tensor.data_ptr()
    assert not torch.equal(other.current["a"], other.copies["old"]["a"])


def drop_a_copy(sampler: Copies, learner: Copies) -> None:
    sampler.copies["old"] = {name: t + 1 for name, t in sampler.copies["old"].items()}


def flip_a_bit(sampler: Copies, learner: Copies) -> None:
    sampler.current["b"].view(torch.int32)[2, 3] ^= 1


def swap_two(sampler: Copies, learner: Copies) -> None:
    sampler.current["a"], sampler.current["b"] = sampler.current["b"], sampler.current["a"]


@pytest.mark.parametrize("fault", [drop_a_copy, flip_a_bit, swap_two])
def test_a_sampler_that_holds_anything_else_stops_the_run(
    fault: Callable[[Copies, Copies], None],
) -> None:
    learner, other = policy(0), policy(1)
    learner.snapshot("old")
    sampler = HeldWeights(other)
    publication = publish(learner, {"current", "old"}, 1)
    sampler.accept(publication)
    sampler.verify(publication)
    fault(other, learner)
    with pytest.raises(StopRun, match="weights differ from version 1 published by the learner"):
        sampler.verify(publication)


def test_an_older_version_stops_the_run() -> None:
    learner = policy()
    sampler = HeldWeights(policy(1))
    sampler.accept(publish(learner, {"current"}, 1))
    with pytest.raises(StopRun, match="holds version 1 of the weights, expected version 2"):
        sampler.verify(publish(learner, {"current"}, 2))


def test_weights_of_another_model_stop_the_run() -> None:
    odd = Publication(1, {"current": {"c": torch.zeros(2)}})
    with pytest.raises(StopRun, match="cannot load version 1 of the weights: weights do not fit"):
        HeldWeights(policy()).accept(odd)


def test_a_digest_covers_every_bit_name_type_shape_and_copy() -> None:
    plain: dict[Which, Weights] = {"current": {"a": torch.arange(6.0).view(2, 3)}}
    values = plain["current"]["a"]
    changed = values.clone()
    changed[1, 2] = torch.nextafter(changed[1, 2], torch.tensor(9.0))
    others: list[dict[Which, Weights]] = [
        {"current": {"a": changed}},
        {"current": {"b": values}},
        {"old": {"a": values}},
        {"current": {"a": values.view(3, 2)}},
        {"current": {"a": values.double()}},
        {"current": {"a": values.view(torch.int32)}},
        {"current": {"a": values.flip(0)}},
        {"current": {"a": values.view(3, 2).flip(0).view(2, 3)}},  # the same words of 64 bits
        {"current": {"a": values}, "old": {"a": values}},
        {},
    ]
    digests = [digest(copies) for copies in (plain, *others)]
    assert len(set(digests)) == len(digests)
    assert digest({"current": {"a": values.clone()}}) == digests[0]
    inside = torch.arange(-1.0, 6.0)[1:].view(2, 3)  # starts in the middle of a word
    assert digest({"current": {"a": inside}}) == digests[0]
    for dtype in (torch.bfloat16, torch.float16, torch.uint8, torch.int64):
        assert digest({"current": {"a": values.to(dtype)}}) not in digests


def test_a_long_tensor_is_hashed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors: dict[Which, Weights] = {"current": {"a": torch.randn(1000)}}
    whole = digest(tensors)
    monkeypatch.setattr("gesso.weights.publish.CHUNK", 64)
    assert digest(tensors) == whole

"""An attention's projections of one input, taken together, with real networks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor, nn

from gesso import config
from gesso.models.flow import joined
from gesso.models.flow.flux import Flux
from gesso.models.flow.joined import join_projections
from gesso.models.flow.sd3 import SD3
from gesso.weights.policy import Policy

PICTURES = ["attn.to_q", "attn.to_k", "attn.to_v"]


def network(targets: list[str], layers: int = 2, folds: bool = True) -> tuple[nn.Module, Policy]:
    """SD3's, with two attentions in every block but the last."""
    from diffusers import SD3Transformer2DModel

    torch.manual_seed(0)
    tiny: dict[str, Any] = {
        "num_layers": layers, "attention_head_dim": 8, "num_attention_heads": 2, "sample_size": 4,
        "caption_projection_dim": 16, "joint_attention_dim": 12, "pooled_projection_dim": 10,
        "pos_embed_max_size": 4, "in_channels": 4, "out_channels": 4, "qk_norm": "rms_norm",
        "dual_attention_layers": tuple(range(layers - 1)),
    }  # fmt: skip
    module = SD3Transformer2DModel(**tiny)
    policy = Policy(module, config.Lora(rank=2), targets, 0, folds=folds)
    return module, stirred(policy)


def stirred(policy: Policy) -> Policy:
    """With adapters that do something."""
    for name, tensor in policy.tensors().items():
        if "lora_B" in name:
            tensor.normal_(std=0.2)
    return policy


def passed(module: nn.Module, policy: Policy) -> list[Tensor]:
    """The velocity, and the gradient of every adapter."""
    noise = torch.Generator().manual_seed(1)
    shapes = ((2, 4, 4, 4), (2, 5, 12), (2, 10))
    inputs = [torch.randn(shape, generator=noise) for shape in shapes]
    with policy.folded(), policy.using("current"):
        velocity = module(*inputs, torch.ones(2), return_dict=False)[0]
    slopes = torch.autograd.grad(velocity.square().sum(), [*policy.trainable.values()])
    return [velocity.detach(), *slopes]


@pytest.mark.parametrize(
    "targets, groups",
    [  # picture and text; the second attention of a block has no adapters
        (list(SD3.lora_targets), 2 + 2),
        (PICTURES, 1 + 1),
        (["to_q", "to_k", "to_v"], 2 + 1),  # the second attention, too
        (["attn.to_q", "attn.to_v", "attn.to_out.0"], 0),  # not all three
    ],
)
def test_a_network_whose_projections_are_joined_is_the_same(
    targets: list[str], groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, policy = network(targets)
    expected = passed(module, policy)
    spy = Mock(side_effect=joined.apply_to_one_input)
    monkeypatch.setattr(joined, "apply_to_one_input", spy)
    join_projections(module)
    found = passed(module, policy)
    assert [len(call.args[0]) for call in spy.call_args_list] == [3] * groups
    assert torch.equal(found[0], expected[0])
    for mine, theirs in zip(found[1:], expected[1:], strict=True):
        assert (mine - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def test_flux_too() -> None:
    """Its attentions have a class of their own, and one stream in the later blocks."""
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    module = FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=12, pooled_projection_dim=10,
        axes_dims_rope=(2, 2, 4),
    )  # fmt: skip
    policy = stirred(Policy(module, config.Lora(rank=2), list(Flux.lora_targets), 0, folds=True))
    shapes = ((2, 6, 4), (2, 5, 12), (2, 10))
    inputs = *(torch.randn(shape) for shape in shapes), torch.ones(2)
    places = {"img_ids": torch.zeros(6, 3), "txt_ids": torch.zeros(5, 3)}

    def slopes() -> Sequence[Tensor]:
        with policy.folded(), policy.using("current"):
            velocity = module(*inputs, **places, return_dict=False)[0]
        return torch.autograd.grad(velocity.square().sum(), [*policy.trainable.values()])

    expected = slopes()
    with patch.object(joined, "apply_to_one_input", side_effect=joined.apply_to_one_input) as spy:
        join_projections(module)
        found = slopes()
    assert [len(call.args[0]) for call in spy.call_args_list] == [3, 3, 3]
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def test_an_attention_may_be_given_its_text_by_place() -> None:
    module, policy = network(list(SD3.lora_targets))
    attention = module.transformer_blocks[0].attn
    picture, text = torch.randn(2, 3, 16), torch.randn(2, 4, 16)
    expected = attention(picture, text)
    join_projections(module)
    with (
        policy.folded(),
        policy.using("current"),
        patch.object(joined, "apply_to_one_input", side_effect=joined.apply_to_one_input) as spy,
    ):
        found = attention(picture, text)
    assert [call.args[1].shape for call in spy.call_args_list] == [picture.shape, text.shape]
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def test_what_does_not_fold_is_left_alone() -> None:
    module, _ = network(list(SD3.lora_targets), folds=False)
    join_projections(module)
    assert all("forward" not in vars(part) for part in module.modules())


def test_other_files_in_the_way_stay() -> None:
    module, policy = network(list(SD3.lora_targets))
    attention = module.transformer_blocks[0].attn
    spy = attention.forward = Mock(side_effect=attention.forward)
    join_projections(module)
    passed(module, policy)
    assert spy.call_count == 1


def test_unfolded_adapters_run_as_before_joining() -> None:
    """Outside of `folded`, as they do while weights change."""
    module, _ = network(list(SD3.lora_targets))
    inputs = torch.ones(2, 4, 4, 4), torch.ones(2, 5, 12), torch.ones(2, 10), torch.ones(2)
    expected = module(*inputs, return_dict=False)[0]
    join_projections(module)
    assert torch.equal(module(*inputs, return_dict=False)[0], expected)


def test_another_input_than_the_attentions_raises() -> None:
    projected = joined._Projected(network(PICTURES)[0].transformer_blocks[0].attn)
    x = torch.ones(1, 3, 16)
    projected.compute(joined.IMAGE, x)
    assert projected.to_q(x).shape == (1, 3, 16) and projected.heads == 2
    with pytest.raises(AssertionError, match="another tensor"):
        projected.to_k(x.clone())

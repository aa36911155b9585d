"""Matrices of several layers in one tensor: the layers point to views of it, under the weights that
were in use, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gesso.types import Which
from gesso.weights.copies import NamedCopies
from gesso.weights.folded_linear import FoldedLinear
from gesso.weights.lora_folding import LoraFolding
from tests.models.test_folded import adapted


def folding(*layers: FoldedLinear) -> LoraFolding:
    names = {str(i): layer for i, layer in enumerate(layers)}
    trainable = {
        f"{name}.{part}": weight
        for name, layer in names.items()
        for part, weight in zip("AB", layer.adapter, strict=True)
    }
    copies = NamedCopies(trainable)
    copies.snapshot("old")
    for weight in trainable.values():
        weight.data = weight.data + 0.1
    return LoraFolding(names, copies)


def storage(tensor: Tensor | None) -> int:
    assert tensor is not None
    return tensor.untyped_storage().data_ptr()


def test_folded_layers_point_to_views_of_the_joined_tensor() -> None:
    q, k, out = (adapted(torch.float32, 0.3, seed=i)[0] for i in range(3))
    plain = nn.Linear(96, 8)
    weights = folding(q, k, out)
    with weights.folded(), weights.using("old"):
        before = [q.folded, k.folded]
        joined = weights.join([q, plain, k], torch.float32)
        assert torch.equal(joined, torch.cat([before[0], plain.weight, before[1]]))
        assert storage(q.folded) == storage(k.folded) == storage(joined) != storage(out.folded)
        with weights.using("current"):
            assert storage(q.folded) != storage(joined)
        assert storage(k.folded) == storage(joined)
        assert [storage(m) == storage(joined) for m in weights.matrices["old"]] == [
            True, True, False
        ]  # fmt: skip
    assert q.folded is None and not weights.matrices


def test_the_reference_is_the_frozen_weights_and_stays_where_it_is() -> None:
    q, k = (adapted(torch.float32, 0.3, seed=i)[0] for i in range(2))
    weights = folding(q, k)
    with weights.folded(), weights.using("reference"):
        assert torch.equal(weights.join([q, k], torch.float32), torch.cat([q.frozen, k.frozen]))
        assert storage(q.folded) == storage(q.frozen) and not weights.matrices


@pytest.mark.parametrize("which", ["current", "reference"])
def test_one_layer_needs_no_copy(which: Which) -> None:
    layer, _ = adapted(torch.float32, 0.3)
    weights = folding(layer)
    with weights.folded(), weights.using(which):
        assert storage(weights.join([layer], torch.float32)) == storage(layer.folded)


def test_adapters_that_are_not_folded_cannot_be_joined() -> None:
    layer, _ = adapted(torch.float32, 0.3)
    with pytest.raises(AssertionError, match="outside of `folded`"):
        folding(layer).join([layer], torch.float32)
    with pytest.raises(AssertionError, match="FoldedLinear has an unfolded adapter"):
        folding().join([layer], torch.float32)

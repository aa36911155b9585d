from __future__ import annotations

import pytest
import torch

from gesso.formulas.precision import dither_thresholds, dithered_


def dithered(x: torch.Tensor) -> torch.Tensor:
    return dithered_(x.clone(), dither_thresholds(x.shape[-2:], x.device))


def test_a_change_below_half_a_unit_is_not_lost() -> None:
    """To the nearest, all of it would be: what it is added to lies on the grid already."""
    weight = torch.randn(400, 300, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    for change in (1e-4, -1e-4):
        moved = dithered(weight + change).float() - weight
        nearest = (weight + change).bfloat16().float() - weight
        assert abs(float(moved.mean()) / change - 1) < 0.05
        assert abs(float(nearest.mean()) / change) < 0.1


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_up_or_down_in_proportion(share: float, sign: float) -> None:
    """Of numbers that lie `share` of the way to the next one, so many go there: in the whole, in
    every row and in every column, above and below zero alike."""
    unit = 2.0**-7  # of bfloat16 in [1, 2)
    down = sign * torch.full((512, 256), 1.25)
    up = dithered(down + sign * share * unit).float() != down
    assert abs(float(up.float().mean()) - share) < 1e-3
    for axis in (0, 1):
        assert float((up.float().mean(axis) - share).abs().max()) < 0.03


def test_the_pattern_is_weyls_sequence() -> None:
    golden = (5**0.5 - 1) / 2
    threshold = torch.arange(4096, dtype=torch.float64) * golden % 1
    share = torch.rand(4096, generator=torch.Generator().manual_seed(3)).double()
    up = dithered((1 + share * 2**-7).float()).float() > 1
    near = (threshold - (1 - share)).abs() < 1e-4  # the multiplier is a whole number
    assert torch.equal(up[~near], (threshold >= 1 - share)[~near]) and near.sum() < 10


def test_what_fits_stays_and_nothing_moves_further_than_a_unit() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    exact = x.bfloat16().float()
    assert torch.equal(dithered(exact).float(), exact)
    error = (dithered(x).float() - x).abs()
    assert (error <= x.abs() * 2**-7).all() and error.max() > 0
    endless = torch.tensor([float("inf"), -float("inf"), 0.0])
    assert torch.equal(dithered(endless).float(), endless)


def test_the_same_place_rounds_alike_every_time() -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(2))
    assert torch.equal(dithered(x), dithered(x.clone()))
    both = dithered(torch.stack([x, x.flip(0)]))  # of a batch, every matrix alike
    assert torch.equal(both[0], dithered(x))
    assert torch.equal(both[1], dithered(x.flip(0)))

from __future__ import annotations

import torch

from gesso.formulas.precision import dithered


def test_a_change_below_half_a_unit_is_not_lost() -> None:
    """To the nearest, all of it would be: what it is added to lies on the grid already."""
    weight = torch.randn(400, 300, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    for change in (1e-4, -1e-4):
        moved = dithered(weight + change, torch.bfloat16).float() - weight
        nearest = (weight + change).bfloat16().float() - weight
        assert abs(float(moved.mean()) / change - 1) < 0.05
        assert abs(float(nearest.mean()) / change) < 0.1


def test_what_fits_stays_and_nothing_moves_further_than_a_unit() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    exact = x.bfloat16().float()
    assert torch.equal(dithered(exact, torch.bfloat16).float(), exact)
    error = (dithered(x, torch.bfloat16).float() - x).abs()
    assert (error <= x.abs() * 2**-7).all() and error.max() > 0
    endless = torch.tensor([float("inf"), -float("inf"), 0.0])
    assert torch.equal(dithered(endless, torch.bfloat16).float(), endless)


def test_the_same_place_rounds_alike_every_time() -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(2))
    assert torch.equal(dithered(x, torch.bfloat16), dithered(x.clone(), torch.bfloat16))
    assert torch.equal(dithered(x, torch.float16), x.half())
    assert torch.equal(dithered(x, torch.float32), x)

from __future__ import annotations

import pytest
import torch

from gesso.formulas import matching, nft


def tensors(n: int = 3) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return {k: torch.randn(n, 2, 3, 4, generator=g) for k in ("v", "v_old", "x0", "noise")}


def test_contrast_equals_a_plain_computation() -> None:
    d, t, r, beta = tensors(), torch.tensor([0.2, 0.5, 0.9]), torch.tensor([0.0, 0.3, 1.0]), 0.1
    x_t = matching.noised(d["x0"], d["noise"], t)
    got = nft.contrast(d["v"], d["v_old"], d["x0"], x_t, t, r, beta)
    for i in range(3):
        v, old, x0, noise, ti, ri = (
            *(d[k][i].double() for k in ("v", "v_old", "x0", "noise")),
            t[i].double(),
            r[i].double(),
        )
        xt = (1 - ti) * x0 + ti * noise
        total = torch.zeros((), dtype=torch.float64)
        for weight, velocity in (
            (ri, beta * v + (1 - beta) * old),
            (1 - ri, (1 + beta) * old - beta * v),
        ):
            error = xt - ti * velocity - x0
            total += weight * (error**2).mean() / error.abs().mean().clamp(min=1e-5)
        assert got[i].item() == pytest.approx((5 * total / beta).item(), rel=1e-4)


def test_gradient_on_policy_points_from_bad_to_good() -> None:
    """At v = v_old with β = 1 the two branches meet: x̂⁺ = x̂⁻, and the gradient is that of
    (2r − 1)·L⁺, zero for r = ½."""
    d, t = tensors(1), torch.tensor([0.5])
    x_t = matching.noised(d["x0"], d["noise"], t)
    gradients = {}
    for r in (0.0, 0.5, 1.0):
        v = d["v"].clone().requires_grad_()
        nft.contrast(v, d["v"], d["x0"], x_t, t, torch.tensor([r]), 1.0).sum().backward()
        gradients[r] = v.grad
    assert gradients[0.5].abs().max() < 1e-6
    torch.testing.assert_close(gradients[0.0], -gradients[1.0])
    error = x_t - 0.5 * d["v"] - d["x0"]
    plain = 5 * 2 * error * -0.5 / error.abs().mean() / error.numel()
    torch.testing.assert_close(gradients[1.0], plain, rtol=1e-4, atol=1e-6)


def test_optimality() -> None:
    got = nft.optimality(torch.tensor([-9.0, -5.0, 0.0, 2.5, 5.0, 7.0]))
    assert got.tolist() == pytest.approx([0, 0, 0.5, 0.75, 1, 1])


@pytest.mark.parametrize(
    "step, schedule, decay",
    [(1, 1, 0.001), (100, 1, 0.1), (900, 1, 0.5), (75, 2, 0), (76, 2, 0.0075), (999, 2, 0.999)],
)
def test_old_policy_decay(step: int, schedule: int, decay: float) -> None:
    assert nft.old_decay(step, schedule) == pytest.approx(decay)


def test_frames_are_one_more_axis() -> None:
    """Latents of videos, (C, F, H, W), count as (C, F·H, W)."""
    t, r = torch.tensor([0.2, 0.9]), torch.tensor([0.3, 1.0])
    v, old, x0, noise = torch.randn(4, 2, 2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    flat = (v.flatten(2, 3), old.flatten(2, 3), x0.flatten(2, 3))
    x_t = matching.noised(x0, noise, t)
    assert torch.equal(x_t.flatten(2, 3), matching.noised(flat[2], noise.flatten(2, 3), t))
    got = nft.contrast(v, old, x0, x_t, t, r, 0.1)
    torch.testing.assert_close(got, nft.contrast(*flat, x_t.flatten(2, 3), t, r, 0.1))

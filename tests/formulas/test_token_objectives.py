"""Objectives over tokens: three responses of 4, 1 and 3 tokens in rows of 5."""

from __future__ import annotations

import math

import pytest
import torch

from gesso.formulas.aggregation import token_weights
from gesso.formulas.objectives import (
    Surrogate,
    cispo,
    clipped,
    sapo,
    sequence_clipped,
    sequence_masked,
    token_clipped,
    token_masked,
    token_truncated,
    value_loss,
)

LENGTHS = [4, 1, 3]
MASK = torch.arange(5) < torch.tensor(LENGTHS)[:, None]  # (3, 5)


def tokens(scale: float, padding: float = 0.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs (with gradient), old ones `scale` away, advantages (3, 1); float64."""
    g = torch.Generator().manual_seed(3)
    logp = -torch.rand(3, 5, generator=g, dtype=torch.float64) * 3
    old = logp + scale * torch.randn(3, 5, generator=g, dtype=torch.float64)
    advantage = torch.tensor([[1.5], [-2.0], [-0.5]], dtype=torch.float64)
    logp, old = (torch.where(MASK, x, padding) for x in (logp, old))
    return logp.requires_grad_(), old, advantage


# (log ρ, A) → (loss, gradient d loss / d logp, clipped); low .2, high .3, dual 3, by hand
TOKENS = [
    (math.log(1.25), 2.0, -2.5, -2.5, False),  # within .3, beyond .2: the two are not mixed up
    (math.log(1.5), 2.0, -2.6, 0.0, True),
    (math.log(0.75), -2.0, 1.6, 0.0, True),
    (math.log(0.75), 2.0, -1.5, -1.5, False),
    (math.log(2.9), -2.0, 5.8, 5.8, False),  # not yet at the dual clip
    (math.log(3.5), -2.0, 6.0, 0.0, True),  # dual clip: 3·|A|
    (math.log(3.5), 2.0, -2.6, 0.0, True),  # not for A > 0
    (50.0, -2.0, 6.0, 0.0, True),
    (-50.0, 2.0, -2.0 * math.exp(-20), 0.0, True),  # log ρ cut at −20
    (50.0, 0.0, 0.0, 0.0, False),
]


def test_token_clip_by_hand() -> None:
    log_ratio, advantage, loss, gradient, is_clipped = (
        torch.tensor(column).view(2, 5) for column in zip(*TOKENS, strict=True)
    )
    old = torch.full((2, 5), -60.0)
    logp = (old + log_ratio).requires_grad_()
    got = token_clipped(logp, old, advantage, 0.2, 0.3, dual=3.0)
    got.loss.sum().backward()
    torch.testing.assert_close(got.loss.detach(), loss, rtol=1e-5, atol=1e-12)
    torch.testing.assert_close(logp.grad, gradient, rtol=1e-5, atol=1e-12)
    assert got.clipped.tolist() == is_clipped.tolist()
    bound = log_ratio.clamp(-20, 20).exp()
    torch.testing.assert_close(got.ratio, bound, rtol=1e-5, atol=0)
    assert not got.ratio.requires_grad


def test_without_the_dual_clip_a_bad_token_costs_its_ratio_up_to_the_cut() -> None:
    logp = torch.tensor([[math.log(3.5), 50.0], [19.0, -50.0]], requires_grad=True)
    advantage = torch.tensor([[-2.0], [-1.0]])
    got = token_clipped(logp, torch.zeros(2, 2), advantage, 0.2, 0.3)
    got.loss.sum().backward()
    e19, e20 = math.exp(19), math.exp(20)
    assert got.loss.flatten().tolist() == pytest.approx([7, 2 * e20, e19, 0.8], rel=1e-5)
    assert logp.grad.flatten().tolist() == pytest.approx([7, 0, e19, 0], rel=1e-5)
    assert got.clipped.tolist() == [[False, True], [False, True]]


@pytest.mark.parametrize("dual", [None, 1.5])
def test_token_clip_equals_a_plain_loop(dual: float | None) -> None:
    logp, old, advantage = tokens(0.5)
    got = token_clipped(logp, old, advantage, 0.2, 0.28, dual)
    got.loss.sum().backward()
    seen = set()
    for i in range(3):
        for t in range(5):
            a, ratio = advantage[i].item(), math.exp(logp[i, t].item() - old[i, t].item())
            best = -min(ratio * a, min(max(ratio, 0.8), 1.28) * a)
            moves = best == -ratio * a
            if dual is not None and a < 0 and best > -dual * a:
                best, moves = -dual * a, False
            assert got.loss[i, t].item() == pytest.approx(best)
            assert logp.grad[i, t].item() == pytest.approx(-ratio * a if moves else 0.0)
            assert bool(got.clipped[i, t]) is not moves
            seen.add((a > 0, moves))
    assert len(seen) == 4


def test_within_the_cut_a_token_costs_what_a_denoising_step_does() -> None:
    logp, old, advantage = tokens(1.0)
    a = token_clipped(logp, old, advantage, 0.1, 0.2)
    b = clipped(logp, old, advantage, 0.1, 0.2)
    assert torch.equal(a.loss, b.loss) and torch.equal(a.ratio, b.ratio)
    assert torch.equal(a.clipped, b.clipped)


def surrogates(scale: float) -> list[tuple[torch.Tensor, Surrogate]]:
    cases = []
    for which in range(4):
        logp, old, advantage = tokens(scale)
        if which == 0:
            cases.append((logp, token_clipped(logp, old, advantage, 0.2, 0.3, 2.0)))
        elif which == 1:
            cases.append((logp, sequence_clipped(logp, old, advantage, MASK, 0.1, 0.2)))
        elif which == 2:
            cases.append((logp, sapo(logp, old, advantage, 1.0, 1.05)))
        else:
            cases.append((logp, cispo(logp, old, advantage, 0.5, 2.0)))
    return cases


@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0, 50.0])
def test_clipped_says_exactly_which_tokens_give_no_gradient(scale: float) -> None:
    for logp, got in surrogates(scale):
        got.loss.sum().backward()
        assert ((logp.grad == 0) == got.clipped)[MASK].all()
        assert got.loss.shape == got.ratio.shape == got.clipped.shape == (3, 5)


def test_on_policy_every_objective_is_reinforce() -> None:
    """Ratio 1, and −A at every token; GSPO gives no gradient to the padding."""
    for logp, got in surrogates(0.0):
        got.loss.sum().backward()
        assert got.ratio[MASK].tolist() == [1.0] * 8
        torch.testing.assert_close(logp.grad[MASK], -tokens(0.0)[2].expand(3, 5)[MASK])


def test_the_old_log_probs_get_no_gradient() -> None:
    """Else on-policy, with old = logp itself, the two gradients would cancel."""
    logp, _, advantage = tokens(0.0)
    for loss in (
        token_clipped(logp, logp, advantage, 0.2, 0.2).loss,
        sequence_clipped(logp, logp, advantage, MASK, 0.2, 0.2).loss,
        cispo(logp, logp, advantage, 0.0, 2.0).loss,
        sapo(logp, logp, advantage, 1.0, 1.05).loss,
    ):
        (gradient,) = torch.autograd.grad(loss.sum(), logp)
        torch.testing.assert_close(gradient[MASK], -advantage.expand(3, 5)[MASK])


@pytest.mark.parametrize("padding", [0.0, 1e4, -math.inf])
def test_sequence_ratio_is_the_mean_over_the_response_only(padding: float) -> None:
    logp, old, advantage = tokens(0.5, padding)
    got = sequence_clipped(logp, old, advantage, MASK, 0.3, 0.4)
    got.loss.sum().backward()
    for i, n in enumerate(LENGTHS):
        a = advantage[i].item()
        s = math.exp(sum((logp[i, t] - old[i, t]).item() for t in range(n)) / n)
        best = -min(s * a, min(max(s, 0.7), 1.4) * a)
        slope = -s * a if best == -s * a else 0.0
        assert got.ratio[i].tolist() == pytest.approx([s] * n + [1.0] * (5 - n))
        assert got.loss[i, :n].tolist() == pytest.approx([best] * n)
        assert logp.grad[i].tolist() == pytest.approx([slope] * n + [0.0] * (5 - n))


def test_sequence_clip_by_hand() -> None:
    """s = √(2·8) = 4, 1.5 and ½, low .3, high .4. A bad sequence costs its whole ratio, 4·2: the
    dual clip is not part of GSPO."""
    ratio = torch.tensor([[2.0, 8.0, 1.0], [1.5, 99.0, 99.0], [0.5, 0.25, 1.0]])
    mask = torch.tensor([[True, True, False], [True, False, False], [True, True, True]])
    logp = ratio.log().requires_grad_()
    advantage = torch.tensor([[-2.0], [1.0], [-1.0]])
    got = sequence_clipped(logp, torch.zeros(3, 3), advantage, mask, 0.3, 0.4)
    got.loss.sum().backward()
    assert got.loss[mask].tolist() == pytest.approx([8, 8, -1.4, 0.7, 0.7, 0.7])
    assert logp.grad[mask].tolist() == pytest.approx([8, 8, 0, 0, 0, 0])
    assert got.clipped[mask].tolist() == [False, False, True, True, True, True]


@pytest.mark.parametrize("low, high, share", [(0.5, 0.5, 0), (0.05, 0.05, 1)])
def test_gspo_has_the_gradient_of_its_definition(low: float, high: float, share: int) -> None:
    """Eq. 5: −(1/N)Σ min(s·A, clip(s)·A) with s differentiated through the mean. The token form,
    averaged over a sequence's tokens and then over sequences, has the same value and gradient."""
    logp, old, advantage = tokens(0.4)
    got = sequence_clipped(logp, old, advantage, MASK, low, high)
    loss = (token_weights(MASK, "seq-mean-token-mean").double() * got.loss).sum()
    means = [(logp[i, :n] - old[i, :n]).mean() for i, n in enumerate(LENGTHS)]
    s = torch.stack(means).exp()
    a = advantage[:, 0]
    definition = -torch.minimum(s * a, s.clamp(1 - low, 1 + high) * a).mean()
    assert loss.item() == pytest.approx(definition.item(), rel=1e-6)
    expected, gradient = (torch.autograd.grad(x, logp)[0] for x in (definition, loss))
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-9)
    assert int(got.clipped.any()) == share


def test_gspo_tokens_may_have_advantages_of_their_own() -> None:
    logp, old, _ = tokens(0.1)
    advantage = torch.arange(15.0, dtype=torch.float64).view(3, 5) - 7
    got = sequence_clipped(logp, old, advantage, MASK, 10.0, 10.0)
    got.loss.sum().backward()
    torch.testing.assert_close(logp.grad[MASK], (-got.ratio * advantage)[MASK])


def test_cispo_by_hand() -> None:
    """ρ = ½, 1.5, 8 with bounds .8 and 2: weights .8, 1.5, 2; ℓ stays differentiable in all."""
    ratio = torch.tensor([[0.5, 1.5, 8.0], [8.0, 0.5, 1.5]])
    logp = torch.full((2, 3), -2.0, requires_grad=True)
    advantage = torch.tensor([[3.0], [-1.0]])
    got = cispo(logp, logp.detach() - ratio.log(), advantage, 0.8, 2.0)
    got.loss.sum().backward()
    torch.testing.assert_close(got.loss.detach(), torch.tensor([[4.8, 9, 12], [-4, -1.6, -3]]))
    torch.testing.assert_close(logp.grad, torch.tensor([[-2.4, -4.5, -6], [2, 0.8, 1.5]]))
    torch.testing.assert_close(got.ratio, ratio)
    assert not got.clipped.any()


def test_cispo_far_away_is_finite_and_without_a_lower_bound_small() -> None:
    logp = torch.tensor([[-1.0, -200.0], [-1.0, -2.0]], requires_grad=True)
    old = torch.tensor([[-300.0, -1.0], [-1.0, -2.0]])
    got = cispo(logp, old, torch.tensor([[1.0], [2.0]]), 0.0, math.inf)
    got.loss.sum().backward()
    expected = [-math.exp(20), -math.exp(-20), -2, -2]
    assert logp.grad.flatten().tolist() == pytest.approx(expected, rel=1e-5)


# ρ → gradient d loss / d logp relative to −A, for A > 0 (τ 1) and A < 0 (τ 1.05)
GATED = {1.0: (1.0, 1.0), 1.5: (1.410022, 1.401210), 0.6: (0.576626, 0.574299)}


@pytest.mark.parametrize("ratio", GATED)
def test_sapo_weights_of_the_gradient(ratio: float) -> None:
    logp = torch.full((2, 1), -3.0, dtype=torch.float64, requires_grad=True)
    advantage = torch.tensor([[0.8], [-0.5]], dtype=torch.float64)
    got = sapo(logp, logp.detach() - math.log(ratio), advantage, 1.0, 1.05)
    got.loss.sum().backward()
    weights = (logp.grad / -advantage)[:, 0].tolist()
    assert weights == pytest.approx(GATED[ratio], abs=1e-6)
    assert got.ratio.flatten().tolist() == pytest.approx([ratio] * 2) and not got.clipped.any()


def test_sapo_at_ratio_1_has_the_gradient_of_reinforce_and_another_value() -> None:
    logp, _, advantage = tokens(0.0)
    got = sapo(logp, logp.detach(), advantage, 1.0, 1.05)
    got.loss.sum().backward()
    torch.testing.assert_close(logp.grad, -advantage.expand(3, 5))
    tau = torch.tensor([[1.0], [1.05], [1.05]], dtype=torch.float64)
    torch.testing.assert_close(got.loss.detach(), (-2 * advantage / tau).expand(3, 5))


def test_sapo_averaged_over_two_responses() -> None:
    """The reference's values: ρ = 1, 1.5, .6; A = .8 with 3 tokens, −.5 with the first 2."""
    ratio = torch.tensor([1.0, 1.5, 0.6], dtype=torch.float64).expand(2, 3)
    mask = torch.tensor([[True, True, True], [True, True, False]])
    logp = ratio.log().clone().requires_grad_()
    advantage = torch.tensor([[0.8], [-0.5]], dtype=torch.float64)
    got = sapo(logp, torch.zeros(2, 3, dtype=torch.float64), advantage, 1.0, 1.05).loss
    by_response = (token_weights(mask, "seq-mean-token-mean").double() * got).sum()
    by_response.backward()
    assert by_response.item() == pytest.approx(-0.275385, abs=1e-6)
    assert logp.grad[0].tolist() == pytest.approx([-0.133333, -0.188003, -0.076883], abs=1e-6)
    assert logp.grad[1].tolist() == pytest.approx([0.125, 0.175151, 0], abs=1e-6)
    by_token = (token_weights(mask, "token-mean").double() * got).sum()
    assert by_token.item() == pytest.approx(-0.545379, abs=1e-6)


@pytest.mark.parametrize("taus", [(1.0, 1.05), (3.0, 0.5)])
def test_sapo_equals_a_plain_loop(taus: tuple[float, float]) -> None:
    logp, old, advantage = tokens(0.5)
    got = sapo(logp, old, advantage, *taus)
    got.loss.sum().backward()
    for i in range(3):
        for t in range(5):
            a, ratio = advantage[i].item(), math.exp(logp[i, t].item() - old[i, t].item())
            tau = taus[0] if a > 0 else taus[1]
            gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
            assert got.loss[i, t].item() == pytest.approx(-a * 4 / tau * gate)
            assert logp.grad[i, t].item() == pytest.approx(-4 * a * gate * (1 - gate) * ratio)


def test_sapo_has_the_gradient_of_finite_differences() -> None:
    logp, old, advantage = tokens(0.7)

    def total(x: torch.Tensor) -> torch.Tensor:
        return sapo(x, old, advantage, 1.0, 1.05).loss

    assert torch.autograd.gradcheck(total, (logp,))


def test_sapo_far_away_is_finite_and_has_no_gradient() -> None:
    """In float32 the gate is 1 from ρ ≈ 18 on; below, the gradient is that of ρ."""
    log_ratio = [math.log(10), 3.0, 50.0, 200.0, -15.0, -50.0]
    logp = torch.tensor([log_ratio, log_ratio], requires_grad=True)
    advantage = torch.tensor([[2.0], [-1.0]])
    got = sapo(logp, torch.zeros(2, 6), advantage, 1.0, 1.05)
    got.loss.sum().backward()
    assert got.clipped.tolist() == [[False, True, True, True, False, True]] * 2
    assert ((logp.grad == 0) == got.clipped).all() and got.loss.isfinite().all()
    assert got.loss[:, 2].tolist() == pytest.approx([-8, 4 / 1.05])
    none = sapo(logp.detach(), torch.zeros(2, 6), torch.zeros(2, 1), 1.0, 1.05)
    assert not none.clipped.any() and not none.loss.any()


def test_importance_weights_by_hand() -> None:
    learner = torch.tensor([[-1.0, -1.0, -1.0], [-1.0, -150.0, -1.0]], requires_grad=True)
    sampler = torch.tensor([[-1.0, -1.0 - math.log(1.5), -4.0], [-0.5, -1.0, -300.0]])
    got = token_truncated(learner, sampler, 2.0)
    expected = [1, 1.5, 2, math.exp(-0.5), 0, 2]
    assert got.weight.flatten().tolist() == pytest.approx(expected, rel=1e-6)
    assert got.bounded.tolist() == [[False, False, True], [False, False, True]]
    masked = token_masked(learner, sampler, 2.0)
    expected = [1, 1.5, 0, math.exp(-0.5), 0, 0]
    assert masked.weight.flatten().tolist() == pytest.approx(expected, rel=1e-6)
    assert masked.bounded.tolist() == [[False, False, True], [False, True, True]]
    assert not got.weight.requires_grad and not masked.weight.requires_grad


def test_responses_are_masked_by_the_geometric_mean_of_their_weights() -> None:
    """Means .3667, 0, −.05 and, without the padding, 1.5: e^.3 lies between the first two."""
    gap = [[0.2, 0.5, 0.4, 9.0], [-0.1, -0.1, 0.1, 0.1], [1.0, -1.1, -0.1, 0.0], [1.5, 0, 0, 0]]
    learner = torch.tensor(gap, dtype=torch.float64, requires_grad=True)
    mask = torch.arange(4) < torch.tensor([3, 4, 4, 1])[:, None]
    got = sequence_masked(learner, torch.zeros(4, 4), mask, 2.0, math.exp(0.3))
    assert not got.weight[[0, 3]].any() and got.bounded[[0, 3]].all()
    assert got.weight[1].tolist() == pytest.approx([math.exp(x) for x in gap[1]])
    assert got.weight[2].tolist() == pytest.approx([2, math.exp(-1.1), math.exp(-0.1), 1])
    assert got.bounded[1:3].tolist() == [[False] * 4, [True, False, False, False]]
    assert not got.weight.requires_grad
    low = sequence_masked(-learner, torch.zeros(4, 4), mask, 2.0, math.exp(0.3))
    assert low.bounded[:, 0].tolist() == [True, False, False, True]  # on both sides
    wide = sequence_masked(learner, torch.zeros(4, 4), mask, 1e9, math.exp(0.4))
    assert wide.bounded.any(1).tolist() == [False, False, False, True]


def test_the_geometric_mean_does_not_grow_with_the_length() -> None:
    """Of 4096 tokens with a gap of .02 the product exceeds TRL's cap of 3 in a fifth."""
    gap = 0.02 * torch.randn(500, 4096, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(500, 4096, dtype=torch.bool)
    assert not sequence_masked(gap, torch.zeros_like(gap), mask, 2.0, 1.02).bounded.any()
    assert 0.14 < (gap.sum(1) > math.log(3)).float().mean() < 0.25


# (v, v_old, R) → (loss, gradient d loss / d v), clip .5, by hand
VALUES = [
    (1.0, 1.2, 3.0, 2.0, -2.0),  # has not moved by .5: plain
    (2.0, 1.0, 3.0, 1.125, 0.0),  # moved towards R: held to 1.5
    (2.0, 1.0, 0.0, 2.0, 2.0),  # moved away: the plain error is the larger
    (0.0, 1.0, -1.0, 1.125, 0.0),  # the same below: held to .5
    (0.0, 1.0, 2.0, 2.0, -2.0),
    (5.0, 1.0, 2.0, 4.5, 3.0),  # moved past R: pulled back
]


@pytest.mark.parametrize("clip", [0.5, None])
def test_value_loss_by_hand(clip: float | None) -> None:
    columns = [torch.tensor(c).view(2, 3) for c in zip(*VALUES, strict=True)]
    values, old, returns, loss, gradient = columns
    if clip is None:
        loss, gradient = (values - returns).square() / 2, values - returns
    values, returns = values.requires_grad_(), returns.requires_grad_()
    old.requires_grad_()
    got = value_loss(values, old, returns, clip)
    got.sum().backward()
    torch.testing.assert_close(got.detach(), loss.detach())
    torch.testing.assert_close(values.grad, gradient.detach())
    assert old.grad is None and returns.grad is None


def test_half_precision_log_probs_are_widened() -> None:
    """Whatever the network runs in: exp and the sums over tokens are float32, float64 stays."""
    logp, old, advantage = (x.detach() for x in tokens(0.3))
    for kind, inside in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        a, b, adv = logp.to(kind), old.to(kind), advantage.to(inside)
        results = [
            token_clipped(a, b, adv, 0.2, 0.2).loss,
            sequence_clipped(a, b, adv, MASK, 0.2, 0.2).loss,
            cispo(a, b, adv, 0.0, 2.0).loss,
            sapo(a, b, adv, 1.0, 1.05).loss,
            token_truncated(a, b, 2.0).weight,
            token_masked(a, b, 2.0).weight,
            sequence_masked(a, b, MASK, 2.0, 2.0).weight,
            value_loss(a, b, adv, 0.2),
        ]
        assert [x.dtype for x in results] == [inside] * 8
        again = token_clipped(a.to(inside), b.to(inside), adv, 0.2, 0.2).loss
        assert torch.equal(results[0], again)

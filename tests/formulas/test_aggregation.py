"""From token losses to one number, the same however the batch is cut."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from gesso.formulas.aggregation import Mode, token_weights

MODES = get_args(Mode)


def mask_of(lengths: list[int], width: int) -> torch.Tensor:
    return torch.arange(width) < torch.tensor(lengths)[:, None]


def length_of(mode: Mode) -> int | None:
    return 10 if mode == "constant" else None


# lengths 4, 1, 3: the weight of a token of each row
BY_HAND = {
    "token-mean": [1 / 8, 1 / 8, 1 / 8],
    "seq-mean-token-mean": [1 / 12, 1 / 3, 1 / 9],
    "seq-mean-token-sum": [1 / 3, 1 / 3, 1 / 3],
    "constant": [1 / 30, 1 / 30, 1 / 30],
}


@pytest.mark.parametrize("mode", MODES)
def test_by_hand(mode: Mode) -> None:
    got = token_weights(mask_of([4, 1, 3], 5), mode, length_of(mode))
    assert got.shape == (3, 5) and got.dtype == torch.float32
    for row, n, weight in zip(got.tolist(), (4, 1, 3), BY_HAND[mode], strict=True):
        assert row[:n] == pytest.approx([weight] * n)
        assert row[n:] == [0.0] * (5 - n)


@pytest.mark.parametrize("mode", MODES)
def test_equals_a_plain_loop(mode: Mode) -> None:
    lengths = [7, 2, 5, 1, 6]
    losses = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).tolist()
    sums = [sum(row[:n]) for row, n in zip(losses, lengths, strict=True)]
    means = [s / n for s, n in zip(sums, lengths, strict=True)]
    expected = {
        "token-mean": sum(sums) / 21,
        "seq-mean-token-mean": sum(means) / 5,
        "seq-mean-token-sum": sum(sums) / 5,
        "constant": sum(s / 10 for s in sums) / 5,
    }
    weights = token_weights(mask_of(lengths, 7), mode, length_of(mode))
    got = (weights * torch.tensor(losses)).sum().item()
    assert got == pytest.approx(expected[mode], rel=1e-5)


LENGTHS = [5, 1, 3, 9, 2, 2, 7, 4, 6, 1, 8, 3, 9, 5, 1, 2]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Sixteen ragged sequences, features (16, 9, 4), and their mask."""
    x = torch.randn(16, 9, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x, mask_of(LENGTHS, 9)


def gradient(parts: list[torch.Tensor], mode: Mode, again: bool = False) -> torch.Tensor:
    """Of a small network, accumulated over parts of the batch, each cut to its longest sequence.
    again: the denominators counted afresh in each part, which is the mistake."""
    x, mask = batch()
    weights = token_weights(mask, mode, length_of(mode))
    theta = torch.linspace(-1, 1, 4, dtype=torch.float64).requires_grad_()
    for rows in parts:
        width = int(mask[rows].sum(1).max())
        losses = torch.tanh(x[rows, :width] @ theta)
        mine = weights[rows, :width]
        if again:
            mine = token_weights(mask[rows, :width], mode, length_of(mode)) / len(parts)
        (mine * losses).sum().backward()
    return theta.grad


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cuts", [1, 2, 8])
@pytest.mark.parametrize("permuted", [False, True])
def test_the_gradient_does_not_depend_on_how_the_batch_is_cut(
    mode: Mode, cuts: int, permuted: bool
) -> None:
    g = torch.Generator().manual_seed(cuts)
    order = torch.randperm(16, generator=g) if permuted else torch.arange(16)
    whole = gradient([torch.arange(16)], mode)
    got = gradient(list(order.tensor_split(cuts)), mode)
    torch.testing.assert_close(got, whole, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("mode", MODES)
def test_uneven_parts_too(mode: Mode) -> None:
    whole = gradient([torch.arange(16)], mode)
    parts = list(torch.arange(16).split([1, 6, 2, 7]))
    torch.testing.assert_close(gradient(parts, mode), whole, rtol=1e-12, atol=1e-14)


def test_counting_in_each_micro_batch_would_be_wrong() -> None:
    parts = list(torch.arange(16).tensor_split(8))
    wrong = gradient(parts, "token-mean", again=True)
    assert (wrong / gradient(parts, "token-mean") - 1).abs().max() > 0.05


@pytest.mark.parametrize("mode", MODES)
def test_padding_does_not_count(mode: Mode) -> None:
    narrow, broad = (token_weights(mask_of([4, 1], w), mode, length_of(mode)) for w in (4, 9))
    assert torch.equal(broad[:, :4], narrow) and not broad[:, 4:].any()


@pytest.mark.parametrize("mode", MODES)
def test_a_length_belongs_to_constant_alone(mode: Mode) -> None:
    with pytest.raises(ValueError, match="requires a length"):
        token_weights(mask_of([2], 2), mode, None if mode == "constant" else 10)


def test_unknown_mode() -> None:
    with pytest.raises(ValueError, match=r"unknown aggregation 'mean'; use one of token-mean"):
        token_weights(mask_of([2], 2), "mean")  # type: ignore[arg-type]

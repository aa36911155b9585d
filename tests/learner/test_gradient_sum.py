"""Sums of gradients that do not depend on the order, and the division of work among ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import permutations

import pytest
import torch
from torch import nn

from gesso.cluster import speeds
from gesso.learner import gradient_sum
from gesso.learner.gradient_sum import AT_ONCE, LARGEST, ExactSum, FloatSum
from gesso.ranks import ALONE, Values, deal, fill

SHAPES = [(3, 5), (AT_ONCE + 7,), (), (AT_ONCE // 2,), (AT_ONCE // 2 + 1,)]


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]


def gradients(count: int) -> list[list[torch.Tensor]]:
    """Of very different sizes, so that float32 sums depend on their order."""
    generator = torch.Generator().manual_seed(0)
    return [
        [
            torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-9, 3, shape)
            for shape in SHAPES
        ]
        for _ in range(count)
    ]


def summed(kind: type, grads: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    trained = parameters()
    total = kind(trained)
    for some in grads:
        for parameter, grad in zip(trained, some, strict=True):
            parameter.grad = grad.clone() if parameter.grad is None else parameter.grad + grad
        total.add()
    assert total.write()
    return [p.grad for p in trained if p.grad is not None]


def test_any_order_gives_the_same_bits() -> None:
    grads = gradients(4)
    first = summed(ExactSum, grads)
    plain = summed(FloatSum, grads)
    different = 0
    for order in permutations(range(4)):
        again = summed(ExactSum, [grads[i] for i in order])
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        floats = summed(FloatSum, [grads[i] for i in order])
        different += not all(torch.equal(a, b) for a, b in zip(plain, floats, strict=True))
    assert different > 10  # the values above do distinguish the orders


def test_the_sum_is_rounded_once() -> None:
    """Against rational numbers: the float32 nearest to the exact sum, above the grid of 2⁻⁷²."""
    grads = gradients(3)
    for index, total in enumerate(summed(ExactSum, grads)):
        columns = torch.stack([some[index].flatten() for some in grads]).T[:40].tolist()
        for found, column in zip(total.flatten().tolist(), columns, strict=False):
            exact = sum(Fraction(value) for value in column)
            nearest = torch.tensor(float(exact)).item()
            assert abs(found - nearest) <= 3 * 2.0**-73


def test_one_gradient_is_its_own_sum() -> None:
    grads = gradients(1)
    assert all(torch.equal(a, b) for a, b in zip(summed(ExactSum, grads), grads[0], strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -2 * LARGEST])
def test_a_gradient_that_is_not_finite_is_reported(value: float) -> None:
    trained = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(AT_ONCE * 2))]
    total = ExactSum(trained)
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    assert trained[1].grad is not None
    trained[1].grad[-1] = value
    total.add()
    assert not total.write()


@pytest.mark.parametrize("kind", [ExactSum, FloatSum])
def test_a_parameter_without_gradients_has_none(kind: type) -> None:
    """AdamW would decay its weights."""
    trained = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    total = kind(trained)
    trained[0].grad = torch.ones(2)
    total.add()
    total.buffers()  # as ranks read them
    assert total.write()
    assert trained[0].grad is not None and trained[1].grad is None


def test_only_a_cpu_sums_exactly() -> None:
    half = [nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))]
    assert isinstance(gradient_sum.gradient_sum(parameters()), ExactSum)
    assert isinstance(gradient_sum.gradient_sum(half), FloatSum)


class Pair:
    """Two ranks, one after the other in this process: the second merges what the first left."""

    def __init__(
        self, rank: int, left: dict[int, Values], in_step: bool = False, count: int = 2
    ) -> None:
        self.rank, self.left, self.in_step, self.count = rank, left, in_step, count
        self.slowness: Sequence[float] = [1.0] * count

    def sum(self, tensors: object) -> None: ...

    def merge(self, parts: Mapping[int, Values], owners: Sequence[int]) -> list[Values]:
        self.left.update(parts)
        return [self.left[i] for i in range(len(owners))] if self.rank == 1 else []


def owners(costs: list[float], ranks: int, in_step: bool = False) -> list[int]:
    return list(deal(costs, Pair(0, {}, in_step, ranks)).owners)


def test_work_is_dealt_by_cost() -> None:
    assert owners([1, 1, 1, 1], 2) == [0, 1, 0, 1]
    assert owners([1, 2, 10, 3, 4], 2) == [1, 1, 0, 1, 1]
    assert owners([], 3) == []
    costs = [7.0, 3.0, 9.0, 1.0, 4.0, 4.0]
    load = [
        sum(c for c, r in zip(costs, owners(costs, 3), strict=True) if r == n) for n in range(3)
    ]
    assert max(load) <= 10


def test_a_slow_rank_gets_less() -> None:
    """Eight equal parts, of which the first rank would take 10 or 3 times as long."""
    pair = Pair(0, {}, count=4)
    pair.slowness = [10.0, 1.0, 1.0, 1.0]
    assert [list(deal([1.0] * 8, pair).owners).count(rank) for rank in range(4)] == [0, 3, 3, 2]
    pair.slowness = [3.0, 1.0, 1.0, 1.0]
    assert [list(deal([1.0] * 8, pair).owners).count(rank) for rank in range(4)] == [1, 3, 2, 2]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_in_step_run_equally_many_passes(ranks: int) -> None:
    for costs in ([], [1.0], [1.0, 2.0, 10.0, 3.0, 4.0], [5.0] * 7):
        dealt = [deal(costs, Pair(rank, {}, True, ranks)) for rank in range(ranks)]
        assert len({len(d.mine) + d.spare for d in dealt}) == 1
        assert sorted(i for d in dealt for i in d.mine) == list(range(len(costs)))
        assert all(d.owners[i] == rank for rank, d in enumerate(dealt) for i in d.mine)
    assert owners([1, 2, 10, 3, 4], 2, in_step=True) == [0, 1, 0, 1, 1]


def test_ranks_fill_a_tensor_together() -> None:
    parts = [torch.tensor([2, 0]), torch.tensor([1]), torch.tensor([3])]
    widths, seen = [2, 3, 1], []

    def compute(part: torch.Tensor) -> torch.Tensor:
        seen.append(part.tolist())
        width = widths[[p.tolist() for p in parts].index(part.tolist())]
        return part[:, None].double() + torch.arange(width)

    whole = torch.full((4, 3), -1.0)
    fill(whole, parts, [2, 1, 1], compute, ALONE)
    assert seen == [[2, 0], [1], [3]]
    assert whole.tolist() == [[0, 1, -1], [1, 2, 3], [2, 3, -1], [3, -1, -1]]
    seen.clear()
    left: dict[int, Values] = {}
    first, second = torch.full((4, 3), -1.0), torch.full((4, 3), -1.0)
    with pytest.raises(ValueError, match="zip"):
        fill(first, parts, [2, 1, 1], compute, Pair(0, left))
    assert seen == [[2, 0]]
    fill(second, parts, [2, 1, 1], compute, Pair(1, left))
    assert seen == [[2, 0], [1], [3]] and torch.equal(second, whole)
    seen.clear()
    fill(second, parts, [2, 1, 1], compute, Pair(1, left, in_step=True, count=2))
    assert seen == [[1], [3]]


def test_only_much_slower_workers_get_less_work() -> None:
    assert speeds.dealt([1.0, 2.9, 3.0, 12.0]) == [1.0, 1.0, 3.0, 12.0]

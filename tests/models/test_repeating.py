"""Keys and values of prompts, repeated for their responses."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from gesso.models.tokens.repeating import Repeats


def test_copies_are_added_up() -> None:
    """Tokens with one copy, with several, and without any; sums are float32 in half precision."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 40, (300,))
    repeats, grad = Repeats.of(tokens, 50), torch.randn(300, 3, 8).bfloat16()
    x = torch.randn(50, 3, 8).bfloat16().requires_grad_()
    assert torch.equal(repeats(x), x[tokens])
    repeats(x).backward(grad)
    expected = torch.zeros(50, 3, 8).index_add(0, tokens, grad.float())
    assert x.grad is not None
    torch.testing.assert_close(x.grad.float(), expected, rtol=2**-8, atol=1e-6)
    assert not x.grad[40:].any()


def test_one_graph_for_any_number_of_tokens() -> None:
    """Every micro-batch has another."""

    def loss(x: Tensor, repeats: Repeats) -> Tensor:
        return repeats(2 * x).sum()

    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(loss, dynamic=True, backend="aot_eager")
    for count, copies in ((50, 90), (61, 130), (70, 71), (33, 200)):
        tokens = torch.randint(0, count, (copies,))
        x = torch.randn(count, 2, 8, requires_grad=True)
        compiled(x, Repeats.of(tokens, count)).backward()
        found, expected = x.grad, 2 * tokens.bincount(minlength=count).float()
        assert found is not None and torch.equal(found, expected[:, None, None].expand_as(found))
    assert counters["stats"]["unique_graphs"] == 1

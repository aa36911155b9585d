"""A critic: the value of a partial response, token by token."""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from gesso import config
from gesso.devices import to_device
from gesso.models.tokens.transformer import TransformerModel
from gesso.traces.tokens import TokenTrace
from gesso.types import UserError


class Trunk(Protocol):
    def hidden(self, trace: TokenTrace) -> Tensor: ...


class Critic:
    """A linear value head on the decoder's states. `trained` and the policy share no parameters."""

    def __init__(
        self, trunk: Trunk, trained: dict[str, nn.Parameter], width: int, lr: float, seed: int
    ) -> None:
        self.trunk = trunk
        self.lr = lr
        device = next(iter(trained.values())).device
        generator = torch.Generator().manual_seed(seed)
        start = torch.randn(width, generator=generator) / (width + 1)  # as in OpenRLHF
        self.head = nn.Parameter(start.to(device))
        self.bias = nn.Parameter(torch.zeros((), device=device))
        self.trained = trained | {"value.weight": self.head, "value.bias": self.bias}

    def values(self, trace: TokenTrace) -> Tensor:
        """(n, S) float32, 0 outside the responses: computed from the state before each token, so
        that the value does not depend on the token."""
        states = self.trunk.hidden(trace).float()
        values = states @ self.head + self.bias
        return torch.where(to_device(trace.mask, values.device), values, 0.0)


class _Adapted:
    """The policy's network with the critic's adapters instead of the policy's."""

    NAME = "critic"

    def __init__(self, model: TransformerModel) -> None:
        self.model = model

    def hidden(self, trace: TokenTrace) -> Tensor:
        with self.model.policy.using_adapter(self.NAME):
            return self.model.hidden(trace)


def make(
    model: TransformerModel,
    section: config.TokenModel,
    trunk: Literal["copy", "lora"],
    lr: float,
    seed: int,
) -> Critic:
    width = model.decoder.config.hidden_size
    if trunk == "copy":
        copy = type(model)(section, seed)
        head = copy.module.get_output_embeddings().weight  # a critic predicts no tokens
        tied = head is copy.module.get_input_embeddings().weight
        trained = {n: p for n, p in copy.policy.trainable.items() if tied or p is not head}
        return Critic(copy, trained, width, lr, seed)
    if model.policy.lora is None:
        raise UserError(
            'algorithm.critic.trunk = "lora" shares the policy\'s network, which a full fine-tune '
            'changes; set model.lora.rank, or use trunk = "copy"'
        )
    if section.gradient_checkpointing:
        raise UserError(
            'algorithm.critic.trunk = "lora" does not support model.gradient_checkpointing, which '
            'would recompute activations with the policy\'s adapters; use trunk = "copy"'
        )
    trained = model.policy.add_adapter(_Adapted.NAME, seed)
    return Critic(_Adapted(model), trained, width, lr, seed)

"""What is common to all samplers of models that write, whatever engine wrote the replies."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gesso.formulas import diversity
from gesso.models.tokens.base import TokenModel
from gesso.rollout import Rollout, TokenPrompt, TokenTrace
from gesso.samplers.base import Piece
from gesso.types import Prompt, Sample


@dataclass(frozen=True)
class Reply:
    index: int  # of the sample in the call
    tokens: Tensor  # (s,)
    logp: Tensor  # (s,)
    cut: bool


@dataclass(frozen=True)
class Asked:
    """One sampling call: a reply to prompts[row[i]] from seeds[i] for every i."""

    prompts: Sequence[Prompt]
    encoded: Sequence[TokenPrompt]
    row: Sequence[int]
    seeds: Sequence[int]

    def piece(self, done: Sequence[Reply], model: TokenModel) -> Piece[TokenTrace]:
        device = model.device
        index = [reply.index for reply in done]
        lengths = torch.tensor([len(reply.tokens) for reply in done], device=device)
        tokens = pad_sequence([reply.tokens for reply in done], batch_first=True)
        trace = TokenTrace(
            self.encoded,
            row=torch.tensor([self.row[i] for i in index], device=device),
            tokens=tokens,
            mask=torch.arange(tokens.shape[1], device=device) < lengths[:, None],
            cut=torch.tensor([reply.cut for reply in done], device=device),
        )
        ids = tokens.tolist()
        texts = [model.decode(row[: len(r.tokens)]) for row, r in zip(ids, done, strict=True)]
        samples = [
            Sample(self.prompts[self.row[r.index]], None, self.seeds[r.index], text, len(r.tokens))
            for r, text in zip(done, texts, strict=True)
        ]
        logp = pad_sequence([reply.logp for reply in done], batch_first=True)
        return Piece(index, samples, trace, logp)


def encoded(model: TokenModel, prompts: Sequence[Prompt]) -> list[TokenPrompt]:
    """Pictures take milliseconds each, most of it outside of Python."""
    if not any(prompt.images for prompt in prompts):
        return [model.encode(prompt) for prompt in prompts]
    with ThreadPoolExecutor() as pool:
        return list(pool.map(model.encode, prompts))


def piece_size(batch: int) -> int:
    """Replies that a piece has at least, but for the last; the others are still being written."""
    return max(1, batch // 8)


def describe(rollout: Rollout) -> dict[str, float]:
    lengths = rollout.mask.sum(1).float()
    return {
        "diversity": diversity.distinct([s.reply for s in rollout.samples], rollout.group),
        "reply/length": float(lengths.mean()),
        "reply/longest": float(lengths.max()),
        "reply/cut": float(rollout.replies.cut.float().mean()),
        "reply/logp": float(rollout.logp.sum() / lengths.sum()),
    }

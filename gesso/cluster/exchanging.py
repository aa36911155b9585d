"""The part of a worker that exchanges samples and weights with others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from gesso.cluster.transfer import BUCKET, Parcel, Transfers
from gesso.config import Recipe
from gesso.learner.learner import Learner
from gesso.models.tokens.feature_cache import FeatureCache
from gesso.models.tokens.vision_language import VisionLanguage
from gesso.ranks import Group
from gesso.samplers.base import Piece, Sampler
from gesso.samplers.partial import Begun
from gesso.traces.flow import FlowTrace
from gesso.traces.tokens import TokenPrompt, TokenTrace
from gesso.types import Prompt, ResponseSpec, Sample, SampleSpec
from gesso.weights.history import History
from gesso.weights.publish import publish

FEATURES, PROMPT = "features of ", "prompt "  # prefixes of tensor names


@dataclass
class Request:
    """A sampling call whose parts are sampled by several workers."""

    step: int | None
    prompts: Sequence[Prompt]
    row: Sequence[int]
    seeds: Sequence[int]
    spec: SampleSpec | ResponseSpec
    begun: Begun | None = None  # responses to continue
    shared: Any = None  # what `Sampler.shared` computes once per call


class Exchanging:
    recipe: Recipe
    model: Any
    group: Group  # the ranks that train
    learner: Learner
    history: History
    sampler: Sampler
    transfers: Transfers | None  # between separate samplers and learners
    requests: dict[str, Request]
    pieces: dict[str, Piece]

    def take(self, parcels: Mapping[str, Sequence[int]]) -> dict[str, Any]:
        """Receives the pieces that separate samplers have for this rank. The driver repeats this
        task when a sampler is lost."""
        assert self.transfers is not None
        for name, values in parcels.items():
            parcel = Parcel(*values)
            if parcel.learner == self.group.rank and not self.transfers.has(parcel):
                found, about = self.transfers.receive(parcel)
                self.pieces[name] = self._received(name, found, *about)
        return {}

    def share(self, pieces: Sequence[str], owners: Sequence[int]) -> dict[str, Any]:
        """Sends these pieces, without their images, and the encoded prompts of responses to all
        ranks."""
        sent = self.group.sent
        prompts: set[tuple[str, str]] = set()  # those that this rank has sent
        left: list[list[str]] = [[] for _ in range(self.group.count)]
        for name, owner in zip(pieces, owners, strict=True):
            left[owner].append(name)
        while any(left):
            mine = self._bundle(left[self.group.rank], prompts)
            own = {f"{n}:{t}": v for n, piece in mine.items() for t, v in piece.items()}
            gathered = self.group.gather(own, [about(self.pieces[name]) for name in mine])
            for rank, (values, found) in enumerate(gathered):
                some, left[rank] = left[rank][: len(found)], left[rank][len(found) :]
                if rank != self.group.rank:
                    self._unpack(some, values, found)
        return {"sent": self.group.sent - sent}

    def _bundle(
        self, names: Sequence[str], sent: set[tuple[str, str]]
    ) -> dict[str, dict[str, Tensor]]:
        """The tensors of the first pieces, as many pieces as fit into one collective, and of their
        prompts. `sent`: tensors of prompts that are left out, by call and name."""
        found: dict[str, dict[str, Tensor]] = {}
        size = 0
        for name in names:
            piece, call = self.pieces[name], call_of(name)
            prompts = {n: t for n, t in self._prompts_of(piece).items() if (call, n) not in sent}
            tensors = tensors_of(piece) | prompts
            size += sum(tensor.nbytes for tensor in tensors.values())
            if found and size > BUCKET // self.group.count:
                break
            found[name] = tensors
            sent |= {(call, n) for n in prompts}
        return found

    def _unpack(
        self, names: Sequence[str], values: Mapping[str, Tensor], abouts: Sequence[Any]
    ) -> None:
        by_piece: dict[str, dict[str, Tensor]] = {name: {} for name in names}
        for key, tensor in values.items():
            piece, _, name = key.partition(":")
            by_piece[piece][name] = tensor
        for name, described in zip(names, abouts, strict=True):
            self.pieces[name] = self._received(name, by_piece[name], *described)

    def _prompts_of(self, piece: Piece) -> dict[str, Tensor]:
        """Encoded prompts and features of their images, which other ranks need to train."""
        trace = piece.trace
        if not isinstance(trace, TokenTrace):
            return {}
        prompts = {row: trace.prompts[row] for row in trace.row.unique().tolist()}
        values = {
            f"{PROMPT}{row}/{field}": tensor
            for row, prompt in prompts.items()
            for field, tensor in vars(prompt).items()
            if tensor is not None
        }
        if self._feature_cache is None:
            return values
        found = self._feature_cache.known(prompts.values())
        return values | {f"{FEATURES}{key}": features for key, features in found.items()}

    @property
    def _feature_cache(self) -> FeatureCache | None:
        return self.model.feature_cache if isinstance(self.model, VisionLanguage) else None

    def _received(
        self, name: str, values: dict[str, Tensor], index: list[int], texts: Sequence[Any]
    ) -> Piece:
        request = self.requests[call_of(name)]
        samples = [
            Sample(request.prompts[request.row[i]], None, request.seeds[i], text, tokens)
            for i, (text, tokens) in zip(index, texts, strict=True)
        ]
        logp = values.pop("logp")
        self._take_prompts(request, values)
        trace: Any  # of the model's family
        if isinstance(request.spec, SampleSpec):
            trace = FlowTrace(context=request.shared, **values)
        else:
            values = {name: tensor.cpu() for name, tensor in values.items()}
            logp = logp.cpu()
            trace = TokenTrace(prompts=request.shared, **values)
        return Piece(index, samples, trace, logp)

    def _take_prompts(self, request: Request, values: dict[str, Tensor]) -> None:
        """Removes what `_prompts_of` has added."""
        features, prompts = _popped(values, FEATURES), _popped(values, PROMPT)
        if self._feature_cache is not None:
            self._feature_cache.add_known(features)
        fields: dict[int, dict[str, Tensor]] = {}
        for key, tensor in prompts.items():
            row, _, field = key.partition("/")
            fields.setdefault(int(row), {})[field] = tensor.cpu()
        for number, tensors in fields.items():
            request.shared.add(number, TokenPrompt(**tensors))

    def exchange(self, version: int) -> dict[str, Any]:
        """See `History.exchange`."""
        self.learner.policy.release()
        return {"held": self.history.exchange(self.learner.policy, version)}

    def publish(self, copies: Sequence[Any], version: int, kept: Sequence[Any]) -> dict[str, Any]:
        """Publishes the weights; with separate samplers also sends them."""
        self.learner.policy.release()
        publication = publish(self.learner.policy, copies, version)
        self.history.add(publication, kept)
        self.sampler.accept(publication)
        self.sampler.weights.verify(publication)
        if self.transfers is not None:
            return self.transfers.send_weights(publication.copies).answer()
        compared = self.group.count > 1 and self.recipe.cluster.sharding != "all"
        return {"digest": publication.digest if compared else ""}

    def leave_out(self, left: Sequence[int]) -> dict[str, Any]:
        """After the loss of a sampler, weights are sent only to these samplers."""
        assert self.transfers is not None
        self.transfers.left = left
        return {}

    def accept(self, copies: Sequence[Any], version: int) -> dict[str, Any]:
        """A separate sampler receives the weights from the first learner."""
        assert self.transfers is not None
        policy = self.model.policy
        for which in copies:
            if which != "current" and which not in policy.copies:
                policy.snapshot(which)
        publication = publish(policy, copies, version)
        answer = self.transfers.receive_weights(publication.copies).answer()
        self.sampler.accept(publication)
        return answer


def call_of(name: str) -> str:
    """The call in which a piece was sampled."""
    return name.partition("/")[0]


def _popped(values: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Removes the tensors whose names have this prefix; returns them without it."""
    names = [name for name in values if name.startswith(prefix)]
    return {name.removeprefix(prefix): values.pop(name) for name in names}


def about(piece: Piece) -> list[Any]:
    return [piece.index, [(s.text, s.tokens) for s in piece.samples]]


def tensors_of(piece: Piece) -> dict[str, Tensor]:
    trace: Any = piece.trace
    values = {field.name: getattr(trace, field.name) for field in fields(trace)}
    return {n: v for n, v in values.items() if isinstance(v, Tensor)} | {"logp": piece.logp}

"""The one decoding loop, for every model that writes.

Each distinct prompt is read once, and its keys and values are copied to every sample of it. `batch`
slots hold the sequences in the making: a finished one leaves its slot and a waiting one enters.

Each sample has its own seed: the token at a place is where the distribution function of
softmax(logits / temperature) passes a uniform number drawn on the CPU for that place. So a reply
does not depend on the batch, on its slot, on its neighbours or on the device. There is no top-p and
no top-k: tokens would then come from another distribution than the one whose log-probs are
trained, and every ratio would be biased.

Temperature 0 is greedy: the likeliest token, with its log-prob at temperature 1, as `logp` of the
model has it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gesso.models.tokens.base import Read, TokenModel
from gesso.models.tokens.packing import pack
from gesso.rollout import Rollout, TokenPrompt, TokenTrace
from gesso.samplers import responses as replies
from gesso.samplers.base import Piece
from gesso.samplers.drawing import drawn, drawn_from_raw
from gesso.samplers.responses import Asked, Reply
from gesso.samplers.slots import SlotCache
from gesso.types import Prompt, ReplySpec
from gesso.weights.publish import HeldWeights, Publication

READ_AT_ONCE = 8192
"""Tokens of prompts that are read in one pass."""


class DecodingSampler:
    def __init__(self, model: TokenModel, batch: int) -> None:
        self.model = model
        self.batch = batch
        self.weights = HeldWeights(model.policy)
        self.read = 0  # prompts that went through the model

    def accept(self, publication: Publication) -> None:
        self.weights.accept(publication)

    def sample(
        self, prompts: Sequence[Prompt], row: Sequence[int], seeds: Sequence[int], spec: ReplySpec
    ) -> Iterator[Piece[TokenTrace]]:
        """One reply to prompts[row[i]] from seeds[i] for every i, in pieces as they finish."""
        with self.model.policy.folded(soon=spec.weights):
            yield from self._pieces(prompts, row, seeds, spec)

    def _pieces(
        self, prompts: Sequence[Prompt], row: Sequence[int], seeds: Sequence[int], spec: ReplySpec
    ) -> Iterator[Piece[TokenTrace]]:
        encoded = replies.encoded(self.model, prompts)
        asked = Asked(prompts, encoded, row, seeds)
        kind = _Fixed if self.model.device.type == "cuda" else _Writing
        writing = kind(self, encoded, row, seeds, spec)
        prepared = self.model.writing(spec.weights)
        while writing.unfinished:
            # Contexts are left before a piece is handed over: whoever takes it runs in none.
            with torch.no_grad(), prepared():
                done = writing.advance(replies.piece_size(self.batch))
            yield asked.piece(done, self.model)

    def describe(self, rollout: Rollout) -> dict[str, float]:
        return replies.describe(rollout)

    def close(self) -> None:
        """It holds nothing beside the model."""


class _Buffers:
    """Of every slot: what was drawn so far, and the uniform numbers it is drawn with."""

    def __init__(self, slots: int, longest: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.tokens = zeros(slots, longest)
        self.logp = zeros(slots, longest, dtype=torch.float32)
        self.uniform = zeros(slots, longest, dtype=torch.float64)
        self.count = zeros(slots)  # tokens drawn
        self.last = zeros(slots)  # the token that is fed next,
        self.position = zeros(slots)  # and its place

    def move(self, source: int, target: int) -> None:
        for buffer in (self.tokens, self.logp, self.uniform, self.count, self.last, self.position):
            buffer[target] = buffer[source]


class _Writing:
    """The replies of one sampling call, from the first waiting one to the last finished one. A step
    costs what its sequences cost: the running ones lie in the first slots, and the buffers are read
    as far as the longest of them."""

    def __init__(
        self,
        sampler: DecodingSampler,
        prompts: Sequence[TokenPrompt],
        row: Sequence[int],
        seeds: Sequence[int],
        spec: ReplySpec,
    ) -> None:
        self.sampler, self.model = sampler, sampler.model
        self.prompts, self.row, self.seeds, self.spec = prompts, row, seeds, spec
        slots = min(sampler.batch, len(seeds))
        self.waiting = deque(range(len(seeds)))
        self.free = list(range(slots))
        self.running: dict[int, int] = {}  # slot → sample
        self.finished: list[Reply] = []
        self.wanted = Counter(row)  # prompt → samples of it that still wait
        self.known: dict[int, Read] = {}  # prompts that are read and still wanted
        self.buffers = _Buffers(slots, spec.max_tokens, self.model.device)
        self.cache: SlotCache | None = None  # from the first prompt on, which tells its shape

    @property
    def unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def advance(self, at_least: int) -> list[Reply]:
        """Write on until so many replies are finished, or all."""
        while self.unfinished and len(self.finished) < at_least:
            if self.waiting and self.free:
                self._enter()
            else:
                self._step()
        done, self.finished = self.finished, []
        return done

    def _enter(self) -> None:
        """Waiting samples take the free slots; their first tokens come from their prompts."""
        n = min(len(self.waiting), len(self.free))
        samples = [self.waiting.popleft() for _ in range(n)]
        self.free.sort()
        slots, self.free = self.free[:n], self.free[n:]
        self.running |= zip(slots, samples, strict=True)
        rows = [self.row[i] for i in samples]
        self._read(list(dict.fromkeys(rows)))
        cache = self.cache = self.cache or self._room(self.known[rows[0]])
        for r in dict.fromkeys(rows):
            cache.fill([s for s, its in zip(slots, rows, strict=True) if its == r], self.known[r])
        read = [self.known[r] for r in rows]
        buffers, at = self.buffers, self._index(slots)
        uniform = torch.stack([_uniform(self.seeds[i], self.spec.max_tokens) for i in samples])
        buffers.uniform[at] = uniform.to(self.model.device)
        buffers.count[at] = 0
        buffers.position[at] = self._index([prompt.position - 1 for prompt in read])
        self._forget(rows)
        self._begin(slots, torch.stack([prompt.state for prompt in read]))

    def _begin(self, slots: list[int], states: Tensor) -> None:
        """The first tokens of replies, from the last states of their prompts."""
        self._draw(slots, states)

    def _read(self, rows: list[int]) -> None:
        new = [r for r in rows if r not in self.known]
        for part in pack([len(self.prompts[r]) for r in new], READ_AT_ONCE):
            some = [new[i] for i in part]
            read = self.model.read([self.prompts[r] for r in some])
            self.known |= zip(some, read, strict=True)
            self.sampler.read += len(some)

    def _room(self, like: Read) -> SlotCache:
        longest = max(map(len, self.prompts)) + self.spec.max_tokens
        capacity = -(-longest // 64) * 64  # a width that CUDA's kernels like
        return SlotCache(like, len(self.buffers.count), capacity)

    def _forget(self, rows: list[int]) -> None:
        """Prompts all of whose samples have entered."""
        self.wanted.subtract(rows)
        self.known = {r: read for r, read in self.known.items() if self.wanted[r]}

    def _step(self) -> None:
        """One token more for every running sequence."""
        assert self.cache is not None
        place = self.cache.place
        self._close_ranks()
        place.running = len(self.running)
        place.reach = int(place.lengths[: place.running].max()) + 1
        states = self._forward()
        slots = sorted(self.running)
        at = self._index(slots)
        place.lengths[at] += 1
        self._draw(slots, states[at])

    def _close_ranks(self) -> None:
        """With nobody left to take a free slot, the sequence in the last one moves into it."""
        assert self.cache is not None
        n = len(self.running)
        holes = [slot for slot in sorted(self.free) if slot < n]
        for hole, last in zip(holes, sorted(self.running, reverse=True), strict=False):
            self.cache.move(last, hole)
            self.buffers.move(last, hole)
            self.running[hole] = self.running.pop(last)
            self.free[self.free.index(hole)] = last

    def _forward(self) -> Tensor:
        assert self.cache is not None
        place, n = self.cache.place, self.cache.place.running
        last, position = self.buffers.last[:n], self.buffers.position[:n]
        return self.model.step(last, position, place.mask, self.cache)

    def _draw(self, slots: list[int], states: Tensor) -> None:
        """The next token of those slots; finished replies leave them."""
        buffers, spec = self.buffers, self.spec
        at = self._index(slots)
        count = buffers.count[at]
        logits = self.model.logits(states, spec.temperature)
        tokens, logp = drawn(logits, buffers.uniform[at, count], spec.temperature == 0)
        buffers.logp[at, count] = logp
        buffers.tokens[at, count] = tokens
        buffers.last[at] = tokens
        buffers.position[at] += 1
        buffers.count[at] = count + 1
        ids, lengths = torch.stack([tokens, count + 1]).tolist()
        for slot, token, length in zip(slots, ids, lengths, strict=True):
            if token in self.model.end or length == spec.max_tokens:
                self._leave(slot, length, cut=token not in self.model.end)

    def _leave(self, slot: int, length: int, cut: bool) -> None:
        tokens, logp = self.buffers.tokens[slot, :length], self.buffers.logp[slot, :length]
        self.finished.append(Reply(self.running.pop(slot), tokens.clone(), logp.clone(), cut))
        self.free.append(slot)

    def _index(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, device=self.model.device)


class _Fixed(_Writing):
    """The same on CUDA, where every turn has the same shape, whatever runs: it is recorded once and
    replayed. A turn draws a token from every slot's state and feeds it, so it begins with prompts
    as it goes on with replies. What a slot without a reply does is of no effect. The host looks one
    turn behind, so that the device never waits for it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        slots, device = len(self.buffers.count), self.model.device
        self.idle = torch.ones(slots, dtype=torch.bool, device=device)
        self.end = torch.tensor(sorted(self.model.end), device=device)
        self.state = torch.empty(0)  # (slots, D) of the last token of each
        self.told = torch.zeros(2, slots, dtype=torch.long, device=device)  # lengths of finished
        self.turn: Callable[[], None] = self._turn  # replies, else 0; and tokens last drawn
        self.glance = _Glance(self.told)

    def _room(self, like: Read) -> SlotCache:
        self.cache = super()._room(like)
        self.state = like.state.new_zeros(len(self.idle), *like.state.shape)
        if self.model.recordable:
            self.turn = recorded(self._turn)  # while all slots are idle, and nothing changes
        return self.cache

    def _begin(self, slots: list[int], states: Tensor) -> None:
        at = self._index(slots)
        self.state[at] = states.to(self.state.dtype)
        self.idle[at] = False
        self.glance.forget()

    def _step(self) -> None:
        self.turn()
        lengths, tokens = self.glance() or ([], [])
        for slot in sorted(self.running) if lengths else ():
            length, token = lengths[slot], tokens[slot]
            if length:
                self._leave(slot, length, cut=token not in self.model.end)

    def _turn(self) -> None:
        assert self.cache is not None
        buffers, spec, place = self.buffers, self.spec, self.cache.place
        raw = self.model.raw_logits(self.state)
        at = buffers.count.clamp(max=spec.max_tokens - 1)[:, None]
        uniform = buffers.uniform.gather(1, at)[:, 0]
        draw = drawn_from_raw(raw.device.type)
        tokens, logp = draw(raw, uniform, spec.temperature, self.model.allowed)
        runs = ~self.idle
        for buffer, new in ((buffers.tokens, tokens), (buffers.logp, logp)):
            buffer.scatter_(1, at, torch.where(runs[:, None], new[:, None], buffer.gather(1, at)))
        buffers.last.copy_(torch.where(runs, tokens, buffers.last))
        buffers.position += runs
        buffers.count += runs
        ends = torch.isin(tokens, self.end) | (buffers.count == spec.max_tokens)
        self.idle |= ends
        self.told.copy_(torch.stack([torch.where(self.idle, buffers.count, 0), buffers.last]))
        self.state.copy_(self._forward())
        place.lengths += ~self.idle


class _Glance:
    """What the turn before the last one started told."""

    def __init__(self, told: Tensor) -> None:
        self.told = told
        self.host = [torch.empty_like(told, device="cpu", pin_memory=told.is_cuda) for _ in "ab"]
        self.events = [torch.cuda.Event() for _ in "ab"] if told.is_cuda else []
        self.turns = 0

    def forget(self) -> None:
        """What is on its way is of replies whose slots others have entered."""
        self.turns = 0

    def __call__(self) -> list[list[int]] | None:
        now, before = self.turns % 2, (self.turns + 1) % 2
        self.host[now].copy_(self.told, non_blocking=True)
        if self.events:
            self.events[now].record()
        self.turns += 1
        if self.turns < 2:
            return None
        if self.events:
            self.events[before].synchronize()
        return self.host[before].tolist()


def _uniform(seed: int, length: int) -> Tensor:
    """A number a place of the reply, on the CPU whatever the device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(length, generator=generator, dtype=torch.float64)


def recorded(turn: Callable[[], None]) -> Callable[[], None]:
    """A turn whose inputs and outputs stay in place, as a CUDA graph: its hundreds of small kernels
    cost no launches of their own. It is taken three times on the way."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # warm up where nothing else runs
        for _ in range(2):
            turn()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        turn()
    return graph.replay

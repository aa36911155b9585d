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

import torch
from torch import Tensor

from gesso.models.tokens.base import Read, TokenModel
from gesso.models.tokens.packing import pack
from gesso.samplers import replies
from gesso.samplers.base import Piece
from gesso.samplers.replies import Asked, Reply
from gesso.samplers.slots import SlotCache
from gesso.types import Prompt, ReplySpec, Rollout, TokenPrompt, TokenTrace, Weights

READ_AT_ONCE = 8192
"""Tokens of prompts that are read in one pass."""


class DecodingSampler:
    def __init__(self, model: TokenModel, batch: int) -> None:
        self.model = model
        self.batch = batch
        self.version = 0
        self.read = 0  # prompts that went through the model

    def load(self, weights: Weights, version: int) -> None:
        """Take new weights. Shared with the learner's module, they are there already."""
        self.model.policy.load(weights)
        self.version = version

    def sample(
        self, prompts: Sequence[Prompt], row: Sequence[int], seeds: Sequence[int], spec: ReplySpec
    ) -> Iterator[Piece[TokenTrace]]:
        """One reply to prompts[row[i]] from seeds[i] for every i, in pieces as they finish."""
        encoded = [self.model.encode(prompt) for prompt in prompts]
        asked = Asked(prompts, encoded, row, seeds)
        writing = _Writing(self, encoded, row, seeds, spec)
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
    """The replies of one sampling call, from the first waiting one to the last finished one.

    On a CPU a step costs what its sequences cost: the running ones lie in the first slots, and the
    buffers are read as far as the longest of them. On CUDA every step has the same shape, whatever
    runs, so that it can be recorded once and replayed.
    """

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
        self.fixed = self.model.device.type == "cuda"
        self.waiting = deque(range(len(seeds)))
        self.free = list(range(slots))
        self.running: dict[int, int] = {}  # slot → sample
        self.finished: list[Reply] = []
        self.wanted = Counter(row)  # prompt → samples of it that still wait
        self.known: dict[int, Read] = {}  # prompts that are read and still wanted
        self.buffers = _Buffers(slots, spec.max_tokens, self.model.device)
        self.cache: SlotCache | None = None  # from the first prompt on, which tells its shape
        self.graph: _Graph | None = None

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
        cache = self._read(list(dict.fromkeys(rows)))
        for r in dict.fromkeys(rows):
            cache.fill([s for s, its in zip(slots, rows, strict=True) if its == r], self.known[r])
        read = [self.known[r] for r in rows]
        buffers, at = self.buffers, self._index(slots)
        uniform = torch.stack([_uniform(self.seeds[i], self.spec.max_tokens) for i in samples])
        buffers.uniform[at] = uniform.to(self.model.device)
        buffers.count[at] = 0
        buffers.position[at] = self._index([prompt.position - 1 for prompt in read])
        self._forget(rows)
        self._draw(slots, torch.stack([prompt.state for prompt in read]))

    def _read(self, rows: list[int]) -> SlotCache:
        new = [r for r in rows if r not in self.known]
        for part in pack([len(self.prompts[r]) for r in new], READ_AT_ONCE):
            some = [new[i] for i in part]
            read = self.model.read([self.prompts[r] for r in some])
            self.known |= zip(some, read, strict=True)
            self.sampler.read += len(some)
        if self.cache is None:
            longest = max(map(len, self.prompts)) + self.spec.max_tokens
            capacity = -(-longest // 64) * 64  # a width that CUDA's kernels like
            self.cache = SlotCache(self.known[rows[0]], len(self.buffers.count), capacity)
        return self.cache

    def _forget(self, rows: list[int]) -> None:
        """Prompts all of whose samples have entered."""
        self.wanted.subtract(rows)
        self.known = {r: read for r, read in self.known.items() if self.wanted[r]}

    def _step(self) -> None:
        """One token more for every running sequence."""
        assert self.cache is not None
        place = self.cache.place
        if self.fixed and self.model.recordable:
            self.graph = self.graph or _Graph(self._forward)
            states = self.graph()
        elif self.fixed:
            states = self._forward()
        else:
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
        if spec.temperature == 0:
            tokens = logits.argmax(-1)
        else:
            tokens = inverse_cdf(logits, buffers.uniform[at, count])
        buffers.logp[at, count] = logits.gather(-1, tokens[:, None])[:, 0] - logits.logsumexp(-1)
        buffers.tokens[at, count] = tokens
        buffers.last[at] = tokens
        buffers.position[at] += 1
        buffers.count[at] = count + 1
        drawn = torch.stack([tokens, count + 1]).tolist()
        for slot, token, length in zip(slots, *drawn, strict=True):
            if token in self.model.end or length == spec.max_tokens:
                self._leave(slot, length, cut=token not in self.model.end)

    def _leave(self, slot: int, length: int, cut: bool) -> None:
        tokens, logp = self.buffers.tokens[slot, :length], self.buffers.logp[slot, :length]
        self.finished.append(Reply(self.running.pop(slot), tokens.clone(), logp.clone(), cut))
        self.free.append(slot)

    def _index(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, device=self.model.device)


def inverse_cdf(logits: Tensor, uniform: Tensor) -> Tensor:
    """(n, V) logits, (n,) float64 in [0, 1) → (n,) ids: the first whose cumulated probability
    exceeds the uniform number. An id of probability 0 is never it."""
    cumulated = logits.softmax(-1).double().cumsum(-1)
    below = uniform[:, None] * cumulated[:, -1:]
    found = torch.searchsorted(cumulated, below, right=True)[:, 0]
    return found.clamp(max=logits.shape[1] - 1)  # logits that are no numbers find nothing


def _uniform(seed: int, length: int) -> Tensor:
    """A number a place of the reply, on the CPU whatever the device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(length, generator=generator, dtype=torch.float64)


class _Graph:
    """A step whose inputs and outputs stay in place, recorded as a CUDA graph and replayed: the
    hundreds of small kernels of a step cost no launches of their own."""

    def __init__(self, step: Callable[[], Tensor]) -> None:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # warm up where nothing else runs; a step changes nothing
            for _ in range(2):  # that the next does not write again
                step()
        torch.cuda.current_stream().wait_stream(aside)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.states = step()

    def __call__(self) -> Tensor:
        self.graph.replay()
        return self.states

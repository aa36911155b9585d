"""The decoding loop of all language models.

Each distinct prompt is prefilled once, and its keys and values are copied to all of its samples.
`batch` slots contain the running sequences. On a GPU, where every slot is always computed, a
waiting sequence takes the slot of a finished one; on a CPU the batches of a call follow each other.

Each sample has a seed: every token is sampled by inverting the cumulative distribution of
softmax(logits / temperature) at a uniform number, drawn on the CPU for its position. So a response
depends on the batch, the slot, the other samples and the device only by rounding. There is no top-p
and no top-k: tokens would come from a different distribution than the one whose log-probs are
trained, and every ratio would be biased.

Temperature 0 is greedy: the most likely token, with its log-prob at temperature 1, as in the
model's `logp`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gesso.models.tokens.base import PrefilledPrompt, TokenModel
from gesso.models.tokens.packing import pack
from gesso.rollout import Rollout
from gesso.samplers import responses
from gesso.samplers.base import Piece, parts
from gesso.samplers.buffers import Buffers
from gesso.samplers.next_token import add_next_tokens, sample_tokens
from gesso.samplers.partial import Begun
from gesso.samplers.responses import EncodedPrompts, Response, ResponseRequest
from gesso.samplers.slots import SlotCache
from gesso.traces.tokens import TokenPrompt, TokenTrace
from gesso.types import Prompt, ResponseSpec, Which
from gesso.weights.publish import HeldWeights, Publication

PREFILL_TOKENS = 8192
"""Maximum number of prompt tokens in one prefill pass."""


class DecodingSampler:
    def __init__(self, model: TokenModel, batch: int) -> None:
        self.model = model
        self.batch = batch
        self.weights = HeldWeights(model.policy)
        self.prefilled_prompts = 0  # counted over all calls

    @property
    def continuous(self) -> bool:
        """Whether waiting sequences take the slots of finished ones."""
        return self.model.device.type == "cuda"

    def accept(self, publication: Publication) -> None:
        self.weights.accept(publication)

    def prepare(self, which: Which) -> None:
        """Passes differ in number between ranks, so that none can gather weights."""
        self.model.policy.gather(which)

    def rest(self) -> None:
        """The learner releases gathered weights itself."""

    def shared(self, prompts: Sequence[Prompt], spec: ResponseSpec) -> EncodedPrompts:
        return EncodedPrompts(self.model, prompts)

    def sample(
        self,
        prompts: Sequence[Prompt],
        row: Sequence[int],
        seeds: Sequence[int],
        spec: ResponseSpec,
        shared: EncodedPrompts | None = None,
        only: range | None = None,
        begun: Begun | None = None,
    ) -> Iterator[Piece[TokenTrace]]:
        """One response to prompts[row[i]] from seeds[i] for every i, in pieces as they finish.
        `begun`: their tokens so far (`partial.py`)."""
        encoded = shared or self.shared(prompts, spec)
        cut = [range(len(seeds))] if self.continuous else parts(row, self.batch, spec)
        with self.model.policy.folded(soon=spec.weights):
            for part in [only] if only else cut:
                encoded.encode(row[i] for i in part)
                request = ResponseRequest(prompts, encoded, row, seeds, part, begun)
                yield from self._pieces(request, spec)

    def _pieces(self, request: ResponseRequest, spec: ResponseSpec) -> Iterator[Piece[TokenTrace]]:
        kind = _FixedShapeDecoding if self.model.device.type == "cuda" else _Decoding
        rows, seeds = request.rows_and_seeds
        number = {row: i for i, row in enumerate(dict.fromkeys(rows))}
        encoded = [request.encoded[row] for row in number]
        rows = [number[row] for row in rows]
        decoding = kind(self, encoded, rows, seeds, spec, request.begun_here)
        prepared = self.model.generating(spec.weights)
        while decoding.unfinished or decoding.finished:
            # Both contexts end before the piece is yielded: they must not apply to the caller.
            with torch.no_grad(), prepared():
                finished = decoding.advance(responses.piece_size(self.batch))
            yield request.piece(finished, self.model)

    def describe(self, rollout: Rollout) -> dict[str, float]:
        return responses.describe(rollout)

    def close(self) -> None:
        """Nothing to release."""


class _Decoding:
    """All responses of one sampling call. The cost of a step depends only on the running sequences:
    they occupy the first slots, and the cache is read up to the longest of them."""

    def __init__(
        self,
        sampler: DecodingSampler,
        prompts: Sequence[TokenPrompt],
        row: Sequence[int],
        seeds: Sequence[int],
        spec: ResponseSpec,
        begun: Begun | None = None,
    ) -> None:
        self.sampler, self.model = sampler, sampler.model
        self.prompts, self.row, self.seeds, self.spec = list(prompts), list(row), seeds, spec
        self.begun = begun
        self.longest = max(map(len, prompts)) + spec.max_tokens
        slots = min(sampler.batch, len(seeds))
        self.waiting = deque(range(len(seeds)))
        self.free = list(range(slots))
        self.running: dict[int, int] = {}  # slot → sample
        self.finished: list[Response] = []
        if begun is not None:
            self._resume(begun)
        self.pending = Counter(self.row[i] for i in self.waiting)  # prompt → its waiting samples
        self.prefilled: dict[int, PrefilledPrompt] = {}  # prompts with waiting samples
        self.buffers = Buffers(slots, spec.max_tokens, self.model.device, self.model.end)
        self.cache: SlotCache | None = None  # created with the first prompt, which gives the shape

    def _resume(self, begun: Begun) -> None:
        """The prompt of a begun response includes its tokens so far."""
        for i, so_far in enumerate(begun.responses):
            if so_far.done:
                cut = int(so_far.tokens[-1]) not in self.model.end
                tokens, logp = (t.to(self.model.device) for t in so_far.tensors[:2])
                self.finished.append(Response(i, tokens, logp, cut, True, so_far.versions))
                self.waiting.remove(i)
            elif len(so_far.tokens):
                prompt = self.prompts[self.row[i]]
                self.row[i] = len(self.prompts)
                self.prompts.append(prompt.followed_by(so_far.tokens))

    @property
    def unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def advance(self, at_least: int) -> list[Response]:
        """Decodes until `at_least` responses are finished, or all."""
        while self.unfinished and len(self.finished) < at_least:
            if self.waiting and self.free:
                self._enter()
            else:
                self._step()
        finished, self.finished = self.finished, []
        return finished

    def _enter(self) -> None:
        """Assigns free slots to waiting samples; their prompts give the first tokens."""
        n = min(len(self.waiting), len(self.free))
        samples = [self.waiting.popleft() for _ in range(n)]
        self.free.sort()
        slots, self.free = self.free[:n], self.free[n:]
        self.running |= zip(slots, samples, strict=True)
        rows = [self.row[i] for i in samples]
        self._prefill(list(dict.fromkeys(rows)))
        cache = self.cache = self.cache or self._new_cache(self.prefilled[rows[0]])
        for r in dict.fromkeys(rows):
            same = [slot for slot, row in zip(slots, rows, strict=True) if row == r]
            cache.fill(same, self.prefilled[r])
        prompts = [self.prefilled[r] for r in rows]
        buffers, at = self.buffers, self._index(slots)
        uniform = torch.stack([_uniform(self.seeds[i], self.spec.max_tokens) for i in samples])
        buffers.uniform[at] = uniform.to(self.model.device)
        buffers.count[at] = 0
        buffers.limit[at] = self.spec.max_tokens
        if self.begun is not None:
            self._restore(slots, samples, self.begun)
        buffers.position[at] = self._index([prompt.position - 1 for prompt in prompts])
        self._release(rows)
        self._begin(slots, torch.stack([prompt.state for prompt in prompts]))

    def _restore(self, slots: list[int], samples: list[int], begun: Begun) -> None:
        """The tokens that begun responses already have."""
        for slot, i in zip(slots, samples, strict=True):
            tokens, logp, _ = begun.responses[i].tensors
            count = len(tokens)
            self.buffers.tokens[slot, :count] = tokens.to(self.model.device)
            self.buffers.logp[slot, :count] = logp.to(self.model.device)
            self.buffers.count[slot] = count
            self.buffers.limit[slot] = min(count + begun.limit, self.spec.max_tokens)

    def _begin(self, slots: list[int], states: Tensor) -> None:
        """Samples the first tokens of responses from the last states of their prompts."""
        self._draw(slots, states)

    def _prefill(self, rows: list[int]) -> None:
        new = [r for r in rows if r not in self.prefilled]
        for part in pack([len(self.prompts[r]) for r in new], PREFILL_TOKENS):
            some = [new[i] for i in part]
            prefilled = self.model.prefill([self.prompts[r] for r in some])
            self.prefilled |= zip(some, prefilled, strict=True)
            self.sampler.prefilled_prompts += len(some)

    def _new_cache(self, like: PrefilledPrompt) -> SlotCache:
        capacity = -(-self.longest // 64) * 64  # a multiple that CUDA kernels prefer
        return SlotCache(like, len(self.buffers.count), capacity)

    def _release(self, rows: list[int]) -> None:
        """Drops prompts that no waiting sample needs."""
        self.pending.subtract(rows)
        self.prefilled = {r: prompt for r, prompt in self.prefilled.items() if self.pending[r]}

    def _step(self) -> None:
        """Samples one token for every running sequence."""
        assert self.cache is not None
        place = self.cache.place
        self._compact()
        place.running = len(self.running)
        place.reach = int(place.lengths[: place.running].max()) + 1
        states = self._forward()
        slots = sorted(self.running)
        at = self._index(slots)
        place.lengths[at] += 1
        self._draw(slots, states[at])

    def _compact(self) -> None:
        """Moves sequences of the last slots into free ones that no waiting sample will take."""
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
        """Samples the next token of these slots; finished responses free them."""
        buffers, spec = self.buffers, self.spec
        at = self._index(slots)
        count = buffers.count[at]
        logits = self.model.logits(states, spec.temperature)
        tokens, logp = sample_tokens(logits, buffers.uniform[at, count], spec.temperature == 0)
        buffers.logp[at, count] = logp
        buffers.tokens[at, count] = tokens
        buffers.last[at] = tokens
        buffers.position[at] += 1
        buffers.count[at] = count + 1
        ids, lengths, limits = torch.stack([tokens, count + 1, buffers.limit[at]]).tolist()
        for slot, token, length, limit in zip(slots, ids, lengths, limits, strict=True):
            if token in self.model.end or length == limit:
                self._leave(slot, length, cut=token not in self.model.end)

    def _leave(self, slot: int, length: int, cut: bool) -> None:
        tokens, logp = self.buffers.tokens[slot, :length], self.buffers.logp[slot, :length]
        i = self.running.pop(slot)
        versions = None
        if self.begun is not None:
            versions = self.begun.responses[i].versions
            more = versions.new_full((length - len(versions),), self.sampler.weights.version)
            versions = torch.cat([versions, more])
        done = not cut or length == self.spec.max_tokens
        self.finished.append(Response(i, tokens.clone(), logp.clone(), cut, done, versions))
        self.free.append(slot)

    def _index(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, device=self.model.device)


class _FixedShapeDecoding(_Decoding):
    """The same on CUDA, where every turn has the same shape, so that it is captured once as a CUDA
    graph and replayed. A turn samples a token from the state of every slot and feeds it back, so
    prompts and responses are handled in the same way. Results of idle slots are ignored. The host
    reads the results of the previous turn, so that the device never waits for it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.state = torch.empty(0)  # (slots, D) of the last token of each
        self.turn: Callable[[], None] = self._turn
        self.readback = _Readback(self.buffers.report)

    def _new_cache(self, like: PrefilledPrompt) -> SlotCache:
        self.cache = super()._new_cache(like)
        self.state = like.state.new_zeros(len(self.buffers.runs), *like.state.shape)
        if self.model.recordable:
            self.turn = recorded(self._turn)  # all slots are idle, so no buffer changes
        return self.cache

    def _begin(self, slots: list[int], states: Tensor) -> None:
        at = self._index(slots)
        self.state[at] = states.to(self.state.dtype)
        self.buffers.runs[at] = True
        self.readback.discard()

    def _step(self) -> None:
        self.turn()
        lengths, tokens = self.readback() or ([], [])
        for slot in sorted(self.running) if lengths else ():
            length, token = lengths[slot], tokens[slot]
            if length:
                self._leave(slot, length, cut=token not in self.model.end)

    def _turn(self) -> None:
        assert self.cache is not None
        raw = self.model.raw_logits(self.state)
        add_next_tokens(raw, self.spec.temperature, self.model.allowed, self.buffers)
        self.state.copy_(self._forward())
        self.cache.place.lengths += self.buffers.runs


class _Readback:
    """Copies each turn's report to the host and returns the report of the previous turn."""

    def __init__(self, report: Tensor) -> None:
        self.report = report
        on_gpu = report.is_cuda
        self.host = [torch.empty_like(report, device="cpu", pin_memory=on_gpu) for _ in "ab"]
        self.events = [torch.cuda.Event() for _ in "ab"] if on_gpu else []
        self.turns = 0

    def discard(self) -> None:
        """Drops the pending copy: other samples have taken the slots that it describes."""
        self.turns = 0

    def __call__(self) -> list[list[int]] | None:
        now, before = self.turns % 2, (self.turns + 1) % 2
        self.host[now].copy_(self.report, non_blocking=True)
        if self.events:
            self.events[now].record()
        self.turns += 1
        if self.turns < 2:
            return None
        if self.events:
            self.events[before].synchronize()
        return self.host[before].tolist()


def _uniform(seed: int, length: int) -> Tensor:
    """One number per position of the response, always drawn on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(length, generator=generator, dtype=torch.float64)


def recorded(turn: Callable[[], None]) -> Callable[[], None]:
    """Captures the turn as a CUDA graph, which launches its hundreds of small kernels at once.
    Inputs and outputs must keep their addresses. The turn runs three times in here."""
    warmup = torch.cuda.Stream()
    warmup.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warmup):
        for _ in range(2):
            turn()
    torch.cuda.current_stream().wait_stream(warmup)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        turn()
    return graph.replay

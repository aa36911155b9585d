"""A decoder of transformers as a language model: precision, the packed forward pass, log-probs and
saving, shared by all models. `causal.py` and `vision_language.py` contain the differences.

The decoder receives embeddings and positions; its forward is unchanged. Shape legend in `base.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gesso import config
from gesso.devices import to_device
from gesso.models.adapter_checks import AdapterFile
from gesso.models.located import TRANSFORMER, locate
from gesso.models.repeatable import kernel_options, settle_attention
from gesso.models.tokens import head, loading, saving
from gesso.models.tokens.attention import segments_of
from gesso.models.tokens.base import PrefilledPrompt, ResponseLogp
from gesso.models.tokens.given_responses import response_ids
from gesso.models.tokens.recomputing import recomputing
from gesso.models.tokens.sequences import Sequences
from gesso.models.tokens.stepping import Stepper, fits
from gesso.quiet import quiet
from gesso.traces.tokens import TokenPrompt, TokenTrace
from gesso.types import Prompt, UserError, Which
from gesso.weights.folding_rule import folds_lora
from gesso.weights.layout import Sharding
from gesso.weights.merge import SHARD
from gesso.weights.policy import Policy

LARGE = 500_000_000
"""Number of parameters from which compiling the layers for updates, which takes a minute, is
worthwhile."""
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Names of all linear layers of a decoder layer in transformers."""


class TransformerModel(ABC):
    """Base class of the models in this folder; all networks are those of transformers."""

    kinds: ClassVar[Mapping[str, str]]  # model types of transformers, and their display names
    auto: ClassVar[str]  # the Auto class that loads them
    other: ClassVar[str]  # model.name for model types that this class does not load

    def __init__(self, settings: config.TokenModel, seed: int = 0, sharded: bool = False) -> None:
        self.device = config.pick_device(settings.device, "model.device")
        self.dtype: torch.dtype = getattr(torch, settings.dtype)
        self.max_prompt = settings.max_prompt
        self.quantized = settings.quantize is not None
        self.source = locate(settings, TRANSFORMER).source
        self.module = loading.load(self, settings)
        if not self.quantized:
            loading.move(self.module, self.decoder, self.device, sharded)
        settle_attention(self.device)  # for a trained vision tower
        self.strict = self.device.type == "cuda"
        self.tokenizer = loading.tokenizer(self.source, settings.path)
        self.template = self._template(settings)
        whole = settings.lora is None
        self._autocast = whole and self.dtype != torch.float32
        self._autocasting: Callable[[], AbstractContextManager] = nullcontext
        if self.device.type != "meta":  # where torch has no autocast
            self._autocasting = partial(
                torch.autocast, self.device.type, self.dtype, cache_enabled=not sharded
            )
        targets, frozen = self._trained(settings)
        folds = folds_lora(settings, self.device.type) and not sharded
        self.policy = Policy(self.module, settings.lora, targets, seed, frozen, folds)
        if settings.lora is not None and settings.lora.path is not None:
            loading.load_adapter(self.policy, settings.lora.path)
        self.module.eval()  # adapters, too
        self._stepper: Stepper | None = None  # while generating
        self._half_head: Tensor | None = None  # the same, if head and embedding are tied
        self._recomputing: Callable[[], AbstractContextManager] = nullcontext
        if settings.gradient_checkpointing:
            self._recomputing = recomputing(self.module)
        large = sum(p.numel() for p in self.decoder.parameters()) >= LARGE
        self.compiled = self._pays(settings.compile, bool(settings.compile) or large)
        if self.compiled:
            for layer in self.decoder.layers:  # they share the compiled code of the first layer
                layer.compile(dynamic=True, options=kernel_options())
        self.end = loading.end_ids(self.module, self.tokenizer)
        self.max_positions: int | None = loading.max_positions(self.decoder.config)
        self.suppressed = torch.tensor(sorted(self.suppressed_ids()), dtype=torch.long).to(
            self.device
        )

    @property
    def sharding(self) -> Sharding:
        """The decoder's layers. Embedding, head and vision tower are called outside of the decoder
        and stay whole."""
        layers = list(self.decoder.layers)
        divided = {p for layer in layers for p in layer.parameters()}
        others = [p for p in self.module.parameters() if p not in divided]
        return Sharding(self.decoder, layers, others)

    @property
    def suppressed(self) -> Tensor:
        return self._suppressed

    @suppressed.setter
    def suppressed(self, ids: Tensor) -> None:
        self._suppressed = ids
        allowed = torch.ones(self._head.weight.shape[0], dtype=torch.bool, device=self.device)
        self.allowed = allowed.index_fill(0, ids, False)  # (V,)

    # Differences between text-only and vision-language models

    @property
    @abstractmethod
    def decoder(self) -> Any:
        """The part of the module from embeddings to hidden states."""

    @abstractmethod
    def encode(self, prompt: Prompt) -> TokenPrompt: ...

    @abstractmethod
    def _template(self, settings: config.TokenModel) -> str: ...

    @abstractmethod
    def _trained(self, settings: config.TokenModel) -> tuple[list[str], str]:
        """The target modules of LoRA, and the submodule that is never trained ("": none)."""

    @abstractmethod
    def _positions(self, prompt: TokenPrompt) -> Tensor:
        """(rows, L) on the CPU: the positions of a prompt's tokens for the decoder."""

    @abstractmethod
    def _embed(self, sequences: Sequences) -> dict[str, Any]:
        """The decoder's inputs: `inputs_embeds` (1, T, D), and others for images."""

    @property
    def tower(self) -> nn.Module | None:
        """The vision tower, if there is one."""
        return None

    @property
    def feature_cache_limit(self) -> int:
        """Maximum number of bytes of image features cached in host memory."""
        return 0

    def blank(self, length: int) -> TokenPrompt:
        """A prompt of `length` tokens without content, for estimates."""
        ids = torch.zeros(length, dtype=torch.long)
        return TokenPrompt(ids, torch.zeros_like(ids))

    def suppressed_ids(self) -> set[int]:
        """Ids without a token: checkpoints pad the embedding to a larger number of rows."""
        return set(range(len(self.tokenizer), self._head.weight.shape[0]))

    # Text

    def length(self, prompt: Prompt) -> int:
        return len(self.encode(prompt))

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(list(tokens), skip_special_tokens=True)

    def _messages(self, prompt: Prompt) -> list[dict[str, Any]]:
        """The conversation that a response continues, as the chat template takes it."""
        messages = prompt.messages or ({"role": "user", "content": prompt.text},)
        return [dict(message) for message in messages]

    def encode_response(self, prompt: Prompt, text: str) -> Tensor:
        before, where = self._messages(prompt), prompt.where
        whole = self._chat([*before, {"role": "assistant", "content": text}], where, complete=True)
        never = self.suppressed.tolist()
        start = self._chat(before, where)
        return response_ids(self.tokenizer, start, whole, self.end, never, where)

    def _chat(
        self, messages: Sequence[Mapping[str, Any]], where: str, complete: bool = False
    ) -> str:
        """`complete`: the last message is the response, otherwise it is about to be written."""
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(
                list(messages),
                chat_template=self.template,
                tokenize=False,
                add_generation_prompt=not complete,
            )
        except TemplateError as error:
            raise UserError(
                f"{where}: the model's chat template rejects this conversation: {error}"
            ) from error

    # Passes

    def precision(self) -> AbstractContextManager:
        """A full fine-tune in half precision runs its float32 weights under autocast. With LoRA the
        frozen weights are already in half precision."""
        return self._autocasting() if self._autocast else nullcontext()

    def use_autocast(self, autocasting: Callable[[], AbstractContextManager]) -> None:
        """Replaces torch.autocast in `precision`."""
        self._autocasting = autocasting

    @property
    def recordable(self) -> bool:
        """False for 4-bit weights, whose kernels were not tested in a CUDA graph."""
        return self.device.type == "cuda" and not self.quantized

    @property
    def runs_in_half(self) -> bool:
        """Float32 weights under autocast: a full fine-tune in half precision."""
        return self._autocast

    def _pays(self, setting: bool | None, possible: bool) -> bool:
        """The recipe's setting; by default true on CUDA in half precision."""
        fast = self.device.type == "cuda" and self.dtype != torch.float32
        possible = possible and not self.quantized and self.device.type != "meta"
        return possible and (fast if setting is None else setting)

    @property
    def uses_stepper(self) -> bool:
        """Whether `stepping.py` replaces transformers' layers during generation: on a CPU, and on
        CUDA in half precision, if all adapters are folded."""
        all_folded = self.policy.folds == (self.policy.lora is not None)
        return self._pays(self.device.type == "cpu" or None, all_folded) and fits(self.decoder)

    def generating(self, weights: Which) -> Callable[[], AbstractContextManager]:
        """Autocast rounds float32 weights to half precision in every pass; here those of linear
        layers are rounded once per sampling call."""
        with self.policy.using(weights):
            rounded = {p: p.data.to(self.dtype) for p in self._rounded_by_autocast()}
            stepper = None
            if self.uses_stepper:
                stepper = Stepper(self.decoder, self.dtype, self.policy.folding)
            tied = self._head.weight is self.module.get_input_embeddings().weight
            output = self._head.weight.data.to(self.dtype) if tied and self._autocast else None

        @contextmanager
        def prepared() -> Iterator[None]:
            with self.policy.using(weights), self.precision():
                whole = {p: p.data for p in rounded}
                try:
                    for p, half in rounded.items():
                        p.data = half
                    self._stepper, self._half_head = stepper, output
                    yield
                finally:
                    self._stepper = self._half_head = None
                    for p, data in whole.items():
                        p.data = data

        return prepared

    def _rounded_by_autocast(self) -> list[nn.Parameter]:
        """Weights of linear layers, except for a head that is tied to the embedding."""
        if not self._autocast:
            return []
        linear = [m for m in self.module.modules() if isinstance(m, nn.Linear)]
        embedding = self.module.get_input_embeddings().weight
        parameters = (p for m in linear for p in m.parameters(recurse=False))
        return [p for p in parameters if p is not embedding and p.dtype == torch.float32]

    def logp(
        self, trace: TokenTrace, temperature: float, weights: Which = "current"
    ) -> ResponseLogp:
        tokens = to_device(trace.select(trace.tokens), self.device)
        with self.policy.using(weights), self.precision():
            states = self._response_states(trace)
            logp, entropy = head.score(self._head, states, tokens, temperature, self.allowed)
        return ResponseLogp(trace.spread(logp), trace.spread(entropy))

    def hidden(self, trace: TokenTrace, weights: Which = "current") -> Tensor:
        with self.policy.using(weights), self.precision():
            return trace.spread(self._response_states(trace))

    def _response_states(self, trace: TokenTrace) -> Tensor:
        """(R, D): the state of the token before each response token, in the order of the mask. The
        last token of a response predicts nothing and is not part of the pass."""
        rows, lengths = trace.row.tolist(), trace.mask.sum(1).tolist()
        picked = [i for i, length in enumerate(lengths) if length]
        if not picked:
            return torch.zeros(0, self.decoder.config.hidden_size, device=self.device)
        of_prompt: dict[int, list[int]] = {}  # prompt → rows of its responses
        for i in picked:
            of_prompt.setdefault(rows[i], []).append(i)
        sequences = self._sequences(
            [trace.prompts[r] for r in of_prompt],
            [[trace.tokens[i, : lengths[i] - 1] for i in some] for some in of_prompt.values()],
        )
        indices, start = {}, 0
        for members, (length, *after) in zip(of_prompt.values(), sequences.lengths, strict=True):
            start += length
            last = torch.tensor([start - 1])  # of the prompt: predicts the first response token
            for i, more in zip(members, after, strict=True):
                indices[i] = torch.cat([last, torch.arange(start, start + more)])
                start += more
        with self._recomputing():
            states = self._states(sequences)
        return states[to_device(torch.cat([indices[i] for i in picked]), self.device)]

    def _sequences(
        self, prompts: Sequence[TokenPrompt], responses: Sequence[Sequence[Tensor]]
    ) -> Sequences:
        """Each prompt followed by its responses, whose positions continue after the prompt."""
        ids, positions, lengths = [], [], []
        for prompt, group in zip(prompts, responses, strict=True):
            before = self._positions(prompt)
            first = before.max() + 1
            after = [(first + torch.arange(len(r))).expand(len(before), -1) for r in group]
            ids += [prompt.ids, *group]
            positions += [before, *after]
            lengths.append([len(prompt), *map(len, group)])
        joined, rows = torch.cat(ids), torch.cat(positions, 1)
        device = self.device
        return Sequences(to_device(joined, device), to_device(rows, device), prompts, lengths)

    def _states(self, sequences: Sequences, cache: Any = None) -> Tensor:
        """(T, D): the decoder's last hidden states; sequences do not attend to each other."""
        embedded = self._embed(sequences)
        if self.compiled and torch.is_grad_enabled():
            embedded["inputs_embeds"].requires_grad_()  # as in the other layers: one graph
        out = self.decoder(
            **embedded,
            position_ids=self._rows(sequences.positions[:, None]),
            attention_mask=None,
            segments=segments_of(sequences.lengths, self.device, self.dtype),
            past_key_values=cache,
            use_cache=cache is not None,
        )
        return out.last_hidden_state[0]

    def _rows(self, positions: Tensor) -> Tensor:
        """(rows, n, length) → the layout that the decoder expects."""
        return positions

    def prefill(self, prompts: Sequence[TokenPrompt]) -> list[PrefilledPrompt]:
        from transformers import DynamicCache

        cache = DynamicCache()
        sequences = self._sequences(prompts, [[]] * len(prompts))
        with torch.compiler.set_stance("force_eager"):  # otherwise every layer is recompiled
            states = self._states(sequences, cache)
        prefilled, start = [], 0
        starts = sequences.positions.cpu()
        for length in map(len, prompts):
            part = slice(start, start + length)
            # Under autocast some are in float32, and attention would round them in every step.
            keys = [layer.keys[0, :, part].to(self.dtype) for layer in cache.layers]
            values = [layer.values[0, :, part].to(self.dtype) for layer in cache.layers]
            position = int(starts[:, part].max()) + 1
            state = states[start + length - 1]
            prefilled.append(PrefilledPrompt(keys, values, state, position))
            start += length
        return prefilled

    def step(self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: Any) -> Tensor:
        embeds = self.module.get_input_embeddings()(tokens)
        position_ids = self._rows(positions[None, :, None])
        if self._stepper is not None:
            return self._stepper(embeds, position_ids, cache)
        with torch.compiler.set_stance("force_eager"):  # as in `prefill`
            out = self.decoder(
                inputs_embeds=embeds[:, None],
                position_ids=position_ids,
                attention_mask=mask[:, None, None],
                past_key_values=cache,
                use_cache=True,
            )
        return out.last_hidden_state[:, 0]

    # Logits

    def raw_logits(self, states: Tensor) -> Tensor:
        if self._half_head is not None:
            return nn.functional.linear(states.to(self.dtype), self._half_head)
        return self._head(states)

    def logits(self, states: Tensor, temperature: float) -> Tensor:
        return head.tempered(self.raw_logits(states), temperature, self.allowed)

    @property
    def _head(self) -> Any:
        return self.module.get_output_embeddings()

    # Saving

    def read_adapter(self, path: str, key: str) -> AdapterFile:
        """A LoRA in PEFT's format; `key` is the recipe's key with its path."""
        return loading.read_adapter(path, key)

    def save(self, folder: Path, merged: bool = False, shard: str = SHARD) -> None:
        """A PEFT adapter for `PeftModel.from_pretrained`; or, for a full fine-tune or with
        `merged`, a complete model folder with the adapters merged into the weights."""
        with quiet():
            if self.policy.lora is None:
                saving.save_whole(self, folder, shard)
            elif not merged:
                self.module.save_pretrained(folder)
                self.module.generation_config.save_pretrained(folder)
                saving.save_companions(self, folder, without=("config.json",))  # of the base model
            elif self.quantized:
                raise UserError(
                    "an adapter cannot be merged into 4-bit weights without loss; export the LoRA "
                    "alone and merge it into the full-precision weights with PEFT's "
                    "merge_and_unload"
                )
            else:
                with self.policy.merged():
                    saving.save_whole(self, folder, shard)

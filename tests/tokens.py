"""Tiny models that write, and some that see, of the real classes with random weights, saved to disk
as their makers save them: every kind that Gesso knows, small enough for two CPU cores."""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gesso import config
from gesso.traces.tokens import TokenTrace
from gesso.types import Prompt, PromptImage

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,:?!+-=\n"
END, STOP = "<|im_end|>", "<|endoftext|>"
VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- else -%}{{ part['text'] }}{%- endif -%}
{%- endfor -%}
{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
TEXT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] + '\n' + message['content'] }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
PADDED = 3  # rows of the embedding that no token has, as real checkpoints have them


def build(name: str, folder: Path, head: int = 8) -> Path:
    """Save the model of that name with its tokenizer, and its image processor, to a folder. `head`
    is the width of one of its four; some engines know only larger ones."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        BUILDERS[name](folder, head)
    return folder


def picture(height: int, width: int, seed: int = 0) -> PromptImage:
    """Noise, as a PNG in memory."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return PromptImage(data=buffer.getvalue())


def prompts(sees: bool) -> list[Prompt]:
    """Of different lengths; with pictures: none, one, two of different shapes between texts."""
    plain = [Prompt("how many?"), Prompt("what is 3 + 4? think, then say it.")]
    if not sees:
        return [*plain, Prompt("go on", messages=tuple(_turns([])))]
    two = [{"type": "image"}, {"type": "text", "text": " or "}, {"type": "image"}]
    return [
        plain[0],
        Prompt("how many dots?", images=(picture(32, 48),)),
        Prompt("which?", images=(picture(16, 32, 1), picture(48, 16, 2)), messages=_turns(two)),
    ]


def _turns(parts: list[dict[str, str]]) -> tuple[dict[str, Any], ...]:
    asked = [*parts, {"type": "text", "text": "and now?"}]
    return (
        {"role": "system", "content": [{"type": "text", "text": "be brief"}]},
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "hi!"}]},
        {"role": "user", "content": asked},
    )


def _liven(model: Any) -> None:
    """Weights with which every part matters to the logits, as they do in a trained network."""
    import torch

    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            gain = 1.0 if "lm_head" not in name else 2.0
            fan_in = parameter[0].numel()
            torch.nn.init.normal_(parameter, std=gain / math.sqrt(fan_in))
        elif "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.2)
        else:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)


def tokenizer(template: str | None = TEXT_TEMPLATE) -> Any:
    """A token a letter, and the special tokens that chats and pictures need."""
    from transformers import Qwen2Tokenizer

    letters = LETTERS.replace(" ", "Ġ").replace("\n", "Ċ")
    made = Qwen2Tokenizer(
        vocab={letter: i for i, letter in enumerate(letters)}, merges=[], unk_token=STOP,
        eos_token=END, pad_token=STOP,
    )  # fmt: skip
    made.add_tokens(["system", "user", "assistant"])
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", END, *VISION]})
    made.chat_template = template
    return made


def _sizes(head: int, layers: int = 2) -> dict[str, Any]:
    return {
        "hidden_size": 4 * head, "intermediate_size": 48, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
        "head_dim": head,
    }  # fmt: skip


def _text(kind: str, folder: Path, head: int, **more: Any) -> None:
    import transformers

    tokens = tokenizer()
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=len(tokens) + PADDED, bos_token_id=None, pad_token_id=tokens.pad_token_id,
        eos_token_id=tokens.eos_token_id, **_sizes(head), **more,
    )  # fmt: skip
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    _save(model, tokens, folder)


def _save(model: Any, tokens: Any, folder: Path) -> None:
    _liven(model)
    model.generation_config.eos_token_id = [tokens.eos_token_id, tokens.pad_token_id]
    model.save_pretrained(folder)
    tokens.save_pretrained(folder)


def _seeing(
    kind: str,
    folder: Path,
    head: int,
    rope: dict[str, Any],
    vision: dict[str, Any],
    layers: int = 2,
) -> None:
    import transformers
    from transformers import Qwen2VLImageProcessorPil

    tokens = tokenizer(TEMPLATE)
    ids = {name: tokens.convert_tokens_to_ids(f"<|{name}|>") for name in ("image_pad", "video_pad")}
    rope = MROPE | {"mrope_section": [head // 4, head // 8, head // 8]} | rope
    text = _sizes(head, layers) | {"vocab_size": len(tokens) + PADDED, "rope_parameters": rope}
    text |= {"eos_token_id": tokens.eos_token_id, "pad_token_id": tokens.pad_token_id}
    text |= {"bos_token_id": None}
    config = getattr(transformers, f"{kind}Config")(
        text_config=text, vision_config={"patch_size": 4, **vision}, tie_word_embeddings=False,
        image_token_id=ids["image_pad"], video_token_id=ids["video_pad"],
        vision_start_token_id=tokens.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokens.convert_tokens_to_ids("<|vision_end|>"),
    )  # fmt: skip
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    _save(model, tokens, folder)
    name = {"Qwen2VL": "Qwen2VLProcessor", "Qwen2_5_VL": "Qwen2_5_VLProcessor"}
    Qwen2VLImageProcessorPil(
        patch_size=4, min_pixels=64, max_pixels=4096,
        processor_class=name.get(kind, "Qwen3VLProcessor"),
    ).save_pretrained(folder)  # fmt: skip


MROPE = {"rope_type": "default", "rope_theta": 10000.0}


def _qwen2_vl(folder: Path, head: int) -> None:
    vision = {"depth": 2, "embed_dim": 16, "mlp_ratio": 2, "num_heads": 2, "hidden_size": 4 * head}
    _seeing("Qwen2VL", folder, head, {}, vision)


def _qwen25_vl(folder: Path, head: int) -> None:
    vision = {
        "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2,
        "out_hidden_size": 4 * head, "fullatt_block_indexes": [1], "window_size": 16,
    }  # fmt: skip
    _seeing("Qwen2_5_VL", folder, head, {}, vision)


def _qwen3_vl(folder: Path, head: int) -> None:
    vision = {
        "depth": 3, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2,
        "out_hidden_size": 4 * head, "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    }  # fmt: skip
    # One layer more than the vision tower adds features to.
    _seeing("Qwen3VL", folder, head, {"mrope_interleaved": True}, vision, layers=3)


BUILDERS: dict[str, Callable[[Path, int], None]] = {
    "llama": lambda folder, head: _text("Llama", folder, head),
    "qwen2": lambda folder, head: _text("Qwen2", folder, head, tie_word_embeddings=True),
    "qwen3": lambda folder, head: _text("Qwen3", folder, head),
    "qwen2-vl": _qwen2_vl,
    "qwen2.5-vl": _qwen25_vl,
    "qwen3-vl": _qwen3_vl,
}
SEEING = ("qwen2-vl", "qwen2.5-vl", "qwen3-vl")


@dataclass(frozen=True)
class Tiny:
    """A model's folder, how Gesso is told to use it, and what plain transformers makes of it."""

    name: str
    folder: Path

    @property
    def sees(self) -> bool:
        return self.name in SEEING

    @property
    def prompts(self) -> list[Prompt]:
        return prompts(self.sees)

    def model(self, seed: int = 1, **settings: Any) -> Any:
        from gesso.models.tokens.causal import Causal
        from gesso.models.tokens.vision_language import VisionLanguage

        kind = VisionLanguage if self.sees else Causal
        where = {"path": str(self.folder), "device": "cpu"}
        return kind(config.TokenModel(**(where | settings)), seed)

    @functools.cache  # noqa: B019
    def unchanged(self) -> Any:
        """Shared by tests that change neither weights nor settings of it."""
        return self.model()

    @functools.cache  # noqa: B019
    def plain_unchanged(self) -> Any:
        return self.plain()

    def plain(self, folder: Path | None = None) -> Any:
        """As a user of transformers would load it."""
        import transformers

        auto = transformers.AutoModelForImageTextToText if self.sees else None
        auto = auto or transformers.AutoModelForCausalLM
        return auto.from_pretrained(folder or self.folder)


def stirred(model: Any) -> Any:
    """Adapters that do something; fresh ones add nothing."""
    import torch

    generator = torch.Generator().manual_seed(3)
    for tensor in model.policy.trainable.values():
        tensor.data += 0.2 * torch.randn(tensor.shape, generator=generator)
    return model


def trace_of(model: Any, asked: Sequence[Prompt], row: Sequence[int], seed: int = 0) -> TokenTrace:
    """Responses of 1 to 9 letters, drawn without the model."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 10, (len(row), 1), generator=generator)
    tokens = torch.randint(0, len(LETTERS), (len(row), 9), generator=generator)
    mask = torch.arange(9) < lengths
    cut = torch.zeros(len(row), dtype=torch.bool)
    return TokenTrace([model.encode(p) for p in asked], torch.tensor(row), tokens, mask, cut)


def padded_logits(plain: Any, trace: TokenTrace, pad: int) -> Any:
    """(N, S, V): transformers' own forward over a padded batch, pictures as pixels, at the places
    that predict the responses; whatever lies outside of them is not looked at."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    chosen = [trace.prompts[r] for r in trace.row.tolist()]
    responses = [t[m] for t, m in zip(trace.tokens, trace.mask, strict=True)]
    whole = [torch.cat([p.ids, response]) for p, response in zip(chosen, responses, strict=True)]
    kinds = [
        torch.cat([p.kinds, 0 * response]) for p, response in zip(chosen, responses, strict=True)
    ]
    inputs = {
        "input_ids": pad_sequence(whole, batch_first=True, padding_value=pad),
        "attention_mask": pad_sequence([torch.ones_like(w) for w in whole], batch_first=True),
    }
    pictured = [p for p in chosen if p.grid is not None]
    if pictured:
        inputs["pixel_values"] = torch.cat([p.pixels for p in pictured])
        inputs["image_grid_thw"] = torch.cat([p.grid for p in pictured])
        inputs["mm_token_type_ids"] = pad_sequence(kinds, batch_first=True)
    logits = plain(**inputs).logits
    width = trace.tokens.shape[1]
    places = [torch.arange(len(p) - 1, len(p) - 1 + width) for p in chosen]
    rows = torch.arange(len(chosen))[:, None]
    return logits[rows, torch.stack(places).clamp(max=logits.shape[1] - 1)]


def padded_logp(plain: Any, trace: TokenTrace, temperature: float, suppressed: Any) -> Any:
    """(N, S), 0 outside the responses."""
    logits = padded_logits(plain, trace, 0).float() / temperature
    logits = logits.index_fill(-1, suppressed, float("-inf"))
    logp = logits.log_softmax(-1).gather(-1, trace.tokens[..., None])[..., 0]
    return logp.masked_fill(~trace.mask, 0)

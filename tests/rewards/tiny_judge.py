"""A tiny real LLaVA or Llama with hand-set weights: for any prompt it generates `WORDS`.

Its attention and feed-forward layers output zero, so the next token depends only on the last one:
the embedding is one-hot and the head maps every word to its successor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

WORDS = ["Final", "Score:", "4"]
SPECIAL = ["<unk>", "<s>", "</s>", "<image>", "ASSISTANT:"]
WIDTH = 64
TEMPLATE = (
    "{% for message in messages %}USER: {% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }} {% else %}<image> {% endif %}"
    "{% endfor %}{% endfor %}ASSISTANT:"
)


def save(folder: Path) -> Path:
    """A vision-language model."""
    from transformers import LlavaForConditionalGeneration

    model = LlavaForConditionalGeneration(_config())
    _teach(model)
    model.save_pretrained(folder)
    _processor().save_pretrained(folder)
    return folder


def save_blind(folder: Path) -> Path:
    """A language model: vLLM's vision-language models require torchvision."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(_text_config())
    _teach(model)
    model.save_pretrained(folder)
    tokenizer = _processor().tokenizer
    tokenizer.chat_template = (
        "{% for message in messages %}USER: {{ message['content'] }} {% endfor %}ASSISTANT:"
    )
    tokenizer.save_pretrained(folder)
    return folder


def _teach(model: Any) -> None:
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        model.get_input_embeddings().weight.copy_(torch.eye(len(SPECIAL + WORDS), WIDTH))
        head = torch.zeros(len(SPECIAL + WORDS), WIDTH)
        head[SPECIAL.index("</s>"), :] = 1.0
        words = ["ASSISTANT:", *WORDS]
        for word, following in zip(words, WORDS, strict=False):
            head[(SPECIAL + WORDS).index(following), (SPECIAL + WORDS).index(word)] = 9.0
        model.get_output_embeddings().weight.copy_(head)


def _config() -> Any:
    from transformers import CLIPVisionConfig, LlavaConfig

    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        image_size=28, patch_size=14, projection_dim=16,
    )  # fmt: skip
    image = SPECIAL.index("<image>")
    return LlavaConfig(vision_config=vision, text_config=_text_config(), image_token_index=image)


def _text_config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=len(SPECIAL + WORDS), hidden_size=WIDTH, intermediate_size=16,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        max_position_embeddings=2048, bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip


def _processor() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import CLIPImageProcessor, LlavaProcessor, PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(SPECIAL + WORDS)}
    words = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", bos_token="<s>", eos_token="</s>",
        pad_token="</s>", extra_special_tokens={"image_token": "<image>"},
    )  # fmt: skip
    images = CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    return LlavaProcessor(
        image_processor=images, tokenizer=tokenizer, patch_size=14, num_additional_image_tokens=1,
        vision_feature_select_strategy="default", chat_template=TEMPLATE,
    )  # fmt: skip

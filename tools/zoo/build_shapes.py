"""Builds the bundled vision-language model with random weights: a very small Qwen2.5-VL.

Sized for two CPU cores: 64 patches, 16 image tokens, 34 prompt tokens in total.
"""

from pathlib import Path
from typing import Any, NamedTuple

from tools.zoo.render_shapes import SIDE
from tools.zoo.wording import vocabulary_texts

PATCH, MERGE, FRAMES = 8, 2, 2
WIDTH, HEAD = 128, 32
MAX_TOKENS = 512
VOCABULARY = 512  # bytes, and one token for every word of questions and responses
SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
TAGS = ("<think>", "</think>", "<answer>", "</answer>")  # not special, so decoding keeps them
CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'text' -%}
{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


class Vlm(NamedTuple):
    model: Any  # Qwen2_5_VLForConditionalGeneration
    tokenizer: Any  # Qwen2Tokenizer
    image_processor: Any  # Qwen2VLImageProcessorPil


def build_vlm() -> Vlm:
    """Random weights from torch's global generator."""
    tokenizer = build_tokenizer()
    return Vlm(_model(tokenizer), tokenizer, _image_processor())


def build_tokenizer() -> Any:
    """A Qwen2 tokenizer with one token for every word; other text is encoded as bytes."""
    from transformers import AddedToken, Qwen2Tokenizer

    corpus = vocabulary_texts() * 10  # repeated so that every word becomes one token
    tokenizer = Qwen2Tokenizer().train_new_from_iterator(corpus, VOCABULARY, show_progress=False)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.model_max_length = MAX_TOKENS
    return tokenizer


def prompt_for(tokenizer: Any, question: str, image_tokens: int) -> str:
    """The chat prompt of one question about one image, including the generation prompt."""
    content = [{"type": "image"}, {"type": "text", "text": question}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    return text.replace("<|image_pad|>", "<|image_pad|>" * image_tokens)


def _model(tokenizer: Any) -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    ids = dict(zip(SPECIAL, tokenizer.convert_tokens_to_ids(SPECIAL), strict=True))
    ends = {"eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"]}
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": WIDTH,
        "intermediate_size": 3 * WIDTH,
        "num_hidden_layers": 4,
        "num_attention_heads": WIDTH // HEAD,
        "num_key_value_heads": WIDTH // HEAD,
        "max_position_embeddings": MAX_TOKENS,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [4, 6, 6],
        },
        "bos_token_id": None,
        **ends,
    }
    vision = {
        "depth": 3,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_heads": WIDTH // HEAD,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": FRAMES,
        "out_hidden_size": WIDTH,
        "window_size": SIDE,
        "fullatt_block_indexes": [0, 1, 2],
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config.update(bos_token_id=None, do_sample=True, **ends)
    return model


def _image_processor() -> Any:
    """Resizes every image to about 64 × 64 pixels, the only size in training."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        merge_size=MERGE,
        temporal_patch_size=FRAMES,
        size={"shortest_edge": SIDE**2, "longest_edge": SIDE**2},
    )


def save_vlm(vlm: Vlm, folder: Path) -> None:
    for part in vlm:
        part.save_pretrained(folder)


def load_vlm(folder: Path) -> Vlm:
    """Avoids AutoProcessor, which requires torchvision for videos."""
    from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Vlm(
        Qwen2_5_VLForConditionalGeneration.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
        Qwen2VLImageProcessorPil.from_pretrained(folder),
    )

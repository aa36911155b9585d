"""Tiny pipelines whose prompts have input images, like those of pipelines.py."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import pipelines


def build(name: str, folder: Path, scale: int = 1, **layers: int) -> Path:
    pipelines.write(EDITORS[name], folder, scale, layers)
    if "qwen" in name:
        add_qwen_processor(folder)
    return folder


def _kontext(scale: int) -> Any:
    from diffusers import FluxKontextPipeline

    return FluxKontextPipeline(**pipelines._flux_dev(scale).components)


def _qwen_edit(scale: int) -> Any:
    return pipelines._qwen("QwenImageEditPlusPipeline", scale, _edit_tokenizer(), processor=None)


def _qwen_edit_2511(scale: int) -> Any:
    """Reference images are modulated at time 0."""
    pipe = _qwen_edit(scale)
    settings = dict(pipe.transformer.config) | {"zero_cond_t": True}
    pipe.register_modules(transformer=type(pipe.transformer).from_config(settings))
    return pipe


EDITORS: dict[str, Callable[[int], Any]] = {
    "kontext": _kontext,
    "qwen-edit": _qwen_edit,
    "qwen-edit-2511": _qwen_edit_2511,
}
"""Pipelines whose prompts have input images."""


def _edit_tokenizer() -> Any:
    """As that of Qwen-Image, for the template for editing, whose head has 64 tokens."""
    from diffusers import QwenImageEditPlusPipeline

    template = inspect.getsource(QwenImageEditPlusPipeline.__init__)
    head = template[template.index("Describe the key") : template.index("<|im_end|>")]
    words = re.findall("[A-Za-z]+", head.replace("Describe", "").replace("'s", ""))
    more = [*pipelines.VISION, " (", "),", "'s", "color", "Picture"]
    return pipelines._with_words(" ".join(words), ",:.123", more)


def add_qwen_processor(folder: Path) -> None:
    """Adds the processor to a saved pipeline, which cannot be built without torchvision."""
    from transformers import AutoTokenizer, Qwen2VLImageProcessorPil

    Qwen2VLImageProcessorPil().save_pretrained(folder / "processor")
    AutoTokenizer.from_pretrained(folder / "tokenizer").save_pretrained(folder / "processor")
    index = folder / "model_index.json"
    about = json.loads(index.read_text()) | {"processor": ["transformers", "Qwen2VLProcessor"]}
    index.write_text(json.dumps(about))

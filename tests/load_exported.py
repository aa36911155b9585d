"""Loads what `gesso export` wrote, with diffusers or transformers and PEFT alone.

python -m tests.load_exported MODEL EXPORTED
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image


def main(model: Path, exported: Path) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    load = _pipeline if (model / "model_index.json").exists() else _language_model
    before, after = load(model, exported, device)
    assert torch.isfinite(before).all() and torch.isfinite(after).all()
    assert not torch.equal(before, after), "the exported weights change nothing"
    change = float((after - before).norm() / before.norm())
    print(f"loaded: the output changes by {change:.1e}", flush=True)


@torch.no_grad()
def _pipeline(model: Path, exported: Path, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents after two steps of the pipeline."""
    from diffusers import DiffusionPipeline
    from diffusers.utils import logging

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    logging.set_verbosity_error()
    index = json.loads((model / "model_index.json").read_text())
    unused = {"processor": None} if "processor" in index else {}  # it would need torchvision
    pipe = DiffusionPipeline.from_pretrained(model, dtype=dtype, **unused).to(device)
    pipe.set_progress_bar_config(disable=True)
    inputs = {"height": 16, "width": 16, **_inputs(pipe, index["_class_name"])}

    def latents() -> torch.Tensor:
        noise = torch.Generator(device).manual_seed(0)
        output = pipe(num_inference_steps=2, generator=noise, output_type="latent", **inputs)
        return (output.frames if "num_frames" in inputs else output.images).float()

    before = latents()
    pipe.load_lora_weights(exported)
    return before, latents()


def _inputs(pipe: Any, kind: str) -> dict[str, Any]:
    """A prompt, with an image for the pipelines that need one."""
    image = Image.new("RGB", (96, 64), "red")
    if kind == "QwenImageEditPlusPipeline":  # without its processor it encodes no text
        width = pipe.transformer.config.joint_attention_dim
        embeds = torch.ones(1, 4, width, dtype=pipe.dtype, device=pipe.device)
        mask = torch.ones(1, 4, dtype=torch.long, device=pipe.device)
        encoded = {"prompt_embeds": embeds, "prompt_embeds_mask": mask, "true_cfg_scale": 1.0}
        return {"image": image, **encoded}
    text: dict[str, Any] = {"prompt": "a red kite", "max_sequence_length": 16}
    if kind == "WanPipeline":
        return {"height": 32, "width": 32, "num_frames": 5, **text}
    if kind == "FluxKontextPipeline":
        return {"image": image, "max_area": 256, "_auto_resize": False, **text}
    return text


@torch.no_grad()
def _language_model(model: Path, exported: Path, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a few tokens."""
    import transformers

    kind = json.loads((model / "config.json").read_text())["architectures"][0]
    loaded = getattr(transformers, kind).from_pretrained(model, dtype="auto").to(device)
    ids = torch.arange(3, 20, device=device)[None]
    before = loaded(input_ids=ids).logits.float()
    if (exported / "adapter_config.json").exists():
        from peft import PeftModel

        loaded = PeftModel.from_pretrained(loaded, exported)
    else:
        loaded = getattr(transformers, kind).from_pretrained(exported, dtype="auto").to(device)
    return before, loaded(input_ids=ids).logits.float()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

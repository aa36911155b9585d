"""Loads what `gesso export` wrote, with diffusers or transformers and PEFT alone.

python -m tests.load_exported MODEL EXPORTED
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch


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
    pipe = DiffusionPipeline.from_pretrained(model, dtype=dtype).to(device)
    pipe.set_progress_bar_config(disable=True)

    def latents() -> torch.Tensor:
        noise = torch.Generator(device).manual_seed(0)
        size: dict[str, Any] = {"height": 16, "width": 16, "max_sequence_length": 16}
        return pipe(
            "a red kite", num_inference_steps=2, generator=noise, output_type="latent", **size
        ).images.float()

    before = latents()
    pipe.load_lora_weights(exported)
    return before, latents()


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

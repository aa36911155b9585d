"""Sample from an exported run in plain diffusers; Gesso is not imported.

gesso export runs/demo-001 --to signs-rl
python plain_diffusers.py signs-rl               # full fine-tuning: a whole pipeline
python plain_diffusers.py signs-lora BASE_MODEL  # LoRA: its weights and the base model
"""

import sys
from pathlib import Path

import torch
from diffusers import StableDiffusion3Pipeline

folder = Path(sys.argv[1])
is_lora = (folder / "pytorch_lora_weights.safetensors").is_file()
base = sys.argv[2] if is_lora else folder
pipe = StableDiffusion3Pipeline.from_pretrained(
    base,
    text_encoder_3=None,  # the bundled model has no T5; remove both lines for SD3.5
    tokenizer_3=None,
)
if is_lora:
    pipe.load_lora_weights(folder)
image = pipe(
    'a red sign that says "KITE"',
    height=32,
    width=96,
    num_inference_steps=6,
    guidance_scale=1.0,
    max_sequence_length=0,  # text_length in the recipe
    generator=torch.Generator().manual_seed(0),
).images[0]
image.save("plain.png")
print("plain.png")

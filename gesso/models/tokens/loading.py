"""Loads transformers models from folders or the hub. Every error is raised as one sentence."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError

from gesso import config
from gesso.models.adapter_checks import AdapterFile
from gesso.models.four_bits import require_four_bits
from gesso.models.tokens import attention
from gesso.quiet import quiet
from gesso.types import UserError
from gesso.weights.empty import on_meta
from gesso.weights.policy import Policy

ERRORS = (OSError, ValueError, KeyError, TypeError, ImportError, SafetensorError)


class Architecture(Protocol):
    """What a model class loads, from where and onto which device."""

    device: torch.device
    dtype: torch.dtype
    source: str

    @property
    def kinds(self) -> Mapping[str, str]:
        """Model types of transformers, and their display names."""

    @property
    def auto(self) -> str:
        """The Auto class that loads them."""

    @property
    def other(self) -> str:
        """model.name for model types that this class does not load."""


def load(model: Architecture, settings: config.TokenModel) -> Any:
    """The module: in float32 for a full fine-tune, otherwise in the model's dtype; or on its device
    in 4 bits, if the recipe sets model.quantize."""
    import transformers

    auto = getattr(transformers, model.auto)
    model_config = _config(model, settings.path)
    options: dict[str, Any] = {
        "dtype": torch.float32 if settings.lora is None else model.dtype,
        "attn_implementation": _attention(model_config),
    }
    if model.device.type == "meta":
        with on_meta():
            return auto.from_config(model_config, **options)
    if settings.quantize is not None:
        options |= {"quantization_config": _four_bits(model), "device_map": {"": model.device}}
    with readable(settings.path, f"transformers cannot load it with {model.auto}"), quiet():
        module, report = auto.from_pretrained(
            model.source,
            config=model_config,
            output_loading_info=True,
            trust_remote_code=False,
            **options,
        )
    if missing := sorted(report["missing_keys"]):
        raise UserError(
            f'model.path = "{settings.path}": {len(missing)} weights of {type(module).__name__} '
            f"are missing, the first is {missing[0]}; download the model again"
        )
    return module


def move(module: Any, decoder: Any, device: torch.device, sharded: bool) -> None:
    """The module to its device, except for the layers of a decoder that is sharded later."""
    layers = decoder.layers
    if sharded:
        decoder.layers = torch.nn.ModuleList()
    module.to(device)
    decoder.layers = layers


def _attention(model_config: Any) -> Any:
    """Our attention for the decoder, SDPA for a vision tower."""
    name = attention.register()
    if model_config.get_text_config() == model_config:
        return name
    return {"text_config": name, "vision_config": "sdpa"}


def _config(model: Architecture, path: str) -> Any:
    from transformers import AutoConfig

    with readable(path, "its config.json cannot be read"), quiet():
        model_config = AutoConfig.from_pretrained(model.source, trust_remote_code=False)
    if model_config.model_type not in model.kinds:
        known = ", ".join(model.kinds.values())
        raise UserError(
            f'model.path = "{path}" is a {model_config.model_type}, expected one of {known}; '
            f'for other model types use model.name = "{model.other}"'
        )
    layers = getattr(model_config.get_text_config(), "layer_types", None)  # absent for Llama
    if "sliding_attention" in (layers or []):
        raise UserError(
            f'model.path = "{path}" uses sliding-window attention, which is not supported; set '
            "use_sliding_window to false in its config.json if responses stay within the window"
        )
    return model_config


def _four_bits(model: Architecture) -> Any:
    """NF4 by bitsandbytes; vision tower and head are not quantized."""
    require_four_bits(model.device)
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=model.dtype,
        llm_int8_skip_modules=["visual", "lm_head"],  # applies to 4-bit quantization, too
    )


def tokenizer(source: str, path: str) -> Any:
    from transformers import AutoTokenizer

    with readable(path, "its tokenizer cannot be read"), quiet():
        loaded = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    if len(loaded) < 2:  # transformers creates an empty one if the files are missing
        raise UserError(
            f'model.path = "{path}": its tokenizer has no vocabulary; is tokenizer.json missing?'
        )
    return loaded


def chat_template(template_or_table: Any, path: str) -> str:
    """The chat template, or a UserError: a base model has none, and a guess would be wrong."""
    template = template_or_table
    if isinstance(template_or_table, dict):
        template = template_or_table.get("default")
    if not template:
        raise UserError(
            f'model.path = "{path}" has no chat template, so it is a base model; use its '
            "-Instruct variant, or add a chat_template.jinja to the folder"
        )
    return template


def max_positions(decoder_config: Any) -> int:
    """Maximum number of positions of a decoder, from its config as transformers interprets it.

    `max_position_embeddings` is the length after RoPE scaling if the config also has the length
    before (`original_max_position_embeddings`: llama3, longrope, yarn). If the two are equal or the
    second is absent, it is the length before scaling and is multiplied by the factor.
    """
    rope = decoder_config.rope_parameters or {}
    stated: int = decoder_config.max_position_embeddings
    scaled = rope.get("rope_type", "default") != "default"
    if not scaled or rope.get("original_max_position_embeddings", stated) != stated:
        return stated
    return int(stated * (rope.get("factor") or 1.0))


def end_ids(module: Any, tokenizer: Any) -> frozenset[int]:
    eos = module.generation_config.eos_token_id
    ids = eos if isinstance(eos, list) else [eos]
    present = frozenset(i for i in [*ids, tokenizer.eos_token_id] if i is not None)
    assert present, "a tokenizer without an end token"
    return present


def load_adapter(policy: Policy, path: str) -> None:
    """Loads a PEFT adapter as the current weights of the policy. Strict: modules, rank and alpha
    must match the recipe, otherwise a UserError reports the difference. The reference policy is
    still the base model, with the adapter off."""
    assert policy.lora is not None
    adapter = read_adapter(path, "model.lora.path")
    policy.load(adapter.fitting(policy.trainable, policy.lora.rank, policy.lora.alpha))


def read_adapter(path: str, key: str) -> AdapterFile:
    """`key` is the recipe's key with the path, for errors."""
    from peft import PeftConfig
    from peft.utils import load_peft_weights

    folder = Path(os.path.expanduser(path))
    if not (folder / "adapter_config.json").is_file():
        raise UserError(
            f'{key} = "{path}": expected a PEFT adapter folder with adapter_config.json'
        )
    try:
        adapter_settings = PeftConfig.from_pretrained(str(folder)).to_dict()
        state = load_peft_weights(str(folder), device="cpu")
    except ERRORS as error:
        raise UserError(
            f'{key} = "{path}": PEFT cannot read it: {str(error).splitlines()[0]}'
        ) from error
    tensors = {name.removeprefix("base_model.model."): tensor for name, tensor in state.items()}
    return AdapterFile(folder, tensors, adapter_settings)


@contextmanager
def readable(path: str, what: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except ERRORS as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f'model.path = "{path}": {what}: {reason}') from error

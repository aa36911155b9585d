"""Models of transformers from and to folders; every mistake is answered in one sentence."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from gesso import config
from gesso.models.flow.adapter import check_alpha, check_modules, check_rank
from gesso.models.tokens import attention
from gesso.types import UserError
from gesso.weights.policy import Policy

if TYPE_CHECKING:
    from gesso.models.tokens.transformer import TransformerModel

EXPORTS = ("README.md", "adapter_config.json")
"""What says whose weights a folder holds; it is not true of others."""
ERRORS = (OSError, ValueError, KeyError, TypeError, ImportError, SafetensorError)


def load(model: TransformerModel, settings: config.TokenModel) -> Any:
    """The module on its device: in float32 where it is trained whole, else in the model's dtype, in
    4 bits if the recipe says so."""
    import transformers

    auto = getattr(transformers, model.auto)
    own = _config(model, settings.path)
    own_dtype = torch.float32 if settings.lora is None else model.dtype
    if model.device.type == "meta":
        with torch.device("meta"):
            return auto.from_config(own, dtype=own_dtype, attn_implementation=own_attention(own))
    options: dict[str, Any] = {"dtype": own_dtype, "attn_implementation": own_attention(own)}
    if settings.quantize is not None:
        options |= {"quantization_config": _four_bits(model), "device_map": {"": model.device}}
    with readable(settings.path, f"transformers cannot load it with {model.auto}"), quiet():
        module, told = auto.from_pretrained(
            model.source,
            config=own,
            output_loading_info=True,
            trust_remote_code=False,
            **options,
        )
    if missing := sorted(told["missing_keys"]):
        raise UserError(
            f'model.path = "{settings.path}": {len(missing)} weights of its {type(module).__name__}'
            f" are not in the folder, the first {missing[0]}; download it again"
        )
    return module if settings.quantize is not None else module.to(model.device)


def own_attention(own: Any) -> Any:
    """Ours for the decoder; a vision tower keeps SDPA."""
    name = attention.register()
    return {"text_config": name, "vision_config": "sdpa"} if own.get_text_config() != own else name


def _config(model: TransformerModel, path: str) -> Any:
    from transformers import AutoConfig

    with readable(path, "its config.json cannot be read"), quiet():
        own = AutoConfig.from_pretrained(model.source, trust_remote_code=False)
    if own.model_type not in model.kinds:
        known = ", ".join(model.kinds.values())
        raise UserError(
            f'model.path = "{path}" is a {own.model_type}, expected one of {known}; '
            f'for other models see model.name = "{model.other}"'
        )
    layers = getattr(own.get_text_config(), "layer_types", None)  # Llama's has none
    if "sliding_attention" in (layers or []):
        raise UserError(
            f'model.path = "{path}" uses sliding windows of attention, which are not supported; '
            "set use_sliding_window to false in its config.json if replies stay within the window"
        )
    return own


def _four_bits(model: TransformerModel) -> Any:
    """NF4 by bitsandbytes; vision tower and head stay as they are."""
    if model.device.type != "cuda":
        raise UserError(
            f'model.quantize = "nf4" needs a CUDA device, found {model.device}; leave it out'
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError('model.quantize = "nf4" needs bitsandbytes: pip install "gesso[quantize]"')
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=model.dtype,
        llm_int8_skip_modules=["visual", "lm_head"],  # its name for modules of any quantization
    )


def tokenizer(source: str, path: str) -> Any:
    from transformers import AutoTokenizer

    with readable(path, "its tokenizer cannot be read"), quiet():
        found = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    if len(found) < 2:  # transformers makes one of nothing where the files are missing
        raise UserError(
            f'model.path = "{path}": its tokenizer has no words; is tokenizer.json there?'
        )
    return found


def chat_template(found: Any, path: str) -> str:
    """One template, or a UserError: what a base model was never told cannot be guessed."""
    template = found.get("default") if isinstance(found, dict) else found
    if not template:
        raise UserError(
            f'model.path = "{path}" has no chat template, so it is a base model; use its '
            "-Instruct variant, or put a chat_template.jinja into the folder"
        )
    return template


def places(own: Any) -> int:
    """Tokens that a decoder's positions are made for, by its config as transformers reads it.

    `max_position_embeddings` is the length after scaling where the config also tells the one before
    (`original_max_position_embeddings`: llama3, longrope, yarn). Where that is the same or not
    told, it is the length before, and a factor of x makes it x times as long.
    """
    told = own.rope_parameters or {}
    most: int = own.max_position_embeddings
    scaled = told.get("rope_type", "default") != "default"
    if not scaled or told.get("original_max_position_embeddings", most) != most:
        return most
    return int(most * (told.get("factor") or 1.0))


def end_ids(module: Any, tokenizer: Any) -> frozenset[int]:
    own = module.generation_config.eos_token_id
    ids = own if isinstance(own, list) else [own]
    found = frozenset(i for i in [*ids, tokenizer.eos_token_id] if i is not None)
    assert found, "a tokenizer without an end token"
    return found


def load_adapter(policy: Policy, path: str) -> None:
    """The weights of a PEFT adapter become the policy's current ones. Strict: modules, rank and
    alpha must be those of the recipe, or a UserError says what differs. The reference policy stays
    the base model, with the adapter off."""
    from peft import PeftConfig
    from peft.utils import load_peft_weights

    assert policy.lora is not None
    folder = Path(os.path.expanduser(path))
    if not (folder / "adapter_config.json").is_file():
        raise UserError(
            f'model.lora.path = "{path}": expected a PEFT adapter folder with adapter_config.json'
        )
    try:
        about = PeftConfig.from_pretrained(str(folder)).to_dict()
        state = load_peft_weights(str(folder), device="cpu")
    except ERRORS as error:
        raise UserError(
            f'model.lora.path = "{path}": PEFT cannot read it: {str(error).splitlines()[0]}'
        ) from error
    found = {key.removeprefix("base_model.model."): tensor for key, tensor in state.items()}
    own = {name.replace(".default.", "."): name for name in policy.trainable}
    check_modules(folder, own, found)
    check_rank(folder, policy.lora.rank, found)
    check_alpha(folder, policy.lora.alpha, about, policy.lora.rank)
    policy.load({own[key]: tensor for key, tensor in found.items()})


def save_whole(model: TransformerModel, folder: Path, shard: str) -> None:
    """The module, its tokenizer and processor, and what else came with them but the weights."""
    module = model.module
    with torch.device("meta"):
        plain = type(module)(module.config)  # without PEFT's wish to save adapters only
    # A frozen tower runs in half precision beside weights that are trained in float32; a folder has
    # one precision, which transformers takes from the first weight it meets.
    dtype = torch.float32 if model.policy.lora is None else model.dtype
    state = {
        name: t.to(dtype) if t.is_floating_point() else t for name, t in module.state_dict().items()
    }
    plain.load_state_dict(state, assign=True)
    plain.generation_config = module.generation_config
    plain.save_pretrained(folder, max_shard_size=shard)
    save_companions(model, folder)


def save_companions(model: TransformerModel, folder: Path, but: Sequence[str] = ()) -> None:
    """Tokenizer, processor, license and what else lies beside the weights of the model."""
    model.tokenizer.chat_template = model.template
    model.tokenizer.save_pretrained(folder)
    left_out = {*but, *EXPORTS, "chat_template.json"}  # the template is the tokenizer's by now
    for file in sorted(_files_of(model.source)):
        kept = file.suffix in (".json", ".jinja", ".txt", ".model", ".md") or file.stem == "LICENSE"
        skipped = file.name in left_out or file.name.endswith(".index.json")
        if file.is_file() and kept and not skipped and not (folder / file.name).exists():
            shutil.copyfile(file, folder / file.name)


def _files_of(source: str) -> list[Path]:
    """Of a folder; of a model of the hub, those that were downloaded to load it."""
    folder = Path(source)
    if not folder.is_dir():
        from transformers.utils import cached_file

        folder = Path(cached_file(source, "config.json", local_files_only=True)).parent
    return list(folder.iterdir())


@contextmanager
def readable(path: str, what: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except ERRORS as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f'model.path = "{path}": {what}: {reason}') from error


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars, no talk of torchvision and of every try to reach the hub while a model
    loads; errors still show."""
    from huggingface_hub.utils import logging as hub
    from transformers.utils import logging

    level, hubs = logging.get_verbosity(), hub.get_verbosity()
    logging.set_verbosity_error()
    hub.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        hub.set_verbosity(hubs)
        logging.enable_progress_bar()

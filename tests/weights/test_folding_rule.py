"""Whether LoRA is folded is decided once, for loading, checks and memory estimates."""

from __future__ import annotations

from typing import Any

import pytest

from gesso.config import AnyModel, Lora, Model, TokenModel
from gesso.weights.folding_rule import estimated_to_fold, folds_lora

LORA = Lora(rank=4, alpha=8)
SECTIONS = [Model, TokenModel]


def section(kind: type[Any], **settings: Any) -> AnyModel:
    return kind(path="x", **({"lora": LORA, "dtype": "bfloat16"} | settings))


@pytest.mark.parametrize("kind", SECTIONS)
def test_a_lora_in_half_precision_is_folded_on_cuda(kind: type[Any]) -> None:
    assert [folds_lora(section(kind), device) for device in ("cuda", "cpu", "meta")] == [
        True, False, False
    ]  # fmt: skip
    assert estimated_to_fold(section(kind))


@pytest.mark.parametrize("kind", SECTIONS)
@pytest.mark.parametrize("settings", [{"lora": None}, {"quantize": "nf4"}])
def test_what_cannot_be_folded(kind: type[Any], settings: dict[str, Any]) -> None:
    assert not folds_lora(section(kind, **settings), "cuda")
    assert not estimated_to_fold(section(kind, **settings), one_pass=True)


@pytest.mark.parametrize("kind", SECTIONS)
def test_the_recipe_decides(kind: type[Any]) -> None:
    on, off = section(kind, fold=True, dtype="float32"), section(kind, fold=False)
    assert folds_lora(on, "cpu") and folds_lora(on, "meta") and estimated_to_fold(on)
    assert not folds_lora(off, "cuda") and not estimated_to_fold(off, one_pass=True)


def test_in_float32_flow_models_fold_on_cuda_and_token_models_do_not() -> None:
    flow, tokens = section(Model, dtype="float32"), section(TokenModel, dtype="float32")
    assert folds_lora(flow, "cuda") and not folds_lora(tokens, "cuda")
    assert not estimated_to_fold(flow) and not estimated_to_fold(tokens)  # taken for a CPU's
    assert estimated_to_fold(flow, one_pass=True)

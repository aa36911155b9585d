"""Supervised fine-tuning on given images or clips, with the flow-matching loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field
from torch import Tensor

from gesso.algorithms.advantage import Equal
from gesso.algorithms.base import TermLosses
from gesso.algorithms.noised import NoisedTerms, PretrainingTimes
from gesso.types import Which


class FlowSFT(PretrainingTimes):
    name: str = "flow-sft"
    group: int = Field(1, ge=1, le=1)
    """Samples per prompt: the row's."""
    updates: int = Field(1, ge=1)
    times: int = Field(1, ge=1)
    advantage: Equal = Equal()  # type: ignore[assignment]
    """No settings: every sample counts the same."""

    given: ClassVar[tuple[str, ...]] = ("image",)

    def objective(
        self, terms: NoisedTerms, v: Tensor, others: Mapping[Which, Tensor]
    ) -> TermLosses:
        matched = terms.matching_loss(v)
        return TermLosses(matched, {"matching": matched.detach()})

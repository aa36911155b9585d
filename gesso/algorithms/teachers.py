"""Teachers of on-policy distillation, and which prompts each is for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from gesso.config import Strict
from gesso.config.parsing import nearest
from gesso.types import Prompt, UserError


class Teacher(Strict):
    path: str = Field(min_length=1)
    """A run, an export or a LoRA folder, trained from the same base model."""
    step: int | None = Field(None, ge=0)
    """Checkpoint of a run. None: the newest."""
    weights: Literal["ema", "current"] | None = None
    """Weights of a run's checkpoint. None: averaged ones if it has any."""


def teacher_of(prompt: Prompt, column: str, teachers: Mapping[str, object]) -> str:
    """The name of the teacher of a prompt: its column of that name. One teacher is for all prompts
    without the column."""
    name = prompt.columns.get(column)
    if name is None and len(teachers) == 1:
        return next(iter(teachers))
    if name is None:
        raise UserError(
            f'{prompt.where}: expected a column "{column}" with the name of the teacher of this '
            f"prompt, one of {', '.join(teachers)}; add it, or set algorithm.column to the column "
            "that has it"
        )
    if not isinstance(name, str) or name not in teachers:
        raise UserError(
            f'{prompt.where}: column "{column}" has "{name}", which is not one of '
            f"algorithm.teachers{nearest(str(name), teachers)}"
        )
    return name

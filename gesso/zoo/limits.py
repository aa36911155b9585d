"""What the bundled models were trained on, for users who type their own prompts.

The sentences and checks are next to the constants from which the training data was made: in
gesso.zoo.words for signs and in gesso.zoo.scenes for shapes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gesso.config import PACKAGE, resolve_path
from gesso.types import Prompt

MAX_REASON = 100  # characters; a reason quotes what was typed


@dataclass(frozen=True)
class Limits:
    text: str  # sentences for the user
    outside: Callable[[Prompt], str | None]  # how it differs from the training data, or None

    def note(self, prompts: Sequence[Prompt]) -> str | None:
        """One note about the prompts that differ, or None."""
        reasons = [(prompt, self.outside(prompt)) for prompt in prompts]
        outside = [(prompt, reason) for prompt, reason in reasons if reason]
        if not outside:
            return None
        first, reason = outside[0]
        reason = reason if len(reason) <= MAX_REASON else f"{reason[:MAX_REASON]}…"
        if len(prompts) > 1:
            reason = (
                f"{len(outside)} of {len(prompts)} prompts are not like those that the model was "
                f"trained on; the first is {first.where}: {first.text[:60]}: {reason}"
            )
        return f"{reason}. {self.text}"


def of(path: str) -> Limits | None:
    """The limits of the model at `path`; None if it is not bundled. Reads no files."""
    if "\0" in path:
        return None
    folder = os.path.abspath(resolve_path(path))
    if folder == str(PACKAGE / "zoo" / "signs"):
        from gesso.zoo import words

        return Limits(words.LIMITS, lambda prompt: words.outside(prompt.text))
    if folder == str(PACKAGE / "zoo" / "shapes"):
        from gesso.zoo import scenes

        return Limits(scenes.LIMITS, lambda p: scenes.outside(p.text, len(p.images)))
    return None


def text_of(path: str) -> str:
    """Empty for a model that is not bundled."""
    limits = of(path)
    return "" if limits is None else limits.text

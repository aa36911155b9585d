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

MOST = 100  # characters of a reason, which quotes what was typed


@dataclass(frozen=True)
class Limits:
    text: str  # sentences for a person
    outside: Callable[[Prompt], str | None]  # how it differs from the training data, or None

    def note(self, prompts: Sequence[Prompt]) -> str | None:
        """One note about the prompts that differ, or None."""
        reasons = [(prompt, self.outside(prompt)) for prompt in prompts]
        found = [(prompt, reason) for prompt, reason in reasons if reason]
        if not found:
            return None
        first, reason = found[0]
        reason = reason if len(reason) <= MOST else f"{reason[:MOST]}…"
        if len(prompts) > 1:
            reason = (
                f"{len(found)} of {len(prompts)} prompts are not like those that the model was "
                f"trained on; the first is {first.where}: {first.text[:60]}: {reason}"
            )
        return f"{reason}. {self.text}"


def of(path: str) -> Limits | None:
    """By model.path; None for any model that is not bundled. Reads no files."""
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
    found = of(path)
    return "" if found is None else found.text

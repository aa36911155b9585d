"""Notes on prompts that differ from the training data of the bundled models.

The texts and checks are next to the constants that generate the training data: in gesso.zoo.words
for signs, in gesso.zoo.edits for edits, in gesso.zoo.videos for videos and in gesso.zoo.scenes for
shapes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gesso.config import PACKAGE, resolve_path
from gesso.types import Prompt

MAX_REASON = 100  # characters; a reason quotes the prompt


@dataclass(frozen=True)
class Limits:
    text: str  # describes the training data
    outside: Callable[[Prompt], str | None]  # how a prompt differs from the training data, or None

    def note(self, prompts: Sequence[Prompt]) -> str | None:
        """A note if prompts differ from the training data, else None."""
        reasons = [(prompt, self.outside(prompt)) for prompt in prompts]
        outside = [(prompt, reason) for prompt, reason in reasons if reason]
        if not outside:
            return None
        first, reason = outside[0]
        reason = reason if len(reason) <= MAX_REASON else f"{reason[:MAX_REASON]}…"
        if len(prompts) > 1:
            reason = (
                f"{len(outside)} of {len(prompts)} prompts differ from the model's training data; "
                f"the first is {first.where}: {first.text[:60]}: {reason}"
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
    if folder == str(PACKAGE / "zoo" / "edits"):
        from gesso.zoo import edits

        return Limits(edits.LIMITS, lambda p: edits.outside(p.text, len(p.images)))
    if folder == str(PACKAGE / "zoo" / "videos"):
        from gesso.zoo import videos

        return Limits(videos.LIMITS, lambda prompt: videos.outside(prompt.text))
    if folder == str(PACKAGE / "zoo" / "shapes"):
        from gesso.zoo import scenes

        return Limits(scenes.LIMITS, lambda p: scenes.outside(p.text, len(p.images)))
    return None


def text_of(path: str) -> str:
    """Empty for a model that is not bundled."""
    limits = of(path)
    return "" if limits is None else limits.text

"""OCR letters: how many letters of the requested word are in the image? A reward that can be gamed.

value = recognised letters that occur in the target / length of the target; range [0, ∞). A letter
counts again each time it is repeated, so a longer text pays more than the right one. The recipe
demo-hack shows it (docs/how-to/diagnose.md). Requires the extra `ocr`.
"""

from __future__ import annotations

from gesso.formulas.text import letters_found
from gesso.rewards.image.ocr import Ocr, spelling_score, target_of
from gesso.types import Prompt, Score


class OcrLetters(Ocr):
    """Recognised letters that occur in the quoted word of the prompt, divided by its length.
    Repeated letters count again: made to be gamed, see the recipe `demo-hack`. Range [0, ∞).
    Requires the extra `ocr`. `ocr-letters/exact`, `ocr-letters/longer`: as for `ocr`."""

    def compare(self, text: str, prompt: Prompt) -> Score:
        spelt, target = spelling_score(text, prompt), target_of(prompt)
        if target is None:
            return spelt
        return Score(letters_found(text, target), spelt.parts, text)

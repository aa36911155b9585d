"""The instructions of the bundled editing model: a new colour, or a new word.

The words are those of gesso/zoo/words with four letters. tools/zoo/edit_rows.py renders the
sources.
"""

import re

from gesso.zoo.words import ALPHABET, COLOURS

LENGTH = 4
PITCH = 24  # pixels from a letter to the next
TEMPLATE_WORDS = ("make", "it", "a", "sign", "change", "the", "word", "to")


def recolour(colour: str) -> str:
    return f"make it a {colour} sign"


def reword(word: str) -> str:
    return f'change the word to "{word}"'


_RECOLOUR = re.compile(recolour("(.+)"))
_REWORD = re.compile(reword('([^"]+)'))
_WORD = re.compile(f"[{ALPHABET}]*")
LIMITS = (
    f"The bundled edits model changes an image of a sign with {LENGTH} capital letters, for "
    f"prompts like: {recolour('green')}, or: {reword('KITE')}. Signs are "
    f"{', '.join(COLOURS[:-1])} or {COLOURS[-1]}. Other prompts rarely give legible signs."
)


def outside(text: str, images: int = 1) -> str | None:
    """How a prompt differs from the model's training data, or None. Ignores extra spaces."""
    if images != 1:
        return f"The prompt has {images or 'no'} images"
    text = " ".join(text.split())
    if match := _RECOLOUR.fullmatch(text):
        return None if match[1] in COLOURS else f'"{match[1]}" is not one of its colours'
    match = _REWORD.fullmatch(text)
    if match is None:
        return "The prompt has a different form"
    word = match[1].strip()
    if not _WORD.fullmatch(word):
        return f'"{word}" is not one word of capital letters A to Z'
    if len(word) != LENGTH:
        return f'"{word}" has {len(word)} letters'
    return None

"""The prompts of the bundled video model: a sign whose word slides to the left or to the right.

The words are those of gesso/zoo/words with four letters. tools/zoo/render_videos.py renders the
videos that the model is trained on.
"""

import re

from gesso.zoo.words import ALPHABET, COLOURS

LENGTH = 4
FRAMES = 5
PITCH = 20  # pixels from a letter to the next
SPEED = 2  # pixels from a frame to the next
DIRECTIONS = ("left", "right")
TEMPLATE_WORDS = ("a", "sign", "that", "says", "slides", *DIRECTIONS)


def prompt_for(word: str, colour: str, direction: str) -> str:
    return f'a {colour} sign that says "{word}" slides {direction}'


_PROMPT = re.compile(prompt_for('([^"]*)', '([^"]+)', "(.+)"))
_WORD = re.compile(f"[{ALPHABET}]*")
LIMITS = (
    f"The bundled videos model shows a sign with {LENGTH} capital letters that move, for prompts "
    f"like: {prompt_for('KITE', 'red', 'left')}. Signs are {', '.join(COLOURS[:-1])} or "
    f"{COLOURS[-1]}; directions are {' and '.join(DIRECTIONS)}. Other prompts rarely give legible "
    "signs."
)


def outside(text: str) -> str | None:
    """How a prompt differs from the model's training data, or None. Ignores extra spaces."""
    match = _PROMPT.fullmatch(" ".join(text.split()))
    if match is None:
        return "The prompt has a different form"
    colour, word, direction = match[1], match[2].strip(), match[3]
    if colour not in COLOURS:
        return f'"{colour}" is not one of its colours'
    if direction not in DIRECTIONS:
        return f'"{direction}" is not one of its directions'
    if not _WORD.fullmatch(word):
        return f'"{word}" is not one word of capital letters A to Z'
    if len(word) != LENGTH:
        return f'"{word}" has {len(word)} letters'
    return None

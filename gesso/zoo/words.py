"""The words on the signs of the bundled image model and the form of its prompts.

Two disjoint lists of real English words, one for RL training and one for evaluation. The model was
pre-trained on other, made-up words: see tools/zoo/sign_prompts.py.
"""

import re
from pathlib import Path

HERE = Path(__file__).parent
LENGTHS = (4, 5, 6)
COLOURS = ("red", "blue", "green", "purple", "black", "yellow", "orange", "white")
TEMPLATE_WORDS = ("a", "sign", "that", "says")

RGB = tuple[int, int, int]
_WHITE: RGB = (255, 255, 255)
_BLACK: RGB = (0, 0, 0)
PAINT: dict[str, tuple[RGB, RGB]] = {  # sign, letters
    "red": ((200, 30, 30), _WHITE),
    "blue": ((30, 60, 190), _WHITE),
    "green": ((10, 115, 50), _WHITE),
    "purple": ((115, 30, 140), _WHITE),
    "black": ((15, 15, 15), _WHITE),
    "yellow": ((250, 215, 30), _BLACK),
    "orange": ((250, 150, 40), _BLACK),
    "white": ((240, 240, 240), _BLACK),
}

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def real_words(split: str) -> list[str]:
    """The words of `split` ("train" or "eval"), in file order."""
    return (HERE / "words" / f"{split}.txt").read_text().split()


def prompt_for(word: str, colour: str) -> str:
    return f'a {colour} sign that says "{word}"'


_PROMPT = re.compile(prompt_for('([^"]*)', '([^"]+)'), re.IGNORECASE)
_WORD = re.compile(f"[{ALPHABET}]*", re.IGNORECASE | re.ASCII)
LIMITS = (
    f"The bundled signs model renders one word of {min(LENGTHS)} to {max(LENGTHS)} letters A to Z, "
    f"for prompts like: {prompt_for('KITE', 'red')}. Signs are {', '.join(COLOURS[:-1])} or "
    f"{COLOURS[-1]}. Other prompts rarely give legible signs."
)


def outside(prompt: str) -> str | None:
    """How a prompt differs from the model's training data, or None.

    Ignores case and extra spaces, as the tokenizer does.
    """
    match = _PROMPT.fullmatch(" ".join(prompt.split()))
    if match is None:
        return "The prompt has a different form"
    colour, word = match[1], match[2].strip()
    if colour.lower() not in COLOURS:
        return f'"{colour}" is not one of its colours'
    if not _WORD.fullmatch(word):
        return f'"{word}" is not one word of letters A to Z'
    if len(word) not in LENGTHS:
        return f'"{word}" has {len(word)} letter{"" if len(word) == 1 else "s"}'
    if word.lower() in (*COLOURS, *TEMPLATE_WORDS):
        return f'"{word}" is one of the prompt\'s fixed words, which the model does not spell'
    return None

"""The words on the signs and the prompts that ask for them.

Three disjoint sets: made-up words for pre-training, and two lists of real English words, one to
train on by RL and one to evaluate on. Nothing that the reward ever sees was drawn before.
"""

import random
import re
from collections.abc import Iterator
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

_ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_ONSETS = re.findall(
    r"\w+",
    "B C D F G H J K L M N P Q R S T V W X Y Z BL BR CH CL CR DR FL FR GL GR KN PL PR QU SC SH SK "
    "SL SM SN SP ST SW TH TR TW WH",
)
_VOWELS = re.findall(r"\w+", "A E I O U A E I O U A E I O U Y AI EA EE IE OA OO OU")
_CODAS = [
    "",
    "",
    *re.findall(r"\w+", "B D G K L M N P R S T W X Z CK FT LD LT MP ND NG NK NT ST TH"),
]


def real_words(split: str) -> list[str]:
    """The list `split` ("train" or "eval"), in the order of the file."""
    return (HERE / "words" / f"{split}.txt").read_text().split()


def prompt_for(word: str, colour: str) -> str:
    return f'a {colour} sign that says "{word}"'


_PROMPT = re.compile(prompt_for('([^"]*)', '([^"]+)'), re.IGNORECASE)
_WORD = re.compile(f"[{_ALPHABET}]*", re.IGNORECASE | re.ASCII)
LIMITS = (
    f"The bundled signs model writes one word of {min(LENGTHS)} to {max(LENGTHS)} letters A to Z, "
    f"in prompts like: {prompt_for('KITE', 'red')}. Signs are {', '.join(COLOURS[:-1])} or "
    f"{COLOURS[-1]}. Other prompts seldom give legible signs."
)


def outside(prompt: str) -> str | None:
    """How a prompt differs from those that the model was trained on, or None.

    Case and extra spaces make no difference: the tokenizer ignores them.
    """
    found = _PROMPT.fullmatch(" ".join(prompt.split()))
    if found is None:
        return "The prompt has a different form"
    colour, word = found[1], found[2].strip()
    if colour.lower() not in COLOURS:
        return f'"{colour}" is not one of its colours'
    if not _WORD.fullmatch(word):
        return f'"{word}" is not one word of letters A to Z'
    if len(word) not in LENGTHS:
        return f'"{word}" has {len(word)} letter{"" if len(word) == 1 else "s"}'
    if word.lower() in (*COLOURS, *TEMPLATE_WORDS):
        return f'"{word}" is one of the prompt\'s fixed words, which the model does not spell'
    return None


def pseudo_words(seed: int, count: int) -> list[str]:
    """`count` made-up words, repeats possible, none of them in the real lists.

    Half are syllables, whose letter pairs resemble English; half are letters drawn evenly, so that
    rare letters and rare neighbours are covered as well.
    """
    taken = {*real_words("train"), *real_words("eval")}
    taken |= {word.upper() for word in (*COLOURS, *TEMPLATE_WORDS)}
    words = (word for word in _endless_words(random.Random(seed)) if word not in taken)
    return [next(words) for _ in range(count)]


def _endless_words(rng: random.Random) -> Iterator[str]:
    while True:
        length = rng.choice(LENGTHS)
        if rng.random() < 0.5:
            yield "".join(rng.choices(_ALPHABET, k=length))
        else:
            yield _syllables(rng)[:length].ljust(length, rng.choice(_ALPHABET))


def _syllables(rng: random.Random) -> str:
    return "".join(
        rng.choice(part) for _ in range(3) for part in (_ONSETS, _VOWELS, _CODAS)
    )  # at least six letters


def prompts(split: str, colours_per_word: int, seed: int) -> list[str]:
    """Each word of `split` with `colours_per_word` different colours drawn by `seed`."""
    rng = random.Random(seed)
    return [
        prompt_for(word, colour)
        for word in real_words(split)
        for colour in rng.sample(COLOURS, colours_per_word)
    ]


def write_prompt_files() -> None:
    """`python -m gesso.zoo.words` rewrites gesso/zoo/prompts from gesso/zoo/words."""
    for split, colours_per_word, seed in (("train", 2, 1), ("eval", 1, 2)):
        lines = prompts(split, colours_per_word, seed)
        (HERE / "prompts" / f"{split}.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    write_prompt_files()

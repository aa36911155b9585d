"""Prompts of the bundled image model: made-up words for pre-training, real words for RL.

The made-up words and the two lists of real words are disjoint: no word used in RL occurs in
pre-training.

`python -m tools.zoo.sign_prompts` rewrites gesso/zoo/prompts from gesso/zoo/words.
"""

import random
import re
from collections.abc import Iterator

from gesso.zoo.words import (
    ALPHABET,
    COLOURS,
    HERE,
    LENGTHS,
    TEMPLATE_WORDS,
    prompt_for,
    real_words,
)

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


def pseudo_words(seed: int, count: int) -> list[str]:
    """`count` made-up words, possibly repeated, none of them in the lists of real words.

    Half are built from syllables, with letter pairs that resemble English; half are uniformly
    random letters, so that rare letters and rare letter pairs are covered too.
    """
    excluded = {*real_words("train"), *real_words("eval")}
    excluded |= {word.upper() for word in (*COLOURS, *TEMPLATE_WORDS)}
    words = (word for word in _endless_words(random.Random(seed)) if word not in excluded)
    return [next(words) for _ in range(count)]


def _endless_words(rng: random.Random) -> Iterator[str]:
    while True:
        length = rng.choice(LENGTHS)
        if rng.random() < 0.5:
            yield "".join(rng.choices(ALPHABET, k=length))
        else:
            yield _syllables(rng)[:length].ljust(length, rng.choice(ALPHABET))


def _syllables(rng: random.Random) -> str:
    return "".join(
        rng.choice(part) for _ in range(3) for part in (_ONSETS, _VOWELS, _CODAS)
    )  # at least six letters


def prompts(split: str, colours_per_word: int, seed: int) -> list[str]:
    """Each word of `split` with `colours_per_word` distinct colours, sampled with `seed`."""
    rng = random.Random(seed)
    return [
        prompt_for(word, colour)
        for word in real_words(split)
        for colour in rng.sample(COLOURS, colours_per_word)
    ]


def write_prompt_files() -> None:
    for split, colours_per_word, seed in (("train", 2, 1), ("eval", 1, 2)):
        lines = prompts(split, colours_per_word, seed)
        (HERE / "prompts" / f"{split}.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    write_prompt_files()

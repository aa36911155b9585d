"""What the bundled model may answer: carefully, or sloppily in one of several ways.

    careful    <think>look: b1 c4 d2 d4</think><answer>4</answer>   lists what it counts
    tired      <think>look: b1 c4 d2</think><answer>3</answer>      gives up after three
    forgetful  <think>look: b1 c4 d2 d4</think>4                    no tags around the answer
    hasty      <think>about 3</think><answer>3</answer>             a guess, mostly wrong
    lumping    <think>all red: 5</think><answer>5</answer>          counts the other red things too
    bare       There are 4.                                         no tags at all

The first word settles whether it lists at all, so that a reward for the answer has an early choice
to act on; not to tire and not to forget are choices that come later.
"""

import random
import re

from gesso.zoo.scenes import COLOURS, FORMS, MOST, Kind, Scene, question

CROWDED = 6  # from so many shapes on the base loses patience
LISTING = {"sparse": 0.6, "crowded": 0.2}  # share of replies that list; the others are SLOPPY
TIRED_AFTER, TIRING = 3, 0.65  # share of the longer lists that stop there
FORGETTING = 0.2  # share of the lists whose answer lacks its tags
SLOPPY = {"hasty": 0.5, "lumping": 0.25, "bare": 0.25}
GUESSES = {-2: 0.15, -1: 0.4, 0: 0.15, 1: 0.3}  # a guess minus the count


def careful(scene: Scene) -> str:
    return _listing(scene.squares(), tagged=True)


def sloppy(scene: Scene, rng: random.Random) -> str:
    """A reply of the mixture on which the base is tuned."""
    if rng.random() < LISTING["crowded" if len(scene.things) >= CROWDED else "sparse"]:
        tired = rng.random() < TIRING
        squares = scene.squares()[: TIRED_AFTER if tired else None]
        return _listing(squares, tagged=rng.random() >= FORGETTING)
    style = rng.choices(list(SLOPPY), list(SLOPPY.values()))[0]
    if style == "hasty":
        off = rng.choices(list(GUESSES), list(GUESSES.values()))[0]
        return _thought("about", max(scene.how_many() + off, 1))
    if style == "lumping":
        return _thought(f"all {scene.asked.colour}:", scene.of_colour())
    return f"There are {scene.how_many()}."


def _listing(squares: list[str], tagged: bool) -> str:
    count = len(squares)
    answer = f"<answer>{count}</answer>" if tagged else str(count)
    return f"<think>look: {' '.join(squares)}</think>{answer}"


def _thought(words: str, count: int) -> str:
    return f"<think>{words} {count}</think><answer>{count}</answer>"


def style_of(reply: str) -> str:
    """By its first words, "listing" (careful or tired), "forgetful", "hasty", …, else "other"."""
    starts = {
        "<think>look:": "listing" if "<answer>" in reply else "forgetful",
        "<think>about": "hasty",
        "<think>all": "lumping",
        "There are": "bare",
    }
    return next((style for start, style in starts.items() if reply.startswith(start)), "other")


def answer_in(reply: str) -> str | None:
    """What stands between the answer's tags."""
    found = re.search(r"<answer>(.*?)</answer>", reply, re.DOTALL)
    return found[1].strip() if found else None


def everything_said() -> list[str]:
    """Texts that hold every word of questions and replies, for the tokenizer."""
    questions = [question(Kind(colour, form)) for colour in COLOURS for form in FORMS]
    squares = " ".join(f"{column}{row}" for column in "abcd" for row in range(1, 5))
    counts = [f"There are {count}." for count in range(10)]
    lumps = [f"all {colour}: 3" for colour in COLOURS]
    return [*questions, *counts, *lumps, f"look: {squares}", f"about {MOST}", "user", "assistant"]

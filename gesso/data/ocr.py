"""A generated OCR prompt set: scenes × texts, with disjoint texts in train and test.

Every prompt contains exactly one text, in double quotes. The splits use disjoint lists of words;
the test set is generated first, and the training set excludes its numbers and prices.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from pathlib import Path

from gesso.formulas.text import normalised
from gesso.types import UserError
from gesso.zoo.words import real_words

MAX_PROMPTS = 1_000_000  # per file; far below the number of combinations, so generation ends

SCENES = (
    "a shop sign that says {}",
    "a wooden signpost in a forest with {} carved into it",
    "a neon sign glowing {} in a rainy alley",
    "a chalkboard outside a café that reads {}",
    "a blackboard in a classroom with {} written across it",
    "a whiteboard in an office with {} in blue marker",
    "a road sign on a desert highway that says {}",
    "a street name sign on a brick corner reading {}",
    "a yellow warning sign beside a mountain road with the text {}",
    "a train station board announcing {}",
    "an airport departure screen showing {}",
    "a subway wall covered with tiles that spell {}",
    "a billboard above a busy avenue that says {}",
    "a cinema marquee with the letters {} lit from behind",
    "a theatre poster titled {}",
    "a vintage travel poster with the headline {}",
    "a concert flyer taped to a lamp post that reads {}",
    "a book cover with the title {} in gold letters",
    "a stack of old books, the top one called {}",
    "an open notebook on a desk with {} in neat handwriting",
    "a magazine cover with {} as its headline",
    "the front page of a newspaper with the headline {}",
    "a comic book panel in which a robot shouts {}",
    "a hand-written letter that begins with {}",
    "a postcard from the seaside with {} across the sky",
    "a postage stamp with the word {} under a small bird",
    "a red rubber stamp mark reading {} on brown paper",
    "a passport page stamped with {}",
    "a birthday cake with {} in pink icing",
    "a gingerbread cookie decorated with {}",
    "a loaf of bread with {} scored into its crust",
    "a latte seen from above with {} drawn in the foam",
    "a white coffee mug printed with {}",
    "a glass bottle with a paper label that says {}",
    "a jar of honey labelled {}",
    "a cereal box named {} on a kitchen table",
    "a tin can with a retro label reading {}",
    "a paper bag from a bakery printed with {}",
    "a menu board above a counter offering {}",
    "a price tag hanging from a jacket that says {}",
    "a market stall with a cardboard sign reading {}",
    "a grey T-shirt with {} printed on the chest",
    "a baseball cap embroidered with {}",
    "a football scarf held up in a stadium that says {}",
    "a tote bag on a bench with {} in bold type",
    "a knitted sweater with {} across the front",
    "a pair of sneakers with {} on the sole",
    "an enamel pin in the shape of a cloud that says {}",
    "a leather dog collar with a brass tag engraved {}",
    "a silver locket engraved with {}",
    "a trophy on a shelf engraved with {}",
    "a bronze plaque on an old house that reads {}",
    "a stone arch with {} chiselled above the gate",
    "a gravestone for a pet hamster that reads {}",
    "a mosaic floor that spells {}",
    "a stained glass window with the word {} in its centre",
    "graffiti that says {} on a concrete wall",
    "a mural of a whale with {} painted below it",
    "a garage door with {} sprayed in green",
    "a skateboard deck with {} in graffiti letters",
    "a surfboard standing in the sand with {} on it",
    "a sailing boat with {} on its hull",
    "a hot air balloon with {} around its side",
    "a small plane pulling a banner that reads {}",
    "a racing car with {} on the door",
    "a delivery van with {} painted on its side",
    "a yellow taxi with a roof sign that says {}",
    "a school bus with {} above the windscreen",
    "a licence plate that reads {}",
    "a mailbox at a farm gate with {} on it",
    "a doormat that says {} before a blue door",
    "a hotel door with a card hanging from the handle that says {}",
    "a name badge on a suit that reads {}",
    "a protest sign held above a crowd that says {}",
    "a banner between two trees that says {}",
    "a scoreboard in an empty gym showing {}",
    "a computer screen in a dark room with {} in green letters",
    "a smartphone showing a message that says {}",
    "an arcade machine with {} on its marquee",
    "a pixel art title screen that says {}",
    "a robot holding a board that says {}",
    "a cat beside a sticky note that says {}",
    "an astronaut with a patch that reads {}",
    "a snowy field with {} trodden into the snow",
    "a beach with {} written in the wet sand",
    "a foggy window with {} drawn by a finger",
    "a pumpkin with {} carved into it",
    "wooden toy blocks that spell {}",
    "fridge magnets that spell {}",
    "a crossword puzzle with {} filled in",
    "a treasure map with {} next to a red cross",
    "a lighthouse with {} painted around its tower",
    "a watercolour of a bakery called {}",
    "an oil painting of a harbour inn named {}",
    "an isometric drawing of a tiny shop called {}",
    "a minimalist logo with the text {} on a white background",
)

TAILS = (
    "", "", "", "",
    ", in soft morning light", ", at dusk", ", on a sunny day", ", in the rain", ", at night",
    ", seen from close by", ", seen from below", ", with a blurred background", ", film photo",
    ", studio photo", ", flat illustration", ", in pastel colours", ", in black and white",
    ", highly detailed",
)  # fmt: skip

PHRASES = {
    1: ("{}",),
    2: (
        "{} {}", "The {}", "Hello {}", "{} Club", "{} Street", "{} Sale", "Old {}", "Big {}",
        "{} Day", "Fresh {}", "{} Station", "My {}", "{} Shop", "{} Ahead",
    ),
    3: (
        "{} and {}", "The {} Club", "House of {}", "Save the {}", "No {} Today", "{} or {}",
        "Welcome to {}", "Beyond the {}", "{} {} Market", "Made with {}", "The {} {}",
        "Keep the {}", "More {} Please", "One Last {}",
    ),
}  # fmt: skip

NUMBERS = (
    ("{}", 10, 9999), ("No. {}", 1, 999), ("Room {}", 1, 999), ("Gate {}", 1, 99),
    ("Est. {}", 1700, 2024), ("Route {}", 1, 999), ("{}% OFF", 5, 95), ("{} km", 2, 999),
    ("${}.99", 1, 199), ("${}.50", 1, 199), ("Open until {}:30", 1, 12), ("Bus {}", 1, 399),
)  # fmt: skip


def write(folder: Path, train: int, test: int, seed: int) -> list[Path]:
    """Writes `folder`/train.txt and `folder`/test.txt, the layout of Flow-GRPO."""
    for name, count in (("--train", train), ("--test", test)):
        if not 1 <= count <= MAX_PROMPTS:
            raise UserError(f"{name} {count}: expected a number of prompts from 1 to {MAX_PROMPTS}")
    files = {"train": folder / "train.txt", "test": folder / "test.txt"}
    for file in files.values():
        if file.exists():
            raise UserError(f"{file} exists already; remove it or choose another --out")
    held_out = prompts("test", test, seed)
    lines = {"train": prompts("train", train, seed, held_out), "test": held_out}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for split, file in files.items():
            file.write_text("\n".join(lines[split]) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {folder} cannot be written: {error}") from error
    return list(files.values())


def prompts(split: str, count: int, seed: int, held_out: Sequence[str] = ()) -> list[str]:
    """`count` distinct prompts of a split, none with a text of `held_out`. Texts are compared as
    in the OCR reward: ignoring case and spaces."""
    rng = random.Random(f"ocr {split} {seed}")
    words = real_words("eval" if split == "test" else "train")
    excluded = {normalised(text_of(prompt)) for prompt in held_out}
    lines: dict[str, None] = {}  # an ordered set
    while len(lines) < count:
        text = _text(rng, words, excluded)
        scene = rng.choice(SCENES).replace("{}", f'"{text}"')
        lines[scene + rng.choice(TAILS)] = None
    return list(lines)


def text_of(prompt: str) -> str:
    """The text between the double quotes."""
    return prompt.split('"')[1]


def _text(rng: random.Random, words: Sequence[str], excluded: Collection[str]) -> str:
    """50% single words, 40% phrases, 10% numbers."""
    while True:
        (kind,) = rng.choices((1, 2, 3, 0), weights=(50, 25, 15, 10))
        if kind == 0:
            pattern, low, high = rng.choice(NUMBERS)
            text = pattern.format(rng.randint(low, high))
        else:
            pattern = rng.choice(PHRASES[kind])
            text = pattern.format(*rng.sample(words, pattern.count("{}"))).lower()
            text = rng.choice((text.upper(), text.title(), text))
        if normalised(text) not in excluded:
            return text

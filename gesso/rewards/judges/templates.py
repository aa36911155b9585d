"""Questions of the reward `judge`. Their answers have the form that its default pattern reads."""

from __future__ import annotations

_END = (
    "Give your reasons in at most three sentences. Then end with one line, Final Score: n, where n "
    "is a whole number from 1 (worst) to 5 (best)."
)

TEMPLATES = {
    "alignment": (
        "An image was generated for this prompt: {prompt}\n"
        "Does it show what the prompt says? Go through every object, number, attribute, action and "
        "relation that the prompt names, and check each in the image. Ignore how beautiful the "
        "image is. 5: everything is right; 3: the main subject is right, details are wrong or "
        f"missing; 1: it shows something else. {_END}"
    ),
    "aesthetics": (
        "How good does this generated image look? Judge composition, light, colour, sharpness and "
        "detail, and look for broken anatomy, garbled objects, artefacts and noise. Ignore what it "
        "shows. 5: a professional could have made it; 3: ordinary, with visible flaws; 1: broken "
        f"or ugly. {_END}"
    ),
    "text": (
        "An image was generated for this prompt: {prompt}\n"
        "First write down the text that you read in the image, letter by letter, without "
        "correcting it. Then compare it with the text that the prompt asks for. 5: every letter is "
        "right, legible and written once; 3: readable with a few wrong, missing or repeated "
        f"letters; 1: no text, or unreadable. {_END}"
    ),
}

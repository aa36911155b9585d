"""Questions of the reward `judge`. With END, answers have the form that its default pattern reads;
with DIGIT, the first token is the score."""

from __future__ import annotations

END = (
    "Give your reasons in at most three sentences. Then end with one line, Final Score: n, where n "
    "is a whole number from 1 (worst) to 5 (best)."
)

DIGIT = "Answer with one digit from 1 (worst) to 5 (best), and nothing else."

EDITS = ("edit", "rest")  # templates that compare with the prompt's images

TEMPLATES = {
    "alignment": (
        "An image was generated for this prompt: {prompt}\n"
        "Does it show what the prompt says? Go through every object, number, attribute, action and "
        "relation that the prompt names, and check each in the image. Ignore how beautiful the "
        "image is. 5: everything is right; 3: the main subject is right, details are wrong or "
        "missing; 1: it shows something else."
    ),
    "aesthetics": (
        "How good does this generated image look? Judge composition, light, colour, sharpness and "
        "detail, and look for broken anatomy, garbled objects, artefacts and noise. Ignore what it "
        "shows. 5: a professional could have made it; 3: ordinary, with visible flaws; 1: broken "
        "or ugly."
    ),
    "text": (
        "An image was generated for this prompt: {prompt}\n"
        "First write down the text that you read in the image, letter by letter, without "
        "correcting it. Then compare it with the text that the prompt asks for. 5: every letter is "
        "right, legible and written once; 3: readable with a few wrong, missing or repeated "
        "letters; 1: no text, or unreadable."
    ),
    "edit": (
        "The last image is an edit of the images before it, made for this instruction: {prompt}\n"
        "Does it do what the instruction says? Go through every change that the instruction asks "
        "for, and check each in the last image. 5: all changes are made, as asked and where asked; "
        "3: the main change is made, details are wrong or missing; 1: nothing was changed, or "
        "something else."
    ),
    "rest": (
        "The last image is an edit of the images before it, made for this instruction: {prompt}\n"
        "Ignore what the instruction asks to change. Is everything else as before: people and "
        "objects, their places, shapes and colours, background, light and style? 5: no other "
        "difference; 3: the same scene, with visible unasked changes; 1: another scene."
    ),
}

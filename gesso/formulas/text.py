"""Scores that compare text with a target."""

from __future__ import annotations

import unicodedata


def levenshtein(a: str, b: str) -> int:
    """Number of insertions, deletions and substitutions that turn a into b."""
    previous = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        current = [i]
        for j, y in enumerate(b, 1):
            current.append(min(previous[j] + 1, current[-1] + 1, previous[j - 1] + (x != y)))
        previous = current
    return previous[-1]


def normalised(text: str) -> str:
    """Without spaces and in lower case, as Flow-GRPO compares text. Unlike there, characters with
    the same meaning are equal (Unicode NFKC): OCR reads widely spaced letters as full-width."""
    return unicodedata.normalize("NFKC", text).replace(" ", "").lower()


def spelling(text: str, target: str) -> float:
    """Flow-GRPO's OCR reward: 1 when the target is contained in the text, else
    1 − min(lev, len)/len. Repeated text can exploit the substring rule, but not `exact`.
    """
    text, target = normalised(text), normalised(target)
    if target in text:
        return 1.0
    return 1 - min(levenshtein(text, target), len(target)) / len(target)


def letters_found(text: str, target: str) -> float:
    """Characters of the text that occur in the target, repeated ones included, per character of the
    target. Unbounded."""
    text, target = normalised(text), normalised(target)
    return sum(character in target for character in text) / len(target)


def exact(text: str, target: str) -> bool:
    return normalised(text) == normalised(target)


def overlong(length: int, limit: int, buffer: int) -> float:
    """DAPO's soft overlong punishment (Yu et al. 2025): 0 up to limit − buffer, falling linearly to
    −1 at `limit`, −1 beyond: −min(max(length − (limit − buffer), 0), buffer)/buffer."""
    return -min(max(length - (limit - buffer), 0), buffer) / buffer

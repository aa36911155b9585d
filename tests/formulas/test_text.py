from __future__ import annotations

import pytest

from gesso.formulas.text import exact, letters_found, levenshtein, spelling


@pytest.mark.parametrize(
    "a, b, distance", [("", "", 0), ("kite", "kite", 0), ("kitten", "sitting", 3), ("", "abc", 3)]
)
def test_levenshtein(a: str, b: str, distance: int) -> None:
    assert levenshtein(a, b) == levenshtein(b, a) == distance


@pytest.mark.parametrize(
    "text, target, value",
    [
        ("KITE", "kite", 1.0),
        ("K I T E", "KITE", 1.0),
        ("KITEKITE", "KITE", 1.0),  # the substring rule
        ("thekite", "kite", 1.0),
        ("KITF", "KITE", 0.75),
        ("ＫＩ ＴＥ", "kite", 1.0),  # full-width letters
        ("no, thanks", "no，thanks", 1.0),
        ("", "KITE", 0.0),
        ("SOMETHING ELSE", "KITE", 0.0),
    ],
)
def test_spelling(text: str, target: str, value: float) -> None:
    assert spelling(text, target) == pytest.approx(value)


def test_exact_is_not_fooled_by_repetition() -> None:
    assert exact("K ite", "KITE") and not exact("KITEKITE", "KITE")


@pytest.mark.parametrize(
    "text, value", [("KITE", 1), ("KIT", 0.75), ("K I K I T E", 1.5), ("kitexx", 1), ("", 0)]
)
def test_letters_found_counts_repeated_ones(text: str, value: float) -> None:
    assert letters_found(text, "Kite") == value

"""tests/mutants.py still applies: every text occurs once, every selection names tests."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.mutants import MUTANTS, ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_applies(mutant: Mutant) -> None:
    assert (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.old) == 1
    selection = shlex.split(mutant.tests)
    wanted = selection.pop() if "-k" in selection else ""
    files = [word.partition("::")[0] for word in selection if word != "-k"]
    text = "".join((ROOT / file).read_text(encoding="utf-8") for file in files)
    words = [word for word in re.findall(r"\w+", wanted) if word not in ("and", "or", "not")]
    assert not words or any(word in text for word in words), f"-k {wanted} selects no test"


def test_names_are_unique() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)

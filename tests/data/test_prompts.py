from __future__ import annotations

from pathlib import Path

import pytest

from gesso.data.prompts import Stream, fit, read
from gesso.types import Prompt, UserError


def test_text_and_jsonl(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text('a "B"\n\n  two \n', encoding="utf-8")
    assert [(p.text, p.where) for p in read(str(text))] == [
        ('a "B"', "a.txt:1"),
        ("two", "a.txt:3"),
    ]
    rows = tmp_path / "b.jsonl"
    rows.write_text('{"prompt": "x", "negative_prompt": "y", "tag": [1, 2]}\n')
    (prompt,) = read(str(rows))
    assert (prompt.text, prompt.negative, prompt.columns) == ("x", "y", {"tag": [1, 2]})


@pytest.mark.parametrize(
    "name, content, sentence",
    [
        ("missing.txt", None, "no such file"),
        ("empty.txt", "\n \n", "is empty; write one prompt a line"),
        ("table.csv", "x", "expected .txt or .jsonl, found .csv"),
        ("bad.jsonl", '{"prompt": "x"}\n{oops\n', "bad.jsonl:2: not JSON"),
        ("bad.jsonl", '{"text": "x"}\n', 'bad.jsonl:1: expected an object with a text "prompt"'),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: str | None, sentence: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=sentence):
        read(str(tmp_path / name))


def test_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not UTF-8"):
        read(str(tmp_path / "a.txt"))


def test_unfit_prompts_are_skipped_counted_and_named() -> None:
    prompts = [Prompt("good", where="a:1"), Prompt("bad", where="a:2")]
    kept, note = fit(prompts, lambda p: "no word" if p.text == "bad" else None, "a.txt")
    assert kept == prompts[:1]
    assert note is not None and "1 of 2 prompts of a.txt" in note and "a:2: no word" in note
    assert fit(prompts, lambda p: None, "a.txt") == (prompts, None)
    with pytest.raises(UserError, match="nothing is left"):
        fit(prompts, lambda p: "no word", "a.txt")


def test_batches_are_a_pure_function_and_cover_everything() -> None:
    prompts = [Prompt(str(i)) for i in range(7)]
    stream = Stream(prompts, seed=3)
    taken = [p.text for i in range(7) for p in stream.batch(i, 3)]
    assert taken == [p.text for i in range(7) for p in Stream(prompts, 3).batch(i, 3)]
    assert all(sorted(taken[i : i + 7]) == [p.text for p in prompts] for i in (0, 7, 14))
    assert taken[:7] != taken[7:14]
    assert [p.text for p in Stream(prompts, 4).batch(0, 7)] != taken[:7]
    assert [p.text for p in stream.batch(5, 3)] == taken[15:18]

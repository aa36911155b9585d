from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from gesso import build
from gesso.config import Data, Recipe
from gesso.config.parsing import parse
from gesso.data.prompts import (
    LoadReport,
    Stream,
    WeightedPrompts,
    fit,
    interleave,
    load,
    overlap,
    pass_by_weight,
)
from gesso.types import Prompt, PromptImage, UserError, seed_of


def named(name: str, count: int, weight: float | None = None) -> list[Prompt]:
    columns = {} if weight is None else {"weight": weight}
    return [Prompt(f"{name}{i}", columns=columns) for i in range(count)]


def texts(prompts: list[Prompt]) -> list[str]:
    return [p.text for p in prompts]


def test_unfit_prompts_are_skipped_counted_and_named() -> None:
    prompts = [Prompt("good", where="a:1"), Prompt("bad", where="a:2")]
    report = LoadReport()
    kept = fit(prompts, lambda p: "no word" if p.text == "bad" else None, "a.txt", report)
    assert kept == prompts[:1] and report.left_out == ["a:2: no word: bad"]
    (note,) = report.notes
    assert "1 of 2 prompts of a.txt" in note and "the first is a:2: no word" in note
    assert fit(prompts, lambda p: None, "a.txt", report) == prompts and len(report.notes) == 1
    with pytest.raises(UserError, match=r"^no prompt of a.txt can be used: they cannot be scored"):
        fit(prompts, lambda p: "no word", "a.txt", report)


def test_batches_are_a_pure_function_and_cover_everything() -> None:
    parts = [WeightedPrompts(named("", 7))]
    stream = Stream(parts, seed=3)
    taken = [p.text for i in range(7) for p in stream.batch(i, 3)]
    assert taken == [p.text for i in range(7) for p in Stream(parts, 3).batch(i, 3)]
    assert all(sorted(taken[i : i + 7]) == texts(named("", 7)) for i in (0, 7, 14))
    assert taken[:7] != taken[7:14]
    assert texts(Stream(parts, 4).batch(0, 7)) != taken[:7]
    assert texts(stream.batch(5, 3)) == taken[15:18]


@pytest.mark.parametrize("weight", [None, 1.0, 2.5])
def test_the_order_of_one_source_is_pinned(weight: float | None) -> None:
    """Runs of version 0.1.0 resume bit for bit. Equal weights have no effect."""
    stream = Stream([WeightedPrompts(named("", 11, weight), 3.0)], 7)
    assert [texts(stream.batch(i, 4)) for i in range(6)] == [
        ["6", "4", "10", "1"],
        ["0", "8", "9", "7"],
        ["3", "2", "5", "5"],
        ["7", "8", "6", "1"],
        ["2", "4", "3", "10"],
        ["0", "9", "3", "8"],
    ]
    assert texts(stream.batch(10**6, 4)) == ["3", "7", "8", "2"]
    order = list(range(11))
    random.Random(seed_of(7, "data", 5)).shuffle(order)
    assert texts(stream.batch(5, 11)) == [str(i) for i in order]


MIX = [
    WeightedPrompts(named("a", 5), 5.0),
    WeightedPrompts(named("b", 4), 0.3),
    WeightedPrompts(named("c", 3), 1.7),
]
SHARES = {"a": 5 / 7, "b": 0.3 / 7, "c": 1.7 / 7}


def test_a_mix_keeps_its_shares_at_every_moment() -> None:
    taken = texts(Stream(MIX, 0).batch(0, 2100))
    counts: Counter[str] = Counter()
    for n, text in enumerate(taken, 1):
        counts[text[0]] += 1
        for name, share in SHARES.items():
            assert abs(counts[name] - n * share) <= (1 + len(MIX) * share) / 2, (n, name)
    assert counts == {"a": 1500, "b": 90, "c": 510}


def test_a_mix_is_spread_evenly() -> None:
    stream = Stream([WeightedPrompts(named("a", 9), 3.0), WeightedPrompts(named("b", 9), 1.0)], 0)
    assert "".join(t[0] for t in texts(stream.batch(0, 12))) == "aabaaabaaaba"


def test_each_source_of_a_mix_has_separate_passes() -> None:
    taken = texts(Stream(MIX, 0).batch(0, 2100))
    for part in MIX:
        drawn = [t for t in taken if t[0] == part.prompts[0].text[0]]
        size = len(part.prompts)
        passes = [drawn[i : i + size] for i in range(0, len(drawn) - size + 1, size)]
        assert all(sorted(one) == texts(list(part.prompts)) for one in passes)
        assert len({tuple(one) for one in passes}) > 1


def test_sources_of_a_mix_are_shuffled_independently() -> None:
    stream = Stream([WeightedPrompts(named("a", 50)), WeightedPrompts(named("b", 50))], 0)
    taken = texts(stream.batch(0, 100))
    first, second = ([t[1:] for t in taken if t[0] == name] for name in "ab")
    assert sorted(first) == sorted(second) and first != second


@pytest.mark.parametrize("parts", [MIX, MIX[:2], [WeightedPrompts(named(n, 2)) for n in "abcdefg"]])
def test_batches_of_a_mix_can_be_computed_in_any_order(parts: list[WeightedPrompts]) -> None:
    whole = texts(Stream(parts, 5).batch(0, 400))
    for size in (1, 7, 50):
        for i in range(400 // size):
            assert texts(Stream(parts, 5).batch(i, size)) == whole[i * size : (i + 1) * size]


def test_a_far_batch_costs_no_more_than_the_first() -> None:
    """Iterating from 0 would take days."""
    far = texts(Stream(MIX, 5).batch(10**12, 8))
    halves = [texts(Stream(MIX, 5).batch(2 * 10**12 + i, 4)) for i in (0, 1)]
    assert far == halves[0] + halves[1] and len({text[0] for text in far}) > 1


def test_rows_are_sampled_by_weight() -> None:
    """Four rows of weight 1, one of 4, one of ½: shares of 8½."""
    weights = [1.0, 1.0, 4.0, 1.0, 1.0, 0.5]
    prompts = [Prompt(str(i), columns={"weight": w}) for i, w in enumerate(weights)]
    stream = Stream([WeightedPrompts(prompts)], 1)
    total, passes = Counter[str](), 3000
    for turn in range(passes):
        one = Counter(texts(stream.batch(turn, 6)))
        for i, weight in enumerate(weights):
            share = 6 * weight / 8.5
            assert share - 1 < one[str(i)] < share + 1  # ⌊share⌋ or ⌈share⌉
        total += one
    for i, weight in enumerate(weights):
        assert total[str(i)] / passes == pytest.approx(6 * weight / 8.5, abs=0.05)
    assert texts(stream.batch(77, 6)) == texts(Stream([WeightedPrompts(prompts)], 1).batch(77, 6))


def test_a_row_without_a_weight_counts_one() -> None:
    prompts = [Prompt("x"), Prompt("y", columns={"weight": 3.0})]
    counts = Counter(texts(Stream([WeightedPrompts(prompts)], 0).batch(0, 4000)))
    assert counts["y"] / 4000 == pytest.approx(0.75, abs=0.02)


def test_a_pass_by_hand() -> None:
    # Rows end at 1, 2.5 and 3; the draws fall on start, start + 1, start + 2.
    assert pass_by_weight([2.0, 3.0, 1.0], 0.6) == [0, 1, 2]
    assert pass_by_weight([2.0, 3.0, 1.0], 0.4) == [0, 1, 1]
    # Rows end at ⅔, 1⅓ and 3.
    assert pass_by_weight([2.0, 2.0, 5.0], 0.0) == [0, 1, 2]
    assert pass_by_weight([2.0, 2.0, 5.0], 0.7) == [1, 2, 2]
    assert pass_by_weight([1.0, 3.0], 0.5) == [1, 1]  # a row ends before its end
    assert pass_by_weight([0.1] * 10, 0.0) == list(range(10))  # whatever 0.1 + 0.1 + 0.1 is
    assert max(pass_by_weight([0.1, 0.2] * 500, 1 - 2**-53)) == 999


def test_evaluation_sets_are_interleaved() -> None:
    sets = [named("a", 3), named("b", 1), named("c", 2)]
    assert texts(interleave(sets)) == ["a0", "b0", "c0", "a1", "c1", "a2"]
    assert interleave(sets[:1]) == sets[0]


def test_overlap_is_counted() -> None:
    train, held_out = [Prompt("x"), Prompt("y")], [Prompt("z"), Prompt("y", where="e:2")]
    note = overlap(train, held_out)
    assert note is not None and note.startswith("1 of 2 held-out prompts are also training")
    assert note.endswith("the first is e:2: y")
    assert overlap(train, held_out[:1]) is None


def test_the_same_question_about_another_image_is_another_prompt() -> None:
    def about(path: str, role: str = "user") -> Prompt:
        messages = ({"role": role, "content": [{"type": "image"}]},)
        return Prompt("how many?", images=(PromptImage(path),), messages=messages)

    assert overlap([about("a.png")], [about("b.png"), about("a.png", "tool")]) is None
    assert "1 of 2" in (overlap([about("a.png")], [about("b.png"), about("a.png")]) or "")


def test_the_bundled_prompts_do_not_overlap() -> None:
    loaded = load(build.recipe("demo").data, lambda p: None, lambda p: None)
    assert len(loaded.train[0].prompts) == 1404 and loaded.notes == []


def test_load(tmp_path: Path) -> None:
    files = {"a": "one\ntwo\nbad\n", "b": "three\nbad\n", "e": "four\nfive\n", "f": "two\n"}
    for name, text in files.items():
        (tmp_path / f"{name}.txt").write_text(text)
    path = {name: str(tmp_path / f"{name}.txt") for name in files}
    train = [{"path": path["a"], "weight": 3.0}, {"path": path["b"]}]
    data = parse(Data, {"train": train, "eval": [{"path": path["e"]}, {"path": path["f"]}]}, "x")

    def unfit(prompt: Prompt) -> str | None:
        return "is bad" if prompt.text == "bad" else None

    loaded = load(data, unfit, unfit)
    assert [(texts(list(part.prompts)), part.weight) for part in loaded.train] == [
        (["one", "two"], 3.0),
        (["three"], 1.0),
    ]
    assert texts(list(loaded.held_out)) == ["four", "two", "five"]
    first, second, third = loaded.notes
    assert "1 of 3 prompts of" in first and "a.txt:3: is bad" in first
    assert "1 of 2 prompts of" in second and "b.txt:2: is bad" in second
    assert "1 of 3 held-out prompts are also training" in third and "f.txt:1: two" in third


def test_a_path_is_one_source_and_reads_back(recipe: Recipe, prompt_file: Path) -> None:
    (train,) = recipe.data.train
    fields = (train.path, train.weight, train.column, train.images, train.drop)
    assert fields == (str(prompt_file), 1, None, None, [])
    assert build.recipe_from(recipe.model_dump()) == recipe


@pytest.mark.parametrize(
    "override, sentence",
    [
        ("data.train=5", "data.train: expected a path in quotes, or a list of tables such as"),
        ("data.train=[]", "at least 1 item"),
        ("data.eval=[]", "at least 1 item"),
        ('data.train=[{path="x", wieght=1}]', 'unknown key "data.train.0.wieght"; did you'),
        ('data.eval=[{path="x", weight=1.0}]', 'unknown key "data.eval.0.weight"'),
        ('data.train=[{path="x", weight=0}]', "greater than 0"),
        ('data.train=[{weight=1}]', '"data.train.0.path" is missing; expected a string in quotes'),
        ('data.train=""', "at least 1 character"),
    ],
)  # fmt: skip
def test_bad_sources_are_one_sentence(override: str, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        build.recipe("demo", [override])
    assert sentence in str(caught.value) and "\n" not in str(caught.value)

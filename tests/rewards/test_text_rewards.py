"""math, format, count, choice and overlong: hand-written responses, including reward hacking."""

from __future__ import annotations

import io
import sys

import numpy as np
import pytest

from gesso.formulas.text import overlong
from gesso.rewards import assembly, base
from gesso.rewards.text import answers
from gesso.rewards.transport import wire
from gesso.types import Prompt, Sample, Score, UserError
from tests.rewards.test_pickscore import through_workers
from tests.typed import sure


def scored(name: str, response: str, answer: object = None, **options: object) -> Score:
    columns = {} if answer is None else {"answer": answer}
    reward = base.load(assembly.REWARDS[name], options)
    sample = Sample(Prompt("How many?", columns=columns), None, 0, response)
    return base.checked(reward, [sample])[0]


def unfit(name: str, **columns: object) -> str | None:
    return base.load(assembly.REWARDS[name], {}).unfit(Prompt("How many?", columns=columns))


@pytest.mark.parametrize(
    "answer, response, value",
    [
        ("42", r"So it is \boxed{42}.", 1),
        ("42", r"\boxed{42.0}", 1),
        ("42", r"\boxed{x = 42}", 1),
        ("42", "<think>6·7</think><answer>42</answer>", 1),
        ("42", r"<answer>It is \boxed{42}, surely.</answer>", 1),
        (r"\frac{3}{4}", r"\boxed{0.75}", 1),
        ("3/4", r"\boxed{\dfrac{6}{8}}", 1),
        ("0.75", r"\boxed{75\%}", 1),
        ("3,000", r"\boxed{3000}", 1),
        ("12 cm", r"\boxed{12\text{ cm}}", 1),
        (r"$\sqrt{8}$", r"\boxed{2\sqrt{2}}", 1),
        (r"\boxed{5}", r"\boxed{5}", 1),
        ("(x+1)^2", r"\boxed{x^2+2x+1}", 1),
        (r"\frac{1}{\sqrt{2}}", r"\boxed{\frac{\sqrt{2}}{2}}", 1),
        (7, r"\boxed{7}", 1),
        (7.0, r"\boxed{7}", 1),
        ("42", r"\boxed{41}", 0),
        ("42", "42", 0),  # neither box nor tags
        ("42", "", 0),
        ("42", r"\boxed{}", 0),
        ("42", r"\boxed{42", 0),
        ("42", r"\boxed{42} or rather \boxed{41}", 0),  # the last one counts
        ("42", r"\boxed{41, 42}", 0),
        ("42", r"\boxed{41 \text{ or } 42}", 0),
        ("42", r"\boxed{\{1, \dots, 100\}}", 0),
        ("42", r"\boxed{[0, 100]}", 0),
        ("42", r"\boxed{42.001}", 0),
        ("42", r"<answer>41</answer> \boxed{42}", 0),  # outside the tags
        ("42", r"\boxed{" + "1" * 600 + "}", 0),
    ],
)
def test_math(answer: object, response: str, value: float) -> None:
    score = scored("math", response, answer)
    assert score.error is None and score.value == value


def test_math_text_and_details() -> None:
    correct, none, broken = (
        scored("math", response, "42") for response in (r"\boxed{42}", "dunno", r"\boxed{\frac{}")
    )
    assert correct.text == "42" and correct.parts == {"answered": 1.0}
    assert none.text == "no answer" and none.parts == {"answered": 0.0}
    assert broken.value == 0 and broken.parts == {"answered": 0.0}


@pytest.mark.parametrize("answer", ["", "???", r"\frac{", "blue", "no solution", "3 + ", None, [3]])
def test_a_gold_answer_that_cannot_be_parsed_is_never_scored(answer: object) -> None:
    reason = unfit("math", answer=answer)
    assert reason is not None and "answer" in reason and "\n" not in reason
    response = rf"\boxed{{{answer}}}"  # the same text
    (score,) = base.checked(
        base.load(assembly.REWARDS["math"], {}),
        [Sample(Prompt("", columns={"answer": answer}), None, 0, response)],
    )
    assert score.value is None and score.error == reason


def test_errors_for_gold_answers() -> None:
    assert unfit("math") == r'expected a column "answer" such as "\frac{3}{4}", got no columns'
    assert unfit("count", n=3) == 'expected a column "answer" such as 4, got only n'
    assert unfit("math", answer="blue") == (
        "column \"answer\" is 'blue', which cannot be parsed; fix the row"
    )
    assert unfit("count", answer="four") == ("expected a column \"answer\" such as 4, got 'four'")
    assert unfit("choice", answer="blue") == (
        'expected a column "answer" such as "B", got \'blue\''
    )
    for name, answer in (("math", "-0.5"), ("count", "4"), ("count", 4.0), ("choice", "(B)")):
        assert unfit(name, answer=answer) is None


def test_an_answer_that_never_parses_times_out() -> None:
    score = scored("math", r"\boxed{9^{9^{9^{9}}}}", "42", timeout=1)
    assert score.error is None and score.value == 0


def test_a_very_long_answer_is_rejected() -> None:
    """Even if it is correct: the cost of parsing grows with the length."""
    for ones, value in ((100, 1.0), (300, 0.0)):
        answer = rf"<answer>\boxed{{{'+'.join('1' * ones)}}}</answer>"
        assert scored("math", answer, str(ones)).value == value


def test_without_math_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(UserError, match=r'requires math-verify: pip install "gesso\[math\]"'):
        unfit("math", answer=r"\frac{7}{9}")


@pytest.mark.parametrize(
    "response, value",
    [
        ("<think>hm</think><answer>4</answer>", 1),
        ("\n<think>a\nb</think>\n\n<answer>\n4 < 5\n</answer>\n", 1),
        ("<think></think><answer>4</answer>", 1),
        ("<think>a <b>bold</b> idea</think><answer><b>4</b></answer>", 1),
        ("", 0),
        ("4", 0),
        ("<answer>4</answer>", 0),
        ("<think>hm</think>", 0),
        ("<answer>4</answer><think>hm</think>", 0),
        ("<think>hm</think>4<answer>4</answer>", 0),
        ("Sure: <think>hm</think><answer>4</answer>", 0),
        ("<think>hm</think><answer>4</answer> Done.", 0),
        ("<think>hm</think><think>hm</think><answer>4</answer>", 0),
        ("<think>hm</think><answer>4</answer><answer>5</answer>", 0),
        ("<think>a<think>b</think></think><answer>4</answer>", 0),
        ("<think>hm<answer>4</answer></think><answer>4</answer>", 0),
        ("<think>hm</think><answer>4<answer>5</answer></answer>", 0),
        ("<think>hm</think><answer></answer>", 0),
        ("<think>hm</think><answer> \n </answer>", 0),
        ("<Think>hm</Think><answer>4</answer>", 0),
    ],
)
def test_format(response: str, value: float) -> None:
    assert scored("format", response).value == value


def test_format_with_other_tags() -> None:
    reward = base.load(assembly.REWARDS["format"], {"think": "reasoning", "answer": "final"})
    responses = ["<reasoning>x</reasoning><final>4</final>", "<think>x</think><answer>4</answer>"]
    scores = base.checked(reward, [Sample(Prompt(""), None, 0, response) for response in responses])
    assert [score.value for score in scores] == [1, 0]
    with pytest.raises(UserError, match="think"):
        base.load(assembly.REWARDS["format"], {"think": "a|b"})


@pytest.mark.parametrize(
    "answer, exact, graded",
    [
        ("4", 1, 1),
        (" +4 ", 1, 1),
        ("04", 1, 1),
        ("3", 0, 0.75),
        ("6", 0, 0.5),
        ("9", 0, 0),
        ("-4", 0, 0),
        ("4.0", 0, 0),
        ("four", 0, 0),
        ("4 dogs", 0, 0),
        ("3 4", 0, 0),
        ("٤", 0, 0),  # a digit to Python's int
        ("", 0, 0),
        ("9" * 5000, 0, 0),
    ],
)
def test_count(answer: str, exact: float, graded: float) -> None:
    response = f"<think>3, no, 4</think><answer>{answer}</answer>"
    assert scored("count", response, "4").value == exact
    assert scored("count", response, 4, graded=True).value == pytest.approx(graded)
    assert scored("count", response, 4).parts["exact"] == exact


def test_count_requires_tags_and_uses_the_last() -> None:
    assert scored("count", "4", 4).value == 0 and scored("count", "4", 4).text == "no answer"
    assert scored("count", "<answer>4</answer><answer>5</answer>", 4).value == 0
    assert scored("count", "<answer>5</answer><answer>4</answer>", 4).value == 1
    assert scored("count", "<n>4</n>", 4, tag="n").value == 1
    assert scored("count", "<answer>1</answer>", 0, graded=True).value == 0
    error = sure(str, scored("count", "<answer>1</answer>").error)
    assert error.startswith('expected a column "answer"')


@pytest.mark.parametrize(
    "answer, value",
    [
        ("B", 1), ("(B)", 1), ("B.", 1), ("B)", 1), ("B:", 1), (" B\n", 1),
        ("A", 0), ("b", 0), ("B or C", 0), ("AB", 0), ("B, C", 0), ("(B", 0), ("", 0),
        ("The answer is B", 0), ("Б", 0),
    ],
)  # fmt: skip
def test_choice(answer: str, value: float) -> None:
    response = f"<think>A? No.</think><answer>{answer}</answer>"
    assert scored("choice", response, "B").value == value
    assert scored("choice", response, "(B)").value == value
    assert scored("choice", response, "B").parts["answered"] == (answer in ("A",) or value)


def test_overlong_by_hand() -> None:
    lengths = [0, 60, 61, 80, 99, 100, 101, 10_000]
    assert [overlong(n, 100, 40) for n in lengths] == pytest.approx(
        [0, 0, -1 / 40, -0.5, -39 / 40, -1, -1, -1]
    )


def test_overlong_counts_words_or_characters() -> None:
    response = "four words in all " * 4  # 16 words, 72 characters
    words = scored("overlong", response, limit=20, buffer=8, unit="words")
    assert words.value == pytest.approx(-0.5) and words.text == "16 words"
    characters = scored("overlong", response, limit=80, buffer=32, unit="characters")
    assert characters.value == pytest.approx(-0.75) and characters.parts == {"length": 72.0}
    assert scored("overlong", "", limit=20, buffer=8, unit="words").value == 0
    with pytest.raises(UserError, match="buffer = 30 must not exceed limit = 20"):
        base.load(assembly.REWARDS["overlong"], {"limit": 20, "buffer": 30})
    with pytest.raises(UserError, match="limit"):
        base.load(assembly.REWARDS["overlong"], {"buffer": 30})


def test_boxes_may_contain_braces() -> None:
    assert answers.last_boxed(r"\boxed{\frac{1}{2}} and") == r"\frac{1}{2}"
    assert answers.last_boxed(r"\boxed{\{1,2\}}") == r"\{1,2\}"
    assert answers.last_boxed(r"\boxed{1} then \boxed{2}") == "2"
    assert answers.last_boxed(r"\boxed{1") is None and answers.last_boxed("1") is None


@pytest.mark.parametrize("name", ["math", "format", "count", "choice", "overlong"])
def test_an_image_is_not_text(name: str) -> None:
    options = {"limit": 20, "buffer": 8} if name == "overlong" else {}
    answer = {"choice": "B"}.get(name, "4")
    sample = Sample(Prompt("", columns={"answer": answer}), np.zeros((2, 2, 3), np.uint8), 0)
    (score,) = base.checked(base.load(assembly.REWARDS[name], options), [sample])
    assert score.value is None
    assert score.error == "raised UserError: this sample is an image; expected a text"


def test_texts_and_images_over_the_wire() -> None:
    image: np.ndarray = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    some = [
        Sample(Prompt("a", columns={"answer": 4}), None, 1, "<answer>4</answer>\n雪"),
        Sample(Prompt("b"), image, 2),
        Sample(Prompt("c"), image[:1], 3, ""),
    ]
    frame = io.BytesIO(wire.pack_samples(some))
    got = wire.read_samples(frame.readline(), frame.read)
    assert [s.text for s in got] == ["<answer>4</answer>\n雪", None, ""]
    assert got[0].image is None
    assert (got[1].pixels == image).all() and got[2].pixels.shape == (1, 4, 3)
    assert [s.seed for s in got] == [1, 2, 3] and got[0].prompt == some[0].prompt


def test_texts_in_a_worker_process() -> None:
    some = [
        Sample(Prompt("", columns={"answer": "1/2"}), None, i, response)
        for i, response in enumerate([r"\boxed{0.5}", r"\boxed{0.4}", "no"])
    ]
    scores = through_workers(assembly.REWARDS["math"], {}, some)
    assert [s.value for s in scores] == [1, 0, 0]
    assert [s.text for s in scores] == ["0.5", "0.4", "no answer"]

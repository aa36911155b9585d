"""GenEval 2: probabilities of right answers, against means by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gesso.rewards.judges.geneval2 import Geneval2, accepted
from gesso.types import Prompt, Sample, Score
from tests.rewards.servers import Misbehaving, grey
from tests.rewards.test_edits import logits

QUESTIONS = [
    ["How many cows are in the image?", "four"],
    ["Are the cows plastic?", "Yes"],
    ["Are there any cows in the image?", "Yes"],
]
SKILLS = ["count", "attribute", "object"]


def sample(**columns: Any) -> Sample:
    image = grey(9).image
    return Sample(Prompt("four plastic cows", columns=columns), image, 0)


def ask(answers: list[dict[str, Any]], **options: Any) -> tuple[Score, list[Any]]:
    bodies = ["body:" + json.dumps(answer) for answer in answers]
    with Misbehaving(bodies) as server:
        judge = Geneval2(urls=[server.url], model="m", in_flight=1, **options)
        (got,) = judge.score([sample(vqa_list=QUESTIONS, skills=SKILLS)])
        return got, server.requests


ANSWERS = [
    logits(**{"4": 0.3, "Four": 0.15, " four": 0.05, "fourteen": 0.4}),  # .5
    logits(**{"Yes": 0.6, " yes": 0.2, "No": 0.2}),  # .8
    logits(**{"Yes": 0.1, "No": 0.9}),  # .1
]


@pytest.mark.parametrize("mean, value", [("geometric", 0.04 ** (1 / 3)), ("arithmetic", 1.4 / 3)])
def test_the_mean_of_the_probabilities_of_right_answers(mean: str, value: float) -> None:
    got, requests = ask(ANSWERS, mean=mean)
    assert got.value == pytest.approx(value)
    kinds = {"count": 0.5, "attribute": 0.8, "object": 0.1}
    assert got.parts == pytest.approx({"atoms": 1.4 / 3, **kinds})
    assert [r["messages"][0]["content"][-1]["text"] for r in requests] == [
        f"{question} Answer in one word." for question, _ in QUESTIONS
    ]
    assert all(r["messages"][0]["content"][0]["type"] == "image_url" for r in requests)
    assert all((r["max_tokens"], r["top_logprobs"]) == (1, 20) for r in requests)


def test_an_answer_that_is_not_among_the_likeliest_counts_0() -> None:
    got, _ = ask([*ANSWERS[:2], logits(No=0.9)])
    assert got.value == 0.0 and got.parts["atoms"] == pytest.approx(1.3 / 3)


def test_a_server_without_probabilities_fails_the_sample() -> None:
    got, _ = ask([*ANSWERS[:2], {"choices": [{"message": {"content": "Yes"}}]}])
    assert got.value is None and "expected the log-probs of the first token" in str(got.error)


def test_words_and_digits() -> None:
    assert accepted("ten") == {"ten", "10"} and accepted("Yes") == {"yes"}


@pytest.mark.parametrize(
    "columns, sentence",
    [
        ({}, 'expected a column "vqa_list"'),
        ({"vqa_list": []}, 'expected a column "vqa_list"'),
        ({"vqa_list": [["How many?"]]}, "pairs of a question and its answer"),
        ({"vqa_list": QUESTIONS, "skills": ["count"]}, "got 1 for 3"),
    ],
)
def test_rows_without_questions(columns: dict[str, Any], sentence: str) -> None:
    judge = Geneval2(urls=["http://127.0.0.1:9"])
    assert sentence in str(judge.unfit(sample(**columns).prompt))
    assert judge.unfit(sample(vqa_list=QUESTIONS).prompt) is None

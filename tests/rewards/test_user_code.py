"""Faulty custom rewards: each gives a one-line error, at load or as a failed score.

A line of CASES is the body of a reward file and a part of the expected error; a number is the
expected value. The file is loaded as a recipe would load it, and scores two samples in this
process.
"""

from __future__ import annotations

import asyncio
import datetime
import io
import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gesso import build
from gesso.rewards import assembly, base
from gesso.rewards.compose import OptionalScorer, combine
from gesso.rewards.transport import wire
from gesso.rewards.transport.workers import WorkerScorer
from gesso.types import Prompt, Sample, Score, UserError

USER = "tests.rewards.user_rewards"
REMOTE = {"urls": ["http://127.0.0.1:9"]}
HEAD = """\
import asyncio, functools, itertools, os, sys
import numpy as np
from gesso.types import Score

class Odd:
    def __init__(self, **methods): self.__dict__.update(methods)
    def __float__(self): return self.number()
    def __repr__(self): raise RuntimeError("no repr")

"""

SCORE = "def score(samples): "
IN_LIST = SCORE + "return [{}] * len(samples)"
CLASS = "class score:\n    def score(self, samples): return [1.0] * len(samples)\n    {}"
DETAILS = IN_LIST.format("Score(1.0, {})")

CASES: list[tuple[str, str | float]] = [
    # return values
    (SCORE + "pass", "returned None; expected a list with one score for each of the 2 samples"),
    (SCORE + "return (0.5 for s in samples)", 0.5),
    (SCORE + "return itertools.repeat(1.0, 99_999)", "returned 3 scores for 2 samples"),
    (SCORE + "return {0: 0.5, 1: 0.7}", "returned the dict {0: 0.5, 1: 0.7}; expected a list"),
    (SCORE + "return '10'", "returned the str '10'; expected a list"),
    (SCORE + "return b'ab'", "returned the bytes b'ab'; expected a list"),
    (SCORE + "return {0.5, 0.7}", "returned the set"),
    (SCORE + "return 0.5", "returned the float 0.5; expected a list"),
    (SCORE + "return np.float32(0.5)", "expected a list"),
    (SCORE + "return np.full(2, 0.5, 'float16')", 0.5),
    (SCORE + "import torch; return torch.full((2,), 0.5)", 0.5),
    (SCORE + "import torch; return torch.tensor(0.5)", "expected a list"),
    (SCORE + "import torch; return torch.zeros(2, 3)", "returned tensor([0., 0., 0.]), not a num"),
    (SCORE + "return [[0.5], [0.5]]", "returned [0.5], not a number"),
    (SCORE + "return []", "returned 0 scores for 2 samples"),
    (SCORE + "return [1.0] * 9", "returned 9 scores for 2 samples"),
    (IN_LIST.format("'0.5'"), "returned '0.5', not a number"),
    (IN_LIST.format("b'5'"), "returned b'5', not a number"),
    (IN_LIST.format("1j"), "returned 1j, not a number"),
    (IN_LIST.format("True"), 1.0),
    (IN_LIST.format("float('-inf')"), "returned -inf"),
    (IN_LIST.format("1e308"), "returned 1e+308, outside ±1e+15"),
    (IN_LIST.format("-2e15"), "returned -2e+15, outside ±1e+15"),
    (IN_LIST.format("10**400"), "not a number"),
    (IN_LIST.format("Odd(number=lambda: 1 / 0)"), "which raised ZeroDivisionError: division by"),
    (IN_LIST.format("Odd()"), "returned an object of type Odd, which raised AttributeError"),
    (SCORE + "return type('L', (list,), {'__len__': lambda s: 2})([1.0] * 5)", "scores for 2 samp"),
    # changes to the samples
    (SCORE + "scores = [0.5 for s in samples]; samples.clear(); return scores", 0.5),
    (SCORE + "samples.append(samples[0]); return [0.5] * len(samples)", "3 scores for 2 samples"),
    (SCORE + "samples[0].image[:] = 0; return [1.0] * 2", "ValueError: assignment destination is"),
    (SCORE + "samples[0].text = ''; return [1.0] * 2", "raised FrozenInstanceError"),
    # details and texts
    (DETAILS.format("{'a/b': 1}"), 1.0),
    (DETAILS.format("{7: 1}"), 1.0),
    (DETAILS.format("{'a\\nb': 1}"), "returned a detail named 'a\\nb'; expected a name of at m"),
    (DETAILS.format("{'': 1}"), "returned a detail named ''"),
    (DETAILS.format("{'/a': 1}"), "returned a detail named '/a'"),
    (DETAILS.format("{'x' * 101: 1}"), "at most 100 printable characters"),
    (DETAILS.format("{'a': 'good'}"), "returned 'good' as detail 'a', not a number"),
    (DETAILS.format("{'a': 1e300}"), 'returned 1e+300, outside ±1e+15 as detail "a"'),
    (DETAILS.format("[('a', 1)]"), "returned [('a', 1)] as details; expected a mapping of"),
    (DETAILS.format("{}, 'x' * 10**7"), 1.0),
    (DETAILS.format("{}, '\\0\\ud800'"), 1.0),
    (IN_LIST.format("Score.failed('\\ud800\\0two\\nlines' * 9999)"), "??two lines??two lines"),
    (IN_LIST.format("Score.failed('')"), "failed without a reason"),
    # exceptions
    (SCORE + "raise SystemExit(3)", "raised SystemExit: 3"),
    (SCORE + "sys.exit()", "raised SystemExit"),
    (SCORE + "raise GeneratorExit", "raised GeneratorExit"),
    (SCORE + "raise asyncio.CancelledError", "raised CancelledError"),
    (SCORE + "return score(samples)", "raised RecursionError: maximum recursion depth"),
    (SCORE + "raise ValueError('\\ud800' + 'x' * 10**7)", "raised ValueError: ?xxx"),
    (SCORE + "raise type('E', (Exception,), {'__str__': lambda s: 1})", "raised E: (str() raised"),
    (SCORE + "yield 1.0; raise KeyError('second')", "raised KeyError: 'second'"),
    # not a reward
    ("score = 5", 'file.py:score" is of type int; expected a function or class'),
    ("nothing = 5", 'has no "score"'),
    ("raise SystemExit('at import')", "cannot be imported: SystemExit: at import"),
    ("def score(): pass", "takes (); style = \"gesso\" calls it with (samples, **options)"),
    ("def score(**kwargs): pass", "takes (**kwargs); style"),
    ("def score(samples, weight): pass", '"weight" is a key of [[reward]] itself; rename the p'),
    ("def score(samples, name='x', style=1): return [1.0] * len(samples)", 1.0),
    ("async def score(samples): return []", "is async; style"),
    ("async def score(samples): yield 1.0", "is async; style"),
    ("class C:\n    async def __call__(self, samples): return []\nscore = C()", "is async; style"),
    ("async def f(): pass\nscore = lambda samples: f()", "returned the coroutine; expected a list"),
    ("class C:\n    def __call__(self, samples): return [2.0] * len(samples)\nscore = C()", 2.0),
    ("def f(k, samples): return [k] * len(samples)\nscore = functools.partial(f, 3.0)", 3.0),
    ("score = dict", "has no method score(samples)"),
    ("score = len", "returned the int 2"),
    ("class score: pass", "has no method score(samples)"),
    ("class score:\n    def score(self, images, prompts): pass", "missing a required argument: 'p"),
    ("class score:\n    async def score(self, samples): return []", "is async; style"),
    (CLASS.format("def __init__(self): sys.exit(4)"), "cannot be created: it raised SystemExit: "),
    (CLASS.format("def __init__(self): raise KeyError"), "cannot be created: it raised KeyError"),
    (CLASS.format("def __init__(self, path): pass"), "missing a required argument: 'path'"),
    # `unfit`
    (CLASS.format("unfit = None"), 1.0),
    (CLASS.format("def unfit(self, prompt): return ''"), 1.0),
    (CLASS.format("def unfit(self, prompt): return 'too\\nlong'"), "mine: too long"),
    (CLASS.format("def unfit(self, prompt): return False"), "unfit returned False; expected a te"),
    (CLASS.format("def unfit(self, prompt): 1 / 0"), "unfit raised ZeroDivisionError"),
    (CLASS.format("def unfit(self, prompt): sys.exit(2)"), "unfit raised SystemExit: 2 (prompt: "),
    (CLASS.format("def unfit(self): pass"), "unfit raised TypeError"),
    (CLASS.format("async def unfit(self, prompt): pass"), "unfit returned <coroutine"),
    (CLASS.format("def unfit(self, prompt): prompt.columns.clear()"), 1.0),
]  # fmt: skip


EASYR1 = "def score(reward_inputs, k=1): return [{} for x in reward_inputs]"
OPENRLHF = "def score(queries, prompts, labels): return {}"
TRL = "def score(completions, **kwargs): {}"

STYLED: list[tuple[str, str, str | float]] = [
    ("easyr1", EASYR1.format("{'overall': 1, 'a': np.float32(1)}"), 1.0),
    ("easyr1", EASYR1.format("{'overall': 1, 'format': None}"), 1.0),
    ("easyr1", EASYR1.format("{'accuracy': 1}"), 'a dict without "overall"; its keys: accuracy'),
    ("easyr1", EASYR1.format("{'overall': None}"), 'a dict without "overall"; its keys: overall'),
    ("easyr1", EASYR1.format("{'overall': '1'}"), "returned '1', not a number"),
    ("easyr1", EASYR1.format("0.5"), 'returned 0.5; expected a dict with "overall"'),
    ("easyr1", "def score(reward_inputs): return {'overall': 1}", "returned the dict {'overall'"),
    ("easyr1", "def score(reward_inputs): reward_inputs.clear(); return []", "0 scores for 2"),
    ("easyr1", "REWARD_TYPE = 'sequential'\ndef score(reward_input): return {'overall': 2.0}", 2.0),
    ("easyr1", "REWARD_TYPE = 'sequential'\ndef score(reward_input): 1 / 0", "raised ZeroDivision"),
    ("easyr1", "REWARD_TYPE = 'token'\ndef score(reward_input): pass", "REWARD_TYPE = 'token'"),
    ("easyr1", "def score(predict_str, ground_truth): pass", "missing a required argument"),
    ("easyr1", CLASS.format("pass"), "is a class; style = \"easyr1\" requires a func"),
    ("easyr1", OPENRLHF.format("1"), 'did you mean style = "openrlhf"?'),
    ("easyr1", "async def score(reward_inputs): return []", "is async; style"),
    ("gesso", EASYR1, 'calls it with (samples, **options); did you mean style = "easyr1"?'),
    ("gesso", OPENRLHF.format("1"), 'did you mean style = "openrlhf"?'),
    ("gesso", TRL.format("pass"), 'did you mean style = "trl"?'),
    ("gesso", "def score(prompts, completions): pass", 'did you mean style = "trl"?'),
    ("openrlhf", EASYR1, 'did you mean style = "easyr1"?'),
    ("openrlhf", "def score(samples): pass", 'did you mean style = "gesso"?'),
    ("openrlhf", OPENRLHF.format("[0.5]"), 0.5),
    ("openrlhf", OPENRLHF.format("0.5"), 0.5),
    ("openrlhf", OPENRLHF.format("{'rewards': np.array([[0.5]]), 'scores': [1]}"), 0.5),
    ("openrlhf", OPENRLHF.format("{'rewards': [1.0], 'extra_logs': {'x': 'y'}}"), "'y' as detail"),
    ("openrlhf", OPENRLHF.format("{'scores': [1.0]}"), '; expected a value for "rewards"'),
    ("openrlhf", OPENRLHF.format("None"), '; expected a value for "rewards"'),
    ("openrlhf", OPENRLHF.format("[1.0, 2.0]"), "returned [1.0, 2.0], not a number"),
    ("openrlhf", OPENRLHF.format("sys.exit(5)"), "raised SystemExit: 5"),
    ("trl", TRL.format("return [0.5 for c in completions]"), 0.5),
    ("trl", TRL.format("return 0.5"), "returned the float 0.5; expected a list"),
    ("trl", TRL.format("kwargs['log_metric']('a', 'b'); return [1.0] * 2"), "raised TypeError"),
    ("trl", TRL.format("kwargs['log_extra']('a', [1] * 9); return [1.0] * 2"), 1.0),
    ("trl", TRL.format("return [x[0] for x in kwargs['completion_ids']]"), "only the number of"),
    ("trl", TRL.format("return [float(len(x)) for x in kwargs['completion_ids']]"), 3.0),
    ("trl", TRL.format("return kwargs['trainer_state']"), "raised KeyError: 'trainer_state'"),
    ("trl", "def score(completions, trainer_state): pass", "Gesso does not provide 'trainer_state"),
    ("trl", "def score(completions, solution): pass", 'requires the column "solution", got'),
    ("trl", "def score(completions, answer): return [float(a) for a in answer]", 4.0),
    ("trl", "def score(completions, /, **kwargs): pass", "parameter is positional only"),
    ("trl", "def score(samples): pass", "none of its parameters is prompts, completions or comple"),
    ("trl", "async def score(completions, **kwargs): return [0.25] * len(completions)", 0.25),
    ("trl", "async def score(completions, **kwargs): raise ValueError('no')", "ValueError: no"),
]  # fmt: skip


def samples() -> list[Sample]:
    """As read by a worker process: the pixels are read-only."""
    image: np.ndarray = np.full((4, 6, 3), 100, dtype=np.uint8)
    one = Sample(Prompt("a sign", columns={"answer": "4"}, where="t:1"), image, 1, "four", 3)
    frame = io.BytesIO(wire.pack_samples([one, one]))
    return wire.read_samples(frame.readline(), frame.read)


def scored(code: str, folder: Path, style: str = "gesso") -> list[Score]:
    """The scores of two samples; an error at load, or about the prompt, fails both."""
    file = folder / "file.py"
    file.write_text(HEAD + code + "\n", encoding="utf-8")
    pair = samples()
    try:
        reward = base.load(f"{file}:score", {}, style=style)
        reason = assembly.PromptCheck({"mine": reward}).unfit(pair[0].prompt)
        assert pair[0].prompt.columns == {"answer": "4"}  # unchanged by the reward
        scores = [Score.failed(reason)] * 2 if reason else base.checked(reward, pair)
        assert len(pair) == 2
        return scores
    except UserError as error:
        return [Score.failed(str(error))] * 2


def judge(scores: list[Score], expected: str | float) -> None:
    assert len(scores) == 2 and wire.read_scores(wire.pack_scores(scores)) == scores
    for score in scores:
        assert len(score.error or "") < 1_500 and len(score.text) < 10_100
        ((score.error or "") + score.text).encode()  # it is written to files
        if isinstance(expected, str):
            assert score.error and expected in score.error and "\n" not in score.error
        else:
            assert score.error is None and score.value == expected


@pytest.mark.parametrize(("code", "expected"), CASES, ids=[case[0][:60] for case in CASES])
def test_a_hostile_reward(code: str, expected: str | float, tmp_path: Path) -> None:
    judge(scored(code, tmp_path), expected)


@pytest.mark.parametrize(("style", "code", "expected"), STYLED, ids=[c[1][:60] for c in STYLED])
def test_a_hostile_function_of_a_style(
    style: str, code: str, expected: str | float, tmp_path: Path
) -> None:
    judge(scored(code, tmp_path, style), expected)


def test_ctrl_c_is_not_a_score(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        scored(SCORE + "raise KeyboardInterrupt", tmp_path)


IN_PROCESS = """\
import os, subprocess, sys

def score(samples, noisy):
    if not noisy:
        raise KeyboardInterrupt
    print("x" * 3_000_000)
    os.write(1, b"{}\\n")
    assert sys.stdin.read() == ""
    subprocess.run(["cat"], check=True)
    if len(samples) == 1:
        sys.stdin.close()
        sys.stdout.close()
    return [1.0] * len(samples)
"""


@pytest.mark.parametrize(("noisy", "expected"), [(True, 1.0), (False, "raised KeyboardInterrupt")])
def test_in_a_separate_process(noisy: bool, expected: str | float, tmp_path: Path) -> None:
    """A reward may print, read and close its streams; the frames use separate ones."""
    file = tmp_path / "file.py"
    file.write_text(IN_PROCESS)
    workers = WorkerScorer(f"{file}:score", {"noisy": noisy}, 1, timeout=20.0)

    async def go() -> list[Score]:
        try:
            return [*await workers.score(samples()), *await workers.score(samples()[:1])]
        finally:
            await workers.close()

    scores = asyncio.run(go())
    judge(scores[:2], expected)
    judge(scores[1:], expected)
    assert workers.restarts == 0


class Fixed:
    """A scorer that always returns 1."""

    groupwise = False
    processes = hits = 0
    random = False

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        return [Score(1.0)] * len(samples)

    async def close(self) -> None: ...


class Moody:
    def unfit(self, prompt: Prompt) -> str | None:
        if prompt.text == "raise":
            raise KeyError("mood")
        return prompt.text if prompt.text != "fit" else None

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        raise AssertionError("it runs elsewhere")


def test_an_optional_reward_with_a_failing_unfit() -> None:
    texts = ("fit", "raise", "too long", "")
    batch = [Sample(Prompt(text, where="t:1"), None, 0, "x") for text in texts]
    fit, raised, unfit, empty = asyncio.run(OptionalScorer(Fixed(), Moody(), "mine").score(batch))
    assert fit == empty == Score(1.0) and unfit == Score(None)
    expected = "reward \"mine\": unfit raised KeyError: 'mood' (prompt: t:1: 'raise')"
    assert raised.error == expected
    with pytest.raises(UserError, match="unfit raised KeyError"):
        assembly.PromptCheck({"mine": Moody()}, ["mine"]).unfit(batch[1].prompt)


@pytest.mark.parametrize(("weight", "value"), [(1e300, 1e10), (-1e9, 1e9), (1.0, math.nan)])
def test_a_weighted_sum_is_finite_or_a_failure(weight: float, value: float) -> None:
    score = combine([("a", 1.0, Score(1.0)), ("b", weight, Score(value))])
    assert score.error and score.error.startswith("b: weight ") and not score.ok
    assert "is outside ±1e+15" in score.error


def test_the_largest_reward_can_be_averaged_and_squared() -> None:
    most = torch.full((10_000,), base.MAX_VALUE)
    assert most.dtype == torch.float32 and most.square().sum().isfinite()
    assert base.plain(base.MAX_VALUE).ok and base.plain(-base.MAX_VALUE).ok
    assert statistics.fmean(most.tolist()) == pytest.approx(base.MAX_VALUE)


ENTRIES: list[tuple[dict[str, Any], str]] = [
    ({"weight": 1e300}, 'weight" = 1e+300 is not valid'),
    ({"workers": 10**9}, 'workers" = 1000000000 is not valid'),
    ({"style": "verl"}, "expected one of 'gesso', 'easyr1', 'openrlhf', 'trl'"),
    ({"name": "max", "remote": REMOTE}, "this name is reserved for another metric"),
    ({"name": "a\nb", "remote": REMOTE}, "expected a name of printable characters"),
    ({"name": "", "remote": REMOTE}, "expected a name of printable characters"),
    ({"style": "easyr1"}, 'is built in; style = "easyr1" applies only to custom functions'),
    ({"remote": REMOTE, "style": "trl"}, "pass style=trl to `gesso serve-reward`"),
    ({"name": f"{USER}:constant", "value": datetime.date(2020, 1, 1)}, "value = datetime.date"),
    ({"name": f"{USER}:constant", "value": 1.0, "style": "trl"}, "none of its parameters is promp"),
]  # fmt: skip


@pytest.mark.parametrize(("entry", "sentence"), ENTRIES)
def test_an_invalid_entry(entry: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_text("a sign\n")
    data = {
        "model": {"path": "nowhere"},  # reported before anything is loaded
        "data": {"train": str(file), "eval": str(file)},
        "algorithm": {"name": "flow-grpo"},
        "reward": [{"name": "jpeg-compressibility"} | entry],
    }
    with pytest.raises(UserError, match=re.escape(sentence)):
        build.recipe_from(data)

"""What a run spends its time on, and one sentence that says what to change."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gesso.timeline.recorder import DRIVER, REWARDS, SAMPLER
from gesso.timeline.steps import Step

WAIT = "wait"
WORTH = 0.1  # smaller shares are not worth a change
OFTEN = 0.25  # the same for evaluations and checkpoints, which the user wants


@dataclass(frozen=True)
class Row:
    name: str
    shares: Mapping[str, float]  # phase → share of the time

    @property
    def idle(self) -> float:
        """Share of the time without work, or waiting for others."""
        return max(0.0, 1 - sum(v for phase, v in self.shares.items() if phase != WAIT))


@dataclass(frozen=True)
class Summary:
    steps: int
    seconds: float
    rows: Sequence[Row]
    sentence: str


def summary(steps: Sequence[Step]) -> Summary:
    """Summarises all steps after the first, in which models are compiled, if there are any."""
    used = [s for s in steps if s.step > 1] or [s for s in steps if s.step] or list(steps)
    total = sum(step.seconds for step in used)
    seconds: dict[str, dict[str, float]] = {}
    for step in used:
        for name, phases in step.busy.items():
            row = seconds.setdefault(name, defaultdict(float))
            for phase, value in phases.items():
                row[phase] += value
    rows = [
        Row(name, {phase: value / total for phase, value in phases.items()} if total else {})
        for name, phases in seconds.items()
    ]
    return Summary(len(used), total, rows, _sentence(rows) if used else "")


def _sentence(rows: Sequence[Row]) -> str:
    of = {row.name: row for row in rows}
    driver = of.get(DRIVER, Row(DRIVER, {}))
    workers = [row for row in rows if row.name not in (DRIVER, REWARDS)]
    samplers = [row for row in workers if row.name.startswith(SAMPLER)]
    shares = _mean(workers) if workers else dict(driver.shares)
    who = "workers" if workers else "the run"
    scores = driver.shares.get(WAIT, 0.0)
    around = {p: driver.shares.get(p, 0.0) for p in ("evaluate", "save", "report")}
    away = scores + around["save"] + around["report"]
    away += max(0.0, around["evaluate"] - shares.get("evaluate", 0.0))
    others = max(0.0, 1 - sum(v for p, v in shares.items() if p != WAIT) - away) if workers else 0
    verb = "wait" if workers else "waits"
    found = {
        f"{who} {verb} {scores:.0%} of the time for scores: set a larger `workers` for the slowest "
        "reward, use more reward servers, or lag=1, which scores during the update": scores,
        _others(workers, samplers, others): others if len(workers) > 1 else 0.0,
        _exchange(shares): shares.get("exchange", 0.0) + shares.get("publish", 0.0),
        f"encoding prompts takes {shares.get('encode', 0.0):.0%} of the time, in every worker: use "
        "fewer prompts per step with larger groups": shares.get("encode", 0.0),
        f"writing the report takes {around['report']:.0%} of the time: set a larger eval.every":
        around["report"],
    }  # fmt: skip
    rare = {
        f"evaluations take {around['evaluate']:.0%} of the time: set a larger eval.every or fewer "
        "eval.prompts": around["evaluate"],
        f"saving takes {around['save']:.0%} of the time: set a larger save.every": around["save"],
    }
    worth = {text: share for text, share in found.items() if share >= WORTH}
    worth |= {text: share for text, share in rare.items() if share >= OFTEN}
    if worth:
        return max(worth, key=lambda text: worth[text])
    return _busiest(shares, who, "are" if workers else "is")


def _others(workers: Sequence[Row], samplers: Sequence[Row], share: float) -> str:
    learners = [row for row in workers if row not in samplers]
    if not samplers or not learners:
        return (
            f"workers wait {share:.0%} of the time for each other: use a smaller sampler.batch and "
            "learner.micro_batch or micro_tokens, so that all have equal work, or fewer workers"
        )
    sampling, training = (sum(1 - row.idle for row in rows) for rows in (samplers, learners))
    sampler, learner = sampling / len(samplers), training / len(learners)  # busy, each
    wait = f"samplers wait {1 - sampler:.0%} of the time, learners {1 - learner:.0%}"
    if sampler + learner < 1 + WORTH:
        return f"{wait}: set a larger lag, so that they work at the same time"
    count = len(workers)
    best = min(max(round(count * sampling / (sampling + training)), 1), count - 1)
    if best == len(samplers):
        return f"{wait}: no other split of {count} devices would be better"
    return f"{wait}: of {count} devices use cluster.samplers={best}, cluster.workers={count - best}"


def _mean(rows: Sequence[Row]) -> dict[str, float]:
    phases = {phase for row in rows for phase in row.shares}
    return {p: sum(row.shares.get(p, 0.0) for row in rows) / len(rows) for p in phases}


def _exchange(shares: Mapping[str, float]) -> str:
    samples, weights = shares.get("exchange", 0.0), shares.get("publish", 0.0)
    if samples > weights:
        return (
            f"workers spend {samples:.0%} of the time on sending samples to each other: use fewer "
            "workers, or train on fewer denoising steps"
        )
    return (
        f"publishing weights takes {weights:.0%} of the time: train a LoRA, or fewer copies of the "
        "weights"
    )


MORE = {
    "sample": "more workers, or fewer denoising steps or tokens",
    "decode": "more workers",
    "update": "more workers, or fewer trained steps or updates",
}


def _busiest(shares: Mapping[str, float], who: str, verb: str) -> str:
    working = {phase: shares.get(phase, 0.0) for phase in MORE}
    phase = max(working, key=lambda p: working[p])
    busy = sum(v for p, v in shares.items() if p != WAIT)
    return (
        f"{who} {verb} busy {busy:.0%} of the time, mostly in the phase {phase} "
        f"({working[phase]:.0%}); to shorten a step, use {MORE[phase]}"
    )

"""The only training loop.

Batch i is a pure function of (seed, i), sampling is first in first out, and everything that is
random takes its seed from the step: a run that is killed and resumed repeats the lost steps to the
bit. lag = 0 is on-policy; lag = 1 keeps a second batch in flight, scored while the learner works.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from gesso.cluster.local import Local, Pending, Timing
from gesso.config import Recipe
from gesso.health import Facts, Health, self_test
from gesso.learner.learner import Learner
from gesso.rollout import Rollout
from gesso.track import groups
from gesso.track.checkpoints import read_tensors, write_tensors
from gesso.track.progress import Watcher
from gesso.track.run_folder import RunFolder
from gesso.types import Prompt, Score, StopRun, UserError, Which

MAX_SKIPPED = 3  # iterations in a row whose every update was not finite


@dataclass
class Loop:
    recipe: Recipe
    learner: Learner
    cluster: Local
    eval_prompts: Sequence[Prompt]
    run: RunFolder
    watcher: Watcher
    should_stop: Callable[[], bool]
    after_restore: Callable[[], object] = lambda: None
    after_eval: Callable[[], object] = lambda: None
    _spent: float = 0.0  # seconds, over all sittings of the run
    _skipped: int = 0  # iterations in a row without any update
    _tested: bool = False  # whether this sitting has compared sampling with replay
    _health: Health = field(init=False)

    def __post_init__(self) -> None:
        held_out = len(self.eval_prompts)
        self._health = Health(Facts.of(self.recipe, self.learner.algorithm, held_out))

    def train(self) -> None:
        """From the newest checkpoint (0 when fresh) to the last step, or to the first stop."""
        self.watcher.phase("starting")
        step = self._restore()
        self.after_restore()
        self.watcher.start(step, self.recipe.steps)
        for row in self.run.rows():
            self._spent += row["time/step"]
            self._health.feed(row)
        if step == 0:
            self._record({"step": 0}, time.perf_counter(), evaluate=True)
        pending: deque[Pending] = deque()
        ahead = step
        while step < self.recipe.steps and not self.should_stop():
            started = time.perf_counter()
            while len(pending) <= self.recipe.lag and ahead < self.recipe.steps:
                with self._kept(step):
                    pending.append(self.cluster.collect(ahead))
                ahead += 1
            row = self._update(*pending.popleft().result(), step, started)
            step += 1
            self._record(row, started, evaluate=self._watched(step))
            if step % self.recipe.save.every == 0:
                self._save(step)
            self._watch_for_nan(row)
        if step > (self.run.latest() or 0):  # stopped between two checkpoints
            self._save(step)

    @contextmanager
    def _kept(self, step: int) -> Iterator[None]:
        """A prompt that cannot be drawn any more, its picture gone since the data was read, ends
        the run; what was learnt until `step` is saved."""
        try:
            yield
        except UserError as error:
            if step > (self.run.latest() or 0):
                self._save(step)
            raise StopRun(
                f"{error}; mend it and run `gesso train --resume {self.run.path}`"
            ) from error

    def _update(
        self, rollout: Rollout, timing: Timing, step: int, started: float
    ) -> dict[str, Any]:
        """One batch into the weights and on to the sampler; the row that tells of it."""
        age = step - rollout.version
        assert 0 <= age <= self.recipe.lag, f"samples are {age} updates old"
        metrics = self._describe(rollout)
        rollout = self._drop_failed(rollout, step)
        if self.learner.algorithm.refills:
            rollout, metrics["refilled"] = self._refill(rollout, step)
        metrics |= self.learner.update(rollout, step)
        if self.recipe.save.groups and (step == 0 or self._watched(step + 1)):
            groups.save(
                self.run.path, step + 1, rollout, self.learner.credit, self.recipe.save.groups
            )
        self.cluster.sampler.load(self.learner.weights(), step + 1)
        if age == 0 and not self._tested:
            self._self_test(metrics)
        metrics |= {f"time/{name}": value for name, value in asdict(timing).items()}
        speed = len(rollout.samples) / (time.perf_counter() - started)
        metrics |= {"age": age, "cached": self.cluster.rewards.new_hits(), "samples_per_s": speed}
        metrics["memory/gb"] = self.cluster.memory()
        return {"step": step + 1, **metrics}

    def _watched(self, step: int) -> bool:
        """Whether an evaluation follows this step."""
        every = self.recipe.eval.every
        return step == self.recipe.steps or bool(every and step % every == 0)

    def _restore(self) -> int:
        """Take up the newest checkpoint. Everything is read and verified before a file changes."""
        latest, left_out = self.run.latest(), self.run.left_out()
        if latest is None and left_out:
            raise UserError(
                f"{left_out[0]}, and no other is left; restore it from a copy, or delete it to "
                "train from step 0 again"
            )
        for reason in left_out:
            self._tell(f"{reason}; it is left out")
        if latest is None:
            if dropped := self.run.rewind(None):
                self._tell(
                    f"there is no complete checkpoint: the run starts from step 0 again, and the "
                    f"{dropped} rows of metrics.jsonl are written again"
                )
            return 0
        state, meta = read_tensors(self.run.checkpoint(latest)), self.run.meta(latest)
        self.run.history(latest)
        try:
            self.learner.restore(state)
        except ValueError as error:
            raise UserError(
                f"{self.run.path / 'config.toml'} does not match the checkpoint of step {latest}: "
                f"{error}; restore config.toml, or the model that it names "
                f"({self.recipe.model.path}); the run was not changed"
            ) from error
        self.run.rewind(latest)
        self.cluster.sampler.load(self.learner.weights(), latest)
        self._tell(f"resumed after step {latest}")
        if not meta.pop("verified"):
            self._tell(
                f"the checkpoint of step {latest} has no digests, as before Gesso wrote them: its "
                "content was not verified"
            )
        if meta.get("seed", self.recipe.seed) != self.recipe.seed:
            self._tell(
                f"seed = {self.recipe.seed} in config.toml, but this run began with seed = "
                f"{meta['seed']}: from here on its batches are others"
            )
        if meta.get("data", self.cluster.stream.digest) != self.cluster.stream.digest:
            self._tell(
                "the training prompts are not those that this run began with: from here on batches "
                "are drawn from the new ones, and some may come again before all have come"
            )
        return latest

    def _save(self, step: int) -> None:
        self.watcher.phase("saving")
        about = {"seed": self.recipe.seed, "data": self.cluster.stream.digest}
        write = partial(write_tensors, state=self.learner.state())
        self.run.save(step, write, about, self.recipe.save.keep)

    def _record(self, row: dict[str, Any], started: float, evaluate: bool) -> None:
        failure: StopRun | None = None
        if evaluate:
            try:
                row |= self._evaluate(row["step"])
            except StopRun as error:  # first everything is written down
                failure = error
        row["time/step"] = time.perf_counter() - started
        self._spent += row["time/step"]
        row["time/total"] = self._spent
        written = {key: _plain(value) for key, value in row.items()}
        news = self._health.feed(written)
        row["health"] = self._health.active
        self.run.append(written | {"health": row["health"]})
        self.watcher.row(row)
        for symptom in news:
            text = f"step {row['step']}: warning ({symptom.kind}): {symptom.text}"
            self._tell(text, again=False)
        if failure is not None:
            if row["step"]:
                self._save(row["step"])
            raise failure
        if evaluate:
            self.watcher.phase("writing the report")
            self.after_eval()

    def _evaluate(self, step: int) -> dict[str, float]:
        started = time.perf_counter()
        weights: Which = "ema" if self.learner.settings.ema else "current"
        with self._kept(0):  # whoever asked for the evaluation saves
            samples, scores = self.cluster.evaluate(self.eval_prompts, weights)
        errors = [score.error for score in scores if not score.ok]
        if errors:
            told = f"{len(errors)} of {len(scores)} scores of the evaluation failed"
            self._tell(f"step {step}: {told}, last: {errors[-1]}")
            if len(errors) > self.recipe.max_failed * len(scores):
                raise StopRun(
                    f"{told} (max_failed = {self.recipe.max_failed:.0%} are allowed); "
                    f"the last error: {errors[-1]}; mend the reward and run "
                    f"`gesso train --resume {self.run.path}`"
                )
        shown = self.recipe.eval.shown
        self.run.save_samples(step, samples[:shown], scores[:shown])
        means = {f"eval/{name}": value for name, value in _means(scores).items()}
        return means | {"time/eval": time.perf_counter() - started}

    def _describe(self, rollout: Rollout) -> dict[str, float]:
        means = {
            name if name == "reward" else f"reward/{name}": value
            for name, value in _means(rollout.scores).items()
            if name != "failed"
        }
        values = [s.value for s in rollout.scores if s.ok and s.value is not None]
        spread = statistics.pstdev(values) if values else float("nan")
        best = max(values, default=float("nan"))
        return means | {
            "reward/std": spread,
            "reward/max": best,
            "reward/at_max": values.count(best) / len(values) if values else float("nan"),
            "failed": float(len(rollout.scores) - len(values)),
            **self.cluster.sampler.describe(rollout),
        }

    def _refill(self, rollout: Rollout, step: int) -> tuple[Rollout, float]:
        """Groups without spread give way to new ones, for so many attempts; and how many groups
        were drawn for it."""
        algorithm, drawn = self.learner.algorithm, 0
        for attempt in range(1, algorithm.refills + 1):
            kept = rollout.rows(algorithm.advantage.kept(rollout, 1))
            missing = self.recipe.data.groups - len(kept.group.unique())
            if missing == 0:
                break
            with self._kept(step):
                more, _ = self.cluster.refill(step, attempt, missing).result()
            drawn += missing
            more = self._drop_failed(more, step, refill=True)
            if len(more.samples):
                rollout = Rollout.join(kept, more)
        return rollout, float(drawn)

    def _drop_failed(self, rollout: Rollout, step: int, refill: bool = False) -> Rollout:
        """Samples without a score leave the batch; too many of them stop the run. Those of a
        refill, which may be a single group, are held against the size of a whole batch."""
        good = rollout.scored
        total = len(rollout.scores)
        failed = total - len(good)
        if not failed:
            return rollout
        errors = [s.error for s in rollout.scores if s.error is not None]
        whole = self.recipe.data.groups * self.learner.algorithm.group if refill else total
        share = failed / whole
        self._tell(f"step {step + 1}: {failed} of {total} scores failed, last: {errors[-1]}")
        if share > self.recipe.max_failed or (len(good) < 2 and not refill):
            self._save(step)
            raise StopRun(
                f"{failed} of {whole} scores failed ({share:.0%}; max_failed = "
                f"{self.recipe.max_failed:.0%} are allowed); the last error: {errors[-1]}; mend "
                f"the reward and run `gesso train --resume {self.run.path}`"
            )
        return rollout.rows(good)

    def _watch_for_nan(self, row: Mapping[str, float]) -> None:
        if not math.isnan(row["update/grad_norm"]):
            self._skipped = 0
            return
        self._skipped += 1
        self._tell(f"step {row['step']}: loss or gradient not finite; the update was not taken")
        if self._skipped == MAX_SKIPPED:
            raise StopRun(
                f"the loss or its gradient was not finite in {MAX_SKIPPED} iterations in a row; "
                f"no such update was taken; try a lower optimizer.lr than "
                f"{self.recipe.optimizer.lr:g} or another dtype than {self.recipe.model.dtype}"
            )

    def _self_test(self, update: Mapping[str, float]) -> None:
        """On-policy, before the first optimizer step, replay must give what sampling gave. Told
        once a sitting; where it plainly does not, the run ends before anything is saved."""
        verdict = self_test(update, self._health.facts)
        if verdict is None:
            return
        self._tested = True
        if verdict.broken:
            raise StopRun(verdict.text)
        self._tell(verdict.text)

    def _tell(self, text: str, again: bool = True) -> None:
        """`again`: also into a log that has this note already, since a resumed run repeats the
        steps after its checkpoint."""
        if again or not self.run.noted(text):
            self.run.note(text)
        self.watcher.note(text)


def _means(scores: Sequence[Score]) -> dict[str, float]:
    """Mean reward and mean of each part, over the samples that have a score."""
    good = [s for s in scores if s.ok]
    if not good:
        return {"reward": float("nan"), "failed": float(len(scores))}
    names = dict.fromkeys(name for s in good for name in s.parts)
    parts = {n: statistics.fmean(s.parts[n] for s in good if n in s.parts) for n in names}
    value = statistics.fmean(s.value for s in good if s.value is not None)
    return {"reward": value, **parts, "failed": float(len(scores) - len(good))}


def _plain(value: Any) -> Any:
    """JSON has no NaN: a figure that does not exist is null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value

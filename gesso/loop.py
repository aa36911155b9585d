"""The only training loop.

Batch i is a pure function of (seed, i), sampling is first in, first out, and all randomness is
seeded by the step: a run that is killed and resumed repeats the lost steps bit for bit. lag = 0 is
on-policy; lag = k keeps k more batches in flight: batch i is sampled with version i − k.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

from gesso import clock
from gesso.algorithms.base import Algorithm
from gesso.cluster.protocol import Batch, Cluster, Pending, ScoresFailed
from gesso.cluster.scores import mean_scores
from gesso.config import Recipe
from gesso.config.schema import Reaction
from gesso.health import Facts, Health, Symptom, self_test
from gesso.health.reactions import best_step, described, rescaled
from gesso.timeline import recorder
from gesso.timeline.steps import Step
from gesso.track import groups
from gesso.track.progress import Watcher
from gesso.track.run_folder import RunFolder
from gesso.track.writing import Unfinished
from gesso.types import UNSCALED, Prompt, Scales, StopRun, UserError, Which, WorkerLost

MAX_SKIPPED = 3  # consecutive iterations in which no update was finite


@dataclass
class Loop:
    recipe: Recipe
    algorithm: Algorithm
    cluster: Cluster
    eval_prompts: Sequence[Prompt]
    run: RunFolder
    watcher: Watcher
    should_stop: Callable[[], bool]
    after_restore: Callable[[], object] = lambda: None
    after_eval: Callable[[], object] = lambda: None
    _spent: float = 0.0  # seconds, including those before a resume
    _marked: float = 0.0  # until when the timeline is written
    _origin: float = 0.0  # where it begins
    _skipped: int = 0  # consecutive iterations without any update
    _tested: bool = False  # whether this process has compared sampling with replay
    _pending: deque[Pending] = field(default_factory=deque)  # batches in flight, in order
    _unfinished: Unfinished | None = None  # a checkpoint that is being written
    _scales: Scales = UNSCALED  # by `on_symptom`
    _health: Health = field(init=False)

    def __post_init__(self) -> None:
        held_out = len(self.eval_prompts)
        self._health = Health(Facts.of(self.recipe, self.algorithm, held_out))

    def train(self) -> None:
        """Trains from the newest checkpoint (0 for a new run) to the last step or until stopped."""
        self.watcher.phase("starting")
        step = self._restore()
        self.after_restore()
        self.watcher.start(step, self.recipe.steps)
        self._begin_timeline()
        for row in self.run.rows():
            self._spent += row["time/step"]
            self._react(self._health.feed(row))
        if self._scales != UNSCALED:
            self._note(
                f"on_symptom: optimizer.lr is multiplied by {self._scales.lr:g}, the weight of the "
                f"KL by {self._scales.kl:g}, because of earlier warnings"
            )
        if step == 0:
            self._record({"step": 0}, clock.seconds(), evaluate=True)
            self._write_timeline(0)
        try:
            step = self._steps(step)
            self._finish_save()
        except WorkerLost:
            raise
        except Exception:
            with suppress(StopRun):  # must not hide the first error
                self._finish_save()
            raise
        if step > (self.run.latest() or 0):  # stopped between two checkpoints
            self._save(step)
            self._finish_save()

    def _steps(self, step: int) -> int:
        pending, ahead = self._pending, step + len(self._pending)
        while step < self.recipe.steps and not self.should_stop():
            started = clock.seconds()
            while len(pending) <= self.recipe.lag and ahead < self.recipe.steps:
                pending.append(self.cluster.collect(ahead))
                ahead += 1
            batch = self._collected(pending.popleft(), step)
            row = self._update(batch, step, started)
            step += 1
            self._record(row, started, evaluate=self.recipe.evaluates(step))
            self._finish_save(wait=False)
            if step % self.recipe.save.every == 0:
                self._save(step)
            elif self.recipe.cluster.restarts and self._unfinished is None:
                self._save(step, snapshot=True)  # never waits until another one is written
            self._write_timeline(step)
            self._watch_for_nan(row)
        return step

    def _collected(self, pending: Pending, step: int) -> Batch:
        """The oldest batch. If it cannot be sampled or scored, the run is saved and stops."""
        try:
            with self._saving(step):
                batch = pending.result()
        except ScoresFailed as error:
            for note in error.notes:
                self._note(note)
            self._save(step)
            raise StopRun(f"{error}; {self._to_score_again}") from error
        for note in batch.notes:
            self._note(note)
        return batch

    @property
    def _to_score_again(self) -> str:
        return (
            f"fix the reward's code or server and run `gesso train --resume {self.run.path}`, or "
            "start a new run with another reward"
        )

    @contextmanager
    def _saving(self, step: int) -> Iterator[None]:
        """Saves the run at `step` and stops it if a prompt can no longer be sampled, e.g. because
        its image was deleted after the data was read."""
        try:
            yield
        except UserError as error:
            self._finish_save()
            if step > (self.run.latest() or 0):
                self._save(step)
            raise StopRun(
                f"{error}; fix it and run `gesso train --resume {self.run.path}`"
            ) from error

    def _update(self, batch: Batch, step: int, started: float) -> dict[str, Any]:
        """Update from one batch and publish the weights; returns the row of metrics."""
        age = step - batch.version
        assert 0 <= age <= self.recipe.lag, f"samples are {age} updates old"
        scales = self.algorithm.next_scales(self._scales, self._health.rows)
        update = self.cluster.update(batch, step, scales)
        if groups.saved(self.recipe, step):
            save, full = self.recipe.save, self.recipe.save.group_images == "full"
            with recorder.phase("save", whole=True):
                groups.save(self.run.path, step + 1, batch, update.advantages, save.groups, full)
        self.cluster.publish(step + 1)
        metrics = {**batch.metrics, **update.metrics}
        if age == 0 and not self._tested:
            self._self_test(metrics)
        speed = len(batch.samples) / (clock.seconds() - started)
        return {"step": step + 1, **metrics, "age": age, "samples_per_s": speed}

    def _restore(self) -> int:
        """Load the newest checkpoint. Everything is read and verified before a file changes."""
        latest, left_out = self.run.latest(), self.run.left_out()
        if latest is None and left_out:
            raise UserError(
                f"{left_out[0]}, and there is no other checkpoint; restore it from a backup, or "
                "delete it to train again from step 0"
            )
        for reason in left_out:
            self._note(f"{reason}; it is ignored")
        if latest is None:
            if dropped := self.run.rewind(None):
                self._note(
                    f"there is no complete checkpoint: the run starts again from step 0, and the "
                    f"{dropped} rows of metrics.jsonl are replaced"
                )
            return 0
        meta = self.run.meta(latest)
        try:
            self.cluster.restore(self.run.checkpoint(latest))
        except UserError:
            raise
        except ValueError as error:
            raise UserError(
                f"{self.run.path / 'config.toml'} does not match the checkpoint of step {latest}: "
                f"{error}; restore config.toml, or the model it refers to "
                f"({self.recipe.model.path}); the run was not changed"
            ) from error
        if "curriculum" in meta:
            self.cluster.restore_prompts(meta["curriculum"])
        self.run.history(latest)
        self.run.rewind(latest)
        self._redraw(latest)
        self.cluster.publish(latest)
        self._note(f"resumed after step {latest}")
        if not meta.pop("verified"):
            self._note(
                f"the checkpoint of step {latest} has no digests (an older version of Gesso wrote "
                "it): its content was not verified"
            )
        if meta.get("seed", self.recipe.seed) != self.recipe.seed:
            self._note(
                f"seed = {self.recipe.seed} in config.toml, but this run started with seed = "
                f"{meta['seed']}: batches differ from here on"
            )
        if meta.get("data", self.cluster.prompts_digest) != self.cluster.prompts_digest:
            self._note(
                "the training prompts have changed since this run started: batches now use the new "
                "prompts, and some may repeat before all have been used"
            )
        return latest

    def _redraw(self, step: int) -> None:
        """Samples the batches again that were in flight at the checkpoint, as it did before."""
        lag = self.recipe.lag
        for ahead in range(step, min(step + lag, self.recipe.steps)):
            pending = self.cluster.redraw(ahead, range(max(0, ahead - lag), step))
            if pending is None:
                self._note(
                    f"batch {ahead + 1} is sampled with newer weights than in an undisturbed run: "
                    f"the checkpoint of step {step} does not have all that it was sampled with"
                )
                return
            self._pending.append(pending)

    def _save(self, step: int, snapshot: bool = False) -> None:
        """A snapshot is deleted after the next save."""
        self._finish_save()
        self.watcher.phase("saving")
        meta: dict[str, Any] = {"seed": self.recipe.seed, "data": self.cluster.prompts_digest}
        if state := self.cluster.prompts_state:
            meta["curriculum"] = state
        if snapshot:
            meta["snapshot"] = True
        with recorder.phase("save", whole=True):
            self._unfinished = self.run.begin_save(
                step, self.cluster.save, meta, self.recipe.save.keep
            )
        self._finish_save(wait=False)

    def _finish_save(self, wait: bool = True) -> None:
        """Completes the newest checkpoint, once it is written."""
        unfinished = self._unfinished
        if unfinished is not None and (wait or unfinished.done()):
            self._unfinished = None
            with recorder.phase("save", whole=True):
                unfinished.finish()

    def _record(self, row: dict[str, Any], started: float, evaluate: bool) -> None:
        failure: StopRun | None = None
        if evaluate:
            try:
                row |= self._evaluate(row["step"])
            except StopRun as error:  # raised again once the row is written
                failure = error
        row["time/step"] = clock.seconds() - started
        self._spent += row["time/step"]
        row["time/total"] = self._spent
        written = {key: _plain(value) for key, value in row.items()}
        new_warnings = self._health.feed(written)
        row["health"] = self._health.active
        self.run.append(written | {"health": row["health"]})
        self.watcher.row(row)
        for symptom in new_warnings:
            text = f"step {row['step']}: warning ({symptom.kind}): {symptom.text}"
            self._note(text, again=False)
        reactions = self._react(new_warnings)
        if row["step"] == self.recipe.steps:  # there is no next step
            reactions = {}
        for kind, reaction in reactions.items():
            done = described(reaction, self._scales)
            self._note(f"step {row['step']}: on_symptom.{kind}: {done}", again=False)
        if failure is not None:
            if row["step"]:
                self._save(row["step"])
            raise failure
        if evaluate:
            self.watcher.phase("writing the report")
            with recorder.phase("report", whole=True):
                self.after_eval()
        if "stop" in reactions.values():
            self._stop(row["step"], [kind for kind, done in reactions.items() if done == "stop"])

    def _begin_timeline(self) -> None:
        recorder.take()
        self._marked = clock.seconds()
        self._origin = self._marked - self.run.timeline.end

    def _write_timeline(self, step: int) -> None:
        start, self._marked = self._marked, clock.seconds()
        at = start - self._origin
        self.run.timeline.append(Step.of(step, at, start, self._marked, recorder.take()))

    def _react(self, symptoms: Sequence[Symptom]) -> dict[str, Reaction]:
        """Kind of warning → reaction of the recipe."""
        chosen = self.recipe.on_symptom
        reactions = {s.kind: chosen[s.kind] for s in symptoms if s.kind in chosen}
        self._scales = rescaled(self._scales, list(reactions.values()))
        return reactions

    def _stop(self, step: int, kinds: Sequence[str]) -> NoReturn:
        if step > (self.run.latest() or 0):
            self._save(step)
        best = best_step(self.run.rows())
        highest = "" if best is None else f" the held-out reward was highest at step {best};"
        raise StopRun(
            f"on_symptom stopped the run at step {step} because of {', '.join(kinds)};{highest} "
            f"to continue anyway, run `gesso train --resume {self.run.path}`"
        )

    def _evaluate(self, step: int) -> dict[str, float]:
        started = clock.seconds()
        which: Which = "ema" if self.recipe.learner.ema else "current"
        with self._saving(0), recorder.phase("evaluate", whole=True):  # the caller saves
            samples, scores = self.cluster.evaluate(self.eval_prompts, which)
        errors = [score.error for score in scores if not score.ok]
        if errors:
            failed = f"{len(errors)} of {len(scores)} scores of the evaluation failed"
            self._note(f"step {step}: {failed}; last error: {errors[-1]}")
            if len(errors) > self.recipe.max_failed * len(scores):
                raise StopRun(
                    f"{failed}; max_failed allows {self.recipe.max_failed:.0%}; "
                    f"last error: {errors[-1]}; {self._to_score_again}"
                )
        shown, each = self.recipe.eval.shown, self.recipe.eval.samples
        self.run.save_samples(step, samples[::each][:shown], scores[::each][:shown])
        means = {f"eval/{name}": value for name, value in mean_scores(scores).items()}
        return means | {"time/eval": clock.seconds() - started}

    def _watch_for_nan(self, row: Mapping[str, float]) -> None:
        if not math.isnan(row["update/grad_norm"]):
            self._skipped = 0
            return
        self._skipped += 1
        self._note(f"step {row['step']}: loss or gradient is not finite; the update was skipped")
        if self._skipped == MAX_SKIPPED:
            raise StopRun(
                f"the loss or its gradient was not finite in {MAX_SKIPPED} consecutive "
                "iterations; these updates were skipped; try a lower optimizer.lr than "
                f"{self.recipe.optimizer.lr:g} or a model.dtype other than "
                f"{self.recipe.model.dtype}"
            )

    def _self_test(self, update: Mapping[str, float]) -> None:
        """On-policy, before the first optimizer step, replay must reproduce the log-probs of
        sampling. Reported once per process; if they clearly differ, the run stops before anything
        is saved."""
        verdict = self_test(update, self._health.facts)
        if verdict is None:
            return
        self._tested = True
        if verdict.broken:
            raise StopRun(verdict.text)
        self._note(verdict.text)

    def _note(self, text: str, again: bool = True) -> None:
        """`again`: write the note even if the log already has it. A resumed run repeats the steps
        after its checkpoint."""
        if again or not self.run.noted(text):
            self.run.note(text)
        self.watcher.note(text)


def _plain(value: Any) -> Any:
    """JSON has no NaN: a value that is not finite becomes null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""Starts and resumes runs. The CLI and the Python API call the same functions; those that sample
from a run, evaluate it or export it are in `use/`."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gesso import build, families
from gesso.config import Recipe
from gesso.data import prompts
from gesso.data.curriculum import stream_of
from gesso.rewards import assembly
from gesso.rewards.assembly import Rewards
from gesso.track import bars
from gesso.track.displays import display
from gesso.track.progress import SILENT, Display, Progress
from gesso.track.run_folder import RunFolder
from gesso.track.trackers.process import Watchers
from gesso.types import Prompt, StopRun, UserError, WorkerLost, out_of_memory
from gesso.use import teachers
from gesso.use.source import recipe_of as recipe_of
from gesso.use.trained import Trained as Trained
from gesso.use.trained import load as load

if TYPE_CHECKING:
    from gesso.algorithms.base import Algorithm
    from gesso.cluster.driver import Driver
    from gesso.cluster.local import Local
    from gesso.learner.learner import Learner


REPORT = "report.html"


@dataclass(frozen=True)
class Assembled:
    """The objects that a recipe describes, connected and ready to train."""

    recipe: Recipe
    algorithm: Algorithm
    cluster: Driver
    rewards: Rewards
    eval_prompts: Sequence[Prompt]
    notes: Sequence[str]  # about data and settings, shown before the run
    left_out: Sequence[str] = ()  # skipped rows of the data, each with its reason
    largest: prompts.LargestPrompt | None = None  # of the data

    @property
    def learner(self) -> Learner:
        """The learner of a cluster in this process."""
        return self.local.learner

    @property
    def model(self) -> Any:
        """The model of a cluster in this process; its type depends on the recipe's family."""
        return self.local.learner.model

    @property
    def local(self) -> Local:
        from gesso.cluster.local import Local

        assert isinstance(self.cluster, Local), "the model is held by worker processes"
        return self.cluster

    def close(self) -> None:
        self.cluster.close()


def assemble(recipe: Recipe, progress: Progress = SILENT) -> Assembled:
    """Read the data, load the model, connect the rewards. Cheap steps come first, so that errors
    show before the weights are loaded."""
    family, algorithm = families.of(recipe), build.algorithm(recipe)
    family.check_machine(recipe, algorithm)
    build.check_trackers(recipe)
    teachers.check(recipe, algorithm)
    rewards = assembly.rewards(recipe)
    try:
        progress.phase("loading data")
        given = build.given(recipe)
        data = prompts.load(recipe.data, rewards.train.unfit, rewards.held_out.unfit, given)
        progress.phase("importing torch")
        from gesso.cluster.placement import place

        place(recipe, algorithm)  # raises if it is impossible
        connect = _in_this_process if recipe.cluster.workers is None else _in_workers
        cluster, data = connect(recipe, algorithm, rewards, data, progress)
    except BaseException:
        rewards.service.close()
        raise
    notes, held_out = list(data.notes), data.held_out[: recipe.eval.prompts]
    notes += family.notes(recipe, algorithm)
    if len(held_out) < recipe.eval.prompts:
        sources = " and ".join(source.path for source in recipe.data.eval)
        notes.append(
            f"eval.prompts = {recipe.eval.prompts}, but {sources} has only {len(held_out)} "
            "prompts; all of them are used"
        )
    return Assembled(
        recipe, cluster.algorithm, cluster, rewards, held_out, notes, data.left_out, data.largest
    )


def _in_this_process(
    recipe: Recipe,
    algorithm: Algorithm,
    rewards: Rewards,
    data: prompts.LoadedData,
    progress: Progress,
) -> tuple[Driver, prompts.LoadedData]:
    from gesso.cluster.local import Local

    with bars.loading(progress, recipe.model.path, recipe.model.path):
        model = build.model(recipe)
    data = families.of(recipe).fit(recipe, algorithm, model, data, progress)
    algorithm, learner = build.learner(recipe, algorithm, model, progress)
    teachers.teach(recipe, algorithm, learner)
    if recipe.sampler.engine == "vllm":
        progress.phase(f"starting {recipe.sampler.engine}")
    sampler = build.sampler(recipe, algorithm, model)
    stream = stream_of(data.train, recipe)
    return Local(recipe, learner, sampler, rewards.service, stream, progress), data


def _in_workers(
    recipe: Recipe,
    algorithm: Algorithm,
    rewards: Rewards,
    data: prompts.LoadedData,
    progress: Progress,
) -> tuple[Driver, prompts.LoadedData]:
    from gesso.cluster import workers
    from gesso.cluster.placement import place
    from gesso.cluster.separate import SeparateSamplers

    placement = place(recipe, algorithm)
    assert placement is not None
    processes = workers.start(recipe, placement, progress)
    try:
        data = workers.fit(processes, data)
        stream = stream_of(data.train, recipe)
        gathers = families.of(recipe).gathers_to_sample
        kind = SeparateSamplers if placement.samplers else workers.Workers
        cluster = kind(
            recipe, algorithm, processes, rewards.service, stream, gathers, placement, progress
        )
    except BaseException:
        processes.close()
        raise
    return cluster, replace(data, notes=[*data.notes, str(placement)])


def train(
    recipe: str | Recipe,
    overrides: Sequence[str] = (),
    folder: str | Path | None = None,
    quiet: bool = False,
    shown: Display | None = None,
    card: int | str | None = None,
) -> RunFolder:
    """Train a recipe (bundled name, TOML file or Recipe) into a new run folder. `shown` displays
    the progress instead of the console. `card`: GPU memory in GB, one of the recipe's sizes, as in
    24 or "8x24"."""
    name, called = "run", ""
    if isinstance(recipe, str):
        name = called = Path(recipe).stem
        if card is not None:
            name, called = f"{name}-{card}gb", f"{called} --card {card}"
        recipe = build.recipe(recipe, overrides, card)
    elif overrides or card is not None:
        raise UserError(
            "overrides and card require a recipe's name or file; change a Recipe with "
            "model_copy(update=…)"
        )
    path = Path(folder) if folder is not None else _next_folder(name)
    RunFolder.must_be_new(path)
    with _shown(recipe, quiet, shown) as display:
        job = assemble(recipe, display)  # before the folder is created: an error leaves none
        run = RunFolder.create(path, recipe.model_dump(), called)
        with run.locked():
            return _run(job, run, display)


def resume(
    folder: str | Path,
    quiet: bool = False,
    steps: int | None = None,
    shown: Display | None = None,
    overrides: Sequence[str] = (),
) -> RunFolder:
    """Continue from the newest complete checkpoint of a run to its last step, or to `steps`.
    `overrides` change the cluster, as in "cluster.workers=4"."""
    run = RunFolder.open(Path(folder))
    recipe = recipe_of(run, overrides)
    if steps is not None:
        if steps < (run.latest() or 0):
            raise UserError(
                f"{run.path} is already at step {run.latest()}; expected steps of at least "
                f"{run.latest()}, got steps={steps}"
            )
        recipe = recipe.model_copy(update={"steps": steps})
    with run.locked(), _shown(recipe, quiet, shown) as display:
        build.announce_code(recipe, run.path, "model", "algorithm", "reward", "tracker")
        return _run(
            assemble(recipe, display), run, display, changed=steps is not None or bool(overrides)
        )


def _shown(recipe: Recipe, quiet: bool, shown: Display | None) -> Display:
    """A run without "console" in `track` is quiet."""
    return (
        shown if shown is not None else display(quiet or "console" not in recipe.track, aside=False)
    )


def _run(job: Assembled, run: RunFolder, display: Display, changed: bool = False) -> RunFolder:
    """`changed`: the recipe differs from config.toml in the folder. In a damaged folder only
    log.txt changes: everything else is written after the checkpoint has been restored."""
    from gesso.loop import Loop
    from gesso.viewer import files, report

    thumbnails = files.Thumbnails()  # shared by the reports, one after each evaluation

    def notify(text: str) -> None:
        run.note(text)
        display.note(text)

    begun = ok = False

    def begin() -> None:
        nonlocal begun
        begun = True
        if changed:
            run.write_config(job.recipe.model_dump())

    watchers = Watchers(display, build.trackers(job.recipe, run.path, notify))
    try:
        for note in [*job.notes, *_list_skipped(job, run)]:
            notify(note)
        with _interruptible(display) as should_stop, bars.compiling(display):
            loop = partial(
                Loop,
                recipe=job.recipe,
                algorithm=job.algorithm,
                cluster=job.cluster,
                eval_prompts=job.eval_prompts,
                run=run,
                watcher=watchers,
                should_stop=should_stop,
                after_restore=begin,
                after_eval=lambda: report.write(run.path, run.path / REPORT, thumbnails),
            )
            _with_restarts(job, run, lambda: loop().train(), notify)
        ok = True
    except OSError as error:
        last = run.latest()
        raise StopRun(
            f"could not write to {run.path}: {error}; the last complete checkpoint is "
            f"{f'step {last}' if last is not None else 'none'}; free disk space and run "
            f"`gesso train --resume {run.path}`"
        ) from error
    except KeyboardInterrupt:
        last = run.latest()
        saved = "there is no checkpoint" if last is None else f"the last checkpoint is step {last}"
        raise KeyboardInterrupt(f"{saved}; to continue: gesso train --resume {run.path}") from None
    except WorkerLost as error:
        run.note(f"stopped: {error}")
        raise StopRun(f"{error}; run `gesso train --resume {run.path}`") from error
    except StopRun as error:
        run.note(f"stopped: {error}")  # into the run's log
        raise
    except (MemoryError, RuntimeError) as error:
        if (message := out_of_memory(error)) is None:
            raise
        run.note(f"stopped: {message}")
        raise StopRun(
            f"{message}; if other programs use the memory, wait until they have ended and run "
            f"`gesso train --resume {run.path}`"
        ) from error
    finally:
        job.close()
        try:
            if begun:
                report.write(run.path, run.path / REPORT, thumbnails)
        except OSError as error:  # must not hide why the run stopped
            display.note(f"could not write {run.path / REPORT}: {error}")
        watchers.finish(ok)
    return run


def _with_restarts(
    job: Assembled, run: RunFolder, train: Callable[[], None], notify: Callable[[str], None]
) -> None:
    """After a worker is lost, new workers continue from the newest snapshot, as `resume` does."""
    restarts = job.recipe.cluster.restarts
    for left in reversed(range(restarts + 1)):
        try:
            if left < restarts:
                started = time.monotonic()
                job.cluster.restart()
                notify(f"new workers started in {time.monotonic() - started:.1f} s")
            return train()
        except WorkerLost as error:
            if not left:
                raise
            notify(f"{error}; {_continued(run)} (restarts left: {left - 1})")


def _continued(run: RunFolder) -> str:
    step = run.latest() or 0
    repeated = [row["time/step"] for row in run.rows() if row["step"] > step]
    steps = "1 step" if len(repeated) == 1 else f"{len(repeated)} steps"
    return (
        f"starting new workers, which continue after step {step} and repeat {steps} of "
        f"{sum(repeated):.1f} s"
    )


def _list_skipped(job: Assembled, run: RunFolder) -> list[str]:
    """Writes every skipped row to a file; the notes name only the first of each kind."""
    if not job.left_out:
        return []
    file = run.path / "left-out.txt"
    file.write_text("".join(f"{line}\n" for line in job.left_out), "utf-8")
    return [f"all {len(job.left_out)} skipped rows are listed in {file}"]


def _next_folder(name: str) -> Path:
    n = 1
    while (path := Path("runs") / f"{name}-{n:03d}").exists():
        n += 1
    return path


@contextmanager
def _interruptible(progress: Progress) -> Iterator[Any]:
    """The first Ctrl-C stops the run after the current step; a second one, or SIGTERM,
    immediately."""
    stop = threading.Event()

    def handle(number: int, frame: Any) -> None:
        if stop.is_set() or number == signal.SIGTERM:
            raise KeyboardInterrupt
        stop.set()
        progress.note("stopping after this step; press Ctrl-C again to stop immediately")

    if threading.current_thread() is not threading.main_thread():
        yield stop.is_set
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop.is_set
    finally:
        for number, former in before.items():
            signal.signal(number, former)

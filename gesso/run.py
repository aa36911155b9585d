"""A run from the outside: start it, resume it. The CLI and Python users call the same functions; to
draw from it and to export it, `use/` has more of them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gesso import build
from gesso.config import Model, Recipe
from gesso.config import compatibility as agreement
from gesso.data import prompts
from gesso.track import bars
from gesso.track.displays import display
from gesso.track.progress import SILENT, Display, Progress
from gesso.track.run_folder import RunFolder
from gesso.track.trackers.process import Watchers
from gesso.types import Prompt, SampleSpec, StopRun, UserError, out_of_memory
from gesso.use.source import recipe_of as recipe_of
from gesso.use.trained import Trained as Trained
from gesso.use.trained import load as load
from gesso.use.trained import too_many

if TYPE_CHECKING:
    from gesso.algorithms.base import Algorithm
    from gesso.cluster.local import Local
    from gesso.learner.learner import Learner
    from gesso.models.flow.base import FlowModel
    from gesso.models.tokens.base import TokenModel


REPORT = "report.html"


@dataclass(frozen=True)
class Job:
    """A recipe's objects, ready to work together."""

    recipe: Recipe
    algorithm: Algorithm
    model: FlowModel | TokenModel
    learner: Learner
    cluster: Local
    rewards: build.Rewards
    eval_prompts: Sequence[Prompt]
    notes: Sequence[str]  # about the data, to be told before the run
    left_out: Sequence[str] = ()  # rows of it, each with its reason

    def close(self) -> None:
        self.rewards.service.close()
        self.cluster.sampler.close()


def assemble(recipe: Recipe, progress: Progress = SILENT) -> Job:
    """Read the data, load the model, connect the rewards; cheap things first, so that a mistake
    shows before the weights are loaded."""
    agreement.check_engine(recipe)
    build.check_trackers(recipe)
    algorithm = build.algorithm(recipe)
    agreement.check_folds(recipe, algorithm)
    rewards = build.rewards(recipe)
    try:
        progress.phase("loading data")
        data = prompts.load(recipe.data, rewards.train.unfit, rewards.held_out.unfit)
        progress.phase("importing torch")
        from gesso.cluster.local import Local
        from gesso.learner.learner import Learner

        with bars.loading(progress, recipe.model.path, recipe.model.path):
            model = build.model(recipe)
        data = _fitting(recipe, algorithm, model, data, progress)
        critic = build.critic(recipe, algorithm, model)
        learner = Learner(
            model, algorithm, recipe.optimizer, recipe.learner, recipe.seed, critic, progress
        )
        if recipe.sampler.engine != "built-in":
            progress.phase(f"starting {recipe.sampler.engine}")
        sampler = build.sampler(recipe, model)
        stream = prompts.Stream(data.train, recipe.seed)
        cluster = Local(recipe, algorithm, sampler, rewards.service, stream, progress)
    except BaseException:
        rewards.service.close()
        raise
    notes, held_out = list(data.notes), data.held_out[: recipe.eval.prompts]
    if uneven := agreement.ragged(recipe, algorithm):
        notes.append(uneven)
    if len(held_out) < recipe.eval.prompts:
        sources = " and ".join(source.path for source in recipe.data.eval)
        notes.append(
            f"eval.prompts = {recipe.eval.prompts}, but {sources} has {len(held_out)}: "
            "all of them are used"
        )
    return Job(recipe, algorithm, model, learner, cluster, rewards, held_out, notes, data.left_out)


def _fitting(
    recipe: Recipe, algorithm: Algorithm, model: Any, data: prompts.Loaded, progress: Progress
) -> prompts.Loaded:
    """The data as far as the model takes it, with what there is to tell about the rest."""
    if isinstance(recipe.model, Model):
        told = _drawn_as_meant(recipe, recipe.model, algorithm, model, data)
        return replace(data, notes=[*data.notes, *told])

    lengths: list[int] = []

    def unfit(prompt: Prompt) -> str | None:
        progress.advance()
        try:
            tokens = model.length(prompt)
        except UserError as error:  # a picture too narrow, a token that stands for pictures
            return str(error).removeprefix(f"{prompt.where}: ")
        refused = too_many(model, tokens)
        lengths.append(0 if refused else tokens)
        return refused

    count = sum(len(part.prompts) for part in data.train) + len(data.held_out)
    progress.phase("measuring prompts", count)
    data = prompts.without(data, unfit, recipe.data, "do not fit the model")
    _check_places(recipe.model, algorithm, model, max(lengths))
    return data


def _check_places(section: Any, algorithm: Any, model: Any, longest: int) -> None:
    """Raises where a reply may grow beyond the model's positions: from there on it writes nonsense,
    and would be trained on it."""
    made_for, most = model.places, algorithm.max_tokens
    if made_for is None or longest + most <= made_for:
        return
    fits = max(made_for - longest, 0)
    lower = f"algorithm.max_tokens to {fits}" if fits else "algorithm.max_tokens"
    raise UserError(
        f"the longest prompt has {longest} tokens and a reply may have algorithm.max_tokens = "
        f"{most}, together {longest + most}, but {section.path} was made for {made_for} "
        f"(max_position_embeddings in its config.json); lower {lower}, or model.max_prompt to "
        "leave out the longest prompts"
    )


def _drawn_as_meant(
    recipe: Recipe, size: Model, algorithm: Algorithm, model: FlowModel, data: prompts.Loaded
) -> list[str]:
    """Raises for sizes, guidance and negative prompts that the model does not take; tells of
    negative prompts that are not used, and of prompts whose ends it does not see."""
    from gesso.models.flow.base import check_guidance, over_long, unused_negatives

    model.latent_shape(size.height, size.width)
    train = [prompt for part in data.train for prompt in part.prompts]
    spec = algorithm.spec(0, 0, size)
    assert isinstance(spec, SampleSpec)
    check_guidance(model, spec.guidance, train)
    drawn = spec.guidance if recipe.eval.guidance is None else recipe.eval.guidance
    check_guidance(model, drawn, data.held_out)
    paths = [" and ".join(s.path for s in part) for part in (recipe.data.train, recipe.data.eval)]
    notes = [
        *unused_negatives(model, spec.guidance, train, paths[0], "algorithm.guidance"),
        *unused_negatives(model, drawn, data.held_out, paths[1], "eval.guidance"),
        *over_long(model, train, paths[0]),
        *over_long(model, data.held_out, paths[1]),
    ]
    return list(dict.fromkeys(notes))


def train(
    recipe: str | Recipe,
    overrides: Sequence[str] = (),
    folder: str | Path | None = None,
    quiet: bool = False,
    shown: Display | None = None,
) -> RunFolder:
    """Train a recipe (bundled name, TOML file or Recipe) into a new run folder. `shown`: where
    progress is told instead of the console."""
    name, called = "run", ""
    if isinstance(recipe, str):
        name = called = Path(recipe).stem
        recipe = build.recipe(recipe, overrides)
    elif overrides:
        raise UserError(
            "overrides go with a recipe's name; change a Recipe by model_copy(update=…)"
        )
    path = Path(folder) if folder is not None else _next_folder(name)
    RunFolder.must_be_new(path)
    with _shown(recipe, quiet, shown) as display:
        job = assemble(recipe, display)  # before the folder is made: a mistake leaves nothing
        return _run(job, RunFolder.create(path, recipe.model_dump(), called), display)


def resume(
    folder: str | Path,
    quiet: bool = False,
    steps: int | None = None,
    shown: Display | None = None,
) -> RunFolder:
    """Go on from the newest complete checkpoint of a run, to its last step or to `steps`."""
    run = RunFolder.open(Path(folder))
    recipe = recipe_of(run)
    if steps is not None:
        if steps < (run.latest() or 0):
            raise UserError(f"{run.path} is at step {run.latest()} already; steps={steps} is less")
        recipe = recipe.model_copy(update={"steps": steps})
    with _shown(recipe, quiet, shown) as display:
        build.announce_code(recipe, run.path, "model", "algorithm", "reward", "tracker")
        return _run(assemble(recipe, display), run, display, changed=steps is not None)


def _shown(recipe: Recipe, quiet: bool, shown: Display | None) -> Display:
    """A run without "console" in `track` is a quiet one."""
    return (
        shown if shown is not None else display(quiet or "console" not in recipe.track, aside=False)
    )


def _run(job: Job, run: RunFolder, display: Display, changed: bool = False) -> RunFolder:
    """`changed`: the recipe is not the one in the folder. A folder that is damaged stays as it is
    but for log.txt: the rest is written after the checkpoint was restored."""
    from gesso.loop import Loop
    from gesso.viewer import files, report

    pictures = files.Thumbnails()  # of reports, one after every evaluation

    def tell(text: str) -> None:
        run.note(text)
        display.note(text)

    begun = ok = False

    def begin() -> None:
        nonlocal begun
        begun = True
        if changed:
            run.write_config(job.recipe.model_dump())

    watchers = Watchers(display, build.trackers(job.recipe, run.path, tell))
    try:
        for note in [*job.notes, *_listed(job, run)]:
            tell(note)
        with _interruptible(display) as should_stop, bars.compiling(display):
            loop = Loop(
                recipe=job.recipe,
                learner=job.learner,
                cluster=job.cluster,
                eval_prompts=job.eval_prompts,
                run=run,
                watcher=watchers,
                should_stop=should_stop,
                after_restore=begin,
                after_eval=lambda: report.write(run.path, run.path / REPORT, pictures),
            )
            loop.train()
        ok = True
    except OSError as error:
        last = run.latest()
        raise StopRun(
            f"could not write to {run.path}: {error}; the last complete checkpoint is "
            f"{f'step {last}' if last is not None else 'none'}; make room and run "
            f"`gesso train --resume {run.path}`"
        ) from error
    except StopRun as error:
        run.note(f"stopped: {error}")  # for whoever looks at the folder later
        raise
    except (MemoryError, RuntimeError) as error:
        if (sentence := out_of_memory(error)) is None:
            raise
        run.note(f"stopped: {sentence}")
        raise StopRun(
            f"{sentence}; where other programs hold the memory, `gesso train --resume {run.path}` "
            "goes on once they have ended"
        ) from error
    finally:
        job.close()
        try:
            if begun:
                report.write(run.path, run.path / REPORT, pictures)
        except OSError as error:  # must not hide why the run stopped
            display.note(f"no report.html: {error}")
        watchers.finish(ok)
    return run


def _listed(job: Job, run: RunFolder) -> list[str]:
    """Every row that was left out goes into a file; the notes name the first of each kind."""
    if not job.left_out:
        return []
    file = run.path / "left-out.txt"
    file.write_text("".join(f"{line}\n" for line in job.left_out), "utf-8")
    return [f"all {len(job.left_out)} rows that were left out: {file}"]


def _next_folder(name: str) -> Path:
    n = 1
    while (path := Path("runs") / f"{name}-{n:03d}").exists():
        n += 1
    return path


@contextmanager
def _interruptible(progress: Progress) -> Iterator[Any]:
    """The first Ctrl-C ends the run after the current step, the second at once."""
    stop = threading.Event()

    def handle(number: int, frame: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        progress.note("stopping after this step; Ctrl-C again stops at once")

    if threading.current_thread() is not threading.main_thread():
        yield stop.is_set
        return
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield stop.is_set
    finally:
        signal.signal(signal.SIGINT, before)

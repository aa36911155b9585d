"""A run from the outside: start it, resume it, draw from it, export it. The CLI and Python users
call the same functions."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gesso import build
from gesso.config import Model, Recipe, parse
from gesso.config import TokenModel as TokenModelSection
from gesso.data import prompts
from gesso.track.console import Console
from gesso.track.run_folder import RunFolder
from gesso.types import Prompt, SampleSpec, StopRun, UserError, seed_of

if TYPE_CHECKING:
    from gesso.algorithms.base import Algorithm
    from gesso.cluster.local import Local
    from gesso.learner.learner import Learner
    from gesso.models.flow.base import FlowModel
    from gesso.models.tokens.base import TokenModel


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

    def close(self) -> None:
        self.rewards.service.close()
        self.cluster.sampler.close()


def assemble(recipe: Recipe) -> Job:
    """Read the data, load the model, connect the rewards; cheap things first, so that a mistake
    shows before the weights are loaded."""
    build.check_engine(recipe)
    algorithm = build.algorithm(recipe)
    rewards = build.rewards(recipe)
    try:
        data = prompts.load(recipe.data, rewards.train.unfit, rewards.held_out.unfit)
        from gesso.cluster.local import Local
        from gesso.learner.learner import Learner

        model = build.model(recipe)
        data = _fitting(recipe, algorithm, model, data)
        critic = build.critic(recipe, algorithm, model)
        learner = Learner(model, algorithm, recipe.optimizer, recipe.learner, recipe.seed, critic)
        sampler = build.sampler(recipe, model)
        stream = prompts.Stream(data.train, recipe.seed)
        cluster = Local(recipe, algorithm, sampler, rewards.service, stream)
    except BaseException:
        rewards.service.close()
        raise
    notes, held_out = list(data.notes), data.held_out[: recipe.eval.prompts]
    if uneven := build.ragged(recipe, algorithm):
        notes.append(uneven)
    if len(held_out) < recipe.eval.prompts:
        sources = " and ".join(source.path for source in recipe.data.eval)
        notes.append(
            f"eval.prompts = {recipe.eval.prompts}, but {sources} has {len(held_out)}: "
            "all of them are used"
        )
    return Job(recipe, algorithm, model, learner, cluster, rewards, held_out, notes)


def _fitting(
    recipe: Recipe, algorithm: Algorithm, model: Any, data: prompts.Loaded
) -> prompts.Loaded:
    """The data as far as the model takes it, with what there is to tell about the rest."""
    if isinstance(recipe.model, Model):
        told = _drawn_as_meant(recipe, recipe.model, algorithm, model, data)
        return replace(data, notes=[*data.notes, *told])

    def too_long(prompt: Prompt) -> str | None:
        tokens = model.length(prompt)
        if tokens <= model.max_prompt:
            return None
        return f"{tokens} tokens, more than model.max_prompt = {model.max_prompt}"

    return prompts.without(data, too_long, recipe.data, "are too long")


def _drawn_as_meant(
    recipe: Recipe, size: Model, algorithm: Algorithm, model: FlowModel, data: prompts.Loaded
) -> list[str]:
    """Raises for sizes, guidance and negative prompts that the model does not take; tells of
    prompts whose ends it does not see."""
    from gesso.models.flow.base import check_guidance, over_long

    model.latent_shape(size.height, size.width)
    train = [prompt for part in data.train for prompt in part.prompts]
    spec = algorithm.spec(0, 0, size)
    assert isinstance(spec, SampleSpec)
    check_guidance(model, spec.guidance, train)
    drawn = spec.guidance if recipe.eval.guidance is None else recipe.eval.guidance
    check_guidance(model, drawn, data.held_out)
    paths = [" and ".join(s.path for s in part) for part in (recipe.data.train, recipe.data.eval)]
    notes = over_long(model, train, paths[0]) + over_long(model, data.held_out, paths[1])
    return list(dict.fromkeys(notes))


def train(
    recipe: str | Recipe,
    overrides: Sequence[str] = (),
    folder: str | Path | None = None,
    quiet: bool = False,
) -> RunFolder:
    """Train a recipe (bundled name, TOML file or Recipe) into a new run folder."""
    name = "run"
    if isinstance(recipe, str):
        name = Path(recipe).stem
        recipe = build.recipe(recipe, overrides)
    elif overrides:
        raise UserError(
            "overrides go with a recipe's name; change a Recipe by model_copy(update=…)"
        )
    path = Path(folder) if folder is not None else _next_folder(name)
    RunFolder.must_be_new(path)
    job = _load(recipe, quiet)  # before the folder is made: a mistake leaves nothing behind
    return _run(job, RunFolder.create(path, recipe.model_dump()), quiet)


def resume(folder: str | Path, quiet: bool = False, steps: int | None = None) -> RunFolder:
    """Go on from the newest complete checkpoint of a run, to its last step or to `steps`."""
    run = RunFolder.open(Path(folder))
    recipe = recipe_of(run)
    if steps is not None:
        if steps < (run.latest() or 0):
            raise UserError(f"{run.path} is at step {run.latest()} already; steps={steps} is less")
        recipe = recipe.model_copy(update={"steps": steps})
        run.write_config(recipe.model_dump())
    return _run(_load(recipe, quiet), run, quiet)


def recipe_of(run: RunFolder) -> Recipe:
    """The resolved recipe of a run; its rewards need not be installed to read it."""
    path = run.path / "config.toml"
    return parse(Recipe, build.read_toml(path), str(path))


def _load(recipe: Recipe, quiet: bool) -> Job:
    if not quiet:
        print(f"loading data, rewards and {recipe.model.path}", flush=True)
    return assemble(recipe)


def _run(job: Job, run: RunFolder, quiet: bool) -> RunFolder:
    from gesso.loop import Loop
    from gesso.track import report

    console = Console(job.recipe.steps) if not quiet else _Silent()
    try:
        for note in job.notes:
            run.note(note)
            console.note(note)
        with _interruptible(console) as should_stop, console:
            loop = Loop(
                recipe=job.recipe,
                learner=job.learner,
                cluster=job.cluster,
                eval_prompts=job.eval_prompts,
                run=run,
                watcher=console,
                should_stop=should_stop,
                after_eval=lambda: report.write(run.path),
            )
            loop.train()
    except OSError as error:
        last = run.latest()
        raise StopRun(
            f"could not write to {run.path}: {error}; the last complete checkpoint is "
            f"{f'step {last}' if last is not None else 'none'}; make room and run "
            f"`gesso train --resume {run.path}`"
        ) from error
    finally:
        job.close()
        try:
            report.write(run.path)
        except OSError as error:  # must not hide why the run stopped
            console.note(f"no report.html: {error}")
    return run


def _next_folder(name: str) -> Path:
    n = 1
    while (path := Path("runs") / f"{name}-{n:03d}").exists():
        n += 1
    return path


@contextmanager
def _interruptible(console: Any) -> Iterator[Any]:
    """The first Ctrl-C ends the run after the current step, the second at once."""
    stop = threading.Event()

    def handle(number: int, frame: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        console.note("stopping after this step; Ctrl-C again stops at once")

    if threading.current_thread() is not threading.main_thread():
        yield stop.is_set
        return
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield stop.is_set
    finally:
        signal.signal(signal.SIGINT, before)


class _Silent:
    """Nobody looks on."""

    def start(self, step: int) -> None: ...
    def phase(self, text: str) -> None: ...
    def row(self, row: Any) -> None: ...
    def note(self, text: str) -> None: ...
    def __enter__(self) -> _Silent:
        return self

    def __exit__(self, *_: object) -> None: ...


@dataclass(frozen=True)
class Trained:
    """A model with the newest weights of a run (its EMA where it has one)."""

    recipe: Recipe
    model: FlowModel | TokenModel

    def sample(
        self, prompt: str, n: int = 1, seed: int = 0, images: Sequence[str | Path] = ()
    ) -> list[Any]:
        """n pictures (PIL) of one prompt; or of a model that writes n replies (str) to it and to
        the pictures of those files. By the recipe's evaluation settings, but that several replies
        are not greedy, which would all be the same."""
        from PIL import Image

        writes = isinstance(self.recipe.model, TokenModelSection)
        if images and not writes:
            raise UserError("this model draws; it takes no pictures to look at")
        asked = prompts.ask(prompt, images, self.recipe.data)
        self._tell_what_is_cut(asked)
        algorithm = build.algorithm(self.recipe)
        watched = self.recipe.eval
        if writes and n > 1 and watched.temperature == 0:
            watched = watched.model_copy(update={"temperature": 1.0})
        spec = algorithm.eval_spec(watched, self.recipe.model, "current")
        sampler = build.own_sampler(self.recipe, self.model)  # no engine is started for a few
        seeds = [seed_of(seed, "picture", i) for i in range(n)]
        pieces = sampler.sample([asked], [0] * n, seeds, spec)
        found = {i: s for piece in pieces for i, s in zip(piece.index, piece.samples, strict=True)}
        made = [found[i] for i in range(n)]
        return [s.reply for s in made] if writes else [Image.fromarray(s.picture) for s in made]

    def _tell_what_is_cut(self, prompt: Prompt) -> None:
        from gesso.models.flow.base import over_long

        if isinstance(self.recipe.model, Model):
            for told in over_long(self.model, [prompt], "one"):  # type: ignore[arg-type]
                print(told, file=sys.stderr)

    def export(self, folder: str | Path, merged: bool = False) -> Path:
        """LoRA in diffusers' format; or the whole pipeline, of a full fine-tune or with `merged`,
        the LoRA folded into its weights."""
        target = Path(folder)
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise UserError(f"export folder {target} exists already; choose an empty one")
        self.model.save(target, merged)
        return target


def load(source: str | Path) -> Trained:
    """A run folder, at its newest checkpoint, or the untrained model of a bundled recipe."""
    path = Path(source)
    if not path.is_dir():
        recipe = build.recipe(str(source))
        return Trained(recipe, build.model(recipe))
    run = RunFolder.open(path)
    recipe = recipe_of(run)
    step = run.latest()
    if step is None:
        raise UserError(f"{path} has no checkpoint yet")
    model = build.model(recipe)
    state, _ = run.load(step)
    table = "ema/" if recipe.learner.ema else "current/"
    model.policy.load(
        {key.removeprefix(table): t for key, t in state.items() if key.startswith(table)}
    )
    return Trained(recipe, model)

"""`gesso plan`: the real loop over virtual workers, against figures computed by hand."""

from __future__ import annotations

import json
import math
import os
import random
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from gesso import build, cli, clock
from gesso.config import Recipe
from gesso.data.prompts import ImageSizes
from gesso.estimate import built_on_meta
from gesso.models.tokens.packing import pack_responses
from gesso.plan import command, gpus, measure, planner, tabulated, work
from gesso.plan.cores import SharedCores
from gesso.plan.measure import Measured, fitted, of_one, of_pair, sizes
from gesso.plan.planner import Option, Plan, Planner, divided
from gesso.plan.rates import Line, Rates
from gesso.plan.simulate import load, simulate, simulate_separate
from gesso.plan.text import bound, report
from gesso.timeline.steps import Step
from gesso.types import Prompt, Sample, UserError
from tests import pipelines

SIZES = ["data.groups=8", "algorithm.group=4", "sampler.batch=4", "learner.micro_batch=4"]
RATES = Rates(sample=Line(1.0), decode=Line(0.5), update=Line(0.25), optimizer=2.0)


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return build.recipe("demo", [*SIZES, "eval.prompts=4", "algorithm.updates=1"])


def terms(recipe: Recipe) -> int:
    return build.algorithm(recipe).terms_a_sample


def test_one_worker_does_one_thing_after_the_other(recipe: Recipe) -> None:
    found = simulate(recipe, 1, RATES, 0)
    by_hand = 32 * 1.5 + 32 * terms(recipe) * 0.25 + 2.0
    assert found.step == pytest.approx(by_hand)
    assert found.idle == pytest.approx(0.0, abs=1e-9)
    assert found.evaluation == pytest.approx(4 * 1.5)


def test_workers_divide_parts_and_micro_batches(recipe: Recipe) -> None:
    """8 parts on 3 workers: three rounds; the optimizer step is taken by all."""
    found = simulate(recipe, 3, RATES, 0)
    micro = 32 * terms(recipe) // 4
    assert found.step == pytest.approx(3 * 6.0 + -(-micro // 3) * 1.0 + 2.0)
    assert found.idle > 0.05


def test_separate_samplers_overlap_only_with_lag(recipe: Recipe) -> None:
    cluster = recipe.cluster.model_copy(update={"workers": 1, "samplers": 2})
    apart = recipe.model_copy(update={"cluster": cluster})
    sampling, training = 4 * 6.0, 32 * terms(recipe) * 0.25 + 2.0
    found = simulate_separate(apart, 3, RATES, RATES, 0)
    assert found.step == pytest.approx(sampling + training)
    assert found.evaluation == simulate(recipe, 2, RATES, 0).evaluation  # by the samplers
    overlaps = simulate_separate(apart.model_copy(update={"lag": 1}), 3, RATES, RATES, 0)
    assert overlaps.step == pytest.approx(max(sampling, training))
    idle = 1 - (2 * sampling + training) / 3 / overlaps.step
    assert overlaps.idle == pytest.approx(idle)


def test_lag_hides_scoring_behind_the_update(recipe: Recipe) -> None:
    slow = Rates(sample=Line(0.1), update=Line(0.5), score=1.0)
    waits = simulate(recipe, 1, slow, 0)
    overlaps = simulate(recipe.model_copy(update={"lag": 1}), 1, slow, 0)
    assert waits.waiting > 0.1 and "use more reward workers" not in bound_of(recipe, slow)
    assert overlaps.step < waits.step
    very_slow = Rates(sample=Line(0.1), update=Line(0.01), score=9.0)
    assert "use more reward workers" in bound_of(recipe, very_slow)


def bound_of(recipe: Recipe, rates: Rates) -> str:
    return bound(Option(recipe, 1, simulate(recipe, 1, rates, 0), {}))


def test_real_time_comes_back_after_a_simulation(recipe: Recipe) -> None:
    before = clock.seconds()
    simulate(recipe, 1, RATES, 0)
    assert before < clock.seconds() < before + 600


@pytest.mark.parametrize("workers, batch", [(2, 4), (8, 4), (16, 2), (32, 1)])
def test_batches_leave_every_worker_work(recipe: Recipe, workers: int, batch: int) -> None:
    sized = divided(recipe, workers, 0)
    assert sized.sampler.batch == sized.learner.micro_batch == batch


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates of memory take seconds."""
    monkeypatch.setattr(planner, "estimate", lambda recipe, *_: SimpleNamespace(peak=1e9))


@pytest.mark.usefixtures("small")
def test_more_gpus_than_samples_are_named(recipe: Recipe) -> None:
    plan = Planner(recipe, lambda sized, count: RATES, 0).plan(64)
    assert plan.best.workers == 32
    assert "32 of 64 GPUs would be idle" in plan.notes[-1]
    times = [option.prediction.step for option in plan.scaling]
    assert times == sorted(times, reverse=True)


@pytest.mark.usefixtures("small")
def test_fewer_gpus_that_are_faster_are_named(recipe: Recipe) -> None:
    plan = Planner(recipe, lambda sized, count: replace(RATES, optimizer=9.0 * count), 0).plan(32)
    fastest = min(plan.scaling, key=lambda option: option.prediction.step)
    assert 1 < fastest.workers < 32 and plan.best.workers == 32
    assert plan.notes[-1].startswith(f"{fastest.workers} GPUs would be faster: ")


@pytest.mark.usefixtures("small")
def test_separate_samplers_that_pay_are_chosen(recipe: Recipe) -> None:
    """Every learner takes the whole optimizer step, during which samplers continue."""
    slow, gpu = replace(RATES, optimizer=8.0), gpus.find("h100")
    planner = Planner(recipe, lambda sized, count: slow, 0, gpu)
    plan = planner.plan(4)
    training = 32 * terms(recipe) * 0.25
    together, separate = (48 + training) / 4 + 8.0, max(48 / 2, training / 2 + 8.0)
    assert plan.best.settings[:2] == ["cluster.workers=2", "cluster.samplers=2"]
    assert plan.best.prediction.step == pytest.approx(separate)
    assert plan.alternatives[0].prediction.step == pytest.approx(together)
    text = f"overlap with the update, which makes a step {1 - separate / together:.0%} shorter"
    assert f"lag=1: sampling and scoring {text}" in printed(plan)
    assert [option.workers for option in plan.scaling] == [1, 2, 4, 8, 16, 32]
    assert plan.scaling[3].settings == planner.plan(8).best.settings
    network = Planner(recipe, lambda sized, count: replace(slow, send=9.0), 0, gpu)
    assert network.plan(4).best.recipe.cluster.samplers == 0


def test_weights_are_sharded_where_they_do_not_fit(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An H100 has 77 GB for 150 GB of weights: two or more GPUs share them, one is left out."""

    def estimate(recipe: Recipe, role: str, images: None) -> SimpleNamespace:
        return SimpleNamespace(peak=150e9 / (recipe.cluster.shard_within or 1))

    monkeypatch.setattr(planner, "estimate", estimate)
    plan = Planner(recipe, lambda sized, count: RATES, 0, gpus.find("h100")).plan(16)
    assert [option.workers for option in plan.scaling] == [2, 4, 8, 16, 32]
    assert {option.recipe.cluster.sharding for option in plan.scaling} == {"all"}
    within = [option.recipe.cluster.shard_within for option in plan.scaling]
    assert within == [2, 4, 8, 8, 8]
    assert 'sharded weights (cluster.sharding = "all")' in plan.notes[0]


@pytest.mark.usefixtures("small")
def test_numbers_of_gpus_that_a_recipe_cannot_use_are_left_out(recipe: Recipe) -> None:
    cluster = recipe.cluster.model_copy(
        update={"samplers": 1, "workers": 3, "sharding": "all", "shard_within": 3}
    )
    planner = Planner(recipe.model_copy(update={"cluster": cluster}), lambda sized, count: RATES, 0)
    plan = planner.plan(7)
    assert [option.workers for option in plan.scaling] == [4, 7, 16]
    assert {option.recipe.cluster.samplers for option in plan.scaling} == {1}
    with pytest.raises(UserError, match=r"8 GPUs cannot be divided by cluster.shard_within = 3"):
        planner.plan(8)


@pytest.mark.usefixtures("small")
def test_algorithms_that_require_current_weights_get_no_lag() -> None:
    """Groups that are refilled are not predicted, whichever reward decides which are flat."""
    dapo = ["algorithm.name=dapo", "algorithm.advantage.flat_by=count"]
    recipe = build.recipe("demo-vlm", [*dapo, "algorithm.refills=1"])
    plan = Planner(recipe, lambda sized, count: RATES, 45, gpus.find("h100")).plan(2)
    never = simulate(build.recipe("demo-vlm", [*dapo, "algorithm.refills=0"]), 1, RATES, 45)
    assert simulate(recipe, 1, RATES, 45).step == pytest.approx(never.step)
    assert {option.recipe.lag for option in (plan.best, *plan.alternatives, *plan.scaling)} == {0}
    assert "lag=0: the algorithm requires it" in printed(plan)


def printed(plan: Plan) -> str:
    return report(plan, ["demo"], [], 0.0, explain=False)


def test_partial_responses_are_not_predicted() -> None:
    recipe = build.recipe("demo-vlm", ["lag=2", "partial=true"])
    with pytest.raises(UserError, match=r"does not support partial = true.* add partial=false"):
        command.plan(recipe, command.Wanted(2, "a100"))


def test_work_is_counted_per_sample(recipe: Recipe) -> None:
    """The update of a full fine-tune: forward, and twice as much backward."""
    counted = work.count(recipe)
    assert isinstance(counted, work.FlowWork)
    twice = work.count(build.recipe("demo", [*SIZES, "sampler.batch=8"]))
    assert isinstance(twice, work.FlowWork)
    assert twice.denoise.flops == pytest.approx(counted.denoise.flops, rel=1e-6)
    assert 2.5 < counted.update.flops / counted.denoise.flops < 3.5  # all weights are trained


def test_work_of_a_vision_language_model() -> None:
    """Of shorter responses there is less to train on; a token costs about as much."""
    whole, short = (work.count(build.recipe("demo-vlm", []), n) for n in (None, 8))
    assert isinstance(whole, work.TokenWork) and isinstance(short, work.TokenWork)
    assert whole.response == 32 and whole.longest - short.longest == 24
    assert 1.5 < whole.update.flops / short.update.flops < 4
    assert whole.token == pytest.approx(short.token, rel=0.1) and whole.see > 0


def test_a_stored_branch_is_not_counted_again() -> None:
    """The negative branch without gradient comes from sampling."""
    guided = [*SIZES, "algorithm.guidance=4.0"]
    both = work.count(build.recipe("demo", guided))
    one = work.count(build.recipe("demo", [*guided, "algorithm.guidance_gradient=conditional"]))
    assert one.update.flops == pytest.approx(both.update.flops / 2, rel=0.02)


def test_input_images_are_work_and_take_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the data."""
    pipelines.build("flux2-klein", tmp_path / "m", num_layers=1, num_single_layers=1)
    Image.new("RGB", (80, 64)).save(tmp_path / "a.png")
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "a", "image": "a.png"}))
    words = [f"model.path={tmp_path / 'm'}", "model.height=64", "model.width=80", *SIZES]
    words += ["data.groups=1", "algorithm.updates=1", "eval.prompts=1"]
    words += [f"data.{part}={tmp_path / 'a.jsonl'}" for part in ("train", "eval")]
    recipe = build.recipe("flux2-klein-pickscore", [*words, "model.text_length=16"])
    text, edit = (work.count(recipe, images=images) for images in (None, [(64, 80)]))
    assert edit.update.flops > 1.5 * text.update.flops
    counted, estimated = [], []

    def count(recipe: Recipe, response: None, images: ImageSizes | None) -> work.Work:
        counted.append(images)
        return edit

    def estimate(recipe: Recipe, role: str, images: ImageSizes | None) -> SimpleNamespace:
        estimated.append(images)
        return SimpleNamespace(peak=1e9)

    monkeypatch.setattr(work, "count", count)
    monkeypatch.setattr(planner, "estimate", estimate)
    plan = command.plan(recipe, command.Wanted(2, "a100")).plan
    assert (
        plan.notes[-1] == f"assuming at most 1 input image per prompt, as in {tmp_path / 'a.jsonl'}"
    )
    assert estimated and all(images == [(64, 80)] for images in [*counted, *estimated])


def test_collectives_grow_with_workers(recipe: Recipe) -> None:
    """2(n − 1)/n of the data moves in and out of each."""
    rates = Rates(Line(1.0, 0.5), encode=0.1, update=Line(2.0), reduce=0.3, share=0.2, publish=0.4)
    measured = Measured(rates, 0, {1: 1e9})
    one, two, four = (measured.rates_of(recipe, count) for count in (1, 2, 4))
    assert (one.reduce, one.share, one.publish) == (0, 0, 0) and one.encode == 0.1
    assert two == rates
    assert (four.reduce, four.share) == pytest.approx((0.3 * 1.5, 0.2 * 1.5))


def test_workers_share_cores_only_while_they_work(recipe: Recipe) -> None:
    """3 micro-batches on 4 workers and 2 cores take as long as on 2 workers that could divide them
    evenly; 4 workers that all work take twice as long as on 4 cores."""
    sampler = recipe.sampler.model_copy(update={"batch": 8})  # 4 parts
    learner = recipe.learner.model_copy(update={"micro_batch": 32})
    uneven = recipe.model_copy(update={"sampler": sampler, "learner": learner})
    assert terms(recipe) == 3
    rates = Rates(sample=Line(1.0), update=Line(0.25))
    apart = simulate(uneven, 4, rates, 0)
    assert apart.step == pytest.approx(8 * 1.0 + 32 * 0.25)
    shared = simulate(uneven, 4, replace(rates, cores=2), 0)
    assert shared.step == pytest.approx(2 * 8 * 1.0 + 1.5 * 32 * 0.25)


def test_workers_slow_each_other_down_only_together(recipe: Recipe) -> None:
    slower = Rates(sample=Line(1.0), update=Line(0.25), cores=2, slower_sampling=1.5)
    one = simulate(recipe, 1, slower, 0).step
    assert one == pytest.approx(32 + 32 * terms(recipe) * 0.25)
    assert simulate(recipe, 2, slower, 0).step == pytest.approx(one / 2 + 16 * 0.5)


def test_rewards_take_cores_from_workers(recipe: Recipe) -> None:
    """One worker and one reward process on a core: their work adds up."""
    rates = Rates(sample=Line(1.0), update=Line(0.25), score=0.5)
    training = 32 * terms(recipe) * 0.25
    one_core = simulate(one_scorer(recipe), 1, replace(rates, cores=1), 0)
    assert one_core.step == pytest.approx(32 * 1.5 + training)
    assert simulate(one_scorer(recipe), 1, rates, 0).step == pytest.approx(32 + 4 * 0.5 + training)


def one_scorer(recipe: Recipe) -> Recipe:
    reward = [entry.model_copy(update={"workers": 1}) for entry in recipe.reward]
    return recipe.model_copy(update={"reward": reward})


def test_tasks_get_equal_shares_of_the_cores() -> None:
    """Of 2, 2 and 5 seconds on 2 cores: the short ones end after 3, when the long one has done 2
    and continues alone."""
    cores, ended = SharedCores(2), dict[str, float]()

    def end(name: str) -> None:
        ended[name] = cores.now

    for name, seconds in (("a", 2.0), ("b", 2.0), ("c", 5.0)):
        cores.start(seconds, partial(end, name))
    cores.run_until(1.0)
    assert cores.now == 1.0 and not ended
    cores.run_until(9.0)
    assert ended == pytest.approx({"a": 3.0, "b": 3.0, "c": 6.0}) and cores.now == 9.0


def test_the_driver_makes_all_workers_wait(recipe: Recipe) -> None:
    found = simulate(recipe, 2, replace(RATES, between=0.125), 0)
    assert found.step == pytest.approx(simulate(recipe, 2, RATES, 0).step + 32 * 0.125)


def test_times_are_fitted_by_two_costs_of_at_least_nothing() -> None:
    """Of parts and samples."""
    exact = [(1.0, 8.0, 0.5 + 8 * 0.25), (2.0, 20.0, 1.0 + 20 * 0.25), (3.0, 24.0, 1.5 + 6.0)]
    assert fitted(exact) == pytest.approx((0.5, 0.25))
    assert fitted([(1.0, 8.0, 2.0), (1.0, 16.0, 4.4)]) == pytest.approx((0.0, 0.262), rel=1e-2)
    assert fitted([(1.0, 8.0, 3.0), (1.0, 16.0, 3.0)]) == pytest.approx((3.0, 0.0))
    assert fitted([(1.0, 8.0, 3.0), (1.0, 16.0, 2.9)]) == pytest.approx((2.95, 0.0), rel=1e-2)


def steps_of(rates: Rates, sized: Recipe, workers: int, longest: int) -> list[Step]:
    """As if real workers had these rates."""
    found = simulate(sized, workers, rates, longest)
    rows = [defaultdict[str, float](float) for _ in range(workers)]
    for span in found.spans:
        if span.rank >= 0:
            rows[span.rank][REAL.get(span.phase, span.phase)] += span.seconds
    longest_update = max(row["update"] for row in rows)
    for row in rows:  # they wait for the last one
        row["wait"] += longest_update - row["update"]
    busy = {f"worker {rank}": dict(row) for rank, row in enumerate(rows)}
    return [Step(0, 0.0, found.step, busy, {})]


REAL = {"open": "encode", "share": "exchange", "exchange": "wait"}  # names of phases


def test_measuring_finds_the_rates_of_simulated_workers(recipe: Recipe) -> None:
    """Of two workers that divide three micro-batches unevenly."""
    learner = recipe.learner.model_copy(update={"micro_batch": 32})
    recipe = recipe.model_copy(update={"learner": learner, "sampler": recipe.sampler})
    true = Rates(
        sample=Line(0.1, 0.2), encode=0.05, update=Line(0.03), share=0.01, publish=0.3,
        optimizer=0.4, between=0.02, cores=2, slower_sampling=1.3, slower_updating=1.6,
    )  # fmt: skip
    alone = replace(true, optimizer=0.4, share=0.0, publish=0.0)
    steps = {}
    assert sizes(recipe) == [(8, 4), (4, 4), (2, 4), (1, 2)]
    for size in sizes(recipe):
        smaller = [f"data.groups={size.groups}", f"algorithm.group={size.group}"]
        sized = build.recipe("demo", [*SIZES, "algorithm.updates=1", *smaller])
        steps[size] = steps_of(alone, sized, 1, 0)
    one = of_one(recipe, steps)
    assert (one.sample.each, one.sample.fixed) == pytest.approx((0.1, 0.2), rel=1e-3)
    assert (one.update.each, one.optimizer) == pytest.approx((0.03, 0.4), rel=1e-3)
    assert (one.encode, one.between) == pytest.approx((0.05, 0.02), rel=1e-3)
    found = of_pair(recipe, replace(one, cores=2), steps_of(true, recipe, 2, 0), 0)
    assert (found.share, found.publish) == pytest.approx((0.01, 0.3), rel=1e-3)
    assert found.slower_sampling == pytest.approx(1.3, abs=0.02)
    step = simulate(recipe, 2, found, 0).step
    assert step == pytest.approx(simulate(recipe, 2, true, 0).step, rel=0.02)


class FakeJob:
    """A job that records what `measure` requests from it."""

    largest = None

    def __init__(self, recipe: Recipe, progress: object) -> None:
        self.recipe, self.threads = recipe, os.environ[measure.THREADS]
        self.cluster = SimpleNamespace(rewards=SimpleNamespace(score=lambda samples: None))
        self.closed = False

    def close(self) -> None:
        self.closed = True


def test_rates_are_measured_by_real_steps_that_take_turns(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of workers with one thread each; no score is cached, or the rewards would seem free."""
    jobs: list[FakeJob] = []
    turns: list[tuple[int, measure.Size]] = []
    sample = Sample(Prompt("a"), None, 0)

    def step(job: FakeJob, number: int, size: measure.Size) -> measure.Timed:
        workers = job.recipe.cluster.workers
        assert isinstance(workers, int)
        turns.append((workers, size))
        busy = {f"worker {rank}": {"sample": 0.5, "update": 2.0} for rank in range(workers)}
        busy["driver"] = {"wait": 0.25}  # for scores
        return measure.Timed(Step(number, 0.0, 3.0, busy, {}), [sample] * size.samples, 7e8)

    def assemble(*arguments: Any) -> FakeJob:
        jobs.append(FakeJob(*arguments))
        return jobs[-1]

    monkeypatch.setattr(measure, "assemble", assemble)
    monkeypatch.setattr(measure, "_step", step)
    monkeypatch.setenv(measure.THREADS, "7")
    found = measure.measure(recipe)
    assert [job.threads for job in jobs] == ["1", "1"] and os.environ[measure.THREADS] == "7"
    assert not any(entry.cache for job in jobs for entry in job.recipe.reward)
    assert all(job.closed for job in jobs)
    warm_up, one_round = 2, [*((1, size) for size in sizes(recipe)), (2, (8, 4))]
    assert turns[warm_up:] == one_round * measure.ROUNDS
    assert found.memory == {1: 7e8, 2: 7e8} and found.rates.between == pytest.approx(0.25 / 32)


@pytest.mark.parametrize("seed", range(5))
def test_micro_batches_are_even_although_responses_differ(seed: int) -> None:
    """Responses to a prompt stay together. A limit of exactly the mean leaves one more batch."""
    vlm = build.recipe("demo-vlm", ["learner.micro_tokens=4096"])
    generator = random.Random(seed)
    of_group = [generator.randint(4, 16) for _ in range(16)]
    prompts, row = [40] * 16, [i for i in range(16) for _ in range(8)]
    lengths = [of_group[i] for i in row]
    longest = math.ceil(fmean(of_group) + 40 / 8)
    for workers in (1, 2, 4):
        sized = divided(vlm, workers, longest)
        packed = pack_responses(prompts, row, lengths, sized.learner.micro_tokens)
        assert len(packed) == workers
        sizes = load(sized, build.algorithm(sized), longest).micro_batches(128)
        assert sizes == [128 // workers] * workers
    mean = sum(lengths) // 4 + 40 * 4
    assert len(pack_responses(prompts, row, lengths, mean)) > 4


def test_micro_batches_that_differ_from_sampling_batches_are_divided(recipe: Recipe) -> None:
    learner = recipe.learner.model_copy(update={"micro_batch": 32})
    sized = divided(recipe.model_copy(update={"learner": learner}), 4, 0)
    assert sized.sampler.batch == 4 and sized.learner.micro_batch == 24  # of 96 terms


def test_memory_is_estimated_once_per_batch_size(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, where samples for the learners wait in host memory."""
    estimated = []

    def count(recipe: Recipe, role: str, images: None) -> SimpleNamespace:
        estimated.append((role, recipe.sampler.batch, recipe.learner.micro_batch))
        return SimpleNamespace(peak=1e9)

    monkeypatch.setattr(planner, "estimate", count)
    monkeypatch.setattr(planner, "estimated_on_gpu", lambda model, one_pass: True)
    slow = replace(RATES, optimizer=8.0)
    Planner(recipe, lambda sized, count: slow, 0, gpus.find("h100")).plan(32)
    assert len(estimated) == len(set(estimated)) > 1


def test_memory_on_this_machine_is_that_of_a_process(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An estimate of tensors and what a worker was measured to need besides: one alone, or one of
    two."""

    def tensors(recipe: Recipe, role: str, images: None) -> SimpleNamespace:
        return SimpleNamespace(peak=1e8 * recipe.learner.micro_batch)

    monkeypatch.setattr(planner, "estimate", tensors)
    planning = Planner(recipe, lambda sized, count: RATES, 0, measured={1: 2e9, 2: 1.5e9})
    assert planning.memory(recipe, 1) == {"worker": 2e9}
    halves = recipe.learner.model_copy(update={"micro_batch": 2})
    smaller = recipe.model_copy(update={"learner": halves})
    assert planning.memory(smaller, 1) == {"worker": 2e9 - 2e8}
    assert planning.memory(smaller, 2) == {"worker": 1.5e9 - 2e8}
    assert planning.memory(recipe, 4) == {"worker": 1.5e9}


def test_a_single_micro_batch_needs_no_sum_of_gradients(recipe: Recipe) -> None:
    """On a CPU, where a sum takes 16 bytes per trained value, after the peak of the first pass."""
    passes = -(-32 * terms(recipe) // recipe.learner.micro_batch)
    planning = Planner(recipe, lambda sized, count: RATES, 0, measured={1: 1e9})
    several, single = (planning.memory(recipe, n)["worker"] for n in (passes - 1, passes))
    network = built_on_meta(recipe)[2].policy
    assert several == 1e9 and several - single == pytest.approx(16 * network.size)


def test_a_shared_network_is_slower_and_needs_less(recipe: Recipe) -> None:
    counted, gpu = work.count(recipe), gpus.find("H100")
    cluster = recipe.cluster.model_copy(update={"sharding": "all"})
    sharded = recipe.model_copy(update={"cluster": cluster})
    whole = tabulated.rates(counted, gpu, recipe, 16)
    divided_ = tabulated.rates(counted, gpu, sharded, 16)
    assert divided_.update.floor >= whole.update.floor
    assert divided_.optimizer < whole.optimizer
    assert tabulated.rates(counted, gpu, recipe, 8).reduce < whole.reduce  # NVLink


@pytest.mark.usefixtures("small")
def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "demo", *SIZES, "--gpus", "4", "--gpu", "a100", "--explain"]
    assert cli.main([*arguments, "--quiet"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("gesso train demo data.groups=8 algorithm.group=4 cluster.workers=4")
    assert "a step of the average worker:" in printed and "limited by" in printed
    assert cli.main([*arguments, "--json", "--price", "2"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    best = found["best"]
    assert best["cost"] == pytest.approx(best["hours"] * 4 * 2)
    assert [option["workers"] for option in found["scaling"]] == [1, 2, 4, 8, 16, 32]


@pytest.mark.parametrize(
    "options, sentence",
    [
        (["--gpu", "h10"], 'did you mean "h100"?'),
        (["--gpu", "mine.toml"], "no such file"),
        (["--gpus", "0"], "--gpus expects 1 to 1024, got 0"),
        (
            ["cluster.samplers=2", "--gpus", "2"],
            "2 GPUs leave none for training, since cluster.samplers = 2; use at least 3",
        ),
        (["cluster.samplers=32", "--gpus", "64"], "32 GPUs leave none for training"),
        (["cluster.samplers=1", "--measure"], "remove one of them"),
        (["cluster.workers=3"], "chooses cluster.workers for --gpus; remove cluster.workers=3"),
        (["--response-tokens", "9"], "--response-tokens is for language models; remove it"),
        (["--score-s", "-1"], "--score-s expects a number of at least 0, got -1"),
        (["--price", "nan"], "--price expects a number of at least 0, got nan"),
    ],
)
def test_bad_input_is_one_sentence(
    options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "demo", *SIZES, *options]) == 2
    assert sentence in capsys.readouterr().err


def test_a_gpu_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    others = ("bf16", "fp32", "bandwidth", "node", "network", "price")
    file.write_text("memory = 1\n" + "".join(f"{key} = 5\n" for key in others))
    assert gpus.find(str(file)).memory == 1
    file.write_text("memory = 1")
    with pytest.raises(UserError, match=r"bf16: Field required"):
        gpus.find(str(file))


def test_a_recipe_that_fits_nowhere_says_what_would() -> None:
    tiny = gpus.Gpu(name="tiny", memory=1, bf16=1, fp32=1, bandwidth=1, node=1, network=1, price=0)
    large = build.recipe("demo", ["data.groups=20000"])
    planning = Planner(large, lambda sized, count: RATES, 0, tiny)
    with pytest.raises(UserError, match=r"needs at least .* GB on one GPU, but a tiny leaves"):
        planning.plan(1)

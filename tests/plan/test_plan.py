"""`gesso plan`: the real loop over virtual workers, against figures computed by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from gesso import build, cli, clock
from gesso.config import Recipe
from gesso.plan import command, gpus, planner, tabulated, work
from gesso.plan.measure import Measured
from gesso.plan.planner import Option, Plan, Planner, divided
from gesso.plan.rates import Line, Rates
from gesso.plan.simulate import simulate, simulate_separate
from gesso.plan.text import bound, report
from gesso.types import UserError

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
    monkeypatch.setattr(planner, "estimates", lambda recipe: {"worker": SimpleNamespace(peak=1e9)})


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
    plan = Planner(recipe, lambda sized, count: slow, 0, gpu).plan(4)
    training = 32 * terms(recipe) * 0.25
    together, separate = (48 + training) / 4 + 8.0, max(48 / 2, training / 2 + 8.0)
    assert plan.best.settings[:2] == ["cluster.workers=2", "cluster.samplers=2"]
    assert plan.best.prediction.step == pytest.approx(separate)
    assert plan.alternatives[0].prediction.step == pytest.approx(together)
    text = f"overlap with the update, which makes a step {1 - separate / together:.0%} shorter"
    assert f"lag=1: sampling and scoring {text}" in printed(plan)
    assert [option.recipe.cluster.samplers for option in plan.scaling] == [1, 2, 4, 8, 16]
    network = Planner(recipe, lambda sized, count: replace(slow, send=9.0), 0, gpu)
    assert network.plan(4).best.recipe.cluster.samplers == 0


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


def test_workers_on_fewer_cores_take_turns(recipe: Recipe) -> None:
    rates = Rates(Line(1.0, 0.5), encode=0.1, update=Line(2.0), reduce=0.3, share=0.2, publish=0.4)
    measured = Measured(rates, 0, cores=2)
    one, two, four = (measured.rates_of(recipe, count) for count in (1, 2, 4))
    assert (one.reduce, one.share, one.publish) == (0, 0, 0) and one.encode == 0.1
    assert two == rates
    assert (four.sample, four.update) == (Line(2.0, 1.0), Line(4.0))
    assert (four.encode, four.publish) == (0.2, 0.8)
    beside = replace(measured, sampling=1.5, updating=2.0)
    assert beside.rates_of(recipe, 1) == one
    assert beside.rates_of(recipe, 2).sample == Line(1.5, 0.75)
    assert beside.rates_of(recipe, 2).update == Line(4.0)
    assert four.reduce == pytest.approx(0.3 * 2 * 1.5)  # 2(n − 1)/n of the data, and half a core


def test_a_shared_network_is_slower_and_needs_less(recipe: Recipe) -> None:
    counted, gpu = work.count(recipe), gpus.find("H100")
    cluster = recipe.cluster.model_copy(update={"sharding": "all"})
    sharded = recipe.model_copy(update={"cluster": cluster})
    whole = tabulated.rates(counted, gpu, recipe, 16)
    divided_ = tabulated.rates(counted, gpu, sharded, 16)
    assert divided_.update.floor >= whole.update.floor
    assert divided_.optimizer < whole.optimizer
    assert tabulated.rates(counted, gpu, recipe, 8).reduce < whole.reduce  # NVLink


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
            ["cluster.workers=1", "cluster.samplers=2", "--gpus", "2"],
            "--gpus 2 leaves no GPU for training, since cluster.samplers = 2; use at least 3",
        ),
        (["cluster.workers=1", "cluster.samplers=1", "--measure"], "remove one of them"),
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

"""Both sides of each benchmark compute the same; their speed is not tested."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from gesso import build
from gesso.algorithms.flow_grpo import FlowGRPO
from gesso.algorithms.stepped import Window
from gesso.config import PACKAGE, Model
from gesso.run import Assembled, assemble
from gesso.types import UserError
from tests.typed import sure


def script(name: str) -> Iterator[ModuleType]:
    path = Path(__file__).parent.parent / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]


@pytest.fixture(scope="module")
def benchmark() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
        yield from script("demo_iteration")


@pytest.fixture(scope="module")
def against_trl() -> Iterator[ModuleType]:
    yield from script("trl_iteration")


@pytest.fixture
def job(request: pytest.FixtureRequest, recipe_data: dict[str, Any]) -> Iterator[Assembled]:
    recipe_data["reward"] = [{"name": "ocr", "detect": False}]
    recipe_data["algorithm"] |= {"group": 2, "window": {"size": 2, "low": 1, "high": 3}}
    recipe_data["algorithm"]["advantage"] = {"drop_flat": False}  # as the recipe that is timed
    recipe_data["model"]["lora"] = getattr(request, "param", None)  # pytest's way: absent if unset
    job = assemble(build.recipe_from(recipe_data))
    yield job
    job.close()


def test_a_lead_that_fell_is_reported(benchmark: ModuleType) -> None:
    recorded = {"a": 2.0, "b": 1.0}
    assert benchmark.fallen({"a": 1.71, "b": 3.0, "c": 0.1}, recorded) == []
    assert benchmark.fallen({"a": 1.69, "b": 0.86}, recorded) == [
        "a: 1.69, recorded 2.00, at least 1.70"
    ]
    assert len(benchmark.fallen({}, recorded)) == 2
    assert len(benchmark.fallen({"a": float("nan"), "b": 1.0}, recorded)) == 1


def test_ratios_are_those_of_the_same_kind_of_processor(
    benchmark: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = Path(sure(str, benchmark.__file__)).parent / "recorded.json"
    for machine, ratios in json.loads(file.read_text()).items():
        monkeypatch.setattr(benchmark.platform, "machine", lambda here=machine: here)
        assert benchmark.recorded_here(file) == ratios and len(ratios) == 2
        assert min(ratios.values()) > 1
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(benchmark.platform, "machine", lambda: "riscv64")
    assert benchmark.recorded_here(file) == {}
    assert "no ratios for riscv64, only for x86_64, aarch64" in capsys.readouterr().out


@pytest.fixture
def token_iteration() -> Iterator[ModuleType]:
    yield from script("token_iteration")


def test_a_decoding_step_is_timed_within_a_call(
    token_iteration: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encoding, the first steps and the last ones take longer, and do not count."""
    clock = [0.0]

    def spend(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(token_iteration.time, "perf_counter", lambda: clock[0])
    decoding = token_iteration.decode._Decoding
    lengths = iter([50.0, 9.0, 9.0, *[2.0] * 17, 9.0, 9.0])
    monkeypatch.setattr(decoding, "_step", lambda self: spend(next(lengths)))

    def call() -> None:
        spend(100.0)
        for _ in range(22):
            decoding._step(None)
        spend(100.0)

    bench = token_iteration.Bench(None, None, torch.device("cpu"), torch.float32)
    assert token_iteration.seconds_a_step(bench, call) == 2.0


@pytest.mark.slow
def test_an_iteration_of_language_models(
    token_iteration: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the bundled model: both sides run, their log-probs meet, and nothing failed."""
    small = replace(token_iteration.TINY, prompts=2, tokens=6, batches=[4], padded=2)
    monkeypatch.setattr(token_iteration, "TINY", small)
    options = ["--tiny", "--parts", "ours,update,a", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["token_iteration.py", *options])
    assert token_iteration.main() == 0
    figures = json.loads((tmp_path / "token.json").read_text())
    assert figures["update_padded"]["gap_to_our_sampler_max"] <= 1e-4
    assert figures["update_ours"]["first_abs_dlogp_max"] <= 1e-4
    assert figures["update_ours"]["compiled_later"] == 0
    assert "iteration, (a) / ours" in figures["ratios"]
    assert "| update_ours |" in (tmp_path / "token.md").read_text()


@pytest.mark.parametrize(
    "job", [None, {"rank": 4, "alpha": 8}], indirect=True, ids=["full", "lora"]
)
def test_both_sides_compute_the_same(benchmark: ModuleType, job: Assembled) -> None:
    """Other weights are noticed: shown once, as a proof does not depend on what is trained."""
    ours = benchmark.Gesso(job)
    plain = benchmark.Plain(job, ours.start)
    proof = benchmark.prove(ours, plain)
    assert benchmark.agrees(proof), proof
    if job.recipe.model.lora is None:
        return
    plain.start = {name: tensor + 0.05 for name, tensor in ours.start.items()}
    proof = benchmark.prove(ours, plain)
    wrong = {name for name, (difference, limit) in proof.items() if difference > limit}
    assert {"latents at the end", "gradient, relative"} <= wrong
    assert "log-probs" not in wrong  # at sampling they hang on the noise alone


def test_a_recipe_the_plain_side_cannot_do_is_refused(
    benchmark: ModuleType, job: Assembled
) -> None:
    guided = sure(FlowGRPO, job.algorithm).model_copy(update={"guidance": 4.5})
    data = job.recipe.model_dump() | {"algorithm": guided.model_dump()}
    other = build.recipe_from(data)
    with pytest.raises(UserError, match="guidance"):
        benchmark.Plain(Assembled(**(vars(job) | {"recipe": other})), job.learner.policy.tensors())


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of demo-vlm, with 12 of its 2,000 questions: every run tokenizes all of them."""
    questions = (PACKAGE / "zoo/questions/train.jsonl").read_text().splitlines()[:12]
    file = tmp_path_factory.mktemp("questions") / "questions.jsonl"
    file.write_text("\n".join(questions))
    sizes = ["data.groups=2", "algorithm.group=2", "algorithm.max_tokens=6", "sampler.batch=4"]
    return [*sizes, f"data.train={file}", f"data.eval={file}"]


@pytest.fixture
def responses(against_trl: ModuleType, small: list[str]) -> Iterator[Assembled]:
    job = assemble(against_trl.settings(small, beta=0.0))
    yield job
    job.close()


def test_our_side_runs_without_trl(against_trl: ModuleType, responses: Assembled) -> None:
    ours = against_trl.Gesso(responses)
    times = {case: ours.iteration(step, case) for step, case in enumerate(against_trl.CASES)}
    assert times["equal"]["tokens"] == 6  # nobody may end before the limit
    for phases in times.values():
        *parts, total = (phases[phase] for phase in against_trl.PHASES)
        assert sum(parts) == pytest.approx(total) and phases["log-probs"] == 0
    ours.prepare("ragged")
    weights = responses.learner.policy.tensors()
    assert all(torch.equal(weights[name], start) for name, start in ours.start.items())
    assert ours.model.suppressed.tolist() == ours.written.tolist()


def test_the_report_compares_rounds(
    against_trl: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = [*against_trl.PHASES, *against_trl.FURTHER]
    rounds = {"gesso": (1.0, 2.0, 4.0), "trl": (3.0, 4.0, 16.0)}
    times = {
        f"{name} {case}": [dict.fromkeys(keys, t) for t in taken]
        for name, taken in rounds.items()
        for case in against_trl.CASES
    }
    against_trl.report(times)
    assert "trl / gesso, equal lengths: 3.00 (rounds 2.00 to 4.00" in capsys.readouterr().out


def test_what_trl_does_otherwise_is_refused(against_trl: ModuleType) -> None:
    with pytest.raises(UserError, match="expected grpo with one update"):
        against_trl.settings(["algorithm.updates=2"], beta=0.0)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("trl") is None,
    reason='TRL is not installed; run pip install -e ".[bench]"',
)
def test_trl_has_the_same_loss_and_gradients(against_trl: ModuleType, responses: Assembled) -> None:
    ours = against_trl.Gesso(responses)
    trl = against_trl.Trl(responses.recipe, responses.cluster.stream.batch(0, 2))
    proof = against_trl.prove(ours, trl)
    assert against_trl.agrees(proof), proof

    ours.start = {name: tensor + 0.01 for name, tensor in ours.start.items()}
    proof = against_trl.prove(ours, trl)
    wrong = {name for name, (difference, limit) in proof.items() if difference > limit}
    assert {"log-probs", "loss, dapo, beta 0", "gradient, dapo, beta 0, worst tensor"} <= wrong


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Scripts find what they share, as they do when they are run."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    yield
    del sys.modules["unscored"]


@pytest.fixture
def profile_cpu(beside: None) -> Iterator[ModuleType]:
    yield from script("profile_cpu")


@pytest.fixture
def yardstick() -> Iterator[ModuleType]:
    yield from script("yardstick")


def test_the_published_share_of_peak_needs_one_branch(yardstick: ModuleType) -> None:
    """With both branches of guidance it would be .62 of an H20's peak."""
    shape = replace(yardstick.MEDIUM, size=384)
    found = yardstick.report(shape, {"samples/s": 21.0, "peak": 794e12})
    assert found["published share of peak"] == pytest.approx(0.308, abs=1e-3)
    assert found["ratio"] == pytest.approx(21 / 794e12 / (7680 / 3600 / 148e12))
    fast = yardstick.algorithm()
    assert len(fast.spec(0, 0, Model(path="")).trained) == 3 and fast.updates == 2


@pytest.fixture
def growth(beside: None) -> Iterator[ModuleType]:
    yield from script("growth")


KINDS = {
    "matmuls": ["mm", "addmm", "bmm", "baddbmm", "addbmm", "linear", "mkl::_mkl_linear"],
    "convolutions": ["mkldnn_convolution", "mkldnn::_convolution_pointwise"],
    "attention": ["_scaled_dot_product_flash_attention_for_cpu_backward"],
    "other operators": ["gelu", "mul", "add", "cat", "native_layer_norm", "multinomial", "copy_"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_profile_separates_matrix_work_from_the_rest(profile_cpu: ModuleType, kind: str) -> None:
    names = [name if "::" in name else f"aten::{name}" for name in KINDS[kind]]
    assert {profile_cpu.kind_of(name) for name in names} == {kind}


def test_shares_of_a_profile(profile_cpu: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a second: an operator counts without the operators that it calls."""
    self_times = {"aten::mm": 0.2, "aten::conv2d": 0.1, "aten::gelu": 0.3}
    self_times |= {"aten::_scaled_dot_product_attention": 0.15}
    events = [
        SimpleNamespace(key=key, self_cpu_time_total=1e6 * t, cpu_time_total=9e6, count=7)
        for key, t in self_times.items()
    ]
    profile_cpu.report("demo", 1.0, events, 5)
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert printed == [
        ["demo:", "1.00", "s", "per", "iteration"],
        ["other", "operators", "0.30"],
        ["outside", "torch", "0.25"],
        ["matmuls", "0.20"],
        ["attention", "0.15"],
        ["convolutions", "0.10"],
        ["matrix", "operations:", "0.45,", "target", ".80"],
        ["aten::gelu", "0.300", "7", "calls"],
    ]


def test_an_iteration_is_profiled(
    profile_cpu: ModuleType, small: list[str], capsys: Any, tmp_path: Path
) -> None:
    profile_cpu.measure("demo-vlm", [*small, "algorithm.max_tokens=2"], rows=0)
    printed = capsys.readouterr().out
    assert printed.startswith("demo-vlm: ") and "matmuls" in printed and "outside torch" in printed
    wide = json.loads((profile_cpu.widened(2, tmp_path) / "transformer/config.json").read_text())
    width = wide["num_attention_heads"] * wide["attention_head_dim"]
    assert width == wide["caption_projection_dim"] == 256


def test_growth_is_measured_at_the_reported_sizes(
    growth: ModuleType, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(len(line.sizes) == 8 for line in growth.LINES)
    for ys, r2 in (([5.0, 7.0, 9.0], 1), ([1.0, 3.0, 2.0], 0.25), ([1.0, 4.0, 1.0], 0)):
        assert growth.straight([1, 2, 3], ys) == pytest.approx(r2)
    drawn: list[tuple[int, int]] = []
    loaded: list[int] = []
    iterations = growth.iterations

    @contextmanager
    def watched(recipe: str, overrides: Any) -> Iterator[Any]:
        with iterations(recipe, [*small, *overrides]) as once:
            update, accept = once.job.learner.update, once.job.cluster.sampler.accept

            def seen(rollout: Any, step: int) -> Any:
                assert once.job.learner.algorithm.max_tokens == rollout.mask.shape[1]
                assert not once.job.model.end  # responses this short would hardly end by themselves
                drawn.append((len(rollout.samples), int(rollout.mask.sum())))
                return update(rollout, step)

            def accepted(publication: Any) -> None:
                loaded.append(publication.version)
                accept(publication)

            monkeypatch.setattr(once.job.learner, "update", seen)
            monkeypatch.setattr(once.job.cluster.sampler, "accept", accepted)
            yield once

    monkeypatch.setattr(growth, "iterations", watched)
    line = growth.Line("demo-vlm", "", (3, 5), 3, {"group": 2}, "max_tokens")
    points = growth.measured(line)
    assert drawn == [(6, 18), (6, 18), (6, 30), (6, 30)]  # no response ends early
    assert loaded == [0, 1, 2, 0, 3, 4]  # 0: what each size begins with
    assert 0 < min(points["seconds"]) <= max(points["seconds"]) < 60 < points["mb"][0] < 24_000
    growth.draw({"tokens": points}, tmp_path / "growth.png")
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")


def test_a_point_of_growth_is_the_second_iteration(
    growth: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, sizes = [0.0], []

    class Once:
        calls = 0

        def resize(self, groups: int, options: dict[str, Any]) -> None:
            sizes.append((groups, options))

        def __call__(self) -> None:
            self.calls += 1
            clock[0] += 100.0 if self.calls == 1 else 3.0

    monkeypatch.setattr(growth.time, "process_time", lambda: clock[0])
    prompts, pictures, *_ = growth.LINES
    assert growth.point(Once(), prompts, 5)[0] == 3.0
    assert growth.point(Once(), pictures, 6)[0] == 3.0
    assert sizes == [(5, {"group": 4}), (2, {"group": 6})]


@pytest.fixture(scope="module")
def flow_iteration() -> Iterator[ModuleType]:
    yield from script("flow_iteration")
    for name in ("flow_proof", "flow_sides", "flow_plain"):
        del sys.modules[name]


def test_both_sides_of_a_large_flow_model_compute_the_same(
    flow_iteration: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a tiny one, in few steps: many CPUs have no fast bfloat16, in which the plain side runs.
    Ours runs in float32 here, so that it must meet the float32 run itself."""
    b = flow_iteration
    cpu = torch.device("cpu")
    half = {"num_layers": 2, "attention_head_dim": 8, "caption_projection_dim": 16}
    shape = replace(b.TINY, images=2, transformer=b.TINY.transformer | half)
    b.write_pipeline(shape, tmp_path, cpu)
    ours = b.Ours.load(tmp_path, shape, cpu)
    assert ours.model.text_tokens == shape.tokens[1]
    theirs = b.Theirs.load(tmp_path, ours)
    monkeypatch.setattr(sys.modules["flow_proof"], "FlowGRPO", partial(FlowGRPO, steps=3))
    proof = b.prove(ours, theirs)
    assert all(mine < 1e-4 < floor for mine, floor in proof.values()), proof

    name = "Flow-GRPO-Fast"
    short = {"steps": 3, "window": Window(size=1, low=0, high=2)}
    algorithm = b.cases(shape.images)[name].model_copy(update=short)
    row = b.measure(name, algorithm, ours, theirs, b.Memory(), rounds=1)
    assert row["compiled_later"] == 0 and row["gap"] == 0
    assert "**" in b.table({name: row}, shape, 1e12)[-1]

    wrong = {name: tensor + 0.05 for name, tensor in ours.start.items()}
    monkeypatch.setattr(theirs.plain, "start", wrong)
    monkeypatch.setattr(sys.modules["flow_proof"], "FlowGRPO", partial(FlowGRPO, steps=2))
    proof = b.prove(ours, theirs)
    wrong_ones = {name for name, (mine, floor) in proof.items() if mine > b.SLACK * floor}
    assert {"latents at the end", "gradient, both", "gradient, conditional"} <= wrong_ones, proof


@pytest.fixture(scope="module")
def model_iteration(flow_iteration: ModuleType) -> Iterator[ModuleType]:
    yield from script("model_iteration")
    del sys.modules["flow_models"]


@pytest.mark.parametrize("name", ["flux", "qwen-image"])
def test_both_sides_of_other_flow_models_compute_the_same(
    model_iteration: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    b, cpu = model_iteration, torch.device("cpu")
    case = b.TINY_CASES[name]
    case = replace(case, shape=replace(case.shape, images=2))
    ours = b.load(case, cpu, fold=True)
    pipe = case.pipeline(case.shape, cpu)
    network, vae = pipe.transformer.float(), pipe.vae.float()
    theirs = b.Theirs.of(network, vae, case.form, ours, case.guidance)
    proof = sys.modules["flow_proof"]
    short = partial(FlowGRPO, steps=2, guidance=case.guidance)
    monkeypatch.setattr(proof, "FlowGRPO", short)
    found = proof.prove(ours, theirs)
    assert all(mine < 1e-4 < floor for mine, floor in found.values()), found


def test_a_table_of_models(
    model_iteration: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = model_iteration
    small = {"attention_head_dim": 8, "caption_projection_dim": 16, "num_layers": 2}
    shape = replace(b.TINY_CASES["sd35"].shape, images=2)
    shape = replace(shape, transformer=shape.transformer | small)
    case = replace(b.TINY_CASES["sd35-large"], shape=shape)
    monkeypatch.setitem(b.TINY_CASES, "sd35-large", case)
    options = ["--tiny", "--rounds", "1", "--models", "sd35-large", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["model_iteration.py", *options])
    assert b.main() == 0
    (row,) = json.loads((tmp_path / "models.json").read_text())["rows"].values()
    assert row["replay gap"] == 0 and row["ours"]["total"] > 0 < row["plain"]["total"]
    forward, backward = b.counted(case)
    assert row["sampling flops"] == 2 * 2 * 10 * forward
    assert row["update flops"] == 2 * 2 * 2 * (forward + backward)
    flops = sys.modules["flow_sides"].flops(shape, backward=False)
    assert flops == pytest.approx(forward, rel=0.1)  # torch counts adapters, too
    assert "| sd35-large | ours |" in (tmp_path / "models.md").read_text()
    wrong = b.faults({"a": row, "b": row | {"compiled later": 2, "replay gap": 1e-7}}, gap=0.0)
    assert wrong == [
        "b: compiled after the first iteration",
        "b: log-probs of replay differ by 1.0e-07",
    ]


def test_the_command_of_a_result_can_be_pasted(
    flow_iteration: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["benchmarks/flow_iteration.py", "--cases", "Flow-GRPO, one pass"]
    monkeypatch.setattr(sys, "argv", given)
    assert shlex.split(flow_iteration.circumstances("")["command"]) == ["python", *given]


def test_results_have_stable_names(
    flow_iteration: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow_iteration, "table", lambda *_: ["| a | table |"])
    for name in ("flow", "flow-starts"):
        options = SimpleNamespace(out=tmp_path, name=name, shape=None)
        flow_iteration.write(options, {"date": "2026-11-16", "peak TFLOP/s": 1.0}, {"row": {}})
        assert json.loads((tmp_path / f"{name}.json").read_text())["date"] == "2026-11-16"
        text = (tmp_path / f"{name}.md").read_text()
        assert "- date: 2026-11-16" in text and "| a | table |" in text


RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


def test_results_carry_no_date_in_their_names_and_are_linked() -> None:
    readme = (RESULTS.parent / "README.md").read_text(encoding="utf-8")
    files = sorted(RESULTS.iterdir())
    assert files and not [file.name for file in files if any(c.isdigit() for c in file.name)]
    for file in files:
        if file.suffix == ".md":
            assert "- date: 20" in file.read_text(encoding="utf-8")
            assert f"(results/{file.name})" in readme, f"{file.name} is not linked"


def test_rows_are_chosen_by_name_or_by_a_part_of_it(flow_iteration: ModuleType) -> None:
    rows = flow_iteration.cases(1)

    def chosen(*names: str) -> list[str]:
        return [name for name in rows if flow_iteration.wanted(name, list(names))]

    assert chosen() == list(rows)
    assert chosen("Flow-GRPO", "NFT") == ["Flow-GRPO", "DiffusionNFT"]
    assert chosen("one pass") == [name for name in rows if "one pass" in name]


@pytest.mark.parametrize(
    "parts, wrong, done, status",
    [
        ("cold,cached,proof,rows", "", ["cold", "cached", "proof", "rows"], 0),
        ("cold", "", ["cold"], 0),
        ("cached", "", ["cached"], 0),
        ("proof", "", ["proof"], 0),
        ("rows", "", ["rows"], 0),
        ("proof,rows", "different", ["proof"], 1),
        ("cold", "late", ["cold"], 1),
        ("rows", "compiled again", ["rows"], 1),
        ("rows,cool", "", [], 2),
    ],
)
def test_parts_of_the_benchmark_are_run_by_name(
    flow_iteration: ModuleType,
    parts: str,
    wrong: str,
    done: list[str],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is timed if both sides differ; the exit status reports what is wrong."""
    calls: list[str] = []

    def starts(names: list[str], *_: object) -> dict[str, dict[str, float]]:
        calls.extend(names)
        return {name: {"first step": 91.0 if wrong == "late" else 89.0} for name in names}

    def proven(*_: object) -> dict[str, tuple[float, float]]:
        calls.append("proof")
        return {"gradient": (2.1 if wrong == "different" else 1.9, 1.0)}

    def measured(*_: object) -> dict[str, int]:
        calls.append("rows")
        return {"compiled_later": int(wrong == "compiled again")}

    instead = {"start_times": starts, "proven": proven, "measure": measured}
    for name, other in instead.items():
        monkeypatch.setattr(flow_iteration, name, other)
    for name in ("write_pipeline", "Ours", "Theirs"):
        monkeypatch.setattr(flow_iteration, name, MagicMock())
    monkeypatch.setattr(flow_iteration, "matrix_peak", lambda *_: 1e12)
    monkeypatch.setattr(flow_iteration, "table", lambda *_: [])
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # it sets its own
    monkeypatch.setattr(sys, "argv", ["", "--parts", parts, "--cases", "DiffusionNFT"])
    if status == 2:
        with pytest.raises(SystemExit, match="2"):
            flow_iteration.main()
    else:
        assert flow_iteration.main() == status
    assert calls == done


def test_arithmetic_is_what_torch_counts(flow_iteration: ModuleType) -> None:
    """With layers of all kinds: the first, with two attentions, with one, the last."""
    sides = sys.modules["flow_sides"]
    assert sides.MEDIUM.tokens == (1024, 77 + 128) and sides.TINY.tokens == (16, 77 + 4)
    layers = {"num_layers": 12, "dual_attention_layers": tuple(range(6))}
    shape = replace(sides.MEDIUM, transformer=sides.MEDIUM.transformer | layers)
    there, back = flow_iteration.counted(shape)
    assert sides.flops(shape, backward=False) == pytest.approx(there, rel=0.001)
    thin = 8 * 1536 * 32 * (12 * 4 * (1024 + 205) - 205)  # of rank 32; torch counts rank 1 there
    assert sides.flops(shape, backward=True) - thin == pytest.approx(back, rel=0.01)

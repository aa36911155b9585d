"""vLLM in worker processes, an engine for each or for several of them: `make test-vllm`. What needs
no vLLM is tested everywhere."""

from __future__ import annotations

import json
import os
import re
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from signal import SIGKILL
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import distributed

from gesso import build, run
from gesso.check import check
from gesso.cluster import workers
from gesso.cluster.collecting import Request
from gesso.cluster.placement import place
from gesso.cluster.processes import Message, Processes
from gesso.cluster.separate import SeparateSamplers
from gesso.config import Lora
from gesso.data import prompts
from gesso.learner.learner import Update
from gesso.rewards.transport import wire
from gesso.samplers import vllm
from gesso.samplers.vllm import VllmSampler, check_heads
from gesso.types import Prompt, ResponseSpec, Sample, UserError, Which, WorkerLost
from gesso.weights.layout import Layout
from gesso.weights.publish import Publication
from gesso.weights.shards import is_sharded
from gesso.worker import Worker
from tests import tokens
from tests.cluster.runs import assert_equal, go, language_recipe
from tests.cut_run import cut_after
from tests.samplers.test_vllm import CLOSE, HEAD, INSTALLED, SETTINGS, needs_vllm
from tests.test_loop import final_state
from tests.tokens import Tiny, stirred

ROOT = Path(__file__).parents[2]
LORA_LR = 3e-3
LORA = {"rank": 8, "alpha": 16}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, and prompts for each."""
    root = tmp_path_factory.mktemp("wide")
    for name in ("qwen2", "qwen2.5-vl"):
        tokens.build(name, root / name, HEAD)
    asked = [
        "what is 2 + 3?",
        "how many?",
        "hello there",
        "why?",
        "red or blue",
        "go on",
        "7 = ",
        "z",
    ]
    (root / "prompts.txt").write_text("\n".join(asked) + "\n")
    rows = []
    for i, text in enumerate(asked):
        (root / f"{i}.png").write_bytes(tokens.picture(32, 16 * (1 + i % 3), i).data or b"")
        rows.append(f'{{"prompt": "{text}", "image": "{i}.png"}}')
    (root / "images.jsonl").write_text("\n".join(rows) + "\n")
    return root


def recipe(root: Path, parallel: int = 1, **model: Any) -> dict[str, Any]:
    """3 prompts × 4 responses in batches of 2: 6 parts. Evaluations use averaged weights."""
    data = language_recipe(root, {"name": "grpo", "max_tokens": 16, "kl": {"beta": 0.01}})
    data["model"] |= {"max_prompt": 64, **model}
    data["sampler"] |= {"engine": "vllm", "vllm": {"tensor_parallel": parallel}}
    data["optimizer"] = {"lr": LORA_LR if "lora" in model else 3e-4}
    data["learner"] |= {"ema": {"every": 1, "decay": 0.7}}
    data["eval"] |= {"prompts": 8, "temperature": 0.0}
    return data | {"steps": 2}


def vision_recipe(root: Path, parallel: int = 1, **model: Any) -> dict[str, Any]:
    data = recipe(root, parallel, name="vision-language", path=str(root / "qwen2.5-vl"), **model)
    data["data"] |= {key: str(root / "images.jsonl") for key in ("train", "eval")}
    return data


class Case(NamedTuple):
    workers: int
    parallel: int
    sharding: str | None
    lora: bool
    sees: bool = False
    samplers: int = 0


CASES = {
    "an engine each": Case(2, 1, None, lora=False),
    "an engine each, sharded": Case(2, 1, "all", lora=False),
    "an engine each, images, sharded base": Case(2, 1, "base", lora=True, sees=True),
    "one engine, images": Case(2, 2, None, lora=True, sees=True),
    "two engines of two, sharded": Case(4, 2, "all", lora=False),
    "two engines, separate": Case(1, 1, None, lora=False, samplers=2),
    "one engine, separate, images, sharded": Case(2, 2, "base", lora=True, sees=True, samplers=2),
}


@needs_vllm
@pytest.mark.parametrize("name", CASES)
def test_training(name: str, root: Path, tmp_path: Path) -> None:
    """The engine samples with the weights of every step, and evaluates the averaged ones."""
    case = CASES[name]
    model: dict[str, Any] = {"lora": LORA} if case.lora else {}
    data = (vision_recipe if case.sees else recipe)(root, case.parallel, **model)
    found = go(data, tmp_path / "run", case.workers, sharding=case.sharding, samplers=case.samplers)
    first, *rows = found.rows()
    assert len(rows) == 2 and "eval/reward" in first
    for row in rows:
        assert row["update/sampler_gap_max"] <= CLOSE
        assert row["update/grad_norm"] > 0
        idle = [row[f"cluster/idle/{rank}"] for rank in range(case.workers + case.samplers)]
        assert min(idle) >= 0 and max(idle) < 1
    before, evaluated = recorded(found.path, 0), recorded(found.path, 2)
    assert before == responses(data, None, "")
    assert evaluated == responses(data, found.path, "ema")
    assert evaluated not in (before, responses(data, found.path, "current"))


def recorded(folder: Path, step: int) -> list[str]:
    """Responses of an evaluation during the run."""
    lines = (folder / "samples" / f"{step:06d}.jsonl").read_text().splitlines()
    return [json.loads(line)["response"] for line in lines]


def responses(data: dict[str, Any], folder: Path | None, table: str) -> list[str]:
    """Greedy responses of the built-in sampler with the weights of a checkpoint, or of the base
    model."""
    settings = build.recipe_from(data | {"sampler": {}, "cluster": {}})
    model = build.model(settings)
    if folder is not None:
        state, start = final_state(folder), f"{table}/"
        model.policy.load(
            {k.removeprefix(start): t for k, t in state.items() if k.startswith(start)}
        )
    asked = prompts.load(settings.data, lambda p: None, lambda p: None).held_out
    spec = ResponseSpec(settings.algorithm.options["max_tokens"], 0.0)
    sampler = build.built_in_sampler(settings, model)
    found: dict[int, str] = {}
    for piece in sampler.sample(asked, range(len(asked)), [0] * len(asked), spec):
        found |= zip(piece.index, (sample.response for sample in piece.samples), strict=True)
    return [found[i] for i in range(len(asked))]


@needs_vllm
def test_a_check_runs_in_the_workers_of_an_engine(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_in_this_process", None)  # a single device may be too small
    data = recipe(root, parallel=2) | {"cluster": {"workers": 2}}
    facts = dict(check(build.recipe_from(data)).facts)
    assert "; every 2 of them run one engine; " in facts["workers"]
    (gap,) = re.findall(r"differ by at most ([\d.e-]+)$", facts["ratio"])
    assert float(gap) <= CLOSE


@needs_vllm
def test_a_separate_engine_that_is_killed(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While batches are sampled ahead. The other one samples what is lost with it from the same
    seeds, with the older weights that it no longer has. Then the run is resumed with one engine."""
    data = recipe(root) | {"steps": 4, "lag": 1}
    data["save"] = {"every": 1, "keep": 9}
    saved = [0]
    honest = Processes.send

    def send(self: Processes, rank: int, task: str, content: Any, *data: bytes) -> None:
        honest(self, rank, task, content, *data)
        saved[0] += task == "save"
        if task == "save" and saved[0] == 2:
            worker: Any = self.workers[2]
            os.kill(worker.process.pid, SIGKILL)

    monkeypatch.setattr(Processes, "send", send)
    found = go(data, tmp_path / "run", 1, samplers=2)
    rows = found.rows()[1:]
    assert [row["age"] for row in rows] == [0, 1, 1, 1]
    assert rows[0]["update/sampler_gap_max"] <= CLOSE < rows[-1]["update/sampler_gap_max"]
    log = (found.path / "log.txt").read_text()
    assert log.count("it was a sampler, and 1 more continue without it") == 1
    assert log.count("samples of lost samplers were sampled again in") == 1
    assert recorded(found.path, 4) == responses(data, found.path, "ema")
    cut = cut_after(found, 2, tmp_path / "resumed")
    resumed = run.resume(cut, quiet=True, overrides=["cluster.samplers=1"])
    assert_equal(found, resumed)


# Without vLLM


@pytest.mark.skipif(INSTALLED, reason="vLLM is installed here")
def test_vllm_is_missing(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "start", None)  # no process is started
    with pytest.raises(UserError, match=r'pip install "gesso\[vllm\]"'):
        go(recipe(root), tmp_path / "run", 2)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("count", "parallel", "message"),
    [
        (None, 2, "tensor_parallel = 2 divides a model over workers and requires cluster.workers"),
        (3, 2, "sampler.vllm.tensor_parallel = 2 must divide cluster.workers = 3"),
        (2, 4, "sampler.vllm.tensor_parallel = 4 must divide cluster.workers = 2"),
        (
            14,
            2,
            "only 12; use at most 12 workers, or start a run with sampler.batch = 1 or less",
        ),
        (26, 2, "use at most 12 workers, or start a run with sampler.batch = 1 for up to 24"),
        ((2, 3), 2, "sampler.vllm.tensor_parallel = 2 must divide cluster.samplers = 3"),
        (
            (1, 14),
            2,
            "cluster.samplers = 14, but with sampler.batch = 2 a step has work for only 12; use",
        ),
    ],
)
def test_impossible_engines(
    root: Path, count: int | tuple[int, int] | None, parallel: int, message: str
) -> None:
    cluster = {"workers": count}
    if isinstance(count, tuple):
        cluster = dict(zip(("workers", "samplers"), count, strict=True))
    with pytest.raises(UserError, match=re.escape(message)):
        settings = build.recipe_from(recipe(root, parallel) | {"cluster": cluster})
        place(settings, build.algorithm(settings))


def test_the_commands_of_the_documentation() -> None:
    page = ROOT / "docs/how-to/several-devices.md"
    found = []
    for line in re.findall("^gesso train (.*sampler.engine=vllm.*)$", page.read_text(), re.M):
        name, *overrides = line.split()
        settings = build.recipe(name, [*overrides, "model.device=cpu"])
        placement = place(settings, build.algorithm(settings))
        assert placement is not None
        found.append((placement.workers, placement.samplers, placement.parallel))
    assert found == [(8, 0, 2), (8, 4, 1)]


def test_separate_engines_consist_of_samplers_only(root: Path) -> None:
    """Two engines, and a number of learners that is not divisible by their workers."""
    cluster = {"workers": 3, "samplers": 4}
    settings = build.recipe_from(recipe(root, 2) | {"cluster": cluster})
    placement = place(settings, build.algorithm(settings))
    assert placement is not None and (placement.workers, placement.samplers) == (7, 4)
    assert "3 to train and 4 to sample; every 2 samplers run one engine; " in str(placement)


def test_an_engine_of_several_workers_needs_fewer_parts(root: Path) -> None:
    settings = build.recipe_from(recipe(root, 2) | {"cluster": {"workers": 12}})
    placement = place(settings, build.algorithm(settings))
    assert placement is not None and placement.parallel == 2 and placement.parts == 6
    assert "; every 2 of them run one engine; " in str(placement)


@pytest.mark.parametrize(
    ("query", "key_value", "parallel"), [(4, 2, 1), (4, 2, 2), (4, 2, 4), (8, 1, 8), (28, 4, 4)]
)
def test_heads_that_can_be_divided(query: int, key_value: int, parallel: int) -> None:
    check_heads(query, key_value, parallel)


@pytest.mark.parametrize(
    ("query", "key_value", "parallel"), [(4, 2, 3), (6, 3, 2), (28, 4, 8), (12, 4, 6)]
)
def test_heads_that_cannot_be_divided(query: int, key_value: int, parallel: int) -> None:
    message = f"tensor_parallel = {parallel} .* {query} attention heads and {key_value} key-value"
    with pytest.raises(UserError, match=message):
        check_heads(query, key_value, parallel)


class Scripted:
    """Workers that answer in an order of their own: the last rank first. Keeps what they get."""

    first, count = 0, 4
    same_machine = True

    def __init__(self) -> None:
        self.calls: list[tuple[int, list[int], bool]] = []
        self.messages: deque[Message] = deque()

    def all(self, task: str, content: Any, *data: bytes) -> list[dict[str, Any]]:
        assert task in ("open", "forget")
        return [{}] * self.count

    def begin_task(self) -> None:
        assert not self.messages

    def send(self, rank: int, task: str, content: Any) -> None:
        busy = Counter(message.rank for message in self.messages if "busy" in message.content)
        assert task == "sample" and not busy[rank]
        only, spare = content["only"], content["spare"]
        self.calls.append((rank, only, spare))
        done = {"busy": 0.0, "made": 0} if spare else {"busy": 2.0, "made": len(range(*only))}
        self.messages.appendleft(Message(rank, done, []))
        if not spare:
            packed = wire.pack_samples([Sample(Prompt(""), None, i, "") for i in range(*only)])
            piece = {"piece": f"0.1/{only[0]}", "index": list(range(*only))}
            self.messages.appendleft(Message(rank, piece, [packed]))

    def receive(self) -> Message:
        return self.messages.popleft()


def test_the_workers_of_an_engine_get_the_same_parts(root: Path) -> None:
    settings = build.recipe_from(recipe(root, parallel=2) | {"cluster": {"workers": 4}})
    processes: Any = Scripted()
    samplers = workers.Samplers(settings, processes, gathers=True)
    row = [0] * 4 + [1] * 4 + [2] * 2
    asked = [Prompt("a"), Prompt("b"), Prompt("c")]
    request = Request(asked, row, list(range(10)), ResponseSpec(4), "", step=0)
    pieces = list(samplers.generate(request))
    assert sorted(i for piece in pieces for i in piece.index) == list(range(10))
    by_rank = {r: [only for rank, only, _ in processes.calls if rank == r] for r in range(4)}
    assert by_rank[0] == by_rank[1] and by_rank[2] == by_rank[3]
    assert sorted([*by_rank[0], *by_rank[2]]) == [[i, i + 2] for i in range(0, 10, 2)]
    assert all(spare == (rank in (1, 3)) for rank, _, spare in processes.calls)
    assert samplers._busy == [2.0 * len(by_rank[rank]) for rank in range(4)]


class Losing(Scripted):
    """Rank 1 is lost with its first part."""

    def __init__(self) -> None:
        super().__init__()
        self.ranks = [0, 1, 2, 3]

    def receive(self) -> Message:
        if 1 in self.ranks and len(self.calls) == 4:
            raise WorkerLost("worker 1 ended", 1)
        return super().receive()

    def drop(self, ranks: Sequence[int], needed: bool) -> None:
        assert list(ranks) == [0, 1] and needed
        self.ranks = [2, 3]
        self.count = 2
        self.messages = deque(m for m in self.messages if m.rank in self.ranks)


def test_all_workers_of_an_engine_are_lost_together(root: Path) -> None:
    """Its part is sampled by the other engine, which is needed then."""
    settings = build.recipe_from(recipe(root, parallel=2) | {"cluster": {"workers": 4}})
    processes: Any = Losing()
    samplers = object.__new__(SeparateSamplers)
    workers.Samplers.__init__(samplers, settings, processes, gathers=True)
    samplers._losses, samplers._calls_of_step = [], {}
    request = Request([Prompt("a")], [0] * 8, list(range(8)), ResponseSpec(4), "", step=None)
    pieces = list(samplers.generate(request))
    assert sorted(i for piece in pieces for i in piece.index) == list(range(8))
    assert [only for rank, only, _ in processes.calls if rank == 1] == [[0, 2]]
    assert [only for r, only, _ in processes.calls if r == 3] == [[2, 4], [4, 6], [6, 8], [0, 2]]
    assert samplers._losses == ["worker 1 ended; it was a sampler, and 2 more continue without it"]
    with pytest.raises(WorkerLost, match="worker 2 ended"):
        samplers.lost(WorkerLost("worker 2 ended", 2))


class Engine:
    """Keeps what it is told to do."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.llm_engine = self

    def wake_up(self, tags: list[str]) -> None:
        self.events += [f"wake {tag}" for tag in tags]

    def sleep(self, level: int) -> None:
        self.events.append(f"sleep {level}")

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        self.events.append(method)
        assert dict(kwargs["weights_iterator"])

    def reset_prefix_cache(self) -> None: ...
    def reset_encoder_cache(self) -> None: ...
    def reset_mm_cache(self) -> None: ...
    def abort_request(self, ids: list[str]) -> None: ...

    def taken(self) -> list[str]:
        events, self.events = self.events, []
        return events


def test_an_engine_on_a_gpu_sleeps_between_calls_or_until_the_update(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, model = Engine(), Tiny("qwen2", root / "qwen2").model()
    monkeypatch.setattr(vllm, "_start", lambda *arguments: engine)
    monkeypatch.setattr(VllmSampler, "_submit", lambda *arguments: None)
    sampler = VllmSampler(model, SETTINGS, longest=200)
    sampler.sleeps = True  # as on a GPU
    woken, spec = ["wake weights", "reload_weights", "wake kv_cache"], ResponseSpec(4)

    def sample() -> None:
        assert list(sampler.sample([], [], [], spec)) == []

    sample()
    assert engine.taken() == [*woken, "sleep 2"]
    sampler.prepare("current")
    assert engine.taken() == woken
    sample()  # parts
    sample()
    assert engine.taken() == []
    sampler.accept(Publication(1, {"current": model.policy.tensors()}))
    sampler.prepare("current")
    assert engine.taken() == ["reload_weights"]
    sampler.rest()
    sampler.rest()
    assert engine.taken() == ["sleep 2"]


def test_a_sampler_rests_before_the_update() -> None:
    order: list[str] = []

    def update(rollout: Any, step: int, scales: Any) -> Update:
        order.append("update")
        return Update({}, [])

    policy = SimpleNamespace(release=lambda: None)
    worker: Any = Worker(None)  # type: ignore[arg-type]
    worker.sampler = SimpleNamespace(rest=lambda: order.append("rest"))
    worker.learner = SimpleNamespace(policy=policy, update=update)
    worker.group = SimpleNamespace(waited=0.0, sent=0, count=1)
    worker.model = SimpleNamespace(device=torch.device("cpu"))
    worker._rollout = lambda scores: None
    worker.update(b"", 0, {}, [1.0])
    assert order == ["rest", "update"]


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("lora", [None, Lora(rank=4, alpha=12)], ids=["full", "lora"])
def test_plain_weights_of_a_sharded_model(root: Path, lora: Lora | None) -> None:
    """Those of the same model without sharding, all of them valid until the last one is read."""
    tiny = Tiny("qwen2", root / "qwen2")
    whole, sharded = (stirred(tiny.model(lora=lora)) for _ in range(2))
    sharded.policy.shard(sharded.sharding, sharded.device, Layout(ranks=1, within=1, offload=False))
    copies: list[Which] = ["current", "ema", "reference"]
    for model in (whole, sharded):
        for scale, which in enumerate(copies[1:], 2):
            model.policy.snapshot(which)
            for tensor in model.policy.copies.get(which, {}).values():
                tensor *= scale
    different = []
    for which in copies:
        with whole.policy.plain(which) as weights, sharded.policy.plain(which) as others:
            expected, found = dict(weights), dict(others)
            assert found.keys() == expected.keys()
            assert not any(is_sharded(tensor) for tensor in found.values())
            assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
            different.append(found["model.layers.0.self_attn.q_proj.weight"].norm())
    assert len({f"{norm:.3f}" for norm in different}) == len(copies)
    assert any(is_sharded(p) for p in sharded.module.parameters())

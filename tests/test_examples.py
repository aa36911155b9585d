"""The examples run as they are, and the documents say what the code says."""

from __future__ import annotations

import inspect
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from gesso import build, cli, config
from gesso.config.parsing import parse
from gesso.config.tables import tomllib
from gesso.run import train
from tests.test_layout import LAYERS
from tests.waiting import LIMIT

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
GUIDE = ROOT / "docs" / "guide.md"
TINY = ["steps=1", "data.groups=2", "algorithm.group=2", "eval.prompts=2"]


def call(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def gesso(*arguments: str | Path, cwd: Path, **environment: str) -> str:
    """The installed command, as users type it."""
    return call(Path(sys.executable).parent / "gesso", *arguments, cwd=cwd, **environment)


@contextmanager
def typed_in(folder: Path, *words: str | Path) -> Iterator[None]:
    """This process as if these words had been typed in that folder: a new one spends five seconds
    on imports. What is imported meanwhile is forgotten again, if it lies there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [*sys.path])
        patch.setattr(sys, "argv", [str(word) for word in words])
        yield
    for name, module in [*sys.modules.items()]:
        if Path(getattr(module, "__file__", None) or "/").parent == folder:
            del sys.modules[name]


def gesso_here(*arguments: str | Path, cwd: Path) -> None:
    with typed_in(cwd, "gesso", *arguments):
        assert cli.main() == 0


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where from_python.py has been run."""
    folder = tmp_path_factory.mktemp("examples")
    call(sys.executable, EXAMPLES / "from_python.py", *TINY, cwd=folder)
    return folder


def test_from_python(workplace: Path) -> None:
    from PIL import Image

    assert Image.open(workplace / "kite.png").size == (96, 32)
    assert (workplace / "runs" / "demo-001" / "report.html").is_file()


def test_the_five_lines_of_the_readme(workplace: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    (lines,) = (block for block in blocks if "gesso.load(" in block and "train" not in block)
    assert len(lines.splitlines()) == 5
    with typed_in(workplace, "readme"):
        exec(compile(f"import gesso\n{lines}", "README.md", "exec"), {})
    assert (workplace / "signs-rl" / "README.md").is_file()


def test_a_full_fine_tune_in_plain_diffusers(workplace: Path) -> None:
    run, folder = workplace / "runs" / "demo-001", workplace / "signs-plain"
    assert cli.main(["export", str(run), "--to", str(folder)]) == 0
    call(sys.executable, EXAMPLES / "plain_diffusers.py", "signs-plain", cwd=workplace)
    assert (workplace / "plain.png").is_file()


@pytest.fixture(scope="module")
def my_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of my_reward.toml."""
    run = tmp_path_factory.mktemp("my_reward") / "run"
    gesso("train", "my_reward.toml", *TINY, "--run", run, cwd=EXAMPLES)
    return run


def test_my_reward(my_run: Path) -> None:
    last = json.loads((my_run / "metrics.jsonl").read_text().splitlines()[-1])
    mine, read = last["reward/my_reward:redness"], last["reward/ocr"]
    assert 0 <= mine <= 1 and last["reward"] == pytest.approx(0.5 * mine + read)


def test_a_lora_in_plain_diffusers(
    my_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    assert cli.main(["export", str(my_run), "--to", str(tmp_path / "lora")]) == 0
    base, script = ROOT / "gesso" / "zoo" / "signs", EXAMPLES / "plain_diffusers.py"
    with typed_in(tmp_path, script, "lora", base):
        runpy.run_path(str(script), run_name="__main__")
    assert (tmp_path / "plain.png").is_file()


def test_the_example_reward_knows_red(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    from gesso.rewards import base
    from gesso.types import Prompt, Sample

    monkeypatch.syspath_prepend(EXAMPLES)
    reward = base.load("my_reward:redness", {"margin": 100})
    red: np.ndarray = np.zeros((4, 6, 3), dtype=np.uint8)
    red[:, :3, 0] = 200  # the left half
    prompts = [Prompt("a red sign"), Prompt("a blue sign"), Prompt("a redwood")]
    scores = base.checked(reward, [Sample(p, red, 0) for p in prompts])
    assert [s.value for s in scores] == [0.5, 0.5, 0.5]
    red[..., 0] = 200
    assert [s.value for s in base.checked(reward, [Sample(p, red, 0) for p in prompts])] == [
        1,
        0,
        0,
    ]


def sections() -> dict[str, type[BaseModel]]:
    """Heading in the guide → the class whose fields its table lists."""
    from gesso.algorithms.advantage import Advantage
    from gesso.algorithms.credit import Credit
    from gesso.algorithms.diffusion_nft import DiffusionNFT
    from gesso.algorithms.flow_grpo import FlowGRPO, Window
    from gesso.algorithms.grpo import GRPO
    from gesso.algorithms.policy_gradient import KL, Clip, SequenceClip, Weight
    from gesso.algorithms.ppo import CriticSection

    return {
        "Top level": config.Recipe,
        "`model`": config.Model,
        "`model`, a model that writes": config.TokenModel,
        "`model.lora`": config.Lora,
        "`data`": config.Data,
        "`data.train`": config.TrainDataSource,
        "`data.eval`": config.DataSource,
        "`reward`": config.RewardEntry,
        "`reward.remote`": config.RemoteEntry,
        '`algorithm`, `name = "flow-grpo"`': FlowGRPO,
        "`algorithm.window`": Window,
        "`algorithm.advantage`": Advantage,
        '`algorithm`, `name = "diffusion-nft"`': DiffusionNFT,
        "`algorithm`, a model that writes": GRPO,
        '`algorithm.surrogate`, `kind = "clip"`': Clip,
        '`algorithm.surrogate`, `kind = "sequence"`': SequenceClip,
        '`algorithm.surrogate`, `kind = "weight"`': Weight,
        "`algorithm.kl`": KL,
        "`algorithm.advantage`, a model that writes": Credit,
        "`algorithm.critic`": CriticSection,
        "`optimizer`": config.Optimizer,
        "`learner`": config.Learner,
        "`learner.ema`": config.Ema,
        "`sampler`": config.Sampler,
        "`sampler.vllm`": config.Vllm,
        "`eval`": config.Eval,
        "`save`": config.Save,
        "`tracker`": config.Tracker,
    }


def default_of(kind: type[BaseModel], key: str) -> object:
    """What the guide's second column must say."""
    field = kind.model_fields[key]
    if field.default is PydanticUndefined:
        return "required"
    if isinstance(field.default, BaseModel):
        return "section"
    if field.default is None:
        return "none"
    return list(field.default) if isinstance(field.default, tuple) else field.default


@pytest.mark.parametrize("heading", sections())
def test_the_guide_lists_every_key_with_its_default(heading: str) -> None:
    kind = sections()[heading]
    _, _, rest = GUIDE.read_text(encoding="utf-8").partition(f"\n### {heading}\n")
    assert rest, f"docs/guide.md has no heading ### {heading}"
    table = rest.split("\n#")[0].split("| key | default | meaning |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", table, re.MULTILINE)
    told = {
        key: tomllib.loads(f"x = {cell.strip('`')}")["x"] if cell.startswith("`") else cell
        for key, cell in rows
    }
    assert told == {key: default_of(kind, key) for key in kind.model_fields}


def test_the_guide_lists_the_defaults_of_the_presets() -> None:
    _, _, rest = GUIDE.read_text(encoding="utf-8").partition(
        "and other defaults, after their papers"
    )
    head, _, *rows = rest.strip().split("\n\n")[1].splitlines()
    keys = [cell.strip(" `") for cell in head.strip("|").split("|")]
    for row in rows:
        told = dict(
            zip(keys, (cell.strip(" `") for cell in row.strip("|").split("|")), strict=True)
        )
        kind = build.algorithm_class(told["name"])()
        window = kind.window
        place = f"{window.size} in [{window.low}, {window.high})" if window else "none"
        assert told["window"] == place + (
            f", every {window.every}" if window and window.every else ""
        )
        assert told["same_noise"] == ("yes" if kind.same_noise else "no")
        assert told["rule"] == kind.rule and told["advantage.std"] == kind.advantage.std
        for key in ("group", "steps", "noise", "guidance", "timestep_fraction", "clip", "beta"):
            assert float(told[key]) == getattr(kind, key), (told["name"], key)
    named = {row.split("`")[1] for row in rows}
    assert named == of_family("flow") - {"flow-grpo", "diffusion-nft"}


def of_family(family: str) -> set[str]:
    return {name for name in build.ALGORITHMS if build.algorithm_class(name).family == family}


def test_the_guide_lists_the_settings_of_the_algorithms_for_responses() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    table = text.partition("| name | `group` | `surrogate` |")[2].split("\n\n")[0]
    rows = [[cell.strip(" `") for cell in row.split("|")[1:-1]] for row in table.splitlines()[2:]]
    assert {row[0] for row in rows} == of_family("language")
    for name, group, surrogate, aggregation, advantage in rows:
        kind = build.algorithm_class(name)()
        assert (int(group), aggregation) == (kind.group, kind.aggregation), name
        s, a = kind.surrogate, kind.advantage
        bounds = (s.lower, s.upper) if s.kind == "weight" else (s.low, s.high)
        said = f"{s.kind} {short(bounds[0])}, {short(bounds[1])}"
        assert surrogate == said + (f", dual {s.dual:g}" if s.kind == "clip" and s.dual else "")
        assert kind.kl is None
        told = [f"{a.baseline} / {a.std}", a.per]
        told += [f"clip {a.clip:g}"] if a.clip else []
        told += ["whiten"] if a.whiten else []
        told += ["drop_flat", f"refills {kind.refills}"] if a.drop_flat else []
        told += [f"lam {short(kind.lam)}"] if name == "ppo" else []
        assert advantage == ", ".join(told), name


def short(value: float) -> str:
    return f"{value:g}".replace("0.", ".", 1) if 0 < value < 1 else f"{value:g}"


def test_no_section_of_a_recipe_is_forgotten() -> None:
    bases = {config.Strict, config.Named, config.AnyModel}
    bases |= {config.ModelRecipe, config.ChatSettings}  # of a folder, which nobody writes
    declared = {
        kind
        for _, kind in inspect.getmembers(config, inspect.isclass)
        if issubclass(kind, BaseModel) and kind.__module__.startswith(config.__name__)
    }
    assert declared - bases <= set(sections().values())


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a model that writes, with everything an algorithm for responses can have."""
    folder = tmp_path_factory.mktemp("language") / "run"
    options = [
        "name=ppo", "group=2", "max_tokens=8", "advantage.drop_flat=true", "refills=1",
        "kl.beta=0.01", "importance_cap=2.0",
    ]  # fmt: skip
    sizes = ["steps=1", "data.groups=2", "eval.prompts=2"]
    recipe = build.recipe("demo-vlm", [*sizes, *(f"algorithm.{o}" for o in options)])
    return train(recipe, folder=folder, quiet=True).path


def metrics(run: Path) -> set[str]:
    """Keys of its rows, as the guide writes them."""
    rows = (run / "metrics.jsonl").read_text().splitlines()
    keys = {re.sub(r"/(ocr|count)(?=/|$)", "/NAME", key) for row in rows for key in json.loads(row)}
    return {re.sub(r"/NAME/\w+$", "/NAME/DETAIL", key) for key in keys}


def test_the_guide_explains_every_metric(workplace: Path, written: Path) -> None:
    text = GUIDE.read_text(encoding="utf-8").partition("\n## Metrics\n")[2].split("\n## ")[0]
    explained = {
        key
        for row in re.findall(r"^\|(.*?)\|", text, re.MULTILINE)
        for key in re.findall("`(.*?)`", row)
    }
    draws, writes = metrics(workplace / "runs" / "demo-001"), metrics(written)
    assert {"update/ratio", "eval/NAME/DETAIL"} <= draws
    assert {
        "response/truncated",
        "update/importance",
        "update/value",
        "update/kl",
        "refilled",
    } <= writes
    assert draws | writes <= explained, (draws | writes) - explained
    absent = {"update/drift"}  # of DiffusionNFT
    assert explained <= draws | writes | absent, explained - draws - writes - absent


def documents() -> list[Path]:
    found = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    return [path for path in found if path.is_file()]


@pytest.mark.parametrize("document", documents(), ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        file = target.partition("#")[0]
        if file and "://" not in target and not target.startswith("mailto:"):
            assert (document.parent / file).exists(), f"{document.name} links to {target}"


def blocks(kind: str) -> list[str]:
    """Code blocks of the guide, by the language written behind their fence."""
    text = GUIDE.read_text(encoding="utf-8")
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [block for language, block in found if language == kind]


def test_rewards_of_the_guide_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    from gesso.rewards import base
    from gesso.types import Prompt, Sample

    function, kind = blocks("python")[:2]
    (tmp_path / "guide_rewards.py").write_text(f"{function}\n{kind}", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    white = Sample(Prompt("a white sign"), np.full((2, 2, 3), 255, dtype=np.uint8), 0)
    brightness = base.load("guide_rewards:brightness", {"scale": 2.0})
    mentions = base.load("guide_rewards:Mentions", {"word": "white"})
    assert [s.value for s in base.checked(brightness, [white])] == [2.0]
    assert [s.value for s in base.checked(mentions, [white])] == [1.0]
    assert mentions.unfit(Prompt("a cat")) == "does not mention white"


def test_the_shortest_recipe_of_the_guide_loads() -> None:
    recipe = build.recipe_from(tomllib.loads(blocks("toml")[0]))
    assert recipe.model.path == "zoo:signs" and recipe.algorithm.options["group"] == 24


def test_the_mix_of_prompts_of_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow
    from pyarrow import parquet

    from gesso.data import prompts

    monkeypatch.chdir(tmp_path)
    (made,) = (command for command in commands() if command.startswith("gesso data ocr"))
    assert cli.main([*shlex.split(made)[1:], "--train", "30", "--test", "8"]) == 0
    rows = [{"caption": f"cat {i}", "image": b"\x89PNG", "id": i} for i in range(5)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), "captions.parquet")
    (mix,) = (block for block in blocks("toml") if "[[data.train]]" in block)
    data = parse(config.Data, tomllib.loads(mix)["data"], "guide")
    loaded = prompts.load(data, lambda prompt: None, lambda prompt: None)
    assert len(loaded.held_out) == 8 and loaded.notes == []
    batch = prompts.Stream(loaded.train, 0).batch(0, 8)
    kinds = ["c" if prompt.text.startswith("cat") else "o" for prompt in batch]
    assert f"here {' '.join(kinds)} …" in GUIDE.read_text(encoding="utf-8")
    assert {tuple(p.columns) for p in batch} == {(), ("id",)}


def test_the_example_row_of_the_guide_is_read(tmp_path: Path) -> None:
    from gesso.data.readers import read

    (row,) = (line for block in blocks("") for line in block.splitlines() if line.startswith("{"))
    (tmp_path / "row.jsonl").write_text(row, encoding="utf-8")
    (prompt,) = read(config.DataSource(path=str(tmp_path / "row.jsonl"))).prompts
    assert prompt.negative == "blurry"
    assert prompt.columns == {"target": "KITE", "weight": 2, "difficulty": 3}


def commands() -> list[str]:
    lines = [line for block in blocks("") for line in block.splitlines()]
    shown = [re.sub(r"^(\$ )?(PYTHONPATH=\S+ )?", "", line) for line in lines]
    return [line for line in shown if line.startswith("gesso ")]


@pytest.mark.parametrize("command", commands())
def test_commands_of_the_guide_parse(command: str) -> None:
    cli._parser().parse_args(shlex.split(command, comments=True)[1:])


def test_the_guide_shows_every_action() -> None:
    assert {command.split()[1] for command in commands()} == {
        "train", "check", "recipes", "sample", "eval", "export", "serve-reward", "data",
    }  # fmt: skip


def test_the_plan_names_every_room_in_order() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text.partition("| layer | what |")[2].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)", table, re.MULTILINE) == LAYERS

"""The examples run as they are, and so does the code in the tutorial and the how-to pages."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gesso import arguments, build, cli, config
from gesso.config.parsing import parse
from gesso.config.tables import over, read_recipe, tomllib
from gesso.types import UserError
from gesso.video_files import read_clip
from tests import pages
from tests.pages import DOCS, ROOT
from tests.test_layout import LAYERS

EXAMPLES = ROOT / "examples"
TINY = ["steps=1", "data.groups=2", "algorithm.group=2", "eval.prompts=2", "reward.0.workers=1"]


@contextmanager
def typed_in(folder: Path, *words: str | Path) -> Iterator[None]:
    """Runs code in this process as if these words had been typed in that folder: a new process
    spends five seconds on imports. Modules imported from the folder are removed again."""
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


def run_script(script: Path, *arguments: str | Path, cwd: Path) -> None:
    with typed_in(cwd, script, *arguments):
        runpy.run_path(str(script), run_name="__main__")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where from_python.py has been run."""
    folder = tmp_path_factory.mktemp("examples")
    run_script(EXAMPLES / "from_python.py", *TINY, cwd=folder)
    return folder


def test_from_python(workplace: Path) -> None:
    from PIL import Image

    assert Image.open(workplace / "kite.png").size == (96, 32)
    assert (workplace / "runs" / "demo-001" / "report.html").is_file()


def test_the_five_lines_of_the_readme(workplace: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    (lines,) = (block for block in found if "gesso.load(" in block and "train" not in block)
    assert len(lines.splitlines()) == 5
    with typed_in(workplace, "readme"):
        exec(compile(f"import gesso\n{lines}", "README.md", "exec"), {})
    assert (workplace / "signs-rl" / "README.md").is_file()


def test_training_from_python(workplace: Path) -> None:
    (block,) = pages.blocks("python", "how-to/train.md")
    tiny = ", ".join(f'"{override}"' for override in TINY)
    with typed_in(workplace, "train.md"):
        exec(compile(block.code.replace('"steps=2"', tiny), str(block), "exec"), {})
    assert len((workplace / "my-run" / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_full_fine_tune_in_plain_diffusers(workplace: Path) -> None:
    gesso_here("export", "runs/demo-001", "--to", "signs-plain", cwd=workplace)
    run_script(EXAMPLES / "plain_diffusers.py", "signs-plain", cwd=workplace)
    assert (workplace / "plain.png").is_file()
    assert "import gesso" not in (EXAMPLES / "plain_diffusers.py").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def my_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of my_reward.toml."""
    run = tmp_path_factory.mktemp("my_reward") / "run"
    gesso_here("train", "my_reward.toml", *TINY, "--run", run, "--quiet", cwd=EXAMPLES)
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
    base = ROOT / "gesso" / "zoo" / "signs"
    run_script(EXAMPLES / "plain_diffusers.py", "lora", base, cwd=tmp_path)
    assert (tmp_path / "plain.png").is_file()


def test_the_example_reward_compares_red_with_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
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
    scores = base.checked(reward, [Sample(p, red, 0) for p in prompts])
    assert [s.value for s in scores] == [1, 0, 0]


def test_distillation(workplace: Path) -> None:
    """The commands of the page; the first teacher is the run of from_python.py."""
    commands = [words for _, words in pages.commands("how-to/distil.md")]
    image = [words for words in commands if not any("vlm" in word for word in words)]
    language = [words for words in commands if words not in image]
    assert image[0] == ["train", "demo"] and (workplace / "runs" / "demo-001").is_dir()
    for words in [*image[1:], *language]:
        short = [option for option in TINY if words[1] != "demo-vlm" or "workers" not in option]
        gesso_here(*words, *(short if words[0] == "train" else ()), cwd=workplace)
    for name in ("demo-distil-001", "demo-vlm-distil-001"):
        rows = (workplace / "runs" / name / "metrics.jsonl").read_text().splitlines()
        assert "update/distance" in json.loads(rows[-1])


def test_editing(tmp_path: Path) -> None:
    """The commands of the page, with the sign that they name."""
    from PIL import Image

    shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns("smollm2"))
    (train, sample) = (words for _, words in pages.commands("how-to/edit-images.md"))
    gesso_here(*train, *TINY, "steps=2", cwd=tmp_path)
    gesso_here(*sample, cwd=tmp_path)
    rows = (tmp_path / "runs" / "demo-edit-001" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(rows[-1])["step"] == 2 and "eval/sign-edit/exact" in json.loads(rows[-1])
    source, sheet = (Image.open(tmp_path / name) for name in (sample[4], "sheet.png"))
    assert source.size == (96, 32) and sheet.width > 2 * source.width


def test_video(tmp_path: Path) -> None:
    """The commands of the page."""
    train, sample, sft = (words for _, words in pages.commands("how-to/video.md"))
    gesso_here(*train, *TINY, cwd=tmp_path)
    gesso_here(*sample, cwd=tmp_path)
    gesso_here(*sft, *(option for option in TINY if "algorithm" not in option), cwd=tmp_path)
    for run in ("demo-video-001", "demo-video-sft-001"):
        rows = (tmp_path / "runs" / run / "metrics.jsonl").read_text().splitlines()
        assert "eval/sign-motion/exact" in json.loads(rows[-1])
    assert read_clip(str(tmp_path / "clip.mp4")).frames.shape == (5, 32, 96, 3)


COMMANDS = pages.commands()


@pytest.mark.parametrize("words", [c for _, c in COMMANDS], ids=[w for w, _ in COMMANDS])
def test_commands_parse(words: list[str]) -> None:
    arguments.parser().parse_args(words)


def test_the_pages_show_every_action() -> None:
    subparsers: Any = arguments.parser()._subparsers
    assert {words[0] for _, words in COMMANDS} == set(subparsers._group_actions[0].choices)


def plain(code: str) -> str:
    """Code without comments, docstring quotes aside, and without its indentation."""
    lines = (re.sub(r"\s+#\s.*$", "", line).strip() for line in code.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("#"))


SOURCES = [
    plain(file.read_text(encoding="utf-8"))
    for folder in ("examples", "gesso/models/flow")
    for file in sorted((ROOT / folder).rglob("*.py"))
]
RUN_ELSEWHERE = {
    "how-to/train.md",  # above
    "how-to/use-a-trained-model.md",  # tests/use/test_documented.py
}


@pytest.mark.parametrize("block", pages.blocks("python"), ids=str)
def test_python_is_an_excerpt_or_a_module_that_is_run(block: pages.Block, modules: Path) -> None:
    if block.page in RUN_ELSEWHERE or any(plain(block.code) in source for source in SOURCES):
        return
    assert block.file and block.intro.endswith(":"), f"{block} is run by no test"
    runpy.run_path(str(modules / block.file))


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the examples and the modules that the pages define."""
    folder = tmp_path_factory.mktemp("modules")
    shutil.copytree(EXAMPLES, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("smollm2"))
    for block in pages.blocks("python"):
        if block.file and not (folder / block.file).exists():
            (folder / block.file).write_text(block.code, encoding="utf-8")
    return folder


@pytest.mark.parametrize("block", pages.blocks("toml"), ids=str)
def test_recipes_load(block: pages.Block, modules: Path) -> None:
    """Fragments are laid over one of the demos."""
    data = tomllib.loads(block.code)
    base = data.pop("base", None)
    whole = {"model", "data", "algorithm", "reward"} <= set(data)
    bases = [base] if base else ["demo", "demo-vlm"]
    errors = []
    with typed_in(modules, "gesso"):
        sys.path.append(str(modules))
        for name in bases:
            try:
                build.recipe_from(data if whole else over(read_recipe(name).recipe, data))
            except UserError as error:
                errors.append(f"{name}: {error}")
    assert len(errors) < len(bases), errors


def test_the_reward_of_the_tutorial(modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    from gesso.rewards import base
    from gesso.types import Prompt, Sample

    monkeypatch.syspath_prepend(modules)
    (block,) = pages.blocks("python", "tutorial.md")
    (recipe,) = pages.blocks("toml", "tutorial.md")
    name = tomllib.loads(recipe.code)["reward"][0]["name"]
    assert name.partition(":")[0] == Path(block.file or "").stem
    white = Sample(Prompt("a white sign"), np.full((2, 2, 3), 255, dtype=np.uint8), 0)
    assert [s.value for s in base.checked(base.load(name, {}), [white])] == [1.0]


def test_the_mix_of_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow
    from pyarrow import parquet

    from gesso.data import prompts

    monkeypatch.chdir(tmp_path)
    ((_, command),) = (c for c in pages.commands("how-to/prompts.md") if c[1][0] == "data")
    assert cli.main([*command, "--train", "30", "--test", "8"]) == 0
    rows = [{"caption": f"cat {i}", "image": b"\x89PNG", "id": i} for i in range(5)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), "captions.parquet")
    (mix,) = (b for b in pages.blocks("toml", "how-to/prompts.md") if "[[data.train]]" in b.code)
    data = parse(config.Data, tomllib.loads(mix.code)["data"], "prompts.md")
    loaded = prompts.load(data, lambda prompt: None, lambda prompt: None)
    assert len(loaded.held_out) == 8 and loaded.notes == []
    batch = prompts.Stream(loaded.train, 0).batch(0, 8)
    kinds = ["c" if prompt.text.startswith("cat") else "o" for prompt in batch]
    assert f"here {' '.join(kinds)} …" in pages.page("how-to/prompts.md")
    assert {tuple(p.columns) for p in batch} == {(), ("id",)}


def test_the_example_row(tmp_path: Path) -> None:
    from gesso.data.readers import read

    row = pages.blocks("json", "how-to/prompts.md")[0].code
    (tmp_path / "row.jsonl").write_text(row, encoding="utf-8")
    (prompt,) = read(config.DataSource(path=str(tmp_path / "row.jsonl"))).prompts
    assert prompt.negative == "blurry"
    assert prompt.columns == {"target": "KITE", "weight": 2, "difficulty": 3}


def test_the_architecture_names_every_layer_in_order() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    table = text.partition("| layer | content |")[2].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)", table, re.MULTILINE) == LAYERS

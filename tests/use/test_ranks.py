"""A checkpoint that several ranks wrote, each its shards, is one like any other."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest
import torch

from gesso.config import Recipe
from gesso.learner.learner import Learner
from gesso.track.run_folder import RunFolder
from gesso.types import UserError
from gesso.use.trained import load
from tests.typed import sure
from tests.use import ranks, runs
from tests.waiting import LIMIT

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow  # two processes that load torch and diffusers


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, RunFolder]:
    """One run, with a checkpoint of one process and with the same of two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    data = runs.draws("sd3", ROOT / "gesso" / "zoo" / "signs", lora=False)
    data["model"] |= {"height": 32, "width": 96, "text_length": 0}
    one = runs.make(data, folder / "one", 0.01)
    several = RunFolder.create(folder / "several", {})
    (several.path / "config.toml").write_bytes((one.path / "config.toml").read_bytes())
    source, target = one.checkpoints / "000004", several.checkpoints / "000004"
    target.mkdir(parents=True)
    context = multiprocessing.get_context("forkserver")  # both share its imports
    context.set_forkserver_preload(ranks.IMPORTED)
    started = [
        context.Process(target=ranks.main, args=(rank, 2, source, target)) for rank in range(2)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(LIMIT)
    assert [process.exitcode for process in started] == [0, 0]
    return one, several


def test_every_tensor_is_what_one_process_wrote(both: tuple[RunFolder, RunFolder]) -> None:
    one, several = both
    files = sorted(file.name for file in (several.checkpoints / "000004").iterdir())
    assert len(files) == 3 and files[-1] == "state.json"  # a file of each rank
    expected, meta = one.load(4)
    found, told = several.load(4)
    assert told == meta | {"ranks": 2}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    ema, _ = several.load(4, "ema/")
    assert ema.keys() == {name for name in expected if name.startswith("ema/")}


def test_it_is_exported_and_gone_on_with(both: tuple[RunFolder, RunFolder], tmp_path: Path) -> None:
    from gesso import build

    paths = [load(run.path).export(tmp_path / run.path.name) for run in both]
    files = [sorted(path.rglob("*.safetensors")) for path in paths]
    assert len(files[0]) == len(files[1]) > 3
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(*files, strict=True))
    recipe = sure(Recipe, load(both[1].path).recipe)
    model, algorithm = build.model(recipe), build.algorithm(recipe)
    learner = Learner(model, algorithm, recipe.optimizer, recipe.learner, recipe.seed)
    learner.restore(both[1].load(4)[0])  # as a resumed run does
    state = learner.state()
    assert all(torch.equal(state[name], tensor) for name, tensor in both[0].load(4)[0].items())


def test_a_file_that_is_missing(both: tuple[RunFolder, RunFolder]) -> None:
    folder = both[1].checkpoints / "000004"
    last = sorted(folder.glob("*.safetensors"))[-1]
    kept = last.read_bytes()
    last.unlink()
    with pytest.raises(UserError, match="expected files of 2 ranks, got 1"):
        load(both[1].path)
    last.write_bytes(kept[:3000])
    with pytest.raises(UserError, match=r"000004/\*\.safetensors cannot be read"):
        load(both[1].path)
    last.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    with pytest.raises(UserError, match=r"000004/\*\.safetensors is damaged: the table "):
        both[1].load(4)
    last.write_bytes(kept)
    assert json.loads((folder / "state.json").read_text())["ranks"] == 2

"""Damaged run folders: every kind of damage is one sentence that names the file and what to do, or
does not matter. A new kind is a line in one of the tables."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

from gesso import build, cli, run
from gesso.track.checkpoints import digests, write_tensors
from gesso.track.run_folder import RunFolder
from gesso.types import UserError
from gesso.use.source import find
from tests.conftest import small_recipe

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Damage = Callable[[Path], object]
Resume = Callable[[Path], RunFolder]
METRICS, CONFIG, LOG = "metrics.jsonl", "config.toml", "log.txt"
NEWEST = "checkpoints/000003"
STATE, TENSORS = f"{NEWEST}/state.json", f"{NEWEST}/learner.safetensors"
LORA = {"rank": 2, "alpha": 4}
TIMED = ("time/", "memory/", "samples_per_s", "cached")
DEEP = b"[" * 100_000
LONG = b"1" * 5000  # digits: Python refuses to read more than 4300


@pytest.fixture(scope="module")
def whole(
    pipeline_folder: Path, prompt_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> RunFolder:
    """Steps 0 to 3, with checkpoints of 1, 2 and 3, which LoRA keeps small."""
    data = small_recipe(pipeline_folder, prompt_file)
    data["model"] |= {"lora": LORA}
    data |= {
        "steps": 3,
        "save": {"every": 1, "keep": 9, "groups": 0},
        "eval": {"every": 0, "prompts": 1, "steps": 1},
    }
    folder = tmp_path_factory.mktemp("damaged") / "run"
    return run.train(build.recipe_from(data), folder=folder, quiet=True)


@pytest.fixture
def folder(whole: RunFolder, tmp_path: Path) -> Path:
    """A copy of it, as if killed while it wrote the next row."""
    folder = Path(shutil.copytree(whole.path, tmp_path / "run"))
    with (folder / METRICS).open("ab") as file:
        file.write(b'{"step": 4, "rew')
    return folder


@pytest.fixture(scope="module")
def job(whole: RunFolder) -> Iterator[run.Assembled]:
    """The run's objects, made once: most runs here end before they are used."""
    made = run.assemble(run.recipe_of(whole))
    yield made
    made.close()


@pytest.fixture
def resume(whole: RunFolder, job: run.Assembled, monkeypatch: pytest.MonkeyPatch) -> Resume:
    """`run.resume`; with the objects that are there already, where its recipe is still theirs and
    a checkpoint takes the place of what they have learned."""

    def resumed(folder: Path) -> RunFolder:
        config, theirs = folder / CONFIG, whole.path / CONFIG
        same = config.is_file() and config.read_bytes() == theirs.read_bytes()
        if same and os.path.lexists(folder / "checkpoints/000001"):
            monkeypatch.setattr(run, "assemble", lambda recipe, display: job)
            monkeypatch.setattr(run.Assembled, "close", lambda job: None)
        return run.resume(folder, quiet=True)

    return resumed


# Ways to damage a run


def both(*damages: Damage) -> Damage:
    return lambda folder: [damage(folder) for damage in damages]


def put(name: str, content: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content)


def gone(name: str) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


def cut(name: str, size: int) -> Damage:
    return lambda folder: os.truncate(folder / name, size)


def flip(name: str, at: int, bit: int = 0) -> Damage:
    def damage(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[at] ^= 1 << bit
        (folder / name).write_bytes(content)

    return damage


def replaced(name: str, old: bytes, new: bytes) -> Damage:
    def damage(folder: Path) -> None:
        content = (folder / name).read_bytes()
        assert old in content
        (folder / name).write_bytes(content.replace(old, new, 1))

    return damage


def moved(name: str, to: str) -> Damage:
    return lambda folder: (folder / name).rename(folder / to)


def copied(name: str, to: str) -> Damage:
    return lambda folder: shutil.copy(folder / name, folder / to)


def new(name: str) -> Damage:
    return lambda folder: (folder / name).mkdir(parents=True)


def a_folder(name: str) -> Damage:
    """In the place of a file."""
    return both(gone(name), new(name))


def a_file(name: str) -> Damage:
    """In the place of a folder."""
    return both(gone(name), put(name, b"x"))


def a_link(name: str, to: str) -> Damage:
    return both(
        lambda folder: gone(name)(folder) if (folder / name).exists() else None,
        lambda folder: (folder / name).symlink_to(to),
    )


def line(number: int, content: bytes) -> Damage:
    """The line of that number in metrics.jsonl, from 1."""

    def damage(folder: Path) -> None:
        lines = (folder / METRICS).read_bytes().splitlines(True)
        lines[number - 1] = content
        (folder / METRICS).write_bytes(b"".join(lines))

    return damage


def row(number: int, **changes: Any) -> Damage:
    """None: the key goes."""

    def damage(folder: Path) -> None:
        old = json.loads((folder / METRICS).read_bytes().splitlines()[number - 1])
        new = {key: value for key, value in (old | changes).items() if value is not None}
        line(number, json.dumps(new).encode() + b"\n")(folder)

    return damage


def state(earlier: bool = False, **changes: Any) -> Damage:
    """Of state.json. `earlier`: as a version of Gesso without digests wrote it."""

    def damage(folder: Path) -> None:
        known = json.loads((folder / STATE).read_text()) | changes
        without = {"tables", "digest"} if earlier else set()
        kept = {k: v for k, v in known.items() if k not in without and v is not None}
        (folder / STATE).write_text(json.dumps(kept))

    return damage


def config(change: Callable[[dict[str, Any]], object]) -> Damage:
    def damage(folder: Path) -> None:
        data = tomllib.loads((folder / CONFIG).read_text())
        change(data)
        (folder / CONFIG).write_text(tomli_w.dumps(data))

    return damage


def tensors(change: Callable[[dict[str, torch.Tensor]], object], sealed: bool = False) -> Damage:
    """`sealed`: with digests that match."""

    def damage(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        found = load_file(folder / TENSORS)
        change(found)
        if sealed:
            RunFolder(folder).save(3, partial(write_tensors, state=found), {"seed": 0}, keep=9)
        else:
            save_file(found, folder / TENSORS)

    return damage


def first(table: str) -> str:
    return f"{table}/transformer_blocks.0.attn.add_k_proj.lora_A.default.weight"


def renamed(tensors: dict[str, torch.Tensor], old: str, new: str) -> None:
    tensors[new] = tensors.pop(old)


# Name, damage, what the sentence says, and what it advises. OFFERED: the checkpoint before it.

OFFERED = f"delete the folder {{run}}/{NEWEST} to resume from step 2"
BOTH = "delete the folders 000002, 000003 in {run}/checkpoints to resume from step 1"
NONE_LEFT = "there is no earlier complete checkpoint; restore the file from a backup, or start the"
DIGEST = "is damaged: its digest does not match its content"
UNFIT = f"{CONFIG} does not match the checkpoint of step 3: "
RESTORE = "restore config.toml, or the model it refers to ("
OTHERS = both(gone("checkpoints/000001"), gone("checkpoints/000002"))
NFT = {"name": "diffusion-nft", "group": 3, "steps": 4, "times": 2, "updates": 1}
REFUSED: list[tuple[str, Damage, str, str]] = [
    # state.json
    ("another step", state(step=2), f'{STATE} is damaged: "step" is 2, expected 3 from', OFFERED),
    ("a later step", state(step=4), '"step" is 4, expected 3', OFFERED),
    ("folder renamed", moved(NEWEST, "checkpoints/000005"),
     '000005/state.json is damaged: "step" is 3, expected 5', "000005 to resume from step 2"),
    ("step is true", state(step=True), '"step" is true, expected an integer', OFFERED),
    ("step is text", state(step="3"), '"step" is "3", expected an integer', OFFERED),
    ("step is NaN", state(step=float("nan")), '"step" is NaN', OFFERED),
    ("step is long", replaced(STATE, b'"step": 3', b'"step": ' + LONG), '"step" is Inf', OFFERED),
    ("no step", state(step=None), f'{STATE} is damaged: "step" is missing', OFFERED),
    ("seed is a list", state(seed=[0]), '"seed" is [0], expected an integer', OFFERED),
    ("another seed", state(seed=7), f"{STATE} {DIGEST}", OFFERED),
    ("data is a number", state(data=3), '"data" is 3, expected a string', OFFERED),
    ("two ranks", state(ranks=2), f"{STATE} {DIGEST}", OFFERED),
    ("tables are text", state(tables="x"), '"tables" is "x", expected an object', OFFERED),
    ("no tables", state(tables=None), f"{STATE} {DIGEST}", OFFERED),
    ("no digest", state(digest=None), 'is damaged: it has "tables" but no "digest"', OFFERED),
    ("digest renamed", replaced(STATE, b'"digest"', b'"dhgest"'), 'but no "digest"', OFFERED),
    ("no JSON", put(STATE, b"{"), f"{STATE} is damaged: not valid JSON", OFFERED),
    ("UTF-16", put(STATE, '{"step": 3}'.encode("utf-16")), "damaged: not valid UTF-8", OFFERED),
    ("deep JSON", put(STATE, DEEP), f"{STATE} is damaged: not valid JSON", OFFERED),
    ("a list", put(STATE, b"[3]"), f"{STATE} is damaged: expected a JSON object, got [3]", OFFERED),
    ("empty state", put(STATE, b""), f"{STATE} is damaged: missing or empty", OFFERED),
    ("state is a folder", a_folder(STATE), f"{STATE} cannot be read: Is a directory", OFFERED),
    ("earlier, another step", state(True, step=2), '"step" is 2, expected 3', OFFERED),
    ("earlier, another type", state(True, step="3"), '"step" is "3", expected an int', OFFERED),
    # Tensors
    ("cut", cut(TENSORS, 90_000), f"{TENSORS} cannot be read: ", OFFERED),
    ("cut in the header", cut(TENSORS, 1000), f"{TENSORS} cannot be read: ", OFFERED),
    ("empty", cut(TENSORS, 0), f"{TENSORS} cannot be read: ", OFFERED),
    ("tensors are a folder", a_folder(TENSORS), f"{TENSORS} cannot be read: ", OFFERED),
    ("tensors renamed", moved(TENSORS, f"{NEWEST}/x.safetensors"),
     f"{TENSORS} cannot be read: No such file", OFFERED),
    ("of another checkpoint", copied("checkpoints/000002/learner.safetensors", TENSORS),
     f'{TENSORS} is damaged: the table "adam.exp_avg" does not match its digest', OFFERED),
    ("last bit", flip(TENSORS, -1, 7), f"{TENSORS} is damaged: the table", OFFERED),
    ("exp_avg in the header", replaced(TENSORS, b"adam.exp_avg/", b"adam.exp_avf/"),
     'the table "adam.exp_avf" is not in state.json', OFFERED),
    ("a name in the header", replaced(TENSORS, b"current/trans", b"current/prans"),
     'the table "current" does not match its digest in state.json', OFFERED),
    ("a tensor more", tensors(lambda t: t.update({"current/x": torch.ones(3)})),
     'the table "current" does not match', OFFERED),
    ("a table more", tensors(lambda t: t.update({"ema/x": torch.ones(3)})),
     'the table "ema" is not in state.json', OFFERED),
    ("a tensor less", tensors(lambda t: t.pop(first("current"))), 'table "current" does', OFFERED),
    ("no optimizer_steps", tensors(lambda t: t.pop("optimizer_steps")),
     'the table "optimizer_steps" is missing', OFFERED),
    ("optimizer_steps", tensors(lambda t: t.update(optimizer_steps=torch.tensor([3, 3]))),
     'the table "optimizer_steps" does not match', OFFERED),
    ("dtype", tensors(lambda t: t.update({first("current"): t[first("current")].bfloat16()})),
     'the table "current" does not match', OFFERED),
    ("shape", tensors(lambda t: t.update({first("current"): t[first("current")][None]})),
     'the table "current" does not match', OFFERED),
    # Which checkpoint is offered
    ("two damaged", both(cut(TENSORS, 9), put("checkpoints/000002/state.json", b"x")),
     f"{TENSORS} cannot be read", BOTH),
    ("two cut", both(cut(TENSORS, 9), cut("checkpoints/000002/learner.safetensors", 99)),
     f"{TENSORS} cannot be read", BOTH),
    ("none left", both(cut(TENSORS, 9), OTHERS), f"{TENSORS} cannot be read", NONE_LEFT),
    ("one left, incomplete", both(gone(STATE), OTHERS),
     f"{NEWEST} is not a complete checkpoint: it has no state.json, and there is no other",
     "or delete it to train again from step 0"),
    ("checkpoints are a file", a_file("checkpoints"),
     "checkpoints cannot be read: Not a directory", "expected the checkpoint folder of the run"),
    ("checkpoints in a loop", a_link("checkpoints", "checkpoints"),
     "checkpoints cannot be read: Too many levels", "expected the checkpoint folder of the run"),
    ("checkpoints elsewhere", a_link("checkpoints", "/no/such/disk"),
     "checkpoints cannot be read: No such file", "of the run; restore it"),
    # metrics.jsonl
    ("row, UTF-8", line(3, b'{"step": 2, "\xff": 1}\n'), "3 is damaged: not valid UTF-8", BOTH),
    ("row, no JSON", line(3, b"kite\n"), f"{METRICS}, line 3 is damaged: not valid JSON", BOTH),
    ("row, deep", line(3, DEEP + b"\n"), "3 is damaged: not valid JSON", BOTH),
    ("row, a list", line(3, b"[1, 2]\n"), "expected a JSON object, got [1, 2]", BOTH),
    ("row, foreign", line(3, b'{"a": 1}\n'), '3 is damaged: "step" is null, expected 2', BOTH),
    ("row, empty", line(3, b"\n"), "line 3 is damaged: missing or empty", BOTH),
    ("row, missing", line(3, b""), 'line 3 is damaged: "step" is 3, expected 2', BOTH),
    ("row, twice", row(4, step=2), 'line 4 is damaged: "step" is 2, expected 3', OFFERED),
    ("row, step is text", row(3, step="2"), '"step" is "2", expected 2', BOTH),
    ("row, step is true", row(2, step=True), '"step" is true, expected 1', NONE_LEFT),
    ("row, step is 2.0", row(3, step=2.0), '"step" is 2.0, expected 2', BOTH),
    ("row, no time", row(3, **{"time/step": None}), '"time/step" is null, expected a num', BOTH),
    ("row, time is text", row(3, **{"time/step": "1"}), '"time/step" is "1", expected', BOTH),
    ("row, time is NaN", row(3, **{"time/step": float("nan")}), '"time/step" is NaN', BOTH),
    ("row, time is inf", row(3, **{"time/step": float("inf")}), '"time/step" is Infinity', BOTH),
    ("row, a long time", row(3, **{"time/step": int(LONG[:999])}), '"time/step" is Inf', BOTH),
    ("row, reward is text", row(3, reward="high"), '"reward" is "high", expected a numb', BOTH),
    ("row, health", row(3, health={"a": 1}), '"health" is {"a": 1}, expected a list', BOTH),
    ("first row", line(1, b"\x00\n"), "line 1 is damaged: not valid JSON", NONE_LEFT),
    ("last row cut", line(4, b'{"step": 3, "re'), "line 4 is damaged: missing or empty", OFFERED),
    ("no rows", gone(METRICS), "line 1 is damaged: missing or empty", NONE_LEFT),
    ("rows are a folder", a_folder(METRICS), f"{METRICS} cannot be read: Is a dir", "restore it"),
    ("rows in a loop", a_link(METRICS, METRICS), f"{METRICS} cannot be read: Too", "restore it"),
    # config.toml
    ("without LoRA", config(lambda c: c["model"].pop("lora")),
     UNFIT + '66 tensors are missing, first "current/context_embedder.bias"; 120 t', RESTORE),
    ("another rank", config(lambda c: c["model"]["lora"].update(rank=3)),
     f'90 tensors are of a different shape, first "{first("adam.exp_avg")}": expected (3', RESTORE),
    ("EMA", config(lambda c: c["learner"].update(ema={})),
     f'tensors are missing, first "{first("ema")}"', RESTORE),
    ("an algorithm with old weights", config(lambda c: c.update(algorithm=NFT)),
     f'tensors are missing, first "{first("old")}"', RESTORE),
    ("without EMA", tensors(lambda t: t.update({first("ema"): torch.ones(3)}), True),
     f'1 tensor is unexpected, first "{first("ema")}"', RESTORE),
    ("without a critic", tensors(lambda t: t.update({"beside/head": torch.ones(3)}), True),
     '1 tensor is unexpected, first "beside/head"', RESTORE),
    ("another shape", tensors(lambda t: t.update({first("current"): torch.ones(3)}), True),
     f'different shape, first "{first("current")}": expected (2, 64), got (3,)', RESTORE),
    ("half a moment", tensors(lambda t: t.pop(first("adam.exp_avg")), True),
     f'1 tensor is missing, first "{first("adam.exp_avg")}"', RESTORE),
    ("a moment's name", tensors(lambda t: renamed(t, first("adam.step"), "adam.step/x"), True),
     f'1 tensor is missing, first "{first("adam.step")}"; 1 tensor is unexp', RESTORE),
    ("config, UTF-8", put(CONFIG, b"\xff"), f"{CONFIG} is not valid TOML", ""),
    ("config, deep", put(CONFIG, b"a = " + DEEP), f"{CONFIG}: ", "nested too deep"),
    ("config, empty", put(CONFIG, b""), f"{CONFIG}: ", "is missing"),
    ("config is a folder", a_folder(CONFIG), "it has no config.toml", ""),
]  # fmt: skip

# Name, damage, the step that is resumed after, and what log.txt says.

LEFT_OUT = "is not a complete checkpoint: it {}; it is ignored"
AGAIN = "there is no complete checkpoint: the run starts again from step 0"
UNVERIFIED = "the checkpoint of step 3 has no digests"
NINTH = "checkpoints/000009"
SAMPLES = b"\xff\n" + DEEP + b'\n{"reward": ' + LONG[:999] + b"}\n"

TAKEN: list[tuple[str, Damage, int, str]] = [
    ("nothing", both(), 3, ""),
    ("a row after the checkpoint", both(gone(NEWEST), line(4, b"\xff\n[[[\n")), 2, ""),
    ("a row half written", both(gone(NEWEST), line(4, b'{"step": 3, "re')), 2, ""),
    ("rows without a checkpoint", both(gone("checkpoints"), line(2, b"\xff\n")), 0, AGAIN),
    ("an empty folder", new(NINTH), 3, ""),
    ("an empty folder alone", both(gone("checkpoints"), new(NINTH)), 0, AGAIN),
    ("digits of another script", moved(NEWEST, "checkpoints/０００００３"), 2, ""),
    ("a digit that is none", new("checkpoints/²"), 3, ""),
    ("no zeros", moved(NEWEST, "checkpoints/3"), 2, ""),
    ("too many zeros", moved(NEWEST, "checkpoints/0000003"), 2, ""),
    ("a file", put(NINTH, b"x"), 3, LEFT_OUT.format("cannot be read (Not a directory)")),
    ("no state.json", gone(STATE), 2, LEFT_OUT.format("has no state.json")),
    ("no tensors", gone(TENSORS), 2, LEFT_OUT.format("has no .safetensors file")),
    ("an earlier one", put("checkpoints/000002/state.json", b"x"), 3, ""),
    ("without digests", state(True), 3, UNVERIFIED),
    ("without digests and data", state(True, data=None, seed=None), 3, UNVERIFIED),
    ("another seed", config(lambda c: c.update(seed=7)), 3,
     "seed = 7 in config.toml, but this run started with seed = 0"),
    ("samples", both(gone(NEWEST), put("samples/000000.jsonl", SAMPLES)), 2, ""),
    ("groups", both(new("groups"), put("groups/000001.jsonl", b"\xff\n[1]\n")), 3, ""),
    ("a checkpoint by a link", both(moved(NEWEST, "x"), a_link(NEWEST, "../x")), 3, ""),
]  # fmt: skip


def content(folder: Path) -> dict[str, Any]:
    """All files of a run but its log."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        if path.name != LOG:
            name = str(path.relative_to(folder))
            link = os.readlink(path) if path.is_symlink() else None
            found[name] = link or (path.read_bytes() if path.is_file() else None)
    return found


@pytest.mark.parametrize(
    ("damage", "what", "advice"), [c[1:] for c in REFUSED], ids=[c[0] for c in REFUSED]
)
def test_a_damaged_run_is_one_sentence_and_stays_as_it_is(
    folder: Path, resume: Resume, damage: Damage, what: str, advice: str
) -> None:
    damage(folder)
    before = content(folder)
    with pytest.raises(UserError) as caught:
        resume(folder)
    told = str(caught.value)
    assert str(folder) in told and what in told and advice.format(run=folder) in told, told
    assert len(told.splitlines()) == 1 and len(told) < 400 + 2 * len(str(folder))
    assert content(folder) == before


def comparable(found: RunFolder) -> list[dict[str, Any]]:
    rows = found.rows()
    return [{k: v for k, v in row.items() if not k.startswith(TIMED)} for row in rows]


@pytest.mark.parametrize(
    ("damage", "step", "noted"), [c[1:] for c in TAKEN], ids=[c[0] for c in TAKEN]
)
def test_what_does_not_matter_does_not_stop_a_run(
    whole: RunFolder, folder: Path, resume: Resume, damage: Damage, step: int, noted: str
) -> None:
    damage(folder)
    found = resume(folder)
    log = (folder / LOG).read_text("utf-8", "replace")
    assert noted in log and (f"resumed after step {step}" in log) == bool(step)
    assert found.latest() == 3 and comparable(found) == comparable(whole)
    ours, expected = found.load(3)[0], whole.load(3)[0]
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("damage", [cut(TENSORS, 99), line(3, b"kite\n")], ids=["tensors", "row"])
def test_a_run_goes_on_after_what_the_sentence_says(
    whole: RunFolder, folder: Path, resume: Resume, damage: Damage
) -> None:
    damage(folder)
    with pytest.raises(UserError, match="delete the folder") as caught:
        resume(folder)
    told = str(caught.value)
    for name in ("000001", "000002", "000003"):
        if name in told.partition("delete the")[2]:
            shutil.rmtree(folder / "checkpoints" / name)
    found = resume(folder)
    assert f"resumed after step {told[-1]}" in (folder / LOG).read_text()
    assert comparable(found) == comparable(whole)


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    """In a checkpoint of a few bytes: of each byte of both files one bit."""
    saved, bits = RunFolder(tmp_path), random.Random(0)
    small = {
        "current/a": torch.arange(6.0).reshape(2, 3),
        "ema/a": torch.ones(3, dtype=torch.bfloat16),
        "optimizer_steps": torch.tensor(3),
    }
    write = partial(write_tensors, state=small)
    saved.save(3, write, {"seed": 0, "data": "9272eee6"}, keep=1)
    assert saved.load(3)[1] == {
        "step": 3,
        "seed": 0,
        "data": "9272eee6",
        "verified": True,
    }
    for name in (STATE, TENSORS):
        content = (tmp_path / name).read_bytes()
        for at in range(len(content)):
            flip(name, at, bits.randrange(8))(tmp_path)
            with pytest.raises(UserError, match=f"{name} (is damaged|cannot be read): "):
                saved.load(3)
            (tmp_path / name).write_bytes(content)
    assert saved.load(3)[0].keys() == small.keys()


def test_flipped_bits_of_a_run(folder: Path) -> None:
    found, positions = RunFolder(folder), random.Random(0)
    size = (folder / TENSORS).stat().st_size
    header = int.from_bytes((folder / TENSORS).read_bytes()[:8], "little")
    for end in [8 + header] * 15 + [size] * 25:
        damage = flip(TENSORS, positions.randrange(end), positions.randrange(8))
        damage(folder)
        with pytest.raises(UserError, match=f"{TENSORS} (is damaged|cannot be read): "):
            found.load(3)
        damage(folder)  # flipped back


def test_only_the_table_that_is_read_is_verified(folder: Path) -> None:
    found = RunFolder(folder)
    tensors(lambda t: t[first("adam.exp_avg")].add_(1))(folder)
    weights, _ = found.load(3, "current/")
    assert weights and all(name.startswith("current/") for name in weights)
    with pytest.raises(UserError, match=r'table "adam.exp_avg" does not match .* step 2$'):
        found.load(3)
    tensors(lambda t: t[first("current")].add_(1))(folder)
    with pytest.raises(UserError, match=r"choose another step: 1, 2 \(--step 2\)$"):
        found.load(3, "current/")
    assert found.load(3, "ema/")[0] == {}


def test_digests_tell_names_dtypes_shapes_and_bytes_apart() -> None:
    """Of all kinds of tensors: none of numpy's dtypes, no dimension, no elements, not in order."""
    base = {
        "a/half": torch.ones(4, dtype=torch.bfloat16),
        "a/scalar": torch.tensor(2.0),
        "a/empty": torch.empty(0, 3),
        "a/turned": torch.arange(6).reshape(2, 3).T,
        "b/flags": torch.tensor([True, False]),
        "steps": torch.tensor(3),
    }
    known = digests(base)
    assert known.keys() == {"a", "b", "steps"}
    assert digests(dict(reversed(base.items()))) == known
    changed: list[dict[str, torch.Tensor]] = [
        {"a/half": torch.ones(4, dtype=torch.float16)},
        {"a/half": torch.ones(2, 2, dtype=torch.bfloat16)},
        {"a/half": base["a/half"].view(torch.int16)},
        {"a/scalar": torch.tensor(-2.0)},
        {"a/empty": torch.empty(3, 0)},
        {"a/turned": torch.arange(6).reshape(3, 2)},
        {"a/more": torch.empty(0)},
    ]
    for change in changed:
        found = digests(base | change)
        assert found["a"] != known["a"] and found["b"] == known["b"]


ROWS: list[tuple[bytes, str]] = [
    (b"\xff\n", "not valid UTF-8"),
    (DEEP + b"\n", "not valid JSON"),
    (b"3\n", "expected a JSON object, got 3"),
    (b'{"a": 1}\n', '"step" is null, expected an integer'),
    (b'{"step": 2, "eval/reward": {}}\n', '"eval/reward" is {}, expected a number'),
    (b'{"step": 2, "a\\nb": "\\ud800"}\n', '"a\\nb" is "\\ud800", expected a number'),
    (b'{"step": 2, "x": ' + LONG + b"}\n", '"x" is Infinity, expected a number'),
]


@pytest.mark.parametrize(("content", "what"), ROWS, ids=[what for _, what in ROWS])
def test_reading_rows_is_one_sentence(folder: Path, content: bytes, what: str) -> None:
    line(3, content)(folder)
    with pytest.raises(UserError) as caught:
        RunFolder.open(folder).rows()
    advice = "restore the file from a backup, or delete that line"
    assert str(caught.value) == f"{folder / METRICS}, line 3 is damaged: {what}; {advice}"


# Commands that only read, and what they say.
READING: list[tuple[str, Damage, list[str], str]] = [
    ("row", line(3, b"kite\n"), [], f"{METRICS}, line 3 is damaged: not valid JSON; restore the"),
    ("tensors", cut(TENSORS, 999), [], "header length; choose another step: 1, 2 (--step 2)"),
    ("state", state(step=2), [], "expected 3 from the folder name; choose another step: 1, 2"),
    ("an empty folder", new(NINTH), ["--step", "9"],
     "has no checkpoint of step 9; expected one of 1, 2, 3"),
    ("without LoRA", config(lambda c: c["model"].pop("lora")), [],
     UNFIT + 'weights do not fit: 66 tensors are missing, first "context_embedder.bias"; 30 te'),
    ("EMA", config(lambda c: c["learner"].update(ema={})), [],
     UNFIT + 'weights do not fit: 30 tensors are missing, first "transformer_blocks.0.attn.add'),
]  # fmt: skip


@pytest.mark.parametrize(
    ("damage", "options", "what"), [c[1:] for c in READING], ids=[c[0] for c in READING]
)
def test_exporting_is_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture, damage: Damage, options: list[str], what: str
) -> None:
    damage(folder)
    before, target = content(folder), folder.parent / "out"
    assert cli.main(["export", str(folder), "--to", str(target), "--quiet", *options]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 1 and what in told, told
    assert content(folder) == before and not target.exists()


def test_a_run_that_is_refused_keeps_its_number_of_steps(folder: Path) -> None:
    cut(TENSORS, 99)(folder)
    before = content(folder)
    with pytest.raises(UserError, match=r"learner\.safetensors cannot be read"):
        run.resume(folder, quiet=True, steps=9)
    assert content(folder) == before


def test_a_damaged_run_on_the_command_line(folder: Path, capsys: pytest.CaptureFixture) -> None:
    cut(TENSORS, 99)(folder)
    assert cli.main(["train", "--resume", str(folder), "--quiet"]) == 2
    assert OFFERED.format(run=folder) in capsys.readouterr().err


def test_folders_that_are_no_checkpoints_are_neither_counted_nor_deleted(folder: Path) -> None:
    names = ["000009", "0000001", "９", "²", "x"]
    for name in names:
        (folder / "checkpoints" / name).mkdir()
    (folder / "checkpoints/000004").mkdir()
    (folder / "checkpoints/000004/precious.txt").write_text("x")
    with pytest.raises(UserError, match=r"is already at step 3; .* got steps=2"):
        run.resume(folder, steps=2)
    config(lambda c: c.update(save={"every": 1, "keep": 1}))(folder)
    found = run.resume(folder, quiet=True, steps=4)
    assert found.steps == [4] and find(folder).step == 4
    left = {path.name for path in found.checkpoints.iterdir()}
    assert left == {*names, "000004", "000004.incomplete"}
    assert (found.checkpoints / "000004.incomplete" / "precious.txt").read_text() == "x"


def test_notes_are_found_in_a_damaged_log(folder: Path) -> None:
    put(LOG, b"2026-01-01 00:00:00 \xff\n2026-01-01 00:00:00 a note\n")(folder)
    assert RunFolder(folder).noted("a note") and not RunFolder(folder).noted("another")


@pytest.mark.parametrize("name", ["x" * 300, "loop"])
def test_runs_whose_names_lead_nowhere(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(UserError, match=r"is not a run folder: it has no config\.toml"):
        run.resume(tmp_path / name)
    with pytest.raises(UserError, match="no such folder"):
        find(tmp_path / name)

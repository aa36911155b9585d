"""Wrong input to the command line: one sentence, exit status 2, and nothing left behind.

A new attempt is a line in CASES: the arguments, and words of the sentence. Files that cases need
are in FILES.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gesso import build, cli, commands, run
from gesso.types import StopRun, UserError

SD3 = "StableDiffusion3Pipeline"
QUOTED = 'a red sign that says \\"KITE\\"'
FILES: dict[str, str | bytes] = {
    # recipes
    "deep.toml": f"a = {'[' * 5000}{']' * 5000}\n",
    "tables.toml": f'base = "demo"\n[x{".x" * 40}]\na = 1\n',
    "latin.toml": b'about = "\xff"\n',
    "self.toml": 'base = "self.toml"\n',
    "number.toml": "base = 3\n",
    "nul.toml": 'base = "demo"\nabout = "\\u0000"\n',
    "folder.toml/x": "",
    "digits.toml": f"seed = {'9' * 5000}\n",
    "dotted.toml": f'base = "demo"\n{"a." * 5000}a = 1\n',
    "nulbase.toml": 'base = "de\\u0000mo"\n',
    # prompts
    "surrogate.jsonl": '{"prompt": "a \\ud800 b"}\n',
    "answer.jsonl": f'{{"prompt": "{QUOTED}", "answer": ["\\udc00"]}}\n',
    "deep.jsonl": f'{{"prompt": "x", "a": {"[" * 300}{"]" * 300}}}\n',
    "deep.json": "[" * 100_000,
    "binary.txt": bytes(range(256)),
    "empty.txt": "",
    "blank.txt": "   \n\n",
    "huge.jsonl": f'{{"prompt": "{QUOTED}", "weight": 1{"0" * 400}}}\n',
    "infinite.jsonl": f'{{"prompt": "{QUOTED}", "weight": Infinity}}\n',
    # folders of models and adapters
    "list/model_index.json": "[1]",
    "brace/model_index.json": "{" * 100_000,
    "custom/model_index.json": '{"_class_name": ["a", "b"]}',
    "bare/model_index.json": json.dumps({"_class_name": SD3}),
    "absent/model_index.json": json.dumps({"_class_name": SD3, "vae": ["diffusers", "NoSuch"]}),
    "onnx/model_index.json": json.dumps(
        {"_class_name": SD3, "scheduler": ["diffusers", "OnnxRuntimeModel"]}
    ),
    "number/model_index.json": json.dumps({"_class_name": SD3, "vae": ["diffusers", 3]}),
    "kind/config.json": '{"model_type": 3}',
    "none/config.json": "{}",
    "array/config.json": "[]",
    "lora/adapter_config.json": "{}",
    "nested/adapter_config.json": "[" * 100_000,
    "torn/pytorch_lora_weights.safetensors": b"",
    "export/recipe.toml": "x = 1\n",
}
CASES = [
    # what no file, path or tensor can hold
    ("check demo model.height=1000000000", "less than or equal to 16384"),
    ("check demo-video model.fps=1e9", "less than or equal to 1000"),
    ("check demo algorithm.steps=1000000000", "less than or equal to 1000"),
    ("check demo eval.steps=1000000000", "less than or equal to 1000"),
    ("check demo sampler.batch=1000000000000", "less than or equal to 1000000"),
    ("check demo data.groups=1000000 algorithm.group=1000000", "000,000 samples per step"),
    ("check demo seed=99999999999999999999999", "does not fit into 64 bits"),
    ("sample demo x --n 1000000000000", "from 1 to 1,000,000"),
    ("eval demo --n 1000000000000", "at most 1,000,000"),
    ("check demo about=\ud800", "not valid Unicode"),
    ("sample demo \ud800", "not valid Unicode"),
    ("train demo --run a\0b", "NUL character"),
    ("train --resume \0", "NUL character"),
    ("sample runs\0 x", "NUL character"),
    ("check nul.toml", '"about" has a NUL character'),
    (f"check demo {'a.' * 5000}a=1", "nested more than 32 levels deep"),
    (f"check demo seed={'[' * 5000}{']' * 5000}", '"seed" ='),
    (f"check {'x' * 300}", "File name too long"),
    (f"check {'x' * 300}.toml", "File name too long"),
    # devices and code
    ("check demo model.height=512", "limited to 96 pixels per side"),
    (f"check demo seed={'9' * 5000}", '"seed" ='),
    ("check digits.toml", "not valid TOML"),
    ("check dotted.toml", "nested more than 32 levels deep"),
    ("check nulbase.toml", '"base" has a NUL character'),
    ("check ", "the recipe's name is empty"),
    ("check demo data.train=/dev/null", "neither a file nor a folder"),
    ("check demo model.name=gesso.models.flow.base:FlowModel", "is a protocol"),
    ("check demo --memory model.path=onnx", "its configs cannot be read"),
    ("check demo track=wandb", "expected a list of all displays and trackers"),
    ("check demo model.device=meta", 'model.device = "meta" cannot hold values'),
    ("check demo model.device=fpga", 'model.device = "fpga" is not available'),
    ("check demo model.device=nonsense", 'model.device = "nonsense" is not available'),
    ("check demo model.name=os:system", 'model "os:system" is a builtin_function_or_method'),
    ("check demo model.name=pathlib:Path", "gesso's protocols FlowModel and TokenModel"),
    ("check demo algorithm.name=os:system", "expected a class"),
    ("check demo algorithm.name=pathlib:Path", "expected the methods of gesso's Algorithm"),
    ("check demo track=['os:path']", "is a module; expected a class"),
    ("check demo track=['pathlib:Path']", "expected the methods of gesso's Tracker"),
    ("check demo model.name=:", "text on both sides of the colon"),
    # recipes
    ("check deep.toml", "nested too deeply"),
    ("check tables.toml", "nested more than 32 levels deep"),
    ("check latin.toml", "not valid TOML"),
    ("check self.toml", "has itself as its base"),
    ("check number.toml", "expected a name"),
    ("check folder.toml", "is a folder; expected a TOML file"),
    ("check .", "is a folder"),
    ("check dmo", 'did you mean "demo"? similar: demo-vlm, demo-sft, demo-rft, demo-nft; `ges'),
    ("check demo model=3", "expected a table with name, path, dtype"),
    ("check demo reward=[3]", "expected a table with name, weight"),
    ("check demo optimizer.betas=3", "expected a list of 2: a number, a number"),
    ("check demo optimizer.betas=[0.1,2]", 'betas.1" = 2 is not valid; expected a number'),
    ("check demo track=[3]", '"track.0" = 3 is not valid; expected a string in quotes'),
    ("check demo model.dtype=int8", "expected one of 'float32', 'bfloat16', 'float16'"),
    ("check demo reward.9.name=x", 'no table or list entry "9"'),
    ("check demo =", "expected key=value"),
    # prompts
    ("check demo data.train=surrogate.jsonl", 'column "prompt" is not valid Unicode'),
    ("check demo data.train=answer.jsonl", 'column "answer" is not valid Unicode'),
    ("check demo data.train=deep.jsonl", "nested more than 100 levels deep"),
    ("check demo data.train=deep.json", "not JSON"),
    ("check demo data.train=binary.txt", "not UTF-8 text"),
    ("check demo data.train=empty.txt", "is empty"),
    ("check demo data.train=blank.txt", "is empty"),
    ("check demo data.train=huge.jsonl", 'expected a positive number as "weight"'),
    ("check demo data.train=infinite.jsonl", 'expected a positive number as "weight"'),
    ("eval demo --prompts surrogate.jsonl", "not valid Unicode"),
    # folders
    ("check demo --memory model.path=list", "contains [1], expected a JSON object"),
    ("check demo --memory model.path=brace", "cannot be read"),
    ("check demo --memory model.path=custom", "expects a StableDiffusion3Pipeline"),
    ("check demo --memory model.path=absent", "its configs cannot be read"),
    ("check demo --memory model.path=number", "its configs cannot be read"),
    ("check demo model.path=absent", "diffusers cannot load it"),
    ("check demo model.path=number", "diffusers cannot load it"),
    ("check demo-vlm model.path=kind", "its config.json cannot be read"),
    ("check demo-vlm model.path=array", "contains [], expected a JSON object"),
    ("sample list x", "expected a JSON object, got [1]"),
    ("sample brace x", "not valid JSON"),
    ("sample custom x", "expected a string as \"_class_name\""),
    ("sample bare x", "has no transformer/config.json"),
    ("sample kind x", 'expected a string as "model_type" in its config, got 3'),
    ("sample none x", 'expected a string as "model_type" in its config, got None'),
    ("sample array x", "expected a JSON object, got []"),
    ("sample lora x", 'has no "r"'),
    ("sample nested x", "not valid JSON"),
    ("sample torn x", "cannot be read"),
    ("sample export x", '"model" is missing'),
]  # fmt: skip


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("input")
    for name, content in FILES.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


@pytest.mark.parametrize("line, words", CASES, ids=[line[:40] for line, _ in CASES])
def test_wrong_input_gets_one_sentence(
    line: str,
    words: str,
    workplace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(workplace)
    before = sorted(workplace.rglob("*"))
    assert cli.main(line.split(" ")) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith("error: ") and words in said[-1]
    assert sum("error" in part for part in said) == 1
    assert sorted(workplace.rglob("*")) == before


def test_a_recipe_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    file = tmp_path / "bom.toml"
    file.write_bytes(b'\xef\xbb\xbfbase = "demo"\nsteps = 7\n')
    assert build.recipe(str(file)).steps == 7


def test_the_python_functions_refuse_the_same(tmp_path: Path) -> None:
    for overrides, words in ((["about=\ud800"], "not valid Unicode"), (["about=\0"], "NUL")):
        with pytest.raises(UserError, match=words):
            run.train("demo", overrides, tmp_path / "run")
    for name in ("a\0b", "\ud800"):
        with pytest.raises(UserError, match="run folder"):
            run.train("demo", ["steps=0"], tmp_path / name)
    assert not list(tmp_path.iterdir())


ALLOCATORS = [
    (MemoryError(), "MemoryError"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "can't allocate"),
    (RuntimeError("std::bad_alloc"), "bad_alloc"),
    (
        RuntimeError("CUDA out of memory. Tried to allocate 20 GiB\nmore"),
        "Tried to allocate 20 GiB",
    ),
]


@pytest.mark.parametrize("error, words", ALLOCATORS)
def test_too_little_memory_is_one_sentence(
    error: Exception,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(options: object) -> None:
        raise error

    monkeypatch.setattr(commands, "recipes", full)
    assert cli.main(["recipes"]) == 3
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "out of memory" in said and words in said


def test_other_errors_of_ours_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(options: object) -> None:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(commands, "recipes", broken)
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        cli.main(["recipes"])


def test_a_run_out_of_memory_stops_with_a_sentence_and_notes_it(
    recipe_data: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(loop: object) -> None:
        raise RuntimeError("CUDA out of memory. Tried to allocate 20 GiB")

    monkeypatch.setattr("gesso.loop.Loop.train", full)
    with pytest.raises(StopRun, match=r"out of memory .* --resume"):
        run.train(build.recipe_from(recipe_data), folder=tmp_path / "run", quiet=True)
    assert "stopped: out of memory" in (tmp_path / "run" / "log.txt").read_text()

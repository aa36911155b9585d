"""Card tables: the sizes of a recipe for GPUs of different memory."""

from __future__ import annotations

from pathlib import Path

import pytest

import gesso
from gesso import build, cli, commands, run
from gesso.config import tables
from gesso.track.run_folder import RunFolder, recipe_name
from gesso.types import UserError

BUNDLED = {name: tables.read_recipe(name) for name in tables.bundled_recipes()}
OWN = """
base = "flux-pickscore"
about = "Mine."

[model.lora]
rank = 8

[card.24]
about = "small."
data.groups = 4
model.lora.rank = 4
model.quantize = "none"

[card.16.model]
quantize = "nf4"
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    return write(tmp_path, OWN)


def write(folder: Path, text: str, name: str = "mine.toml") -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


@pytest.mark.parametrize("name, card", [(n, card) for n in BUNDLED for card in BUNDLED[n].cards])
def test_every_card_of_every_bundled_recipe_loads(name: str, card: str, tmp_path: Path) -> None:
    recipe = build.recipe(name, card=card)
    assert run.recipe_of(RunFolder.create(tmp_path / "run", recipe.model_dump())) == recipe


def test_every_model_has_its_cards() -> None:
    special = {"sd35-large-ocr": ["8x24", "8x48", "8x80"], "qwen25-vl-32b-geo3k": ["48", "80"]}
    special["flux2-dev-pickscore"] = special["wan22-5b-hpsv3"] = ["48", "80"]
    special["wan22-a14b-pickscore"] = special["wan22-a14b-i2v-pickscore"] = ["48", "80"]
    special["wan21-1.3b-pickscore"] = ["24", "48"]
    for name, bundled in BUNDLED.items():
        expected = special.get(name, [] if name.startswith("demo") else ["24", "48", "80"])
        if name.startswith(("flux-", "qwen-image")):
            expected = [*expected, "8x24", "8x48"]
        assert list(bundled.cards) == expected, name


def test_a_card_is_merged_over_the_recipe(own: str) -> None:
    """The order is base, recipe, card of the base, card of the recipe, overrides."""
    plain = build.recipe(own)
    assert (plain.data.groups, plain.model.quantize) == (48, None)  # card tables are ignored
    small = build.recipe(own, card=24)
    assert small.data.groups == 4
    assert small.model.lora is not None
    assert (small.model.lora.rank, small.model.lora.alpha) == (4, 128)  # alpha: of the base
    assert small.model.gradient_checkpointing  # of the base's card
    assert small.model.quantize is None  # "none" removes what the base's card sets
    assert small.about == "Mine. 24 GB: small."
    assert build.recipe(own, ["data.groups=6", "about=x"], 24).data.groups == 6


def test_cards_are_inherited_and_added(own: str) -> None:
    assert list(tables.read_recipe(own).cards) == ["16", "24", "48", "80", "8x24", "8x48"]
    assert build.recipe(own, card=16).model.quantize == "nf4"
    assert build.recipe(own, card=16).about == "Mine."
    inherited = build.recipe(own, card=48)
    assert (inherited.model.fold, inherited.data.groups) == (False, 48)
    assert inherited.about.startswith("Mine. 48 GB: gradient checkpointing")


def test_several_gpus(own: str) -> None:
    """With a table of their own, or each as a single GPU of that size."""
    divided = build.recipe(own, card="8x24")
    assert (divided.cluster.workers, divided.cluster.sharding) == (8, "base")
    assert divided.model.quantize is None
    assert divided.about.startswith("Mine. 8 × 24 GB: frozen weights sharded")
    each = build.recipe(own, card="4x16")
    assert (each.cluster.workers, each.cluster.sharding) == (4, None)
    assert each.model.quantize == "nf4"


def test_a_run_records_its_card(
    recipe_data: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tomli_w

    monkeypatch.chdir(tmp_path)
    data = recipe_data | {"about": "Small.", "steps": 0, "card": {"24": {"seed": 7, "about": "a."}}}
    file = write(tmp_path, tomli_w.dumps(data), "tiny.toml")
    finished = gesso.train(file, card=24, quiet=True)
    assert finished.path == Path("runs/tiny-24gb-001")
    assert recipe_name((finished.path / "config.toml").read_text()) == "tiny --card 24"
    stored = run.recipe_of(finished)
    assert (stored.seed, stored.about) == (7, "Small. 24 GB: a.")
    assert "card" not in tables.read_toml(finished.path / "config.toml")


MISTAKES = [
    ('[card.24.data]\ngrups = 3\n', 'recipe mine with card.24: unknown key "data.grups"; did you '
     'mean "groups"?'),
    ('[card.24]\nstepz = 3\n', 'with card.24: unknown key "stepz"; did you mean "steps"?'),
    ('[card.24.algorithm]\ngrop = 3\n', 'unknown key "grop"; did you mean "group"?'),
    ('[card.24]\ndata.groups = "8"\n', "with card.24: \"data.groups\" = '8' is not valid"),
    ("[card.24gb]\nseed = 1\n", 'recipe mine: "card.24gb" is not a size; expected GB of GPU'),
    ("[card.0]\nseed = 1\n", '"card.0" is not a size'),
    ("[card.-24]\nseed = 1\n", '"card.-24" is not a size'),
    ("[card.024]\nseed = 1\n", '"card.024" is not a size'),
    ('[card."24.5"]\nseed = 1\n', '"card.24.5" is not a size'),
    ("[card.small]\nseed = 1\n", '"card.small" is not a size'),
    (f"[card.{'9' * 5000}]\nseed = 1\n", "is not a size"),
    ("card = 24\n", 'recipe mine: "card" = 24 is not valid; expected tables, [card.24]'),
    ("[[card]]\nseed = 1\n", 'recipe mine: "card" = [{\'seed\': 1}] is not valid'),
    ("[card]\n24 = 8\n", 'recipe mine: "card.24" = 8 is not valid; expected a table of keys that'),
    ("[card.24.card.48]\nseed = 1\n", '"card.24.card" is not allowed; write "card" at the top'),
    ('[card.24]\nbase = "demo"\n', '"card.24.base" is not allowed; write "base" at the top level'),
    ("", "recipe mine has no card tables; leave --card out, or add a [card.24] table"),
    ("[card.32]\nseed = 1\n[card.8]\nseed = 1\n", "for --card 24; use one of 8, 32"),
    ('[card]\n24 = "none"\n8 = {seed = 1}\n', "for --card 24; use one of 8"),
]  # fmt: skip


@pytest.mark.parametrize("text, sentence", MISTAKES)
def test_every_mistake_is_one_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    own = write(tmp_path, f'base = "demo"\n{text}')
    with pytest.raises(UserError) as caught:
        build.recipe(own, card=24)
    message = str(caught.value)
    assert sentence in message
    assert "\n" not in message and len(message) < 400


def test_without_a_card_only_the_form_of_card_tables_is_checked(tmp_path: Path) -> None:
    own = write(tmp_path, 'base = "demo"\n[card.24]\nstepz = 3\n')
    assert build.recipe(own).steps == build.recipe("demo").steps
    with pytest.raises(UserError, match="is not a size"):
        build.recipe(write(tmp_path, 'base = "demo"\n[card.big]\nsteps = 3\n'))


@pytest.mark.parametrize(
    "command, sentence",
    [
        (
            "train flux-pickscore --card 32",
            "no settings for --card 32; use one of 24, 48, 80, 8x24",
        ),
        ("train flux-pickscore --card 8x32", "no settings for --card 8x32; use one of 24"),
        (
            "train sd35-large-ocr --card 24",
            "no settings for --card 24; use one of 8x24, 8x48, 8x80",
        ),
        ("train demo --card 24", "recipe demo has no card tables; leave --card out"),
        ("train demo --card big", "argument --card: expected GB of GPU memory as in 24, or 8x24"),
        ("train flux-pickscore card=24", 'overrides cannot set "card"; choose one of'),
        ("check flux-pickscore card.24.seed=1", 'overrides cannot set "card"'),
        ("train --resume RUN --card 24", "--card cannot be used with --resume, since a run keeps"),
        ("train --resume RUN steps=60 --card 24", "--card cannot be used with --resume"),
        (
            "train flux-pickscore-24gb",
            'unknown recipe "flux-pickscore-24gb"; use `gesso train flux-pickscore --card 24`',
        ),
        (
            "check qwen25-vl-3b-clevr-80gb --memory",
            "use `gesso train qwen25-vl-3b-clevr --card 80`",
        ),
        ("train flux-pickscore-25gb", 'did you mean "flux-pickscore"?'),
        ("train demo-24gb", 'unknown recipe "demo-24gb"; did you mean "demo'),
    ],
)
def test_mistakes_on_the_command_line(
    command: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        assert cli.main(command.split()) == 2
    except SystemExit as stopped:  # argparse
        assert stopped.code == 2
    error = capsys.readouterr().err
    assert sentence in error and "Traceback" not in error


def test_a_base_that_was_a_size_is_explained(tmp_path: Path) -> None:
    own = write(tmp_path, 'base = "sd35-ocr-24gb"\n')
    with pytest.raises(UserError, match='use base = "sd35-ocr", and --card 24 to train it'):
        build.recipe(own)


def test_a_recipe_object_takes_no_card() -> None:
    with pytest.raises(UserError, match="overrides and card require a recipe's name"):
        run.train(build.recipe("demo"), card=24)


def test_check_lists_the_sizes(
    recipe_data: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import tomli_w

    sizes = {"24": {"data": {"groups": 1}}, "48": {"seed": 1}}
    file = write(tmp_path, tomli_w.dumps(recipe_data | {"about": "Small.", "card": sizes}))
    assert cli.main(["check", file, "--memory"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "sizes    --card 24, 48"
    assert cli.main(["check", file, "--memory", "--card", "24"]) == 0
    shown = capsys.readouterr().out
    assert f"{file} --card 24: all keys and values are valid" in shown and "\nsizes" not in shown


def test_recipes_are_listed_with_their_cards(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    headings = [line for line in lines if not line.startswith("  ")]
    assert headings == [f"{heading}:" for heading in commands.HEADINGS.values()]
    names = [line.split()[0] for line in lines if line.startswith("  ")]
    assert sorted(names) == sorted(BUNDLED)
    (flux,) = (line for line in lines if line.split()[0] == "flux-pickscore")
    assert flux.endswith("  24 48 80 8x24 8x48")
    assert max(map(len, lines)) <= 100

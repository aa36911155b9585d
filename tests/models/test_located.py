"""Folders and names on the hub that are not what a recipe means: one sentence for each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gesso import build, cli
from gesso.config import Model, TokenModel
from gesso.estimate import estimate
from gesso.models.located import PIPELINE, TRANSFORMER, Located, ModelFormat, locate
from gesso.types import UserError

HUB = "makers/model"


def section(path: Path | str, kind: ModelFormat) -> Model | TokenModel:
    if kind == PIPELINE:
        return Model(name="sd3", path=str(path))
    return TokenModel(name="vision-language", path=str(path))


def refused(path: Path | str, kind: ModelFormat, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        locate(section(path, kind), kind)
    assert str(caught.value).startswith(f'model.path = "{path}"')
    assert "\n" not in str(caught.value)


def folder(place: Path, kind: ModelFormat, content: str) -> Path:
    place.mkdir()
    (place / kind.file).write_text(content)
    return place


def test_a_folder_of_its_kind(tmp_path: Path) -> None:
    about = {"_class_name": "SomePipeline"}
    made = folder(tmp_path / "a", PIPELINE, json.dumps(about))
    assert locate(section(made, PIPELINE), PIPELINE) == Located(str(made), about)


def test_a_folder_of_the_other_family(tmp_path: Path) -> None:
    drawn = folder(tmp_path / "a", PIPELINE, '{"_class_name": "FluxPipeline"}')
    refused(
        drawn, TRANSFORMER,
        r"is a diffusers pipeline folder \(FluxPipeline in model_index.json\), a flow model, but "
        'model.name = "vision-language" is a language model: expected a transformers model folder '
        "with config.json",
    )  # fmt: skip
    written = folder(tmp_path / "b", TRANSFORMER, '{"model_type": "qwen2_5_vl"}')
    refused(
        written, PIPELINE,
        r"is a transformers model folder \(qwen2_5_vl in config.json\), a language model, but "
        'model.name = "sd3" is a flow model: expected a diffusers pipeline folder with '
        "model_index.json",
    )  # fmt: skip
    part = folder(tmp_path / "c", TRANSFORMER, '{"_class_name": "SD3Transformer2DModel"}')
    refused(part, PIPELINE, "folder does not contain it$")  # a pipeline's part has a config, too
    refused(tmp_path / "d", PIPELINE, "but the folder does not exist$")
    refused(Path("~nobody-of-that-name/d"), PIPELINE, "but the folder does not exist$")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [("{", "model_index.json cannot be read: "), ("[1]", r"\[1\], expected a JSON object$")],
)
def test_a_damaged_folder(tmp_path: Path, content: str, sentence: str) -> None:
    refused(folder(tmp_path / "a", PIPELINE, content), PIPELINE, sentence)


def test_a_pipeline_of_another_kind(tmp_path: Path) -> None:
    """Before diffusers tries: it would tell of parts, or raise."""
    made = folder(tmp_path / "flux", PIPELINE, '{"_class_name": "FluxPipeline"}')
    sentence = (
        'flux" is a FluxPipeline according to its model_index.json, but model.name = "sd3" expects '
        "a StableDiffusion3Pipeline; change one of them$"
    )
    recipe = build.recipe("demo", [f"model.path={made}"])
    for load in (build.model, estimate):
        with pytest.raises(UserError, match=sentence):
            load(recipe)


def _raising(error: Exception) -> Callable[..., Any]:
    def raises(*_: Any, **__: Any) -> None:
        raise error

    return raises


def _told_by_hub(kind: str) -> Exception:
    """As the hub's client raises them, which want the answer they are about."""
    from huggingface_hub import errors

    error = getattr(errors, kind)
    return error.__new__(error, "a page of words\nabout it")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Exception], None]:
    """A hub with nothing of it cached, that answers with an error."""
    import huggingface_hub

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: None)

    def answers(error: Exception) -> None:
        monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", _raising(error))
        never = _raising(AssertionError("asked for again, with its retries"))
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", never)

    return answers


def test_the_hub_is_out_of_reach(hub: Callable[[Exception], None], capsys: Any) -> None:
    hub(ConnectionError("[Errno -2] Name or service not known"))
    sentence = (
        r"no such local folder, and the hub cannot be reached \(\[Errno -2\] Name or service not "
        r"known\); check the network, or set model.path to a downloaded copy of the model$"
    )
    for kind in (PIPELINE, TRANSFORMER):
        refused(HUB, kind, sentence)
    for recipe in ("sd35-ocr", "qwen25-vl-3b-geo3k"):
        assert cli.main(["check", recipe, "--memory"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: model.path = ") and "the hub cannot be reached" in line


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("GatedRepoError", "the model is gated; accept its terms on the hub and set HF_TOKEN"),
        ("RepositoryNotFoundError", "no such model on the hub; a private one requires HF_TOKEN$"),
        ("RemoteEntryNotFoundError", "the model on the hub has no config.json; expected a transf"),
        ("OfflineModeIsEnabled", r"hub cannot be reached \(a page of words\); check the network"),
    ],
)
def test_what_the_hub_may_say(hub: Callable[[Exception], None], kind: str, sentence: str) -> None:
    hub(_told_by_hub(kind))
    refused(HUB, TRANSFORMER, sentence)


def test_what_is_cached_needs_no_network(
    hub: Callable[[Exception], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub

    made = folder(tmp_path / "cache", PIPELINE, '{"_class_name": "FluxPipeline"}')
    hub(ConnectionError())
    kept = str(made / PIPELINE.file)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: kept)
    assert locate(section(HUB, PIPELINE), PIPELINE) == Located(HUB, {"_class_name": "FluxPipeline"})


def test_tries_to_reach_the_hub_are_not_talked_of() -> None:
    from huggingface_hub.utils import logging as hub

    from gesso.quiet import quiet

    before = hub.get_verbosity()
    for libraries in ((), ("diffusers",)):
        with quiet(*libraries):
            assert hub.get_verbosity() == hub.ERROR
        assert hub.get_verbosity() == before != hub.ERROR


def test_a_tilde_is_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = folder(tmp_path / "a", PIPELINE, '{"_class_name": "FluxPipeline"}')
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))  # what Windows calls it
    found = locate(section("~/a", PIPELINE), PIPELINE)
    assert found.source == str(made) and found.about["_class_name"] == "FluxPipeline"

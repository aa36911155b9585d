"""Rewards in an environment of their own: a real virtual environment with a package whose other
version this process has."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import importlib.util
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gesso import build, cli
from gesso.config import RewardEntry
from gesso.rewards import assembly, environments
from gesso.types import Prompt, Sample, Score, UserError

REWARD = """
def version(samples):
    import pinned_package
    return [pinned_package.VERSION] * len(samples)
"""


def wheel(folder: Path, version: int) -> Path:
    """A package of one file."""
    file = folder / f"pinned_package-{version}.0-py3-none-any.whl"
    info = f"pinned_package-{version}.0.dist-info"
    content = {
        "pinned_package.py": f"VERSION = {version}.0\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: pinned_package\nVersion: {version}.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for name, text in content.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        record += f"{name},sha256={digest.decode()},{len(text.encode())}\n"
    with zipfile.ZipFile(file, "w") as archive:
        for name, text in {**content, f"{info}/RECORD": record}.items():
            archive.writestr(name, text)
    return file


@pytest.fixture
def requirements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of version 2; this process has version 1. Nothing is downloaded: numpy and Pillow, which the
    worker needs, are linked into the environment."""
    monkeypatch.setenv("GESSO_ENVS", str(tmp_path / "envs"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(environments, "MINIMUM", ())
    (tmp_path / "pinned_package.py").write_text("VERSION = 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "pinned.txt"
    file.write_text(f"{wheel(tmp_path, 2)}\n")
    return file


def link_packages(place: Path) -> None:
    (site,) = place.glob("lib/python*/site-packages")
    for package in ("numpy", "PIL"):
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.origin is not None
        source = Path(spec.origin).parent
        for folder in (
            source,
            *source.parent.glob(f"{package.lower().replace('pil', 'pillow')}.libs"),
        ):
            (site / folder.name).symlink_to(folder)


def scored(entry: RewardEntry) -> float | None:
    image: np.ndarray = np.zeros((8, 8, 3), np.uint8)
    scorer = assembly.scorer(entry)

    async def score() -> list[Score]:
        try:
            return await scorer.score([Sample(Prompt("a kite"), image, 0)])
        finally:
            await scorer.close()

    (result,) = asyncio.run(score())
    assert result.error is None, result.error
    return result.value


def test_versions_live_side_by_side(
    requirements: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "version.py"
    file.write_text(REWARD)
    entry = RewardEntry(name=f"{file}:version", env=str(requirements))
    with pytest.raises(UserError, match=f"is not installed; run `gesso env {requirements}`"):
        assembly.scorer(entry)
    place = environments.folder(str(requirements))
    place.mkdir(parents=True)
    (place / "left-over").touch()  # by an interrupted installation
    assert cli.main(["env", str(requirements)]) == 0
    assert not (place / "left-over").exists()
    assert str(place) in capsys.readouterr().out
    link_packages(place)
    assert scored(entry) == 2.0
    assert scored(entry.model_copy(update={"env": None})) == 1.0
    marker = (place / ".complete").stat().st_mtime_ns
    assert environments.install(str(requirements)) == place
    assert (place / ".complete").stat().st_mtime_ns == marker, "installed once"


def test_changed_requirements_are_another_environment(requirements: Path) -> None:
    before = environments.folder(str(requirements))
    requirements.write_text(requirements.read_text() + "# changed\n")
    assert environments.folder(str(requirements)) != before


def test_errors(requirements: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requirements.write_text("no-such-package-of-gesso==1.0\n")
    assert cli.main(["env", str(requirements)]) == 2
    message = capsys.readouterr().err
    assert "cannot be installed" in message and message.count("\n") == 1
    assert not (environments.folder(str(requirements)) / ".complete").exists()
    assert cli.main(["env", str(tmp_path / "none.txt")]) == 2
    assert "cannot be read: No such file" in capsys.readouterr().err
    assert cli.main(["env", "demo"]) == 2
    assert "no reward of demo has an env" in capsys.readouterr().err


@pytest.mark.parametrize("reward", ["remote", "judge"])
def test_a_reward_on_a_server_has_no_environment(reward: str) -> None:
    urls = {"urls": ["http://127.0.0.1:1"]}
    entry: dict[str, Any] = {"name": "ocr", "remote": urls}
    if reward == "judge":
        entry = {"name": "judge", "model": "a-judge", **urls}
    entries = [RewardEntry(**entry, env="x.txt")]
    with pytest.raises(UserError, match=r"runs on a server, where reward\.env has no effect"):
        assembly.of_entries(entries, entries, build.recipe("demo").model)


def test_hpsv3_names_its_environment() -> None:
    assert importlib.util.find_spec("hpsv3") is None, "not a dependency"
    from gesso.rewards import base

    reward = base.load(assembly.REWARDS["hpsv3"], {"device": "cpu"})
    (score,) = base.checked(reward, [Sample(Prompt("a kite"), np.zeros((8, 8, 3), np.uint8), 0)])
    assert (
        score.error is not None and "set reward.env to a file with the line `hpsv3`" in score.error
    )


def test_hpsv3_reports_mean_and_deviation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The authors' interface, not their network: one row of mean and deviation per image."""
    (tmp_path / "hpsv3.py").write_text(
        "class HPSv3RewardInferencer:\n"
        "    def __init__(self, checkpoint_path, device): self.path = checkpoint_path\n"
        "    def reward(self, prompts, image_paths):\n"
        "        return [(len(p), i.size[0]) for p, i in zip(prompts, image_paths, strict=True)]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    from gesso.rewards import base
    from gesso.rewards.image import hpsv3

    hpsv3._scorer.cache_clear()
    reward = base.load(assembly.REWARDS["hpsv3"], {"device": "cpu", "batch": 2})
    image: np.ndarray = np.zeros((8, 24, 3), np.uint8)
    scores = base.checked(reward, [Sample(Prompt("x" * n), image, 0) for n in (1, 2, 3)])
    assert [(s.value, s.parts) for s in scores] == [(n, {"sigma": 24.0}) for n in (1, 2, 3)]
    hpsv3._scorer.cache_clear()
    sys.modules.pop("hpsv3")

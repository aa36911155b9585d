"""Weights of the teachers of on-policy distillation, in the shape of the student's: a run, an
export or a LoRA folder is read without building its network."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gesso import families
from gesso.config import AnyModel, Lora, Recipe, TokenModel, resolve_path, tables
from gesso.types import TeacherName, UserError, teacher_name
from gesso.use import folders
from gesso.use.source import ModelSource, find

if TYPE_CHECKING:
    from torch import Tensor

    from gesso.algorithms.base import Algorithm
    from gesso.algorithms.teachers import Teacher
    from gesso.learner.learner import Learner
    from gesso.models.tokens.teacher import FrozenTeacher
    from gesso.types import Weights


@dataclass(frozen=True)
class _Run:
    source: ModelSource

    @property
    def base(self) -> str:
        return self.source.recipe.model.path

    @property
    def is_adapter(self) -> bool:
        return self.source.recipe.model.lora is not None


@dataclass(frozen=True)
class _Folder:
    path: Path
    base: str | None  # None: unknown
    is_adapter: bool


def check(recipe: Recipe, algorithm: Algorithm) -> None:
    """Raises for teachers that the student cannot have, before any weights are loaded."""
    from gesso.algorithms.opd import OPD

    for entry in _copies(algorithm):
        _find(entry, recipe.model)
    if isinstance(algorithm, OPD) and algorithm.teacher.path is not None:
        from gesso.models.tokens.teacher import check_path

        assert isinstance(recipe.model, TokenModel)
        check_path(recipe.model, algorithm.teacher.path)


def teach(recipe: Recipe, algorithm: Algorithm, learner: Learner) -> None:
    """Gives the learner the weights of all teachers, and the algorithm of the learner a teacher
    that is another model."""
    from gesso.algorithms.opd import OPD

    for entry in _copies(algorithm):
        found = _find(entry, recipe.model)
        learner.teach(entry.name, _weights(found, entry.key, recipe, learner.model))
    if isinstance(algorithm, OPD) and algorithm.teacher.path is not None:
        network = another_model(recipe, learner.model, algorithm.teacher.path)
        learner.algorithm = algorithm.with_teacher(network)


def another_model(recipe: Recipe, model: Any, path: str) -> FrozenTeacher:
    from gesso.models.tokens.teacher import make_teacher
    from gesso.models.tokens.transformer import TransformerModel

    if not isinstance(model, TransformerModel):
        raise UserError(
            f'algorithm "{recipe.algorithm.name}" loads its teacher through transformers, but '
            f'model "{recipe.model.name}" does not derive from TransformerModel; use '
            "algorithm.teacher.adapter"
        )
    assert isinstance(recipe.model, TokenModel)
    return make_teacher(model, recipe.model, path)


@dataclass(frozen=True)
class _Copy:
    """A teacher that is a copy of the trained weights."""

    name: TeacherName
    key: str  # of the recipe
    teacher: Teacher


def _copies(algorithm: Algorithm) -> list[_Copy]:
    from gesso.algorithms.flow_opd import FlowOPD
    from gesso.algorithms.opd import NAME, OPD
    from gesso.algorithms.teachers import Teacher

    if isinstance(algorithm, FlowOPD):
        return [
            _Copy(teacher_name(name), f"algorithm.teachers.{name}.path", teacher)
            for name, teacher in algorithm.teachers.items()
        ]
    given = algorithm.teacher if isinstance(algorithm, OPD) else None
    if given is not None and given.adapter is not None:
        teacher = Teacher(path=given.adapter, step=given.step, weights=given.weights)
        return [_Copy(NAME, "algorithm.teacher.adapter", teacher)]
    return []


def _find(entry: _Copy, student: AnyModel) -> _Run | _Folder:
    teacher = entry.teacher
    where = f'{entry.key} = "{teacher.path}"'
    found = _located(where, teacher)
    if found.is_adapter and student.lora is None:
        merged = f"`gesso export {teacher.path} --to DIR --merged`"
        raise UserError(
            f"{where} is a LoRA, but the student trains all weights; set model.lora.rank, or use "
            f"the folder that {merged} writes"
        )
    if not found.is_adapter and student.lora is not None:
        raise UserError(
            f"{where} has all weights of a model, but the student trains a LoRA; remove model.lora "
            "to train all weights, or use a teacher that is a LoRA"
        )
    if found.is_adapter and found.base is not None and not _same(found.base, student.path):
        raise UserError(
            f'{where} is a LoRA for the base model "{found.base}", but the student has model.path '
            f'= "{student.path}"; student and teachers must share their base model'
        )
    return found


def _located(where: str, teacher: Teacher) -> _Run | _Folder:
    path = Path(os.path.expanduser(teacher.path))
    if os.path.isfile(path / "config.toml"):
        return _Run(find(path, teacher.step, teacher.weights))
    if teacher.step is not None or teacher.weights is not None:
        raise UserError(
            f"{where} is not a run; remove step and weights, which select a checkpoint of a run"
        )
    if folders.is_adapter(path):
        return _Folder(path, _base(path), is_adapter=True)
    if (path / "model_index.json").is_file():
        return _Folder(path, None, is_adapter=False)
    raise UserError(
        f"{where}: expected a run (config.toml), a LoRA folder ({folders.LORA}) or a diffusers "
        f"pipeline (model_index.json), got {'no such folder' if not path.is_dir() else 'neither'}; "
        "train the teacher first, or change the path"
    )


def _base(folder: Path) -> str | None:
    """The base model of a LoRA folder, if it is known."""
    if not (folder / folders.RECIPE).is_file():
        return folders.base_model(folder)
    return tables.read_toml(folder / folders.RECIPE)["model"]["path"]


def _same(one: str, other: str) -> bool:
    paths = [resolve_path(path) for path in (one, other)]
    return one == other or (all(p.is_dir() for p in paths) and paths[0].samefile(paths[1]))


def _weights(found: _Run | _Folder, key: str, recipe: Recipe, model: Any) -> Weights:
    """The teacher's weights, named like the student's parameters."""
    trained = model.policy.trainable
    if isinstance(found, _Run):
        source = found.source
        assert source.run is not None
        table = f"{source.table}/"
        state, _ = source.run.load(source.step, table)
        tensors = {name.removeprefix(table): tensor for name, tensor in state.items()}
        lora = source.recipe.model.lora
        if lora is None:
            return tensors
        return fitted(tensors, lora.alpha, trained, model.policy.lora, str(source.run.path))
    if not families.of(recipe).wraps_library(model):
        raise UserError(
            f'{key}: model "{recipe.model.name}" is not a diffusers pipeline, so a teacher must be '
            "a run; use the run's folder"
        )
    if not found.is_adapter:
        return _whole(found.path, model)
    from gesso.models.adapter_checks import adapter_names, check_one_alpha

    adapter = model.read_adapter(str(found.path), key)
    check_one_alpha(adapter.file, adapter.settings)
    names = adapter_names(trained)
    tensors = {names.get(name, name): tensor for name, tensor in adapter.tensors.items()}
    alpha = adapter.settings.get("lora_alpha")  # as in diffusers, it defaults to the rank
    return fitted(tensors, alpha, trained, model.policy.lora, str(adapter.file))


def _whole(folder: Path, model: Any) -> dict[str, Tensor]:
    """The transformer of a pipeline, without buffers."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = sorted((folder / "transformer").glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder / 'transformer'} has no .safetensors file; export it again")
    try:
        read = {name: t for file in files for name, t in load_file(file).items()}
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder / 'transformer'} cannot be read: {error}") from error
    buffers = {name for name, _ in model.policy.module.named_buffers()}
    return {name: tensor for name, tensor in read.items() if name not in buffers}


def fitted(
    tensors: Mapping[str, Tensor],
    alpha: float | None,
    like: Mapping[str, Tensor],
    lora: Lora,
    where: str,
) -> dict[str, Tensor]:
    """A LoRA in the shape of another one, with the same effect: its rank is padded by zeros, and B
    takes up the difference of alpha / rank. Modules that it does not have get no adapter."""
    import torch

    if extra := sorted(tensors.keys() - like.keys()):
        raise UserError(
            f"{where} has {extra[0]}, which the student does not train ({len(extra)} tensors); set "
            "model.lora.targets to include the modules of every teacher"
        )
    result = {name: torch.zeros(tensor.shape) for name, tensor in like.items()}
    for name, tensor in tensors.items():
        dimension = 0 if ".lora_A." in name else 1
        rank = tensor.shape[dimension]
        if rank > lora.rank:
            raise UserError(
                f"{where} has rank {rank}, but the student has model.lora.rank = {lora.rank}; set "
                f"model.lora.rank = {rank} or more"
            )
        own = result[name].narrow(dimension, 0, rank)
        if own.shape != tensor.shape:
            raise UserError(
                f"{where}: {name} has shape {tuple(tensor.shape)}, expected {tuple(own.shape)}; "
                "student and teachers must share their base model"
            )
        scale = (rank if alpha is None else alpha) / rank / (lora.alpha / lora.rank)
        own.copy_(tensor.float() * (scale if dimension else 1.0))
    return result

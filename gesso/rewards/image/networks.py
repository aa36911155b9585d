"""What rewards look through: CLIP and detectors of transformers, loaded once a process.

Pictures are always prepared by the PIL image processors: torchvision is not needed, and where it
is installed the numbers stay the same. Shape legend: N pictures or texts · D features.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from pydantic import Field

from gesso.config import Strict, pick_device
from gesso.types import Prompt, Sample, Score, UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Box = tuple[float, float, float, float]
"""x of the left side, y of the top, x of the right, y of the bottom; pixels, y points down."""

T = TypeVar("T")


class Network(Strict):
    """What rewards with a network of their own have in common."""

    device: str = "auto"  # a GPU where there is one
    batch: int = Field(16, ge=1)  # pictures at a time

    def unfit(self, prompt: Prompt) -> str | None:
        return None


def once(load: Callable[..., T]) -> Callable[..., T]:
    """Call `load` once for the same arguments, also when it raises a UserError: a model that is
    not there is not looked for again with every batch."""

    @functools.cache
    def attempt(*args: str) -> T | UserError:
        try:
            return load(*args)
        except UserError as error:
            return error

    @functools.wraps(load)
    def loaded(*args: str) -> T:
        found = attempt(*args)
        if isinstance(found, UserError):
            raise UserError(str(found))
        return found

    return loaded


@dataclass(frozen=True)
class Clip:
    model: Any  # CLIPModel
    tokenizer: Any
    processor: Any
    device: torch.device

    def images(self, pictures: Sequence[np.ndarray]) -> Tensor:
        """(N, D) of unit length; pictures are (height, width, 3) uint8."""
        import torch

        pixels = self.processor(images=pil(pictures), return_tensors="pt")["pixel_values"]
        with torch.inference_mode():
            features = self.model.get_image_features(pixel_values=pixels.to(self.device))
        return torch.nn.functional.normalize(features.pooler_output, dim=-1)

    def texts(self, texts: Sequence[str]) -> Tensor:
        """(N, D) of unit length; a text is cut where the model's positions end (77 tokens)."""
        import torch

        length = self.model.config.text_config.max_position_embeddings
        tokens = self.tokenizer(
            list(texts), padding=True, truncation=True, max_length=length, return_tensors="pt"
        ).to(self.device)
        with torch.inference_mode():
            features = self.model.get_text_features(
                input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]
            )
        return torch.nn.functional.normalize(features.pooler_output, dim=-1)

    def cosines(self, texts: Sequence[str], pictures: Sequence[np.ndarray]) -> Tensor:
        """(N,): of each text with its picture."""
        different = list(dict.fromkeys(texts))  # a group shares its prompt
        row = [different.index(text) for text in texts]
        return (self.texts(different)[row] * self.images(pictures)).sum(-1)


def in_batches(
    values: Callable[[Sequence[Sample]], Sequence[float]], samples: Sequence[Sample], batch: int
) -> list[Score]:
    """One score a sample, so many samples at a time."""
    parts = [samples[i : i + batch] for i in range(0, len(samples), batch)]
    return [Score(value) for part in parts for value in values(part)]


@once
def clip(path: str, processor: str, device: str) -> Clip:
    """`path` holds the model, `processor` the tokenizer and how pictures are prepared."""
    from transformers import AutoTokenizer, CLIPImageProcessorPil, CLIPModel

    where = pick_device(device)
    model = _network(CLIPModel, path).to(where)
    pictures = loaded(CLIPImageProcessorPil, processor)
    return Clip(model, loaded(AutoTokenizer, processor), pictures, where)


@dataclass(frozen=True)
class Detection:
    """One thing that was seen."""

    label: str
    box: Box
    score: float  # the detector's confidence, in [0, 1]
    colour: str | None = None
    mask: np.ndarray | None = field(default=None, compare=False)  # (height, width) bool


class Detector(Protocol):
    def unknown(self, names: Sequence[str]) -> list[str]:
        """Those of the names that it has no label for."""

    def detect(
        self, pictures: Sequence[np.ndarray], names: Sequence[Sequence[str]], threshold: float
    ) -> list[list[Detection]]:
        """Of each picture the things with these names, in any order, above the threshold."""


@once
def detector(path: str, device: str) -> Detector:
    """By the model's kind: boxes (DETR, RT-DETR, …), masks (Mask2Former), or whatever is asked for
    by name (OWL-ViT, OWLv2)."""
    import transformers
    from transformers.models.auto import modeling_auto as known

    config = loaded(transformers.AutoConfig, path)
    where = pick_device(device)
    needs_scipy = config.model_type in ("mask2former", "owlv2")  # as transformers wrote them
    if needs_scipy and importlib.util.find_spec("scipy") is None:
        raise UserError(f'the {config.model_type} "{path}" needs scipy: pip install scipy')
    if type(config) in known.MODEL_FOR_OBJECT_DETECTION_MAPPING:
        model = _network(transformers.AutoModelForObjectDetection, path).to(where)
        return Boxes(model, _image_processor(path), where, ids_of(config.id2label))
    if config.model_type == "mask2former":
        model = _network(transformers.AutoModelForUniversalSegmentation, path).to(where)
        return Masks(model, _image_processor(path), where, ids_of(config.id2label))
    if config.model_type in ("owlvit", "owlv2"):
        model = _network(transformers.AutoModelForZeroShotObjectDetection, path).to(where)
        tokenizer = loaded(transformers.AutoTokenizer, path)
        return Queries(model, _image_processor(path), where, tokenizer)
    raise UserError(
        f'"{path}" is a {config.model_type}, which is no detector known here; expected one of '
        "transformers' AutoModelForObjectDetection (RT-DETR, DETR…), a Mask2Former or an OWL-ViT"
    )


@dataclass(frozen=True)
class Boxes:
    """A detector of a fixed set of things; it draws boxes."""

    model: Any
    processor: Any
    device: torch.device
    ids: Mapping[str, frozenset[int]]  # plain name → the model's labels

    def unknown(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if plain(name) not in self.ids]

    def detect(
        self, pictures: Sequence[np.ndarray], names: Sequence[Sequence[str]], threshold: float
    ) -> list[list[Detection]]:
        found = self.processor.post_process_object_detection(
            _forward(self, pictures), threshold=threshold, target_sizes=_sizes(pictures)
        )
        return [_boxes(one, self._names(asked)) for one, asked in zip(found, names, strict=True)]

    def _names(self, asked: Sequence[str]) -> dict[int, str]:
        return {i: name for name in asked for i in self.ids[plain(name)]}


@dataclass(frozen=True)
class Masks(Boxes):
    """A Mask2Former for instances; boxes are drawn around its masks."""

    def detect(
        self, pictures: Sequence[np.ndarray], names: Sequence[Sequence[str]], threshold: float
    ) -> list[list[Detection]]:
        outputs = _forward(self, pictures)
        # The processor draws on the CPU, wherever the model is.
        outputs.class_queries_logits = outputs.class_queries_logits.cpu()
        outputs.masks_queries_logits = outputs.masks_queries_logits.cpu()
        found = self.processor.post_process_instance_segmentation(
            outputs, threshold=threshold, target_sizes=_sizes(pictures), return_binary_maps=True
        )
        return [_outlined(one, self._names(asked)) for one, asked in zip(found, names, strict=True)]


@dataclass(frozen=True)
class Queries:
    """A detector of whatever is named (OWL). Pictures go one by one, each with its own names."""

    model: Any
    processor: Any
    device: torch.device
    tokenizer: Any

    def unknown(self, names: Sequence[str]) -> list[str]:
        return []

    def detect(
        self, pictures: Sequence[np.ndarray], names: Sequence[Sequence[str]], threshold: float
    ) -> list[list[Detection]]:
        return [self._detect(p, n, threshold) for p, n in zip(pictures, names, strict=True)]

    def _detect(self, picture: np.ndarray, names: Sequence[str], least: float) -> list[Detection]:
        asked = [f"a photo of a {name}" for name in names]
        length = self.model.config.text_config.max_position_embeddings
        tokens = self.tokenizer(
            asked, padding="max_length", truncation=True, max_length=length, return_tensors="pt"
        ).to(self.device)
        outputs = _forward(self, [picture], **tokens)
        (found,) = self.processor.post_process_object_detection(
            outputs, threshold=least, target_sizes=_sizes([picture])
        )
        return _boxes(found, dict(enumerate(names)))


_SAME = {
    "computermouse": "mouse",
    "computerkeyboard": "keyboard",
    "tvremote": "remote",
    "remotecontrol": "remote",
    "tvmonitor": "tv",
    "television": "tv",
    "sofa": "couch",
    "motorbike": "motorcycle",
    "aeroplane": "airplane",
    "mobilephone": "cellphone",
    "hairdryer": "hairdrier",
    "doughnut": "donut",
    "fridge": "refrigerator",
}


def plain(name: str) -> str:
    """One spelling for a thing: GenEval's "computer mouse" is COCO's "mouse", its "potted plant"
    the "pottedplant" of some detectors and its "tv" their "tvmonitor"."""
    letters = re.sub(r"[\s_-]+", "", name.lower())
    return _SAME.get(letters, letters)


def ids_of(labels: Mapping[int, str]) -> dict[str, frozenset[int]]:
    names = {plain(label) for label in labels.values()}
    return {n: frozenset(i for i, label in labels.items() if plain(label) == n) for n in names}


def loaded(kind: Any, path: str, **options: Any) -> Any:
    folder = Path(os.path.expanduser(path))
    if path.startswith((".", "/", "~")) and not folder.is_dir():
        raise UserError(f'{kind.__name__} cannot be loaded from "{path}": no such folder')
    try:
        with _quiet():
            if kind.__name__.startswith("Auto"):
                options["trust_remote_code"] = False  # unsaid, transformers asks on the terminal
            return kind.from_pretrained(str(folder), **options)
    except Exception as error:  # a missing file, no network, a missing package, broken weights
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f'{kind.__name__} cannot be loaded from "{path}": {reason} '
            "(expected a folder, or a name of the hub that is cached or can be reached)"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars, no tables of weights and no talk of every try to reach the hub; errors
    still show."""
    from huggingface_hub.utils import logging as hub
    from transformers.utils import logging

    level, hubs = logging.get_verbosity(), hub.get_verbosity()
    logging.set_verbosity_error()
    hub.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        hub.set_verbosity(hubs)
        logging.enable_progress_bar()


def _network(kind: Any, path: str) -> Any:
    """In float32, ready to look. Weights that the files do not have would be random."""
    import torch

    model, info = loaded(kind, path, dtype=torch.float32, output_loading_info=True)
    names = {name for name, _ in model.named_parameters()}
    missing = sorted(names & set(info["missing_keys"]))
    if missing:
        raise UserError(
            f'"{path}" lacks {len(missing)} of the {len(names)} weights of '
            f"{type(model).__name__}, {missing[0]} first: it holds another kind of model"
        )
    return model.eval().requires_grad_(False)


def _image_processor(path: str) -> Any:
    from transformers import AutoImageProcessor

    return loaded(AutoImageProcessor, path, backend="pil")


def _forward(seeing: Boxes | Queries, pictures: Sequence[np.ndarray], **more: Any) -> Any:
    import torch

    inputs = seeing.processor(images=pil(pictures), return_tensors="pt").to(seeing.device)
    with torch.inference_mode():
        return seeing.model(**inputs, **more)


def pil(pictures: Sequence[np.ndarray]) -> list[Any]:
    from PIL import Image

    return [Image.fromarray(picture) for picture in pictures]


def _sizes(pictures: Sequence[np.ndarray]) -> list[tuple[int, int]]:
    return [(p.shape[0], p.shape[1]) for p in pictures]


def _boxes(found: Mapping[str, Any], names: Mapping[int, str]) -> list[Detection]:
    rows = zip(*(found[key].tolist() for key in ("labels", "boxes", "scores")), strict=True)
    return [Detection(names[i], tuple(box), score) for i, box, score in rows if i in names]


def _outlined(found: Mapping[str, Any], names: Mapping[int, str]) -> list[Detection]:
    detections = []
    for n, info in enumerate(found["segments_info"]):
        if info["label_id"] in names:
            shape = found["segmentation"][n].numpy() > 0
            rows, columns = np.flatnonzero(shape.any(1)), np.flatnonzero(shape.any(0))
            left, right = float(columns[0]), float(columns[-1] + 1)
            box = left, float(rows[0]), right, float(rows[-1] + 1)
            label = names[info["label_id"]]
            detections.append(Detection(label, box, info["score"], mask=shape))
    return detections

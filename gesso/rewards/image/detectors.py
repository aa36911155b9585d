"""Object detectors of transformers, behind one protocol."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from gesso.config import pick_device
from gesso.rewards.image import networks
from gesso.types import UserError

if TYPE_CHECKING:
    import torch

Box = tuple[float, float, float, float]
"""(left, top, right, bottom) in pixels; y points down."""


@dataclass(frozen=True)
class Detection:
    """One detected object."""

    label: str
    box: Box
    score: float  # the detector's confidence, in [0, 1]
    colour: str | None = None
    mask: np.ndarray | None = field(default=None, compare=False)  # (height, width) bool


class Detector(Protocol):
    def unknown(self, names: Sequence[str]) -> list[str]:
        """Names for which the detector has no label."""

    def detect(
        self, images: Sequence[np.ndarray], names: Sequence[Sequence[str]], threshold: float
    ) -> list[list[Detection]]:
        """For each image, the objects with these names above the threshold, in any order."""


@networks.once
def load_detector(path: str, device: str) -> Detector:
    """Depends on the model type: boxes (DETR, RT-DETR, …), masks (Mask2Former), or open vocabulary
    (OWL-ViT, OWLv2)."""
    import transformers
    from transformers.models.auto import modeling_auto

    config = networks.load_pretrained(transformers.AutoConfig, path)
    target = pick_device(device)
    needs_scipy = config.model_type in (
        "mask2former",
        "owlv2",
    )  # transformers imports it
    if needs_scipy and importlib.util.find_spec("scipy") is None:
        raise UserError(f'{config.model_type} "{path}" requires scipy: pip install scipy')
    if type(config) in modeling_auto.MODEL_FOR_OBJECT_DETECTION_MAPPING:
        model = networks.load_network(transformers.AutoModelForObjectDetection, path).to(target)
        return BoxDetector(model, _image_processor(path), target, label_ids(config.id2label))
    if config.model_type == "mask2former":
        model = networks.load_network(transformers.AutoModelForUniversalSegmentation, path).to(
            target
        )
        return MaskDetector(model, _image_processor(path), target, label_ids(config.id2label))
    if config.model_type in ("owlvit", "owlv2"):
        model = networks.load_network(transformers.AutoModelForZeroShotObjectDetection, path).to(
            target
        )
        tokenizer = networks.load_pretrained(transformers.AutoTokenizer, path)
        return OpenVocabularyDetector(model, _image_processor(path), target, tokenizer)
    raise UserError(
        f'"{path}" is a {config.model_type}, which is not a supported detector; expected a model '
        "of transformers' AutoModelForObjectDetection (RT-DETR, DETR…), a Mask2Former or an OWL-ViT"
    )


@dataclass(frozen=True)
class BoxDetector:
    """A detector with a fixed set of classes; returns boxes."""

    model: Any
    processor: Any
    device: torch.device
    ids: Mapping[str, frozenset[int]]  # canonical name → label ids

    def unknown(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if canonical_name(name) not in self.ids]

    def detect(
        self, images: Sequence[np.ndarray], names: Sequence[Sequence[str]], threshold: float
    ) -> list[list[Detection]]:
        results = self.processor.post_process_object_detection(
            _forward(self, images), threshold=threshold, target_sizes=_sizes(images)
        )
        return [_boxes(one, self._by_id(row)) for one, row in zip(results, names, strict=True)]

    def _by_id(self, names: Sequence[str]) -> dict[int, str]:
        return {i: name for name in names for i in self.ids[canonical_name(name)]}


@dataclass(frozen=True)
class MaskDetector(BoxDetector):
    """A Mask2Former for instance segmentation; returns masks and their bounding boxes."""

    def detect(
        self, images: Sequence[np.ndarray], names: Sequence[Sequence[str]], threshold: float
    ) -> list[list[Detection]]:
        outputs = _forward(self, images)
        # The processor requires CPU tensors.
        outputs.class_queries_logits = outputs.class_queries_logits.cpu()
        outputs.masks_queries_logits = outputs.masks_queries_logits.cpu()
        results = self.processor.post_process_instance_segmentation(
            outputs, threshold=threshold, target_sizes=_sizes(images), return_binary_maps=True
        )
        return [_masks(one, self._by_id(row)) for one, row in zip(results, names, strict=True)]


@dataclass(frozen=True)
class OpenVocabularyDetector:
    """A detector for arbitrary names (OWL). Processes one image at a time, each with its names."""

    model: Any
    processor: Any
    device: torch.device
    tokenizer: Any

    def unknown(self, names: Sequence[str]) -> list[str]:
        return []

    def detect(
        self, images: Sequence[np.ndarray], names: Sequence[Sequence[str]], threshold: float
    ) -> list[list[Detection]]:
        return [self._detect(i, n, threshold) for i, n in zip(images, names, strict=True)]

    def _detect(self, image: np.ndarray, names: Sequence[str], threshold: float) -> list[Detection]:
        queries = [f"a photo of a {name}" for name in names]
        length = self.model.config.text_config.max_position_embeddings
        tokens = self.tokenizer(
            queries, padding="max_length", truncation=True, max_length=length, return_tensors="pt"
        ).to(self.device)
        outputs = _forward(self, [image], **tokens)
        (result,) = self.processor.post_process_object_detection(
            outputs, threshold=threshold, target_sizes=_sizes([image])
        )
        return _boxes(result, dict(enumerate(names)))


_SYNONYMS = {
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


def canonical_name(name: str) -> str:
    """One spelling per class: GenEval's "computer mouse" is COCO's "mouse"; its "potted plant" and
    "tv" are "pottedplant" and "tvmonitor" in some detectors."""
    letters = re.sub(r"[\s_-]+", "", name.lower())
    return _SYNONYMS.get(letters, letters)


def label_ids(labels: Mapping[int, str]) -> dict[str, frozenset[int]]:
    names = {canonical_name(label) for label in labels.values()}
    return {
        n: frozenset(i for i, label in labels.items() if canonical_name(label) == n) for n in names
    }


def _image_processor(path: str) -> Any:
    from transformers import AutoImageProcessor

    return networks.load_pretrained(AutoImageProcessor, path, backend="pil")


def _forward(
    detector: BoxDetector | OpenVocabularyDetector, images: Sequence[np.ndarray], **tokens: Any
) -> Any:
    import torch

    inputs = detector.processor(images=networks.to_pil(images), return_tensors="pt").to(
        detector.device
    )
    with torch.inference_mode():
        return detector.model(**inputs, **tokens)


def _sizes(images: Sequence[np.ndarray]) -> list[tuple[int, int]]:
    return [(image.shape[0], image.shape[1]) for image in images]


def _boxes(result: Mapping[str, Any], names: Mapping[int, str]) -> list[Detection]:
    rows = zip(*(result[key].tolist() for key in ("labels", "boxes", "scores")), strict=True)
    return [Detection(names[i], tuple(box), score) for i, box, score in rows if i in names]


def _masks(result: Mapping[str, Any], names: Mapping[int, str]) -> list[Detection]:
    detections = []
    for n, info in enumerate(result["segments_info"]):
        if info["label_id"] in names:
            mask = result["segmentation"][n].numpy() > 0
            rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
            left, right = float(columns[0]), float(columns[-1] + 1)
            box = left, float(rows[0]), right, float(rows[-1] + 1)
            label = names[info["label_id"]]
            detections.append(Detection(label, box, info["score"], mask=mask))
    return detections

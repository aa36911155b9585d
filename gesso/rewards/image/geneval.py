"""GenEval: does the image have the objects, counts, colours and positions that the row requires?

The rules of Ghosh et al. 2023 ("GenEval") with a detector of transformers instead of mmdetection;
the row's columns `tag`, `include` and `exclude` are GenEval's metadata, unchanged.

value = the mean over the clauses, the training reward of Flow-GRPO: 1 − |n − n̂|/n for a count (at
least 0), the share with the correct colour, 0 or 1 for a position; colour and position score only
if the count is correct. Details: "strict" (every clause holds, counts are exact) and "correct"
(GenEval's original rule, used in published results: at least the requested count, judged on the
most confident detections, and nothing of `exclude`).

Departures from Flow-GRPO's server: a failed position scores 0 (there 1 is added to it) and no value
is below 0; every clause always counts, so that the denominator of the mean depends only on the
prompt; an object of `exclude` is a separate clause unless the counts of `include` imply it.
Departure from GenEval: without masks, colours are judged on the whole box. The thresholds are
GenEval's, chosen for a Mask2Former, the default here (it requires scipy); other detectors need
different ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import ConfigDict, Field, model_validator

from gesso.config import Strict
from gesso.config.parsing import parse
from gesso.rewards.image import networks
from gesso.rewards.image.clip import load_clip
from gesso.rewards.image.detectors import (
    Box,
    Detection,
    Detector,
    canonical_name,
    load_detector,
)
from gesso.types import Prompt, Sample, Score, UserError

if TYPE_CHECKING:
    from torch import Tensor

Colour = Literal[
    "red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white"
]
Relation = Literal["left of", "right of", "above", "below"]
COLOURS: tuple[str, ...] = Colour.__args__  # type: ignore[attr-defined]
TEMPLATES = (
    "a photo of a {colour} {thing}",
    "a photo of a {colour}-colored {thing}",
    "a photo of a {colour} object",
)
MAX_PER_CLASS = 16  # detections
MARGIN = 0.1  # of the sum of both widths (heights), subtracted from the centre distance
GREY = 0x99  # background outside a mask


class Exclude(Strict):
    model_config = ConfigDict(extra="ignore")  # rows may have other keys
    thing: str = Field(alias="class", min_length=1)
    count: int = Field(ge=1)

    @model_validator(mode="before")
    @classmethod
    def _named(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or not isinstance(data.get("class"), str):
            raise ValueError(f'expected e.g. {{"class": "dog", "count": 2}}, got {data!r}')
        return data


class Include(Exclude):
    color: Colour | None = None
    position: tuple[Relation, int] | None = Field(None, strict=False)  # JSON has only lists


class Metadata(Strict):
    model_config = ConfigDict(extra="ignore")
    tag: str
    include: list[Include] = Field(min_length=1)
    exclude: list[Exclude] | None = None

    @model_validator(mode="after")
    def _possible(self) -> Metadata:
        for n, item in enumerate(self.include):
            if any(same_class(item.thing, earlier.thing) for earlier in self.include[:n]):
                raise ValueError(f'"include" has "{item.thing}" twice; expected each class once')
            if item.position and not 0 <= item.position[1] < n:
                raise ValueError(f"include.{n}.position must refer to an earlier item of include")
        return self

    @property
    def names(self) -> list[str]:
        things = [item.thing for item in (*self.include, *(self.exclude or ()))]
        return [
            t for n, t in enumerate(things) if not any(same_class(t, other) for other in things[:n])
        ]

    @property
    def coloured(self) -> set[str]:
        return {item.thing for item in self.include if item.color}


def same_class(thing: str, other: str) -> bool:
    return canonical_name(thing) == canonical_name(other)


def metadata_of(prompt: Prompt) -> Metadata:
    """Raises a UserError if a column is missing or invalid."""
    columns = {key: value for key, value in prompt.columns.items() if value is not None}
    for key in ("tag", "include"):
        if not columns.get(key):
            raise UserError(
                f'no "{key}" in the row; expected GenEval metadata, such as "tag": "counting" '
                'and "include": [{"class": "dog", "count": 2}]'
            )
    return parse(Metadata, columns, "GenEval metadata")


@dataclass(frozen=True)
class Clause:
    score: float  # in [0, 1]
    description: str  # for display: "2 of 3 apple"


def clauses(
    detections: Sequence[Detection], metadata: Metadata, exact: bool = True
) -> list[Clause]:
    """The row's requirements, each with a score. `exact=False`: GenEval's original rule."""
    ordered = sorted(detections, key=lambda d: -d.score)
    terms: list[Clause] = []
    groups: list[list[Detection] | None] = []  # detections of each include; None: not as required
    for item in metadata.include:
        things = [d for d in ordered if same_class(d.label, item.thing)]
        things = things if exact else things[: item.count]
        current = [_count(len(things), item)]
        correct_count = len(things) == item.count
        if item.color:
            n = sum(d.colour == item.color for d in things)
            current.append(Clause(n / item.count if correct_count else 0.0, f"{n} {item.color}"))
        if item.position:
            relation, index = item.position
            others = groups[index]
            holds = correct_count and others is not None and _all_related(relation, things, others)
            current.append(Clause(float(holds), relation if holds else f"not {relation}"))
        groups.append(things if all(clause.score == 1 for clause in current) else None)
        terms += current
    for excluded in metadata.exclude or ():
        if not (exact and _implied(excluded, metadata)):
            n = sum(same_class(d.label, excluded.thing) for d in detections)
            terms.append(Clause(float(n < excluded.count), f"{n} {excluded.thing}"))
    return terms


def _count(n: int, item: Include) -> Clause:
    score = max(0.0, 1 - abs(item.count - n) / item.count)
    return Clause(score, f"{n} of {item.count} {item.thing}")


def _implied(excluded: Exclude, metadata: Metadata) -> bool:
    """Whether the exact count of an include implies the exclusion."""
    return any(
        same_class(item.thing, excluded.thing) and item.count < excluded.count
        for item in metadata.include
    )


def _all_related(relation: str, things: Sequence[Detection], others: Sequence[Detection]) -> bool:
    return all(relation in relations(a.box, b.box) for a in things for b in others)


def relations(a: Box, b: Box) -> set[str]:
    """The position of `a` relative to `b`. Along each axis, the offset of the centres minus a tenth
    of both sizes must exceed half of the whole distance; both axes may qualify."""
    dx = (a[0] + a[2] - b[0] - b[2]) / 2
    dy = (a[1] + a[3] - b[1] - b[3]) / 2
    distance = math.hypot(dx, dy)
    x = max(0.0, abs(dx) - MARGIN * (a[2] - a[0] + b[2] - b[0]))
    y = max(0.0, abs(dy) - MARGIN * (a[3] - a[1] + b[3] - b[1]))
    result = set()
    if x > distance / 2:
        result.add("left of" if dx < 0 else "right of")
    if y > distance / 2:
        result.add("above" if dy < 0 else "below")
    return result


def select_detections(
    detections: Sequence[Detection], threshold: float, max_overlap: float = 1.0
) -> list[Detection]:
    """Detections above the threshold, at most the 16 most confident of a class. Of two detections
    of a class with an intersection over union of `max_overlap` or more, only the more confident is
    kept; 1 keeps all."""
    result: list[Detection] = []
    counts: dict[str, int] = {}
    for one in sorted(detections, key=lambda d: -d.score):
        counts[one.label] = counts.get(one.label, 0) + (one.score > threshold)
        if one.score <= threshold or counts[one.label] > MAX_PER_CLASS:
            continue
        kept = [d for d in result if d.label == one.label]
        if max_overlap == 1 or all(
            intersection_over_union(one.box, d.box) < max_overlap for d in kept
        ):
            result.append(one)
    return result


def intersection_over_union(a: Box, b: Box) -> float:
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    both = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1])
    union = both - width * height
    return width * height / union if union > 0 else 0.0


class Geneval(networks.NetworkReward):
    """Mean over the conditions in the row's `tag`, `include` and `exclude` columns: counts as 1 −
    |n − n̂| / n, at least 0; colours; positions (Ghosh et al. 2023, Flow-GRPO). Range [0, 1].
    Requires the extra `geneval`. `geneval/strict`: all conditions hold with exact counts.
    `geneval/correct`: GenEval's published rule, where additional objects are allowed unless
    excluded."""

    detector: str = "facebook/mask2former-swin-small-coco-instance"
    """Detector: Mask2Former, DETR, RT-DETR or OWL from transformers."""
    clip: str = "openai/clip-vit-large-patch14"
    """CLIP model that classifies colours."""
    threshold: float = Field(0.3, ge=0, le=1)
    """Minimum detection confidence."""
    counting_threshold: float = Field(0.9, ge=0, le=1)
    """Minimum confidence for prompts tagged `counting`."""
    max_overlap: float = Field(1.0, gt=0, le=1)
    """Below 1, the weaker of two boxes of the same class with a larger IoU is dropped."""
    strict: bool = False
    """True: the value is 0 or 1."""

    def unfit(self, prompt: Prompt) -> str | None:
        try:
            metadata_of(prompt)
        except UserError as error:
            return str(error)
        return None

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        detector = load_detector(self.detector, self.device)
        reasons = [
            self.unfit(s.prompt) or self._unknown_object(s.prompt, detector) for s in samples
        ]
        fit = [s for s, reason in zip(samples, reasons, strict=True) if reason is None]
        scored: list[Score] = []
        for first in range(0, len(fit), self.batch):
            scored += self._scores(fit[first : first + self.batch], detector)
        scores = iter(scored)
        return [Score.failed(reason) if reason else next(scores) for reason in reasons]

    def _unknown_object(self, prompt: Prompt, detector: Detector) -> str | None:
        unknown = detector.unknown(metadata_of(prompt).names)
        if not unknown:
            return None
        return f'detector "{self.detector}" has no label for "{unknown[0]}"; use another detector'

    def _scores(self, samples: Sequence[Sample], detector: Detector) -> list[Score]:
        rows = [metadata_of(s.prompt) for s in samples]
        images = [s.pixels for s in samples]
        lowest = min(self.threshold, self.counting_threshold)
        raw = detector.detect(images, [row.names for row in rows], lowest)
        selected = [
            select_detections(detections, self._threshold(row), self.max_overlap)
            for detections, row in zip(raw, rows, strict=True)
        ]
        coloured = self._with_colours(images, selected, [row.coloured for row in rows])
        return [self._score_clauses(d, row) for d, row in zip(coloured, rows, strict=True)]

    def _threshold(self, metadata: Metadata) -> float:
        return self.counting_threshold if metadata.tag == "counting" else self.threshold

    def _score_clauses(self, detections: Sequence[Detection], metadata: Metadata) -> Score:
        terms = clauses(detections, metadata)
        graded = sum(clause.score for clause in terms) / len(terms)
        strict = float(all(clause.score == 1 for clause in terms))
        correct = all(clause.score == 1 for clause in clauses(detections, metadata, exact=False))
        details = {"strict": strict, "correct": float(correct)}
        text = "; ".join(clause.description for clause in terms)
        return Score(strict if self.strict else graded, details, text)

    def _with_colours(
        self,
        images: Sequence[np.ndarray],
        detections: Sequence[list[Detection]],
        names: Sequence[set[str]],
    ) -> list[list[Detection]]:
        """Sets the colour of detections with one of these names."""
        if not any(names):
            return list(detections)
        clip = load_clip(self.clip, self.clip, self.device)
        indices = [
            (i, j)
            for i, row in enumerate(detections)
            for j, detection in enumerate(row)
            if detection.label in names[i]
        ]
        coloured = [list(row) for row in detections]
        for first in range(0, len(indices), self.batch):
            part = indices[first : first + self.batch]
            features = clip.images([crop(images[i], detections[i][j]) for i, j in part])  # (N, D)
            for (i, j), feature in zip(part, features, strict=True):
                detection = detections[i][j]
                embeddings = _colour_embeddings(self.clip, self.device, detection.label)
                colour = COLOURS[int((embeddings @ feature).argmax())]  # of (10,) similarities
                coloured[i][j] = replace(detection, colour=colour)
        return coloured


def crop(image: np.ndarray, detection: Detection) -> np.ndarray:
    """The image inside the box; grey outside the mask, if there is one."""
    height, width = image.shape[:2]
    left = max(0, min(round(detection.box[0]), width - 1))
    top = max(0, min(round(detection.box[1]), height - 1))
    right = max(left + 1, min(round(detection.box[2]), width))
    bottom = max(top + 1, min(round(detection.box[3]), height))
    if detection.mask is not None:
        image = np.where(detection.mask[:, :, None], image, np.uint8(GREY))
    return image[top:bottom, left:right]


@networks.once
def _colour_embeddings(clip: str, device: str, thing: str) -> Tensor:
    """(10, D), normalised: the mean text embedding of this object in each colour."""
    import torch

    texts = [t.format(colour=colour, thing=thing) for colour in COLOURS for t in TEMPLATES]
    features = load_clip(clip, clip, device).texts(texts)
    means = features.view(len(COLOURS), len(TEMPLATES), -1).mean(1)
    return torch.nn.functional.normalize(means, dim=-1)

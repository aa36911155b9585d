"""GenEval: does the image have the objects, counts, colours and positions that the row asks for?

The rules of Ghosh et al. 2023 ("GenEval") behind a detector of transformers instead of mmdetection;
the row's columns `tag`, `include` and `exclude` are GenEval's metadata, unchanged.

value = the mean over the clauses, as Flow-GRPO trains on: 1 − |n − n̂|/n for a count (at least 0),
the share with the right colour, 0 or 1 for a position; colour and position count only where the
number is right. Details: "strict" (every clause holds, counts exact) and "correct" (GenEval's own
rule, used in published figures: at least the requested count, judged on the most confident ones,
nothing of `exclude`).

Departures from Flow-GRPO's server: a failed position scores 0 (there a 1 is added to it) and no
value is below 0; every clause always counts, so that the mean's denominator depends on the prompt
only; an object of `exclude` whose count `include` does not imply is a separate clause. From
GenEval: without masks, colours are judged on the whole box. The thresholds are GenEval's, chosen
for a Mask2Former, the default here (it needs scipy); other detectors need others.
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
MARGIN = 0.1  # of both widths (heights), subtracted from the distance of the centres
GREY = 0x99  # of the background behind a mask


class Exclude(Strict):
    model_config = ConfigDict(extra="ignore")  # rows may hold more than the rules need
    thing: str = Field(alias="class", min_length=1)
    count: int = Field(ge=1)

    @model_validator(mode="before")
    @classmethod
    def _named(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or not isinstance(data.get("class"), str):
            raise ValueError(f'expected {{"class": "dog", "count": 2}} or the like, got {data!r}')
        return data


class Include(Exclude):
    color: Colour | None = None
    position: tuple[Relation, int] | None = Field(None, strict=False)  # JSON has lists only


class Metadata(Strict):
    model_config = ConfigDict(extra="ignore")
    tag: str
    include: list[Include] = Field(min_length=1)
    exclude: list[Exclude] | None = None

    @model_validator(mode="after")
    def _possible(self) -> Metadata:
        for n, want in enumerate(self.include):
            if any(same_class(want.thing, earlier.thing) for earlier in self.include[:n]):
                raise ValueError(f'"include" names "{want.thing}" twice; a thing is counted once')
            if want.position and not 0 <= want.position[1] < n:
                raise ValueError(f"include.{n}.position refers to no clause before it")
        return self

    @property
    def names(self) -> list[str]:
        things = [want.thing for want in (*self.include, *(self.exclude or ()))]
        return [
            t for n, t in enumerate(things) if not any(same_class(t, other) for other in things[:n])
        ]

    @property
    def coloured(self) -> set[str]:
        return {want.thing for want in self.include if want.color}


def same_class(thing: str, other: str) -> bool:
    return canonical_name(thing) == canonical_name(other)


def metadata_of(prompt: Prompt) -> Metadata:
    """Raises a UserError that names what is missing."""
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
    seen: str  # for people: "2 of 3 apple"


def clauses(detections: Sequence[Detection], wanted: Metadata, exact: bool = True) -> list[Clause]:
    """The row's requirements, each with a score. `exact=False`: GenEval's original rule."""
    ordered = sorted(detections, key=lambda d: -d.score)
    terms: list[Clause] = []
    groups: list[list[Detection] | None] = []  # detections of each include; None: not as required
    for want in wanted.include:
        things = [d for d in ordered if same_class(d.label, want.thing)]
        things = things if exact else things[: want.count]
        current = [_count(len(things), want)]
        right = len(things) == want.count
        if want.color:
            n = sum(d.colour == want.color for d in things)
            current.append(Clause(n / want.count if right else 0.0, f"{n} {want.color}"))
        if want.position:
            relation, index = want.position
            others = groups[index]
            holds = right and others is not None and _all_related(relation, things, others)
            current.append(Clause(float(holds), relation if holds else f"not {relation}"))
        groups.append(things if all(clause.score == 1 for clause in current) else None)
        terms += current
    for unwanted in wanted.exclude or ():
        if not (exact and _implied(unwanted, wanted)):
            n = sum(same_class(d.label, unwanted.thing) for d in detections)
            terms.append(Clause(float(n < unwanted.count), f"{n} {unwanted.thing}"))
    return terms


def _count(n: int, want: Include) -> Clause:
    score = max(0.0, 1 - abs(want.count - n) / want.count)
    return Clause(score, f"{n} of {want.count} {want.thing}")


def _implied(unwanted: Exclude, wanted: Metadata) -> bool:
    """Whether the exact count of an include implies it."""
    return any(
        same_class(w.thing, unwanted.thing) and w.count < unwanted.count for w in wanted.include
    )


def _all_related(relation: str, things: Sequence[Detection], others: Sequence[Detection]) -> bool:
    return all(relation in relations(a.box, b.box) for a in things for b in others)


def relations(a: Box, b: Box) -> set[str]:
    """Where `a` is as seen from `b`. The offset of the centres, less a tenth of both sizes along
    each axis, must be over half of the whole distance along that axis: both axes may hold."""
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
    """Detections above the threshold, at most the 16 most confident of a class. Of two of a class
    whose intersection over union is `max_overlap` or more only the more confident; 1 keeps all."""
    result: list[Detection] = []
    seen: dict[str, int] = {}
    for one in sorted(detections, key=lambda d: -d.score):
        seen[one.label] = seen.get(one.label, 0) + (one.score > threshold)
        if one.score <= threshold or seen[one.label] > MAX_PER_CLASS:
            continue
        rivals = [d for d in result if d.label == one.label]
        if max_overlap == 1 or all(
            intersection_over_union(one.box, d.box) < max_overlap for d in rivals
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
    detector: str = "facebook/mask2former-swin-small-coco-instance"  # folder or name of the hub
    clip: str = "openai/clip-vit-large-patch14"  # for colours
    threshold: float = Field(0.3, ge=0, le=1)  # of the detector's confidence
    counting_threshold: float = Field(0.9, ge=0, le=1)  # the same where the tag is "counting"
    max_overlap: float = Field(1.0, gt=0, le=1)  # of two objects of a class; 1: any
    strict: bool = False  # the value is 0 or 1: everything right, or not

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
        return f'the detector "{self.detector}" has no label for "{unknown[0]}"; use one that has'

    def _scores(self, samples: Sequence[Sample], detector: Detector) -> list[Score]:
        wanted = [metadata_of(s.prompt) for s in samples]
        images = [s.pixels for s in samples]
        lowest = min(self.threshold, self.counting_threshold)
        raw = detector.detect(images, [w.names for w in wanted], lowest)
        selected = [
            select_detections(detections, self._threshold(want), self.max_overlap)
            for detections, want in zip(raw, wanted, strict=True)
        ]
        coloured = self._with_colours(images, selected, [w.coloured for w in wanted])
        return [self._score_clauses(d, w) for d, w in zip(coloured, wanted, strict=True)]

    def _threshold(self, wanted: Metadata) -> float:
        return self.counting_threshold if wanted.tag == "counting" else self.threshold

    def _score_clauses(self, detections: Sequence[Detection], wanted: Metadata) -> Score:
        terms = clauses(detections, wanted)
        graded = sum(clause.score for clause in terms) / len(terms)
        strict = float(all(clause.score == 1 for clause in terms))
        correct = all(clause.score == 1 for clause in clauses(detections, wanted, exact=False))
        details = {"strict": strict, "correct": float(correct)}
        text = "; ".join(clause.seen for clause in terms)
        return Score(strict if self.strict else graded, details, text)

    def _with_colours(
        self,
        images: Sequence[np.ndarray],
        detections: Sequence[list[Detection]],
        names: Sequence[set[str]],
    ) -> list[list[Detection]]:
        """Fills in the colour of detections with one of these names."""
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
    """The image inside the box; outside the mask, if there is one, it is grey."""
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

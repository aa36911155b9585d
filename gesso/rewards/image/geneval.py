"""GenEval: does the picture hold the things, counts, colours and positions that the row asks for?

The rules of Ghosh et al. 2023 ("GenEval") behind a detector of transformers instead of mmdetection;
the row's columns `tag`, `include` and `exclude` are GenEval's metadata, unchanged.

value = the mean over the clauses, as Flow-GRPO trains on: 1 − |n − n̂|/n for a count (at least 0),
the share with the right colour, 0 or 1 for a position; colour and position count only where the
number is right. Details: "strict" (every clause holds, counts exact) and "correct" (GenEval's own
rule, which published figures follow: at least the number asked for, the most confident ones
looked at, nothing of `exclude`).

Departures from Flow-GRPO's server: a failed position pays 0 (there a 1 is added to it) and no value
is below 0; every clause always counts, so that the mean's denominator is the prompt's; a thing of
`exclude` whose count `include` does not settle is a clause of its own. From GenEval: a detector
without masks has its colours judged on the whole box. The thresholds are GenEval's, chosen for a
Mask2Former, the default here (it needs scipy); other detectors want others.
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
from gesso.rewards.image.networks import Box, Detection
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
MOST = 16  # things of one kind
MARGIN = 0.1  # of both widths (heights): so far apart centres must be to stand beside each other
GREY = 0x99  # of the background behind a mask


class Exclude(Strict):
    model_config = ConfigDict(extra="ignore")  # users' rows say more than the rules need
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
            if any(same(want.thing, earlier.thing) for earlier in self.include[:n]):
                raise ValueError(f'"include" names "{want.thing}" twice; a thing is counted once')
            if want.position and not 0 <= want.position[1] < n:
                raise ValueError(f"include.{n}.position refers to no clause before it")
        return self

    @property
    def names(self) -> list[str]:
        things = [want.thing for want in (*self.include, *(self.exclude or ()))]
        return [t for n, t in enumerate(things) if not any(same(t, other) for other in things[:n])]

    @property
    def coloured(self) -> set[str]:
        return {want.thing for want in self.include if want.color}


def same(thing: str, other: str) -> bool:
    return networks.plain(thing) == networks.plain(other)


def metadata_of(prompt: Prompt) -> Metadata:
    """Raises a UserError that names what is missing."""
    given = {key: value for key, value in prompt.columns.items() if value is not None}
    for key in ("tag", "include"):
        if not given.get(key):
            raise UserError(
                f'no "{key}" in the row; expected GenEval metadata, such as "tag": "counting" '
                'and "include": [{"class": "dog", "count": 2}]'
            )
    return parse(Metadata, given, "GenEval metadata")


@dataclass(frozen=True)
class Clause:
    score: float  # in [0, 1]
    seen: str  # for people: "2 of 3 apple"


def clauses(detections: Sequence[Detection], wanted: Metadata, exact: bool = True) -> list[Clause]:
    """What the row asks for, with a score each. Not `exact`: GenEval's own rule."""
    ordered = sorted(detections, key=lambda d: -d.score)
    terms: list[Clause] = []
    groups: list[list[Detection] | None] = []  # the things of each include; None: not as asked for
    for want in wanted.include:
        things = [d for d in ordered if same(d.label, want.thing)]
        things = things if exact else things[: want.count]
        own = [_count(len(things), want)]
        right = len(things) == want.count
        if want.color:
            n = sum(d.colour == want.color for d in things)
            own.append(Clause(n / want.count if right else 0.0, f"{n} {want.color}"))
        if want.position:
            relation, index = want.position
            others = groups[index]
            holds = right and others is not None and _all(relation, things, others)
            own.append(Clause(float(holds), relation if holds else f"not {relation}"))
        groups.append(things if all(clause.score == 1 for clause in own) else None)
        terms += own
    for unwanted in wanted.exclude or ():
        if not (exact and _settled(unwanted, wanted)):
            n = sum(same(d.label, unwanted.thing) for d in detections)
            terms.append(Clause(float(n < unwanted.count), f"{n} {unwanted.thing}"))
    return terms


def _count(n: int, want: Include) -> Clause:
    score = max(0.0, 1 - abs(want.count - n) / want.count)
    return Clause(score, f"{n} of {want.count} {want.thing}")


def _settled(unwanted: Exclude, wanted: Metadata) -> bool:
    """The exact count of an include already says so."""
    return any(same(w.thing, unwanted.thing) and w.count < unwanted.count for w in wanted.include)


def _all(relation: str, things: Sequence[Detection], others: Sequence[Detection]) -> bool:
    return all(relation in relations(a.box, b.box) for a in things for b in others)


def relations(a: Box, b: Box) -> set[str]:
    """Where `a` is as seen from `b`. The offset of the centres, less a tenth of both sizes along
    each axis, must be over half of the whole distance along that axis: both axes may hold."""
    dx = (a[0] + a[2] - b[0] - b[2]) / 2
    dy = (a[1] + a[3] - b[1] - b[3]) / 2
    distance = math.hypot(dx, dy)
    x = max(0.0, abs(dx) - MARGIN * (a[2] - a[0] + b[2] - b[0]))
    y = max(0.0, abs(dy) - MARGIN * (a[3] - a[1] + b[3] - b[1]))
    found = set()
    if x > distance / 2:
        found.add("left of" if dx < 0 else "right of")
    if y > distance / 2:
        found.add("above" if dy < 0 else "below")
    return found


def kept(
    detections: Sequence[Detection], threshold: float, max_overlap: float = 1.0
) -> list[Detection]:
    """Above the threshold, the 16 most confident of a kind, and of two of a kind that overlap
    (intersection over union) by `max_overlap` or more the more confident; 1 keeps all."""
    result: list[Detection] = []
    seen: dict[str, int] = {}
    for one in sorted(detections, key=lambda d: -d.score):
        seen[one.label] = seen.get(one.label, 0) + (one.score > threshold)
        if one.score <= threshold or seen[one.label] > MOST:
            continue
        rivals = [d for d in result if d.label == one.label]
        if max_overlap == 1 or all(overlap(one.box, d.box) < max_overlap for d in rivals):
            result.append(one)
    return result


def overlap(a: Box, b: Box) -> float:
    """Intersection over union."""
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    both = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1])
    union = both - width * height
    return width * height / union if union > 0 else 0.0


class Geneval(networks.Network):
    detector: str = "facebook/mask2former-swin-small-coco-instance"  # folder or name of the hub
    clip: str = "openai/clip-vit-large-patch14"  # for colours
    threshold: float = Field(0.3, ge=0, le=1)  # of the detector's confidence
    counting_threshold: float = Field(0.9, ge=0, le=1)  # the same where the tag is "counting"
    max_overlap: float = Field(1.0, gt=0, le=1)  # of two things of a kind; 1: any
    strict: bool = False  # the value is 0 or 1: everything right, or not

    def unfit(self, prompt: Prompt) -> str | None:
        try:
            metadata_of(prompt)
        except UserError as error:
            return str(error)
        return None

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        seeing = networks.detector(self.detector, self.device)
        reasons = [self.unfit(s.prompt) or self._unseen(s.prompt, seeing) for s in samples]
        fit = [s for s, reason in zip(samples, reasons, strict=True) if reason is None]
        scored: list[Score] = []
        for first in range(0, len(fit), self.batch):
            scored += self._scores(fit[first : first + self.batch], seeing)
        answers = iter(scored)
        return [Score.failed(reason) if reason else next(answers) for reason in reasons]

    def _unseen(self, prompt: Prompt, seeing: networks.Detector) -> str | None:
        unknown = seeing.unknown(metadata_of(prompt).names)
        if not unknown:
            return None
        return f'the detector "{self.detector}" has no label for "{unknown[0]}"; use one that has'

    def _scores(self, samples: Sequence[Sample], seeing: networks.Detector) -> list[Score]:
        wanted = [metadata_of(s.prompt) for s in samples]
        pictures = [s.picture for s in samples]
        least = min(self.threshold, self.counting_threshold)
        raw = seeing.detect(pictures, [w.names for w in wanted], least)
        found = [
            kept(detections, self._threshold(want), self.max_overlap)
            for detections, want in zip(raw, wanted, strict=True)
        ]
        found = self._coloured(pictures, found, [w.coloured for w in wanted])
        return [self._judged(d, w) for d, w in zip(found, wanted, strict=True)]

    def _threshold(self, wanted: Metadata) -> float:
        return self.counting_threshold if wanted.tag == "counting" else self.threshold

    def _judged(self, detections: Sequence[Detection], wanted: Metadata) -> Score:
        terms = clauses(detections, wanted)
        graded = sum(clause.score for clause in terms) / len(terms)
        strict = float(all(clause.score == 1 for clause in terms))
        correct = all(clause.score == 1 for clause in clauses(detections, wanted, exact=False))
        details = {"strict": strict, "correct": float(correct)}
        text = "; ".join(clause.seen for clause in terms)
        return Score(strict if self.strict else graded, details, text)

    def _coloured(
        self,
        pictures: Sequence[np.ndarray],
        found: Sequence[list[Detection]],
        asked: Sequence[set[str]],
    ) -> list[list[Detection]]:
        """Detections whose colour is asked for, with their colour."""
        if not any(asked):
            return list(found)
        clip = networks.clip(self.clip, self.clip, self.device)
        places = [
            (i, j) for i, row in enumerate(found) for j, d in enumerate(row) if d.label in asked[i]
        ]
        coloured = [list(row) for row in found]
        for first in range(0, len(places), self.batch):
            part = places[first : first + self.batch]
            features = clip.images([crop(pictures[i], found[i][j]) for i, j in part])  # (N, D)
            for (i, j), feature in zip(part, features, strict=True):
                likeness = _palette(self.clip, self.device, found[i][j].label) @ feature  # (10,)
                coloured[i][j] = replace(found[i][j], colour=COLOURS[int(likeness.argmax())])
        return coloured


def crop(picture: np.ndarray, detection: Detection) -> np.ndarray:
    """The part of the picture in the box; what is not in the mask, where there is one, is grey."""
    height, width = picture.shape[:2]
    left = max(0, min(round(detection.box[0]), width - 1))
    top = max(0, min(round(detection.box[1]), height - 1))
    right = max(left + 1, min(round(detection.box[2]), width))
    bottom = max(top + 1, min(round(detection.box[3]), height))
    if detection.mask is not None:
        picture = np.where(detection.mask[:, :, None], picture, np.uint8(GREY))
    return picture[top:bottom, left:right]


@networks.once
def _palette(clip: str, device: str, thing: str) -> Tensor:
    """(10, D) of unit length: what each colour of this thing looks like, over the templates."""
    import torch

    texts = [t.format(colour=colour, thing=thing) for colour in COLOURS for t in TEMPLATES]
    features = networks.clip(clip, clip, device).texts(texts)
    means = features.view(len(COLOURS), len(TEMPLATES), -1).mean(1)
    return torch.nn.functional.normalize(means, dim=-1)

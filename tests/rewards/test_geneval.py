"""GenEval: the rules on hand-written detections, the detectors against plain computations."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from gesso.rewards import assembly, base
from gesso.rewards.image import detectors
from gesso.rewards.image.detectors import Detection, canonical_name
from gesso.rewards.image.geneval import (
    COLOURS,
    Geneval,
    clauses,
    crop,
    intersection_over_union,
    metadata_of,
    relations,
    select_detections,
)
from gesso.types import Prompt, Sample, UserError
from tests.rewards.test_pickscore import (
    END,
    by_hand,
    ids_by_hand,
    noise,
    through_workers,
    tiny_clip,
)
from tests.typed import sure

# GenEval's object_names.txt: COCO's eighty, three of them renamed.
NAMES = """person, bicycle, car, motorcycle, airplane, bus, train, truck, boat, traffic light,
fire hydrant, stop sign, parking meter, bench, bird, cat, dog, horse, sheep, cow, elephant, bear,
zebra, giraffe, backpack, umbrella, handbag, tie, suitcase, frisbee, skis, snowboard, sports ball,
kite, baseball bat, baseball glove, skateboard, surfboard, tennis racket, bottle, wine glass, cup,
fork, knife, spoon, bowl, banana, apple, sandwich, orange, broccoli, carrot, hot dog, pizza, donut,
cake, chair, couch, potted plant, bed, dining table, toilet, tv, laptop, computer mouse, tv remote,
computer keyboard, cell phone, microwave, oven, toaster, sink, refrigerator, book, clock, vase,
scissors, teddy bear, hair drier, toothbrush""".replace("\n", " ").split(", ")
RENAMED = {"computer mouse": "mouse", "tv remote": "remote", "computer keyboard": "keyboard"}
DARKNET = {
    "motorcycle": "motorbike", "airplane": "aeroplane", "couch": "sofa", "tv": "tvmonitor",
    "potted plant": "pottedplant", "dining table": "diningtable",
}  # fmt: skip
LABELS = ["person", "N/A", "tvmonitor", "mouse", "apple", "dog"]


def row(tag: str, *include: dict, exclude: list[dict] | None = None) -> Prompt:
    columns: dict[str, Any] = {"tag": tag, "include": list(include), "prompt": "as GenEval has it"}
    return Prompt("a photo", columns=columns | ({"exclude": exclude} if exclude else {}))


def want(name: str, count: int = 1, **more: Any) -> dict:
    return {"class": name, "count": count, **more}


def seen(label: str, colour: str | None = None, x: float = 0, y: float = 0, score: float = 0.95):
    """A thing of 10 × 10 pixels."""
    return Detection(label, (x, y, x + 10, y + 10), score, colour)


def verdict(prompt: Prompt, *detections: Detection) -> tuple[float, float, float]:
    """(graded, strict, correct)"""
    score = Geneval()._score_clauses(detections, metadata_of(prompt))
    strict = Geneval(strict=True)._score_clauses(detections, metadata_of(prompt))
    assert strict.value == score.parts["strict"]
    assert score.value is not None
    return score.value, score.parts["strict"], score.parts["correct"]


DOG = seen("dog")
ONE_DOG = row("single_object", want("dog"))
DOG_AND_TV = row("two_object", want("dog"), want("tv"))
THREE = row("counting", want("apple", 3), exclude=[want("apple", 4)])
RED = row("colors", want("apple", color="red"))
BESIDE = row("position", want("cat"), want("dog", position=["right of", 0]))
PAIR = row("color_attr", want("apple", color="red"), want("bench", color="green"))
CAT = seen("cat")


@pytest.mark.parametrize(
    "prompt, detections, expected",
    [
        (ONE_DOG, [DOG], (1, 1, 1)),
        (ONE_DOG, [], (0, 0, 0)),
        (ONE_DOG, [seen("cat")], (0, 0, 0)),
        (ONE_DOG, [DOG, seen("dog", x=20)], (0, 0, 1)),  # GenEval accepts more than requested
        (ONE_DOG, [DOG, seen("cat")], (1, 1, 1)),
        (DOG_AND_TV, [DOG, seen("tv")], (1, 1, 1)),
        (DOG_AND_TV, [DOG], (0.5, 0, 0)),
        (DOG_AND_TV, [DOG, DOG, seen("tv")], (0.5, 0, 1)),
        (THREE, [seen("apple")] * 3, (1, 1, 1)),
        (THREE, [seen("apple")] * 2, (2 / 3, 0, 0)),
        (THREE, [seen("apple")] * 4, (2 / 3, 0, 0)),  # the exclude clause
        (THREE, [seen("apple")] * 5, (1 / 3, 0, 0)),
        (THREE, [seen("apple")] * 9, (0, 0, 0)),  # never below 0
        (RED, [seen("apple", "red")], (1, 1, 1)),
        (RED, [seen("apple", "green")], (0.5, 0, 0)),
        (RED, [seen("dog", "red")], (0, 0, 0)),
        (RED, [seen("apple", "red"), seen("apple", "red")], (0, 0, 1)),
        # GenEval considers only the most confident apple
        (RED, [seen("apple", "green", score=0.5), seen("apple", "red")], (0, 0, 1)),
        (RED, [seen("apple", "green"), seen("apple", "red", score=0.5)], (0, 0, 0)),
        (BESIDE, [CAT, seen("dog", x=30)], (1, 1, 1)),
        (BESIDE, [CAT, seen("dog", x=-30)], (2 / 3, 0, 0)),  # a failed position scores 0
        (BESIDE, [CAT, seen("dog", x=3)], (2 / 3, 0, 0)),  # too close
        (BESIDE, [CAT], (1 / 3, 0, 0)),
        (BESIDE, [seen("dog", x=30)], (1 / 3, 0, 0)),  # nothing to be right of
        (BESIDE, [CAT, CAT, seen("dog", x=30)], (1 / 3, 0, 1)),
        (BESIDE, [CAT, seen("dog", x=30), seen("dog", x=60)], (1 / 3, 0, 1)),
        (BESIDE, [], (0, 0, 0)),
        (PAIR, [seen("apple", "red"), seen("bench", "green")], (1, 1, 1)),
        (PAIR, [seen("apple", "green"), seen("bench", "red")], (0.5, 0, 0)),  # swapped
        (PAIR, [seen("apple", "red"), seen("bench", "red")], (0.75, 0, 0)),
        (PAIR, [seen("apple", "red")], (0.5, 0, 0)),
    ],
)
def test_the_rules_by_hand(prompt: Prompt, detections: list, expected: tuple) -> None:
    assert verdict(prompt, *detections) == pytest.approx(expected)
    assert verdict(prompt, *reversed(detections)) == pytest.approx(expected)


def test_a_colour_is_shared_among_several() -> None:
    prompt = row("colors", want("apple", 4, color="red"))
    apples = [seen("apple", colour) for colour in ("red", "red", "red", "green")]
    assert verdict(prompt, *apples) == (pytest.approx((1 + 3 / 4) / 2), 0, 0)
    assert verdict(prompt, *apples[:3]) == (pytest.approx((3 / 4 + 0) / 2), 0, 0)


def test_a_position_relative_to_an_object_of_the_wrong_colour() -> None:
    prompt = row("position", want("cat", color="black"), want("dog", position=["right of", 0]))
    there = seen("dog", x=30)
    assert verdict(prompt, seen("cat", "black"), there) == (1, 1, 1)
    assert verdict(prompt, seen("cat", "white"), there) == (0.5, 0, 0)  # 1, 0, 1, 0


def test_positions_hold_for_all_of_several_objects() -> None:
    prompt = row("position", want("cat", 2), want("dog", 2, position=["below", 0]))
    cats = [seen("cat"), seen("cat", x=15)]
    assert verdict(prompt, *cats, seen("dog", y=40), seen("dog", x=15, y=40)) == (1, 1, 1)
    straggler = seen("dog", x=15, y=-40)
    assert verdict(prompt, *cats, seen("dog", y=40), straggler) == (pytest.approx(2 / 3), 0, 0)


def test_an_excluded_object_is_a_clause() -> None:
    prompt = row("single_object", want("dog"), exclude=[want("cat")])
    assert verdict(prompt, DOG) == (1, 1, 1)
    assert verdict(prompt, DOG, seen("cat")) == (0.5, 0, 0)
    two = row("single_object", want("dog"), exclude=[want("cat", 2)])
    assert verdict(two, DOG, seen("cat")) == (1, 1, 1)
    assert verdict(two, DOG, seen("cat"), seen("cat")) == (0.5, 0, 0)
    # the exact count does not imply this one: two dogs, but fewer than two
    impossible = row("counting", want("dog", 2), exclude=[want("dog", 2)])
    assert verdict(impossible, DOG, DOG) == (0.5, 0, 0)


def test_the_text_of_a_score() -> None:
    apples = [seen("apple", "red"), seen("apple", "green")]
    prompt = row("colors", want("apple", 3, color="red"), exclude=[want("cat")])
    assert (
        Geneval()._score_clauses(apples, metadata_of(prompt)).text == "2 of 3 apple; 1 red; 0 cat"
    )
    text = Geneval()._score_clauses([CAT, seen("dog", x=30)], metadata_of(BESIDE)).text
    assert text == "1 of 1 cat; 1 of 1 dog; right of"


@pytest.mark.parametrize(
    "dx, dy, expected",
    [
        (-30, 0, {"left of"}),
        (30, 0, {"right of"}),
        (0, -30, {"above"}),
        (0, 30, {"below"}),
        (-20, -20, {"left of", "above"}),  # 18 of 28.3 along each axis
        (20, 20, {"right of", "below"}),
        (30, 10, {"right of"}),  # 8 of 31.6 down
        (5, 0, {"right of"}),  # 5 − .1·(10 + 10) = 3 > 2.5; these two overlap by half
        (4, 0, set()),  # 2 is not over 2
        (0, 0, set()),
        (3, 3, set()),  # 1 of 4.2
    ],
)
def test_positions_by_hand(dx: float, dy: float, expected: set) -> None:
    box = (100.0, 100.0, 110.0, 110.0)
    assert relations((100 + dx, 100 + dy, 110 + dx, 110 + dy), box) == expected


def test_large_things_must_be_further_apart() -> None:
    large = (0.0, 0.0, 100.0, 10.0)
    assert relations((10.0, 0.0, 110.0, 10.0), large) == set()  # 10 − .1·200 < 0
    assert relations((50.0, 0.0, 150.0, 10.0), large) == {"right of"}  # 30 > 25
    assert relations((40.0, -8.0, 60.0, 2.0), large) == {"above"}  # inside: 8 − .1·20 > 4


def test_selection_of_detections() -> None:
    crowd = [seen("dog", x=20 * i, score=0.25 + i / 64) for i in range(20)]
    assert [d.score for d in select_detections(crowd, 0.1)] == sorted(
        (d.score for d in crowd), reverse=True
    )[:16]
    assert select_detections(crowd, crowd[-1].score) == []  # above, not at
    twins = [seen("dog", score=0.9), seen("dog", x=1, score=0.8), seen("cat", x=1, score=0.7)]
    assert select_detections(twins, 0.3) == twins
    assert select_detections(twins, 0.3, max_overlap=0.8) == [twins[0], twins[2]]
    assert select_detections(twins, 0.3, max_overlap=0.9) == twins
    assert intersection_over_union(twins[0].box, twins[1].box) == pytest.approx(90 / 110)
    assert intersection_over_union(twins[0].box, (50, 50, 60, 60)) == 0
    assert intersection_over_union((0, 0, 0, 0), (0, 0, 0, 0)) == 0


def test_counting_has_a_separate_threshold() -> None:
    reward = Geneval()
    assert reward._threshold(metadata_of(THREE)) == 0.9
    assert reward._threshold(metadata_of(ONE_DOG)) == 0.3


@pytest.mark.parametrize(
    "columns, sentence",
    [
        ({}, 'no "tag" in the row; expected GenEval metadata'),
        ({"tag": "colors"}, 'no "include" in the row; expected GenEval metadata'),
        ({"tag": "colors", "include": []}, 'no "include" in the row'),
        ({"tag": "x", "include": [{"count": 1}]}, 'include.0: expected e.g. {"class": "dog"'),
        ({"tag": "x", "include": [{"class": "dog"}]}, '"include.0.count" is missing'),
        ({"tag": "x", "include": [want("dog", 0)]}, '"include.0.count" = 0 is not valid'),
        ({"tag": "x", "include": [want("dog", color="grey")]}, "'grey' is not valid"),
        (
            {"tag": "x", "include": [want("dog", position=["above", 0])]},
            "include.0.position must refer to an earlier item of include",
        ),
        (
            {"tag": "x", "include": [want("cat"), want("dog", position=["near", 0])]},
            "expected one of 'left of', 'right of', 'above', 'below'",
        ),
        ({"tag": "x", "include": [want("tv"), want("television")]}, '"television" twice'),
        ({"tag": "x", "include": [want("tv")], "exclude": [{"class": "dog"}]}, "exclude.0.count"),
    ],
)
def test_invalid_rows(columns: dict, sentence: str) -> None:
    reason = Geneval().unfit(Prompt("a dog", columns=columns))
    assert reason is not None and sentence in reason and "\n" not in reason
    with pytest.raises(UserError):
        metadata_of(Prompt("a dog", columns=columns))


def test_rows_of_every_tag_fit_and_a_table_may_have_empty_columns() -> None:
    for prompt in (ONE_DOG, DOG_AND_TV, THREE, RED, BESIDE, PAIR):
        assert Geneval().unfit(prompt) is None
    empty = row("x", want("dog", color=None, position=None))
    assert (
        Geneval().unfit(dataclasses.replace(empty, columns={**empty.columns, "exclude": None}))
        is None
    )


@pytest.mark.parametrize("spelling", [{}, DARKNET])
def test_every_name_of_geneval_is_one_label_of_coco(spelling: dict) -> None:
    assert len(NAMES) == 80
    labels = [spelling.get(name, RENAMED.get(name, name)) for name in NAMES]
    ids = detectors.label_ids(dict(enumerate(labels)))
    assert [ids[canonical_name(name)] for name in NAMES] == [frozenset({i}) for i in range(80)]
    assert (
        canonical_name("TV_Monitor") == canonical_name("tv") and canonical_name("dogs") not in ids
    )


# Detectors of the real classes with random weights, and the same by plain arithmetic.


def save(folder: Path, model: Any, processor: Any) -> Path:
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def tiny_detr(folder: Path) -> Path:
    from transformers import DetrConfig, DetrForObjectDetection, DetrImageProcessorPil, ResNetConfig

    torch.manual_seed(3)
    backbone = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=["stage4"],
    )  # fmt: skip
    config = DetrConfig(
        backbone_config=backbone, use_timm_backbone=False, d_model=16, encoder_layers=1,
        decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16,
        decoder_ffn_dim=16, num_queries=12, init_std=0.5, id2label=dict(enumerate(LABELS)),
    )  # fmt: skip
    model = DetrForObjectDetection(config)
    torch.nn.init.normal_(model.class_labels_classifier.weight, std=0.8)
    torch.nn.init.normal_(model.model.query_position_embeddings.weight, std=2.0)
    size = {"shortest_edge": 64, "longest_edge": 128}
    return save(folder, model, DetrImageProcessorPil(size=size))


def tiny_rtdetr(folder: Path) -> Path:
    from transformers import (
        RTDetrConfig,
        RTDetrForObjectDetection,
        RTDetrImageProcessorPil,
        RTDetrResNetConfig,
    )

    torch.manual_seed(0)
    backbone = RTDetrResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = RTDetrConfig(
        backbone_config=backbone, encoder_hidden_dim=16, encoder_in_channels=[8, 16, 16],
        encoder_layers=1, encoder_ffn_dim=16, encoder_attention_heads=2, d_model=16, num_queries=9,
        decoder_in_channels=[16, 16, 16], decoder_ffn_dim=16, decoder_layers=1, num_denoising=0,
        decoder_attention_heads=2, decoder_n_points=2, initializer_range=0.5,
        id2label=dict(enumerate(LABELS)),
    )  # fmt: skip
    model = RTDetrForObjectDetection(config)
    for head in model.model.decoder.class_embed:
        torch.nn.init.normal_(head.weight, std=0.8)
    return save(folder, model, RTDetrImageProcessorPil(size={"height": 64, "width": 64}))


def tiny_mask2former(folder: Path) -> Path:
    pytest.importorskip("scipy")
    from transformers import (
        Mask2FormerConfig,
        Mask2FormerForUniversalSegmentation,
        Mask2FormerImageProcessorPil,
        SwinConfig,
    )

    torch.manual_seed(0)
    backbone = SwinConfig(
        image_size=32, embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2], window_size=2,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = Mask2FormerConfig(
        backbone_config=backbone, feature_size=32, mask_feature_size=32, hidden_dim=32,
        encoder_feedforward_dim=16, encoder_layers=1, decoder_layers=2, num_attention_heads=2,
        dim_feedforward=16, num_queries=10, id2label=dict(enumerate(LABELS)),
    )  # fmt: skip
    model = Mask2FormerForUniversalSegmentation(config)
    torch.nn.init.normal_(model.class_predictor.weight, std=1.0)
    processor = Mask2FormerImageProcessorPil(size={"height": 64, "width": 64})
    return save(folder, model, processor)


def tiny_owl(folder: Path) -> Path:
    from transformers import CLIPTokenizer, OwlViTConfig, OwlViTForObjectDetection
    from transformers import OwlViTImageProcessorPil as Processor

    tokenizer = CLIPTokenizer.from_pretrained(tiny_clip(folder / "clip"))
    torch.manual_seed(0)
    sides = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    text = {"vocab_size": len(tokenizer), "max_position_embeddings": 77, "eos_token_id": END}
    config = OwlViTConfig(
        text_config={**sides, **text, "num_hidden_layers": 1},
        vision_config={**sides, "num_hidden_layers": 1, "image_size": 32, "patch_size": 8},
        projection_dim=16,
        initializer_factor=3.0,
    )
    tokenizer.save_pretrained(folder)
    size = {"height": 32, "width": 32}
    return save(
        folder, OwlViTForObjectDetection(config), Processor(size=size, do_center_crop=False)
    )


MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def pixels_of(image: np.ndarray, size: tuple[int, int], plain_pixels: bool = False) -> torch.Tensor:
    """(1, 3, H, W): bilinear to (width, height), /255, and ImageNet's mean and std."""
    resized = Image.fromarray(image).resize(size, Image.Resampling.BILINEAR)
    pixels = np.asarray(resized, dtype=np.float64) / 255
    pixels = pixels if plain_pixels else (pixels - MEAN) / STD
    return torch.tensor(pixels.transpose(2, 0, 1)[None], dtype=torch.float32)


def corners(box: torch.Tensor, width: int, height: int) -> tuple[float, ...]:
    x, y, w, h = box.tolist()
    return (x - w / 2) * width, (y - h / 2) * height, (x + w / 2) * width, (y + h / 2) * height


@torch.no_grad()
def detr_by_hand(folder: Path, image: np.ndarray, least: float) -> list[tuple]:
    from transformers import DetrForObjectDetection

    height, width = image.shape[:2]
    size = (64, 64 * height // width) if width < height else (64 * width // height, 64)
    out = DetrForObjectDetection.from_pretrained(folder).eval()(pixels_of(image, size))
    found = []
    for logits, box in zip(out.logits[0], out.pred_boxes[0], strict=True):
        score, label = logits.softmax(-1)[:-1].max(-1)
        if score > least:
            found.append((label.item(), score.item(), corners(box, width, height)))
    return found


@torch.no_grad()
def rtdetr_by_hand(folder: Path, image: np.ndarray, least: float) -> list[tuple]:
    from transformers import RTDetrForObjectDetection

    height, width = image.shape[:2]
    model = RTDetrForObjectDetection.from_pretrained(folder).eval()
    out = model(pixels_of(image, (64, 64), plain_pixels=True))
    scores = out.logits[0].sigmoid()  # (queries, labels)
    best = sorted(((s.item(), i) for i, s in enumerate(scores.flatten())), reverse=True)
    return [
        (i % len(LABELS), score, corners(out.pred_boxes[0, i // len(LABELS)], width, height))
        for score, i in best[: len(scores)]
        if score > least
    ]


@torch.no_grad()
def mask2former_by_hand(folder: Path, image: np.ndarray, least: float) -> list[tuple]:
    from transformers import Mask2FormerForUniversalSegmentation

    height, width = image.shape[:2]
    model = Mask2FormerForUniversalSegmentation.from_pretrained(folder).eval()
    out = model(pixels_of(image, (64, 64)))
    logits = torch.nn.functional.interpolate(
        out.masks_queries_logits, size=(384, 384), mode="bilinear", align_corners=False
    )[0]
    scores = out.class_queries_logits[0].softmax(-1)[:, :-1]
    found = []
    for i in scores.flatten().topk(len(scores)).indices.tolist():
        query, label = divmod(i, len(LABELS))
        inside = logits[query] > 0
        if not inside.any():
            continue
        score = (scores[query, label] * logits[query][inside].sigmoid().mean()).item()
        if score <= least:
            continue
        ys = [int(y * 384 / height) for y in range(height)]
        xs = [int(x * 384 / width) for x in range(width)]
        rows, columns = torch.nonzero(inside[ys][:, xs], as_tuple=True)
        box = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
        found.append((label, score, tuple(float(v) for v in box)))
    return found


KINDS = {
    "detr": (tiny_detr, detr_by_hand, 0.3),
    "rtdetr": (tiny_rtdetr, rtdetr_by_hand, 0.3),
    "mask2former": (tiny_mask2former, mask2former_by_hand, 0.2),
}
QUERIED = ["person", "tv", "computer mouse", "apple", "dog"]
QUERIED_LABEL = {0: "person", 2: "tv", 3: "computer mouse", 4: "apple", 5: "dog"}


@pytest.mark.parametrize("kind", KINDS)
def test_detectors_agree_with_plain_arithmetic(kind: str, tmp_path: Path) -> None:
    make, by_arithmetic, least = KINDS[kind]
    folder = make(tmp_path)
    images = [noise(48, 64, 5), noise(48, 64, 6)]
    detector = detectors.load_detector(str(folder), "cpu")
    assert detector.unknown([*QUERIED, "zebra"]) == ["zebra"]
    together = detector.detect(images, [QUERIED, QUERIED[2:]], least)
    for image, names, got in zip(images, [QUERIED, QUERIED[2:]], together, strict=True):
        wanted = [
            (QUERIED_LABEL[label], score, box)
            for label, score, box in by_arithmetic(folder, image, least)
            if QUERIED_LABEL.get(label) in names
        ]
        wanted.sort(key=lambda one: -one[1])
        got = sorted(got, key=lambda d: -d.score)
        assert wanted and [d.label for d in got] == [label for label, _, _ in wanted]
        assert [d.score for d in got] == pytest.approx([s for _, s, _ in wanted], abs=1e-4)
        tolerance = 0.02 if got[0].mask is None else 1.01  # a pixel at a mask's rim
        for detection, (_, _, box) in zip(got, wanted, strict=True):
            assert detection.box == pytest.approx(box, abs=tolerance)
            if detection.mask is not None:
                assert detection.mask.shape == image.shape[:2] and detection.mask.any()
    assert len({d.label for d in together[0]}) > 1, "the detector returns only one label"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_gives_the_same(kind: str, tmp_path: Path) -> None:
    """Up to TF32 convolutions."""
    make, _, least = KINDS[kind]
    folder = str(make(tmp_path))
    images = [noise(48, 64, 5), noise(48, 64, 6)]
    here, there = (
        [
            d
            for row in detectors.load_detector(folder, name).detect(images, [QUERIED] * 2, 0.0)
            for d in row
        ]
        for name in ("cpu", "auto")
    )
    here, there = ([d for d in row if d.score > least + 0.02] for row in (here, there))
    here, there = (sorted(row, key=lambda d: (d.label, d.box)) for row in (here, there))
    assert [d.label for d in there] == [d.label for d in here]
    assert [d.score for d in there] == pytest.approx([d.score for d in here], abs=0.01)


def test_owl_is_queried_by_name(tmp_path: Path) -> None:
    folder = tiny_owl(tmp_path)
    detector = detectors.load_detector(str(folder), "cpu")
    assert detector.unknown(["a purple unicorn"]) == []
    image, names = noise(48, 64, 5), ["dog", "zebra"]
    (got,) = detector.detect([image], [names], 0.4)
    from transformers import OwlViTForObjectDetection

    resized = Image.fromarray(image).resize((32, 32), Image.Resampling.BICUBIC)
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    pixels = ((np.asarray(resized, dtype=np.float64) / 255 - mean) / std).transpose(2, 0, 1)[None]
    ids = [ids_by_hand(f"a photo of a {name}")[0] for name in names]
    ids = torch.stack([torch.cat([i, i.new_full((77 - len(i),), END)]) for i in ids])
    mask = torch.stack([(torch.arange(77) < len(f"aphotoofa{name}") + 2).long() for name in names])
    with torch.no_grad():
        out = OwlViTForObjectDetection.from_pretrained(folder).eval()(
            input_ids=ids, attention_mask=mask, pixel_values=torch.tensor(pixels).float()
        )
    scores, labels = out.logits[0].sigmoid().max(-1)
    above = scores > 0.4
    assert {d.label for d in got} == set(names)
    assert [names.index(d.label) for d in got] == labels[above].tolist()
    assert [d.score for d in got] == pytest.approx(scores[above].tolist(), abs=1e-4)
    wanted = [corners(box, 64, 48) for box in out.pred_boxes[0][above]]
    assert np.array([d.box for d in got]) == pytest.approx(np.array(wanted), abs=0.02)


def test_owlv2_measures_boxes_by_the_longer_side(tmp_path: Path) -> None:
    pytest.importorskip("scipy")
    from transformers import Owlv2Config, Owlv2ForObjectDetection, Owlv2ImageProcessorPil

    folder = tiny_owl(tmp_path)
    config = Owlv2Config.from_pretrained(folder)
    processor = Owlv2ImageProcessorPil(size={"height": 32, "width": 32})
    save(folder, Owlv2ForObjectDetection(config), processor)
    detector = sure(detectors.OpenVocabularyDetector, detectors.load_detector(str(folder), "cpu"))
    image = noise(48, 64, 5)
    (got,) = detector.detect([image], [["dog", "zebra"]], 0.0)
    pixels = detector.processor(images=[Image.fromarray(image)], return_tensors="pt")
    ids = [ids_by_hand(f"a photo of a {name}")[0] for name in ("dog", "zebra")]
    ids = torch.stack([torch.cat([i, i.new_full((77 - len(i),), END)]) for i in ids])
    with torch.no_grad():
        out = detector.model(input_ids=ids, pixel_values=pixels["pixel_values"])
    above = out.logits[0].sigmoid().max(-1).values > 0
    wanted = [corners(box, 64, 64) for box in out.pred_boxes[0][above]]
    assert np.array([d.box for d in got]) == pytest.approx(np.array(wanted), abs=0.02)


def test_a_detector_that_requires_scipy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mask2former"}', encoding="utf-8")
    monkeypatch.setattr(detectors.importlib.util, "find_spec", lambda name, package=None: None)
    with pytest.raises(UserError, match="requires scipy: pip install scipy"):
        detectors.load_detector(str(tmp_path), "cpu")


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_clip(tmp_path_factory.mktemp("colours"))


@torch.no_grad()
def colour_by_hand(folder: Path, part: np.ndarray, thing: str) -> str:
    from transformers import CLIPModel

    model = CLIPModel.from_pretrained(folder).eval()
    likeness = []
    for colour in COLOURS:
        texts = (
            f"a photo of a {colour} {thing}",
            f"a photo of a {colour}-colored {thing}",
            f"a photo of a {colour} object",
        )
        outs = [
            model(input_ids=ids_by_hand(t), pixel_values=by_hand(part)[None], return_loss=False)
            for t in texts
        ]
        mean = sum(o.text_embeds[0] for o in outs)
        likeness.append((mean / mean.norm() @ outs[0].image_embeds[0]).item())
    return COLOURS[int(np.argmax(likeness))]


@pytest.mark.parametrize("kind", ["detr", "mask2former"])
def test_scores_end_to_end(kind: str, tmp_path: Path, clip_folder: Path) -> None:
    make, by_arithmetic, least = KINDS[kind]
    folder = make(tmp_path)
    options = {"detector": str(folder), "clip": str(clip_folder), "threshold": least}
    options |= {"batch": 2, "device": "cpu"}
    things = [want(name, 1, color="red") for name in ("tv", "computer mouse", "apple", "dog")]
    samples = [
        Sample(row("color_attr", *things), noise(48, 64, 5), 0),
        Sample(row("single_object", want("zebra")), noise(48, 64, 5), 0),
        Sample(row("two_object", want("dog", 2), want("person")), noise(48, 64, 6), 0),
        Sample(Prompt("a dog"), noise(48, 64, 6), 0),
        Sample(row("counting", want("dog", 2)), noise(48, 64, 5), 0),
    ]
    scores = base.checked(base.load(assembly.REWARDS["geneval"], options), samples)
    assert scores[1].error == (
        f'detector "{folder}" has no label for "zebra"; use another detector'
    )
    assert scores[3].error is not None and scores[3].error.startswith('no "tag" in the row')
    detector = detectors.load_detector(str(folder), "cpu")
    for i in (0, 2, 4):
        image, wanted = samples[i].pixels, metadata_of(samples[i].prompt)
        threshold = 0.9 if i == 4 else least
        found = [
            Detection(QUERIED_LABEL[label], box, score)
            for label, score, box in by_arithmetic(folder, image, threshold)
            if label in QUERIED_LABEL
        ]
        masks = {
            (d.label, round(d.score, 3)): d.mask
            for d in detector.detect([image], [QUERIED], least)[0]
        }
        if i == 0:
            assert found
            found = [
                dataclasses.replace(
                    d,
                    colour=colour_by_hand(
                        clip_folder,
                        crop(image, dataclasses.replace(d, mask=masks[d.label, round(d.score, 3)])),
                        d.label,
                    ),
                )
                for d in found
            ]
        terms = clauses(found, wanted)
        assert scores[i].text == "; ".join(term.description for term in terms)
        assert scores[i].value == pytest.approx(sum(t.score for t in terms) / len(terms))
        assert scores[i].parts.keys() == {"strict", "correct"}


def test_colours_by_clip_over_the_templates(clip_folder: Path) -> None:
    reward = Geneval(clip=str(clip_folder), batch=2, device="cpu")
    images = [noise(48, 64, i) for i in range(4)]
    found = [[Detection("apple", (5.4, 3, 40.6, 41), 0.9), seen("dog")] for _ in images]
    got = reward._with_colours(images, found, [{"apple"}, {"apple"}, set(), {"apple", "dog"}])
    for i in (0, 1, 3):
        assert got[i][0].colour == colour_by_hand(clip_folder, images[i][3:41, 5:41], "apple")
    assert got[3][1].colour == colour_by_hand(clip_folder, images[3][:10, :10], "dog")
    assert got[2] == found[2] and got[0][1].colour is None


def test_crops_for_colours() -> None:
    image = noise(20, 30, 0)
    box = (4.0, 5.0, 9.0, 8.0)
    assert (crop(image, Detection("dog", box, 1.0)) == image[5:8, 4:9]).all()
    mask: np.ndarray = np.zeros((20, 30), dtype=bool)
    mask[6, 5] = True
    masked = crop(image, Detection("dog", box, 1.0, mask=mask))
    assert (masked[1, 1] == image[6, 5]).all() and (masked[0] == 0x99).all()
    # outside the image, and thinner than a pixel
    assert crop(image, Detection("dog", (-3.0, -2.0, 50.0, 40.0), 1.0)).shape == (20, 30, 3)
    assert crop(image, Detection("dog", (29.9, 19.9, 30.0, 20.0), 1.0)).shape == (1, 1, 3)


def test_in_a_worker_process(tmp_path: Path, clip_folder: Path) -> None:
    options = {"detector": str(tiny_detr(tmp_path)), "clip": str(clip_folder), "threshold": 0.3}
    samples = [Sample(RED, noise(48, 64, i), i) for i in range(3)]
    scores = through_workers(assembly.REWARDS["geneval"], options, samples)
    here = base.checked(base.load(assembly.REWARDS["geneval"], options), samples)
    assert [s.value for s in scores] == [s.value for s in here]
    assert scores[0].parts.keys() == {"mine", "mine/strict", "mine/correct"}


def test_missing_models_and_other_kinds(clip_folder: Path, tmp_path: Path) -> None:
    def error_of(**options: Any) -> str:
        reward = base.load(assembly.REWARDS["geneval"], options)
        error = base.checked(reward, [Sample(RED, noise(32, 32, 0), 0)])[0].error
        assert error is not None and "\n" not in error
        return error

    assert error_of(detector="/no/such").endswith('from "/no/such": no such folder')
    assert "is a clip, which is not a supported detector" in error_of(detector=str(clip_folder))
    folder = str(tiny_detr(tmp_path))
    assert "CLIPModel cannot be loaded from" in error_of(detector=folder, clip="/no/such")

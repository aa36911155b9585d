"""Measures how well a model counts, with plain `generate`."""

import base64
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from tools.zoo.build_shapes import MERGE, Vlm, load_vlm, prompt_for
from tools.zoo.render_shapes import QUESTIONS
from tools.zoo.wording import answer_in, style_of

Row = dict[str, Any]


class Scores(NamedTuple):
    accuracy: float  # share of responses with the correct count in <answer>
    styles: dict[str, float]  # style → share of responses


def read_rows(split: str) -> list[Row]:
    """The rows of "train" or "eval"."""
    lines = (QUESTIONS / f"{split}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def question_of(row: Row) -> str:
    return row["problem"].removeprefix("<image>")


def image_of(row: Row) -> Any:
    """The row's image, decoded by PIL."""
    from PIL import Image

    return Image.open(io.BytesIO(base64.b64decode(row["images"][0].split(",")[1]))).convert("RGB")


def inputs_for(vlm: Vlm, rows: list[Row]) -> dict[str, Any]:
    """Inputs of `forward` and `generate`, one prompt per row, left-padded.

    Without `mm_token_type_ids` transformers silently ignores the positions of the image tokens.
    """
    images = vlm.image_processor([image_of(row) for row in rows], return_tensors="pt")
    texts = [
        prompt_for(vlm.tokenizer, question_of(row), int(grid.prod()) // MERGE**2)
        for row, grid in zip(rows, images["image_grid_thw"], strict=True)
    ]
    inputs = {
        **vlm.tokenizer(texts, padding=True, padding_side="left", return_tensors="pt"),
        **images,
    }
    inputs["mm_token_type_ids"] = (inputs["input_ids"] == vlm.model.config.image_token_id).int()
    return {name: value.to(vlm.model.device) for name, value in inputs.items()}


def ask(vlm: Vlm, rows: list[Row], temperature: float, seed: int = 0) -> list[str]:
    """One response per row; temperature 0 is greedy."""
    import torch

    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
    inputs = inputs_for(vlm, rows)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tokens = vlm.model.generate(**inputs, max_new_tokens=24, **{"do_sample": False, **sampling})
    responses = tokens[:, inputs["input_ids"].shape[1] :]
    return vlm.tokenizer.batch_decode(responses, skip_special_tokens=True)


def score(rows: list[Row], responses: list[str]) -> Scores:
    pairs = zip(rows, responses, strict=True)
    correct = sum(answer_in(response) == row["answer"] for row, response in pairs)
    styles = Counter(map(style_of, responses))
    shares = {style: round(number / len(rows), 3) for style, number in styles.most_common()}
    return Scores(round(correct / len(rows), 4), shares)


def sheet(rows: list[Row], columns: int = 6, zoom: int = 2) -> Any:
    """The images of the rows in a grid, as a PIL image."""
    from PIL import Image

    images = [image_of(row) for row in rows]
    width, height = (zoom * side + 4 for side in images[0].size)
    page = Image.new("RGB", (width * columns, height * -(-len(rows) // columns)), "white")
    for i, image in enumerate(images):
        larger = image.resize((width - 4, height - 4), Image.Resampling.NEAREST)
        page.paste(larger, (i % columns * width + 2, i // columns * height + 2))
    return page


def main() -> None:
    """`python -m tools.zoo.evaluate_shapes FOLDER --rows 400 --temperature 0`"""
    import argparse

    parser = argparse.ArgumentParser(description="Measure how well a model counts shapes.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=400, help="of gesso/zoo/questions/eval.jsonl")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--show", type=int, default=0, help="number of responses to print")
    parser.add_argument("--sheet", type=Path, help="save the images of those responses here")
    args = parser.parse_args()
    rows = read_rows("eval")[: args.rows]
    responses = ask(load_vlm(args.folder), rows, args.temperature)
    for row, response in list(zip(rows, responses, strict=True))[: args.show]:
        print(question_of(row), row["answer"], "|", response)
    print(score(rows, responses))
    if args.sheet:
        sheet(rows[: args.show]).save(args.sheet)


if __name__ == "__main__":
    main()

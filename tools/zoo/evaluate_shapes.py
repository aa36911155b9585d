"""How well a folder's model counts, by plain `generate`."""

import base64
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from tools.zoo.build_shapes import MERGE, Seer, load_seer, prompt_for
from tools.zoo.wording import answer_in, style_of

QUESTIONS = Path(__file__).parent / "questions"
Row = dict[str, Any]


class Scores(NamedTuple):
    accuracy: float  # share of replies whose <answer> is the count
    styles: dict[str, float]  # share of replies of each style


def read_rows(split: str) -> list[Row]:
    """The rows of "train" or "eval"."""
    lines = (QUESTIONS / f"{split}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def question_of(row: Row) -> str:
    return row["problem"].removeprefix("<image>")


def picture_of(row: Row) -> Any:
    """The row's picture, a PIL image."""
    from PIL import Image

    return Image.open(io.BytesIO(base64.b64decode(row["images"][0].split(",")[1]))).convert("RGB")


def inputs_for(seer: Seer, rows: list[Row]) -> dict[str, Any]:
    """What `forward` and `generate` take, one prompt a row, padded on the left.

    Without `mm_token_type_ids` transformers drops the places of the picture's tokens silently.
    """
    pictures = seer.images([picture_of(row) for row in rows], return_tensors="pt")
    texts = [
        prompt_for(seer.tokenizer, question_of(row), int(grid.prod()) // MERGE**2)
        for row, grid in zip(rows, pictures["image_grid_thw"], strict=True)
    ]
    inputs = {
        **seer.tokenizer(texts, padding=True, padding_side="left", return_tensors="pt"),
        **pictures,
    }
    inputs["mm_token_type_ids"] = (inputs["input_ids"] == seer.model.config.image_token_id).int()
    return {name: value.to(seer.model.device) for name, value in inputs.items()}


def ask(seer: Seer, rows: list[Row], temperature: float, seed: int = 0) -> list[str]:
    """A reply to each row; temperature 0 is greedy."""
    import torch

    how = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
    inputs = inputs_for(seer, rows)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tokens = seer.model.generate(**inputs, max_new_tokens=24, **{"do_sample": False, **how})
    replies = tokens[:, inputs["input_ids"].shape[1] :]
    return seer.tokenizer.batch_decode(replies, skip_special_tokens=True)


def score(rows: list[Row], replies: list[str]) -> Scores:
    pairs = zip(rows, replies, strict=True)
    right = sum(answer_in(reply) == row["answer"] for row, reply in pairs)
    styles = Counter(map(style_of, replies))
    shares = {style: round(number / len(rows), 3) for style, number in styles.most_common()}
    return Scores(round(right / len(rows), 4), shares)


def sheet(rows: list[Row], columns: int = 6, zoom: int = 2) -> Any:
    """The rows' pictures side by side, a PIL image."""
    from PIL import Image

    pictures = [picture_of(row) for row in rows]
    width, height = (zoom * side + 4 for side in pictures[0].size)
    page = Image.new("RGB", (width * columns, height * -(-len(rows) // columns)), "white")
    for i, picture in enumerate(pictures):
        larger = picture.resize((width - 4, height - 4), Image.Resampling.NEAREST)
        page.paste(larger, (i % columns * width + 2, i // columns * height + 2))
    return page


def main() -> None:
    """`python -m tools.zoo.evaluate_shapes FOLDER --rows 400 --temperature 0`"""
    import argparse

    parser = argparse.ArgumentParser(description="How well a folder's model counts shapes.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=400, help="of gesso/zoo/questions/eval.jsonl")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--show", type=int, default=0, help="print this many replies")
    parser.add_argument("--sheet", type=Path, help="save the pictures of those replies here")
    args = parser.parse_args()
    rows = read_rows("eval")[: args.rows]
    replies = ask(load_seer(args.folder), rows, args.temperature)
    for row, reply in list(zip(rows, replies, strict=True))[: args.show]:
        print(question_of(row), row["answer"], "|", reply)
    print(score(rows, replies))
    if args.sheet:
        sheet(rows[: args.show]).save(args.sheet)


if __name__ == "__main__":
    main()

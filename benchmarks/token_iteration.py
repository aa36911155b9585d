"""Compares one GRPO iteration with LoRA on a vision-language model: 64 prompts with an image (of 7b
32), 8 responses each of 256 tokens. benchmarks/README.md explains the output.

    python benchmarks/token_iteration.py [--model 3b] [--out FOLDER] [--name token]  # Qwen2.5-VL
    python benchmarks/token_iteration.py --tiny  # the same code on a CPU, in a minute

Weights are random, so all responses are forced to the same length. (a) is transformers' `generate`
with its default cache on a PEFT model, and a padded update that computes all logits of a
micro-batch, as TRL does; (b) `generate` with a static cache, compiled, without adapters; ours is
Gesso.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from gesso import config
from gesso.algorithms.grpo import GRPO
from gesso.learner.learner import Learner
from gesso.models.tokens import head
from gesso.models.tokens.feature_cache import FeatureCache
from gesso.models.tokens.vision_language import VisionLanguage
from gesso.rollout import Rollout
from gesso.samplers import decode
from gesso.samplers.base import Piece
from gesso.samplers.decode import DecodingSampler
from gesso.traces.pieces import widened
from gesso.traces.tokens import TokenTrace
from gesso.types import Prompt, PromptImage, ResponseSpec, Score

ZOO = Path(__file__).parents[1] / "gesso" / "zoo" / "shapes"
BANDWIDTH = 4.8e12  # bytes/s of an H200, according to NVIDIA
GAP = {torch.float32: 1e-5, torch.bfloat16: 0.05}  # mean |Δ log-prob| between sampler and learner
TEXTS = {
    "3b": dict(
        hidden_size=2048, num_hidden_layers=36, num_attention_heads=16, num_key_value_heads=2,
        intermediate_size=11008, max_position_embeddings=32768, vocab_size=151936,
        tie_word_embeddings=True,
    ),
    "7b": dict(
        hidden_size=3584, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
        intermediate_size=18944, max_position_embeddings=32768, vocab_size=152064,
        tie_word_embeddings=False,
    ),
}  # fmt: skip
SEES = dict(
    depth=32, hidden_size=1280, num_heads=16, intermediate_size=3420,
    patch_size=14, window_size=112, fullatt_block_indexes=[7, 15, 23, 31],
)  # fmt: skip


@dataclass
class Size:
    prompts: int
    group: int
    tokens: int
    pixels: int  # height and width of an image
    batches: list[int]  # batch sizes of our sampler
    micro_tokens: int
    padded: int  # responses per micro-batch of (a)

    @property
    def rows(self) -> list[int]:
        return [i for i in range(self.prompts) for _ in range(self.group)]


FULL = {
    "3b": Size(64, 8, 256, 448, [64, 512], 16384, 8),
    "7b": Size(32, 8, 256, 448, [64, 256], 16384, 4),
}
TINY = Size(4, 2, 8, 64, [4, 8], 512, 4)


@dataclass
class Bench:
    folder: Path
    size: Size
    device: torch.device
    dtype: torch.dtype
    figures: dict[str, Any] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)

    def say(self, *words: Any) -> None:
        print(f"[{time.perf_counter() - self.started:6.1f} s]", *words, flush=True)

    def timed(self, work: Callable[[], Any]) -> tuple[float, Any]:
        self.sync()
        before = time.perf_counter()
        result = work()
        self.sync()
        return time.perf_counter() - before, result

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def fresh(self, keep: bool = False) -> None:
        """`keep`: the allocator keeps its memory, as between the steps of a run. To allocate 70 GB
        again takes half a second."""
        gc.collect()
        if self.device.type == "cuda":
            if not keep:
                torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    @property
    def peak_gb(self) -> float:
        return torch.cuda.max_memory_allocated() / 1e9 if self.device.type == "cuda" else 0.0


# The model and its prompts


def make_model(name: str, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
    """Qwen2.5-VL's shape with random weights, and the bundled model's tokenizer and template."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    fields = json.loads((ZOO / "config.json").read_text())
    text = fields["text_config"] | TEXTS[name] | {"max_window_layers": 36}
    sees = SEES | {"out_hidden_size": text["hidden_size"]}
    fields["tie_word_embeddings"] = text["tie_word_embeddings"]
    text["rope_parameters"] |= {"mrope_section": [16, 24, 24], "rope_theta": 1e6}
    text.pop("layer_types")
    fields |= {"text_config": text, "vision_config": fields["vision_config"] | sees}
    left_out = ("architectures", "dtype", "transformers_version")
    model_config = Qwen2_5_VLConfig(**{k: v for k, v in fields.items() if k not in left_out})
    torch.set_default_dtype(dtype)
    with device:
        model = Qwen2_5_VLForConditionalGeneration(model_config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder, max_shard_size="20GB")
    for file in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ZOO / file, folder)
    shutil.copy(ZOO / "generation_config.json", folder)
    processor = json.loads((ZOO / "preprocessor_config.json").read_text())
    edges = {"longest_edge": FULL[name].pixels ** 2, "shortest_edge": 56 * 56}
    processor |= {"patch_size": 14, "size": edges}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


def prompts(size: Size) -> list[Prompt]:
    import numpy as np
    from PIL import Image

    result = []
    for i in range(size.prompts):
        noise = np.random.default_rng(i).integers(0, 256, (size.pixels, size.pixels, 3), np.uint8)
        file = io.BytesIO()
        Image.fromarray(noise).save(file, "PNG")
        result.append(
            Prompt(f"how many shapes? {i:03d}", images=(PromptImage(data=file.getvalue()),))
        )
    return result


def ours(bench: Bench, **more: Any) -> VisionLanguage:
    """With adapters that have an effect, no suppressed ids, and responses that do not end early."""
    name: Any = str(bench.dtype).removeprefix("torch.")
    lora = config.Lora(rank=32, alpha=64)
    settings = config.TokenModel(
        path=str(bench.folder), dtype=name, device=bench.device.type, lora=lora, **more
    )
    model = VisionLanguage(settings, 0)
    generator = torch.Generator(model.device).manual_seed(0)
    for key, p in model.policy.trainable.items():
        if "lora_B" in key:
            p.data.normal_(std=2e-3, generator=generator)
    model.suppressed = model.suppressed[:0]
    model.end = frozenset()
    return model


def theirs(bench: Bench, adapters: dict[str, Tensor] | None) -> Any:
    """Plain transformers, with PEFT adapters if given."""
    from peft import LoraConfig
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(
        bench.folder, dtype=bench.dtype, attn_implementation="sdpa"
    ).to(bench.device)
    model.requires_grad_(False)
    if adapters is not None:
        targets = sorted({name.split(".lora_")[0] for name in adapters})
        model.add_adapter(LoraConfig(r=32, lora_alpha=64, target_modules=targets))
        parameters = dict(model.named_parameters())
        for name, tensor in adapters.items():
            parameters[name].data = tensor.clone().float()
            parameters[name].requires_grad_(True)
    return model.eval()


# Parts


def compiled() -> int:
    """Number of graphs that torch.compile has built so far."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def ceilings(bench: Bench) -> None:
    """FLOP/s of one large matrix multiplication on this device."""
    n = 8192 if bench.device.type == "cuda" else 256
    a, b = (torch.randn(n, n, device=bench.device, dtype=bench.dtype) for _ in "ab")
    for _ in range(3):
        a @ b
    seconds, _ = bench.timed(lambda: [a @ b for _ in range(10)])
    bench.figures["peak_tflops"] = 10 * 2 * n**3 / seconds / 1e12
    bench.say(f"matrix peak {bench.figures['peak_tflops']:.0f} TFLOP/s")


def sample_ours(bench: Bench, model: VisionLanguage) -> list[Piece[TokenTrace]]:
    size, batch_prompts = bench.size, prompts(bench.size)
    numbers = sum(p.numel() for p in model.decoder.parameters())
    numbers -= sum(p.numel() for p in model.policy.trainable.values())  # are folded
    weights = numbers * bench.dtype.itemsize
    pieces: list[Piece[TokenTrace]] = []
    for batch in size.batches:
        bench.fresh()
        sampler = DecodingSampler(model, batch)
        count = max(batch, size.prompts)
        rows = size.rows[:: len(size.rows) // count] if count < len(size.rows) else size.rows
        seeds = list(range(len(rows)))

        def call(tokens: int, sampler: Any = sampler, rows: Any = rows, seeds: Any = seeds) -> Any:
            return list(sampler.sample(batch_prompts, rows, seeds, ResponseSpec(tokens)))

        first, _ = bench.timed(lambda: call(4))
        graphs = compiled()
        step = seconds_a_step(bench, lambda: call(size.tokens))
        model.feature_cache = FeatureCache()  # images are new in every iteration
        seconds, pieces = bench.timed(lambda: call(size.tokens))
        bench.figures[f"ours_{batch}"] = {
            "tokens_per_s": len(rows) * size.tokens / seconds,
            "decode_tokens_per_s": batch / step,
            "ms_a_step": step * 1e3,
            "share_of_bandwidth_bound": weights / BANDWIDTH / step,
            "share_with_past": (weights + past_bytes(bench, model, batch)) / BANDWIDTH / step,
            "seconds": seconds,
            "first_call_s": first,
            "compiled_later": compiled() - graphs,
            "peak_gb": bench.peak_gb,
        }
        bench.say(f"ours, {batch} slots:", bench.figures[f"ours_{batch}"])
    return pieces


def seconds_a_step(bench: Bench, call: Callable[[], Any]) -> float:
    """Of the decoding steps of a call, without the first and the last eighth. What is done before
    and after the steps varies by tens of milliseconds."""
    on_gpu = bench.device.type == "cuda"
    kind = decode._FixedShapeDecoding if on_gpu else decode._Decoding
    plain, marks = kind._step, list[Any]()

    def step(decoding: Any) -> None:
        plain(decoding)
        marks.append(torch.cuda.Event(enable_timing=True) if on_gpu else time.perf_counter())
        if on_gpu:
            marks[-1].record()

    with patch.object(kind, "_step", step):
        call()
    bench.sync()
    first, last = marks[len(marks) // 8], marks[-1 - len(marks) // 8]
    steps = len(marks) - 1 - len(marks) // 8 * 2
    return (first.elapsed_time(last) / 1e3 if on_gpu else last - first) / steps


def past_bytes(bench: Bench, model: VisionLanguage, batch: int) -> float:
    """Keys and values that a decoding step reads, on average over the timed steps."""
    decoder, width = model.decoder.config, model.decoder.layers[0].self_attn.head_dim
    token = 2 * decoder.num_hidden_layers * decoder.num_key_value_heads * width
    past = len(model.encode(prompts(bench.size)[0])) + bench.size.tokens / 2
    return batch * past * token * bench.dtype.itemsize


def inputs_of(bench: Bench, model: VisionLanguage, rows: list[int]) -> dict[str, Tensor]:
    """Inputs of transformers, one row per response; all prompts have the same length."""
    encoded = [model.encode(p) for p in prompts(bench.size)]
    batch = {
        "input_ids": torch.stack([encoded[r].ids for r in rows]),
        "mm_token_type_ids": torch.stack([encoded[r].kinds for r in rows]),
        "pixel_values": torch.cat([encoded[r].pixels for r in rows]),
        "image_grid_thw": torch.cat([encoded[r].grid for r in rows]),
    }
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    return {key: value.to(bench.device) for key, value in batch.items()}


def sample_theirs(
    bench: Bench,
    name: str,
    plain: Any,
    model: VisionLanguage,
    rows: list[int],
    few: int,
    **how: Any,
) -> None:
    """Times `few` tokens and extrapolates to all of them. The early steps have a short cache, so
    this favours `generate`."""
    bench.fresh()
    n, few = len(rows), min(few, bench.size.tokens // 2)
    inputs = inputs_of(bench, model, rows)

    @torch.no_grad()
    def call(tokens: int) -> Any:
        return plain.generate(
            **inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=True, top_k=0,
            pad_token_id=0, **how,
        )  # fmt: skip

    first, _ = bench.timed(lambda: call(few if how else 1))
    short, _ = bench.timed(lambda: call(2))
    long, _ = bench.timed(lambda: call(few))
    step = (long - short) / (few - 2)
    whole = long + step * (bench.size.tokens - few)
    bench.figures[f"{name}_{n}"] = {
        "tokens_per_s": n * bench.size.tokens / whole,
        "decode_tokens_per_s": n / step,
        "ms_a_step": step * 1e3,
        "seconds": whole,
        "measured_tokens": few,
        "first_call_s": first,
        "peak_gb": bench.peak_gb,
    }
    bench.say(f"{name}, {n} at once:", bench.figures[f"{name}_{n}"])


def rollout_of(bench: Bench, pieces: list[Piece[TokenTrace]]) -> Rollout:
    index = torch.tensor([i for piece in pieces for i in piece.index])
    order = index.argsort()
    samples = [s for piece in pieces for s in piece.samples]
    trace = TokenTrace.concat([piece.trace for piece in pieces]).rows(order)
    logp = widened([piece.logp for piece in pieces])[order]
    luck = torch.rand(len(order), generator=torch.Generator().manual_seed(0)).tolist()
    scores = [Score(value, {"luck": value}) for value in luck]
    picked = [samples[i] for i in order.tolist()]
    return Rollout(picked, trace.row, trace, logp, 0, scores, {"luck": 1.0})


def flops(bench: Bench, model: VisionLanguage, rollout: Rollout) -> float:
    """The necessary FLOPs of the update: forward, and gradients of activations and adapters, not of
    frozen weights; prompts once per group. Attention and the vision tower are not counted."""
    linear = [p for n, p in model.decoder.layers.named_parameters() if n.endswith("weight")]
    adapters = sum(p.numel() for p in model.policy.trainable.values())
    layers = sum(p.numel() for p in linear if p.ndim == 2) - adapters
    response_tokens = int(rollout.mask.sum())
    prompt_tokens = sum(len(p) for p in rollout.token_trace.prompts)
    passed = prompt_tokens + response_tokens - len(rollout.samples)
    vocabulary = len(model.allowed) * model.decoder.config.hidden_size
    return 4 * layers * passed + 6 * adapters * passed + 4 * vocabulary * response_tokens


def update_ours(bench: Bench, model: VisionLanguage, rollout: Rollout) -> None:
    algorithm = GRPO(group=bench.size.group, max_tokens=bench.size.tokens)
    settings = config.Learner(micro_tokens=bench.size.micro_tokens)
    learner = Learner(model, algorithm, config.Optimizer(lr=0.0), settings, 0)
    rows: list[int] = []
    hook = model.module.get_output_embeddings().register_forward_hook(
        lambda _, __, out: rows.append(out.shape[0])
    )
    first, metrics = bench.timed(lambda: learner.update(rollout, 0).metrics)
    graphs = compiled()
    bench.fresh(keep=True)
    again, _ = bench.timed(lambda: learner.update(rollout, 1).metrics)
    hook.remove()
    assert max(rows) * len(model.allowed) <= head.LOGITS, "more than head.LOGITS at a time"
    needed = flops(bench, model, rollout)
    rate = needed / again / 1e12
    bench.figures["update_ours"] = {
        "seconds": again,
        "first_s": first,
        "tflops": rate,
        "share_of_peak": rate / bench.figures["peak_tflops"],
        "peak_gb": bench.peak_gb,
        "compiled_later": compiled() - graphs,
        "logits_at_a_time_mb": max(rows) * len(model.allowed) * 4 / 1e6,
        "first_abs_dlogp_max": metrics["update/first_abs_dlogp_max"],
        "abs_dlogp": metrics["update/abs_dlogp"],
    }
    bench.say("update, ours:", bench.figures["update_ours"])


def padded_logp(plain: Any, inputs: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """(n, S), from all logits, as in TRL."""
    n, length = tokens.shape
    more = {
        "input_ids": torch.cat([inputs["input_ids"], tokens], 1),
        "mm_token_type_ids": torch.cat([inputs["mm_token_type_ids"], torch.zeros_like(tokens)], 1),
        "attention_mask": torch.ones(n, length + inputs["input_ids"].shape[1]).to(tokens),
    }
    logits = plain(**(inputs | more), logits_to_keep=length + 1, use_cache=False).logits[:, :-1]
    return logits.float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


def update_theirs(bench: Bench, model: VisionLanguage, plain: Any, rollout: Rollout) -> None:
    """Two micro-batches warm up, three are timed; the total is extrapolated from these."""
    bench.fresh()
    n = bench.size.padded
    times, gaps = [], []
    for k in range(5):
        rows = rollout.trace.row.tolist()[k % 2 * n : k % 2 * n + n]
        inputs = inputs_of(bench, model, rows)
        tokens = rollout.token_trace.tokens[k % 2 * n : k % 2 * n + n].to(bench.device)
        drawn = rollout.logp[k % 2 * n : k % 2 * n + n].to(bench.device)

        def work(inputs: Any = inputs, tokens: Any = tokens, drawn: Any = drawn) -> Tensor:
            logp = padded_logp(plain, inputs, tokens)
            (logp - drawn).exp().mean().backward()
            return (logp - drawn).detach().abs()

        seconds, gap = bench.timed(work)
        times.append(seconds)
        gaps.append(gap)
    seconds = sum(times[2:]) / 3 * len(rollout.samples) / n
    gap = torch.cat(gaps[:2])
    bench.figures["update_padded"] = {
        "seconds": seconds,
        "measured_micro_batches": 3,
        "peak_gb": bench.peak_gb,
        "gap_to_our_sampler_mean": float(gap.mean()),
        "gap_to_our_sampler_max": float(gap.max()),
    }
    bench.say("update, padded:", bench.figures["update_padded"])


def ratios(bench: Bench) -> None:
    figures, size = bench.figures, bench.size
    whole, least = len(size.rows), size.batches[0]
    ours_all, update = figures.get(f"ours_{whole}"), figures.get("update_ours")
    a, b = figures.get(f"a_{whole}"), figures.get(f"b_{whole}")
    values: dict[str, float] = {}
    if ours_all and a:
        values["sampling, (a) / ours"] = a["seconds"] / ours_all["seconds"]
    if ours_all and b:
        values["sampling, (b) / ours"] = b["seconds"] / ours_all["seconds"]
    if (few := figures.get(f"ours_{least}")) and (other := figures.get(f"b_{least}")):
        values[f"decoding {least} at once, (b) / ours"] = other["ms_a_step"] / few["ms_a_step"]
    if ours_all and update and a and (padded := figures.get("update_padded")):
        mine = ours_all["seconds"] + update["seconds"]
        values["iteration, (a) / ours"] = (a["seconds"] + padded["seconds"]) / mine
    figures["ratios"] = values
    bench.say("ratios:", {key: round(value, 2) for key, value in values.items()})


def circumstances(bench: Bench) -> dict[str, Any]:
    import transformers

    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    name = torch.cuda.get_device_name() if bench.device.type == "cuda" else "CPU"
    return {
        "date": time.strftime("%Y-%m-%d"), "device": name, "torch": torch.__version__,
        "transformers": transformers.__version__, "commit": commit,
        "command": " ".join(["python", *sys.argv]), "size": bench.size.__dict__,
    }  # fmt: skip


def table(figures: dict[str, Any]) -> list[str]:
    shown = ["seconds", "tokens_per_s", "ms_a_step", "share_of_bandwidth_bound", "share_with_past"]
    shown += ["share_of_peak", "peak_gb"]
    lines = ["| | " + " | ".join(shown) + " |", "|---" * (len(shown) + 1) + "|"]
    for name, row in figures.items():
        if isinstance(row, dict) and "seconds" in row:
            cells = [f"{row[key]:.4g}" if key in row else "" for key in shown]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return [*lines, "", *(f"- {k}: {v:.2f}" for k, v in figures.get("ratios", {}).items())]


def write(file: Path | None, figures: dict[str, Any]) -> None:
    """Called after every part, so that an interrupted run keeps its results."""
    if file is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    facts = figures["circumstances"]
    file.with_suffix(".json").write_text(json.dumps(figures, indent=1))
    header = [f"- {name}: {value}" for name, value in facts.items()]
    file.with_suffix(".md").write_text("\n".join([*header, "", *table(figures), ""]))


def run(bench: Bench, parts: list[str], file: Path | None) -> None:
    size = bench.size

    def part(name: str, work: Callable[[], Any]) -> Any:
        if name not in parts:
            return None
        try:
            return work()
        except Exception:  # reported at the end; other parts go on
            traceback.print_exc()
            bench.figures.setdefault("failed", []).append(name)
        finally:
            write(file, bench.figures)

    ceilings(bench)
    model = ours(bench)
    bench.say("loaded")
    pieces = part("ours", lambda: sample_ours(bench, model))
    rollout = rollout_of(bench, pieces) if pieces else None
    if rollout is not None:
        part("update", lambda: update_ours(bench, model, rollout))
    orders = size.rows, size.rows[:: size.group]  # all at once, and one response per prompt
    if "a" in parts:
        plain = theirs(bench, {name: p.data for name, p in model.policy.trainable.items()})
        if rollout is not None:
            part("a", lambda: update_theirs(bench, model, plain, rollout))
        for rows in orders:
            part("a", partial(sample_theirs, bench, "a", plain, model, rows, 16))
        del plain
    if "b" in parts:
        plain = theirs(bench, None)
        how = {"cache_implementation": "static"}
        for rows in orders:
            part("b", partial(sample_theirs, bench, "b", plain, model, rows, 32, **how))
    ratios(bench)
    write(file, bench.figures)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=[*FULL], default="3b", help="size of Qwen2.5-VL")
    parser.add_argument("--tiny", action="store_true", help="the bundled model; not for times")
    parser.add_argument("--out", type=Path, help="folder for NAME.md and NAME.json")
    names = {"3b": "token", "7b": "token-large"}
    parser.add_argument(
        "--name", help=f"of these files; by default {' or '.join(names.values())}, by model"
    )
    parser.add_argument(
        "--folder", type=Path, help="for weights; the default is /dev/shm/gesso-MODEL"
    )
    parser.add_argument("--micro-tokens", type=int, help="tokens per micro-batch of our update")
    parser.add_argument("--parts", default="ours,update,a,b", help="of: ours, update, a, b")
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        parser.error("a CUDA device is needed; --tiny runs the same code without one")
    device = torch.device("cpu" if options.tiny else "cuda")
    dtype = torch.float32 if options.tiny else torch.bfloat16
    size = TINY if options.tiny else FULL[options.model]
    if options.micro_tokens:
        size = replace(size, micro_tokens=options.micro_tokens)
    folder = options.folder or Path(f"/dev/shm/gesso-{options.model}")
    bench = Bench(ZOO if options.tiny else folder, size, device, dtype)
    if not options.tiny and not (folder / "config.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        make_model(options.model, folder, device, dtype)
        bench.say("model made")
    bench.fresh()
    bench.figures["circumstances"] = {"model": options.model} | circumstances(bench)
    file = options.out and options.out / (options.name or names[options.model])
    run(bench, options.parts.split(","), file)
    wrong = [f"{part} failed" for part in bench.figures.get("failed", [])]
    for name, row in bench.figures.items():
        if isinstance(row, dict) and row.get("compiled_later") and not options.tiny:
            wrong.append(f"{name}: {row['compiled_later']} graphs after the first iteration")
    gap = bench.figures.get("update_ours", {}).get("abs_dlogp", 0.0)
    if not gap <= GAP[dtype]:
        wrong.append(f"sampler and learner differ by {gap:.1e} on average, at most {GAP[dtype]}")
    bench.say(*wrong)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""Compares one GRPO iteration of Gesso and of TRL's GRPOTrainer on the bundled VLM.

    pip install -e ".[bench]"
    python benchmarks/trl_iteration.py [--rounds 5] [--threads 1] [--json FILE] [key=value ...]

Both sides have the same weights, prompts, images, group, lengths, loss, optimizer and threads.
Before timing, they must give the same loss and gradients on one frozen batch; if they do not, the
exit status is 1 and nothing is timed. benchmarks/README.md explains the output.
"""

from __future__ import annotations

import gesso  # before torch: sets how OpenMP threads wait

# isort: split
import argparse
import functools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gesso import build
from gesso.algorithms.policy_gradient import KL, Clip, PolicyGradient, PreparedResponses
from gesso.config import Recipe, resolve_path
from gesso.models.tokens.transformer import TransformerModel
from gesso.rewards.text.count import Count
from gesso.rollout import Rollout
from gesso.run import Assembled, assemble
from gesso.types import Prompt, Sample, UserError

RECIPE = "demo-vlm"
LOSSES = {"token-mean": "dapo", "seq-mean-token-mean": "grpo", "constant": "dr_grpo"}
"""Our aggregations and TRL's names for them."""
LIBRARIES = ("torch", "transformers", "trl", "accelerate", "datasets", "numpy")
PHASES = ("generate", "rewards", "log-probs", "update", "rest", "total")
FURTHER = {"cpu": "CPU seconds", "tokens": "tokens per response"}
CASES = ("equal", "ragged")
CLOCK = "wall"
Proof = dict[str, tuple[float, float]]  # name → difference and its limit
Times = dict[str, float]  # of one iteration: seconds by phase, and the keys of FURTHER


def now() -> float:
    """Seconds: wall time, or, on a busy machine, CPU time of this process."""
    return time.process_time() if CLOCK == "cpu" else time.perf_counter()


def settings(overrides: Sequence[str], beta: float) -> Recipe:
    """The recipe with PPO's symmetric clip, TRL's default."""
    plain = ["algorithm.surrogate.low=0.2", "algorithm.surrogate.high=0.2"]
    plain += ['algorithm.surrogate.dual="none"']
    if beta:
        plain += [f"algorithm.kl.beta={beta}"]
    recipe = build.recipe(RECIPE, [*plain, *overrides])
    chosen = build.algorithm(recipe)
    assert isinstance(chosen, PolicyGradient)
    kl = KL(beta=beta) if beta else None
    same = (chosen.name, chosen.surrogate, chosen.kl) == ("grpo", Clip(), kl)
    same = same and chosen.updates == chosen.epochs == 1 and chosen.aggregation in LOSSES
    same = same and recipe.model.dtype == "float32" and recipe.model.lora is None
    if not same or [entry.name for entry in recipe.reward] != ["count"] or recipe.learner.ema:
        raise UserError(
            "expected grpo with one update per iteration, a clip of .2, the reward count, "
            f"float32, no LoRA, no EMA and an aggregation of {', '.join(LOSSES)}"
        )
    return recipe


class Gesso:
    """Gesso's classes, unchanged."""

    def __init__(self, job: Assembled) -> None:
        assert isinstance(job.model, TransformerModel)
        self.job, self.model = job, job.model
        self.start = {name: t.clone() for name, t in job.learner.policy.tensors().items()}
        self.written = self.model.suppressed  # ids that are not sampled by default
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.model.logp = self._timed(self.model.logp)  # type: ignore[method-assign]

    def _timed(self, logp: Callable) -> Callable:
        """Log-probs without gradient belong to a reference policy."""

        @functools.wraps(logp)
        def timed(*given: Any, **named: Any) -> Any:
            started = now()
            result = logp(*given, **named)
            if not torch.is_grad_enabled():
                self.seconds["log-probs"] += now() - started
            return result

        return timed

    def prepare(self, case: str) -> None:
        """Resets the weights; responses end freely (ragged) or only at the limit (equal)."""
        self.job.learner.policy.load(self.start)
        more = sorted(self.model.end) if case == "equal" else []
        self.model.suppressed = torch.cat([self.written, self.written.new_tensor(more)])
        self.seconds.clear()

    def iteration(self, step: int, case: str) -> Times:
        self.prepare(case)
        used, started = time.process_time(), now()
        drawn = self.job.cluster.sample_step(step)
        generated = now()
        rollout, _ = drawn.result()
        scored = now()
        self.job.learner.update(rollout, step)
        self.job.cluster.publish(step + 1)
        ended = now()
        known = self.seconds["log-probs"]
        update = ended - scored - known
        parts = (generated - started, scored - generated, known, update, 0.0, ended - started)
        tokens = float(rollout.mask.sum() / len(rollout.mask))
        further = {"cpu": time.process_time() - used, "tokens": tokens}
        return dict(zip(PHASES, parts, strict=True)) | further


def processor(folder: Path) -> Any:
    """transformers' processor without its video part, which needs torchvision."""
    from transformers import (
        AutoImageProcessor,
        AutoTokenizer,
        ProcessorMixin,
        Qwen2_5_VLProcessor,
    )

    class Pictures(Qwen2_5_VLProcessor):
        def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str) -> None:
            self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
            self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
            self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
            ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    images = AutoImageProcessor.from_pretrained(folder, backend="pil")
    return Pictures(images, tokenizer, tokenizer.chat_template)


def row_of(prompt: Prompt) -> dict[str, Any]:
    """A row of a TRL dataset; TRL puts the image before the text."""
    text = prompt.text.removeprefix("<image>")
    images = [picture.open() for picture in prompt.images]
    return {
        "prompt": [{"role": "user", "content": text}],
        "images": images,
        "answer": prompt.columns["answer"],
    }


class Trl:
    """GRPOTrainer, unchanged, with the recipe's settings; its phases are timed from outside.

    `train` runs its loop; `commands` yields the next step, and `tell` receives each step's times.
    """

    def __init__(self, recipe: Recipe, prompts: Sequence[Prompt], batch: int | None = None) -> None:
        from datasets import Dataset
        from transformers import AutoModelForImageTextToText
        from trl import GRPOTrainer

        folder = resolve_path(recipe.model.path)
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        if not recipe.model.train_vision:  # type: ignore[union-attr]
            model.model.visual.requires_grad_(False)
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.tokens = 0.0
        with tempfile.TemporaryDirectory() as unused:
            self.trainer = GRPOTrainer(
                model,
                reward_funcs=self._reward,
                args=self._arguments(recipe, unused, batch),
                train_dataset=Dataset.from_list([row_of(prompt) for prompt in prompts]),
                processing_class=processor(folder),
            )
        trained = self.trainer.model.named_parameters()
        self.trained = {name: p for name, p in trained if p.requires_grad}
        self.start = {name: p.detach().clone() for name, p in self.trained.items()}
        config = model.config
        placeholders = config.image_token_id, config.video_token_id
        self.unwritten = [*placeholders, config.vision_start_token_id, config.vision_end_token_id]

    @staticmethod
    def _arguments(recipe: Recipe, folder: str, batch: int | None) -> Any:
        from trl import GRPOConfig

        chosen, optimizer = build.algorithm(recipe), recipe.optimizer
        assert isinstance(chosen, PolicyGradient) and isinstance(chosen.surrogate, Clip)
        responses = recipe.data.groups * chosen.group
        if responses % (batch or responses):
            raise UserError(f"--trl-batch {batch} does not divide {responses} responses")
        return GRPOConfig(
            output_dir=folder,
            num_generations=chosen.group,
            per_device_train_batch_size=batch or responses,
            gradient_accumulation_steps=responses // (batch or responses),
            max_completion_length=chosen.max_tokens,
            temperature=chosen.temperature,
            epsilon=chosen.surrogate.low,
            epsilon_high=chosen.surrogate.high,
            beta=chosen.kl.beta if chosen.kl else 0.0,
            use_bias_correction_kl=False,
            loss_type=LOSSES[chosen.aggregation],
            scale_rewards=chosen.advantage.std,
            shuffle_dataset=False,
            max_steps=10**6,
            learning_rate=optimizer.lr,
            lr_scheduler_type="constant",
            adam_beta1=optimizer.betas[0],
            adam_beta2=optimizer.betas[1],
            adam_epsilon=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            max_grad_norm=optimizer.max_norm,
            optim="adamw_torch_fused",
            gradient_checkpointing=False,  # as on our side; TRL's default costs a second forward
            use_cpu=True,
            bf16=False,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=recipe.seed,
        )

    @staticmethod
    def _reward(prompts: Any, completions: Any, answer: Any, **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        pairs = zip(texts, answer, strict=True)
        samples = [Sample(Prompt("", columns={"answer": a}), None, 0, text) for text, a in pairs]
        return [score.value or 0.0 for score in Count().score(samples)]

    @torch.no_grad()
    def prepare(self, case: str) -> None:
        for name, tensor in self.start.items():
            self.trained[name].copy_(tensor)
        more = self.trainer.eos_token_ids if case == "equal" else []
        unwritten = [*self.unwritten, *more]
        self.trainer.generation_config.suppress_tokens = unwritten
        self.trainer.generation_kwargs["suppress_tokens"] = unwritten
        self.seconds.clear()

    def train(self, commands: Iterator[tuple[int, str]], tell: Callable[[Times], None]) -> None:
        """Runs TRL's training loop, one step per command. Commands count steps from 0, as the
        rows of the dataset do."""
        from transformers import TrainerCallback

        side = self

        class Steps(TrainerCallback):
            started = used = 0.0
            done = 0

            def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                self._next(control)

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                used = time.process_time() - self.used
                tell(side._times(self.started, now()) | {"cpu": used})
                self.done += 1
                self._next(control)

            def _next(self, control: Any) -> None:
                if (command := next(commands, None)) is None:
                    raise _Enough
                assert command[0] == self.done, "the rows of the dataset are taken in order"
                side.prepare(command[1])
                self.used, self.started = time.process_time(), now()

        self._time_phases()
        self.trainer.add_callback(Steps())
        with contextmanager(_until_enough)():
            self.trainer.train()

    def _time_phases(self) -> None:
        """Seconds spent in some of its methods."""
        trainer = self.trainer
        names = {"_generate": "generate", "_calculate_rewards": "rewards"}
        names |= {"_prepare_inputs": "inputs", "_get_per_token_logps_and_entropies": "log-probs"}
        for name, phase in names.items():
            setattr(trainer, name, self._timed(getattr(trainer, name), phase))

    def _timed(self, method: Callable, phase: str) -> Callable:
        @functools.wraps(method)
        def timed(*given: Any, **named: Any) -> Any:
            started = now()
            result = method(*given, **named)
            if phase != "log-probs" or not torch.is_grad_enabled():
                self.seconds[phase] += now() - started
            if phase == "inputs":
                self.seconds.setdefault("ready", now())
            if phase == "generate":
                self.tokens = sum(map(len, result[1])) / len(result[1])
            return result

        return timed

    def _times(self, started: float, ended: float) -> Times:
        """Before the update: loading, padding and the second image processing of a batch."""
        inner = [self.seconds[name] for name in PHASES[:3]]
        update = ended - self.seconds["ready"]
        rest = ended - started - update - sum(inner)
        parts = (*inner, update, rest, ended - started)
        return dict(zip(PHASES, parts, strict=True)) | {"tokens": self.tokens}


class _Enough(Exception):
    """Ends the trainer's loop."""


def _until_enough() -> Iterator[None]:
    try:
        yield
    except _Enough:
        return


# The proof


def prove(ours: Gesso, trl: Trl, step: int = 0) -> Proof:
    """Compares both sides on one frozen batch: our responses with synthetic advantages, and old and
    reference log-probs with random offsets, so that clip and KL have an effect. TRL never samples
    suppressed ids and keeps them in the log-probs; here neither side suppresses any.
    """
    ours.prepare("ragged")
    trl.prepare("ragged")
    rollout, _ = ours.job.cluster.sample_step(step).result()
    ours.model.suppressed = ours.written[:0]
    prompts = [sample.prompt for sample in rollout.samples]
    inputs = trl_inputs(trl, prompts, rollout)
    with torch.no_grad():
        now = ours.model.logp(rollout.token_trace, 1.0).logp
        theirs = trl_logp(trl, inputs)
    generator = torch.Generator().manual_seed(0)
    moved = [torch.randn(now.shape, generator=generator) * 0.2 for _ in range(2)]
    old, reference = (torch.where(rollout.mask, now + m, 0.0) for m in moved)
    advantages = torch.randn(len(now), generator=generator)
    inputs |= {"old_per_token_logps": old, "ref_per_token_logps": reference}
    inputs["advantages"] = advantages
    blank = now.new_empty(len(now), 0)
    spread = torch.where(rollout.mask, advantages[:, None], 0.0)
    prepared = PreparedResponses(spread, old, blank, blank, blank, reference, blank, blank)
    proof: Proof = differences_of_inputs(rollout, inputs)
    proof["log-probs"] = (float((now - theirs).abs().max()), 1e-4)
    for mode, loss_type in LOSSES.items():
        for beta in (0.0, 0.04):
            change = {"aggregation": mode, "kl": KL(beta=beta) if beta else None}
            algorithm = ours.job.algorithm.model_copy(update=change)  # type: ignore[attr-defined]
            loss, gradients = our_gradients(ours, algorithm, rollout, prepared)
            trl.trainer.loss_type, trl.trainer.beta = loss_type, beta
            their_loss, their_gradients = trl_gradients(trl, inputs)
            name = f"{loss_type}, beta {beta:g}"
            proof[f"loss, {name}"] = (abs(loss / their_loss - 1), 1e-5)
            worst = worst_of(gradients, their_gradients)
            proof[f"gradient, {name}, worst tensor"] = (worst, 1e-4)
    proof["settings of AdamW"] = (differences_of_optimizers(ours, trl), 0)
    return proof


def trl_inputs(trl: Trl, prompts: Sequence[Prompt], rollout: Rollout) -> dict[str, Any]:
    """A batch for TRL's loss; prompts go through TRL's own preparation."""
    from trl.data_utils import prepare_multimodal_messages

    trainer, trace = trl.trainer, rollout.token_trace
    rows = [row_of(prompt) for prompt in prompts]
    messages = [prepare_multimodal_messages(row["prompt"], images=row["images"]) for row in rows]
    ids, _, fields = trainer._tokenize_prompts(messages)
    prompt_ids, prompt_mask = padded(ids, "left", trainer._tokenizer.pad_token_id)
    kinds, _ = padded(fields["mm_token_type_ids"], "left", 0)
    pixels = torch.as_tensor(fields["pixel_values"])
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": torch.where(trace.mask, trace.tokens, trainer._tokenizer.pad_token_id),
        "completion_mask": trace.mask.long(),
        "num_items_in_batch": trace.mask.sum(),
        "pixel_values": pixels,
        "image_grid_thw": torch.as_tensor(fields["image_grid_thw"]),
        "num_images": [len(prompt.images) for prompt in prompts],
        "mm_token_type_ids": torch.cat([kinds, torch.zeros_like(trace.tokens)], 1),
    }


def padded(rows: Sequence[Sequence[int]], side: str, value: int) -> tuple[Tensor, Tensor]:
    """(N, longest) ids and mask."""
    tensors = [torch.as_tensor(row) for row in rows]
    fill = functools.partial(pad_sequence, batch_first=True, padding_side=side)
    return fill(tensors, padding_value=value), fill([torch.ones_like(t) for t in tensors])


def trl_logp(trl: Trl, inputs: dict[str, Any]) -> Tensor:
    image_inputs = ("pixel_values", "image_grid_thw", "num_images", "mm_token_type_ids")
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    logp, _, _ = trl.trainer._get_per_token_logps_and_entropies(
        trl.trainer.model,
        ids,
        mask,
        inputs["completion_ids"].shape[1],
        **{name: inputs[name] for name in image_inputs},
    )
    return torch.where(inputs["completion_mask"].bool(), logp, 0.0)


def differences_of_inputs(rollout: Rollout, inputs: dict[str, Any]) -> Proof:
    """Number of prompts whose tokens or images differ from TRL's."""
    trace = rollout.token_trace
    mine = [trace.prompts[i] for i in trace.row.tolist()]
    pairs = zip(inputs["prompt_ids"], inputs["prompt_mask"].bool(), strict=True)
    theirs = [ids[mask].tolist() for ids, mask in pairs]
    wrong = sum(p.ids.tolist() != t for p, t in zip(mine, theirs, strict=True))
    pixels = torch.cat([p.pixels for p in mine if p.pixels is not None])
    far = float((pixels - inputs["pixel_values"]).abs().max())
    return {"prompts with other tokens": (wrong, 0), "pixels": (far, 0.0)}


def differences_of_optimizers(ours: Gesso, trl: Trl) -> float:
    """Number of settings that differ and of parameters that only one side trains."""
    mine, theirs = ours.job.learner.optimizer, trl.trainer.create_optimizer()
    names = ("lr", "betas", "eps", "weight_decay", "fused", "amsgrad")
    of_mine = [[g[n] for n in names] for g in mine.param_groups for p in g["params"]]
    of_theirs = [[g[n] for n in names] for g in theirs.param_groups for p in g["params"]]
    if len(of_mine) != len(of_theirs) or type(mine) is not type(theirs):
        return float("inf")
    return sum(a != b for a, b in zip(of_mine, of_theirs, strict=True))


def our_gradients(
    ours: Gesso, algorithm: PolicyGradient, rollout: Rollout, prepared: PreparedResponses
) -> tuple[float, dict[str, Tensor]]:
    """As the learner does for a mini-batch, before clipping the norm."""
    trained = ours.job.learner.policy.trainable
    terms = algorithm.terms(rollout, prepared)
    total = 0.0
    for index in terms.micro_batches(ours.job.recipe.learner):
        loss = algorithm.loss(ours.model, terms.rows(index)).loss.sum() / terms.total
        loss.backward()
        total += loss.item()
    return total, taken(trained)


def trl_gradients(trl: Trl, inputs: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    trl.trainer.model.train()
    accumulation = trl.trainer.args.gradient_accumulation_steps
    trl.trainer.current_gradient_accumulation_steps = 1
    trl.trainer.args.steps_per_generation = 1
    loss = trl.trainer.compute_loss(trl.trainer.model, inputs)
    loss.backward()
    trl.trainer.args.steps_per_generation = accumulation
    return loss.item(), taken(trl.trained)


def taken(parameters: dict[str, torch.nn.Parameter]) -> dict[str, Tensor]:
    """Returns the gradients and clears them."""
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    for p in parameters.values():
        p.grad = None
    return gradients


def worst_of(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest ‖a − b‖ / ‖b‖ of a tensor."""
    if mine.keys() != theirs.keys():
        return float("inf")
    return max(float((mine[name] - t).norm() / t.norm()) for name, t in theirs.items())


def agrees(proof: Proof) -> bool:
    return all(difference <= limit for difference, limit in proof.values())


# Timing


class Side:
    """One side in a separate process with its usual settings: Gesso applies its own at
    `import gesso`, TRL has torch's defaults. It works only on request."""

    def __init__(self, name: str, arguments: Sequence[str]) -> None:
        first = "gesso" if name == "gesso" else "torch"
        code = f"import {first}, runpy; runpy.run_path({__file__!r}, run_name='__main__')"
        command = [sys.executable, "-c", code, f"--side={name}", *arguments]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def iteration(self, step: int, case: str) -> Times:
        assert self.process.stdin and self.process.stdout
        print(json.dumps([step, case]), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def serve(side: Gesso | Trl) -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # skips lines printed by libraries
    commands = ((step, case) for step, case in map(json.loads, sys.stdin))
    tell = functools.partial(print, file=answers, flush=True)
    if isinstance(side, Trl):
        side.train(commands, lambda times: tell(json.dumps(times)))
    else:
        for step, case in commands:
            tell(json.dumps(side.iteration(step, case)))


def measure(sides: dict[str, Side], rounds: int) -> dict[str, list[Times]]:
    """Alternates between the sides, for each case; the order is swapped every round."""
    times: dict[str, list[Times]] = defaultdict(list)
    for i in range(rounds + 1):  # round 0 warms up
        for j, case in enumerate(CASES):
            for name in sorted(sides, reverse=i % 2 == 1):
                taken = sides[name].iteration(2 * i + j, case)
                if i:
                    times[f"{name} {case}"].append(taken)
    return times


def circumstances(threads: int) -> dict[str, str]:
    """Hardware, versions, commit, load and command line."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    cpu = next((x.split(":")[1].strip() for x in lines if "model name" in x), platform.processor())
    git = ["git", "-C", str(Path(__file__).parent)]
    ask = functools.partial(subprocess.run, capture_output=True, text=True)
    commit = ask([*git, "rev-parse", "--short", "HEAD"]).stdout.strip()
    changed = ask([*git, "status", "--porcelain", "--untracked-files=no"]).stdout.strip()
    return {
        "machine": f"{cpu}, {os.cpu_count()} cores, {threads} torch threads",
        "load": ", ".join(f"{load:.1f}" for load in os.getloadavg()) + " before the first round",
        "system": f"{platform.platform()}, Python {platform.python_version()}",
        "versions": ", ".join(f"{name} {version(name)}" for name in LIBRARIES),
        "commit": f"gesso {gesso.__version__} {commit}" + " with changes" * bool(changed),
        "command": " ".join(["python", *sys.argv]),
    }


def ratios(times: dict[str, list[Times]], case: str, key: str = "total") -> list[float]:
    """TRL's time divided by ours, for each round."""
    pairs = zip(times[f"trl {case}"], times[f"gesso {case}"], strict=True)
    return [theirs[key] / ours[key] for theirs, ours in pairs]


def report(times: dict[str, list[Times]]) -> None:
    columns = [f"{name} {case}" for case in CASES for name in ("gesso", "trl")]
    print("\nseconds, median" + "".join(f"{name:>15}" for name in columns))
    for key, name in ({phase: phase for phase in PHASES} | FURTHER).items():
        middle = [median(t[key] for t in times[column]) for column in columns]
        print(f"{name:<15}" + "".join(f"{figure:>15.3f}" for figure in middle))
    for case in CASES:
        each = ratios(times, case)
        parts = [f"{p} {median(ratios(times, case, p)):.2f}" for p in ("generate", "update", "cpu")]
        print(
            f"trl / gesso, {case} lengths: {median(each):.2f} "
            f"(rounds {min(each):.2f} to {max(each):.2f}; {', '.join(parts)})"
        )


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="torch threads per side")
    parser.add_argument("--beta", type=float, default=0.0, help="KL to the initial weights")
    parser.add_argument("--trl-batch", type=int, help="responses per TRL pass (all)")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--json", type=Path, help="file for the times of every round")
    parser.add_argument("--side", choices=("gesso", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    return parser.parse_args(arguments)


def main() -> int:
    options = parsed(sys.argv[1:])
    if find_spec("trl") is None:
        raise UserError('TRL is not installed; run pip install -e ".[bench]"')
    global CLOCK
    CLOCK = options.clock
    torch.set_num_threads(options.threads)
    recipe = settings(options.overrides, options.beta)
    job = assemble(recipe)
    try:
        steps = 2 * (options.rounds + 1)
        batches = [job.cluster.stream.batch(step, recipe.data.groups) for step in range(steps)]
        prompts = [prompt for batch in batches for prompt in batch]
        if options.side == "gesso":
            serve(Gesso(job))
            return 0
        trl = Trl(recipe, prompts, options.trl_batch)
        if options.side == "trl":
            job.close()
            serve(trl)
            return 0
        facts = circumstances(options.threads)
        print("\n".join(f"{name:<9} {fact}" for name, fact in facts.items()))
        proof = prove(Gesso(job), trl)
        agree = agrees(proof)
        print(f"\nresults of both sides {'agree' if agree else 'DIFFER'}; differences:")
        for name, (difference, limit) in proof.items():
            print(f"  {name:<42} {difference:.1e}, at most {limit:.0e}")
    finally:
        job.close()
    sides = {name: Side(name, sys.argv[1:]) for name in ("gesso", "trl")} if agree else {}
    try:
        times = measure(sides, options.rounds) if agree else {}
    finally:
        for side in sides.values():
            side.close()
    if times:
        report(times)
    if options.json:
        options.json.write_text(json.dumps({**facts, "proof": proof, "times": times}, indent=1))
    return 0 if agree else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"error: {error}")

"""Optimises weights with little overhead per step and logs the losses."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

LossFn = Callable[[], Tensor]


class Log:
    """Appends records to a JSONL file and prints them."""

    def __init__(self, path: Path) -> None:
        self.path, self.start = path, time.perf_counter()

    def write(self, stage: str, **values: float) -> None:
        seconds = round(time.perf_counter() - self.start, 1)
        line = json.dumps({"stage": stage, **values, "seconds": seconds})
        print(line, flush=True)
        with self.path.open("a") as file:
            file.write(line + "\n")


def optimise(
    stage: str,
    losses: list[LossFn],
    parameters: list[Tensor],
    lr: float,
    steps: int,
    seconds: float,
    log: Log,
    graphs: bool = True,
) -> None:
    """AdamW with a short warm-up and cosine decay to zero, so that no weight averaging is needed.

    The loss functions alternate. The schedule ends after `steps` or after about `seconds`,
    whichever comes first. On a GPU each step is a CUDA graph, unless `graphs` is False.
    """
    cuda = parameters[0].is_cuda
    start_lr: Any = torch.zeros((), device="cuda") if cuda else 0.0  # CUDA graphs need a tensor
    optimizer = torch.optim.AdamW(
        parameters, lr=start_lr, betas=(0.9, 0.98), weight_decay=0.01, fused=cuda, capturable=cuda
    )

    def step_with(loss_fn: LossFn) -> LossFn:
        def step() -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            loss = loss_fn()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            return loss.detach()

        return graphed(step) if cuda and graphs else step

    steppers = {loss_fn: step_with(loss_fn) for loss_fn in dict.fromkeys(losses)}
    every = max(steps // 100, 1)
    total = torch.zeros((), device=parameters[0].device)
    start, progress, step = time.perf_counter(), 0.0, 0
    while progress < 1:
        step += 1
        set_lr(optimizer, lr * min(30 * progress + 0.01, 0.5 + 0.5 * math.cos(math.pi * progress)))
        total += steppers[losses[step % len(losses)]]()
        if step % every == 0:
            log.write(stage, step=step, loss=round(total.item() / every, 5))
            total.zero_()
        if step % every == 0 or step == steps:
            progress = max(step / steps, (time.perf_counter() - start) / seconds)


def graphed(step: LossFn) -> LossFn:
    """Captures `step` as one CUDA graph: at this size kernel launches dominate the run time."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay() -> Tensor:
        graph.replay()
        return loss

    return replay


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr

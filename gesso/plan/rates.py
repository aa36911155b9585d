"""Seconds that each task of a worker takes, on a cluster of a given size."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """Seconds for n units of work that are computed together."""

    each: float = 0.0
    fixed: float = 0.0
    floor: float = 0.0  # least seconds

    def __call__(self, n: float) -> float:
        return max(self.floor, self.fixed + n * self.each) if n else 0.0


@dataclass(frozen=True)
class Rates:
    """Of one worker, unless stated otherwise."""

    sample: Line  # samples of a part: all denoising steps, or all tokens
    decode: Line = Line()  # images of a part
    encode: float = 0.0  # one prompt; every worker encodes all prompts of a batch
    gather: float = 0.0  # before a call, if sampling needs all weights of a sharded model
    eval_cost: float = 1.0  # sampling in evaluations, relative to training
    prepare: Line = Line()  # terms of a micro-batch before the first update: reference log-probs
    update: Line = Line()  # terms of a micro-batch, forward and backward
    optimizer: float = 0.0  # one optimizer step
    reduce: float = 0.0  # adding up the gradients of all workers, once per optimizer step
    share: float = 0.0  # one sample's trace, sent to all workers
    collective: float = 0.0  # latency of a collective
    publish: float = 0.0  # weights to the samplers, and their digests
    send: float = 0.0  # weights to separate samplers
    save: float = 0.0  # a checkpoint, until training continues
    driver: float = 0.0  # the driver receives one sample
    between: float = 0.0  # per sample: all workers wait for the driver before an update
    score: float = 0.0  # one sample, by one reward worker
    cores: float = math.inf  # that workers and the rewards on this machine share
    slower_sampling: float = 1.0  # factor while other processes compute: shared caches, memory
    slower_updating: float = 1.0


def latency(count: int) -> float:
    """Of a collective of `count` workers: about 20 µs per doubling with NCCL."""
    return 20e-6 * math.log2(count) if count > 1 else 0.0

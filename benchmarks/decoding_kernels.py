"""Times the kernels of a decoding step (`gesso/models/tokens/step_kernels.py`) on a Hopper GPU: all
layers of Qwen2.5-VL-3B or 7B with random weights, and each kernel alone, with the weights of one
layer after the other.

    python benchmarks/decoding_kernels.py [--model 7b]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gesso.models.tokens import step_kernels as kernels

SHAPES = {"3b": (2048, 36, 16, 2, 11008), "7b": (3584, 28, 28, 4, 18944)}
N, PAST, CAPACITY, WIDTH = 64, 430, 576, 128


def milliseconds(work: Callable[[], object], repeats: int = 20) -> float:
    """Of a CUDA graph of the work; the fastest of three."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "se")
        start.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / repeats)
    return min(times)


def random(*size: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*size, device="cuda", dtype=torch.bfloat16) * scale


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=[*SHAPES], default="3b", help="size of Qwen2.5-VL")
    width, layers, heads, groups, inner = SHAPES[parser.parse_args().model]
    sizes = {
        "q/k/v": ((heads + 2 * groups) * WIDTH, width),
        "output": (width, heads * WIDTH),
        "gate and up": (2 * inner, width),
        "down": (width, inner),
    }
    weights = [
        {name: random(*size, scale=size[1] ** -0.5) for name, size in sizes.items()}
        for _ in range(layers)
    ]
    cache = random(layers, 2, N, groups, CAPACITY, WIDTH)
    lengths = torch.full((N,), PAST, device="cuda")
    x, gains, cos, sin = random(N, width), random(width), random(N, WIDTH), random(N, WIDTH)
    bias = random(sizes["q/k/v"][0])

    def attend(projected: Tensor, layer: int) -> Tensor:
        past = cache[layer, 0], cache[layer, 1], lengths, WIDTH**-0.5
        return kernels.attend(projected, bias, None, 1e-6, cos, sin, *past)

    def step() -> None:
        change = x.new_zeros(1, *x.shape, dtype=torch.float32)
        for i, w in enumerate(weights):
            normed = kernels.add_norm(x, change, gains, 1e-6, x.dtype)
            attended = attend(kernels.projected(normed, w["q/k/v"]), i)
            change = kernels.projected(attended, w["output"])
            normed = kernels.add_norm(x, change, gains, 1e-6, x.dtype)
            gated = kernels.gated(normed, w["gate and up"])
            change = kernels.projected(gated, w["down"])

    big = torch.empty(2**30, device="cuda")
    read = big.nbytes / milliseconds(big.sum, 5) / 1e9
    print(f"a large sum reads {read:.2f} TB/s")
    print(f"all layers: {milliseconds(step):.3f} ms")

    def show(name: str, work: Callable[[int], object], moved: int, plain: float = 0.0) -> None:
        alone = milliseconds(lambda: [work(i) for i in range(layers)]) / layers * 1e3
        cublas = f", cuBLAS {plain:.1f}" if plain else ""
        print(f"{name}: {alone:.1f} µs, its bytes {moved / read / 1e6:.1f}{cublas}")

    for name, (outputs, inputs) in sizes.items():
        kernel = kernels.gated if name == "gate and up" else kernels.projected
        given = random(N, inputs)

        def matmul(i: int, kernel: Any = kernel, name: str = name, x: Tensor = given) -> Tensor:
            return kernel(x, weights[i][name])

        def plain(name: str = name, x: Tensor = given) -> list[Tensor]:
            return [F.linear(x, w[name]) for w in weights]

        show(name, matmul, 2 * outputs * inputs, milliseconds(plain) / layers * 1e3)
    projected = kernels.projected(random(N, width), weights[0]["q/k/v"])
    show("attention", lambda i: attend(projected, i), N * PAST * groups * WIDTH * 4)
    change = kernels.projected(random(N, inner), weights[0]["down"])
    show("norm", lambda _: kernels.add_norm(x, change, gains, 1e-6, x.dtype), change.nbytes)


if __name__ == "__main__":
    main()

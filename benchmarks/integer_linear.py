"""Seconds and bytes of a Linear of FLUX.1's size whose weight is kept in int8, and of plain ones.

    python -m benchmarks.integer_linear

It multiplies 1024 tokens of 3072 numbers with a weight of 12288 rows, on the CPU. The layers take turns. The median of
their calls is printed, without the first one of each.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

from ditile.model.hooks.placeholders import count_parameter_bytes
from ditile.runner.weights.convrot_weight import ConvRotInt8

TOKENS, WIDTH, ROWS = 1024, 3072, 12288
GROUP_SIZE = 256
ROUNDS = 6


def make_layers() -> dict[str, nn.Linear]:
    """Make the layers, by what is printed of them."""
    layers = {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        layers[name] = nn.Linear(WIDTH, ROWS, dtype=dtype)
        kept = nn.Linear(WIDTH, ROWS, dtype=dtype)
        integers = torch.randint(-127, 128, (ROWS, WIDTH), dtype=torch.int8)
        weight = ConvRotInt8(integers, torch.full((ROWS, 1), 1e-4), [1, GROUP_SIZE], dtype)
        kept.weight = nn.Parameter(weight, requires_grad=False)
        layers[f"int8 in {name}"] = kept
    return layers


@torch.inference_mode()
def measure_layers() -> None:
    """Print a line on each layer."""
    layers = make_layers()
    seconds: dict[str, list[float]] = {name: [] for name in layers}
    for _ in range(ROUNDS):
        for name, layer in layers.items():
            x = torch.randn(TOKENS, WIDTH, dtype=layer.weight.dtype)
            start = time.perf_counter()
            layer(x)
            seconds[name].append(time.perf_counter() - start)
    for name, layer in layers.items():
        size = count_parameter_bytes(layer) / 2**20
        print(f"{name:16} {statistics.median(seconds[name][1:]):.2f} s  {size:.0f} MiB")


if __name__ == "__main__":
    measure_layers()

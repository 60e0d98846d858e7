"""What each block costs a stage, counted from its linear layers and the tokens that each of them sees.

A linear layer multiplies every weight with every token. Few tokens do not make it faster: a device needs as long to
read a weight as to use it some number of times, its `RIDGE` (roofline model, Williams et al. 2009). That is why FLUX's
double blocks cost more than its single ones under PipeFusion, though they do as many operations: in every patch but the
first, half of their weights meet two dummy tokens. `ditile.bench.blocks` measures instead of counting.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from ditile.blocks.stages import cut
from ditile.hollow import twin
from ditile.layout import DUMMY_TEXT, Grid, Layout
from ditile.plan import Plan
from ditile.seats import Seat, Seats

RIDGE = {1: 256, 2: 256, 4: 32}
"""Tokens below which reading the weights takes longer than using them, by the bytes of a number.

For 16 bits and less that of data-centre GPUs (600 TFLOP/s, 3 TB/s); for 32 bits between those and CPUs.
"""

LATENT_SIDE = 128  # of the picture that a model was made for, where its config does not say


class Costs(NamedTuple):
    """Cost of each block in a step, and of what the first and the last stage do besides; in one unit."""

    blocks: tuple[float, ...]
    first: float = 0.0
    last: float = 0.0


class Micro(NamedTuple):
    """Tokens of a micro-step: of the image, of the text (or the dummies for it)."""

    image: int
    text: int


def divide(seats: Seats, plan: Plan) -> list[range]:
    """The blocks of each stage under a plan; the same on every rank, whatever is hollow there."""
    if plan.pipefusion == 1 or plan.stage_blocks is not None:
        return cut([1.0] * len(seats.chain), plan.pipefusion, plan.stage_blocks)
    head: Any = seats.transformer.get_submodule(seats.spec.out)
    costs = counted(seats, plan.num_patches, RIDGE[min(head.weight.dtype.itemsize, 4)])
    return cut(costs.blocks, plan.pipefusion, None, plan.stage_weights, (costs.first, costs.last))


def counted(seats: Seats, patches: int, ridge: int) -> Costs:
    """Multiplications of a step with one row of the batch, at the size and text that the model was made for.

    Args:
        seats: the blocks; hollow ones count as the model's config has them.
        patches: M.
        ridge: tokens below which a linear layer gets no faster.
    """
    if seats.is_cut():
        seats = Seats(twin(seats.transformer), seats.spec)
    spec, config = seats.spec, dict(seats.transformer.config)  # type: ignore[arg-type]
    side = int(config.get("sample_size") or LATENT_SIDE) // spec.latent_per_token(config)
    text = 0 if spec.joint == "none" else spec.conditioning({}).text
    layout = Layout.of(Grid(side, side, 1), min(patches, side), text, spec.joint)
    dummies = DUMMY_TEXT if text else 0
    micros = [Micro(layout.rows(p) * side, text if layout.carries_text(p) else dummies) for p in range(layout.patches)]
    width = int(config["num_attention_heads"] * config["attention_head_dim"])
    blocks = tuple(
        sum(_linears(seats, seat, micros, ridge)) + _attention(seat, layout, width, joint=text > 0)
        for seat in seats.chain
    )
    image = [max(micro.image, ridge) for micro in micros]
    ends = [sum(_weights(seats.transformer.get_submodule(name))) for name in (spec.image_tokens, spec.out)]
    return Costs(blocks, float(ends[0] * sum(image)), float(ends[1] * sum(image)))


def _linears(seats: Seats, seat: Seat, micros: Sequence[Micro], ridge: int) -> Iterator[float]:
    """Of each linear layer that runs in every micro-step."""
    rare = (*seats.spec.constant, *seats.spec.per_step)
    both = "text" in seat.io.returns and not seat.io.text
    for path, module in seat.block.named_modules():
        size = sum(_weights(module)) if not module._modules else 0
        if not size or any(_under(f"{seat.name}.{path}", pattern) for pattern in rare):
            continue
        if any(_under(path, pattern) for pattern in seat.io.text):
            tokens = [micro.text for micro in micros]
        else:
            tokens = [micro.image + both * micro.text for micro in micros]
        yield float(size * sum(max(n, ridge) for n in tokens))


def _attention(seat: Seat, layout: Layout, width: int, *, joint: bool) -> float:
    """Queries times keys, and scores times values."""
    image, both = layout.image, layout.image + layout.text
    names = [name for name, _ in seat.attentions()]
    lengths = [both if joint and name in seat.io.attn else image for name in names]
    return float(sum(2 * width * length**2 for length in lengths))


def _weights(module: nn.Module) -> Iterator[int]:
    """Entries of the matrices in a module."""
    for part in module.modules():
        weight: Any = part._parameters.get("weight")
        if isinstance(part, nn.Linear | nn.Conv2d) and weight is not None:
            yield weight.numel()


@functools.cache
def _under(path: str, pattern: str) -> bool:
    """Whether a module is the pattern's, or inside of it."""
    names, wanted = path.split("."), pattern.split(".")
    return len(names) >= len(wanted) and all(w in ("*", n) for n, w in zip(names, wanted, strict=False))

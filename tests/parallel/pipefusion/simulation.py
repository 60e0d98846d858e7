"""A second opinion: PipeFusion and DistriFusion with stale keys in one process, by hand, without a line of ditile.

The picture is a list of patches from the first step to the last. Each block is diffusers' own and is run on the tokens
of one patch; its attention is replaced by one that keeps keys and values in segments (the text, patch 0, patch 1, ...)
and concatenates them. The first `warmup` steps run on the whole picture, and leave their keys and values behind.

PipeFusion. What arXiv 2405.14430 says, and nothing more:

- After the warmup the patches of a step come one after the other. A patch attends to its own fresh keys, to the fresh
  ones of patches before it, and to those that the patches behind it had in the step before (zeros if there was none).
- Text that shares attention with the picture comes with patch 0. The other patches have no text at all: they attend to
  the keys that it left in this step.
- The cut. A patch is a run of token rows. The text counts as `text / columns` rows of work. Every patch should have
  `share = (rows + text rows) / patches` of it, so patch 0 has `round(share - text rows)` rows, at least one, and no
  more than leaves one to each other patch. The others divide the rest evenly; those in front get the rows left over.

DistriFusion. What arXiv 2402.19481 does in the attention of a U-Net, in that of a DiT:

- After the warmup every rank makes its own patch, all at the same time. A patch attends to its own fresh keys and to
  those that all others had in the step before (zeros if there was none).
- Text that shares attention with the picture is made by every rank from what its own patch sees, so that each rank has
  a text of its own, which is always fresh and which no other rank ever sees.
- Every patch of latents is stepped with the part of the prediction that its own rank made.
- The cut is the one above, of a picture whose text counts nothing: `round(rows / ranks)` rows for the first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, Literal

import torch
from torch import Tensor

from tests.cache.hand_cache import HandCache
from tests.parallel.pipefusion.attention import Attention, Keys, Place
from tests.parallel.pipefusion.simulated_families import FAMILIES, Family
from tests.parallel.pipefusion.solvers import SOLVERS

Method = Literal["pipefusion", "distrifusion"]


def cut(rows: int, patches: int, text_rows: Fraction) -> list[int]:
    """The rows of each patch."""
    if patches == 1:
        return [rows]
    fair = round((rows + text_rows) / patches - text_rows)
    first = max(1, min(fair, rows - (patches - 1)))
    each, left_over = divmod(rows - first, patches - 1)
    return [first] + [each + 1] * left_over + [each] * (patches - 1 - left_over)


@torch.no_grad()
def simulate(
    method: Method, family: str, pipe: Any, call: dict[str, Any], patches: int, warmup: int, keys: Keys = "stale",
    cache: HandCache | None = None, left_out: Mapping[int, tuple[float, ...]] | None = None,
) -> Tensor:  # fmt: skip
    """The latents that `pipe(**call)` should end with; `call` has the first ones.

    In the steps `left_out` no prediction is made: its weights of the newest two predictions of a patch give one. The
    `warmup` counts the others.
    """
    model, apart = FAMILIES[family](pipe, call), method == "distrifusion"
    rows = cut(model.rows, patches, Fraction(0 if apart else model.text, model.columns))
    spans = [slice(sum(rows[:i]) * model.columns, sum(rows[: i + 1]) * model.columns) for i in range(patches)]
    place = Place(spans, model.text, keys, apart)
    scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)
    steps = call["num_inference_steps"]
    sigmas = {"sigmas": [1 - i / steps for i in range(steps)]} if family == "flux" else {"num_inference_steps": steps}
    scheduler.set_timesteps(**sigmas)
    solver = SOLVERS[type(scheduler)](scheduler)
    sizes = [size * model.unit for size in rows]
    if cache is not None:
        cache.place, cache.steps, model.chain = place, steps, cache.run
    x = list(call["latents"].split(sizes, model.dim))
    left_out = left_out or {}
    made: list[list[Tensor]] = [[] for _ in range(patches)]  # the predictions of each patch, the newest first
    with hand_attention(model, place) as layers:
        for step, t in enumerate(scheduler.timesteps):
            if cache is not None:
                cache.step, cache.latents = step, x
            if step in left_out:
                for p in range(patches):
                    sums = [w * prediction for w, prediction in zip(left_out[step], made[p], strict=False)]
                    x[p] = solver.step(p, step, torch.stack(sums).sum(0), x[p])
                continue
            if len(made[0]) < warmup:
                place.patch = None
                whole = model.predict(x, t, place).split(sizes, model.dim)
                for p in range(patches):
                    made[p].insert(0, whole[p])
                x = [solver.step(p, step, whole[p], x[p]) for p in range(patches)]
            else:
                seen = list(x) if apart else x  # at the same time: nobody sees what another has made of this step
                if apart and cache is not None:
                    look(cache, model, seen, t, place)
                for p in range(patches):
                    place.patch = p
                    made[p].insert(0, model.predict(seen, t, place))
                    x[p] = solver.step(p, step, made[p][0], x[p])
            for layer in layers:
                layer.end_step()
    return torch.cat(x, model.dim)


def look(cache: HandCache, model: Family, x: list[Tensor], t: Tensor, place: Place) -> None:
    """All patches' probes, before any patch is made: DistriFusion decides on the image."""
    cache.looking = True
    for p in range(len(x)):
        place.patch = p
        model.predict(x, t, place)
    cache.looking = False
    branches = sorted({branch for branch, _ in cache.probes})
    cache.decided = {branch: cache.decide(branch, list(range(len(x)))) for branch in branches}


@contextlib.contextmanager
def hand_attention(model: Family, place: Place) -> Iterator[list[Attention]]:
    """Puts the attention by hand into the blocks, and takes it out again."""
    stock = [(attn, attn.processor) for attn, _, _ in model.layers()]
    layers = [cls(place, joint) for _, cls, joint in model.layers()]
    for (attn, _), layer in zip(stock, layers, strict=True):
        attn.processor = layer
    try:
        yield layers
    finally:
        for attn, processor in stock:
            attn.processor = processor

"""The formulas of three schedulers, written out for one patch at a time. Noise levels are the stock scheduler's.

Each `step(patch, step, prediction, x)` returns the patch's next latents. As in diffusers, flow matching and
DPM-Solver++ round the sample to float32 first, whatever the dtype of the pipeline.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, Literal

import torch
from diffusers import DDIMScheduler, DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler
from torch import Tensor

from tests.cache.hand_cache import HandCache
from tests.parallel.pipefusion.attention import Attention, Keys, Place
from tests.parallel.pipefusion.simulated_families import FAMILIES, Family


class FlowMatching:
    """Euler's method on `dx/dsigma = v` (arXiv 2210.02747)."""

    def __init__(self, scheduler: Any) -> None:
        self._sigmas = scheduler.sigmas

    def step(self, patch: int, step: int, v: Tensor, x: Tensor) -> Tensor:
        moved = x.float() + (self._sigmas[step + 1] - self._sigmas[step]) * v
        return moved.to(v.dtype)


class Ddim:
    """DDIM without noise: the predicted picture, noised again to the next level (arXiv 2010.02502, equation 12)."""

    def __init__(self, scheduler: Any) -> None:
        stride = scheduler.config.num_train_timesteps // len(scheduler.timesteps)
        here = [int(t) for t in scheduler.timesteps]
        self._alphas = [scheduler.alphas_cumprod[t] for t in here]
        self._next = [scheduler.alphas_cumprod[t - stride] if t >= stride else torch.tensor(1.0) for t in here]

    def step(self, patch: int, step: int, eps: Tensor, x: Tensor) -> Tensor:
        now, then = self._alphas[step], self._next[step]
        picture = (x - (1 - now) ** 0.5 * eps) / now**0.5
        return then**0.5 * picture + (1 - then) ** 0.5 * eps


class DpmSolver:
    """DPM-Solver++(2M) (arXiv 2211.01095, algorithm 2), of first order in the first and in the last step.

    The only one with a history: the last predicted picture, which belongs to a patch.
    """

    def __init__(self, scheduler: Any) -> None:
        ratio = scheduler.sigmas
        self._alpha = 1 / (ratio**2 + 1) ** 0.5
        self._sigma = ratio * self._alpha
        self._lambda = self._alpha.log() - self._sigma.log()
        self._last = len(ratio) - 2
        self._history: dict[int, Tensor] = {}

    def step(self, patch: int, step: int, eps: Tensor, x: Tensor) -> Tensor:
        picture = (x - self._sigma[step] * eps) / self._alpha[step]
        before, self._history[patch] = self._history.get(patch), picture
        h = self._lambda[step + 1] - self._lambda[step]
        towards = picture
        if before is not None and step < self._last:
            ratio = (self._lambda[step] - self._lambda[step - 1]) / h
            towards = picture + (picture - before) / (2 * ratio)
        shrunk = self._sigma[step + 1] / self._sigma[step] * x.float()
        return (shrunk + self._alpha[step + 1] * (1 - (-h).exp()) * towards).to(eps.dtype)


SOLVERS: dict[type, Any] = {
    FlowMatchEulerDiscreteScheduler: FlowMatching,
    DDIMScheduler: Ddim,
    DPMSolverMultistepScheduler: DpmSolver,
}


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
                cache.step = step
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

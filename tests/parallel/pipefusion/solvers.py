"""The formulas of three schedulers, written out for one patch at a time. Noise levels are the stock scheduler's.

Each `step(patch, step, prediction, x)` returns the patch's next latents. As in diffusers, flow matching and
DPM-Solver++ round the sample to float32 first, whatever the dtype of the pipeline.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import DDIMScheduler, DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler
from torch import Tensor


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

"""Whether a schedule loses less under a plan with stale keys if it is fitted under that plan.

    python -m benchmarks.plan_fits --plan patches=4 --computed 8 --tries 16
    python -m benchmarks.plan_fits --plan distrifusion=2 --computed 10

`patches=4` in one process has the images of `pipefusion=4 patches=4`. Images are compared with those of all steps
without a plan. The first captions are held out, and the last ones are fitted to.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

import ditile
from ditile.cache.fitted.schedule import FOLDER, Schedule, StepBudget
from ditile.distributed import env
from ditile.distributed.launch import launch
from ditile.plan.plan import Plan
from ditile.runner.runner import parallelize
from ditile_lab.quality.captions import load_captions
from ditile_lab.quality.fit import StepFit
from ditile_lab.quality.metrics import ImageArrays, compute_psnr

MODEL = "shapes-flux"
Images = tuple[ImageArrays, NDArray[np.float64]]


class PlanFit:
    """Generates the same captions with and without a plan, and fits schedules under it."""

    def __init__(self, plan: str, computed: int, count: int) -> None:
        self.schedule = Schedule.read(FOLDER / f"{MODEL}-20.json")
        self.shipped = self.schedule.select_budget(computed)
        self.plan = Plan.parse(plan)
        self.pipe = ditile.load(MODEL)
        self.pipe.set_progress_bar_config(disable=True)
        captions = [caption.text for caption in load_captions("bundled", None, 10**6)]
        self.held_out, self.fitted = captions[:count], captions[-count:]
        self.plain = {name: self.draw(getattr(self, name), Plan()) for name in ("held_out", "fitted")}
        self.factors = np.diff([*self.schedule.identity.sigmas, 0.0])[:, None]
        # Latents change by the prediction times a factor. The first one is unknown, and no forecast needs it.
        self.predictions = self.predict(self.plain["fitted"][1])
        gram = self.predictions @ self.predictions.T / self.predictions.shape[1]
        self.step_fit = StepFit(gram, list(abs(self.factors[:, 0])), {0, 1, 2}, corrects_drift=True)

    def predict(self, latents: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the prediction of each step; zeros for the first."""
        return np.diff(latents, axis=0, prepend=latents[:1]) / self.factors

    def draw(self, captions: Sequence[str], plan: Plan, budget: StepBudget | None = None) -> Images:
        """Return the images of captions, and the latents `[steps, numbers]` after each step."""
        latents: list[Any] = []

        def note_latents(pipe: Any, step: int, timestep: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
            latents.append(tensors["latents"].double().flatten().numpy())
            return {}

        if budget is not None:
            schedule = self.schedule.model_copy(update={"budgets": (budget,)})
            ditile.enable_cache(self.pipe, ditile.FittedScheduleConfig(steps=budget.size, schedule=schedule))
        runner = None
        if plan != Plan():
            runner = parallelize(self.pipe, plan, device="cpu", keep_weights=True)
        call = ditile.defaults(MODEL) | {"num_inference_steps": 20, "negative_prompt": [""] * len(captions)}
        generators = [torch.Generator().manual_seed(seed) for seed in range(len(captions))]
        call |= {"generator": generators, "output_type": "np", "callback_on_step_end": note_latents}
        result = (runner or self.pipe)(captions, **call)
        if runner is not None:
            runner.restore()
        ditile.disable_cache(self.pipe)
        env.report_progress()
        return (result.images * 255).round().astype(np.uint8), np.stack(latents)

    def score(self, name: str, budget: StepBudget | None) -> NDArray[Any]:
        """Return the PSNR of each image under the plan against its image of all steps without one."""
        return compute_psnr(self.draw(getattr(self, name), self.plan, budget)[0], self.plain[name][0])

    def fit_weights(self, budget: StepBudget, drift_share: float) -> StepBudget:
        """Fit the weights to what the steps of a budget compute under the plan, and a share of the latents' drift."""
        latents = self.draw(self.fitted, self.plan, budget)[1]
        outputs = self.predict(latents)
        drifts = latents - self.plain["fitted"][1]
        weights: dict[int, tuple[float, float]] = {}
        for step in budget.weights:
            before, newest = [number for number in budget.computed if number < step][-2:]
            anchors = outputs[[newest, before]]
            wanted = self.predictions[step] - drift_share * drifts[step - 1] / self.factors[step]
            first, second = np.linalg.lstsq(anchors.T, wanted, rcond=None)[0]
            weights[step] = (float(first), float(second))
        return budget.model_copy(update={"weights": weights})

    def try_steps(self, tries: int) -> StepBudget:
        """Move one computed step at a time by one, and keep what makes the images under the plan closer."""
        best = self.shipped
        best_db = self.score("fitted", best).mean()
        tried = {best.computed}
        improved = True
        while improved:
            improved = False
            for place in range(best.size - 1, 2, -1):
                for change in (1, -1):
                    moved = list(best.computed)
                    moved[place] += change
                    steps = tuple(sorted(set(moved)))
                    if len(steps) < best.size or steps[-1] > 19 or steps in tried or len(tried) > tries:
                        continue
                    tried.add(steps)
                    budget = self.step_fit._make_budget(steps, 1.0)
                    decibels = self.score("fitted", budget).mean()
                    if decibels > best_db + 0.02:
                        best, best_db, improved = budget, decibels, True
        return best


def compare(plan: str, computed: int, count: int, tries: int) -> None:
    """Print a line for each way to fit, with the mean and the worst PSNR of the held-out captions."""
    fit = PlanFit(plan, computed, count)
    budgets = {"all steps": None, "as it comes": fit.shipped}
    for share in (0.0, 0.5):
        # The second fit sees what the first one changed.
        budgets[f"weights, {share:g} of the drift"] = fit.fit_weights(fit.fit_weights(fit.shipped, share), share)
    if tries:
        budgets["steps tried"] = fit.try_steps(tries)
    for name, budget in budgets.items():
        decibels = fit.score("held_out", budget)
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"{plan}, {name}: {decibels.mean():.2f} ({decibels.min():.2f})", flush=True)


def main() -> None:
    """Measure on the ranks of the plan."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", default="patches=4")
    parser.add_argument("--computed", type=int, default=8, help="computed steps of 20")
    parser.add_argument("--captions", type=int, default=8, help="captions to fit to, and held out")
    parser.add_argument("--tries", type=int, default=0, help="other steps to try, of all captions each")
    options = parser.parse_args()
    launch(compare, Plan.parse(options.plan).world, tuple(vars(options).values()), threads=1, stall_timeout=600.0)


if __name__ == "__main__":
    main()

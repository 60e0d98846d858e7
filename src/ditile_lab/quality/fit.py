"""The fit of computed steps and forecast weights to the predictions of full runs, for every budget.

Let v_t be the scheduler's input in step t. A skipped v_t is forecast as a sum of the newest two computed ones, with the
weights of least squares. All errors are then sums of the v, so their mean squares follow from the Gram matrix G[s, t] =
mean of v_s v_t: with c the coefficients of an error of the final latents, its mean square is c' G c.

Errors within one gap between computed steps point the same way, and are added before they are squared; those of
different gaps are added as squares. So the cost of a gap depends only on its ends and the computed step before it, and
dynamic programming finds the best steps. Compare DPCache (arXiv 2602.22654), which adds errors of features instead.

Once the steps are chosen, a forecast may also correct the drift of the latents from forecasts in earlier gaps. The
expected error is then that of all forecasts added up, since a corrected part is not an error.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ditile.cache.calls.scheduled import FORCED_STEPS
from ditile.cache.fitted.schedule import FEWEST_FORECAST_STEPS, StepBudget

EXACT_DB = 100.0
"""The value that stands for no error."""

RIDGE = 1e-6
"""Added to the diagonal of least squares, relative to its mean, since two outputs may be nearly equal."""

DRIFT_LEFT = 0.7
"""The share of the drift from forecasts that is left to the next forecast; a computed step corrects the rest.

With it, shapes-flux gained 3 dB at half of the steps, and hardly less with 1.
"""

LEAST_GAIN = 0.5
"""The least gain, relative to the mean one, for which a first step is forced.

DPM-Solver++ hardly uses its first predictions: with all three forced, shapes-pixart lost 4 dB at half of the steps.
"""

STEPS_OF_FORCED = 20
"""The number of steps for which `FORCED_STEPS` was found. With more steps, later ones are as far on the way."""

Matrix = NDArray[np.float64]
Vector = NDArray[np.float64]


def fit_budgets(
    gram: Matrix,
    gains: Sequence[float],
    switches: Collection[int] = (),
    mean_square: float = 1.0,
    *,
    has_exact_gains: bool = False,
) -> list[StepBudget]:
    """Fit the best steps for each number of computed steps; see `StepFit`.

    Args:
        switches: the steps that call another model than the step before.
        has_exact_gains: whether the gains are the scheduler's own steps rather than measured.
    """
    num_steps = len(gram)
    first = choose_first_steps(num_steps)
    if not has_exact_gains:
        first = [step for step in first if gains[step] >= LEAST_GAIN * np.mean(gains)]
    forced = add_switches(first, switches, num_steps)
    if num_steps >= FEWEST_FORECAST_STEPS:
        budgets = StepFit(gram, gains, forced, mean_square, corrects_drift=has_exact_gains).fit_all_budgets()
        if num_steps > STEPS_OF_FORCED and not switches:
            # With six of 48 steps and three of them forced, shapes-flux lost 4 dB.
            free = StepFit(gram, gains, {0}, mean_square, corrects_drift=has_exact_gains).fit_all_budgets()
            few = 2 * len(forced)
            by_size = {budget.size: budget for budget in free if budget.size <= few}
            for budget in budgets:
                by_size.setdefault(budget.size, budget)
            return list(by_size.values())
        return budgets
    budgets = StepFit(gram, gains, forced, mean_square, reuses=True).fit_all_budgets()
    if not switches:
        # With few steps in all, there may be time for only two.
        free = StepFit(gram, gains, {0}, mean_square, reuses=True).fit_all_budgets()
        budgets = [budget for budget in free if budget.size < budgets[0].size] + budgets
    return budgets


def compute_gram_matrix(predictions: Sequence[Tensor]) -> Matrix:
    """Compute the mean products `[N, N]` of the predictions of N steps, in float64."""
    count = len(predictions)
    gram = np.zeros((count, count))
    flat = [prediction.detach().reshape(-1).cpu().double().numpy() for prediction in predictions]
    for row in range(count):
        for column in range(row + 1):
            product = flat[row] @ flat[column]
            gram[row, column] = product / len(flat[row])
            gram[column, row] = gram[row, column]
    return gram


class StepFit:
    """Fits schedules to a Gram matrix.

    Args:
        gram: mean products of predictions `[N, N]`.
        gains: the effect on the final latents of an error in each step's prediction, with mean square 1.
        forced: steps that must compute, the first among them.
        mean_square: the mean square of the final latents; errors are in dB below it.
        reuses: whether the newest output is reused unchanged, which suits a few steps.
        corrects_drift: whether a forecast corrects the drift from earlier forecasts. This is only for exact `gains`:
            with the measured ones of UniPC it made images worse.
    """

    def __init__(
        self,
        gram: Matrix,
        gains: Sequence[float],
        forced: Collection[int],
        mean_square: float = 1.0,
        *,
        reuses: bool = False,
        corrects_drift: bool = False,
    ) -> None:
        self._gram = gram
        self._gains = gains
        self._num_steps = len(gram)
        self._forced = frozenset(forced) | {0}
        self._mean_square = mean_square
        self._reuses = reuses
        self._drift_left = DRIFT_LEFT if corrects_drift else 0.0
        self._gap_errors: dict[tuple[int, int, int], float] = {}
        # At index `end` is the number of forced steps before it.
        is_forced = [step in self._forced for step in range(self._num_steps)]
        self._forced_until = [0, *itertools.accumulate(is_forced)]

    def fit_weights(self, before: int, newest: int, step: int, drift: Vector | None = None) -> tuple[float, float]:
        """Fit the weights of the two newest computed predictions in the forecast of a step.

        The first weight is for `newest`, the second for `before`, which is -1 if the newest is the first one. The
        forecast also corrects `drift`, if given.
        """
        if self._reuses or before < 0:
            return 1.0, 0.0
        anchors = [newest, before]
        products = self._gram[np.ix_(anchors, anchors)]
        ridge = RIDGE * np.trace(products) / 2 * np.eye(2)
        wanted = self._gram[anchors, step]
        if drift is not None:
            wanted = wanted - self._gram[anchors] @ drift / self._gains[step]
        first, second = np.linalg.solve(products + ridge, wanted)
        return float(first), float(second)

    def fit_all_budgets(self) -> list[StepBudget]:
        """Fit the best steps for each number of computed steps, from the fewest possible to all but one."""
        best: list[StepBudget] = []
        # The newest two computed steps -> the least error so far, and the steps.
        paths: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {(-1, 0): (0.0, (0,))}
        for size in range(1, self._num_steps):
            endings: list[tuple[float, tuple[int, ...]]] = []
            for (before, newest), (error, steps) in paths.items():
                if self._may_follow(newest, self._num_steps):
                    endings.append((error + self._measure_gap(before, newest, self._num_steps), steps))
            if endings and size > 1:
                error, steps = min(endings)
                best.append(self._make_budget(steps, error))
            paths = self._extend_paths(paths)
        return best

    def _extend_paths(
        self, paths: Mapping[tuple[int, int], tuple[float, tuple[int, ...]]]
    ) -> dict[tuple[int, int], tuple[float, tuple[int, ...]]]:
        """Extend each path by one computed step, and keep the best one for the same newest two steps."""
        longer: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {}
        for (before, newest), (error, steps) in paths.items():
            for step in range(newest + 1, self._num_steps):
                if not self._may_follow(newest, step):
                    break
                path = (error + self._measure_gap(before, newest, step), (*steps, step))
                if (newest, step) not in longer or path < longer[newest, step]:
                    longer[newest, step] = path
        return longer

    def _may_follow(self, newest: int, step: int) -> bool:
        """Return whether no forced step lies between two computed ones."""
        return self._forced_until[step] == self._forced_until[newest + 1]

    def _measure_gap(self, before: int, newest: int, end: int) -> float:
        """Measure a gap: add the errors of the steps between two computed ones, and return the mean square."""
        key = (before, newest, end)
        if key not in self._gap_errors:
            coefficients: Vector = np.zeros(self._num_steps)
            for step in range(newest + 1, end):
                weights = self.fit_weights(before, newest, step)
                coefficients += self._measure_miss(before, newest, step, weights)
            self._gap_errors[key] = max(float(coefficients @ self._gram @ coefficients), 0.0)
        return self._gap_errors[key]

    def _make_budget(self, computed: tuple[int, ...], error: float) -> StepBudget:
        """Make the weights of all other steps; a forecast may correct the drift from earlier gaps."""
        weights: dict[int, tuple[float, float]] = {}
        # These are coefficients of the error of the final latents so far: the part left by computed steps, and all of
        # it.
        drift: Vector = np.zeros(self._num_steps)
        total: Vector = np.zeros(self._num_steps)
        for step in range(self._num_steps):
            if step in computed:
                drift *= self._drift_left
                continue
            earlier = [-1, *[number for number in computed if number < step]]
            before, newest = earlier[-2:]
            moved = drift if self._drift_left > 0 else None
            first, second = self.fit_weights(before, newest, step, moved)
            weights[step] = (round(first, 5), round(second, 5))
            miss = self._measure_miss(before, newest, step, weights[step])
            drift += miss
            total += miss
        if self._drift_left > 0:
            error = float(total @ self._gram @ total)
        predicted = EXACT_DB
        if error > 0.0:
            predicted = min(EXACT_DB, 10 * math.log10(self._mean_square / error))
        return StepBudget(computed=computed, weights=weights, predicted_db=round(predicted, 2))

    def _measure_miss(self, before: int, newest: int, step: int, weights: tuple[float, float]) -> Vector:
        """Return the coefficients of one forecast's error in the final latents."""
        coefficients: Vector = np.zeros(self._num_steps)
        coefficients[newest] += self._gains[step] * weights[0]
        if before >= 0:
            coefficients[before] += self._gains[step] * weights[1]
        coefficients[step] -= self._gains[step]
        return coefficients


def choose_first_steps(num_steps: int) -> list[int]:
    """Return the first steps that must compute. With more than 20 steps they are later, but as far on the way."""
    scale = max(1.0, num_steps / STEPS_OF_FORCED)
    return [round(step * scale) for step in range(min(FORCED_STEPS, num_steps))]


def add_switches(first: Iterable[int], switches: Iterable[int], num_steps: int) -> set[int]:
    """Return the steps that must compute: the first ones, and two from each switch to another model."""
    forced = set(first)
    for switch in switches:
        forced |= {switch, min(switch + 1, num_steps - 1)}
    return forced

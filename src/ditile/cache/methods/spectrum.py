"""Spectrum: the output of the last block is forecast by Chebyshev polynomials, in ever longer gaps (arXiv 2603.01623).

For each token and channel the output at step t is h(t) = sum of c_k T_k(2 t / steps - 1), fitted to all computed steps
by ridge regression. After a warmup, one step is computed in each window, and each window is longer than the last.

Cost: degree + 1 sums, each as large as the tokens, in float32 at least; two more outputs where the forecast is mixed
with a line. Nothing is compared or sent, because every rank knows the schedule and each token is forecast by itself. A
window of 1 that does not grow computes all steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from ditile.cache.config import Amount, BlockCacheConfig, Calibration, Count, DBCacheConfig, Positive
from ditile.plan.option_classes import checked

Share = Annotated[float, Field(ge=0, le=1)]
Ridge = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True, slots=True)
class SpectrumConfig(BlockCacheConfig):
    """Spectrum: computes one step in each window, which grows, and forecasts the others by Chebyshev polynomials.

    Attributes:
        flex_window: steps by which the window grows at each computed step after the warmup; 0.75 computes 14 of 50.
        window_size: steps of the first window; with 1, and a flex_window of 0, all steps are computed.
        warmup_steps: the first steps, which compute.
        m: the degree of the polynomials.
        lam: the ridge of the regression.
        w: the share of the polynomials in a forecast; the rest is the line through the last two computed steps.
        couple: always "batch", because all images skip the same steps.

    Other attributes are as in `BlockCacheConfig`; names and defaults are as in the authors' code.

    Raises:
        ModelError: if a field is not known, or a value is out of its range.
    """

    WORDS = {"spectrum": "flex_window", "window": "window_size", "W": "warmup_steps", "w": "w", "m": "m", "lam": "lam"}
    HINT = "lower warmup_steps, or raise window_size or flex_window"
    HAS_FORECAST = True

    flex_window: Amount = 0.75
    window_size: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 2.0
    warmup_steps: Positive = 5
    m: Count = 4
    lam: Ridge = 0.1
    w: Share = 1.0
    couple: Literal["batch"] = "batch"

    @checked()
    def resolve_for(self, steps: int, calibrator: Calibration | None) -> tuple[DBCacheConfig, Calibration | None]:
        """Return the windows of `steps` steps as a mask, and a forecast in place of the `calibrator`."""
        mask = [1] * min(self.warmup_steps, steps)
        window = self.window_size
        place = 0
        while len(mask) < steps:
            place += 1
            # The length of a window grows by a part of a step, but counts in whole steps.
            if place < int(window):
                mask.append(0)
                continue
            mask.append(1)
            window += self.flex_window
            place = 0
        # No block has to run in a step that is forecast.
        rules = DBCacheConfig(
            Fn_compute_blocks=0,
            max_warmup_steps=0,
            steps_computation_mask=mask,
            steps_computation_policy="static",
        )
        return rules, ChebyshevCalibratorConfig(steps=steps, degree=self.m, ridge=self.lam, share=self.w)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChebyshevCalibratorConfig(Calibration):
    """The forecast of Spectrum in a generation.

    Attributes:
        degree, ridge, share: `m`, `lam` and `w` of `SpectrumConfig`.

    Other attributes are as in `Calibration`. By default the image tokens that the last block returns are forecast.
    """

    # The time of the polynomials goes from -1 to 1 in this number of steps.
    steps: Positive = 50
    degree: Count = 4
    ridge: Ridge = 0.1
    share: Share = 1.0
    enable_encoder_calibrator: bool = False
    calibrator_cache_type: Literal["residual", "hidden_states"] = "hidden_states"

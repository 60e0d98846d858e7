"""MagCache: a table of ratios, measured once for a model, says which steps are left out (arXiv 2506.09045).

The ratio of a step is the growth, since the step before, of what all blocks add together: the norm now divided by the
norm before, as a mean over tokens. After a computed step the ratios are multiplied. Steps are left out while the sum of
|1 - product| is at most a threshold, up to a limit of steps in a row.

Cost: one step's residual is kept. Nothing is compared or sent, because every rank knows the table. A threshold of 0
leaves nothing out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ditile.cache.config import Amount, BlockCacheConfig, Calibration, Count, DBCacheConfig
from ditile.plan.errors import ModelError, suggest_nearest
from ditile.plan.option_classes import checked

RATIOS_BY_NAME = {
    "flux": (
        1.0, 1.21094, 1.11719, 1.07812, 1.0625, 1.03906, 1.03125, 1.03906, 1.02344, 1.03125, 1.02344, 0.98047, 1.01562,
        1.00781, 1.0, 1.00781, 1.0, 1.00781, 1.0, 1.0, 0.99609, 0.99609, 0.98047, 0.98828, 0.96484, 0.95703, 0.93359,
        0.89062,
    ),
}  # fmt: skip
"""Tables from diffusers, for 28 steps of FLUX.1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MagCacheConfig(BlockCacheConfig):
    """MagCache: a step is left out by a table of ratios, measured once for a model.

    Attributes:
        threshold: a step computes where the sum of errors since the last computed step exceeds this; 0 leaves none out.
        max_skip_steps: the limit of steps in a row that are left out.
        retention_ratio: the share of the steps, from the first, that compute.
        mag_ratios: a number for each step of the run that measured them, taken at the nearest step for other numbers of
            steps; `flux`; or text such as "1.0,1.2,1.1". Each checkpoint and scheduler has its own ratios.
        calibrate: measure the ratios and leave nothing out; `summary` has them afterwards.
        couple: all images are left out in the same steps, so it is always "batch".

    Other attributes are as in `BlockCacheConfig`; names and defaults are as in diffusers.

    Raises:
        ModelError: if there are no ratios, a field is not known, or a value is out of its range.
    """

    WORDS = {
        "mag": "threshold",
        "K": "max_skip_steps",
        "keep": "retention_ratio",
        "ratios": "mag_ratios",
        "calibrate": "calibrate",
    }
    HINT = "raise threshold, or lower retention_ratio"

    threshold: Amount = 0.06
    max_skip_steps: Count = 3
    retention_ratio: Amount = 0.2
    mag_ratios: Sequence[float] | str | None = None
    calibrate: bool = False
    couple: Literal["batch"] = "batch"

    def __post_init__(self) -> None:
        BlockCacheConfig.__post_init__(self)
        if self.mag_ratios is None and not self.calibrate:
            raise ModelError(
                "MagCacheConfig has no mag_ratios, which each model has its own of; measure them in one run with "
                f"calibrate=True, which `summary` then shows, or name one of {', '.join(RATIOS_BY_NAME)}"
            )
        object.__setattr__(self, "mag_ratios", _read_ratios(self.mag_ratios))

    @checked()
    def resolve_for(self, steps: int, calibrator: Calibration | None) -> tuple[DBCacheConfig, Calibration | None]:
        """Return the table for `steps` steps as a mask, and the `calibrator`."""
        fields: dict[str, Any] = {"Fn_compute_blocks": 0, "max_warmup_steps": 0, "store_dtype": self.store_dtype}
        # Ratios may be exactly 1, so a threshold of 0 would still leave steps out.
        if self.calibrate or not self.threshold:
            return DBCacheConfig(**fields, residual_diff_threshold=0.0), calibrator
        mask = plan_computed_steps(self, steps)
        return DBCacheConfig(**fields, steps_computation_mask=mask, steps_computation_policy="static"), calibrator


def plan_computed_steps(config: MagCacheConfig, steps: int) -> list[int]:
    """Plan a generation of `steps` steps: 1 for each step that computes, and 0 for each that is left out."""
    ratios = config.mag_ratios
    assert isinstance(ratios, tuple)
    last = len(ratios) - 1
    # Halves are rounded up, as diffusers does.
    retained = int(config.retention_ratio * steps + 0.5)
    mask = []
    ratio = 1.0
    error = 0.0
    streak = 0
    # The product of the ratios and the sum of the errors begin again at each computed step.
    for step in range(steps):
        if step < retained:
            mask.append(1)
            continue
        # The ratio of the nearest measured step: the first and the last step of both runs belong together.
        nearest = round(step * last / (steps - 1)) if steps > 1 else last
        ratio *= ratios[nearest]
        streak += 1
        error += abs(1 - ratio)
        # The first step always computes, because nothing is stored before it.
        if step and error <= config.threshold and streak <= config.max_skip_steps:
            mask.append(0)
            continue
        mask.append(1)
        ratio = 1.0
        error = 0.0
        streak = 0
    return mask


def _read_ratios(ratios: Any) -> tuple[float, ...] | None:
    """Read a table of ratios, its name, or its text. Raises `ModelError` if the ratios are not numbers above 0."""
    if ratios is None:
        return None
    # Text is a name or a list of numbers.
    if isinstance(ratios, str) and ratios.isidentifier():
        if ratios not in RATIOS_BY_NAME:
            raise ModelError(f"mag_ratios={ratios!r} is not a known table; {suggest_nearest(ratios, RATIOS_BY_NAME)}")
        return RATIOS_BY_NAME[ratios]
    if isinstance(ratios, str):
        ratios = ratios.split(",")
    try:
        table = tuple(map(float, ratios))
    except (TypeError, ValueError):
        raise ModelError(f"mag_ratios={ratios!r} are not numbers; give such as '1.0,1.2,1.1', or 'flux'") from None
    if not table or not all(0 < ratio < float("inf") for ratio in table):
        raise ModelError(f"mag_ratios={ratios!r}: each is a number above 0; give such as '1.0,1.2,1.1', or 'flux'")
    return table

"""MagCache: a table of ratios, measured once for a model, says which steps are left out (arXiv 2506.09045).

The ratio of a step is how much what all blocks add has grown since the step before: the mean over tokens of the two
norms' quotient. After a computed step the ratios are multiplied; a step is left out while the sum of |1 - product| is
at most a threshold, and the steps in a row are within a limit.

Cost: one step's residual is kept. Nothing is compared or sent, as every rank knows the table. A threshold of 0 leaves
nothing out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ditile.cache.config import Amount, BlockCacheConfig, Calibration, Count, DBCacheConfig
from ditile.plan.errors import ModelError, suggest_nearest
from ditile.plan.option_classes import checked

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ditile.cache.hooks import CacheHook
    from ditile.cache.segment import Residuals
    from ditile.cache.skip_decision import CacheCall
    from ditile.cache.skip_rules import DecisionRecord
    from ditile.model.hooks.protocols import SkipAgreement

RATIOS_BY_NAME = {
    "flux": (
        1.0, 1.21094, 1.11719, 1.07812, 1.0625, 1.03906, 1.03125, 1.03906, 1.02344, 1.03125, 1.02344, 0.98047, 1.01562,
        1.00781, 1.0, 1.00781, 1.0, 1.00781, 1.0, 1.0, 0.99609, 0.99609, 0.98047, 0.98828, 0.96484, 0.95703, 0.93359,
        0.89062,
    ),
}  # fmt: skip
"""Tables from diffusers, for 28 steps of FLUX.1."""

SMALLEST_NORM = 1e-8
"""The number that is added to a norm before it divides, as in diffusers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MagCacheConfig(BlockCacheConfig):
    """MagCache: a step is left out by a table of ratios, measured once for a model.

    Attributes:
        threshold: a step computes where the sum of errors since the last computed step is more; 0 leaves nothing out.
        max_skip_steps: steps in a row that are left out, at most.
        retention_ratio: the share of the steps, from the first, that compute.
        mag_ratios: a number for each step of the run that measured them, taken at the nearest step for other numbers of
            steps; `flux`; or text such as "1.0,1.2,1.1". A checkpoint and scheduler have their own.
        calibrate: measure the ratios and leave nothing out; `summary` has them afterwards.
        couple: all images are left out in the same steps, so it is always "batch".

    The others are as in `BlockCacheConfig`; names and defaults are those of diffusers.

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
    assert isinstance(config.mag_ratios, tuple)
    # Halves are rounded up, as diffusers does.
    retained = int(config.retention_ratio * steps + 0.5)
    mask = []
    ratio = 1.0
    error = 0.0
    streak = 0
    # The two factors of an error are kept since the last computed step, and not since the first one.
    for step, step_ratio in enumerate(interpolate_ratios(config.mag_ratios, steps)):
        if step < retained:
            mask.append(1)
            continue
        ratio *= step_ratio
        streak += 1
        error += abs(1 - ratio)
        # The first step computes always, as nothing is stored before it.
        if step and error <= config.threshold and streak <= config.max_skip_steps:
            mask.append(0)
            continue
        mask.append(1)
        ratio = 1.0
        error = 0.0
        streak = 0
    return mask


def interpolate_ratios(ratios: Sequence[float], steps: int) -> list[float]:
    """Return the ratio of the nearest measured step, for each of `steps` steps."""
    # The first and the last step of both runs belong together.
    last = len(ratios) - 1
    if steps == 1:
        return [ratios[last]]
    return [ratios[round(step * last / (steps - 1))] for step in range(steps)]


class MagCalibration:
    """Measures the ratios of a chain of blocks, all of which run.

    Args:
        hooks: around the blocks, in order.

    Attributes:
        middle: the blocks that may be left out: none.
        memory_bytes: bytes that are kept.
        needs_control: whether sizes of what enters between blocks count.
    """

    middle = range(0)
    memory_bytes = 0
    needs_control = False

    def __init__(self, hooks: Sequence[CacheHook], num_steps: int) -> None:
        self._num_steps = num_steps
        self._first = hooks[0]
        self._last = hooks[-1]
        self._start: Tensor | None = None
        self._norms: dict[int, Tensor] = {}
        self._sums: dict[int, Tensor] = {}

    def restrict_to_blocks(self, owned: Collection[nn.Module] | None) -> None:
        """Raise `ModelError` if the blocks are on several stages. None of these knows what all blocks add."""
        if owned is not None:
            raise ModelError(
                "MagCacheConfig(calibrate=True) measures what all blocks add, and pipefusion has them on several "
                "ranks; measure on one rank, or with ulysses, ring, tensor, cfg or data"
            )

    def begin_forward(self, call: CacheCall, agreement: SkipAgreement) -> None:
        """Prepare the hooks of the first and the last block for a call of the model."""
        self._call = call
        self._agreement = agreement
        # The last block may also be the first one, and then needs the handler that measures.
        self._first.handle = self._keep_start
        self._last.handle = self._measure_end

    def bypass_cache(self) -> None:
        """Measure nothing."""
        self._start = None
        self._first.handle = None
        self._last.handle = None

    def describe_call(self) -> None:
        """Return None: the measurements are kept in Python."""

    def iterate_residuals(self) -> Iterator[Residuals]:
        """Return an empty iterator: nothing is reused."""
        return iter(())

    def iterate_records(self) -> Iterator[tuple[int, int, int, DecisionRecord]]:
        """Return an empty iterator: nothing was decided."""
        return iter(())

    @property
    def ratios(self) -> list[float]:
        """Return the mean ratio of each step of the generation, over tokens, images and branches of guidance."""
        # Nothing comes before the first step, and other steps may call another model.
        ratios = [1.0] * self._num_steps
        for step, (total, count) in self._sums.items():
            ratios[step] = float(total / count)
        return ratios

    def _keep_start(self, hook: CacheHook, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A block may write into its input.
        self._start = hook.read_tokens(args, kwargs).image.clone()
        return hook.forward(*args, **kwargs)

    def _measure_end(self, hook: CacheHook, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        start = self._start
        if start is None:
            start = hook.read_tokens(args, kwargs).image.clone()
        self._start = None
        out = hook.forward(*args, **kwargs)
        # The ratio is computed for each token, in float32: it is a mean of quotients, and not a quotient of means.
        norms = (hook.unpack_tokens(out).image - start).float().norm(dim=-1)
        # Guidance by two calls has two series of residuals.
        before = self._norms.get(self._call.moment.branch)
        self._norms[self._call.moment.branch] = norms
        if before is not None:
            ratios = norms / (before + SMALLEST_NORM)
            # Ranks that split the tokens have a part of them each.
            sums = self._agreement.sum_over_ranks(ratios.new_tensor([float(ratios.sum()), ratios.numel()]))
            step = self._call.moment.step
            self._sums[step] = self._sums.get(step, 0) + sums
        return out


def _read_ratios(ratios: Any) -> tuple[float, ...] | None:
    """Read the numbers of a table, also by its name or from text. Raises `ModelError` if they are not numbers."""
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

"""Forecasts: what a stored tensor may be at a step that is not computed, from the steps that were (calibrators).

One instance continues one sequence, such as the image stream of one image. It keeps snapshots of computed steps and
nothing of cached ones, so that a forecast depends on computed steps alone, whatever was asked for in between.

    forecast = TaylorSeer(order=1)
    forecast.add(0, a)
    forecast.add(3, b)
    forecast.at(5)      # on the line through both
"""

from __future__ import annotations

import abc
import math
from typing import Protocol

import torch
from torch import Tensor

from ditile.cache.config import (
    Calibration,
    DMDCalibratorConfig,
    FoCaCalibratorConfig,
    StoreType,
    TaylorSeerCalibratorConfig,
)
from ditile.cache.dmd import DMD, Total, sum_over_one_rank
from ditile.errors import ModelError, StateError


class Forecaster(Protocol):
    """Continues one sequence of tensors of one shape."""

    @property
    def memory_bytes(self) -> int:
        """Bytes held in snapshots."""
        ...

    def add_computed_step(self, step: int, value: Tensor) -> None:
        """The value of a computed step, which is kept as it is: it must not be written to afterwards.

        Raises:
            StateError: unless the step is behind the last one.
        """
        ...

    def forecast_value(self, step: int) -> Tensor:
        """What the value may be at a later step, in its dtype. It may be a snapshot itself: not to be written to.

        Raises:
            StateError: if nothing was added.
        """
        ...


def build_forecaster(
    config: Calibration | None, stream: str, *, store_dtype: StoreType | None = None, total: Total = sum_over_one_rank
) -> Forecaster:
    """A forecast of a stream, as a config wants it; `Reuse` where it wants none.

    Args:
        config: None is no calibrator.
        stream: "image" or "text", which have a switch each.
        store_dtype: the type of snapshots; None is that of the values.
        total: sums a small matrix over the ranks that hold parts of the stream, for forecasts that look at all of it.

    Raises:
        ModelError: if the config is of no known kind.
    """
    dtype = None if store_dtype is None else getattr(torch, store_dtype)
    if config is None or not (config.enable_calibrator if stream == "image" else config.enable_encoder_calibrator):
        return Reuse(dtype)
    if isinstance(config, TaylorSeerCalibratorConfig):
        return TaylorSeer(config.taylorseer_order, dtype, config.taylorseer_reach)
    if isinstance(config, FoCaCalibratorConfig):
        return FoCa(dtype)
    if isinstance(config, DMDCalibratorConfig):
        return DMD(config.dmd_history, config.dmd_rank or None, config.dmd_ridge, dtype, total)
    raise ModelError(f"{type(config).__name__} is no calibrator; try TaylorSeerCalibratorConfig()")


class _Newton(abc.ABC):
    """The last values as the last one and its divided differences: Newton's form of the polynomial through them.

    As large as the values themselves, but sums of it lose less: in half precision the difference of two rounded values
    is nearly exact, where a sum of values with large weights of both signs is not.

    Args:
        order: of the highest difference that is kept.
        store_dtype: the type of what is kept; None is that of the values.

    Attributes:
        steps: of the last values, the latest first.
    """

    def __init__(self, order: int, store_dtype: torch.dtype | None = None) -> None:
        self._order, self._dtype = order, store_dtype
        self._differences: list[Tensor] = []
        self._value_dtype = torch.float32
        self.steps: list[int] = []

    @abc.abstractmethod
    def compute_weights(self, step: int) -> list[float]:
        """What the forecast of a step makes of each difference; those without a weight are left out."""

    @property
    def memory_bytes(self) -> int:
        """Bytes held: order + 1 tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._differences)

    def add_computed_step(self, step: int, value: Tensor) -> None:
        """See `Forecast.add`."""
        if self.steps and step <= self.steps[0]:
            raise StateError(f"step {step} was added after step {self.steps[0]}; a new generation needs a new forecast")
        self._value_dtype = value.dtype
        steps = [step, *self.steps][: self._order + 1]
        differences = [value if self._dtype is None else value.to(self._dtype)]
        for k in range(1, len(steps)):
            change = torch.sub(differences[k - 1], self._differences[k - 1])
            differences.append(change.mul_(1 / (steps[0] - steps[k])))
        self.steps, self._differences = steps, differences

    def forecast_value(self, step: int) -> Tensor:
        """See `Forecast.at`."""
        if not self._differences:
            raise StateError("nothing was added that a forecast could continue")
        out, *differences = self._differences
        for k, (weight, difference) in enumerate(zip(self.compute_weights(step), differences, strict=False)):
            out = torch.add(out, difference, alpha=weight) if k == 0 else out.add_(difference, alpha=weight)
        return out.to(self._value_dtype)


class Reuse(_Newton):
    """The last value: the null object.

    Args:
        store_dtype: the type of snapshots; None is that of the values.
    """

    def __init__(self, store_dtype: torch.dtype | None = None) -> None:
        super().__init__(0, store_dtype)

    def compute_weights(self, step: int) -> list[float]:
        """None: there are no differences."""
        return []


class TaylorSeer(_Newton):
    """The polynomial through the last computed steps, expanded at the last of them (arXiv 2503.06923).

    With k + 1 steps computed so far the degree is min(k, order): a line as soon as there are two. It is exact on
    polynomials of that degree, whatever the gaps. A forecast is one pass over memory for each degree.

    Args:
        order: its degree; 0 is reuse.
        store_dtype: the type of snapshots; None is that of the values.
        reach: how far beyond the last computed step it goes, in gaps between the last two of them. What changes fast
            at first would be carried off by a line through the first two steps.
    """

    def __init__(self, order: int = 1, store_dtype: torch.dtype | None = None, reach: float | None = None) -> None:
        super().__init__(order, store_dtype)
        self._reach = reach

    def compute_weights(self, step: int) -> list[float]:
        """Products of the gaps from the computed steps."""
        steps, end = self.steps, float(step)
        if self._reach is not None and len(steps) > 1:
            end = min(end, steps[0] + self._reach * (steps[0] - steps[1]))
        gaps = [end - computed for computed in steps]
        return [math.prod(gaps[: k + 1]) for k in range(len(gaps) - 1)]


class FoCa(_Newton):
    """Forecast, then calibrate: the stored value as an ordinary differential equation (arXiv 2508.16211).

    The slope at the last computed step is that of the second order backward formula (BDF2), with gaps as they are. A
    step along it is the forecast; the same formula gives the slope there, and the mean of both slopes (Heun) the
    result. Two computed steps give a line, one gives reuse. It is exact on lines whatever the gaps; beside a parabola
    it counts curvature half as a gap grows, and so overshoots less far from the last computed step.

    The paper feeds forecasts back as if they had been computed. Here only computed steps count.

    Args:
        store_dtype: the type of snapshots; None is that of the values.
    """

    def __init__(self, store_dtype: torch.dtype | None = None) -> None:
        super().__init__(2, store_dtype)

    def compute_weights(self, step: int) -> list[float]:
        """Those of the mean of both slopes.

        With d1, d2 the divided differences at the last step n, g the gap to it and p the one before it, the slope at n
        is d1 + p d2. With w = g / p the slope at the forecast is d1 + p d2 (1 + w / (1 + w)).
        """
        steps = self.steps
        if len(steps) < 3:
            return [step - steps[0]] if len(steps) == 2 else []
        gap, before = step - steps[0], steps[0] - steps[1]
        ratio = gap / before
        return [gap, gap * before * (1 + ratio / (2 * (1 + ratio)))]

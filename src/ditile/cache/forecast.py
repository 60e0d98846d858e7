"""Forecasts a stored tensor at a step that is not computed, from the computed steps (calibrators).

One instance continues one sequence, such as the image stream of one image. It keeps snapshots of computed steps only,
so a forecast never depends on earlier forecasts.

    forecaster = TaylorSeer(order=1)
    forecaster.add_computed_step(0, a)
    forecaster.add_computed_step(3, b)
    forecaster.forecast_value(5)      # on the line through both
"""

from __future__ import annotations

import abc
import itertools
import math
import operator
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from ditile.cache.config import (
    Calibration,
    DMDCalibratorConfig,
    FoCaCalibratorConfig,
    StoreType,
    TaylorSeerCalibratorConfig,
)
from ditile.cache.methods.spectrum import ChebyshevCalibratorConfig
from ditile.plan.errors import ModelError, StateError

MakeSlot = Callable[[int, Tensor], Tensor]
"""(number, like) -> memory with the shape and type of `like`, which stays in place between generations."""

Total = Callable[[Tensor], Tensor]
"""Sums a small tensor on the CPU over the ranks that hold parts of the sequence; all of them call it."""


class ForecasterState(NamedTuple):
    """The steps of the snapshots and their kept tensors, the latest first; neither list is written in place."""

    steps: list[int]
    tensors: list[Tensor]


class Forecaster(abc.ABC):
    """Continues one sequence of tensors of one shape.

    Args:
        count: number of snapshots kept.
        store_dtype: the type of snapshots; None is the type of the values.
    """

    def __init__(self, count: int, store_dtype: torch.dtype | None = None) -> None:
        self._count = count
        self._dtype = store_dtype
        self._value_dtype = torch.float32
        self._steps: list[int] = []
        """The steps of the snapshots, the latest first."""
        self._tensors: list[Tensor] = []
        """The kept tensors, in the same order."""
        self.make_slot: MakeSlot | None = None
        """Makes memory that stays in place, by number; None if each step may use new memory."""
        self._slots: list[Tensor] = []

    @property
    def memory_bytes(self) -> int:
        """Return the number of kept bytes."""
        return sum(tensor.nbytes for tensor in self._tensors)

    def add_computed_step(self, step: int, value: Tensor) -> None:
        """Add the value of a computed step. It may be kept without a copy, so it must not be written to afterwards.

        Raises:
            StateError: unless the step is later than the last one.
        """
        if self._steps and step <= self._steps[0]:
            raise StateError(
                f"step {step} was added after step {self._steps[0]}; a new generation needs a new forecast"
            )
        self._value_dtype = value.dtype
        # Store the steps first: the kept part of a snapshot may depend on them.
        self._steps = [step, *self._steps][: self._count]
        if self._dtype is not None:
            value = value.to(self._dtype)
        self._store_snapshot(value)
        if self.make_slot is not None:
            self._move_to_slots(self.make_slot, value)

    def _move_to_slots(self, make_slot: MakeSlot, like: Tensor) -> None:
        """Move the kept tensors to memory that stays."""
        if not self._slots:
            self._slots = [make_slot(number, like) for number in range(self._count)]
        # Move the oldest tensor first: each one may be in the slot that the newer one moves to.
        for slot, tensor in reversed(list(zip(self._slots, self._tensors, strict=False))):
            slot.copy_(tensor)
        self._tensors = self._slots[: len(self._tensors)]

    @property
    def state(self) -> ForecasterState:
        """Return the steps and the tensors of the snapshots."""
        return ForecasterState(self._steps, self._tensors)

    @state.setter
    def state(self, state: ForecasterState) -> None:
        self._steps, self._tensors = state

    def note_played_step(self, step: int) -> None:
        """Count a computed step that a played tape has written to the memory that stays."""
        self._steps = [step, *self._steps][: self._count]
        self._tensors = self._slots[: len(self._steps)]

    def describe_state(self, step: int) -> Hashable | None:
        """Return the state on which a call at a step depends; None if it has values, or memory that does not stay."""
        if not self._slots:
            return None
        distances = tuple(step - computed_step for computed_step in self._steps)
        return distances, tuple(slot.data_ptr() for slot in self._slots)

    def forecast_value(self, step: int) -> Tensor:
        """Return the forecast at a later step, in the dtype of the values. It may be a snapshot: do not write to it.

        Raises:
            StateError: if nothing was added.
        """
        if not self._tensors:
            raise StateError("nothing was added that a forecast could continue")
        return self._continue_sequence(step).to(self._value_dtype)

    @abc.abstractmethod
    def _store_snapshot(self, snapshot: Tensor) -> None:
        """Keep the snapshot of the latest step."""

    @abc.abstractmethod
    def _continue_sequence(self, step: int) -> Tensor:
        """Return the forecast, in any dtype."""


def sum_over_one_rank(products: Tensor) -> Tensor:
    """Return the sums unchanged: one rank has the whole sequence."""
    return products


def build_forecaster(
    config: Calibration | None, stream: str, *, store_dtype: StoreType | None = None, total: Total = sum_over_one_rank
) -> Forecaster:
    """Build the forecaster of a stream from a config: `Reuse` if the config enables none.

    Args:
        config: None stands for no calibrator.
        stream: "image" or "text", each with its own switch.
        store_dtype: the type of snapshots; None is the type of the values.
        total: sums a small matrix over the ranks that hold parts of the stream.

    Raises:
        ModelError: if the config's class is unknown.
    """
    dtype = None if store_dtype is None else getattr(torch, store_dtype)
    if config is None:
        return Reuse(dtype)
    is_enabled = config.enable_calibrator if stream == "image" else config.enable_encoder_calibrator
    if not is_enabled:
        return Reuse(dtype)
    if isinstance(config, TaylorSeerCalibratorConfig):
        return TaylorSeer(config.taylorseer_order, dtype, config.taylorseer_reach)
    if isinstance(config, FoCaCalibratorConfig):
        return FoCa(dtype)
    if isinstance(config, DMDCalibratorConfig):
        return DMD(config.dmd_history, config.dmd_rank or None, config.dmd_ridge, dtype, total)
    if isinstance(config, ChebyshevCalibratorConfig):
        return Chebyshev(config)
    raise ModelError(f"{type(config).__name__} is not a calibrator; try TaylorSeerCalibratorConfig()")


class _Newton(Forecaster):
    """Keeps the last value and its divided differences: Newton's form of the polynomial through the last values.

    This takes as much memory as the values themselves, and rounds less: in half precision the difference of two
    rounded values is nearly exact, but a sum of values with large weights of both signs is not.

    Args:
        order: the order of the highest difference that is kept.
        store_dtype: the type of the kept tensors; None is the type of the values.
    """

    def __init__(self, order: int, store_dtype: torch.dtype | None = None) -> None:
        super().__init__(order + 1, store_dtype)

    @abc.abstractmethod
    def compute_weights(self, step: int) -> list[float]:
        """Return the weight of each difference in the forecast of a step. Differences without a weight are left out."""

    def _store_snapshot(self, snapshot: Tensor) -> None:
        differences = [snapshot]
        for step, before in zip(self._steps[1:], self._tensors, strict=False):
            change = torch.sub(differences[-1], before)
            differences.append(change.mul_(1 / (self._steps[0] - step)))
        self._tensors = differences

    def _continue_sequence(self, step: int) -> Tensor:
        last, *differences = self._tensors
        weights = self.compute_weights(step)
        if not weights:
            return last
        # The sum is a new tensor, because the last value is kept.
        forecast = torch.add(last, differences[0], alpha=weights[0])
        for weight, difference in zip(weights[1:], differences[1:], strict=False):
            forecast.add_(difference, alpha=weight)
        return forecast


class Reuse(_Newton):
    """Repeats the last value, without a calibrator.

    Args:
        store_dtype: the type of snapshots; None is the type of the values.
    """

    def __init__(self, store_dtype: torch.dtype | None = None) -> None:
        super().__init__(0, store_dtype)

    def compute_weights(self, step: int) -> list[float]:
        """Return no weights: there are no differences."""
        return []

    def describe_state(self, step: int) -> Hashable | None:
        """Return only the addresses of the memory: the age of its value does not matter."""
        return tuple(slot.data_ptr() for slot in self._slots) or None


class TaylorSeer(_Newton):
    """The polynomial through the last computed steps, expanded at the last of them (arXiv 2503.06923).

    With k + 1 steps computed so far the degree is min(k, order), so two steps give a line. It is exact on polynomials
    of that degree, whatever the gaps. A forecast reads memory once for each degree.

    Args:
        order: the degree; 0 is reuse.
        store_dtype: the type of snapshots; None is the type of the values.
        reach: how far beyond the last computed step forecasts go on changing, in gaps between the last two computed
            steps. Without a bound, the line through the first two steps goes too far where values change fast at first.
    """

    def __init__(self, order: int = 1, store_dtype: torch.dtype | None = None, reach: float | None = None) -> None:
        super().__init__(order, store_dtype)
        self._reach = reach

    def compute_weights(self, step: int) -> list[float]:
        """Return the products of the gaps from the computed steps, as in Newton's form."""
        steps = self._steps
        end = float(step)
        # With one step there is no gap to measure by.
        if self._reach is not None and len(steps) > 1:
            gap = steps[0] - steps[1]
            end = min(end, steps[0] + self._reach * gap)
        gaps = [end - computed_step for computed_step in steps[:-1]]
        return list(itertools.accumulate(gaps, operator.mul))


class FoCa(_Newton):
    """Forecast, then calibrate: the stored value as an ordinary differential equation (arXiv 2508.16211).

    The second order backward formula (BDF2, for uneven gaps) gives the slope at the last computed step. A step along
    that slope ends at a first forecast, where the same formula gives a second slope. A step along the mean of both
    slopes (Heun) is the result. Two computed steps give a line, one gives reuse. FoCa is exact on lines whatever the
    gaps. It counts half of a parabola's curvature, and less far from the last computed step, so it overshoots less.

    The paper feeds forecasts back as if they had been computed. Here only computed steps count.

    Args:
        store_dtype: the type of snapshots; None is the type of the values.
    """

    def __init__(self, store_dtype: torch.dtype | None = None) -> None:
        super().__init__(2, store_dtype)

    def compute_weights(self, step: int) -> list[float]:
        """Return the weights of a step along the mean of both slopes.

        With d1, d2 the divided differences at the last step n, p the gap before n and g the gap from n to the forecast,
        the slope at n is d1 + p d2. With w = g / p the slope at the forecast is d1 + p d2 (1 + w / (1 + w)).
        """
        steps = self._steps
        gap = step - steps[0]
        if len(steps) < 3:
            return [gap] * (len(steps) - 1)
        before = steps[0] - steps[1]
        ratio = gap / before
        return [gap, gap * before * (1 + ratio / (2 * (1 + ratio)))]


MIN_SNAPSHOTS = 4
"""An oscillation has two eigenvalues, and finding two takes three pairs of snapshots."""
NOISE = 1e-4
"""Singular values below this share of the largest one are noise."""
CHUNK_ELEMENTS = 2**20
"""Elements of each snapshot that are widened to float64 at a time."""


class DMD(Forecaster):
    """Dynamic mode decomposition: a sequence as a sum of exponentials (Schmid 2010; Prony 1795).

    The linear map from each snapshot y_k to the next, restricted to the span of the snapshots, has eigenvalues z and
    modes. A forecast advances the modes of the last snapshot by powers of z. All of it follows from the inner products
    of the snapshots, a small matrix: no tensor is decomposed, and the result is a weighted sum of snapshots.

    DMD takes the longest evenly spaced run up to the last snapshot. A run of fewer than four gives the line through the
    last two snapshots. Where the decomposition is not finite, the forecast is the last snapshot. DMD is exact on sums
    of fewer exponentials than snapshots, each in a direction of its own (complex ones come in pairs). The first
    forecast after a computed step makes the fit, and waits for the device.

    Args:
        history: snapshots that are kept.
        rank: the limit of exponentials; None takes all whose singular value is not noise.
        ridge: added to each singular value before it divides, relative to the largest one.
        store_dtype: the type of snapshots; None is the type of the values.
        total: sums inner products over the ranks that hold parts of the sequence.
    """

    def __init__(
        self,
        history: int = 6,
        rank: int | None = None,
        ridge: float = 1e-8,
        store_dtype: torch.dtype | None = None,
        total: Total = sum_over_one_rank,
    ) -> None:
        super().__init__(history, store_dtype)
        self._rank = rank
        self._ridge = ridge
        self._total = total
        self._modes: Modes | None = None

    def _store_snapshot(self, snapshot: Tensor) -> None:
        self._tensors = [snapshot, *self._tensors][: self._count]
        self._modes = None

    def describe_state(self, step: int) -> None:
        """Return None: weights come from the values of the snapshots."""

    def _continue_sequence(self, step: int) -> Tensor:
        latest = self._tensors[0]
        if len(self._steps) == 1:
            return latest
        last, before = self._steps[:2]
        # The number of last steps that are evenly spaced.
        run = 2
        while run < len(self._steps) and self._steps[run - 1] - self._steps[run] == last - before:
            run += 1
        if run < MIN_SNAPSHOTS:
            return torch.lerp(self._tensors[1], latest, (step - before) / (last - before))
        # `Modes` takes the earliest snapshot first.
        snapshots = self._tensors[:run][::-1]
        if self._modes is None:
            self._modes = Modes(self._total(compute_gram_matrix(snapshots)), self._rank, self._ridge)
        weights = self._modes.compute_weights((step - last) / (last - before))
        if weights is None:
            return latest
        wide = torch.promote_types(snapshots[0].dtype, torch.float32)
        out = snapshots[-1].to(wide) * weights[-1]
        for tensor, weight in zip(snapshots[1:-1], weights[:-1], strict=True):
            out.add_(tensor, alpha=weight)
        return out


class Chebyshev(Forecaster):
    """The ridge regression of all computed steps on Chebyshev polynomials, mixed with a line (Spectrum).

    A forecast needs only the sums of the values weighted by the polynomials, so the sums are kept, not the values. The
    line is Newton's through the last two computed steps.

    Args:
        config: the number of steps, the degree, the ridge, and the share of the regression in the mixture.
    """

    def __init__(self, config: ChebyshevCalibratorConfig) -> None:
        super().__init__(1)
        self._config = config
        self._gram = torch.eye(config.degree + 1, dtype=torch.float64) * config.ridge
        self._line = TaylorSeer(1)

    @property
    def memory_bytes(self) -> int:
        """Return the number of kept bytes."""
        return super().memory_bytes + self._line.memory_bytes

    def _store_snapshot(self, snapshot: Tensor) -> None:
        # The normal equations need a small matrix of the steps, and sums of the values.
        basis = self._compute_basis(self._steps[0])
        self._gram += torch.outer(basis, basis)
        if not self._tensors:
            # In half precision a sum over the steps would round away the changes to be forecast.
            wide = torch.promote_types(snapshot.dtype, torch.float32)
            self._tensors = [torch.zeros_like(snapshot, dtype=wide) for _ in basis]
        for total, weight in zip(self._tensors, basis.tolist(), strict=True):
            total.add_(snapshot, alpha=weight)
        if self._config.share < 1:
            self._line.add_computed_step(self._steps[0], snapshot)

    def _move_to_slots(self, make_slot: MakeSlot, like: Tensor) -> None:
        """Do nothing: calls are not recorded, because the matrix of the steps is kept in Python."""

    def describe_state(self, step: int) -> None:
        """Return None: weights depend on all computed steps."""

    def _continue_sequence(self, step: int) -> Tensor:
        share = self._config.share
        # The ridge keeps the matrix regular while there are fewer steps than polynomials.
        weights = torch.linalg.solve(self._gram, self._compute_basis(step)) * share
        forecast = torch.zeros_like(self._tensors[0])
        for total, weight in zip(self._tensors, weights.tolist(), strict=True):
            forecast.add_(total, alpha=weight)
        if share < 1:
            forecast.add_(self._line.forecast_value(step), alpha=1 - share)
        return forecast

    def _compute_basis(self, step: int) -> Tensor:
        """Return the polynomials T_0, T_1 .. at a step, as float64 on the CPU. The time is scaled to -1 .. 1."""
        time = 2 * step / self._config.steps - 1
        # Rounding may lead out of the interval, where `acos` raises.
        angle = math.acos(min(max(time, -1.0), 1.0))
        values = [math.cos(k * angle) for k in range(self._config.degree + 1)]
        return torch.tensor(values, dtype=torch.float64)


class Modes:
    """The decomposition of evenly spaced snapshots y_0 .. y_m.

    With X = (y_0 .. y_m-1), X' = (y_1 .. y_m) and X = U S V*, the map is A = U* X' V / S, of eigenvalues z and
    eigenvectors W. The modes are X' C with C = V / S W, and b are the amplitudes of y_m in them.

    Args:
        gram: inner products of the snapshots `[m + 1, m + 1]`, float64.
        rank, ridge: as in `DMD`.
    """

    def __init__(self, gram: Tensor, rank: int | None, ridge: float) -> None:
        self._fit: tuple[Tensor, Tensor, Tensor] | None = None
        if not bool(gram.isfinite().all()):
            return
        squares, vectors = torch.linalg.eigh(gram[:-1, :-1])
        # `eigh` has the smallest first; rounding makes some of them negative.
        singular = squares.clamp(min=0).sqrt().flip(0)
        largest = float(singular[0])
        num_above_noise = int((singular > NOISE * largest).sum())
        count = min(num_above_noise, rank or len(singular))
        # Snapshots of zeros have no modes, nor do those with NaN or infinity.
        if not largest > 0 or not math.isfinite(largest):
            return
        inverse = vectors.flip(1)[:, :count] / (singular[:count] + ridge * largest)
        eigenvalues, eigenvectors = torch.linalg.eig(inverse.T @ gram[:-1, 1:] @ inverse)
        coefficients = inverse.to(eigenvectors.dtype) @ eigenvectors
        later_squares, basis = torch.linalg.eigh(gram[1:, 1:])
        # root^T root is the matrix of inner products, so root stands for the snapshots in a least squares fit.
        root = (later_squares.clamp(min=0).sqrt()[:, None] * basis.T).to(eigenvectors.dtype)
        solution = torch.linalg.lstsq(root @ coefficients, root[:, -1:], driver="gelsd").solution
        self._fit = (eigenvalues, coefficients, solution[:, 0])

    def compute_weights(self, ahead: float) -> list[float] | None:
        """Return the weights of y_1 .. y_m in the value `ahead` spacings after y_m; None unless all are finite."""
        if self._fit is None:
            return None
        eigenvalues, coefficients, amplitudes = self._fit
        weights = (coefficients @ (eigenvalues**ahead * amplitudes)).real.tolist()
        if not all(map(math.isfinite, weights)):
            return None
        return weights


def compute_gram_matrix(tensors: list[Tensor]) -> Tensor:
    """Return the inner products of n tensors, `[n, n]`, as float64 on the CPU: the modes need sums of that
    precision."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    gram = torch.zeros(len(flat), len(flat), dtype=torch.float64, device=flat[0].device)
    for start in range(0, flat[0].numel(), CHUNK_ELEMENTS):
        chunk = torch.stack([tensor[start : start + CHUNK_ELEMENTS] for tensor in flat]).double()
        gram.addmm_(chunk, chunk.T)
    return gram.cpu()

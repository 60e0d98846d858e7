"""Dynamic mode decomposition: a sequence as a sum of exponentials (Schmid 2010; Prony 1795), by Sirovich's snapshots.

The map that takes each snapshot y_k to the next, restricted to what they span, has eigenvalues z and modes; a forecast
advances the modes of the last snapshot by powers of z. All of it follows from the inner products of the snapshots, a
matrix of at most `history` squared numbers: no tensor is decomposed, and the result is a weighted sum of snapshots.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from ditile.errors import StateError

MIN_SNAPSHOTS = 4  # one oscillation takes two eigenvalues, and to find two takes three pairs of snapshots
NOISE = 1e-4  # singular values below this share of the first one are noise

CHUNK_ELEMENTS = 2**20  # elements of each snapshot that are widened to float64 at a time

Total = Callable[[Tensor], Tensor]
"""Sums a small tensor on the CPU over the ranks that hold parts of the sequence; they all call it."""


def sum_over_one_rank(products: Tensor) -> Tensor:
    """The total where one rank holds all."""
    return products


class DMD:
    """Forecasts by the sum of exponentials through the last computed steps; see `ditile.cache.forecast.Forecast`.

    It takes the longest evenly spaced run up to the last snapshot. With fewer than four of them it is the line through
    the last two snapshots, and where the decomposition is not finite the last snapshot. It is exact on sums of fewer
    exponentials than snapshots, each in a direction of its own (complex ones come in pairs). A fit is made with the
    first forecast after a computed step, and waits for the device.

    Args:
        history: snapshots that are kept.
        rank: exponentials at most; None takes all whose singular value is not noise.
        ridge: added to the singular values, relative to the first, where they are divided by.
        store_dtype: the type of snapshots; None is that of the values.
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
        self._history, self._rank, self._ridge = history, rank, ridge
        self._dtype, self._total = store_dtype, total
        self._snapshots: list[tuple[int, Tensor]] = []
        self._value_dtype = torch.float32
        self._modes: Modes | None = None

    @property
    def memory_bytes(self) -> int:
        """Bytes held: `history` tensors."""
        return sum(tensor.numel() * tensor.element_size() for _, tensor in self._snapshots)

    def add_computed_step(self, step: int, value: Tensor) -> None:
        """The value of a computed step, which is kept as it is. Raises `StateError` unless it is behind the last."""
        if self._snapshots and step <= self._snapshots[-1][0]:
            raise StateError(
                f"step {step} was added after step {self._snapshots[-1][0]}; a new generation needs a new forecast"
            )
        self._value_dtype = value.dtype
        kept = value if self._dtype is None else value.to(self._dtype)
        self._snapshots = [*self._snapshots, (step, kept)][-self._history :]
        self._modes = None

    def forecast_value(self, step: int) -> Tensor:
        """What the value may be at a later step; not to be written to. Raises `StateError` if nothing was added."""
        if not self._snapshots:
            raise StateError("nothing was added that a forecast could continue")
        run = count_even_steps([computed for computed, _ in self._snapshots])
        last, latest = self._snapshots[-1]
        if len(self._snapshots) == 1:
            return latest.to(self._value_dtype)
        before, earlier = self._snapshots[-2]
        if run < MIN_SNAPSHOTS:
            return torch.lerp(earlier, latest, (step - before) / (last - before)).to(self._value_dtype)
        snapshots = [tensor for _, tensor in self._snapshots[-run:]]
        if self._modes is None:
            self._modes = Modes(self._total(compute_gram_matrix(snapshots)), self._rank, self._ridge)
        weights = self._modes.compute_weights((step - last) / (last - before))
        return (
            latest.to(self._value_dtype)
            if weights is None
            else _compute_weighted_sum(snapshots, weights).to(self._value_dtype)
        )


class Modes:
    """The decomposition of evenly spaced snapshots y_0 .. y_m.

    With X = (y_0 .. y_m-1), X' = (y_1 .. y_m) and X = U S V*, the map is A = U* X' V / S, of eigenvalues z and
    eigenvectors W. The modes are X' C with C = V / S W, and b are the amplitudes of y_m in them.

    Args:
        gram: inner products of the snapshots `[m + 1, m + 1]`, float64.
        rank, ridge: as of `DMD`.
    """

    def __init__(self, gram: Tensor, rank: int | None, ridge: float) -> None:
        self._fit: tuple[Tensor, Tensor, Tensor] | None = None
        if not bool(gram.isfinite().all()):
            return
        squares, vectors = torch.linalg.eigh(gram[:-1, :-1])
        singular = squares.clamp(min=0).sqrt().flip(0)
        first = float(singular[0])
        count = min(int((singular > NOISE * first).sum()), rank or len(singular))
        if not first > 0 or not math.isfinite(first):
            return
        inverse = vectors.flip(1)[:, :count] / (singular[:count] + ridge * first)
        values, within = torch.linalg.eig(inverse.T @ gram[:-1, 1:] @ inverse)
        of_snapshots = inverse.to(within.dtype) @ within
        later, basis = torch.linalg.eigh(gram[1:, 1:])
        root = (later.clamp(min=0).sqrt()[:, None] * basis.T).to(within.dtype)  # its square is the matrix
        amplitudes = torch.linalg.lstsq(root @ of_snapshots, root[:, -1:], driver="gelsd").solution[:, 0]
        self._fit = (values, of_snapshots, amplitudes)

    def compute_weights(self, ahead: float) -> list[float] | None:
        """Of y_1 .. y_m, in the value `ahead` spacings behind y_m; None where they are not finite."""
        if self._fit is None:
            return None
        values, of_snapshots, amplitudes = self._fit
        weights: list[float] = (of_snapshots @ (values**ahead * amplitudes)).real.tolist()
        return weights if all(map(math.isfinite, weights)) else None


def count_even_steps(steps: list[int]) -> int:
    """How many of the last steps are evenly spaced."""
    gaps = [later - earlier for earlier, later in itertools.pairwise(steps)][::-1]
    return 1 + sum(1 for _ in itertools.takewhile(lambda gap: gap == gaps[0], gaps))


def compute_gram_matrix(tensors: list[Tensor]) -> Tensor:
    """The inner products of tensors with each other, float64 on the CPU: sums in less would be noise in the modes."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    gram = torch.zeros(len(flat), len(flat), dtype=torch.float64, device=flat[0].device)
    for start in range(0, flat[0].numel(), CHUNK_ELEMENTS):
        some = torch.stack([tensor[start : start + CHUNK_ELEMENTS] for tensor in flat]).double()
        gram.addmm_(some, some.T)
    return gram.cpu()


def _compute_weighted_sum(tensors: list[Tensor], weights: list[float]) -> Tensor:
    """The weighted sum of all but the first tensor, in float32 at least: weights have both signs."""
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    out = tensors[-1].to(wide) * weights[-1]
    for tensor, weight in zip(tensors[1:-1], weights[:-1], strict=True):
        out.add_(tensor, alpha=weight)
    return out

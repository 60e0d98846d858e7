"""Memory: what survives a step, per (image, guidance branch, layer). One per generation; nothing is ever shared.

Keys and values of the whole image are kept in one buffer `[B, S, N, H]` each, in the order of the sequence, so that a
patch attends to them where they lie; those of a head lie together, which attention reads faster. Every segment (a
patch; the text goes with patch 0) knows the step that wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ditile.distributed.transport import Pending
from ditile.errors import StateError
from ditile.hooks.drift import Drift

NEVER = -1


class KeyStore:
    """Keys and values of one attention layer of one guidance branch, by segment (patch).

    Args:
        length: tokens of the whole sequence.
        segments: patches that are written apart.
        branch: whose they are.
        drift: told how much each write changes, where somebody wants to know.

    Attributes:
        incoming: keys of other ranks that are under way.
    """

    def __init__(self, length: int, segments: int, branch: int = 0, drift: Drift | None = None) -> None:
        self._length, self._branch, self._drift = length, branch, drift
        self.buffers: tuple[Tensor, Tensor] | None = None
        self.incoming: Pending | None = None
        self.written = [NEVER] * segments

    @property
    def bytes(self) -> int:
        """Bytes held."""
        return 0 if self.buffers is None else sum(b.numel() * b.element_size() for b in self.buffers)

    def write(
        self, k: Tensor, v: Tensor, runs: Iterable[range], rows: range | None = None, batch: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Writes keys and values `[B, n, N, H]` over stale ones; returns the whole.

        Args:
            k, v: fresh.
            runs: where their tokens belong.
            rows: where their rows belong among `batch` of them; None if they are all.
            batch: rows in all.
        """
        at, first = 0, self.buffers is None
        buffers = self._allocated(k, k.shape[0] if rows is None else batch)
        where = slice(None) if rows is None else slice(rows.start, rows.stop)
        for run in runs:
            for buffer, fresh in zip(buffers, (k, v), strict=True):
                new, old = fresh[:, at : at + len(run)], buffer[where, run.start : run.stop]
                if self._drift is not None and not first:
                    self._drift.note(("keys", self._branch, rows.start if rows else 0), new, old)
                old.copy_(new)
            at += len(run)
        return buffers

    def stamp(self, step: int, segment: int | None = None) -> None:
        """Says that a segment, or all of them, is of this step."""
        for k in range(len(self.written)) if segment is None else (segment,):
            self.written[k] = step

    def ages(self, step: int) -> tuple[int | None, ...]:
        """How many steps old each segment is; None if it was never written."""
        return tuple(None if at == NEVER else step - at for at in self.written)

    def _allocated(self, like: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        """The buffers, made of zeros at first: with warmup 0 the first step attends to zeros, as in the paper."""
        if self.buffers is None:
            shape = (batch, like.shape[2], self._length, like.shape[3])
            self.buffers = (like.new_zeros(shape).transpose(1, 2), like.new_zeros(shape).transpose(1, 2))
        elif self.buffers[0].shape[0] != batch:
            raise StateError(
                f"the batch changed from {self.buffers[0].shape[0]} to {batch} rows in mid-run, and stale "
                "keys belong to rows; keep guidance on for the whole run, or use warmup equal to the steps"
            )
        return self.buffers


class AgeChecks:
    """Asserts that keys have the ages that the schedule says, and counts how often it did.

    Attributes:
        passed: reads of keys that were as scheduled.
    """

    def __init__(self) -> None:
        self.passed = 0

    def expect(self, store: KeyStore, step: int, ages: Iterable[int], where: str) -> None:
        """Raises `StateError` unless the segments of a store have these ages; before the first step they are None."""
        wanted = tuple(None if age > step else age for age in ages)
        if store.ages(step) != wanted:
            raise StateError(f"{where} reads keys of ages {store.ages(step)}, and the schedule says {wanted}")
        self.passed += 1


class Memo(NamedTuple):
    """A remembered value and what it was made from, if that identifies it."""

    value: Any
    source: Any


class Memory:
    """Key stores, predictions and constants of one generation.

    Args:
        drift: told how much keys and values change.
    """

    def __init__(self, drift: Drift | None = None) -> None:
        self._drift = drift
        self._stores: dict[tuple[int, str], KeyStore] = {}
        self._buffers: dict[Hashable, Tensor] = {}
        self._constants: dict[Hashable, Any] = {}
        self._of_step: dict[Hashable, Any] = {}
        self._sliced: dict[Hashable, Memo] = {}

    def store(self, branch: int, layer: str, length: int, segments: int) -> KeyStore:
        """The keys and values of a layer."""
        key = (branch, layer)
        if key not in self._stores:
            self._stores[key] = KeyStore(length, segments, branch, self._drift)
        return self._stores[key]

    def stand_in(self, branch: int, layers: Sequence[str], step: int, patches: Sequence[int | None]) -> None:
        """The layers whose names begin so were left out in a step: what they keep of these patches stands for it.

        None is all patches.
        """
        for (of, layer), store in self._stores.items():
            if of == branch and layer.startswith(tuple(layers)):
                for patch in patches:
                    store.stamp(step, patch)

    @property
    def key_bytes(self) -> int:
        """Bytes of all keys and values held."""
        return sum(store.bytes for store in self._stores.values())

    def forget_keys(self, branch: int) -> None:
        """Drops the keys and values of a guidance branch that this rank will not compute again."""
        for key in [key for key in self._stores if key[0] == branch]:
            incoming = self._stores.pop(key).incoming
            if incoming is not None:
                incoming.wait()

    def buffer(self, key: Hashable, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """A buffer that keeps its content from call to call; zeros at first."""
        found = self._buffers.get(key)
        if found is None or found.shape != torch.Size(shape) or found.dtype != like.dtype:
            found = self._buffers[key] = like.new_zeros(shape)
        return found

    def constant(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """A value that does not change during the generation, made once."""
        if key not in self._constants:
            self._constants[key] = make()
        return self._constants[key]

    def of_step(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """A value that does not change during a step, made once per step."""
        if key not in self._of_step:
            self._of_step[key] = make()
        return self._of_step[key]

    def sliced(self, key: Hashable, source: Any, make: Callable[[], Any]) -> Any:
        """The part of `source` that a patch needs, cut anew only when `source` is another object."""
        memo = self._sliced.get(key)
        if memo is None or memo.source is not source:
            memo = self._sliced[key] = Memo(make(), source)
        return memo.value

    def end_step(self) -> None:
        """Forgets what was constant within the step."""
        self._of_step.clear()

    def forget_constants(self) -> None:
        """Forgets what was constant in the generation: a callback may have changed what it was made of."""
        self._constants.clear()
        self._sliced.clear()

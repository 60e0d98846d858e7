"""Ulysses: trade a split over tokens for a split over heads, attend, trade back (arXiv 2309.14509).

Any length and any number of heads: shares differ by at most one token and one head, and all sizes follow from the
lengths, so nothing is padded and no size is ever exchanged. q, k and v travel together: two all-to-alls per attention,
4 (n - 1) / n^2 of a layer's tokens per rank. `Overlapped` sends each as soon as it is projected, four in all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ditile.distributed.mesh import Axis
from ditile.distributed.trace import Trace
from ditile.distributed.transport import Pending, Traffic, start_all_to_all
from ditile.hooks.generation import Generation, Tokens
from ditile.hooks.protocols import Make
from ditile.plan.layout import share

KIND = "ulysses"


class Ulysses:
    """The exchange over one axis.

    Args:
        axis: the ranks that share out the tokens and the heads.
        traffic: counts bytes.
    """

    overlaps = False

    def __init__(self, axis: Axis, traffic: Traffic) -> None:
        assert axis.group is not None
        self._axis, self._group, self._traffic = axis, axis.group, traffic

    def to_heads(self, makes: Sequence[Make], tokens: Tokens) -> list[Tensor]:
        """q, k, v `[B, own tokens, N, H]` to `[B, tokens of all ranks, own heads, H]`, in the order of the ranks."""
        q, *others = (make() for make in makes)
        tensors = [q, *(self._as_many_heads(x, q.shape[2]) for x in others)]
        return self._opened(tensors, self._start(tensors, tokens), tokens)

    def to_tokens(self, out: Tensor, tokens: Tokens, heads: int) -> Tensor:
        """`[B, tokens of all ranks, own heads, H]` to `[B, own tokens, N, H]`."""
        lengths, theirs, own = self._lengths(tokens), self._shares(heads), self._axis.index
        batch, _, mine, size = out.shape
        spans = out.split(lengths, dim=1)
        sends = self._travelling([n * mine * size for n in lengths], batch)
        flat = out.reshape(-1) if batch == 1 else out.new_empty(sum(sends))
        if batch > 1:
            for span, part in zip(spans, flat.split(sends), strict=True):
                if part.numel():
                    part.view(span.shape).copy_(span)
        receives = self._travelling([lengths[own] * n * size for n in theirs], batch)
        (received,) = start_all_to_all(flat, sends, receives, self._group, self._traffic, KIND).wait()
        parts = list(received.split(receives))
        if batch > 1:
            parts[own] = spans[own]
        return torch.cat([x.view(batch, lengths[own], n, size) for x, n in zip(parts, theirs, strict=True)], dim=2)

    def _start(self, tensors: Sequence[Tensor], tokens: Tokens) -> Pending:
        """Sends to each rank its heads of all tensors, as `[B, S, tensors, heads, H]`."""
        batch, length, _, size = tensors[0].shape
        heads = self._heads(tensors)
        each = [sum(len(run) for run in runs) for runs in heads]
        sends = self._travelling([length * n * size for n in each], batch)
        flat = tensors[0].new_empty(sum(sends))
        for part, runs in zip(flat.split(sends), heads, strict=True):
            if part.numel():
                _fill(part.view(batch, length, -1, size), tensors, runs)
        receives = self._travelling([n * each[self._axis.index] * size for n in self._lengths(tokens)], batch)
        return start_all_to_all(flat, sends, receives, self._group, self._traffic, KIND)

    def _opened(self, tensors: Sequence[Tensor], pending: Pending, tokens: Tokens) -> list[Tensor]:
        batch, _, _, size = tensors[0].shape
        runs, lengths = self._heads(tensors)[self._axis.index], self._lengths(tokens)
        heads = [len(run) for run in runs]
        if batch == 1:
            (received,) = pending.wait()
            return list(received.view(1, sum(lengths), sum(heads), size).split(heads, dim=2))
        whole = tensors[0].new_empty((batch, sum(heads), sum(lengths), size)).transpose(1, 2)
        parts = whole.split(lengths, dim=1)
        _fill(parts[self._axis.index], tensors, runs)  # while the others travel
        (received,) = pending.wait()
        sizes = self._travelling([n * sum(heads) * size for n in lengths], batch)
        for part, travelled in zip(parts, received.split(sizes), strict=True):
            if travelled.numel():
                part.copy_(travelled.view(part.shape))
        return list(whole.split(heads, dim=2))

    def _travelling(self, sizes: Sequence[int], batch: int) -> list[int]:
        """Numbers to each rank of so many for each row of a batch.

        What a rank keeps goes by itself to where it belongs, but for a batch of one, of which nothing has to be moved
        once it is there: then it goes with the others.
        """
        return [0 if batch > 1 and rank == self._axis.index else batch * size for rank, size in enumerate(sizes)]

    def _heads(self, tensors: Sequence[Tensor]) -> list[list[range]]:
        """Of each rank, its heads of each tensor."""
        size = self._axis.size
        return [[share(range(x.shape[2]), size, rank) for x in tensors] for rank in range(size)]

    def _as_many_heads(self, x: Tensor, heads: int) -> Tensor:
        """Grouped-query heads are repeated where a rank's queries would need half a group."""
        return x if x.shape[2] % self._axis.size == 0 else x.repeat_interleave(heads // x.shape[2], dim=2)

    def _shares(self, heads: int) -> list[int]:
        return [len(share(range(heads), self._axis.size, rank)) for rank in range(self._axis.size)]

    def _lengths(self, tokens: Tokens) -> list[int]:
        """Of the ranks on this line: they are neighbours."""
        first = tokens.index - self._axis.index
        return list(tokens.lengths[first : first + self._axis.size])


class Overlapped(Ulysses):
    """Each projection travels while the next one is computed.

    Args:
        axis, traffic: as above.
        trace, current: record when each exchange began and ended.
    """

    overlaps = True

    def __init__(self, axis: Axis, traffic: Traffic, trace: Trace, current: Callable[[], Generation]) -> None:
        super().__init__(axis, traffic)
        self._trace, self._now = trace, current

    def to_heads(self, makes: Sequence[Make], tokens: Tokens) -> list[Tensor]:
        """As above, in three exchanges."""
        (step, patch), branch = self._now().micro, self._now().branch
        under_way: list[tuple[Tensor, Pending, object]] = []
        for name, make in zip("qkv", makes, strict=True):
            with self._trace.span(f"project {name}", step, patch, branch):
                x = make()
            x = self._as_many_heads(x, under_way[0][0].shape[2] if under_way else x.shape[2])
            under_way.append((x, self._start([x], tokens), self._trace.now()))
        found = []
        for name, (x, pending, began) in zip("qkv", under_way, strict=True):
            found += self._opened([x], pending, tokens)
            self._trace.add(f"exchange {name}", step, patch, branch, began)
        return found


def _fill(into: Tensor, tensors: Sequence[Tensor], heads: Sequence[range]) -> None:
    """Puts some heads of each tensor next to each other."""
    pieces = into.split([len(run) for run in heads], dim=2)
    for x, run, piece in zip(tensors, heads, pieces, strict=True):
        piece.copy_(x[:, :, run.start : run.stop])

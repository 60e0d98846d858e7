"""Ulysses: trade a split over tokens for a split over heads, attend, trade back (arXiv 2309.14509).

Any length and any number of heads: shares differ by at most one token and one head, and all sizes follow from the
lengths, so nothing is padded and no size is ever exchanged. q, k and v travel together: two all-to-alls per attention,
4 (n - 1) / n^2 of a layer's tokens per rank. `Overlapped` sends each as soon as it is projected, four in all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ditile.generation import Generation, Tokens
from ditile.layout import share
from ditile.mesh import Axis
from ditile.seams import Make
from ditile.trace import Trace
from ditile.transport import Pending, Traffic, start_all_to_all

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
        lengths = self._lengths(tokens)
        batch, size = out.shape[0], out.shape[3]
        flat = out.reshape(-1) if batch == 1 else torch.cat([x.reshape(-1) for x in out.split(lengths, dim=1)])
        mine, own = out.shape[2], lengths[self._axis.index]
        theirs = self._shares(heads)
        sends, receives = [batch * n * mine * size for n in lengths], [batch * own * n * size for n in theirs]
        (received,) = start_all_to_all(flat, sends, receives, self._group, self._traffic, KIND).wait()
        parts = received.split(receives)
        return torch.cat([x.view(batch, own, n, size) for x, n in zip(parts, theirs, strict=True)], dim=2)

    def _start(self, tensors: Sequence[Tensor], tokens: Tokens) -> Pending:
        """Sends to each rank its heads of all tensors, as `[B, S, tensors, heads, H]`."""
        batch, length, _, size = tensors[0].shape
        shares = [self._shares(x.shape[2]) for x in tensors]
        each = [sum(heads) for heads in zip(*shares, strict=True)]
        sends = [batch * length * heads * size for heads in each]
        flat = tensors[0].new_empty(sum(sends))
        begins = [0] * len(tensors)
        for rank, part in enumerate(flat.split(sends)):
            parts = part.view(batch, length, each[rank], size).split([heads[rank] for heads in shares], dim=2)
            for k, (x, into) in enumerate(zip(tensors, parts, strict=True)):
                into.copy_(x[:, :, begins[k] : begins[k] + into.shape[2]])
                begins[k] += into.shape[2]
        receives = [batch * n * each[self._axis.index] * size for n in self._lengths(tokens)]
        return start_all_to_all(flat, sends, receives, self._group, self._traffic, KIND)

    def _opened(self, tensors: Sequence[Tensor], pending: Pending, tokens: Tokens) -> list[Tensor]:
        batch, _, _, size = tensors[0].shape
        heads = [self._shares(x.shape[2])[self._axis.index] for x in tensors]
        lengths = self._lengths(tokens)
        (received,) = pending.wait()
        parts = received.split([batch * n * sum(heads) * size for n in lengths])
        whole = [x.view(batch, n, sum(heads), size) for x, n in zip(parts, lengths, strict=True)]
        joined = received.view(1, sum(lengths), sum(heads), size) if batch == 1 else torch.cat(whole, dim=1)
        return list(joined.split(heads, dim=2))

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

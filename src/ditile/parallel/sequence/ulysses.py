"""Ulysses: trade a split over tokens for a split over heads, attend, trade back (arXiv 2309.14509).

Where ranks have equally many tokens and heads, each way is an all-to-all between two reshapes:

    q, k, v   BPNH -> RBPTMH -> all-to-all -> RBPTMH -> BSTMH     T = 3: q, k and v travel together
    out       BSMH -> RBPMH  -> all-to-all -> RBPMH  -> BPNH

A rank sends 4 (n - 1) / n^2 of a layer's tokens. Any length and any number of heads will do: shares then differ by at
most one token and one head, and all sizes follow from the lengths, so nothing is padded and no size is exchanged.
`OverlappedUlysses` sends v, k and q one by one, each as soon as it is made: four all-to-alls in place of two. v goes
first because it has no norm and no rotary embedding: it travels while those of k and q are computed.

Letters: B batch, R ranks of the axis, P tokens of this rank, S tokens of all ranks in their order, N heads of the
layer, M heads of this rank (of all tensors that travel together, where they are of several), T tensors, H head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ditile.distributed.mesh import Axis
from ditile.distributed.trace import GenerationTrace
from ditile.distributed.transport import PendingMessages, Traffic, start_all_to_all
from ditile.model.hooks.generation import Generation, LayerTokens
from ditile.model.hooks.protocols import DeferredTensor
from ditile.plan.errors import PlanError
from ditile.plan.layout import pick_even_chunk
from ditile.plan.plan import format_divisors

KIND = "ulysses"


@dataclass(frozen=True, slots=True)
class HeadAndTokenShares:
    """Who has which tokens before the exchange, and which heads after it. Made once for each (tokens, heads).

    Attributes:
        lengths: tokens of each rank.
        heads: of each rank, its heads of each tensor.
        num_heads: heads of each rank, over all tensors.
        index: this rank among them.
        is_even: whether all ranks have equally many tokens, and equally many heads of each tensor.
    """

    lengths: tuple[int, ...]
    heads: tuple[tuple[range, ...], ...]
    num_heads: tuple[int, ...]
    index: int
    is_even: bool

    def size_messages(self, batch: int) -> tuple[list[int], list[int]]:
        """How many heads of tokens are sent to each rank, and received from it, in all rows of a batch; on the way
        back it is the other way round.
        """
        length, count = self.lengths[self.index] * batch, self.num_heads[self.index] * batch
        return [length * heads for heads in self.num_heads], [count * tokens for tokens in self.lengths]


@lru_cache(maxsize=4096)
def share_heads_and_tokens(tokens: LayerTokens, heads: tuple[int, ...], index: int, ranks: int) -> HeadAndTokenShares:
    """The shares of the ranks along an axis.

    Args:
        tokens: of all ranks that share out the sequence; those along the axis are neighbours among them.
        heads: of each tensor that travels.
        index, ranks: this rank's place on the axis, and its length.
    """
    first = tokens.index - index
    lengths = tokens.rank_lengths[first : first + ranks]
    of_rank = tuple(tuple(pick_even_chunk(range(count), ranks, rank) for count in heads) for rank in range(ranks))
    is_even = len(set(lengths)) == 1 and all(count % ranks == 0 for count in heads)
    return HeadAndTokenShares(lengths, of_rank, tuple(sum(map(len, runs)) for runs in of_rank), index, is_even)


class UlyssesExchange:
    """The exchange over one axis.

    Args:
        axis: the ranks that share out the tokens and the heads.
        traffic: counts bytes.
        uneven: whether one rank may have a head more than another.
    """

    overlaps, takes_dummies = False, False

    def __init__(self, axis: Axis, traffic: Traffic, *, uneven: bool = True) -> None:
        assert axis.group is not None
        self._uneven = uneven
        self._axis, self._index, self._ranks, self._traffic = axis, axis.index, len(axis.ranks), traffic

    def exchange_tokens_for_heads(
        self, q_BPNH: Tensor, k_BPNH: Tensor, v_BPNH: Tensor, tokens: LayerTokens, keys: LayerTokens
    ) -> tuple[Tensor, ...]:
        """q, k, v `[B, own tokens, N, H]` to `[B, tokens of all ranks, own heads, H]`, in the order of the ranks."""
        num_heads = q_BPNH.shape[2]
        self._check_heads(num_heads)
        k_BPNH, v_BPNH = self._repeat_uneven_heads(k_BPNH, num_heads), self._repeat_uneven_heads(v_BPNH, num_heads)
        if keys is tokens:
            return self._exchange_tensors((q_BPNH, k_BPNH, v_BPNH), tokens)
        return (*self._exchange_tensors((q_BPNH,), tokens), *self._exchange_tensors((k_BPNH, v_BPNH), keys))

    def _exchange_tensors(self, tensors: Sequence[Tensor], tokens: LayerTokens) -> tuple[Tensor, ...]:
        """Tensors of the same tokens, which travel together."""
        shares = self._get_shares(tokens, *(x_BPNH.shape[2] for x_BPNH in tensors))
        if tokens.are_none:
            runs = zip(tensors, shares.heads[self._index], strict=True)
            return tuple(x_BPNH[:, :, run.start : run.stop] for x_BPNH, run in runs)
        return self._receive_heads(self._send_heads(tensors, shares), shares, tensors[0])

    def exchange_overlapped(self, makers: Sequence[DeferredTensor], tokens: LayerTokens) -> tuple[Tensor, ...]:
        """The same of q, k and v that are yet to be made: here they are made before any travels."""
        q_BPNH, k_BPNH, v_BPNH = (make() for make in makers)
        return self.exchange_tokens_for_heads(q_BPNH, k_BPNH, v_BPNH, tokens, tokens)

    def exchange_heads_for_tokens(self, out_BSMH: Tensor, tokens: LayerTokens, heads: int) -> Tensor:
        """`[B, tokens of all ranks, own heads, H]` to `[B, own tokens, N, H]`."""
        shares, (batch, _, own_heads, size) = self._get_shares(tokens, heads), out_BSMH.shape
        if tokens.are_none:
            return out_BSMH.new_empty((batch, 0, heads, size))
        receives, sends = shares.size_messages(batch)
        length = shares.lengths[self._index]
        if shares.is_even:
            out_RBPMH = out_BSMH.unflatten(1, (self._ranks, length)).transpose(0, 1)
            heads_of_tokens = out_RBPMH.flatten(0, -2).contiguous()
            (received,) = self._start(heads_of_tokens, sends, receives).wait_for_tensors()
            return received.view(self._ranks, batch, length, own_heads, size).movedim(0, 2).flatten(2, 3)
        heads_of_tokens = torch.cat([part.flatten(0, -2) for part in out_BSMH.split(shares.lengths, dim=1)])
        (received,) = self._start(heads_of_tokens, sends, receives).wait_for_tensors()
        messages = zip(received.split(receives), shares.num_heads, strict=True)
        return torch.cat([message.view(batch, length, count, size) for message, count in messages], dim=2)

    def select_own_heads(self, x: Tensor, heads: int) -> Tensor:
        """This rank's heads of keys or values `[B, S, N, H]` that every rank has; the queries have `heads`."""
        x = self._repeat_uneven_heads(x, heads)
        own = pick_even_chunk(range(x.shape[2]), self._ranks, self._index)
        return x[:, :, own.start : own.stop]

    def _send_heads(self, tensors: Sequence[Tensor], shares: HeadAndTokenShares) -> PendingMessages:
        """Starts to send each rank its heads of some tensors `[B, P, N, H]`, and to receive this rank's."""
        batch, length, _, size = tensors[0].shape
        sends, receives = shares.size_messages(batch)
        if shares.is_even:
            # RBPMH of each tensor where it lies: copied once, with the heads of a rank next to each other
            views = [x_BPNH.unflatten(2, (self._ranks, -1)).movedim(2, 0) for x_BPNH in tensors]
            return self._start(torch.cat(views, dim=3).flatten(0, -2), sends, receives)
        heads_of_tokens = tensors[0].new_empty((sum(sends), size))
        for message, runs, count in zip(heads_of_tokens.split(sends), shares.heads, shares.num_heads, strict=True):
            parts = message.view(batch, length, count, size).split([len(run) for run in runs], dim=2)
            for x_BPNH, run, part in zip(tensors, runs, parts, strict=True):
                part.copy_(x_BPNH[:, :, run.start : run.stop])
        return self._start(heads_of_tokens, sends, receives)

    def _receive_heads(self, pending: PendingMessages, shares: HeadAndTokenShares, like: Tensor) -> tuple[Tensor, ...]:
        """This rank's heads of the tensors, `[B, S, M, H]` each."""
        batch, _, _, size = like.shape
        count = shares.num_heads[self._index]
        (received,) = pending.wait_for_tensors()
        if batch == 1:
            # in memory the tokens of all ranks follow each other already, whatever their shares
            x_BSMH = received.view(1, sum(shares.lengths), count, size)
        elif shares.is_even:
            x_BSMH = received.view(self._ranks, batch, -1, count, size).transpose(0, 1).flatten(1, 2)
        else:
            messages = zip(received.split(shares.size_messages(batch)[1]), shares.lengths, strict=True)
            x_BSMH = torch.cat([message.view(batch, length, count, size) for message, length in messages], dim=1)
        parts: tuple[Tensor, ...] = x_BSMH.split([len(run) for run in shares.heads[self._index]], dim=2)
        return parts

    def _start(self, heads_of_tokens: Tensor, sends: list[int], receives: list[int]) -> PendingMessages:
        assert self._axis.group is not None
        return start_all_to_all(heads_of_tokens, sends, receives, self._axis.group, self._traffic, KIND)

    def _get_shares(self, tokens: LayerTokens, *heads: int) -> HeadAndTokenShares:
        return share_heads_and_tokens(tokens, heads, self._index, self._ranks)

    def _check_heads(self, heads: int) -> None:
        if heads % self._ranks and not self._uneven:
            raise PlanError(
                f"ulysses={self._ranks} does not divide the {heads} heads of a layer and uaa is off; try "
                f"{format_divisors(heads)}, or leave uaa out"
            )

    def _repeat_uneven_heads(self, x_BPNH: Tensor, heads: int) -> Tensor:
        """Grouped-query heads are repeated where a rank's queries would need half a group."""
        groups = x_BPNH.shape[2]
        return x_BPNH if groups % self._ranks == 0 else x_BPNH.repeat_interleave(heads // groups, dim=2)


class OverlappedUlysses(UlyssesExchange):
    """Each projection travels while the next one is computed.

    Args:
        axis, traffic, uneven: as above.
        trace, now: record when each exchange began and ended.
    """

    overlaps = True

    def __init__(
        self,
        axis: Axis,
        traffic: Traffic,
        trace: GenerationTrace,
        now: Generation,
        *,
        uneven: bool = True,
    ) -> None:
        super().__init__(axis, traffic, uneven=uneven)
        self._trace, self._now = trace, now

    def exchange_overlapped(self, makers: Sequence[DeferredTensor], tokens: LayerTokens) -> tuple[Tensor, ...]:
        """q, k and v, of equally many heads: v, k, q, each made and sent before the next, in three exchanges."""
        (step, patch), branch = self._now.micro_step, self._now.branch
        under_way: list[tuple[Tensor, HeadAndTokenShares, PendingMessages, object]] = []
        order = list(zip("vkq", reversed(makers), strict=True))
        for name, make in order:
            with self._trace.record_span(f"project {name}", step, patch, branch):
                x_BPNH = make()
            self._check_heads(x_BPNH.shape[2])
            shares = self._get_shares(tokens, x_BPNH.shape[2])
            under_way.append((x_BPNH, shares, self._send_heads([x_BPNH], shares), self._trace.mark_point()))
        received: list[Tensor] = []
        for (name, _), (x_BPNH, shares, pending, began) in zip(order, under_way, strict=True):
            received += self._receive_heads(pending, shares, x_BPNH)
            self._trace.record_op(f"exchange {name}", step, patch, branch, began)
        return tuple(reversed(received))

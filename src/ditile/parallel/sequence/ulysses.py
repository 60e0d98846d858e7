"""Ulysses: exchange a split over tokens for a split over heads, attend, and exchange back (arXiv 2309.14509).

If all ranks have the same number of tokens and heads, each direction is an all-to-all between two reshapes:

    q, k, v   BPNH -> RBPTMH -> all-to-all -> RBPTMH -> BSTMH     T = 3: q, k and v travel together
    out       BSMH -> RBPMH  -> all-to-all -> RBPMH  -> BPNH

Of n ranks, each sends 4 (n - 1) / n^2 times the bytes of a layer's tokens. Any length and any number of heads works:
ranks then differ by at most one token and one head, or as the plan's `token_weights` say. Every rank computes all sizes
from the lengths, so nothing is padded and no size is exchanged. `OverlappedUlysses` sends v, k and q one by one, each
as soon as it is computed: four all-to-alls instead of two. v goes first because it has no norm and no rotary embedding,
so it travels while k and q are normalized and rotated.

Letters: B batch, R ranks of the axis, P tokens of this rank, S tokens of all ranks in rank order, N heads of the layer,
M heads of this rank (summed over the tensors, if several travel together), T tensors, H head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ditile.distributed.mesh import Axis
from ditile.distributed.transport import PendingMessages, Traffic, start_all_to_all
from ditile.distributed.wire import SiteBases
from ditile.model.hooks.generation import Generation, LayerTokens
from ditile.model.hooks.protocols import DeferredTensor, FindBases, HeadExchange
from ditile.plan.errors import PlanError
from ditile.plan.layout import pick_weighted_chunk
from ditile.plan.plan import format_divisors

KIND = "ulysses"


@dataclass(frozen=True, slots=True)
class HeadAndTokenShares:
    """The tokens of each rank before the exchange, and its heads after it.

    Attributes:
        heads: for each rank, its heads of each tensor.
        num_heads: for each rank, its number of heads, summed over the tensors.
        index: this rank's place among the ranks.
        is_even: whether all ranks have the same number of tokens, and the same number of heads of each tensor.
    """

    lengths: tuple[int, ...]
    heads: tuple[tuple[range, ...], ...]
    num_heads: tuple[int, ...]
    index: int
    is_even: bool

    def size_messages(self, batch: int) -> tuple[list[int], list[int]]:
        """Return how many rows this rank sends to and receives from each rank.

        A row is one head of one token. On the way back the two lists change places.
        """
        own_tokens = self.lengths[self.index] * batch
        own_heads = self.num_heads[self.index] * batch
        sends = [own_tokens * heads for heads in self.num_heads]
        receives = [own_heads * tokens for tokens in self.lengths]
        return sends, receives


@lru_cache(maxsize=4096)
def share_heads_and_tokens(
    tokens: LayerTokens, heads: tuple[int, ...], index: int, weights: tuple[float, ...]
) -> HeadAndTokenShares:
    """Compute the shares of the ranks along an axis.

    Heads are shared by weight; `heads` has the number of heads of each tensor.
    """
    num_ranks = len(weights)
    # The ranks of the axis are neighbours among all ranks that split the sequence.
    first = tokens.index - index
    lengths = tokens.rank_lengths[first : first + num_ranks]
    heads_by_rank = []
    num_heads = []
    for rank in range(num_ranks):
        runs = tuple(pick_weighted_chunk(range(count), weights, rank) for count in heads)
        heads_by_rank.append(runs)
        num_heads.append(sum(map(len, runs)))
    # The set has the number of heads of each tensor; in an even split they are the same on all ranks.
    head_counts = {tuple(map(len, runs)) for runs in heads_by_rank}
    is_even = len(set(lengths)) == len(head_counts) == 1
    return HeadAndTokenShares(lengths, tuple(heads_by_rank), tuple(num_heads), index, is_even)


class UlyssesExchange(HeadExchange):
    """The exchange of tokens for heads over one axis, and back.

    Args:
        axis: the ranks that split the tokens and the heads.
        traffic: counts bytes.
        find_bases: finds what last arrived at the site of a message of the layer.
        uneven: whether some ranks may have one head more than others.
        weights: how the heads are shared among the ranks; equal by default.
    """

    overlaps = False
    takes_dummies = False

    def __init__(
        self,
        axis: Axis,
        traffic: Traffic,
        find_bases: FindBases,
        *,
        uneven: bool = True,
        weights: tuple[float, ...] | None = None,
    ) -> None:
        self._find_bases = find_bases
        self._weights = weights or (1.0,) * axis.num_ranks
        self._uneven = uneven
        self._axis = axis
        self._index = axis.index
        self._num_ranks = axis.num_ranks
        self._traffic = traffic

    def exchange_tokens_for_heads(
        self, q_BPNH: Tensor, k_BPNH: Tensor, v_BPNH: Tensor, tokens: LayerTokens, keys: LayerTokens
    ) -> tuple[Tensor, ...]:
        """Exchange q, k, v `[B, own tokens, N, H]` for `[B, tokens of all ranks, own heads, H]`.

        The tokens of all ranks are in rank order.
        """
        num_heads = q_BPNH.shape[2]
        self._check_heads(num_heads)
        k_BPNH = self._repeat_uneven_heads(k_BPNH, num_heads)
        v_BPNH = self._repeat_uneven_heads(v_BPNH, num_heads)
        if keys is tokens:
            return self._exchange_tensors("qkv", (q_BPNH, k_BPNH, v_BPNH), tokens)
        # If the queries belong to other tokens than the keys, they are sent in a separate message.
        queries = self._exchange_tensors("q", (q_BPNH,), tokens)
        return queries + self._exchange_tensors("kv", (k_BPNH, v_BPNH), keys)

    def _exchange_tensors(self, name: str, tensors: Sequence[Tensor], tokens: LayerTokens) -> tuple[Tensor, ...]:
        """Exchange tensors of the same tokens in one message."""
        # A list is faster than a generator, and this runs for every attention layer.
        heads = tuple([x_BPNH.shape[2] for x_BPNH in tensors])
        shares = share_heads_and_tokens(tokens, heads, self._index, self._weights)
        if tokens.are_none:
            # Every rank knows that no rank computes these tokens, so no rank waits for a message.
            own = []
            for x_BPNH, run in zip(tensors, shares.heads[self._index], strict=True):
                own.append(x_BPNH[:, :, run.start : run.stop])
            return tuple(own)
        return self._receive_heads(self._send_heads(name, tensors, shares), shares, tensors[0])

    def exchange_heads_for_tokens(self, out_BSMH: Tensor, tokens: LayerTokens, heads: int) -> Tensor:
        """Exchange `[B, tokens of all ranks, own heads, H]` for `[B, own tokens, N, H]`."""
        shares = share_heads_and_tokens(tokens, (heads,), self._index, self._weights)
        batch, _, own_heads, size = out_BSMH.shape
        if tokens.are_none:
            return out_BSMH.new_empty((batch, 0, heads, size))
        # On the way back each rank sends as much as it received before.
        receives, sends = shares.size_messages(batch)
        length = shares.lengths[self._index]
        bases = self._find_bases("out", (shares, batch))
        if shares.is_even:
            out_RBPMH = out_BSMH.unflatten(1, (self._num_ranks, length)).transpose(0, 1)
            heads_of_tokens = out_RBPMH.flatten(0, -2).contiguous()
            (received,) = self._start_exchange(heads_of_tokens, sends, receives, bases).wait_for_tensors()
            return received.view(self._num_ranks, batch, length, own_heads, size).movedim(0, 2).flatten(2, 3)
        heads_of_tokens = torch.cat([part.flatten(0, -2) for part in out_BSMH.split(shares.lengths, dim=1)])
        (received,) = self._start_exchange(heads_of_tokens, sends, receives, bases).wait_for_tensors()
        parts = []
        for rank, message in enumerate(received.split(receives)):
            parts.append(message.view(batch, length, shares.num_heads[rank], size))
        return torch.cat(parts, dim=2)

    def select_own_heads(self, x: Tensor, heads: int) -> Tensor:
        """Select this rank's heads of `[B, S, N, H]`, keys or values that every rank has whole.

        Args:
            heads: the number of heads of the queries.
        """
        x = self._repeat_uneven_heads(x, heads)
        own = pick_weighted_chunk(range(x.shape[2]), self._weights, self._index)
        return x[:, :, own.start : own.stop]

    def _send_heads(self, name: str, tensors: Sequence[Tensor], shares: HeadAndTokenShares) -> PendingMessages:
        """Start to send each rank its heads of the tensors `[B, P, N, H]` and to receive this rank's heads."""
        batch, length, _, size = tensors[0].shape
        sends, receives = shares.size_messages(batch)
        bases = self._find_bases(name, (shares, batch))
        if shares.is_even:
            # These are views RBPMH, so `cat` makes the only copy. It puts the heads for one rank next to each other.
            views = [x_BPNH.unflatten(2, (self._num_ranks, -1)).movedim(2, 0) for x_BPNH in tensors]
            return self._start_exchange(torch.cat(views, dim=3).flatten(0, -2), sends, receives, bases)
        heads_of_tokens = tensors[0].new_empty((sum(sends), size))
        for rank, message in enumerate(heads_of_tokens.split(sends)):
            runs = shares.heads[rank]
            message_BPMH = message.view(batch, length, shares.num_heads[rank], size)
            parts = message_BPMH.split([len(run) for run in runs], dim=2)
            for x_BPNH, run, part in zip(tensors, runs, parts, strict=True):
                part.copy_(x_BPNH[:, :, run.start : run.stop])
        return self._start_exchange(heads_of_tokens, sends, receives, bases)

    def _receive_heads(self, pending: PendingMessages, shares: HeadAndTokenShares, like: Tensor) -> tuple[Tensor, ...]:
        """Return this rank's heads of the tensors, `[B, S, M, H]` each."""
        batch, _, _, size = like.shape
        count = shares.num_heads[self._index]
        (received,) = pending.wait_for_tensors()
        if batch == 1:
            # With one row of the batch, the messages lie in memory in the order of the tokens, so no copy is needed.
            x_BSMH = received.view(1, sum(shares.lengths), count, size)
        elif shares.is_even:
            x_BSMH = received.view(self._num_ranks, batch, -1, count, size).transpose(0, 1).flatten(1, 2)
        else:
            _, receives = shares.size_messages(batch)
            # `view` cannot infer -1 for an empty message, which a rank without heads gets.
            messages = []
            for message, length in zip(received.split(receives), shares.lengths, strict=True):
                messages.append(message.view(batch, length, count, size))
            x_BSMH = torch.cat(messages, dim=1)
        own_heads = [len(run) for run in shares.heads[self._index]]
        parts: tuple[Tensor, ...] = x_BSMH.split(own_heads, dim=2)
        return parts

    def _start_exchange(
        self, heads_of_tokens: Tensor, sends: list[int], receives: list[int], bases: SiteBases | None
    ) -> PendingMessages:
        assert self._axis.group is not None
        return start_all_to_all(heads_of_tokens, sends, receives, self._axis.group, self._traffic, KIND, bases)

    def _check_heads(self, heads: int) -> None:
        if heads % self._num_ranks and not self._uneven:
            raise PlanError(
                f"ulysses={self._num_ranks} does not divide the {heads} heads of a layer and uaa is off; try "
                f"{format_divisors(heads)}, or leave uaa out"
            )

    def _repeat_uneven_heads(self, x_BPNH: Tensor, heads: int) -> Tensor:
        """Return keys or values whose heads the ranks can divide.

        Heads of grouped-query attention are repeated if ranks cannot divide them evenly.
        """
        kv_heads = x_BPNH.shape[2]
        if kv_heads % self._num_ranks == 0 and len(set(self._weights)) == 1:
            return x_BPNH
        return x_BPNH.repeat_interleave(heads // kv_heads, dim=2)


class OverlappedUlysses(UlyssesExchange):
    """An exchange that sends each projection while the next one is computed.

    Args:
        axis, traffic, find_bases, uneven, weights: as for `UlyssesExchange`.
        now: has the micro-step under which the trace records each exchange.
    """

    overlaps = True

    def __init__(
        self,
        axis: Axis,
        traffic: Traffic,
        find_bases: FindBases,
        now: Generation,
        *,
        uneven: bool = True,
        weights: tuple[float, ...] | None = None,
    ) -> None:
        super().__init__(axis, traffic, find_bases, uneven=uneven, weights=weights)
        self._trace = traffic.trace
        self._now = now

    def exchange_overlapped(self, makers: Sequence[DeferredTensor], tokens: LayerTokens) -> tuple[Tensor, ...]:
        """Compute and exchange v, k and q in turn, sending each before the next is computed."""
        step, patch = self._now.micro_step
        branch = self._now.branch
        under_way: list[tuple[str, Tensor, HeadAndTokenShares, PendingMessages, object]] = []
        # v comes first, and the order is the same on every rank: NCCL matches collectives by their order.
        for name, make in zip("vkq", reversed(makers), strict=True):
            with self._trace.record_span(f"project {name}", step, patch, branch):
                x_BPNH = make()
            num_heads = x_BPNH.shape[2]
            self._check_heads(num_heads)
            shares = share_heads_and_tokens(tokens, (num_heads,), self._index, self._weights)
            pending = self._send_heads(name, [x_BPNH], shares)
            under_way.append((name, x_BPNH, shares, pending, self._trace.mark_point()))
        received: list[Tensor] = []
        for name, x_BPNH, shares, pending, began in under_way:
            received += self._receive_heads(pending, shares, x_BPNH)
            self._trace.record_op(f"exchange {name}", step, patch, branch, began)
        return tuple(reversed(received))

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
from ditile.distributed.trace import GenerationTrace
from ditile.distributed.transport import PendingMessages, Traffic, start_all_to_all
from ditile.hooks.generation import Generation, LayerTokens
from ditile.hooks.protocols import DeferredTensor
from ditile.plan.layout import pick_even_chunk

KIND = "ulysses"


class UlyssesExchange:
    """The exchange over one axis.

    Args:
        axis: the ranks that share out the tokens and the heads.
        traffic: counts bytes.
    """

    overlaps = False

    def __init__(self, axis: Axis, traffic: Traffic) -> None:
        assert axis.group is not None
        self._axis, self._group, self._traffic = axis, axis.group, traffic

    def exchange_tokens_for_heads(self, makes: Sequence[DeferredTensor], tokens: LayerTokens) -> list[Tensor]:
        """q, k, v `[B, own tokens, N, H]` to `[B, tokens of all ranks, own heads, H]`, in the order of the ranks."""
        q, *others = (make() for make in makes)
        tensors = [q, *(self._repeat_uneven_heads(x, q.shape[2]) for x in others)]
        return self._receive_heads(tensors, self._send_heads(tensors, tokens), tokens)

    def exchange_heads_for_tokens(self, out: Tensor, tokens: LayerTokens, heads: int) -> Tensor:
        """`[B, tokens of all ranks, own heads, H]` to `[B, own tokens, N, H]`."""
        lengths, theirs, own = self._list_ulysses_lengths(tokens), self._count_rank_heads(heads), self._axis.index
        batch, _, mine, size = out.shape
        spans = out.split(lengths, dim=1)
        sends = self._compute_message_sizes([n * mine * size for n in lengths], batch)
        flat = out.reshape(-1) if batch == 1 else out.new_empty(sum(sends))
        if batch > 1:
            for span, part in zip(spans, flat.split(sends), strict=True):
                if part.numel():
                    part.view(span.shape).copy_(span)
        receives = self._compute_message_sizes([lengths[own] * n * size for n in theirs], batch)
        (received,) = start_all_to_all(flat, sends, receives, self._group, self._traffic, KIND).wait_for_tensors()
        parts = list(received.split(receives))
        if batch > 1:
            parts[own] = spans[own]
        return torch.cat([x.view(batch, lengths[own], n, size) for x, n in zip(parts, theirs, strict=True)], dim=2)

    def _send_heads(self, tensors: Sequence[Tensor], tokens: LayerTokens) -> PendingMessages:
        """Sends to each rank its heads of all tensors, as `[B, S, tensors, heads, H]`."""
        batch, length, _, size = tensors[0].shape
        heads = self._split_heads(tensors)
        each = [sum(len(run) for run in runs) for runs in heads]
        sends = self._compute_message_sizes([length * n * size for n in each], batch)
        flat = tensors[0].new_empty(sum(sends))
        for part, runs in zip(flat.split(sends), heads, strict=True):
            if part.numel():
                _pack_heads(part.view(batch, length, -1, size), tensors, runs)
        receives = self._compute_message_sizes(
            [n * each[self._axis.index] * size for n in self._list_ulysses_lengths(tokens)], batch
        )
        return start_all_to_all(flat, sends, receives, self._group, self._traffic, KIND)

    def _receive_heads(self, tensors: Sequence[Tensor], pending: PendingMessages, tokens: LayerTokens) -> list[Tensor]:
        batch, _, _, size = tensors[0].shape
        runs, lengths = self._split_heads(tensors)[self._axis.index], self._list_ulysses_lengths(tokens)
        heads = [len(run) for run in runs]
        if batch == 1:
            (received,) = pending.wait_for_tensors()
            return list(received.view(1, sum(lengths), sum(heads), size).split(heads, dim=2))
        whole = tensors[0].new_empty((batch, sum(heads), sum(lengths), size)).transpose(1, 2)
        parts = whole.split(lengths, dim=1)
        _pack_heads(parts[self._axis.index], tensors, runs)  # while the others travel
        (received,) = pending.wait_for_tensors()
        sizes = self._compute_message_sizes([n * sum(heads) * size for n in lengths], batch)
        for part, travelled in zip(parts, received.split(sizes), strict=True):
            if travelled.numel():
                part.copy_(travelled.view(part.shape))
        return list(whole.split(heads, dim=2))

    def _compute_message_sizes(self, sizes: Sequence[int], batch: int) -> list[int]:
        """Numbers to each rank of so many for each row of a batch.

        What a rank keeps goes by itself to where it belongs, but for a batch of one, of which nothing has to be moved
        once it is there: then it goes with the others.
        """
        return [0 if batch > 1 and rank == self._axis.index else batch * size for rank, size in enumerate(sizes)]

    def _split_heads(self, tensors: Sequence[Tensor]) -> list[list[range]]:
        """Of each rank, its heads of each tensor."""
        size = self._axis.num_ranks
        return [[pick_even_chunk(range(x.shape[2]), size, rank) for x in tensors] for rank in range(size)]

    def _repeat_uneven_heads(self, x: Tensor, heads: int) -> Tensor:
        """Grouped-query heads are repeated where a rank's queries would need half a group."""
        return x if x.shape[2] % self._axis.num_ranks == 0 else x.repeat_interleave(heads // x.shape[2], dim=2)

    def _count_rank_heads(self, heads: int) -> list[int]:
        return [len(pick_even_chunk(range(heads), self._axis.num_ranks, rank)) for rank in range(self._axis.num_ranks)]

    def _list_ulysses_lengths(self, tokens: LayerTokens) -> list[int]:
        """Of the ranks on this line: they are neighbours."""
        first = tokens.index - self._axis.index
        return list(tokens.rank_lengths[first : first + self._axis.num_ranks])


class OverlappedUlysses(UlyssesExchange):
    """Each projection travels while the next one is computed.

    Args:
        axis, traffic: as above.
        trace, current: record when each exchange began and ended.
    """

    overlaps = True

    def __init__(self, axis: Axis, traffic: Traffic, trace: GenerationTrace, current: Callable[[], Generation]) -> None:
        super().__init__(axis, traffic)
        self._trace, self._now = trace, current

    def exchange_tokens_for_heads(self, makes: Sequence[DeferredTensor], tokens: LayerTokens) -> list[Tensor]:
        """As above, in three exchanges."""
        (step, patch), branch = self._now().micro_step, self._now().branch
        under_way: list[tuple[Tensor, PendingMessages, object]] = []
        for name, make in zip("qkv", makes, strict=True):
            with self._trace.record_span(f"project {name}", step, patch, branch):
                x = make()
            x = self._repeat_uneven_heads(x, under_way[0][0].shape[2] if under_way else x.shape[2])
            under_way.append((x, self._send_heads([x], tokens), self._trace.mark_point()))
        head_tensors = []
        for name, (x, pending, began) in zip("qkv", under_way, strict=True):
            head_tensors += self._receive_heads([x], pending, tokens)
            self._trace.record_op(f"exchange {name}", step, patch, branch, began)
        return head_tensors


def _pack_heads(into: Tensor, tensors: Sequence[Tensor], heads: Sequence[range]) -> None:
    """Puts some heads of each tensor next to each other."""
    chunks = into.split([len(run) for run in heads], dim=2)
    for x, run, chunk in zip(tensors, heads, chunks, strict=True):
        chunk.copy_(x[:, :, run.start : run.stop])

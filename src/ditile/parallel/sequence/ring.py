"""Ring: keys and values travel round the ranks while each rank's queries attend to a block of them (arXiv 2310.01889).
Gather: every rank gets all of them at once.

A ring of n ranks has n - 1 rounds: a rank sends a block on while it attends to that block; partial outputs are merged
by their log-sum-exp in fp32. Each rank sends 2 (n - 1) / n times the bytes of a layer's tokens. With Ulysses inside it
is USP (arXiv 2405.07719).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ditile.distributed.mesh import Axis
from ditile.distributed.transport import Traffic, start_gather, start_shift
from ditile.model.hooks.generation import LayerTokens
from ditile.model.hooks.key_padding import AttentionOptions
from ditile.model.hooks.protocols import AttentionKernel, FindBases

KIND = "ring"


class RingKeys:
    """The keys of all ranks along ring, attended to block by block.

    Args:
        kernel: attends to a block and returns the log-sum-exp.
        traffic: counts bytes.
        find_bases: finds the last message at the same point of the layer; a new one may be sent as its difference.
    """

    def __init__(self, axis: Axis, kernel: AttentionKernel, traffic: Traffic, find_bases: FindBases) -> None:
        assert axis.group is not None
        self._axis = axis
        self._kernel = kernel
        self._traffic = traffic
        self._find_bases = find_bases

    def attend_to_keys(self, q: Tensor, k: Tensor, v: Tensor, tokens: LayerTokens, extra: AttentionOptions) -> Tensor:
        """Return the output of the queries, `[B, S, N, H]`."""
        group = self._axis.group
        assert group is not None
        num_ranks = self._axis.num_ranks
        lengths = _count_rank_tokens(tokens, num_ranks)
        block = torch.stack([k, v])
        merged = None
        for turn in range(num_ranks):
            # Blocks travel up the ring, so in each turn this rank has the block of one rank further down.
            source = (self._axis.index - turn) % num_ranks
            incoming = None
            # The transfer starts before this block is attended to, so that both take place at once.
            if turn < num_ranks - 1:
                shape = (*block.shape[:2], lengths[source - 1], *block.shape[3:])  # of the block of the next turn
                bases = self._find_bases(turn, (tokens, block.shape))
                incoming = start_shift(block, shape, group, self._traffic, KIND, bases)
            mask = extra.mask.ring_masks[source] if extra.mask else None
            k, v = block
            # Every rank has the same further keys, so they are attended to in one turn only.
            if turn == 0 and extra.further is not None:
                k, v, mask = extra.further.join_keys(k, v, mask)
            part = self._kernel.attend_with_lse(q, k, v, mask=mask, scale=extra.scale)
            merged = part if merged is None else merge_attention(merged, part)
            if incoming is not None:
                (block,) = incoming.wait_for_tensors()
        assert merged is not None
        return merged[0].to(q.dtype)


@dataclass(frozen=True, slots=True)
class AxisGather:
    """Gathers the fresh keys of all ranks along an axis in one exchange.

    Along gather it is used in every layer, whose queries attend to all keys at once: the kernel need not return a
    log-sum-exp. Along ring it is used for a key store, because every rank stores all keys.

    Attributes:
        traffic: counts bytes, by the name of the axis.
        find_bases: finds the last message at the same point of the layer; a new one may be sent as its difference.
    """

    axis: Axis
    traffic: Traffic
    find_bases: FindBases

    def __call__(self, k: Tensor, v: Tensor, tokens: LayerTokens) -> tuple[Tensor, Tensor]:
        """Gather `[B, own tokens, N, H]` to `[B, tokens of all ranks, N, H]`, in rank order."""
        own = torch.stack([k, v])
        lengths = _count_rank_tokens(tokens, self.axis.num_ranks)
        shapes = [(*own.shape[:2], length, *own.shape[3:]) for length in lengths]
        bases = self.find_bases("keys", tuple(shapes))
        parts = start_gather(own, shapes, self.axis.group, self.traffic, self.axis.name, bases).wait_for_tensors()
        k, v = torch.cat(parts, dim=2)
        return k, v


@lru_cache(maxsize=4096)
def collect_rank_runs(tokens: LayerTokens, num_ranks: int) -> tuple[tuple[range, ...], ...]:
    """Return the positions of the tokens at each of `num_ranks` places along the outer axis (ring or gather).

    Each entry joins those of all ranks along the inner axis (ulysses) at that place.
    """
    num_inner = len(tokens.runs) // num_ranks
    collected = []
    # Ranks along the inner axis are neighbours.
    for first in range(0, len(tokens.runs), num_inner):
        runs: tuple[range, ...] = sum(tokens.runs[first : first + num_inner], ())
        collected.append(runs)
    return tuple(collected)


def _count_rank_tokens(tokens: LayerTokens, num_ranks: int) -> list[int]:
    return [sum(map(len, runs)) for runs in collect_rank_runs(tokens, num_ranks)]


def merge_attention(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Merge attention over two sets of keys into attention over both.

    Outputs are `[B, S, N, H]`, log-sum-exps `[B, S, N]`.
    """
    out_a, lse_a = one
    out_b, lse_b = other
    precise = torch.promote_types(out_a.dtype, torch.float32)
    # The share is NaN if all keys of both sets are masked.
    share_of_b = torch.sigmoid(lse_b - lse_a).nan_to_num(0.0)
    weight = share_of_b.unsqueeze(-1).to(precise)
    out = torch.lerp(out_a.to(precise), out_b.to(precise), weight)
    return out, torch.logaddexp(lse_a, lse_b)

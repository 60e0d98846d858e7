"""Ring: keys and values are passed round while each rank's queries attend to those at hand (arXiv 2310.01889).

n - 1 rounds of one message each, sent while the block that came before is attended to; partial outputs are merged by
their log-sum-exp in fp32. Each rank sends 2 (n - 1) / n of a layer's tokens. With Ulysses inside it is USP
(arXiv 2405.07719).
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
from ditile.model.hooks.protocols import AttentionKernel

KIND = "ring"


class RingKeys:
    """Attends to the keys of all ranks along ring, block by block.

    Args:
        axis: the ring.
        kernel: attends to a block, and knows the log-sum-exp.
        traffic: counts bytes.
    """

    def __init__(self, axis: Axis, kernel: AttentionKernel, traffic: Traffic) -> None:
        assert axis.group is not None
        self._axis = axis
        self._group = axis.group
        self._kernel = kernel
        self._traffic = traffic

    def attend_to_keys(self, q: Tensor, k: Tensor, v: Tensor, tokens: LayerTokens, extra: AttentionOptions) -> Tensor:
        """The output of the queries, `[B, S, N, H]`."""
        size = self._axis.num_ranks
        lengths = [sum(map(len, runs)) for runs in collect_rank_runs(tokens, size)]
        block = torch.stack([k, v])
        merged = None
        for turn in range(size):
            coming = None
            if turn < size - 1:
                length = lengths[(self._axis.index - turn - 1) % size]
                shape = (*block.shape[:2], length, *block.shape[3:])
                coming = start_shift(block, shape, self._group, self._traffic, KIND)
            mask = extra.mask.ring_masks[(self._axis.index - turn) % size] if extra.mask else None
            k, v = block
            if turn == 0 and extra.further is not None:
                k, v, mask = extra.further.join_keys(k, v, mask)
            part = self._kernel.attend_with_lse(q, k, v, mask=mask, scale=extra.scale)
            merged = part if merged is None else merge_attention(merged, part)
            if coming is not None:
                (block,) = coming.wait_for_tensors()
        assert merged is not None
        return merged[0].to(q.dtype)


@dataclass(frozen=True, slots=True)
class RingGather:
    """Collects the fresh keys of all ranks along ring once, for a store that all of them keep."""

    axis: Axis
    traffic: Traffic

    def __call__(self, k: Tensor, v: Tensor, tokens: LayerTokens) -> tuple[Tensor, Tensor]:
        """`[B, own tokens, N, H]` to those of all ranks, in their order."""
        own = torch.stack([k, v])
        lengths = [sum(map(len, runs)) for runs in collect_rank_runs(tokens, self.axis.num_ranks)]
        shapes = [(*own.shape[:2], length, *own.shape[3:]) for length in lengths]
        k, v = torch.cat(start_gather(own, shapes, self.axis.group, self.traffic, KIND).wait_for_tensors(), dim=2)
        return k, v


@lru_cache(maxsize=4096)
def collect_rank_runs(tokens: LayerTokens, size: int) -> tuple[tuple[range, ...], ...]:
    """What each rank along the outer axis has of the sequence, together with the ranks inside it."""
    inside = len(tokens.runs) // size
    return tuple(tuple(run for runs in tokens.runs[k * inside : (k + 1) * inside] for run in runs) for k in range(size))


def merge_attention(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys from that over each: outputs `[B, S, N, H]`, log-sum-exps `[B, S, N]`."""
    (a, lse_a), (b, lse_b) = one, other
    precise = torch.promote_types(a.dtype, torch.float32)
    share = torch.sigmoid(lse_b - lse_a).nan_to_num(0.0)  # NaN: neither has a key that is attended to
    out = torch.lerp(a.to(precise), b.to(precise), share.unsqueeze(-1).to(precise))
    return out, torch.logaddexp(lse_a, lse_b)

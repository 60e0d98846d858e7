"""Attention under a table: which tokens q and k are of follows from their number, and that says what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ditile.errors import ModelError
from ditile.hooks.generation import LayerTokens
from ditile.hooks.protocols import AttentionKernel, DeferredTensor
from ditile.parallel.sequence.cp_plan import ContextParallelSplits
from ditile.parallel.sequence.masks import GatheredKeyMaskSource


class TokenAttention(Protocol):
    """An `AttentionCore` over tokens that are named."""

    def __call__(
        self,
        tokens: LayerTokens,
        makes: Sequence[DeferredTensor],
        *,
        mask: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor: ...


class MaskOrigins:
    """Says what the masks of one layer follow from: those that the transformer was given, and the turn within a call.

    Processors make their masks anew in every layer, from masks that the pipeline makes once. A cache leaves layers and
    rows out, so that turns do not say which mask it is: then nothing is known.
    """

    def __init__(self, splits: ContextParallelSplits, *, cached: bool) -> None:
        self._splits, self._cached, self._call, self._turn = splits, cached, 0, 0

    def advance_turn(self) -> None:
        """The layer attends."""
        self._turn = self._turn + 1 if self._call == self._splits.calls else 0
        self._call = self._splits.calls

    def __call__(self, mask: Tensor) -> tuple[object, ...] | None:
        return (self._turn, *self._splits.masks) if self._splits.masks and not self._cached else None


class ContextParallelAttention:
    """One attention layer: shared out where queries and keys are of the same split tokens, local where keys are whole.

    Where they are of different ones (cross attention to a split text), keys and values are gathered: 2 (n - 1) / n of
    the text's tokens, which is less than the queries would cost.

    Args:
        splits: what is split.
        over: attends to the tokens of all ranks.
        kernel: attends to those that are here.
        masks: gathers masks.
        source: remembers them.
    """

    overlaps = False

    def __init__(
        self,
        splits: ContextParallelSplits,
        over: TokenAttention,
        kernel: AttentionKernel,
        masks: GatheredKeyMaskSource,
        source: MaskOrigins,
    ) -> None:
        self._splits, self._over, self._kernel = splits, over, kernel
        self._masks, self._source = masks, source

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        """Attends. `[B, S, N, H]`."""
        self._splits.attending = True
        try:
            return self._route_attention(q, k, v, mask, scale)
        finally:
            self._splits.attending = False

    def _route_attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        of_q, of_k = self._splits.find_tokens(q.shape[1]), self._splits.find_tokens(k.shape[1])
        if of_k is None:
            if of_q is None:
                self._splits.refuse_partial_split(k.shape[1])
            return self._kernel(q, k, v, mask=mask, scale=scale)
        self._source.advance_turn()
        if mask is not None and mask.shape[-1] == of_k.length and len(of_k.runs[0]) > 1:
            raise ModelError(
                f"an attention mask of all {of_k.length} keys of a joint sequence, and cp_plan does not say in which "
                "order they are; split what it is made of, or run this model with ulysses=1 and ring=1"
            )
        if of_q is of_k:
            return self._over(of_k, (lambda: q, lambda: k, lambda: v), mask=mask, scale=scale)
        if mask is not None:
            mask = self._masks.gather_key_mask(mask, q.shape[0], of_k, None).join_ring_masks()
        k, v = torch.cat(self._splits.gather_shares(torch.stack([k, v]), of_k, 2), dim=2)
        return self._kernel(q, k, v, mask=mask, scale=scale)

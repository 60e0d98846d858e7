"""Key padding masks: which keys the queries attend to. They are cut and joined like the keys."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ditile.plan.errors import ModelError


class KeyPaddingMask(NamedTuple):
    """Which keys of all ranks that split the tokens are attended to, boolean or additive.

    Attributes:
        ring_masks: for each rank along ring, of the keys of its whole ulysses line:
            `[B or 1, own heads or 1, queries or 1, keys]`.
        covers_sequence: whether there are keys of the whole sequence, and not of the current patch alone.
    """

    ring_masks: tuple[Tensor, ...]
    covers_sequence: bool = False

    def join_ring_masks(self) -> Tensor:
        """The mask of all keys, in the order of the ranks."""
        if len(self.ring_masks) == 1:
            return self.ring_masks[0]
        return torch.cat(self.ring_masks, dim=-1)


class FurtherKeys(NamedTuple):
    """Keys and values that are made of no token in the blocks, such as those of a prompt: every rank has them whole.

    Attributes:
        keys, values: `[B, n, own heads, H]`.
        mask: which of them are attended to, `[B or 1, own heads or 1, 1, n]`; None is all.
        at: how many keys of this rank's tokens precede them.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor | None
    at: int

    def join_keys(self, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """These among others `[B, S, N, H]`; `mask` is of the others, and is given where these have one."""
        at = self.at
        joined_k = torch.cat([k[:, :at], self.keys, k[:, at:]], dim=1)
        joined_v = torch.cat([v[:, :at], self.values, v[:, at:]], dim=1)
        if mask is not None and self.mask is not None:
            shape = torch.broadcast_shapes(mask.shape[:3], self.mask.shape[:3])
            whole = mask.expand(*shape, -1)
            own = self.mask.expand(*shape, -1)
            mask = torch.cat([whole[..., :at], own, whole[..., at:]], dim=3)
        return joined_k, joined_v, mask


class AttentionOptions(NamedTuple):
    """What goes with q, k and v.

    Attributes:
        mask: which keys are attended to; None is all.
        scale: of the scores; None is 1 / sqrt(head size).
        further: keys that are attended to in addition to those of tokens.
    """

    mask: KeyPaddingMask | None = None
    scale: float | None = None
    further: FurtherKeys | None = None


def expand_mask(mask: Tensor, batch: int) -> Tensor:
    """A mask as `[B or 1, N or 1, queries or 1, keys]`; one that is the same for every query has one row of them.

    Args:
        mask: `[B, keys]`, `[queries, keys]`, `[B, queries, keys]` or of four dimensions.
    """
    if mask.ndim == 2 and mask.shape[0] in (1, batch):
        # `[B, keys]`: the same keys for all heads and queries.
        return mask[:, None, None]
    if mask.ndim == 3:
        mask = mask[:, None]
    while mask.ndim < 4:
        mask = mask[None]
    # A stride of 0 repeats one row for all queries.
    if mask.stride(2) == 0:
        return mask[:, :, :1]
    return mask


def make_pairs_error(mask: Tensor) -> ModelError:
    """The error for a mask that differs from query to query and is not of the whole sequence."""
    return ModelError(
        f"an attention mask of shape {tuple(mask.shape)} tells queries apart, and only one of keys, [B, keys] or "
        "[B, 1, 1, keys], or of all queries and keys can be cut with the tokens; use a plan of data or cfg"
    )

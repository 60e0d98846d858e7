"""Key padding masks, which select the keys that queries attend to. They are cut and joined like the keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ditile.plan.errors import ModelError


class KeyPaddingMask(NamedTuple):
    """A boolean or additive mask over the keys of all ranks that split the tokens.

    Attributes:
        ring_masks: for each rank along ring, the mask of the keys of its whole ulysses line:
            `[B or 1, own heads or 1, queries or 1, keys]`.
        covers_sequence: whether the keys are those of the whole sequence, and not only of the current patch.
    """

    ring_masks: tuple[Tensor, ...]
    covers_sequence: bool = False

    def join_ring_masks(self) -> Tensor:
        """Return the mask of all keys, in the order of the ranks."""
        if len(self.ring_masks) == 1:
            return self.ring_masks[0]
        return torch.cat(self.ring_masks, dim=-1)


class FurtherKeys(NamedTuple):
    """Keys and values that are not made of tokens in the blocks, such as those of a prompt: every rank has all of them.

    Attributes:
        keys, values: `[B, n, own heads, H]`.
        mask: `[B or 1, own heads or 1, 1, n]`; None attends to all.
        at: the number of keys of this rank's tokens that precede these keys.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor | None
    at: int

    def join_keys(self, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Insert these among other keys and values `[B, S, N, H]`; `mask` masks the others, and must be given if these
        keys have a mask."""
        at = self.at
        joined_k = torch.cat([k[:, :at], self.keys, k[:, at:]], dim=1)
        joined_v = torch.cat([v[:, :at], self.values, v[:, at:]], dim=1)
        if mask is not None and self.mask is not None:
            shape = torch.broadcast_shapes(mask.shape[:3], self.mask.shape[:3])
            outer_mask = mask.expand(*shape, -1)
            own_mask = self.mask.expand(*shape, -1)
            mask = torch.cat([outer_mask[..., :at], own_mask, outer_mask[..., at:]], dim=3)
        return joined_k, joined_v, mask


class AttentionOptions(NamedTuple):
    """The options of an attention call besides q, k and v.

    Attributes:
        mask: the mask of the keys; None attends to all.
        scale: the factor of the scores; None is 1 / sqrt(head size).
        further: keys that are attended to in addition to those of tokens.
    """

    mask: KeyPaddingMask | None = None
    scale: float | None = None
    further: FurtherKeys | None = None

    def attend(self, kernel: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attend to keys `[B, S, N, H]` of tokens under their mask, and to the further ones."""
        if self.further is not None:
            k, v, mask = self.further.join_keys(k, v, mask)
        return kernel(q, k, v, mask=mask, scale=self.scale)


def expand_mask(mask: Tensor, batch: int) -> Tensor:
    """Return a mask as `[B or 1, N or 1, queries or 1, keys]`; if it repeats one row for all queries, keep that row.

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
    """Make the error for a mask that differs between queries and cannot be cut with the tokens."""
    return ModelError(
        f"an attention mask of shape {tuple(mask.shape)} tells queries apart, and only one of keys, [B, keys] or "
        "[B, 1, 1, keys], or of all queries and keys can be cut with the tokens; use a plan of data or cfg"
    )

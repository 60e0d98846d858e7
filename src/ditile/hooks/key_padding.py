"""Key padding masks: which keys the queries attend to. They are cut and joined like the keys."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ditile.errors import ModelError


class KeyPaddingMask(NamedTuple):
    """Which keys of all ranks that share out the tokens are attended to.

    Attributes:
        ring_masks: for each rank along ring, of the keys of its whole ulysses line: boolean or additive
            `[B or 1, own heads or 1, 1, keys]`. Where this rank has all tokens it is the mask as it was given.
    """

    ring_masks: tuple[Tensor, ...]

    def join_ring_masks(self) -> Tensor:
        """The mask of all keys, in the order of the ranks."""
        return torch.cat(self.ring_masks, dim=-1)


class AttentionOptions(NamedTuple):
    """What goes with q, k and v.

    Attributes:
        mask: which keys are attended to; None is all.
        scale: of the scores; None is 1 / sqrt(head size).
    """

    mask: KeyPaddingMask | None = None
    scale: float | None = None


def normalize_key_mask(mask: Tensor, batch: int) -> Tensor:
    """A mask of keys alone, boolean or additive, as `[B or 1, N or 1, 1, keys]`.

    Args:
        mask: `[B, keys]`, or `[B or 1, N or 1, queries or 1, keys]` that is the same for every query.
        batch: B.

    Raises:
        ModelError: if it may differ from query to query, so that it cannot be cut like the keys.
    """
    if mask.ndim == 2 and mask.shape[0] in (1, batch):
        return mask[:, None, None]
    if mask.ndim == 4 and (mask.shape[2] == 1 or mask.stride(2) == 0):
        return mask[:, :, :1]
    raise ModelError(
        f"an attention mask of shape {tuple(mask.shape)} tells queries apart, and only one of keys, [B, keys] or "
        "[B, 1, 1, keys], can be cut with the tokens; run this model with ulysses=1 and ring=1"
    )


def refuse_key_masks(extra: AttentionOptions, layer: str) -> None:
    """Raises `ModelError` if there is a mask: stale keys are kept without one."""
    if extra.mask is not None:
        raise ModelError(
            f"{layer} masks keys, which stale keys are kept without; use ulysses or ring in place of pipefusion and "
            "distrifusion"
        )

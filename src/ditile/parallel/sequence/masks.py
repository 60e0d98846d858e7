"""Masks of shared-out keys: those of all ranks are gathered as the keys are, once for as long as they stay the same."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from ditile.distributed.mesh import Axis
from ditile.distributed.transport import Traffic, start_gather
from ditile.model.hooks.generation import LayerTokens
from ditile.model.hooks.key_padding import KeyPaddingMask, expand_mask, make_pairs_error
from ditile.model.hooks.token_arguments import take_runs
from ditile.plan.errors import ModelError
from ditile.plan.layout import pick_even_chunk

KIND = "masks"
MAX_CACHED_MASKS = 1024  # guidance branches x the layers that share one core


class CachedMask(NamedTuple):
    """A gathered mask, and what it was made from, kept so that no other object gets its identity."""

    source: Tensor
    mask: KeyPaddingMask


class GatheredKeyMaskSource:
    """The masks of one layer.

    Args:
        axis: all ranks that share out the tokens, those along ulysses inside.
        ulysses: those that share out the heads too.
        traffic: counts bytes.
    """

    def __init__(self, axis: Axis, ulysses: Axis, traffic: Traffic) -> None:
        assert axis.group is not None
        self._axis = axis
        self._group = axis.group
        self._ulysses = ulysses
        self._traffic = traffic
        self._cached_masks: dict[Hashable, CachedMask] = {}

    def gather_key_mask(self, mask: Tensor, batch: int, tokens: LayerTokens, heads: int | None) -> KeyPaddingMask:
        """The mask of the keys of all ranks.

        Args:
            mask: as the layer was given it, of this rank's keys, dummies among them, or of all keys in sequence.
            batch: rows of the keys.
            tokens: whose keys.
            heads: how many there are, to keep this rank's; None keeps all.

        Raises:
            ModelError: if it tells queries apart and is not of the whole sequence, or is of another number of keys.
        """
        flat = expand_mask(mask, batch)
        own = tokens.rank_lengths[tokens.index] + tokens.dummies
        if flat.shape[2] > 1 and flat.shape[2:] != (tokens.length, tokens.length):
            raise make_pairs_error(flat)
        if flat.shape[-1] != own and not _covers_all_keys(flat, tokens):
            raise ModelError(
                f"an attention mask of {flat.shape[-1]} keys came with {own} keys of {tokens.length} on this rank; "
                "give one of all of them, or of those here, or run this model with ulysses=1 and ring=1"
            )
        if flat.shape[2] > 1:  # of pairs: made anew by every block, and cut alone
            return self._assemble_mask(flat, tokens, heads)
        key = (tokens.runs, flat.shape, heads, id(mask))
        if key not in self._cached_masks:
            if len(self._cached_masks) >= MAX_CACHED_MASKS:
                self._cached_masks.clear()
            self._cached_masks[key] = CachedMask(mask, self._assemble_mask(flat, tokens, heads))
        return self._cached_masks[key].mask

    def _assemble_mask(self, mask: Tensor, tokens: LayerTokens, heads: int | None) -> KeyPaddingMask:
        """From `[B or 1, N or 1, queries or 1, keys]`; a mask of all keys is cut, and nothing travels."""
        if mask.stride(1) == 0:
            mask = mask[:, :1]
        if mask.shape[2] > 1:
            first = tokens.index // self._ulysses.num_ranks * self._ulysses.num_ranks
            line = tokens.runs[first : first + self._ulysses.num_ranks]
            mask = take_runs(mask, [run for runs in line for run in runs], 2)
        if _covers_all_keys(mask, tokens):
            parts = [torch.cat([mask[..., run.start : run.stop] for run in runs], dim=-1) for runs in tokens.runs]
        else:
            parts = self._gather_rank_masks(mask[..., tokens.real_tokens], tokens)
        if heads is not None and mask.shape[1] > 1:
            own = pick_even_chunk(range(heads), self._ulysses.num_ranks, self._ulysses.index)
            parts = [part[:, own.start : own.stop] for part in parts]
        inside = self._ulysses.num_ranks
        return KeyPaddingMask(tuple(torch.cat(parts[k : k + inside], dim=-1) for k in range(0, len(parts), inside)))

    def _gather_rank_masks(self, mask: Tensor, tokens: LayerTokens) -> list[Tensor]:
        flat = mask.to(torch.uint8) if mask.dtype == torch.bool else mask  # not every backend sends booleans
        shapes = [(*mask.shape[:3], length) for length in tokens.rank_lengths]
        return [
            part.to(mask.dtype)
            for part in start_gather(flat, shapes, self._group, self._traffic, KIND).wait_for_tensors()
        ]


def _covers_all_keys(mask: Tensor, tokens: LayerTokens) -> bool:
    """Whether it is of all keys; where one rank has them all, ranks would not agree on that."""
    return mask.shape[-1] == tokens.length != max(tokens.rank_lengths)

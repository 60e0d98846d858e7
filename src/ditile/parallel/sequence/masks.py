"""Masks of keys that ranks share: gathered from all ranks like the keys, and cached while they stay the same."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from ditile.distributed.mesh import Axis
from ditile.distributed.transport import Traffic, start_gather
from ditile.model.hooks.generation import LayerTokens
from ditile.model.hooks.key_padding import KeyPaddingMask, expand_mask, make_pairs_error
from ditile.model.hooks.token_arguments import take_runs
from ditile.plan.errors import ModelError
from ditile.plan.layout import pick_weighted_chunk

KIND = "masks"
MAX_CACHED_MASKS = 1024
"""How many masks are cached, over all layers and guidance branches."""


class GatheredKeyMaskSource:
    """The key masks of all layers.

    Args:
        axis: all ranks that split the tokens; those along ulysses are neighbours.
        ulysses: the ranks that split the heads too.
        traffic: counts bytes.
        weights: how the heads are shared along ulysses; equal by default.
        remembers: returns whether a mask that comes again is taken from the cache, the same on all ranks. Recorded
            calls must gather again: the cached mask would be in another recording's memory, and all ranks have to send
            the same messages.
    """

    def __init__(
        self,
        axis: Axis,
        ulysses: Axis,
        traffic: Traffic,
        weights: tuple[float, ...] | None = None,
        *,
        remembers: Callable[[], bool] = lambda: True,
    ) -> None:
        assert axis.group is not None
        self._weights = weights or (1.0,) * ulysses.num_ranks
        self._axis = axis
        self._ulysses = ulysses
        self._traffic = traffic
        self._remembers = remembers
        # The source is kept with its gathered mask, so that no other tensor gets the same id.
        self._cached_masks: dict[Hashable, tuple[Tensor, KeyPaddingMask]] = {}

    def gather_key_mask(self, mask: Tensor, batch: int, tokens: LayerTokens, heads: int | None) -> KeyPaddingMask:
        """Return the mask of all ranks' keys.

        Args:
            mask: the mask that the layer got, for this rank's keys with dummies, or for all keys of the sequence.
            heads: the number of heads, of which only this rank's share is kept; None keeps all.

        Raises:
            ModelError: if it masks pairs without covering the whole sequence, or has an unexpected number of keys.
        """
        flat = expand_mask(mask, batch)
        num_queries, num_keys = flat.shape[2:]
        num_own = tokens.rank_lengths[tokens.index] + tokens.dummies
        if num_queries > 1 and not num_queries == num_keys == tokens.length:
            raise make_pairs_error(flat)
        if num_keys != num_own and not _covers_all_keys(flat, tokens):
            raise ModelError(
                f"an attention mask of {num_keys} keys came with {num_own} keys of {tokens.length} on this rank; "
                "give one of all of them, or of those here, or run this model with ulysses=1 and ring=1"
            )
        # A mask of pairs is a new tensor in every block and is only cut, so it is not cached.
        if num_queries > 1 or not self._remembers():
            return self._assemble_mask(flat, tokens, heads)
        key = (tokens.runs, flat.shape, heads, id(mask))
        if key not in self._cached_masks:
            if len(self._cached_masks) >= MAX_CACHED_MASKS:
                self._cached_masks.clear()
            self._cached_masks[key] = (mask, self._assemble_mask(flat, tokens, heads))
        return self._cached_masks[key][1]

    def _assemble_mask(self, mask: Tensor, tokens: LayerTokens, heads: int | None) -> KeyPaddingMask:
        """Build the key mask from `[B or 1, N or 1, queries or 1, keys]`.

        A mask of all keys is only cut, without a message.
        """
        # All heads have the same mask if it was expanded over them.
        if mask.stride(1) == 0:
            mask = mask[:, :1]
        num_ranks = self._ulysses.num_ranks
        if mask.shape[2] > 1:
            first = tokens.index - tokens.index % num_ranks
            query_runs: tuple[range, ...] = sum(tokens.runs[first : first + num_ranks], ())
            mask = take_runs(mask, query_runs, 2)
        if _covers_all_keys(mask, tokens):
            parts = [take_runs(mask, runs, 3) for runs in tokens.runs]
        else:
            own = mask[..., tokens.real_tokens]
            # Some backends cannot send booleans, so they are sent as bytes.
            flat = own.to(torch.uint8) if own.dtype == torch.bool else own
            shapes = [(*own.shape[:3], length) for length in tokens.rank_lengths]
            received = start_gather(flat, shapes, self._axis.group, self._traffic, KIND).wait_for_tensors()
            parts = [part.to(own.dtype) for part in received]
        if heads is not None and mask.shape[1] > 1:
            chunk = pick_weighted_chunk(range(heads), self._weights, self._ulysses.index)
            parts = [part[:, chunk.start : chunk.stop] for part in parts]
        ring_masks = []
        for first in range(0, len(parts), num_ranks):
            ring_masks.append(torch.cat(parts[first : first + num_ranks], dim=-1))
        return KeyPaddingMask(tuple(ring_masks))


def _covers_all_keys(mask: Tensor, tokens: LayerTokens) -> bool:
    """Return whether the mask covers all keys, and no rank has all of them.

    A rank that has all keys would take a mask of its own keys for one of all. The others gather, so it gathers too.
    """
    return mask.shape[-1] == tokens.length != max(tokens.rank_lengths)

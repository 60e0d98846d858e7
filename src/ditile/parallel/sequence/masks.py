"""Masks of shared-out keys: those of all ranks are gathered as the keys are, once for as long as they stay the same."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from ditile.distributed.mesh import Axis
from ditile.distributed.transport import Traffic, start_gather
from ditile.errors import ModelError
from ditile.hooks.generation import Tokens
from ditile.hooks.key_padding import KeyMask, of_keys
from ditile.plan.layout import share

KIND = "masks"
KEPT = 1024  # guidance branches x the layers that share one core


class Remembered(NamedTuple):
    """A gathered mask, and what it was made from, held so that its identity stays its own."""

    source: tuple[object, ...]
    mask: KeyMask


def itself(mask: Tensor) -> tuple[object, ...]:
    """A mask is remembered as long as the layer is given the same tensor."""
    return (mask,)


class GatheredMasks:
    """The masks of one layer.

    Args:
        axis: all ranks that share out the tokens, those along ulysses inside.
        ulysses: those that share out the heads too.
        traffic: counts bytes.
        source: the objects that a mask follows from: while they are the same, so is the mask. None if that is unknown.
    """

    def __init__(
        self, axis: Axis, ulysses: Axis, traffic: Traffic,
        source: Callable[[Tensor], tuple[object, ...] | None] = itself,
    ) -> None:  # fmt: skip
        assert axis.group is not None
        self._axis, self._group, self._ulysses, self._traffic = axis, axis.group, ulysses, traffic
        self._source = source
        self._known: dict[Hashable, Remembered] = {}

    def gather(self, mask: Tensor, batch: int, tokens: Tokens, heads: int | None) -> KeyMask:
        """That of the keys of all ranks.

        Args:
            mask: as the layer was given it, of this rank's keys, dummies among them, or of all keys in sequence.
            batch: rows of the keys.
            tokens: whose keys.
            heads: how many there are, to keep this rank's; None keeps all.

        Raises:
            ModelError: if it tells queries apart, or is of another number of keys.
        """
        flat, own = of_keys(mask, batch), tokens.lengths[tokens.index] + tokens.dummies
        if flat.shape[-1] != own and not _is_of_all(flat, tokens):
            raise ModelError(
                f"an attention mask of {flat.shape[-1]} keys came with {own} keys of {tokens.length} on this rank; "
                "give one of all of them, or of those here, or run this model with ulysses=1 and ring=1"
            )
        source = self._source(mask)
        if source is None:
            return self._of_all(flat, tokens, heads)
        key = (tokens.runs, flat.shape, heads, *map(id, source))
        if key not in self._known:
            if len(self._known) >= KEPT:
                self._known.clear()
            self._known[key] = Remembered(source, self._of_all(flat, tokens, heads))
        return self._known[key].mask

    def _of_all(self, mask: Tensor, tokens: Tokens, heads: int | None) -> KeyMask:
        """Of `[B or 1, N or 1, 1, keys]`; one of all keys is cut and nothing travels."""
        if mask.stride(1) == 0:
            mask = mask[:, :1]
        if _is_of_all(mask, tokens):
            parts = [torch.cat([mask[..., run.start : run.stop] for run in runs], dim=-1) for runs in tokens.runs]
        else:
            parts = self._gathered(mask[..., tokens.real], tokens)
        if heads is not None and mask.shape[1] > 1:
            own = share(range(heads), self._ulysses.size, self._ulysses.index)
            parts = [part[:, own.start : own.stop] for part in parts]
        inside = self._ulysses.size
        return KeyMask(tuple(torch.cat(parts[k : k + inside], dim=-1) for k in range(0, len(parts), inside)))

    def _gathered(self, mask: Tensor, tokens: Tokens) -> list[Tensor]:
        flat = mask.to(torch.uint8) if mask.dtype == torch.bool else mask  # not every backend sends booleans
        shapes = [(*mask.shape[:3], length) for length in tokens.lengths]
        return [part.to(mask.dtype) for part in start_gather(flat, shapes, self._group, self._traffic, KIND).wait()]


def _is_of_all(mask: Tensor, tokens: Tokens) -> bool:
    """Whether it is of all keys; where one rank has them all, ranks would not agree on that."""
    return mask.shape[-1] == tokens.length != max(tokens.lengths)

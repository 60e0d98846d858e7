"""Memory: what survives a step, per (image, guidance branch, layer). One per generation; nothing is ever shared.

Keys and values of the whole image are kept in one buffer `[B, S, N, H]` each, in the order of the sequence, so that a
patch attends to them where they lie. Every segment (the text, each patch) knows the step that wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ditile.errors import StateError
from ditile.layout import DUMMY_TEXT, Layout

NEVER = -1


class KeyStore:
    """Keys and values of one attention layer of one guidance branch.

    `joint` says whether this layer attends to the text too.
    """

    def __init__(self, layout: Layout, *, joint: bool) -> None:
        self._layout = layout
        self._text = layout.text if joint else 0
        self._text_at = 0 if layout.joint == "text_first" else layout.image
        self._image_at = self._text if layout.joint == "text_first" else 0
        self._buffers: tuple[Tensor, Tensor] | None = None
        self.written = [NEVER] * layout.patches

    @property
    def bytes(self) -> int:
        """Bytes held."""
        return 0 if self._buffers is None else sum(b.numel() * b.element_size() for b in self._buffers)

    def fill(self, k: Tensor, v: Tensor, step: int) -> None:
        """Keeps the keys and values `[B, S, N, H]` of a whole step."""
        for buffer, fresh in zip(self._allocated(k), (k, v), strict=True):
            buffer.copy_(fresh)
        self.written = [step] * len(self.written)

    def update(self, k: Tensor, v: Tensor, patch: int, step: int) -> tuple[Tensor, Tensor]:
        """Writes a patch (and the text with patch 0) over its stale self; returns the whole keys and values."""
        buffers = self._allocated(k)
        for buffer, fresh in zip(buffers, (k, v), strict=True):
            self._write(buffer, fresh, patch)
        self.written[patch] = step
        return buffers

    def ages(self, step: int) -> tuple[int | None, ...]:
        """How many steps old each patch is; None if it was never written."""
        return tuple(None if at == NEVER else step - at for at in self.written)

    def _write(self, buffer: Tensor, fresh: Tensor, patch: int) -> None:
        span = self._layout.tokens(patch)
        image = slice(self._image_at + span.start, self._image_at + span.stop)
        if not self._text:
            buffer[:, image] = fresh
            return
        text = self._text if patch == 0 else DUMMY_TEXT
        first = self._layout.joint == "text_first"
        fresh_image = fresh[:, text:] if first else fresh[:, : fresh.shape[1] - text]
        buffer[:, image] = fresh_image
        if patch == 0:
            fresh_text = fresh[:, :text] if first else fresh[:, fresh.shape[1] - text :]
            buffer[:, self._text_at : self._text_at + text] = fresh_text

    def _allocated(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """The buffers, made of zeros at first: with warmup 0 the first step attends to zeros, as in the paper."""
        if self._buffers is None:
            shape = (like.shape[0], self._layout.image + self._text, *like.shape[2:])
            self._buffers = (like.new_zeros(shape), like.new_zeros(shape))
        elif self._buffers[0].shape[0] != like.shape[0]:
            raise StateError(
                f"the batch changed from {self._buffers[0].shape[0]} to {like.shape[0]} rows in mid-run, and stale "
                "keys belong to rows; keep guidance on for the whole run, or use warmup equal to the steps"
            )
        return self._buffers


class Memo(NamedTuple):
    """A remembered value and what it was made from, if that identifies it."""

    value: Any
    source: Any


class Memory:
    """Key stores, predictions and constants of one generation."""

    def __init__(self) -> None:
        self._stores: dict[tuple[int, str], KeyStore] = {}
        self._buffers: dict[Hashable, Tensor] = {}
        self._constants: dict[Hashable, Any] = {}
        self._of_step: dict[Hashable, Any] = {}
        self._sliced: dict[Hashable, Memo] = {}

    def store(self, branch: int, layer: str, layout: Layout, *, joint: bool) -> KeyStore:
        """The keys and values of a layer."""
        key = (branch, layer)
        if key not in self._stores:
            self._stores[key] = KeyStore(layout, joint=joint)
        return self._stores[key]

    @property
    def key_bytes(self) -> int:
        """Bytes of all keys and values held."""
        return sum(store.bytes for store in self._stores.values())

    def buffer(self, key: Hashable, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """A buffer that keeps its content from call to call; zeros at first."""
        found = self._buffers.get(key)
        if found is None or found.shape != torch.Size(shape) or found.dtype != like.dtype:
            found = self._buffers[key] = like.new_zeros(shape)
        return found

    def constant(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """A value that does not change during the generation, made once."""
        if key not in self._constants:
            self._constants[key] = make()
        return self._constants[key]

    def of_step(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """A value that does not change during a step, made once per step."""
        if key not in self._of_step:
            self._of_step[key] = make()
        return self._of_step[key]

    def sliced(self, key: Hashable, source: Any, make: Callable[[], Any]) -> Any:
        """The part of `source` that a patch needs, cut anew only when `source` is another object."""
        memo = self._sliced.get(key)
        if memo is None or memo.source is not source:
            memo = self._sliced[key] = Memo(make(), source)
        return memo.value

    def end_step(self) -> None:
        """Forgets what was constant within the step."""
        self._of_step.clear()

    def forget_constants(self) -> None:
        """Forgets what was constant in the generation: a callback may have changed what it was made of."""
        self._constants.clear()
        self._sliced.clear()

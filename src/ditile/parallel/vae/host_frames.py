"""Frames of a video leave the device as the decoder makes them.

A causal autoencoder decodes a few frames at a time, and a tiled one a few tiles, and diffusers keeps all of them on the
device until the last one is there; then its clamping and its postprocessing make more copies. Here the decoder returns
its result in the host's memory, where diffusers' own code goes on with it. So the device holds one chunk beside the
decoder's caches, and the numbers are the same: what follows the decoder joins, blends, clamps and rounds them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ditile.model.hooks.overrides import override_attribute

HOSTED = frozenset({
    "AutoencoderKLCogVideoX", "AutoencoderKLCosmos", "AutoencoderKLHunyuanVideo", "AutoencoderKLHunyuanVideo15",
    "AutoencoderKLLTX2Video", "AutoencoderKLLTXVideo", "AutoencoderKLMochi", "AutoencoderKLWan",
})  # fmt: skip
"""Classes whose code after the decoder computes on any device. Others write into a tensor on the latents' device."""
FRAME_DIM = 2
"""The dimension of frames in [B, C, F, H, W]."""


class HostFrames(TorchFunctionMode):
    """Joins frames in the host's memory while an autoencoder decodes.

    AutoencoderKLWan joins all frames so far with each new chunk: a copy of everything, which is little for a device's
    memory, and for a host's more than the decode itself. Here a chunk is written behind the others, into a buffer that
    doubles when it is full.
    """

    def __init__(self) -> None:
        super().__init__()
        self._forget_frames()

    def _forget_frames(self) -> None:
        self._joined: Tensor | None = None
        self._buffer: Tensor | None = None
        self._chunks: tuple[Tensor | None, Tensor | None] = (None, None)

    def decode_to_host(self, decode: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a decode with the frames in the host's memory."""
        try:
            with self:
                return decode(*args, **kwargs)
        finally:
            self._forget_frames()

    def move_chunk(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the result of a decoder's forward, with its frames in the host's memory."""
        result = forward(*args, **kwargs)
        # Beside the frames there may be caches, which the next chunk reads on the device.
        if isinstance(result, tuple):
            return (result[0].to("cpu"), *result[1:])
        chunk = result.to("cpu")
        self._chunks = (self._chunks[1], chunk)
        return chunk

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Write a chunk behind the frames so far where they are joined; run other functions unchanged."""
        if func is torch.cat and len(args) == 2 and args[1] == FRAME_DIM and len(args[0]) == 2:
            frames, chunk = args[0]
            first, second = self._chunks
            if chunk is second and frames is first:
                self._buffer = None
                return self._append_chunk(frames, chunk)
            if chunk is second and frames is self._joined:
                return self._append_chunk(frames, chunk)
        return func(*args, **(kwargs or {}))

    def _append_chunk(self, frames: Any, chunk: Any) -> Tensor:
        count = frames.shape[FRAME_DIM]
        total = count + chunk.shape[FRAME_DIM]
        if self._buffer is None or self._buffer.shape[FRAME_DIM] < total:
            shape = list(frames.shape)
            shape[FRAME_DIM] = 2 * total
            self._buffer = frames.new_empty(shape)
            self._buffer.narrow(FRAME_DIM, 0, count).copy_(frames)
        self._buffer.narrow(FRAME_DIM, count, total - count).copy_(chunk)
        self._joined = self._buffer.narrow(FRAME_DIM, 0, total)
        return self._joined


def install_host_frames(stack: ExitStack, vae: Any) -> None:
    """Keep the decoded frames of a class in `HOSTED` in the host's memory, until the stack is closed.

    It comes after what divides the decoder, which exchanges its results between devices.
    """
    decoder = getattr(vae, "decoder", None)
    if type(vae).__name__ not in HOSTED or decoder is None:
        return
    frames = HostFrames()
    for owner, name, replacement in (
        (decoder, "forward", frames.move_chunk),
        (vae, "decode", frames.decode_to_host),
    ):
        stock = getattr(owner, name)
        override_attribute(stack, owner, name, functools.update_wrapper(functools.partial(replacement, stock), stock))

"""Frames of a video leave the device as the decoder makes them.

A causal autoencoder decodes a few frames at a time, and a tiled one a few tiles, and diffusers keeps all of them on the
device until the last one is there; then its clamping and its postprocessing make more copies. Here the decoder returns
its result in the host's memory, where diffusers' own code goes on with it. So the device holds one chunk beside the
decoder's caches, and the numbers are the same: what follows the decoder joins, blends, clamps and rounds them.

AutoencoderKLWan joins all frames so far with each chunk, which copies a long video many times within the host.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import Any

from ditile.model.hooks.overrides import override_attribute

HOSTED = frozenset({
    "AutoencoderKLCogVideoX", "AutoencoderKLCosmos", "AutoencoderKLHunyuanVideo", "AutoencoderKLHunyuanVideo15",
    "AutoencoderKLLTX2Video", "AutoencoderKLLTXVideo", "AutoencoderKLMochi", "AutoencoderKLWan",
})  # fmt: skip
"""Classes whose code after the decoder computes on any device. Others write into a tensor on the latents' device."""


def install_host_frames(stack: ExitStack, vae: Any) -> None:
    """Keep the decoded frames of a class in `HOSTED` in the host's memory, until the stack is closed.

    Call this after the decoder is divided, because a divided decoder exchanges its results between devices.
    """
    decoder = getattr(vae, "decoder", None)
    if type(vae).__name__ not in HOSTED or decoder is None:
        return
    forward = decoder.forward

    @functools.wraps(forward)
    def move_frames(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        # Beside the frames there may be caches, which the next chunk reads on the device.
        if isinstance(result, tuple):
            return (result[0].to("cpu"), *result[1:])
        return result.to("cpu")

    override_attribute(stack, decoder, "forward", move_frames)

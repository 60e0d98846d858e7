"""What a VAE makes of latents: measured by its own decode, without weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ditile.errors import ModelError
from ditile.hooks.placeholders import init_on_meta_device

CHANNELS = ("z_dim", "latent_channels")
"""Names of the latent channels in configs."""
_SIDE = 8  # latent pixels


class VaeScale(NamedTuple):
    """What a VAE makes of a latent pixel and a latent frame.

    Attributes:
        side: pixels of its side.
        frames: frames of each further latent frame; 0 if latents have no frames.
        first: frames of the first one.
        channels: the name of the latent channels in its config.
    """

    side: int
    frames: int = 0
    first: int = 1
    channels: str = "latent_channels"

    def count_latent_frames(self, frames: int) -> int:
        """Latent frames of so many frames; raises `ModelError` if they are not whole ones."""
        if not self.frames:
            return 1
        if (frames - self.first) % self.frames:
            near = max(0, frames - self.first) // self.frames * self.frames + self.first
            more = "and one more" if self.first == 1 else f"and {self.first} more"
            raise ModelError(f"frames={frames} are not a multiple of {self.frames} {more}; try frames={near}")
        return (frames - self.first) // self.frames + 1


def measure_vae_scale(kind: Any, config: Mapping[str, Any]) -> VaeScale:
    """The scale of a VAE, by its class and config."""
    with init_on_meta_device(), torch.no_grad():
        vae: Any = kind.from_config(config)
        channels = next(name for name in CHANNELS if name in vae.config)

        def decode(*frames: int) -> torch.Size:
            latents = torch.empty(1, vae.config[channels], *frames, _SIDE, _SIDE)
            shape: torch.Size = vae.decode(latents, return_dict=False)[0].shape
            return shape

        if not _has_frames(vae):
            return VaeScale(decode()[-1] // _SIDE, channels=channels)
        # Some decode runs of two frames, or of three at the beginning.
        three, five = decode(3), decode(5)
    frames = (five[2] - three[2]) // 2
    return VaeScale(three[-1] // _SIDE, frames, three[2] - 2 * frames, channels)


def _has_frames(vae: nn.Module) -> bool:
    """Whether it has convolutions over frames."""
    return any(p.ndim == 5 for p in vae.parameters())

"""Embedding some of an image's tokens: a patch needs no others, and an embedding knows no neighbours."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from ditile.hooks.overrides import override_attribute

Forward = Callable[..., Tensor]


def linear_embed(module: Any, forward: Forward) -> Callable[[Tensor, range], Tensor]:
    """A Linear over tokens `[B, S, C]`."""

    def embed_linear_run(tokens: Tensor, run: range) -> Tensor:
        return forward(tokens[:, run.start : run.stop])

    return embed_linear_run


def patch_embed(module: Any, forward: Forward) -> Callable[[Tensor, range], Tensor]:
    """diffusers' `PatchEmbed` over latents `[B, C, H, W]`: a convolution without overlap, and positions.

    The positions are what the module itself adds to nothing, asked for once.
    """
    known: dict[torch.Size, Tensor] = {}

    def read_positions(latents: Tensor, width: int) -> Tensor:
        shape = latents.shape[2:]
        if shape not in known:
            grid = (length // module.patch_size for length in shape)
            nothing = torch.zeros(1, width, *grid, device=latents.device)
            with ExitStack() as stack:
                override_attribute(stack, module.proj, "forward", lambda _: nothing)
                known[shape] = forward(latents[:1])
        return known[shape]

    def embed_patch_run(latents: Tensor, run: range) -> Tensor:
        side = module.patch_size
        per_row = latents.shape[3] // side
        top, bottom = run.start // per_row, -(-run.stop // per_row)
        rows = module.proj(latents[:, :, top * side : bottom * side]).flatten(2).transpose(1, 2)
        tokens = rows[:, run.start - top * per_row : run.stop - top * per_row]
        if module.layer_norm:
            tokens = module.norm(tokens)
        placed: Tensor = tokens + read_positions(latents, tokens.shape[2])[:, run.start : run.stop]
        return placed.to(tokens.dtype)

    return embed_patch_run

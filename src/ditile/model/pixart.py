"""PixArt-alpha and PixArt-sigma: self attention over the image, cross attention to the text (constant per image)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from torch import Tensor
from torch.nn import functional

from ditile.model.tokens import (
    attend_to_projections,
    build_tensor_plan,
    defer_projections,
    image_grid,
    make_empty_latents,
)
from ditile.plan.layout import Grid
from ditile.plan.spec import Conditioning, Constant, ModelSpec

KEY_UNIT = 64
"""Text keys are left out in units of this size: torch's kernels sum a unit in one order, whatever follows it."""
MASKED_BELOW = -9000.0
"""A mask below it means an attention weight of 0: diffusers writes -10000, which is -9984 in bfloat16."""


class PixArtSelfAttention:
    """Self attention of PixArt's blocks: projections, then an `AttentionCore`."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def __call__(self, attn: Attention, hidden_states: Tensor, *unused: Any, **also: Any) -> Tensor:
        """`[B, S, C]` to `[B, S, C]`; other arguments of the stock processor are not used by these blocks."""
        linears = (attn.to_q, attn.to_k, attn.to_v)
        makers = defer_projections(hidden_states, linears, (None, None, None), (attn.heads, -1))
        return _project_output(attn, attend_to_projections(self._core, makers).to(hidden_states.dtype))


class PixArtCrossAttention:
    """Attention to the text as in the stock processor, without copies of the mask for every head of every layer.

    Keys that no row attends to, which are most for a short prompt, are left out: their weight is 0 in any case.
    """

    def __init__(self, constant: Constant) -> None:
        self._constant = constant

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        **also: Any,
    ) -> Tensor:
        """`[B, S, C]` to `[B, S, C]`; the text is `[B, L, C]`, its additive mask `[B, 1, L]`."""
        pairs = ((attn.to_q, hidden_states), (attn.to_k, encoder_hidden_states), (attn.to_v, encoder_hidden_states))
        q, k, v = (linear(x).unflatten(-1, (attn.heads, -1)).transpose(1, 2) for linear, x in pairs)
        mask = attention_mask
        if mask is not None:
            if not torch.compiler.is_compiling():
                length, mask = self._constant(("text", mask.shape), functools.partial(trim_key_mask, mask))
                k = k[:, :, :length]
                v = v[:, :, :length]
            mask = None if mask is None else mask[:, None]
        return _project_output(attn, functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2))


def trim_key_mask(mask: Tensor) -> tuple[int, Tensor | None]:
    """How many leading keys hold all that some row attends to, rounded up to `KEY_UNIT`, and their mask, if needed.

    Args:
        mask: `[B, 1, L]`, added to scores: 0 where a row attends, -10000 where it does not.
    """
    seen = mask > MASKED_BELOW
    length = mask.shape[2]
    # A row that sees nothing attends to all keys alike, so none may be left out.
    if bool(seen.any(dim=2).all()):
        last = int(seen.any(dim=1).any(dim=0).nonzero().max())
        length = min(length, -(-(last + 1) // KEY_UNIT) * KEY_UNIT)
    mask = mask[:, :, :length]
    return length, mask if bool(mask.any()) else None


def _project_output(attn: Attention, attended: Tensor) -> Tensor:
    out: Tensor = attn.to_out[0](attended.flatten(2))
    return out if attn.rescale_output_factor == 1 else out / attn.rescale_output_factor


def make_pixart_inputs(config: Mapping[str, Any], grid: Grid, text: int) -> dict[str, Any]:
    """Latents, T5's states and their mask."""
    return {
        "hidden_states": make_empty_latents(config, grid),
        "encoder_hidden_states": torch.empty(1, text, config["caption_channels"]),
        "encoder_attention_mask": torch.empty(1, text),
        "timestep": torch.empty(1),
        "added_cond_kwargs": {"resolution": torch.empty(1, 2), "aspect_ratio": torch.empty(1, 1)},
    }


_COLUMNS = ("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn2.to_q", "attn2.to_k", "attn2.to_v", "ff.net.0.proj")
_ROWS = ("attn1.to_out.0", "attn2.to_out.0", "ff.net.2")
PIXART_TENSOR_PLAN = build_tensor_plan(_COLUMNS, _ROWS)
# The text of cross attention is whole on every rank, so it is in none of these.
_READS = dict.fromkeys(("attn1", "attn2", "ff"), "hidden_states") | dict.fromkeys(_ROWS, "return")
TENSOR_TOKENS = {f"transformer_blocks.*.{name}": {what: "image"} for name, what in _READS.items()}

PIXART = ModelSpec(
    name="PixArt",
    pipelines=("PixArtAlphaPipeline", "PixArtSigmaPipeline"),
    grid=image_grid,
    latent_per_token=lambda config: int(config["patch_size"]),
    example=make_pixart_inputs,
    conditioning=lambda call: Conditioning(rows=1 + (call.get("guidance_scale", 4.5) > 1)),
    constant=("caption_projection", "transformer_blocks.*.attn2.to_k", "transformer_blocks.*.attn2.to_v"),
    per_step=("adaln_single",),
    processor=PixArtSelfAttention,
    cross={"attn2": PixArtCrossAttention},
    stock=(AttnProcessor2_0,),
    tensor=PIXART_TENSOR_PLAN,
    tensor_tokens=TENSOR_TOKENS,
)

"""FLUX.1 (dev, schnell): 19 double blocks (text, image) and 38 single ones on the joint sequence, text first.

Embedded guidance is one call per step, true CFG two. Double blocks have two feed-forwards and single ones one, fused
with attention: 340 M against 141 M parameters, but a token meets one stream's weights only: 2 * 170 M against 2 * 141 M
operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_flux import FluxAttention, FluxAttnProcessor, FluxIPAdapterAttnProcessor
from torch import Tensor, nn

from ditile.model.hooks.attention_processors import UNFUSE
from ditile.model.hooks.protocols import DeferredTensor
from ditile.model.tokens import (
    JOINT_TENSOR_TOKENS,
    TEXT_STREAM,
    defer_joint_projections,
    explain_ip_adapter_refusal,
)
from ditile.plan.errors import ModelError
from ditile.plan.layout import Grid
from ditile.plan.spec import Conditioning, ModelSpec


class FluxOverlappedProcessor:
    """Replaces `FluxAttnProcessor` where each projection is sent while the next is computed.

    Raises:
        ModelError: if the projections are fused.
    """

    def __init__(self, core: Any) -> None:
        self._core = core

    def __call__(
        self,
        attn: FluxAttention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Image `[B, S, C]` and text `[B, T, C]` to the same, or the joint sequence to itself."""
        if attn.fused_projections:
            raise ModelError(f"async_ulysses needs q, k and v apart, and they are fused; {UNFUSE}")
        heads = (-1, attn.head_dim)
        makers = defer_joint_projections(attn, hidden_states, encoder_hidden_states, heads, "text_first")
        if image_rotary_emb is not None:
            makers = [*(partial(_apply_rotary, make, image_rotary_emb) for make in makers[:2]), makers[2]]
        out = self._core.attend_overlapped(makers, mask=attention_mask).flatten(2).to(hidden_states.dtype)
        if encoder_hidden_states is None:
            return out  # type: ignore[no-any-return]
        text_tokens, image = out.tensor_split([encoder_hidden_states.shape[1]], dim=1)
        return attn.to_out[1](attn.to_out[0](image.contiguous())), attn.to_add_out(text_tokens.contiguous())


def _apply_rotary(make: DeferredTensor, table: tuple[Tensor, Tensor]) -> Tensor:
    out: Any = apply_rotary_emb(make(), table, sequence_dim=1)  # type: ignore[arg-type]
    return out  # type: ignore[no-any-return]


def read_flux_grid(transformer: nn.Module, inputs: Mapping[str, Any]) -> Grid:
    """Packed latents `[B, N, C]` are tokens already; the columns are the tokens of the first row.

    Positions may be rounded, as in bfloat16 above 256, but the second row is never rounded to the first one.
    """
    ids = inputs["img_ids"]
    ids = ids[0] if ids.ndim == 3 else ids
    columns = int((ids[:, 1] == ids[0, 1]).int().cumprod(0).sum())
    return Grid(ids.shape[0] // columns, columns)


def has_ip_adapter(pipe: Any) -> bool:
    """Whether a pipeline makes something of pictures that are given to an IP-adapter."""
    return getattr(pipe.transformer, "encoder_hid_proj", None) is not None


def read_flux_conditioning(call: Mapping[str, Any]) -> Conditioning:
    """True CFG, where it is on, is a second call."""
    embedded = all(call.get(f"negative_{name}embeds") is not None for name in ("prompt_", "pooled_prompt_"))
    guided = call.get("true_cfg_scale", 1.0) > 1 and (call.get("negative_prompt") is not None or embedded)
    return Conditioning(text=call.get("max_sequence_length", 512), calls=1 + guided)


def make_flux_inputs(config: Mapping[str, Any], grid: Grid, text: int) -> dict[str, Any]:
    """Packed latents, T5's states, CLIP's pooled state, positions."""
    tokens = grid.rows * grid.tokens_per_row
    return {
        "hidden_states": torch.empty(1, tokens, config["in_channels"]),
        "encoder_hidden_states": torch.empty(1, text, config["joint_attention_dim"]),
        "pooled_projections": torch.empty(1, config["pooled_projection_dim"]),
        "timestep": torch.empty(1),
        "guidance": torch.empty(1) if config["guidance_embeds"] else None,
        "img_ids": torch.empty(tokens, 3),
        "txt_ids": torch.empty(text, 3),
    }


# Single blocks gather behind their norm, once for both attention and feed-forward.
TENSOR_TOKENS = JOINT_TENSOR_TOKENS | {
    "single_transformer_blocks.*.norm": {"return": "text+image"},
    "single_transformer_blocks.*.proj_out": {"return": "text+image"},
}

FLUX = ModelSpec(
    name="FLUX.1",
    pipelines=("FluxPipeline", "FluxImg2ImgPipeline"),
    is_packed=True,
    joint="text_first",
    text_modules=TEXT_STREAM,
    grid=read_flux_grid,
    latent_per_token=lambda config: 2,
    conditioning=read_flux_conditioning,
    example=make_flux_inputs,
    image_tokens="x_embedder",
    constant=("context_embedder", "pos_embed"),
    per_step=(
        "time_text_embed",
        "transformer_blocks.*.norm1.linear",
        "transformer_blocks.*.norm1_context.linear",
        "single_transformer_blocks.*.norm.linear",
        "norm_out.linear",
    ),
    overlapped=FluxOverlappedProcessor,
    stock=(FluxAttnProcessor, FluxIPAdapterAttnProcessor),
    tensor=FluxTransformer2DModel._tp_plan,
    tensor_tokens=TENSOR_TOKENS,
    batch=("img_ids", "txt_ids"),
    refuse=lambda pipe, call: None if has_ip_adapter(pipe) else explain_ip_adapter_refusal(call),
)

"""Stable Diffusion 3 and 3.5: joint attention, image first; 3.5 medium adds image-only attention to some blocks.

Skip-layer guidance tests the index of the loop's iteration, which counts patches under PipeFusion: all plans refuse it
but those of data and cfg alone, which call the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers.models.attention_processor import (
    Attention,
    JointAttnProcessor2_0,
    SD3IPAdapterJointAttnProcessor2_0,
)
from torch import Tensor

from ditile.model.tokens import (
    JOINT_TENSOR_TOKENS,
    TEXT_STREAM,
    attend_to_projections,
    build_tensor_plan,
    defer_joint_projections,
    explain_ip_adapter_refusal,
    image_grid,
    make_empty_latents,
)
from ditile.plan.layout import Grid
from ditile.plan.spec import Conditioning, ModelSpec


class SD3Attention:
    """Joint or image-only attention of SD3's blocks: projections, qk-norm, then an `AttentionCore`."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def __call__(
        self, attn: Attention, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, *_: Any, **__: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Image `[B, S, C]` and text `[B, T, C]` to the same, or image alone to image."""
        makers = defer_joint_projections(attn, hidden_states, encoder_hidden_states, (attn.heads, -1), "image_first")
        out = attend_to_projections(self._core, makers).flatten(2).to(hidden_states.dtype)
        if encoder_hidden_states is None:
            return attn.to_out[0](out)  # type: ignore[no-any-return]
        image = out[:, : hidden_states.shape[1]]
        text_tokens = out[:, hidden_states.shape[1] :]
        if not attn.context_pre_only:
            text_tokens = attn.to_add_out(text_tokens)
        return attn.to_out[0](image), text_tokens


def explain_sd3_refusal(pipe: Any, call: Mapping[str, Any]) -> str | None:
    """Why a call is refused, with skip-layer guidance or pictures for no IP-adapter; None for other calls."""
    if call.get("skip_guidance_layers") is not None:
        return (
            "skip_guidance_layers leaves blocks out by the index of the loop's iteration, which may count patches in a "
            "divided model; use data and cfg alone, which call whole models, or leave it out"
        )
    return None if getattr(pipe.transformer, "image_proj", None) is not None else explain_ip_adapter_refusal(call)


def read_sd3_conditioning(call: Mapping[str, Any]) -> Conditioning:
    """CLIP's 77 tokens and T5's follow each other; guidance doubles the batch."""
    guided = call.get("guidance_scale", 7.0) > 1
    return Conditioning(text=77 + call.get("max_sequence_length", 256), rows=1 + guided)


def make_sd3_inputs(config: Mapping[str, Any], grid: Grid, text: int) -> dict[str, Any]:
    """Latents, the joined states of three text encoders, CLIP's pooled state."""
    return {
        "hidden_states": make_empty_latents(config, grid),
        "encoder_hidden_states": torch.empty(1, text, config["joint_attention_dim"]),
        "pooled_projections": torch.empty(1, config["pooled_projection_dim"]),
        "timestep": torch.empty(1),
    }


_JOINT = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")
_IMAGE = ("attn2.to_q", "attn2.to_k", "attn2.to_v")
# The last block has no `to_add_out`.
_ROWS = ("attn.to_out.0", "attn.to_add_out", "attn2.to_out.0", "ff.net.2", "ff_context.net.2")
SD3_TENSOR_PLAN = build_tensor_plan((*_JOINT, *_IMAGE, "ff.net.0.proj", "ff_context.net.0.proj"), _ROWS)
TENSOR_TOKENS = JOINT_TENSOR_TOKENS | {
    "transformer_blocks.*.attn2": {"hidden_states": "image"},
    "transformer_blocks.*.attn2.to_out.0": {"return": "image"},
}

SD3 = ModelSpec(
    name="Stable Diffusion 3 / 3.5",
    pipelines=("StableDiffusion3Pipeline", "StableDiffusion3Img2ImgPipeline"),
    joint="image_first",
    text_modules=TEXT_STREAM,
    grid=image_grid,
    latent_per_token=lambda config: int(config["patch_size"]),
    conditioning=read_sd3_conditioning,
    example=make_sd3_inputs,
    constant=("context_embedder",),
    per_step=(
        "time_text_embed",
        "transformer_blocks.*.norm1.linear",
        "transformer_blocks.*.norm1_context.linear",
        "norm_out.linear",
    ),
    processor=SD3Attention,
    stock=(JointAttnProcessor2_0, SD3IPAdapterJointAttnProcessor2_0),
    tensor=SD3_TENSOR_PLAN,
    tensor_tokens=TENSOR_TOKENS,
    refuse=explain_sd3_refusal,
)

"""The calls of FLUX.1, SD3 and PixArt, whose shapes and work are computed without recording a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import FluxTransformer2DModel, PixArtTransformer2DModel, SD3Transformer2DModel
from torch import Tensor

from ditile.plan.layout import Grid
from ditile.plan.shape import CallFamily, Conditioning


def make_empty_latents(config: Mapping[str, Any], grid: Grid) -> Tensor:
    """Make latents `[1, C, H, W]` of a grid, used only for their shape."""
    side = int(config["patch_size"])
    return torch.empty(1, config["in_channels"], grid.rows * side, grid.tokens_per_row * side)


def read_flux_conditioning(call: Mapping[str, Any]) -> Conditioning:
    """Read the conditioning of a call; true CFG, if on, is a second call."""
    embedded = all(call.get(f"negative_{name}embeds") is not None for name in ("prompt_", "pooled_prompt_"))
    guided = call.get("true_cfg_scale", 1.0) > 1 and (call.get("negative_prompt") is not None or embedded)
    return Conditioning(text=call.get("max_sequence_length", 512), calls=1 + guided)


def make_flux_inputs(config: Mapping[str, Any], grid: Grid, text: int) -> dict[str, Any]:
    """Make packed latents, T5's states, CLIP's pooled state, positions."""
    tokens = grid.rows * grid.tokens_per_row
    guidance = torch.empty(1) if config["guidance_embeds"] else None
    return {
        "hidden_states": torch.empty(1, tokens, config["in_channels"]),
        "encoder_hidden_states": torch.empty(1, text, config["joint_attention_dim"]),
        "pooled_projections": torch.empty(1, config["pooled_projection_dim"]),
        "timestep": torch.empty(1),
        "guidance": guidance,
        "img_ids": torch.empty(tokens, 3),
        "txt_ids": torch.empty(text, 3),
    }


FLUX = CallFamily(
    name="FLUX.1",
    pipelines=("FluxPipeline", "FluxImg2ImgPipeline"),
    is_packed=True,
    joint="text_first",
    latent_per_token=lambda config: 2,
    conditioning=read_flux_conditioning,
    example=make_flux_inputs,
    image_tokens="x_embedder",
)


def read_sd3_conditioning(call: Mapping[str, Any]) -> Conditioning:
    """Read the conditioning of a call: T5's tokens follow CLIP's 77, and guidance doubles the batch."""
    guided = call.get("guidance_scale", 7.0) > 1
    return Conditioning(text=77 + call.get("max_sequence_length", 256), rows=1 + guided)


def make_sd3_inputs(config: Mapping[str, Any], grid: Grid, text: int) -> dict[str, Any]:
    """Make latents, the joined states of three text encoders, CLIP's pooled state."""
    return {
        "hidden_states": make_empty_latents(config, grid),
        "encoder_hidden_states": torch.empty(1, text, config["joint_attention_dim"]),
        "pooled_projections": torch.empty(1, config["pooled_projection_dim"]),
        "timestep": torch.empty(1),
    }


SD3 = CallFamily(
    name="Stable Diffusion 3 / 3.5",
    pipelines=("StableDiffusion3Pipeline", "StableDiffusion3Img2ImgPipeline"),
    joint="image_first",
    latent_per_token=lambda config: int(config["patch_size"]),
    conditioning=read_sd3_conditioning,
    example=make_sd3_inputs,
)


def make_pixart_inputs(config: Mapping[str, Any], grid: Grid, text: int) -> dict[str, Any]:
    """Make latents, T5's states and their mask."""
    return {
        "hidden_states": make_empty_latents(config, grid),
        "encoder_hidden_states": torch.empty(1, text, config["caption_channels"]),
        "encoder_attention_mask": torch.empty(1, text),
        "timestep": torch.empty(1),
        "added_cond_kwargs": {"resolution": torch.empty(1, 2), "aspect_ratio": torch.empty(1, 1)},
    }


PIXART = CallFamily(
    name="PixArt",
    pipelines=("PixArtAlphaPipeline", "PixArtSigmaPipeline"),
    latent_per_token=lambda config: int(config["patch_size"]),
    conditioning=lambda call: Conditioning(rows=1 + (call.get("guidance_scale", 4.5) > 1)),
    example=make_pixart_inputs,
)

FAMILIES: Mapping[type, CallFamily] = {
    FluxTransformer2DModel: FLUX,
    PixArtTransformer2DModel: PIXART,
    SD3Transformer2DModel: SD3,
}


def find_call_family(transformer: object) -> CallFamily | None:
    """Return the family of a transformer, by its class or the nearest base class; None if there is none."""
    return next((FAMILIES[cls] for cls in type(transformer).__mro__ if cls in FAMILIES), None)

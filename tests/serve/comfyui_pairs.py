"""Tiny models that ComfyUI and diffusers both have, and calls of them in ComfyUI's words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import torch

# What ComfyUI's own models answer to `make_call`: recorded by `test_comfyui_itself` with DITILE_RECORD=1.
FIGURES = Path(__file__).with_name("comfyui_figures.json")


@dataclass(frozen=True)
class Pair:
    """One architecture and what a graph gives to it.

    Attributes:
        model: diffusers' class.
        config: of it.
        comfy: of ComfyUI's own class.
        latent: shape of the noise.
        text: tokens and width of a prompt.
        conditions: what a graph adds to the prompts.
        extra: what ComfyUI's model class makes of them for the transformer's own forward.
        channels: of the transformer's input where conditions add some to the noise.
        scale: of the timestep that the transformer gets.
        convert: names of ComfyUI's weights -> diffusers', "" where they are the same.
        has_mask: whether the first frame of the latents is kept.
        sound: shape of the noise of the sound.
    """

    model: str
    config: Mapping[str, Any]
    comfy: Mapping[str, Any]
    latent: tuple[int, ...]
    text: tuple[int, int]
    conditions: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    channels: int = 0
    scale: float = 1.0
    convert: str = ""
    has_mask: bool = False
    sound: tuple[int, ...] = ()


def build_transformer(pair: Pair) -> Any:
    """Return diffusers' transformer with random weights, in the order of their names."""
    transformer = getattr(diffusers, pair.model)(**pair.config).eval()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in sorted(transformer.named_parameters()):
        values = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            parameter.data.copy_(values / parameter[0].numel() ** 0.5)
        else:
            # Norms of queries and keys are far from 0: attention that is flat would hide wrong positions.
            parameter.data.copy_(values * 0.2 + (0.0 if name.endswith("bias") else 1.5))
    return transformer


def call_transformer(transformer: Any, arguments: Mapping[str, Any]) -> Any:
    """Return a transformer's prediction, as the worker does: a list if there are several."""
    predictions = transformer(**arguments, return_dict=False)
    return predictions[0] if len(predictions) == 1 else list(predictions)


def make_call(pair: Pair) -> tuple[Any, Any, torch.Tensor]:
    """Return latents, timestep and text of one call of the transformer."""
    batch, channels, *size = pair.latent
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(batch, pair.channels or channels, *size, generator=generator)
    text = torch.randn(batch, *pair.text, generator=generator)
    timestep = torch.full((batch,), 0.7 * pair.scale)
    by_frame = pair.scale * torch.tensor([0.0] + [0.7] * (size[0] - 1)).expand(batch, -1)
    if pair.sound:
        by_token = by_frame.repeat_interleave(size[1] * size[2], dim=1)[..., None]
        latents = [x, torch.randn(pair.sound, generator=generator)]
        return latents, (by_token if pair.has_mask else timestep, timestep), text
    return x, by_frame if pair.has_mask else timestep, text


def make_latents(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


def describe_output(output: Any) -> list[float]:
    """Return a few figures that hardly two predictions share: sums with weights that grow along it."""
    parts = output if isinstance(output, list) else [output]
    flat = torch.cat([part.double().flatten() for part in parts])
    places = torch.linspace(0, 1, flat.numel(), dtype=torch.float64)
    sums = [flat.mean(), flat.abs().mean(), (flat * places).mean(), (flat * (7 * places).sin()).mean()]
    return [float(figure) for figure in (*sums, flat[0], flat[-1], flat[flat.numel() // 2])]


FLUX_COMFY = {
    "image_model": "flux",
    "guidance_embed": True,
    "in_channels": 16,
    "out_channels": 16,
    "patch_size": 2,
    "vec_in_dim": 12,
    "context_in_dim": 24,
    "hidden_size": 32,
    "mlp_ratio": 4.0,
    "num_heads": 2,
    "depth": 2,
    "depth_single_blocks": 2,
    "axes_dim": [4, 6, 6],
    "theta": 10000,
    "qkv_bias": True,
    "txt_ids_dims": [],
}
FLUX = {
    "in_channels": 64,
    "out_channels": 64,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 24,
    "pooled_projection_dim": 12,
    "guidance_embeds": True,
    "axes_dims_rope": (4, 6, 6),
}
FLUX2_COMFY = {
    "image_model": "flux2",
    "guidance_embed": True,
    "in_channels": 128,
    "out_channels": 128,
    "patch_size": 1,
    "vec_in_dim": None,
    "context_in_dim": 24,
    "hidden_size": 32,
    "mlp_ratio": 3.0,
    "num_heads": 2,
    "depth": 2,
    "depth_single_blocks": 2,
    "axes_dim": [4, 4, 4, 4],
    "theta": 2000,
    "qkv_bias": False,
    "ops_bias": False,
    "global_modulation": True,
    "mlp_silu_act": True,
    "default_ref_method": "index",
    "ref_index_scale": 10.0,
    "txt_ids_dims": [3],
}
FLUX2 = {
    "in_channels": 128,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 24,
    "axes_dims_rope": (4, 4, 4, 4),
}
QWEN_COMFY = {
    "image_model": "qwen_image",
    "in_channels": 64,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 24,
    "axes_dims_rope": (4, 6, 6),
}
QWEN = {
    "in_channels": 64,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 24,
    "axes_dims_rope": (4, 6, 6),
}
# ComfyUI's class is Z-Image's from a width of 1024 on.
Z_IMAGE_COMFY = {
    "image_model": "lumina2",
    "patch_size": 2,
    "in_channels": 16,
    "dim": 1024,
    "cap_feat_dim": 24,
    "n_layers": 1,
    "n_refiner_layers": 1,
    "qk_norm": True,
    "n_heads": 8,
    "n_kv_heads": 8,
    "axes_dims": [32, 48, 48],
    "axes_lens": [256, 64, 64],
    "rope_theta": 256.0,
    "ffn_dim_multiplier": 8.0 / 3.0,
    "multiple_of": 2,
    "z_image_modulation": True,
    "time_scale": 1000.0,
    "pad_tokens_multiple": 32,
}
Z_IMAGE = {
    "in_channels": 16,
    "dim": 1024,
    "n_layers": 1,
    "n_refiner_layers": 1,
    "n_heads": 8,
    "n_kv_heads": 8,
    "cap_feat_dim": 24,
    "axes_dims": [32, 48, 48],
    "axes_lens": [256, 64, 64],
}
WAN_COMFY = {
    "image_model": "wan2.1",
    "model_type": "t2v",
    "dim": 32,
    "ffn_dim": 48,
    "num_heads": 2,
    "num_layers": 2,
    "patch_size": (1, 2, 2),
    "freq_dim": 16,
    "text_dim": 24,
    "in_dim": 16,
    "out_dim": 16,
}
WAN = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 24,
    "freq_dim": 16,
    "ffn_dim": 48,
    "num_layers": 2,
}

LTX2_COMFY = {
    "image_model": "ltxav",
    "in_channels": 128,
    "audio_in_channels": 128,
    "cross_attention_dim": 24,
    "audio_cross_attention_dim": 16,
    "attention_head_dim": 12,
    "audio_attention_head_dim": 8,
    "num_attention_heads": 2,
    "audio_num_attention_heads": 2,
    "caption_channels": 20,
    "num_layers": 2,
    "causal_temporal_positioning": True,
    "use_middle_indices_grid": True,
    "av_ca_timestep_scale_multiplier": 1000.0,
    "rope_type": "split",
    "frequencies_precision": "float64",
}
LTX2 = {
    "cross_attention_dim": 24,
    "audio_cross_attention_dim": 16,
    "attention_head_dim": 12,
    "audio_attention_head_dim": 8,
    "num_attention_heads": 2,
    "audio_num_attention_heads": 2,
    "caption_channels": 20,
    "num_layers": 2,
    "rope_type": "split",
}
REFERENCES = [make_latents(1, 16, 8, 4), make_latents(1, 16, 6, 6), make_latents(1, 16, 4, 8)]
QWEN_REFERENCES = [make_latents(1, 16, 1, 4, 8), make_latents(1, 16, 1, 8, 8)]
FLUX2_REFERENCES = [make_latents(1, 128, 2, 4), make_latents(1, 128, 3, 3)]
POOLED = make_latents(1, 12)
GUIDANCE = torch.tensor([2.5])
BY_INDEX = "index"
FEATURES = make_latents(1, 257, 1280)
FIRST_FRAME = {
    "concat_latent_image": make_latents(1, 16, 3, 6, 8),
    "concat_mask": torch.cat([torch.zeros(1, 1, 1, 6, 8), torch.ones(1, 1, 2, 6, 8)], dim=2),
}


def make_flux(latent: tuple[int, ...], **changes: Any) -> Pair:
    fields = {"model": "FluxTransformer2DModel", "config": FLUX, "comfy": FLUX_COMFY, "convert": "flux"}
    extra = {"y": POOLED, "guidance": GUIDANCE, **changes.pop("extra", {})}
    return Pair(**{**fields, "latent": latent, "text": (7, 24), "extra": extra, **changes})


def make_flux2(latent: tuple[int, ...], **changes: Any) -> Pair:
    fields = {"model": "Flux2Transformer2DModel", "config": FLUX2, "comfy": FLUX2_COMFY, "convert": "flux2"}
    extra = {"guidance": GUIDANCE, **changes.pop("extra", {})}
    return Pair(**{**fields, "latent": latent, "text": (7, 24), "extra": extra, **changes})


def make_qwen(latent: tuple[int, ...], **changes: Any) -> Pair:
    fields = {"model": "QwenImageTransformer2DModel", "config": QWEN, "comfy": QWEN_COMFY}
    return Pair(**{**fields, "latent": latent, "text": (7, 24), **changes})


def make_z_image(latent: tuple[int, ...], tokens: int) -> Pair:
    return Pair(
        "ZImageTransformer2DModel",
        Z_IMAGE,
        Z_IMAGE_COMFY,
        latent,
        (tokens, 24),
        extra={"num_tokens": tokens},
        convert="z_image",
    )


def make_wan(config: Mapping[str, Any], comfy: Mapping[str, Any], **changes: Any) -> Pair:
    fields = {"model": "WanTransformer3DModel", "latent": (1, 16, 3, 6, 8), "text": (512, 24), "scale": 1000.0}
    pair = {**fields, "config": {**WAN, **config}, "comfy": {**WAN_COMFY, **comfy}, "convert": "wan", **changes}
    return Pair(**pair)


LTX2_PAIR = Pair(
    "LTX2VideoTransformer3DModel",
    LTX2,
    LTX2_COMFY,
    (1, 128, 3, 2, 4),
    (9, 40),
    conditions={"frame_rate": 12},
    extra={"frame_rate": 12},
    convert="ltx2",
    sound=(1, 8, 5, 16),
)
PAIRS = {
    "flux": make_flux((1, 16, 8, 12), conditions={"guidance": 2.5}),
    "flux, odd size": make_flux((2, 16, 7, 9), extra={"y": POOLED.repeat(2, 1), "guidance": GUIDANCE.repeat(2)}),
    "flux, references": make_flux(
        (1, 16, 8, 8), conditions={"reference_latents": REFERENCES}, extra={"ref_latents": REFERENCES}
    ),
    "flux, references by index": make_flux(
        (1, 16, 8, 8),
        conditions={"reference_latents": REFERENCES, "reference_latents_method": BY_INDEX},
        extra={"ref_latents": REFERENCES, "ref_latents_method": BY_INDEX},
    ),
    "flux schnell": make_flux(
        (1, 16, 8, 8), config={**FLUX, "guidance_embeds": False}, comfy={**FLUX_COMFY, "guidance_embed": False}
    ),
    "flux fill": make_flux(
        (1, 16, 8, 8),
        config={**FLUX, "in_channels": 384},
        comfy={**FLUX_COMFY, "in_channels": 96},
        conditions={
            "concat_latent_image": make_latents(1, 16, 8, 8),
            "concat_mask": make_latents(1, 1, 64, 64).gt(0).float(),
        },
        channels=96,
    ),
    "flux2": make_flux2((1, 128, 4, 3)),
    "flux2, references": make_flux2(
        (1, 128, 4, 4), conditions={"reference_latents": FLUX2_REFERENCES}, extra={"ref_latents": FLUX2_REFERENCES}
    ),
    "qwen": make_qwen((2, 16, 1, 8, 12)),
    "qwen edit": make_qwen(
        (1, 16, 1, 8, 8), conditions={"reference_latents": QWEN_REFERENCES}, extra={"ref_latents": QWEN_REFERENCES}
    ),
    "qwen edit 2511": make_qwen(
        (1, 16, 1, 8, 8),
        config={**QWEN, "zero_cond_t": True},
        comfy={**QWEN_COMFY, "default_ref_method": "index_timestep_zero"},
        conditions={"reference_latents": QWEN_REFERENCES},
        extra={"ref_latents": QWEN_REFERENCES},
    ),
    "z-image": make_z_image((2, 16, 8, 12), 7),
    "z-image, odd size": make_z_image((1, 16, 9, 7), 40),
    "wan": make_wan({}, {}),
    "wan 2.1 from an image": make_wan(
        {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 32},
        {"in_dim": 36, "model_type": "i2v"},
        conditions={**FIRST_FRAME, "clip_vision_output": SimpleNamespace(penultimate_hidden_states=FEATURES)},
        extra={"clip_fea": FEATURES},
        channels=36,
    ),
    "wan 2.2 from an image": make_wan({"in_channels": 36}, {"in_dim": 36}, conditions=FIRST_FRAME, channels=36),
    "wan 2.2 5B, a known frame": make_wan(
        {"in_channels": 48, "out_channels": 48},
        {"in_dim": 48, "out_dim": 48},
        latent=(1, 48, 3, 6, 8),
        has_mask=True,
    ),
    "ltx-2": LTX2_PAIR,
    "ltx-2, a known frame": replace(LTX2_PAIR, has_mask=True),
}

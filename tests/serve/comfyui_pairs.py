"""Tiny models that ComfyUI and diffusers both have, and calls of them in ComfyUI's words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import torch

RENAMED = {"reference_latents": "ref_latents", "reference_latents_method": "ref_latents_method"}
RENAMED |= {"frame_rate": "frame_rate"}
# What ComfyUI's own models answer to `make_call`: recorded by `test_comfyui_itself` with DITILE_RECORD=1.
FIGURES = Path(__file__).with_name("comfyui_figures.json")


@dataclass(frozen=True)
class Pair:
    """One architecture and what a graph gives to it.

    Attributes:
        model: diffusers' class.
        config: of it.
        comfy: of ComfyUI's own class.
        convert: diffusers' function from ComfyUI's names of weights; "" where ComfyUI itself knows diffusers'.
        latent: shape of the noise.
        text: tokens and width of a prompt.
        conditions: what a graph adds to the prompts.
        channels: of the transformer's input where conditions add some to the noise.
        has_mask: whether the first frame of the latents is kept.
        sound: shape of the noise of the sound.
    """

    model: str
    config: Mapping[str, Any]
    comfy: Mapping[str, Any]
    convert: str
    latent: tuple[int, ...]
    text: tuple[int, int] = (7, 24)
    conditions: Mapping[str, Any] = field(default_factory=dict)
    channels: int = 0
    has_mask: bool = False
    sound: tuple[int, ...] = ()

    @property
    def extra(self) -> dict[str, Any]:
        """What ComfyUI's model class makes of the conditions for the transformer's own forward."""
        extra = {new: self.conditions[name] for name, new in RENAMED.items() if name in self.conditions}
        if self.model.startswith("Flux"):
            extra["guidance"] = torch.full(self.latent[:1], 2.5)
        if self.model == "FluxTransformer2DModel":
            extra["y"] = POOLED.repeat(self.latent[0], 1)
        if self.model.startswith("ZImage"):
            extra["num_tokens"] = self.text[0]
        if "clip_vision_output" in self.conditions:
            extra["clip_fea"] = FEATURES
        return extra


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


class LocalConnection:
    """Calls a transformer of diffusers in this process, as a worker would.

    Attributes:
        log: what was done, of each call its LoRAs.
    """

    def __init__(self, transformer: Any) -> None:
        self.transformer = transformer
        self.log: list[Any] = []

    def connect(self) -> None:
        self.log.append("connect")

    def close(self) -> None:
        self.log.append("close")

    def hello(self) -> dict[str, Any]:
        config = {name: value for name, value in self.transformer.config.items() if not name.startswith("_")}
        name = type(self.transformer).__name__
        return {"model": name, "config": config, "dtype": "float32", "plan": "", "ranks": 1, "loras": ["fox", "owl"]}

    def forward(self, arguments: Mapping[str, Any], loras: Mapping[str, float]) -> Any:
        self.log.append(dict(loras))
        return call_transformer(self.transformer, arguments)


def make_call(pair: Pair) -> tuple[Any, Any, torch.Tensor]:
    """Return latents, timestep and text of one call of the transformer."""
    batch, channels, *size = pair.latent
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(batch, pair.channels or channels, *size, generator=generator)
    text = torch.randn(batch, *pair.text, generator=generator)
    scale = 1000.0 if pair.model.startswith("Wan") else 1.0
    timestep = torch.full((batch,), 0.7 * scale)
    by_frame = scale * torch.tensor([0.0] + [0.7] * (size[0] - 1)).expand(batch, -1)
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


BLOCKS = {"num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 24}
FLUX_BLOCKS = {"hidden_size": 32, "num_heads": 2, "depth": 2, "depth_single_blocks": 2, "context_in_dim": 24}
FLUX = BLOCKS | {"num_single_layers": 2, "pooled_projection_dim": 12, "axes_dims_rope": (4, 6, 6)}
FLUX_COMFY = FLUX_BLOCKS | {
    "image_model": "flux",
    "in_channels": 16,
    "out_channels": 16,
    "patch_size": 2,
    "vec_in_dim": 12,
    "mlp_ratio": 4.0,
    "axes_dim": [4, 6, 6],
    "theta": 10000,
    "qkv_bias": True,
    "txt_ids_dims": [],
}
DEV = Pair(
    "FluxTransformer2DModel",
    FLUX | {"guidance_embeds": True},
    FLUX_COMFY | {"guidance_embed": True},
    "",
    latent=(1, 16, 8, 8),
)
FLUX2 = Pair(
    "Flux2Transformer2DModel",
    BLOCKS | {"num_single_layers": 2, "axes_dims_rope": (4, 4, 4, 4)},
    FLUX_BLOCKS
    | {
        "image_model": "flux2",
        "guidance_embed": True,
        "in_channels": 128,
        "out_channels": 128,
        "patch_size": 1,
        "vec_in_dim": None,
        "mlp_ratio": 3.0,
        "axes_dim": [4, 4, 4, 4],
        "theta": 2000,
        "qkv_bias": False,
        "ops_bias": False,
        "global_modulation": True,
        "mlp_silu_act": True,
        "default_ref_method": "index",
        "ref_index_scale": 10.0,
        "txt_ids_dims": [3],
    },
    "convert_flux2_transformer_checkpoint_to_diffusers",
    latent=(1, 128, 4, 3),
)
QWEN_CONFIG = BLOCKS | {"in_channels": 64, "axes_dims_rope": (4, 6, 6)}
QWEN_COMFY = QWEN_CONFIG | {"image_model": "qwen_image"}
QWEN = Pair("QwenImageTransformer2DModel", QWEN_CONFIG, QWEN_COMFY, "", latent=(1, 16, 1, 8, 8))
# ComfyUI's class is Z-Image's from a width of 1024 on.
Z_IMAGE_CONFIG = {"in_channels": 16, "dim": 1024, "n_layers": 1, "n_refiner_layers": 1, "n_heads": 8, "n_kv_heads": 8}
Z_IMAGE_CONFIG |= {"cap_feat_dim": 24, "axes_dims": [32, 48, 48], "axes_lens": [256, 64, 64]}
Z_IMAGE_COMFY = Z_IMAGE_CONFIG | {
    "image_model": "lumina2",
    "patch_size": 2,
    "qk_norm": True,
    "rope_theta": 256.0,
    "ffn_dim_multiplier": 8.0 / 3.0,
    "multiple_of": 2,
    "z_image_modulation": True,
    "time_scale": 1000.0,
    "pad_tokens_multiple": 32,
}
Z_IMAGE = Pair(
    "ZImageTransformer2DModel",
    Z_IMAGE_CONFIG,
    Z_IMAGE_COMFY,
    "convert_z_image_transformer_checkpoint_to_diffusers",
    latent=(2, 16, 8, 12),
)
WAN = {"text_dim": 24, "freq_dim": 16, "ffn_dim": 48, "num_layers": 2}


def make_wan(channels: int, model_type: str = "t2v", num_latents: int = 16, **changes: Any) -> Pair:
    config = {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": channels, "out_channels": num_latents}
    comfy = {"image_model": "wan2.1", "model_type": model_type, "dim": 32, "num_heads": 2, "patch_size": (1, 2, 2)}
    return Pair(
        "WanTransformer3DModel",
        {**WAN, **config, **changes.pop("config", {})},
        {**WAN, **comfy, "in_dim": channels, "out_dim": num_latents},
        "convert_wan_transformer_to_diffusers",
        latent=(1, num_latents, 3, 6, 8),
        text=(512, 24),
        channels=channels,
        **changes,
    )


LTX2_CONFIG = {
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
LTX2_COMFY = LTX2_CONFIG | {
    "image_model": "ltxav",
    "in_channels": 128,
    "audio_in_channels": 128,
    "causal_temporal_positioning": True,
    "use_middle_indices_grid": True,
    "av_ca_timestep_scale_multiplier": 1000.0,
    "frequencies_precision": "float64",
}
LTX2 = Pair(
    "LTX2VideoTransformer3DModel",
    LTX2_CONFIG,
    LTX2_COMFY,
    "convert_ltx2_transformer_to_diffusers",
    latent=(1, 128, 3, 2, 4),
    text=(9, 40),
    conditions={"frame_rate": 12},
    sound=(1, 8, 5, 16),
)
POOLED, FEATURES = make_latents(1, 12), make_latents(1, 257, 1280)
REFERENCES = {"reference_latents": [make_latents(1, 16, 8, 4), make_latents(1, 16, 6, 6), make_latents(1, 16, 4, 8)]}
QWEN_REFERENCES = {"reference_latents": [make_latents(1, 16, 1, 4, 8), make_latents(1, 16, 1, 8, 8)]}
FLUX2_REFERENCES = {"reference_latents": [make_latents(1, 128, 2, 4), make_latents(1, 128, 3, 3)]}
MASKED_PICTURE = {
    "concat_latent_image": make_latents(1, 16, 8, 8),
    "concat_mask": make_latents(1, 1, 64, 64).gt(0).float(),
}
FIRST_FRAME = {
    "concat_latent_image": make_latents(1, 16, 3, 6, 8),
    "concat_mask": torch.cat([torch.zeros(1, 1, 1, 6, 8), torch.ones(1, 1, 2, 6, 8)], dim=2),
}
SEEN_FRAME = FIRST_FRAME | {"clip_vision_output": SimpleNamespace(penultimate_hidden_states=FEATURES)}
PAIRS = {
    "flux": replace(DEV, latent=(1, 16, 8, 12), conditions={"guidance": 2.5}),
    "flux, odd size": replace(DEV, latent=(2, 16, 7, 9)),
    "flux, references": replace(DEV, conditions=REFERENCES),
    "flux, references by index": replace(DEV, conditions=REFERENCES | {"reference_latents_method": "index"}),
    "flux schnell": replace(DEV, config=FLUX, comfy=FLUX_COMFY | {"guidance_embed": False}),
    "flux fill": replace(
        DEV,
        config={**DEV.config, "in_channels": 384, "out_channels": 64},
        comfy={**DEV.comfy, "in_channels": 96},
        conditions=MASKED_PICTURE,
        channels=96,
    ),
    "flux2": FLUX2,
    "flux2, references": replace(FLUX2, latent=(1, 128, 4, 4), conditions=FLUX2_REFERENCES),
    "qwen": replace(QWEN, latent=(2, 16, 1, 8, 12)),
    "qwen edit": replace(QWEN, conditions=QWEN_REFERENCES),
    "qwen edit 2511": replace(
        QWEN,
        config=QWEN_CONFIG | {"zero_cond_t": True},
        comfy=QWEN_COMFY | {"default_ref_method": "index_timestep_zero"},
        conditions=QWEN_REFERENCES,
    ),
    "z-image": Z_IMAGE,
    "z-image, odd size": replace(Z_IMAGE, latent=(1, 16, 9, 7), text=(40, 24)),
    "wan": make_wan(16),
    "wan 2.1 from an image": make_wan(
        36, "i2v", config={"image_dim": 1280, "added_kv_proj_dim": 32}, conditions=SEEN_FRAME
    ),
    "wan 2.2 from an image": make_wan(36, conditions=FIRST_FRAME),
    "wan 2.2 5B, a known frame": make_wan(48, num_latents=48, has_mask=True),
    "ltx-2": LTX2,
    "ltx-2, a known frame": replace(LTX2, has_mask=True),
}

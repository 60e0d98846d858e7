"""FLUX.1 (dev, schnell): 19 double blocks (text, image) and 38 single ones on the joint sequence, text first.

Embedded guidance is one call per step, true CFG two. Double blocks have two feed-forwards and single ones one, fused
with attention: 340 M against 141 M parameters, but a token meets one stream's weights only: 2 * 170 M against 2 * 141 M
operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diffusers import FluxKontextPipeline, FluxTransformer2DModel
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from torch import nn

from ditile.layout import Grid
from ditile.models.slicers import refuse_ip_adapters, rotary
from ditile.spec import BlockIO, Conditioning, ModelSpec


def grid(transformer: nn.Module, inputs: Mapping[str, Any]) -> Grid:
    """Packed latents `[B, N, C]` are tokens already; their columns are read off the last position once per image."""
    ids = inputs["img_ids"]
    ids = ids[0] if ids.ndim == 3 else ids
    columns = int(ids[-1, 2] - ids[0, 2]) + 1
    return Grid(ids.shape[0] // columns, columns, columns)


def refuse(pipe: Any, call: Mapping[str, Any]) -> str | None:
    """Kontext, and IP-adapters."""
    if isinstance(pipe, FluxKontextPipeline):
        return (
            f"{type(pipe).__name__} has the tokens of a second picture behind those of the latents, which cannot be "
            "cut into patches of one; run it without a plan"
        )
    return refuse_ip_adapters(call)


def conditioning(call: Mapping[str, Any]) -> Conditioning:
    """True CFG, where it is on, is a second call."""
    embedded = all(call.get(f"negative_{name}embeds") is not None for name in ("prompt_", "pooled_prompt_"))
    guided = call.get("true_cfg_scale", 1.0) > 1 and (call.get("negative_prompt") is not None or embedded)
    return Conditioning(text=call.get("max_sequence_length", 512), calls=1 + guided)


TENSOR_TOKENS = {
    "transformer_blocks.*.attn": {"hidden_states": "image", "encoder_hidden_states": "text"},
    "transformer_blocks.*.attn.to_out.0": {"return": "image"},
    "transformer_blocks.*.attn.to_add_out": {"return": "text"},
    "transformer_blocks.*.ff": {"hidden_states": "image"},
    "transformer_blocks.*.ff.net.2": {"return": "image"},
    "transformer_blocks.*.ff_context": {"hidden_states": "text"},
    "transformer_blocks.*.ff_context.net.2": {"return": "text"},
    "single_transformer_blocks.*.norm": {"return": "text+image"},  # once for both attention and feed-forward
    "single_transformer_blocks.*.proj_out": {"return": "text+image"},
}

FLUX = ModelSpec(
    name="FLUX.1",
    pipelines=("FluxPipeline", "FluxImg2ImgPipeline"),
    blocks={
        "transformer_blocks": BlockIO(returns=("text", "image"), tokens={"image_rotary_emb": rotary}, cost=1.2),
        "single_transformer_blocks": BlockIO(returns=("text", "image"), tokens={"image_rotary_emb": rotary}),
    },
    joint="text_first",
    latent_dim=1,
    grid=grid,
    latent_per_token=lambda config: 2,
    conditioning=conditioning,
    image_tokens="x_embedder",
    constant=("context_embedder", "pos_embed"),
    per_step=(
        "time_text_embed", "transformer_blocks.*.norm1.linear", "transformer_blocks.*.norm1_context.linear",
        "single_transformer_blocks.*.norm.linear", "norm_out.linear",
    ),
    stock=(FluxAttnProcessor,),
    tensor=FluxTransformer2DModel._tp_plan,  # diffusers' own
    tensor_tokens=TENSOR_TOKENS,
    batch=("img_ids", "txt_ids"),
    refuse=refuse,
)  # fmt: skip

"""Refinements of FLUX.1, SD3 and PixArt beyond their anatomies: their `ModelSpec`s.

Every family is divided by the anatomy derived from it. These specs make three families faster, allow
`split_scheme=sequence`, or refuse calls that they cannot compute exactly.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from diffusers import FluxTransformer2DModel
from diffusers.models.attention_processor import (
    Attention,
    AttnProcessor2_0,
    JointAttnProcessor2_0,
    SD3IPAdapterJointAttnProcessor2_0,
)
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_flux import FluxAttention, FluxAttnProcessor, FluxIPAdapterAttnProcessor
from torch import Tensor, nn
from torch.nn import functional

from ditile.model.hooks.attention_processors import UNFUSE
from ditile.model.hooks.protocols import DeferredTensor
from ditile.plan.errors import ModelError
from ditile.plan.layout import Grid
from ditile.plan.model_spec import Conditioning, Constant, ModelSpec

TEXT_STREAM = (
    "norm1_context",
    "norm2_context",
    "ff_context",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
)
"""Modules that see only the text, in the blocks with two streams (MM-DiT)."""

JOINT_TENSOR_TOKENS = {
    "transformer_blocks.*.attn": {"hidden_states": "image", "encoder_hidden_states": "text"},
    "transformer_blocks.*.attn.to_out.0": {"return": "image"},
    "transformer_blocks.*.attn.to_add_out": {"return": "text"},
    "transformer_blocks.*.ff": {"hidden_states": "image"},
    "transformer_blocks.*.ff.net.2": {"return": "image"},
    "transformer_blocks.*.ff_context": {"hidden_states": "text"},
    "transformer_blocks.*.ff_context.net.2": {"return": "text"},
}
"""Their token streams under tensor parallelism, in the form of `ModelSpec.tensor_tokens`."""


def build_tensor_plan(columns: Sequence[str], rows: Sequence[str]) -> dict[str, str]:
    """Build a tensor parallel table in the format of `_tp_plan`, for Linears of every transformer block."""
    styles = dict.fromkeys(columns, "colwise") | dict.fromkeys(rows, "rowwise")
    return {f"transformer_blocks.*.{name}": style for name, style in styles.items()}


def image_grid(transformer: nn.Module, inputs: Mapping[str, Any]) -> Grid:
    """Return the grid of `[B, C, H, W]` latents, which the transformer cuts into square patches."""
    size: int = transformer.config.patch_size  # type: ignore[assignment, union-attr]
    height, width = inputs["hidden_states"].shape[-2:]
    return Grid(height // size, width // size)


def make_empty_latents(config: Mapping[str, Any], grid: Grid) -> Tensor:
    """Make latents `[1, C, H, W]` of a grid, used only for their shape."""
    side = int(config["patch_size"])
    return torch.empty(1, config["in_channels"], grid.rows * side, grid.tokens_per_row * side)


def defer_projections(
    x: Tensor, linears: Sequence[Any], norms: Sequence[Any], heads: tuple[int, int]
) -> list[DeferredTensor]:
    """Return functions that compute q, k and v of `[B, S, C]` when called.

    Args:
        norms: of each; None if there is none.
        heads: (number, -1) or (-1, size).
    """

    def project_heads(linear: Any, norm: Any) -> Tensor:
        projection: Tensor = linear(x).unflatten(-1, heads)
        if norm is not None:
            projection = norm(projection)
        return projection

    return [partial(project_heads, *pair) for pair in zip(linears, norms, strict=True)]


def defer_joint_projections(
    attn: Any, image: Tensor, text: Tensor | None, heads: tuple[int, int], joint: Literal["text_first", "image_first"]
) -> list[DeferredTensor]:
    """Defer the projections of MM-DiT's joint attention, over image `[B, S, C]` and text `[B, T, C]`."""
    linears = (attn.to_q, attn.to_k, attn.to_v)
    norms = (attn.norm_q, attn.norm_k, None)
    of_image = defer_projections(image, linears, norms, heads)
    if text is None:
        return of_image
    linears = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
    norms = (attn.norm_added_q, attn.norm_added_k, None)
    of_text = defer_projections(text, linears, norms, heads)
    if joint == "text_first":
        return list(map(_defer_concatenation, of_text, of_image))
    return list(map(_defer_concatenation, of_image, of_text))


def _defer_concatenation(first: DeferredTensor, second: DeferredTensor) -> DeferredTensor:
    return lambda: torch.cat([first(), second()], dim=1)


def attend_to_projections(core: Any, makers: Sequence[DeferredTensor]) -> Tensor:
    """Attend to q, k and v: to all at once, or, if the core overlaps, sending each while the next is computed."""
    if core.overlaps:
        return core.attend_overlapped(makers)  # type: ignore[no-any-return]
    q, k, v = (make() for make in makers)
    return core.attend(q, k, v)  # type: ignore[no-any-return]


def explain_ip_adapter_refusal(call: Mapping[str, Any]) -> str | None:
    """Explain why a call with image prompts is refused, or None: PipeFusion replaces the processors for them."""
    for name in ("ip_adapter_image", "ip_adapter_image_embeds"):
        for argument in (name, f"negative_{name}"):
            if call.get(argument) is not None:
                return f"there is no IP-adapter here that can be divided; leave {argument} out"
    return None


# FLUX.1 (dev, schnell): 19 double blocks (text, image) and 38 single ones on the joint sequence, text first.
#
# Embedded guidance is one call per step, true CFG two. Double blocks have two feed-forwards and single ones one,
# fused with attention: 340 M against 141 M parameters, but a token meets the weights of one stream only: 2 * 170 M
# against 2 * 141 M operations.


class FluxOverlappedProcessor:
    """Replaces `FluxAttnProcessor` so that each projection is sent while the next is computed.

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
        """Attend, image `[B, S, C]` and text `[B, T, C]` to the same, or the joint sequence to itself."""
        if attn.fused_projections:
            raise ModelError(f"async_ulysses needs q, k and v apart, and they are fused; {UNFUSE}")
        heads = (-1, attn.head_dim)
        makers = defer_joint_projections(attn, hidden_states, encoder_hidden_states, heads, "text_first")
        if image_rotary_emb is not None:
            q, k, v = makers
            makers = [partial(_apply_rotary, q, image_rotary_emb), partial(_apply_rotary, k, image_rotary_emb), v]
        out = self._core.attend_overlapped(makers, mask=attention_mask).flatten(2).to(hidden_states.dtype)
        if encoder_hidden_states is None:
            return out  # type: ignore[no-any-return]
        text_tokens, image = out.tensor_split([encoder_hidden_states.shape[1]], dim=1)
        return attn.to_out[1](attn.to_out[0](image.contiguous())), attn.to_add_out(text_tokens.contiguous())


def _apply_rotary(make: DeferredTensor, table: tuple[Tensor, Tensor]) -> Tensor:
    out: Any = apply_rotary_emb(make(), table, sequence_dim=1)  # type: ignore[arg-type]
    return out  # type: ignore[no-any-return]


def read_flux_grid(transformer: nn.Module, inputs: Mapping[str, Any]) -> Grid:
    """Return the grid of packed latents `[B, N, C]`, which are already tokens; columns are the first row's tokens.

    Positions may be rounded, as in bfloat16 above 256, but the second row is never rounded to the first one.
    """
    ids = inputs["img_ids"]
    # Some pipelines give each row of the batch a copy of the same positions.
    if ids.ndim == 3:
        ids = ids[0]
    columns = int((ids[:, 1] == ids[0, 1]).int().cumprod(0).sum())
    return Grid(ids.shape[0] // columns, columns)


def has_ip_adapter(pipe: Any) -> bool:
    """Return whether a pipeline has an IP-adapter, which reads image prompts."""
    return getattr(pipe.transformer, "encoder_hid_proj", None) is not None


def explain_flux_refusal(pipe: Any, call: Mapping[str, Any]) -> str | None:
    """Explain why a call with image prompts is refused without an IP-adapter; None for other calls."""
    return None if has_ip_adapter(pipe) else explain_ip_adapter_refusal(call)


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


# Single blocks gather once after their norm, for both attention and feed-forward.
FLUX_TENSOR_TOKENS = JOINT_TENSOR_TOKENS | {
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
    tensor_tokens=FLUX_TENSOR_TOKENS,
    batch=("img_ids", "txt_ids"),
    refuse=explain_flux_refusal,
)


# Stable Diffusion 3 and 3.5: joint attention, image first; 3.5 medium adds image-only attention to some blocks.
#
# Skip-layer guidance tests the index of the iteration, which counts patches under PipeFusion: all plans refuse it
# except those of only data and cfg, which call the whole model.


class SD3Attention:
    """Joint or image-only attention of SD3's blocks: projections, qk-norm, then an `AttentionCore`."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def __call__(
        self, attn: Attention, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, *_: Any, **__: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend, image `[B, S, C]` and text `[B, T, C]` to the same, or only image to image."""
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
    """Explain why skip-layer guidance, or image prompts without an IP-adapter, are refused; None for other calls."""
    if call.get("skip_guidance_layers") is not None:
        return (
            "skip_guidance_layers leaves blocks out by the index of the loop's iteration, which may count patches in a "
            "divided model; use data and cfg alone, which call whole models, or leave it out"
        )
    if getattr(pipe.transformer, "image_proj", None) is not None:
        return None
    return explain_ip_adapter_refusal(call)


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


_SD3_JOINT = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")
_SD3_IMAGE = ("attn2.to_q", "attn2.to_k", "attn2.to_v")
# The last block has no `to_add_out`.
_SD3_ROWS = ("attn.to_out.0", "attn.to_add_out", "attn2.to_out.0", "ff.net.2", "ff_context.net.2")
SD3_TENSOR_PLAN = build_tensor_plan((*_SD3_JOINT, *_SD3_IMAGE, "ff.net.0.proj", "ff_context.net.0.proj"), _SD3_ROWS)
SD3_TENSOR_TOKENS = JOINT_TENSOR_TOKENS | {
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
    tensor_tokens=SD3_TENSOR_TOKENS,
    refuse=explain_sd3_refusal,
)


# PixArt-alpha and PixArt-sigma: self attention over the image, cross attention to the text (constant per image).

KEY_UNIT = 64
"""Text keys are left out in units of this size: torch's kernels sum a unit in one order, independent of later keys."""
MASKED_BELOW = -9000.0
"""A mask value below it means an attention weight of 0: diffusers writes -10000, which is -9984 in bfloat16."""


class PixArtSelfAttention:
    """Self attention of PixArt's blocks: projections, then an `AttentionCore`."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def __call__(self, attn: Attention, hidden_states: Tensor, *unused: Any, **also: Any) -> Tensor:
        """Attend, `[B, S, C]` to `[B, S, C]`; these blocks do not use the stock processor's other arguments."""
        linears = (attn.to_q, attn.to_k, attn.to_v)
        makers = defer_projections(hidden_states, linears, (None, None, None), (attn.heads, -1))
        return _project_output(attn, attend_to_projections(self._core, makers).to(hidden_states.dtype))


class PixArtCrossAttention:
    """Attention to the text like in the stock processor, without copies of the mask for every head of every layer.

    Keys that no row attends to, which are most of them for a short prompt, are left out: their weight is 0 in any case.
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
        """Attend, `[B, S, C]` to `[B, S, C]`; the text is `[B, L, C]`, its additive mask `[B, 1, L]`."""
        q = _project_heads(attn.to_q, hidden_states, attn.heads)
        k = _project_heads(attn.to_k, encoder_hidden_states, attn.heads)
        v = _project_heads(attn.to_v, encoder_hidden_states, attn.heads)
        mask = attention_mask
        if mask is not None:
            # The number of visible keys is read from the mask, and a compiled graph cannot be cut by it.
            if not torch.compiler.is_compiling():
                length, mask = self._constant(("text", mask.shape), functools.partial(trim_key_mask, mask))
                k = k[:, :, :length]
                v = v[:, :, :length]
            if mask is not None:
                mask = mask[:, None]
        attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return _project_output(attn, attended.transpose(1, 2))


def _project_heads(linear: Any, x: Tensor, heads: int) -> Tensor:
    projection: Tensor = linear(x).unflatten(-1, (heads, -1))
    return projection.transpose(1, 2)


def trim_key_mask(mask: Tensor) -> tuple[int, Tensor | None]:
    """Count the leading keys that include all attended ones, rounded up to `KEY_UNIT`; also return their mask, if
    needed.

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
    if not bool(mask.any()):
        return length, None
    return length, mask


def _project_output(attn: Attention, attended: Tensor) -> Tensor:
    out: Tensor = attn.to_out[0](attended.flatten(2))
    if attn.rescale_output_factor != 1:
        out = out / attn.rescale_output_factor
    return out


def make_pixart_inputs(config: Mapping[str, Any], grid: Grid, text: int) -> dict[str, Any]:
    """Make latents, T5's states and their mask."""
    return {
        "hidden_states": make_empty_latents(config, grid),
        "encoder_hidden_states": torch.empty(1, text, config["caption_channels"]),
        "encoder_attention_mask": torch.empty(1, text),
        "timestep": torch.empty(1),
        "added_cond_kwargs": {"resolution": torch.empty(1, 2), "aspect_ratio": torch.empty(1, 1)},
    }


_PIXART_COLUMNS = ("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn2.to_q", "attn2.to_k", "attn2.to_v", "ff.net.0.proj")
_PIXART_ROWS = ("attn1.to_out.0", "attn2.to_out.0", "ff.net.2")
PIXART_TENSOR_PLAN = build_tensor_plan(_PIXART_COLUMNS, _PIXART_ROWS)
# The text of cross attention is whole on every rank, so it is not in these tables.
_PIXART_READS = dict.fromkeys(("attn1", "attn2", "ff"), "hidden_states") | dict.fromkeys(_PIXART_ROWS, "return")
PIXART_TENSOR_TOKENS = {f"transformer_blocks.*.{name}": {what: "image"} for name, what in _PIXART_READS.items()}

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
    tensor_tokens=PIXART_TENSOR_TOKENS,
)

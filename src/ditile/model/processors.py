"""Attention processors of FLUX.1, SD3 and PixArt that compute q, k and v one after the other.

Each travels while the next is computed (`async_ulysses`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from diffusers import FluxTransformer2DModel, PixArtTransformer2DModel, SD3Transformer2DModel
from diffusers.models.attention_processor import Attention, AttnProcessor2_0, JointAttnProcessor2_0
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_flux import FluxAttention, FluxAttnProcessor
from torch import Tensor, nn

from ditile.model.hooks.attention_processors import UNFUSE
from ditile.model.hooks.protocols import DeferredTensor
from ditile.plan.errors import ModelError


def defer_projections(
    x: Tensor, linears: Sequence[Any], norms: Sequence[Any], heads: tuple[int, int]
) -> list[DeferredTensor]:
    """Return functions that compute q, k and v from `[B, S, C]` when called.

    Args:
        norms: the norm after each Linear, or None.
        heads: what `unflatten` takes: (number of heads, -1) or (-1, size of a head).
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


class FluxOverlappedProcessor:
    """Replaces `FluxAttnProcessor` so that each projection is sent while the next is computed."""

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
        """Return what attention makes of image `[B, S, C]` and text `[B, T, C]`, or of their joint sequence.

        Raises:
            ModelError: if the projections are fused.
        """
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


class SD3OverlappedProcessor:
    """Joint or image-only attention of SD3's blocks: projections, qk-norm, then an `AttentionCore`."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def __call__(
        self, attn: Attention, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, *_: Any, **__: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return what attention makes of image `[B, S, C]` and text `[B, T, C]`, or only of the image."""
        makers = defer_joint_projections(attn, hidden_states, encoder_hidden_states, (attn.heads, -1), "image_first")
        out = self._core.attend_overlapped(makers).flatten(2).to(hidden_states.dtype)
        if encoder_hidden_states is None:
            return attn.to_out[0](out)  # type: ignore[no-any-return]
        image = out[:, : hidden_states.shape[1]]
        text_tokens = out[:, hidden_states.shape[1] :]
        if not attn.context_pre_only:
            text_tokens = attn.to_add_out(text_tokens)
        return attn.to_out[0](image), text_tokens


class PixArtOverlappedProcessor:
    """Self attention of PixArt's blocks: projections, then an `AttentionCore`."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def __call__(self, attn: Attention, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return what attention makes of `[B, S, C]`. PixArt's pipelines give these blocks no other arguments."""
        linears = (attn.to_q, attn.to_k, attn.to_v)
        makers = defer_projections(hidden_states, linears, (None, None, None), (attn.heads, -1))
        attended = self._core.attend_overlapped(makers).to(hidden_states.dtype)
        out: Tensor = attn.to_out[0](attended.flatten(2))
        if attn.rescale_output_factor != 1:
            out = out / attn.rescale_output_factor
        return out


PROCESSORS: Mapping[type, Mapping[type, Callable[[Any], Any]]] = {
    FluxTransformer2DModel: {FluxAttnProcessor: FluxOverlappedProcessor},
    PixArtTransformer2DModel: {AttnProcessor2_0: PixArtOverlappedProcessor},
    SD3Transformer2DModel: {JointAttnProcessor2_0: SD3OverlappedProcessor},
}
"""Transformer -> stock processor -> the class that replaces it, which is made with an attention core."""


def find_overlapped_processors(transformer: nn.Module) -> Mapping[type, Callable[[Any], Any]]:
    """Return the overlapped processors for a transformer's class, or for the nearest base class."""
    for cls in type(transformer).__mro__:
        if cls in PROCESSORS:
            return PROCESSORS[cls]
    return {}

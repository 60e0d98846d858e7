"""The attention in the middle of a coder, of a strip: its own queries, the keys and values of all rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0, FusedAttnProcessor2_0
from torch import Tensor

from ditile.parallel.vae.strip import Strip

STOCK = (AttnProcessor, AttnProcessor2_0, FusedAttnProcessor2_0)
"""The processors that this one computes the same as."""


class RowAttention:
    """An attention processor for diffusers' `Attention` where it attends to a picture itself, without a mask."""

    def __init__(self, strip: Strip) -> None:
        self._strip = strip

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: None = None, attention_mask: None = None,
        temb: None = None,
    ) -> Tensor:  # fmt: skip
        """From this rank's rows `[B, C, rows, W]` to its rows of the output."""
        batch, _, rows, width = hidden_states.shape
        x_BCS = hidden_states.flatten(2)  # noqa: N806
        if attn.group_norm is not None:
            x_BCS = attn.group_norm(x_BCS)  # noqa: N806
        x_SBC = x_BCS.permute(2, 0, 1)  # noqa: N806
        pairs = self._strip.start_strip_gather(torch.cat([attn.to_k(x_SBC), attn.to_v(x_SBC)], dim=-1), units=width)
        query = attn.to_q(x_SBC)
        q_BNSH, k_BNSH, v_BNSH = (  # noqa: N806
            part.unflatten(-1, (attn.heads, -1)).permute(1, 2, 0, 3)
            for part in (query, *torch.cat(pairs.wait_for_tensors()).chunk(2, -1))
        )
        if not rows:
            return hidden_states
        out = F.scaled_dot_product_attention(q_BNSH, k_BNSH, v_BNSH)
        out = attn.to_out[1](attn.to_out[0](out.transpose(1, 2).flatten(2)))
        out = out.transpose(1, 2).reshape(batch, -1, rows, width)
        if attn.residual_connection:
            out = out + hidden_states
        scaled: Tensor = out / attn.rescale_output_factor
        return scaled

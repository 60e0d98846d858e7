"""A residual block a few rows at a time: what a convolution is given is normalized when it is needed.

diffusers' own forward holds a normalized copy of the whole strip beside what it is made from, and the sum of the two
branches before and after it is scaled. Here a block of rows is normalized and convolved at once, the second branch is
added in place, and rows travel as they are before the norm, which every rank does alike.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ditile.parallel.vae.norm import build_normalizer
from ditile.parallel.vae.strip import Strip


def run_residual_block(block: Any, x: Tensor, strip: Strip) -> Tensor:
    """This rank's rows of what a `ResnetBlock2D` makes without a time embedding; its convolutions are divided."""

    def normalize_and_convolve(norm: nn.GroupNorm, conv: nn.Module, x: Tensor) -> Any:
        normalize = build_normalizer(norm, x, strip)
        return conv(x, prepare=lambda rows: block.nonlinearity(normalize(rows)))

    out: Tensor = normalize_and_convolve(block.norm2, block.conv2, normalize_and_convolve(block.norm1, block.conv1, x))
    out += x if block.conv_shortcut is None else block.conv_shortcut(x)
    return out.div_(block.output_scale_factor) if block.output_scale_factor != 1 else out


def is_plain_residual(block: Any) -> bool:
    """Whether `residual` computes the same as a `ResnetBlock2D` does."""
    parts = (block.upsample, block.downsample, block.time_emb_proj)
    return block.time_embedding_norm != "scale_shift" and all(part is None for part in parts) and not block.dropout.p

"""What the modules of a coder compute of a strip: convolutions, group norms, attention and residual blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0, FusedAttnProcessor2_0
from torch import Tensor, nn
from torch.nn import functional

from ditile.parallel.vae.halo import Halo, RowWindow, Strip, intersect_ranges

VisibleRows = list[tuple[range, Tensor]]
"""Rows of the input, from top to bottom, and where in the picture they are."""
PrepareRows = Callable[[Tensor], Tensor]
"""What is done to rows of the input before they are convolved, such as norm and activation: to each pixel alone."""


@dataclass(frozen=True, slots=True)
class StripConvolution:
    """A convolution of a strip: its own rows while the halo travels, then the rows at the edges.

    With a block size it makes that many rows at a time, so that what the kernel copies or unfolds is never larger.
    Nearest up-sampling is done to the rows that a block needs: halo rows travel before they are doubled.

    Attributes:
        conv: an `nn.Conv2d`, for its weights, stride and groups.
        strip: this rank's rows.
        window: along the rows; the kernel and its stride are the convolution's own.
        sides: columns of zeros on the left and on the right.
    """

    conv: Any
    strip: Strip
    window: RowWindow
    sides: tuple[int, int]

    def __call__(self, x: Tensor, prepare: PrepareRows | None = None) -> Tensor:
        """This rank's rows of the output `[B, C, rows, W]`, from those of the input.

        Args:
            x: the input.
            prepare: makes new rows of the input's, a block at a time; rows travel before it.
        """
        part = self.strip.begin_operation(self.window)
        wait_for_rows = self.strip.start_halo_exchange(x, part)
        own: VisibleRows = [(part.own, x)]
        size = self.strip.block_size or max(len(part.out), 1)
        if size >= len(part.out) and part.inner:
            # all rows at once, as if there were nothing beyond the strip; those at the edges are made again below
            out = self._convolve_rows(own, part.out, prepare)
        else:
            columns = (x.shape[3] * self.window.scale + sum(self.sides) - self.conv.kernel_size[1]) // self.conv.stride[
                1
            ]
            out = x.new_empty(x.shape[0], self.conv.out_channels, len(part.out), columns + 1)
            self._fill_output_rows(out, own, part.inner, part, size, prepare)
        seen = wait_for_rows()
        for edge in (range(part.out.start, part.inner.start), range(part.inner.stop, part.out.stop)):
            self._fill_output_rows(out, seen, edge, part, size, prepare)
        return out

    def _fill_output_rows(
        self, out: Tensor, seen: VisibleRows, rows: range, part: Halo, size: int, prepare: PrepareRows | None
    ) -> None:
        for first in range(rows.start, rows.stop, size):
            block = range(first, min(first + size, rows.stop))
            at = block.start - part.out.start
            out[:, :, at : at + len(block)] = self._convolve_rows(seen, block, prepare)

    def _convolve_rows(self, seen: VisibleRows, out: range, prepare: PrepareRows | None) -> Tensor:
        """Some rows of the output, from the rows that are seen, and zeros where there are none."""
        reach = self.window.compute_input_reach(out)
        source = self.window.find_input_rows(out, seen[-1][0].stop)
        parts = []
        for rows, tensor in seen:
            common = intersect_ranges(rows, source)
            if common:
                parts.append(tensor[:, :, common.start - rows.start : common.stop - rows.start])
        first = max(source.start, seen[0][0].start)
        x = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        if prepare is not None:
            x = prepare(x)
        if self.window.scale > 1:
            x, first = (
                functional.interpolate(x, scale_factor=float(self.window.scale), mode="nearest"),
                first * self.window.scale,
            )
        last = first + x.shape[2]
        x = x[:, :, max(reach.start - first, 0) : x.shape[2] - max(last - reach.stop, 0)]
        above, below = max(first - reach.start, 0), max(reach.stop - last, 0)
        if (above, self.sides[0]) == (below, self.sides[1]):
            padding = (above, self.sides[0])
        else:
            x, padding = functional.pad(x, (*self.sides, above, below)), (0, 0)
        return functional.conv2d(
            x, self.conv.weight, self.conv.bias, self.conv.stride, padding, groups=self.conv.groups
        )


AT_ONCE = 1 << 22
"""Numbers that are centred at a time, so that no second copy of the picture is made."""


def normalize_strip(norm: nn.GroupNorm, x: Tensor, strip: Strip) -> Tensor:
    """This rank's rows of the output, for rows `[B, C, rows, W]` or tokens `[B, C, rows * W]`."""
    normalize = build_normalizer(norm, x, strip)
    return normalize(x) if x.numel() else x


def build_normalizer(norm: nn.GroupNorm, x: Tensor, strip: Strip) -> Callable[[Tensor], Tensor]:
    """What normalizes rows of the picture, those of `x` or of other strips, however many at a time.

    Mean and variance of the picture follow from those of the strips: the variances average, and so do the squares by
    which the strips' means miss the common one. Without the latter the variance would be wrong if the top of a picture
    is brighter than its bottom. Each strip's variance is about its own mean, so nothing cancels (Chan, Golub and
    LeVeque, 1983).
    """
    batch, channels = x.shape[:2]
    means, variances, shares = strip.gather_equal_shapes(
        _compute_moments(x, norm.num_groups, strip.picture_share)
    ).unbind(1)
    mean = (shares * means).sum(0)
    variance = (shares * (variances + (means - mean).square())).sum(0)

    def expand_to_channels(of_group: Tensor) -> Tensor:
        return of_group.repeat_interleave(channels // norm.num_groups, dim=1).flatten()

    weight, bias = (None if p is None else p.to(mean.dtype).repeat(batch) for p in (norm.weight, norm.bias))
    mean, variance = expand_to_channels(mean), expand_to_channels(variance)

    def normalize_rows(rows: Tensor) -> Tensor:
        # A batch norm with given statistics scales and shifts each channel, in one pass and without a copy. The
        # channels of all pictures are laid side by side for it.
        flat = rows.contiguous().view(1, batch * channels, -1)
        return functional.batch_norm(flat, mean, variance, weight, bias, False, 0.0, norm.eps).view(rows.shape)

    return normalize_rows


def _compute_moments(x: Tensor, groups: int, share: float) -> Tensor:
    """Mean and variance of each group of a strip, and its share of the picture, `[3, B, groups]`, in fp32 or better.

    The share travels with them: a list of all shares would have to be copied to the device, which waits for it.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    if not x.numel():
        return x.new_zeros(3, x.shape[0], groups, dtype=wide)
    flat = x.contiguous().view(x.shape[0], groups, -1)
    means, variances = [], []
    for part in flat.split(max(AT_ONCE // (flat.shape[0] * flat.shape[2]), 1), dim=1):
        mean = part.mean(2, dtype=wide)
        means.append(mean)
        variances.append((part - mean[..., None]).square_().mean(2))
    all_means = torch.cat(means, 1)
    return torch.stack([all_means, torch.cat(variances, 1), torch.full_like(all_means, share)])


STOCK = (AttnProcessor, AttnProcessor2_0, FusedAttnProcessor2_0)
"""The processors with the same result as `RowAttention`."""


class RowAttention:
    """An attention processor for diffusers' `Attention` in the middle of a coder, without a mask.

    The queries are those of the strip, the keys and values those of all rows.
    """

    def __init__(self, strip: Strip) -> None:
        self._strip = strip

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: None = None,
        attention_mask: None = None,
        temb: None = None,
    ) -> Tensor:
        """From this rank's rows `[B, C, rows, W]` to its rows of the output."""
        batch, _, rows, width = hidden_states.shape
        x_BCS = hidden_states.flatten(2)
        if attn.group_norm is not None:
            x_BCS = attn.group_norm(x_BCS)
        x_SBC = x_BCS.permute(2, 0, 1)
        pairs = self._strip.start_strip_gather(torch.cat([attn.to_k(x_SBC), attn.to_v(x_SBC)], dim=-1), units=width)
        query = attn.to_q(x_SBC)
        q_BNSH, k_BNSH, v_BNSH = (
            part.unflatten(-1, (attn.heads, -1)).permute(1, 2, 0, 3)
            for part in (query, *torch.cat(pairs.wait_for_tensors()).chunk(2, -1))
        )
        if not rows:
            return hidden_states
        out = functional.scaled_dot_product_attention(q_BNSH, k_BNSH, v_BNSH)
        out = attn.to_out[1](attn.to_out[0](out.transpose(1, 2).flatten(2)))
        out = out.transpose(1, 2).reshape(batch, -1, rows, width)
        if attn.residual_connection:
            out = out + hidden_states
        scaled: Tensor = out / attn.rescale_output_factor
        return scaled


def run_residual_block(block: Any, x: Tensor, strip: Strip) -> Tensor:
    """This rank's rows of what a `ResnetBlock2D` makes without a time embedding; its convolutions are divided.

    diffusers' own forward holds a normalized copy of the whole strip beside what it is made from. Here a block of rows
    is normalized when it is convolved, the second branch is added in place, and rows travel before the norm.
    """

    def normalize_and_convolve(norm: nn.GroupNorm, conv: nn.Module, x: Tensor) -> Any:
        normalize = build_normalizer(norm, x, strip)
        return conv(x, prepare=lambda rows: block.nonlinearity(normalize(rows)))

    out: Tensor = normalize_and_convolve(block.norm2, block.conv2, normalize_and_convolve(block.norm1, block.conv1, x))
    out += x if block.conv_shortcut is None else block.conv_shortcut(x)
    return out.div_(block.output_scale_factor) if block.output_scale_factor != 1 else out


def is_plain_residual(block: Any) -> bool:
    """Whether `run_residual_block` computes the same as a `ResnetBlock2D` does."""
    parts = (block.upsample, block.downsample, block.time_emb_proj)
    return block.time_embedding_norm != "scale_shift" and all(part is None for part in parts) and not block.dropout.p

"""A convolution of a strip: its own rows while the halo travels, then the rows at the edges.

With a block size it makes that many rows at a time, so that what the kernel copies or unfolds is never larger.
Nearest up-sampling is done to the rows that a block needs: halo rows travel before they are doubled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from ditile.parallel.vae.halo import Halo, RowWindow, intersect_ranges
from ditile.parallel.vae.strip import Strip

VisibleRows = list[tuple[range, Tensor]]
"""Rows of the input, from top to bottom, and where in the picture they are."""
PrepareRows = Callable[[Tensor], Tensor]
"""What is done to rows of the input before they are convolved, such as norm and activation: to each pixel alone."""


def convolve_strip(
    conv: nn.Conv2d,
    x: Tensor,
    strip: Strip,
    window: RowWindow,
    sides: tuple[int, int],
    prepare: PrepareRows | None = None,
) -> Tensor:
    """This rank's rows of the output.

    Args:
        x: this rank's rows of the input, `[B, C, rows, W]`.
        window: along the rows; the kernel and its stride are the convolution's own.
        sides: columns of zeros on the left and on the right.
        prepare: makes new rows of the input's, a block at a time; rows travel before it.
    """
    part = strip.begin_operation(window)
    arriving = strip.start_halo_exchange(x, part)
    own: VisibleRows = [(part.own, x)]
    size = strip.block_size or max(len(part.out), 1)
    if size >= len(part.out) and part.inner:
        # all rows at once, as if there were nothing beyond the strip; those at the edges are made again below
        out = _convolve_rows(conv, own, part.out, window, sides, prepare)
    else:
        columns = (x.shape[3] * window.scale + sum(sides) - conv.kernel_size[1]) // conv.stride[1] + 1
        out = x.new_empty(x.shape[0], conv.out_channels, len(part.out), columns)
        _fill_output_rows(out, conv, own, part.inner, part, size, window, sides, prepare)
    seen = arriving()
    for edge in (range(part.out.start, part.inner.start), range(part.inner.stop, part.out.stop)):
        _fill_output_rows(out, conv, seen, edge, part, size, window, sides, prepare)
    return out


def _fill_output_rows(
    out: Tensor, conv: nn.Conv2d, seen: VisibleRows, rows: range, part: Halo, size: int, window: RowWindow,
    sides: tuple[int, int], prepare: PrepareRows | None,
) -> None:  # fmt: skip
    for first in range(rows.start, rows.stop, size):
        block = range(first, min(first + size, rows.stop))
        at = block.start - part.out.start
        out[:, :, at : at + len(block)] = _convolve_rows(conv, seen, block, window, sides, prepare)


def _convolve_rows(
    conv: nn.Conv2d,
    seen: VisibleRows,
    out: range,
    window: RowWindow,
    sides: tuple[int, int],
    prepare: PrepareRows | None,
) -> Tensor:
    """Some rows of the output, from the rows that are seen, and zeros where there are none."""
    reach = window.compute_input_reach(out)
    source = window.find_input_rows(out, seen[-1][0].stop)
    parts = []
    for rows, tensor in seen:
        common = intersect_ranges(rows, source)
        if common:
            parts.append(tensor[:, :, common.start - rows.start : common.stop - rows.start])
    first = max(source.start, seen[0][0].start)
    x = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    if prepare is not None:
        x = prepare(x)
    if window.scale > 1:
        x, first = F.interpolate(x, scale_factor=float(window.scale), mode="nearest"), first * window.scale
    last = first + x.shape[2]
    x = x[:, :, max(reach.start - first, 0) : x.shape[2] - max(last - reach.stop, 0)]
    above, below = max(first - reach.start, 0), max(reach.stop - last, 0)
    if (above, sides[0]) == (below, sides[1]):
        padding = (above, sides[0])
    else:
        x, padding = F.pad(x, (*sides, above, below)), (0, 0)
    return F.conv2d(x, conv.weight, conv.bias, cast(tuple[int, int], conv.stride), padding, groups=conv.groups)

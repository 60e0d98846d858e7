"""Group normalization of a strip with the statistics of the whole picture.

Mean and variance of the picture follow from those of the strips: the variances average, and so do the squares by which
the strips' means miss the common one. Leaving out the latter is wrong wherever the top of a picture is brighter than
its bottom. Each strip's variance is taken about its own mean, so nothing cancels (Chan, Golub and LeVeque, 1983).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from ditile.parallel.vae.strip import Strip

AT_ONCE = 1 << 22
"""Numbers that are centred at a time, so that no second copy of the picture is made."""


def normalize_strip(norm: nn.GroupNorm, x: Tensor, strip: Strip) -> Tensor:
    """This rank's rows of the output, for rows `[B, C, rows, W]` or tokens `[B, C, rows * W]`."""
    normalize = build_normalizer(norm, x, strip)
    return normalize(x) if x.numel() else x


def build_normalizer(norm: nn.GroupNorm, x: Tensor, strip: Strip) -> Callable[[Tensor], Tensor]:
    """What normalizes rows of the picture, those of `x` or of other strips, however many at a time."""
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
        # with its statistics given, a batch norm is the map of each channel that is wanted, in one pass without a
        # copy; the channels of all pictures stand side by side
        flat = rows.contiguous().view(1, batch * channels, -1)
        return F.batch_norm(flat, mean, variance, weight, bias, False, 0.0, norm.eps).view(rows.shape)

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

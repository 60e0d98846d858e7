"""The tokens are divided: each rank has a run of the text and a run of the image, and attention alone needs the others.

Ulysses (arXiv 2309.14509) exchanges tokens for heads; ring (arXiv 2310.01889) passes keys on. docs/sequence.md.
"""

from __future__ import annotations

import math

import torch
from mesh import Axis
from model import Part, attend_to_all
from torch import Tensor


def take_share(text: int, image: int, axis: Axis) -> Part:
    """Return this rank's run of the text and of the image."""
    if text % axis.size or image % axis.size:
        raise ValueError(f"{axis.size} ranks do not divide {text} text tokens and {image} image tokens evenly")
    runs = []
    for tokens in (text, image):
        length = tokens // axis.size
        runs.append(slice(axis.index * length, (axis.index + 1) * length))
    return Part(*runs)


class Ulysses:
    """Swap token shares for head shares, attend to all tokens, swap back."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output of this rank's queries `[B, S / ranks, N, H]`."""
        ranks = self._axis.size
        if q.shape[2] % ranks:
            raise ValueError(f"{ranks} ranks do not divide {q.shape[2]} heads")
        # q, k and v travel in one message.
        messages = torch.stack([q, k, v]).chunk(ranks, dim=3)
        # Tokens arrive rank by rank; attention does not mind, since positions are already in q and k.
        q, k, v = torch.cat(self._axis.exchange(list(messages)), dim=2)
        out = attend_to_all(layer, q, k, v)
        return torch.cat(self._axis.exchange(list(out.chunk(ranks, dim=1))), dim=2)


class Ring:
    """Attention of this rank's tokens to the keys of each rank in turn."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output of this rank's queries `[B, S / ranks, N, H]`."""
        block = torch.stack([k, v])
        merged, total = attend_with_sum(q, *block)
        for _ in range(self._axis.size - 1):
            block = self._axis.shift(block)
            part, part_total = attend_with_sum(q, *block)
            # Each is a softmax mean over its own keys; weigh it by its share of the summed exponentials.
            weight = torch.sigmoid(part_total - total).unsqueeze(-1)
            merged = torch.lerp(merged, part, weight)
            total = torch.logaddexp(total, part_total)
        return merged.to(q.dtype)


def attend_with_sum(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output `[B, S, N, H]` and the logarithm of the sum of exponentials `[B, S, N]`, in float32."""
    scores = torch.einsum("bsnh,btnh->bnst", q.float(), k.float()) / math.sqrt(q.shape[-1])
    out = torch.einsum("bnst,btnh->bsnh", scores.softmax(-1), v.float())
    return out, scores.logsumexp(-1).transpose(1, 2)

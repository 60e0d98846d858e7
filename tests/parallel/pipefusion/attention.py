"""Attention by hand for the simulation: diffusers' projections, keys kept in segments, the formula written out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from diffusers.models.embeddings import apply_rotary_emb
from torch import Tensor

Keys = Literal["stale", "own", "frozen"]
"""stale: as the paper says. Two are wrong on purpose: own: a patch sees nothing of the others; frozen: only what warmup
left."""
Joint = Literal["none", "text_first", "image_first"]
Segment = tuple[int, int | None]
"""A guidance branch, and a patch or (None) the text."""


@dataclass
class Place:
    """Where the simulation is. The attention of every layer looks here.

    Attributes:
        spans: the image tokens of each patch.
        text: tokens of the text.
        apart: whether the patches are made at the same time, each with the text: DistriFusion.
        patch: the one at hand; None is the whole picture.
    """

    spans: list[slice]
    text: int
    keys: Keys
    apart: bool = False
    patch: int | None = None
    branch: int = 0

    @property
    def span(self) -> slice:
        """The image tokens at hand."""
        return slice(None) if self.patch is None else self.spans[self.patch]

    @property
    def text_here(self) -> int:
        """The text tokens at hand."""
        return self.text if self.apart or self.patch in (None, 0) else 0


@dataclass
class Attention:
    """Keys and values of one layer.

    Attributes:
        kept: what a patch finds there when its turn comes.
        coming: what patches that are made at the same time leave for the next step.
    """

    place: Place
    joint: Joint
    kept: dict[Segment, tuple[Tensor, Tensor]] = field(default_factory=dict)
    coming: dict[Segment, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v of the tokens at hand, `[B, S, N, H]`."""
        place = self.place
        fresh = self.segments(k, v)
        thaw = place.keys != "frozen" or place.patch is None
        into = self.coming if place.apart else self.kept
        into.update({name: pair for name, pair in fresh.items() if thaw or name[1] is None})
        seen = {**self.kept, **fresh}
        wanted: list[int | None] = [*range(len(place.spans))]
        if place.keys == "own" and place.patch is not None:
            wanted = [place.patch]
        if self.joint != "none":
            wanted = [None, *wanted]
        pairs = [seen.get((place.branch, name)) or self.zeros(k, name) for name in wanted]
        return softmax_attention(q, torch.cat([k for k, _ in pairs], 1), torch.cat([v for _, v in pairs], 1))

    def end_step(self) -> None:
        """What was made at the same time is there for the next step."""
        self.kept.update(self.coming)
        self.coming.clear()

    def segments(self, k: Tensor, v: Tensor) -> dict[Segment, tuple[Tensor, Tensor]]:
        """The tokens at hand, cut into the text and patches."""
        place = self.place
        text = place.text_here if self.joint != "none" else 0
        image = k.shape[1] - text
        sizes = [text, image] if self.joint == "text_first" else [image, text]
        parts = list(zip(k.split(sizes, 1), v.split(sizes, 1), strict=True))
        words, (image_k, image_v) = parts if self.joint == "text_first" else reversed(parts)
        results: dict[Segment, tuple[Tensor, Tensor]] = {}
        if text:
            results[place.branch, None] = words
        if place.patch is not None:
            results[place.branch, place.patch] = image_k, image_v
        else:
            for patch, span in enumerate(place.spans):
                results[place.branch, patch] = image_k[:, span], image_v[:, span]
        return results

    def zeros(self, k: Tensor, patch: int | None) -> tuple[Tensor, Tensor]:
        """Without warmup, the patches behind have left nothing yet in the first step."""
        assert patch is not None, "the text comes first"
        span = self.place.spans[patch]
        none = k.new_zeros(k.shape[0], span.stop - span.start, *k.shape[2:])
        return none, none


def softmax_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention as in the formula, in float64."""
    scores = torch.einsum("bqnh,bknh->bnqk", q.double(), k.double()) / q.shape[-1] ** 0.5
    return torch.einsum("bnqk,bknh->bqnh", scores.softmax(-1), v.double()).to(q.dtype)


def heads(attn: Any, x: Tensor, names: str, norms: tuple[str, str]) -> list[Tensor]:
    """Queries, keys and values of some tokens, normalised where the layer has norms."""
    q, k, v = (getattr(attn, name)(x).unflatten(-1, (attn.heads, -1)) for name in names.split())
    for at, norm in zip((0, 1), (getattr(attn, name, None) for name in norms), strict=True):
        if norm is not None:
            q, k = (norm(q), k) if at == 0 else (q, norm(k))
    return [q, k, v]


class ImageAttention(Attention):
    """Attention of image tokens alone."""

    def __call__(self, attn: Any, hidden_states: Tensor, *unused: Any, **also: Any) -> Tensor:
        q, k, v = heads(attn, hidden_states, "to_q to_k to_v", ("norm_q", "norm_k"))
        return attn.to_out[0](self.attend(q, k, v).flatten(2))


class JointAttention(Attention):
    """Attention of two streams (double blocks), or of one that holds both (FLUX's single blocks)."""

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None,
        attention_mask: None = None, image_rotary_emb: Any = None,
    ) -> Any:  # fmt: skip
        here, words = heads(attn, hidden_states, "to_q to_k to_v", ("norm_q", "norm_k")), encoder_hidden_states
        if words is not None:
            names = "add_q_proj add_k_proj add_v_proj"
            text = heads(attn, words, names, ("norm_added_q", "norm_added_k"))
            first, second = (text, here) if self.joint == "text_first" else (here, text)
            here = [torch.cat(pair, 1) for pair in zip(first, second, strict=True)]
        q, k, v = here
        if image_rotary_emb is not None:
            q, k = (apply_rotary_emb(x, image_rotary_emb, sequence_dim=1) for x in (q, k))
        out = self.attend(q, k, v).flatten(2)
        if words is None:
            return out
        image, text_at = hidden_states.shape[1], words.shape[1]
        sizes = [text_at, image] if self.joint == "text_first" else [image, text_at]
        out, text_out = out.split(sizes, 1)[:: -1 if self.joint == "text_first" else 1]
        return attn.to_out[0](out), text_out if getattr(attn, "context_pre_only", None) else attn.to_add_out(text_out)

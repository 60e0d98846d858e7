"""Stale keys by hand: the pipeline's own loop, whose transformer predicts patch by patch from keys that were kept.

diffusers' forward runs on the whole image once for each patch. Tokens act on each other in self-attention alone, so
it is enough to put there the keys that the patch finds when its turn comes, and to take its part of the prediction.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from fractions import Fraction
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from tests.cache.hand import PatchHand

Method = Literal["pipefusion", "distrifusion"]
Keys = Literal["stale", "own", "frozen"]
"""stale: as the paper says. Two are wrong on purpose: own: a patch sees nothing of the others; frozen: only what warmup
left."""
NOTHING: Mapping[int, tuple[float, ...]] = {}
attend = functional.scaled_dot_product_attention


def cut(rows: int, patches: int, text_rows: Fraction) -> list[int]:
    """The rows of each patch."""
    if patches == 1:
        return [rows]
    fair = round((rows + text_rows) / patches - text_rows)
    first = max(1, min(fair, rows - (patches - 1)))
    each, left_over = divmod(rows - first, patches - 1)
    return [first] + [each + 1] * left_over + [each] * (patches - 1 - left_over)


class Simulation:
    """One image.

    In the steps `left_out` no prediction is made: its weights of the newest two predictions give one. The `warmup`
    counts the others. `cache` has the settings of a `PatchHand`.

    Attributes:
        hands: the cache of each branch of guidance.
    """

    def __init__(
        self, pipe: Any, call: dict[str, Any], method: Method, patches: int, warmup: int, *, keys: Keys = "stale",
        left_out: Mapping[int, tuple[float, ...]] = NOTHING, cache: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.pipe, self.call, self.forward = pipe, call, pipe.transformer.forward
        self.apart, self.patches, self.warmup = method == "distrifusion", patches, warmup
        self.keys, self.left_out, self.num_calls = keys, left_out, 0
        branches = 2 if "true_cfg_scale" in call else 1
        side = pipe.vae_scale_factor * 2
        self.rows, self.columns = call["height"] // side, call["width"] // side
        self.made: list[list[Tensor]] = [[] for _ in range(branches)]  # the newest first
        self.kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # keys and values by branch and layer
        self.coming: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # of patches that are made at the same time
        self.hands = [PatchHand(pipe.transformer, self, **cache) for _ in range(branches) if cache is not None]

    @torch.no_grad()
    def draw(self) -> Tensor:
        """Return the latents that a plan should end with."""
        with mock.patch.object(self.pipe.transformer, "forward", self.predict):
            latents: Tensor = self.pipe(**self.call).images
            return latents

    @property
    def span(self) -> slice:
        """The image tokens at hand."""
        if self.patch is None:
            return slice(None)
        start = sum(self.sizes[: self.patch]) * self.columns
        return slice(start, start + self.sizes[self.patch] * self.columns)

    @property
    def has_text(self) -> bool:
        """Whether the text is computed with the tokens at hand."""
        return self.apart or not self.patch

    def predict(self, *args: Any, **kwargs: Any) -> tuple[Tensor]:
        """In the place of the transformer's forward."""
        step, self.branch = divmod(self.num_calls, len(self.made))
        self.num_calls += 1
        made = self.made[self.branch]
        if step in self.left_out:
            return (sum(weight * x for weight, x in zip(self.left_out[step], made, strict=False)),)  # type: ignore[return-value]
        is_text_beside = type(self.pipe).__name__.startswith("PixArt")  # and has no place in self-attention
        self.text = 0 if is_text_beside else kwargs["encoder_hidden_states"].shape[1]
        self.sizes = cut(self.rows, self.patches, Fraction(0 if self.apart else self.text, self.columns))
        for hand in self.hands:
            hand.step = step
        if len(made) < self.warmup:
            made.insert(0, self.run(None, *args, **kwargs))
            return (made[0],)
        if self.apart and self.hands:
            # It decides on the image, before any patch is made.
            hand = self.hands[self.branch]
            hand.looks = hand.skips = True  # nothing behind a probe is kept
            for patch in range(self.patches):
                self.run(patch, *args, **kwargs)
            hand.end_look()
            self.coming.clear()
        whole = [self.run(patch, *args, **kwargs) for patch in range(self.patches)]
        # Tokens, or rows of two pixels.
        dim, unit = (1, self.columns) if whole[0].ndim == 3 else (2, 2)
        parts = [x.split([unit * size for size in self.sizes], dim)[patch] for patch, x in enumerate(whole)]
        made.insert(0, torch.cat(parts, dim))
        self.kept |= self.coming
        self.coming.clear()
        return (made[0],)

    def run(self, patch: int | None, *args: Any, **kwargs: Any) -> Tensor:
        """Return a prediction of which the patch's part counts."""
        self.patch, self.layer = patch, 0
        cached = self.hands[self.branch].hooked() if self.hands else nullcontext()
        with cached, mock.patch.object(functional, "scaled_dot_product_attention", self.attend):
            return self.forward(*args, **kwargs)[0]  # type: ignore[no-any-return]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """In the place of torch's: `[B, heads, tokens, channels]`."""
        image = self.rows * self.columns
        text = key.shape[2] - image
        if text not in (0, self.text):
            return attend(query, key, value, *args, **kwargs)  # to the text beside
        place = (self.branch, self.layer)
        self.layer += 1
        if self.hands and self.hands[self.branch].is_inside_skip:
            return query  # nobody computes it
        # FLUX has the text in front, SD3 behind.
        start = text if type(self.pipe).__name__.startswith("Flux") else 0
        is_image = torch.zeros(key.shape[2], dtype=torch.bool)
        is_image[start : start + image] = True
        is_fresh = ~is_image if self.has_text else torch.zeros_like(is_image)
        is_fresh[start : start + image][self.span] = True
        kept = self.kept.get(place) or (torch.zeros_like(key), torch.zeros_like(value))
        seen = _replace(kept, (key, value), is_fresh)
        stays = is_fresh if self.keys != "frozen" or self.patch is None else is_fresh & ~is_image
        if self.apart and self.patch is not None:
            self.coming[place] = _replace(self.coming.get(place, kept), (key, value), stays)
        else:
            self.kept[place] = _replace(kept, (key, value), stays)
        if self.keys == "own" and self.patch is not None:
            seen = tuple(x[:, :, is_fresh | ~is_image] for x in seen)  # type: ignore[assignment]
        return attend(query, *seen, *args, **kwargs)


def _replace(old: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], where: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(where[:, None], new[0], old[0]), torch.where(where[:, None], new[1], old[1])

"""Previews of running latents by a linear map from latents to colours, which is fitted while pictures are made.

The colours of a picture are nearly a linear function of its latents, pixel of the latents by pixel. The map of a VAE is
fitted by ridge regression from the final latents of calls and their pictures, so it needs neither an encoder nor a call
of the decoder. Running latents are mostly noise; what the model thinks of the picture is where the line through two
successive latents ends: a step goes from `a0 * clean + s0 * noise` to `a1 * clean + s1 * noise`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ditile.plan.errors import ModelError, StateError

RIDGE = 1e-3
"""The ridge, as a share of the mean variance of a latent channel."""
PACKED_SIDE = 2
"""The colours that a token of packed latents has in each direction."""

Picture = Image.Image | Sequence[Image.Image]
"""A picture, or the frames of a video."""


class PreviewDecoder:
    """The linear map of one VAE, as far as it has been fitted.

    Latents are of one picture: `[1, C, h, w]`, `[1, C, F, h, w]` and `[1, F, C, h, w]` of a video, or packed
    `[1, N, C]`, each token of which has 2x2 colours.

    Args:
        channels: of the latents of the VAE; only to tell `[1, C, F, h, w]` from `[1, F, C, h, w]`.

    Attributes:
        num_pictures: of how many pictures it knows.
    """

    def __init__(self, channels: int | None = None) -> None:
        self._channels = channels
        self.num_pictures = 0
        # Sums over all pixels of the products of [channels, 1] with themselves and with the colours.
        self._squares = self._products = torch.zeros(0, 0, dtype=torch.float64)
        self._weights: Tensor | None = None

    def fit(self, latents: Tensor, picture: Picture) -> None:
        """Adds a picture to those that the map is fitted to.

        Args:
            latents: the final ones, from which the picture was decoded.
            picture: of any size; all frames of a video.

        Raises:
            ModelError: if the latents are not laid out in a known way.
        """
        frames = [picture] if isinstance(picture, Image.Image) else list(picture)
        grids, side = self._arrange_grids(latents, frames[0].size)
        if side > 1 and len(frames) > 1:
            raise ModelError("latents of a video that are packed into tokens have no known grid")
        # The last frame of each latent frame, which holds several but for the first.
        stride = (len(frames) - 1) / max(len(grids) - 1, 1)
        for index, grid in enumerate(grids):
            inputs = _append_ones(grid)
            colors = _average_colors(frames[round(index * stride)], grid, side)
            if self._squares.shape[0] != inputs.shape[1]:
                self._squares = torch.zeros(inputs.shape[1], inputs.shape[1], dtype=torch.float64)
                self._products = torch.zeros(inputs.shape[1], colors.shape[1], dtype=torch.float64)
            self._squares += inputs.T @ inputs
            self._products += inputs.T @ colors
        self.num_pictures += 1
        self._weights = None

    def decode(self, latents: Tensor, size: tuple[int, int]) -> Image.Image:
        """The preview of latents; of a video the frame in the middle.

        Args:
            latents: best those that `estimate_clean_latents` gives.
            size: (width, height) of the picture in pixels.

        Raises:
            ModelError: if the latents are not laid out as those that were fitted.
            StateError: before the first `fit`.
        """
        if not self.num_pictures:
            raise StateError("there is no preview before a picture was fitted")
        grids, side = self._arrange_grids(latents, size)
        grid = grids[len(grids) // 2]
        if grid.shape[-1] + 1 != self._squares.shape[0]:
            raise ModelError(f"latents have {grid.shape[-1]} channels, and {self._squares.shape[0] - 1} were fitted")
        if self._weights is None:
            self._weights = _solve_ridge(self._squares, self._products)
        colors = (_append_ones(grid) @ self._weights).reshape(*grid.shape[:2], side, side, 3)
        picture = colors.permute(0, 2, 1, 3, 4).reshape(grid.shape[0] * side, grid.shape[1] * side, 3)
        octets = (picture * 255).round().clamp(0, 255).to(torch.uint8).numpy()
        return Image.fromarray(octets).resize(size, Image.Resampling.BICUBIC)

    def _arrange_grids(self, latents: Tensor, size: tuple[int, int]) -> tuple[list[Tensor], int]:
        """The latents of each frame as `[h, w, C]`, and how many colours a pixel of them has in each direction."""
        latents, (width, height) = latents.detach().double().cpu(), size
        if latents.ndim not in (3, 4, 5) or latents.shape[0] != 1:
            raise ModelError(f"latents {list(latents.shape)} are not those of one picture; give one row of a batch")
        if latents.ndim == 4:
            return [latents[0].permute(1, 2, 0)], 1
        if latents.ndim == 5:
            frames_first = latents.shape[1] != self._channels and latents.shape[2] == self._channels
            return list(latents[0].permute(0, 2, 3, 1) if frames_first else latents[0].permute(1, 2, 3, 0)), 1
        tokens = latents.shape[1]
        rows = round((tokens * height / width) ** 0.5)
        if rows < 1 or tokens % rows:
            raise ModelError(f"{tokens} tokens have no grid of {width}x{height} pixels")
        return [latents[0].reshape(rows, tokens // rows, -1)], PACKED_SIDE


class CallPreviews:
    """The previews of one call: which latents they need, and what becomes of these.

        previews = CallPreviews(decoder, pipe.scheduler, {4, 9}, (1024, 1024), show)
        runner(..., watch=StepWatch(on_latents=previews.take_latents, latents_at=previews.latents_at))

    Args:
        decoder: the map of the pipeline's VAE.
        scheduler: the pipeline's.
        steps: after which a preview is wanted; also the last one, for `last_latents`.
        size: (width, height) of the pictures in pixels.
        on_preview: called with (step, a preview of each picture) where the decoder was fitted before.

    Attributes:
        latents_at: the steps after which the latents are needed.
        last_latents: those that came last, of all pictures.
        last_step: the step after which they came; -1 before.
    """

    def __init__(
        self,
        decoder: PreviewDecoder,
        scheduler: Any,
        steps: Collection[int],
        size: tuple[int, int],
        on_preview: Callable[[int, list[Image.Image]], None],
    ) -> None:
        self._decoder, self._scheduler, self._steps = decoder, scheduler, frozenset(steps)
        self._size = size
        self._on_preview = on_preview
        before = {step - 1 for step in steps if step > 0} if can_estimate_clean(scheduler) else set()
        self.latents_at = self._steps | before
        self.last_latents: Tensor | None = None
        self.last_step = -1

    def take_latents(self, step: int, latents: Tensor) -> None:
        """Takes the latents after a step, and shows what is to be shown of them."""
        before = self.last_latents
        last = self.last_step
        self.last_latents = latents.detach().clone()
        self.last_step = step
        if step not in self._steps or not self._decoder.num_pictures:
            return
        clean = latents
        if before is not None and last == step - 1 and can_estimate_clean(self._scheduler):
            clean = estimate_clean_latents(self._scheduler, step, before, latents)
        # Some classes draw another size than they were asked for: then there is no preview, and the picture goes on.
        with suppress(ModelError):
            self._on_preview(step, [self._decoder.decode(row[None], self._size) for row in clean])


def can_estimate_clean(scheduler: Any) -> bool:
    """Whether it is known how a scheduler mixes pictures with noise, and its steps add none."""
    config = scheduler.config
    adds_noise = config.get("stochastic_sampling") or str(config.get("algorithm_type")).startswith("sde")
    is_known = _mixes_linearly(scheduler) or hasattr(scheduler, "_sigma_to_alpha_sigma_t")
    return is_known and not adds_noise and getattr(scheduler, "order", 1) == 1


def estimate_clean_latents(scheduler: Any, step: int, before: Tensor, after: Tensor) -> Tensor:
    """The latents without noise that the line through two successive latents leads to.

    Args:
        scheduler: one that `can_estimate_clean`, with the sigmas of the call.
        step: the step between them, counted from 0.
        before, after: the latents, of any layout.
    """
    at = step + (getattr(scheduler, "begin_index", None) or 0)
    sigmas = scheduler.sigmas.double().cpu()[at : at + 2]
    if len(sigmas) < 2:
        return after
    if _mixes_linearly(scheduler):
        scales = 1 - sigmas
        noises = sigmas
    else:  # sigmas are those of latents whose picture has the scale 1
        scales = (1 + sigmas**2) ** -0.5
        noises = sigmas * scales
    divisor = float(noises[1] * scales[0] - noises[0] * scales[1])
    if divisor == 0:
        return after
    return (before.double() * float(noises[1]) - after.double() * float(noises[0])) / divisor


def _mixes_linearly(scheduler: Any) -> bool:
    """Whether latents are `(1 - sigma) * clean + sigma * noise`, as in flow matching."""
    config = scheduler.config
    return (
        type(scheduler).__name__.startswith("FlowMatch")
        or bool(config.get("use_flow_sigmas"))
        or config.get("prediction_type") == "flow_prediction"
    )


def _append_ones(grid: Tensor) -> Tensor:
    """Latents `[h, w, C]` as rows `[h * w, C + 1]` of a regression with a constant."""
    rows = grid.reshape(-1, grid.shape[-1])
    return torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1)


def _average_colors(picture: Image.Image, grid: Tensor, side: int) -> Tensor:
    """The mean colours `[h * w, side * side * 3]`, from 0 to 1, of a picture below each pixel of its latents."""
    rows, columns = grid.shape[:2]
    small = picture.convert("RGB").resize((columns * side, rows * side), Image.Resampling.BOX)
    colors = torch.from_numpy(np.array(small)).double() / 255
    return colors.reshape(rows, side, columns, side, 3).permute(0, 2, 1, 3, 4).reshape(rows * columns, -1)


def _solve_ridge(squares: Tensor, products: Tensor) -> Tensor:
    """The weights `[C + 1, colours]` of a ridge regression, whose constant is free."""
    count = squares[-1, -1]
    mean = squares[-1, :-1] / squares[-1, -1]
    mean_color = products[-1] / squares[-1, -1]
    covariance = squares[:-1, :-1] / count - torch.outer(mean, mean)
    ridge = RIDGE * covariance.diagonal().mean().clamp(min=1e-12) * torch.eye(len(covariance), dtype=torch.float64)
    weights = torch.linalg.solve(covariance + ridge, products[:-1] / count - torch.outer(mean, mean_color))
    return torch.cat([weights, (mean_color - mean @ weights)[None]])

"""Previews of running latents by a linear map from latents to colours, which is fitted while images are generated.

The colours of an image are nearly a linear function of its latents, pixel of the latents by pixel. The map of a VAE is
fitted by ridge regression from the final latents of calls and their images, so it needs neither an encoder nor a call
of the decoder. Running latents are mostly noise; the image that the model expects is where the line through two
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

# The ridge relative to the mean variance of a latent channel: it matters where an image has few latent pixels.
RIDGE = 1e-3
# The colours that a token of packed latents has in each direction.
PACKED_SIDE = 2
# Latent pixels that the map is fitted to, the newest.
MAX_ROWS = 2**16


class PreviewDecoder:
    """The linear map of one VAE, as far as it has been fitted.

    Latents are of one image: `[1, C, h, w]`, `[1, C, F, h, w]` and `[1, F, C, h, w]` of a video, or packed
    `[1, N, C]`, each token of which has 2x2 colours.

    Args:
        channels: of the latents of the VAE; only to tell `[1, C, F, h, w]` from `[1, F, C, h, w]`.

    Attributes:
        num_images: to how many images it was fitted.
    """

    def __init__(self, channels: int | None = None) -> None:
        self._channels = channels
        self.num_images = 0
        # Latent pixels [rows, C + 1] with a 1 for the constant, and the colours below them [rows, side * side * 3].
        self._inputs = torch.zeros(0, 0, dtype=torch.float64)
        self._colors = torch.zeros(0, 0, dtype=torch.float64)
        self._weights = torch.zeros(0, 0, dtype=torch.float64)

    def fit(self, latents: Tensor, image: Image.Image | Sequence[Image.Image]) -> None:
        """Fits the map to one more image.

        Args:
            latents: the final ones, from which the image was decoded.
            image: of any size; all frames of a video.

        Raises:
            ModelError: if the latents have an unknown layout.
        """
        frames = [image] if isinstance(image, Image.Image) else image
        grids, side = self._arrange_grids(latents, frames[0].size)
        if side > 1 and len(frames) > 1:
            raise ModelError("latents of a video that are packed into tokens have no known grid")
        num_inputs = grids[0].shape[2] + 1
        if self._inputs.shape[1] != num_inputs:
            self._inputs = torch.zeros(0, num_inputs, dtype=torch.float64)
            self._colors = torch.zeros(0, 3 * side * side, dtype=torch.float64)
        # A latent frame holds several frames, except for the first; it is compared with the last of them.
        stride = (len(frames) - 1) / max(len(grids) - 1, 1)
        for index, grid in enumerate(grids):
            colors = _average_colors(frames[round(index * stride)], grid, side)
            self._inputs = torch.cat([self._inputs, _append_ones(grid)])[-MAX_ROWS:]
            self._colors = torch.cat([self._colors, colors])[-MAX_ROWS:]
        # The ridge is equations of its own: each weight times a small number is zero. The constant is free.
        variances = self._inputs[:, :-1].var(dim=0, correction=0)
        strength = RIDGE * len(self._inputs) * variances.mean().clamp(min=1e-12)
        ridge = strength.sqrt() * torch.eye(num_inputs, dtype=torch.float64)
        ridge[-1, -1] = 0
        zeros = self._colors.new_zeros(num_inputs, self._colors.shape[1])
        equations = torch.cat([self._inputs, ridge])
        targets = torch.cat([self._colors, zeros])
        self._weights = torch.linalg.lstsq(equations, targets).solution
        self.num_images += 1

    def decode(self, latents: Tensor, size: tuple[int, int]) -> Image.Image:
        """The preview of latents; of a video the frame in the middle.

        Args:
            latents: best the result of `estimate_clean_latents`.
            size: (width, height) of the image in pixels.

        Raises:
            ModelError: if the layout of the latents is not the one that was fitted.
            StateError: before the first `fit`.
        """
        if not self.num_images:
            raise StateError("there is no preview before an image was fitted")
        grids, side = self._arrange_grids(latents, size)
        grid = grids[len(grids) // 2]
        rows, columns, channels = grid.shape
        num_fitted = len(self._weights) - 1
        if channels != num_fitted:
            raise ModelError(f"latents have {channels} channels, and {num_fitted} were fitted")
        colors = _append_ones(grid) @ self._weights
        # From the colours of each latent pixel to rows of the image.
        colors = colors.reshape(rows, columns, side, side, 3)
        colors = colors.permute(0, 2, 1, 3, 4)
        pixels = colors.reshape(rows * side, columns * side, 3) * 255
        pixels = pixels.round().clamp(0, 255).to(torch.uint8)
        return Image.fromarray(pixels.numpy()).resize(size, Image.Resampling.BICUBIC)

    def _arrange_grids(self, latents: Tensor, size: tuple[int, int]) -> tuple[list[Tensor], int]:
        """The latents of each frame as `[h, w, C]`, and how many colours a latent pixel has in each direction."""
        is_single = latents.shape[0] == 1
        if latents.ndim not in (3, 4, 5) or not is_single:
            raise ModelError(f"latents {list(latents.shape)} are not of one image; give one row of a batch")
        latents = latents[0].detach().double().cpu()
        if latents.ndim == 3:
            return [latents.permute(1, 2, 0)], 1
        if latents.ndim == 4:
            # Wan and others have the channels first; CogVideoX has the frames first.
            first, second = latents.shape[:2]
            if first != self._channels and second == self._channels:
                return list(latents.permute(0, 2, 3, 1)), 1
            return list(latents.permute(1, 2, 3, 0)), 1
        width, height = size
        tokens = latents.shape[0]
        rows = round((tokens * height / width) ** 0.5)
        if rows < 1 or tokens % rows:
            raise ModelError(f"{tokens} tokens have no grid of {width}x{height} pixels")
        return [latents.reshape(rows, tokens // rows, -1)], PACKED_SIDE


class CallPreviews:
    """The previews of one call: which latents they need, and what becomes of these.

        previews = CallPreviews(decoder, pipe.scheduler, {4, 9}, (1024, 1024), show)
        runner(..., watch=StepWatch(on_latents=previews.take_latents, latents_at=previews.latents_at))

    Args:
        decoder: the map of the pipeline's VAE.
        scheduler: the pipeline's.
        steps: after which there is a preview; also the last one, for `last_latents`.
        size: (width, height) of the images in pixels.
        on_preview: called with (step, a preview of each image) if the decoder was fitted before.

    Attributes:
        latents_at: the steps after which the latents are needed.
        last_latents: those that came last, of all images.
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
        self._decoder = decoder
        self._scheduler = scheduler
        self._steps = frozenset(steps)
        self._size = size
        self._on_preview = on_preview
        self._estimates = can_estimate_clean(scheduler)
        self.latents_at = self._steps
        if self._estimates:
            # The line needs the latents of the step before, too.
            self.latents_at |= {step - 1 for step in steps if step > 0}
        self.last_latents: Tensor | None = None
        self.last_step = -1

    def take_latents(self, step: int, latents: Tensor) -> None:
        """Takes the latents after a step, and shows a preview of them if one is due."""
        previous = None
        if self.last_step == step - 1 and self._estimates:
            previous = self.last_latents
        self.last_latents = latents.detach().clone()
        self.last_step = step
        if step not in self._steps or not self._decoder.num_images:
            return
        clean = latents
        if previous is not None:
            clean = estimate_clean_latents(self._scheduler, step, previous, latents)
        # Some classes generate another size than they were asked for: then there is no preview, and the call goes on.
        with suppress(ModelError):
            images = [self._decoder.decode(row[None], self._size) for row in clean]
            self._on_preview(step, images)


def can_estimate_clean(scheduler: Any) -> bool:
    """Whether it is known how a scheduler mixes images with noise, and its steps add none."""
    config = scheduler.config
    if config.get("stochastic_sampling"):
        return False
    if str(config.get("algorithm_type")).startswith("sde"):
        return False
    # Between two latents, a scheduler of a higher order makes more than one step.
    if getattr(scheduler, "order", 1) != 1:
        return False
    return _mixes_linearly(scheduler) or hasattr(scheduler, "_sigma_to_alpha_sigma_t")


def estimate_clean_latents(scheduler: Any, step: int, before: Tensor, after: Tensor) -> Tensor:
    """The latents without noise to which the line through two successive latents leads.

    Args:
        scheduler: one that `can_estimate_clean`, with the sigmas of the call.
        step: the step between them, counted from 0.
        before, after: the latents, of any layout.
    """
    # A call that starts from an image begins at a later sigma.
    index = step + (getattr(scheduler, "begin_index", None) or 0)
    sigmas = scheduler.sigmas.double().cpu()[index : index + 2]
    if len(sigmas) < 2:
        return after
    if _mixes_linearly(scheduler):
        scales = 1 - sigmas
        noises = sigmas
    else:
        # diffusers keeps the sigmas of latents whose image has the scale 1.
        scales = (1 + sigmas**2) ** -0.5
        noises = sigmas * scales
    scale_before, scale_after = map(float, scales)
    noise_before, noise_after = map(float, noises)
    divisor = noise_after * scale_before - noise_before * scale_after
    if divisor == 0:
        return after
    return (before.double() * noise_after - after.double() * noise_before) / divisor


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
    rows = grid.flatten(0, 1)
    return torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1)


def _average_colors(image: Image.Image, grid: Tensor, side: int) -> Tensor:
    """The mean colours `[h * w, side * side * 3]`, from 0 to 1, of an image below each of its latent pixels."""
    rows, columns, _ = grid.shape
    size = (columns * side, rows * side)
    small = image.convert("RGB").resize(size, Image.Resampling.BOX)
    colors = torch.from_numpy(np.array(small)).double() / 255
    # From rows of the image to the side x side colours of each latent pixel.
    colors = colors.reshape(rows, side, columns, side, 3)
    colors = colors.permute(0, 2, 1, 3, 4)
    return colors.reshape(rows * columns, -1)

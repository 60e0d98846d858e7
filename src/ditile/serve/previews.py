"""Previews of running latents: a linear map from latents to colours, fitted by least squares to the last images.

The colours below a latent pixel are nearly a linear function of its channels, so a preview needs no call of the VAE.
Running latents are mostly noise. A step goes from `a0 * clean + s0 * noise` to `a1 * clean + s1 * noise`, so two
successive latents give `clean`, the image that the model expects.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ditile.plan.errors import ModelError

# With few latent pixels, singular values below this share of the largest are noise, and are left out.
CUTOFF = 1e-2
# The map is fitted to this many of the newest latent pixels.
MAX_ROWS = 2**16
# These schedulers add noise in each step, though nothing in their configs says so.
NOISY_SCHEDULERS = frozenset({"FlowMatchLCMScheduler", "SASolverScheduler"})


class PreviewDecoder:
    """The linear map of one VAE, fitted to the images so far.

    Latents are of one image `[1, C, h, w]`, of one video `[1, C, F, h, w]` or `[1, F, C, h, w]`, or packed `[1, N, C]`,
    where each token has 2x2 colours.

    Args:
        channels: the channels of the VAE's latents, only to tell `[1, C, F, h, w]` from `[1, F, C, h, w]`.
    """

    def __init__(self, channels: int | None = None) -> None:
        self._channels = channels
        # Latent pixels [rows, C + 1] with a 1 for the constant, and the colours below them [rows, side * side * 3].
        self._inputs = torch.zeros(0, 0)
        self._colors = torch.zeros(0, 0)
        self._weights = torch.zeros(0, 0)

    def fit(self, latents: Tensor, image: Image.Image | Sequence[Image.Image]) -> None:
        """Fit the map to one more image.

        Args:
            latents: the final latents of the image; `ModelError` is raised if their layout is unknown.
            image: the decoded image in any size, or all frames of a video.
        """
        frames = [image] if isinstance(image, Image.Image) else image
        grids, side = self._arrange_grids(latents, frames[0].size)
        if side > 1 and len(frames) > 1:
            raise ModelError("latents of a video that are packed into tokens have no known grid")
        num_inputs = grids[0].shape[2] + 1
        if self._inputs.shape[1] != num_inputs:
            self._inputs = torch.zeros(0, num_inputs, dtype=torch.float64)
            self._colors = torch.zeros(0, 3 * side * side, dtype=torch.float64)
        # Each latent frame after the first stands for several frames: it is fitted to the last of them.
        stride = (len(frames) - 1) / max(len(grids) - 1, 1)
        for index, grid in enumerate(grids):
            rows, columns, _ = grid.shape
            frame = frames[round(index * stride)].convert("RGB")
            # The mean colours, from 0 to 1, below each latent pixel: [h * w, side * side * 3].
            small = frame.resize((columns * side, rows * side), Image.Resampling.BOX)
            colors = torch.from_numpy(np.array(small)).double() / 255
            colors = colors.reshape(rows, side, columns, side, 3).permute(0, 2, 1, 3, 4).reshape(rows * columns, -1)
            self._inputs = torch.cat([self._inputs, _append_ones(grid)])[-MAX_ROWS:]
            self._colors = torch.cat([self._colors, colors])[-MAX_ROWS:]
        self._weights = torch.linalg.lstsq(self._inputs, self._colors, rcond=CUTOFF, driver="gelsd").solution

    def decode(self, latents: Tensor, size: tuple[int, int]) -> Image.Image:
        """Return the preview of latents; for a video, of the frame in the middle.

        Args:
            latents: preferably the result of `estimate_clean_latents`.
            size: (width, height) of the image in pixels.

        Raises:
            ModelError: if the map was not fitted to this layout of latents.
        """
        grids, side = self._arrange_grids(latents, size)
        grid = grids[len(grids) // 2]
        rows, columns, channels = grid.shape
        if channels + 1 != len(self._weights):
            raise ModelError(f"no image of latents with {channels} channels was fitted")
        colors = (_append_ones(grid) @ self._weights).reshape(rows, columns, side, side, 3)
        pixels = colors.permute(0, 2, 1, 3, 4).reshape(rows * side, columns * side, 3) * 255
        picture = Image.fromarray(pixels.round().clamp(0, 255).to(torch.uint8).numpy())
        return picture.resize(size, Image.Resampling.BICUBIC)

    def _arrange_grids(self, latents: Tensor, size: tuple[int, int]) -> tuple[list[Tensor], int]:
        """Return the latents of each frame as `[h, w, C]`, and how many colours a latent pixel has per direction."""
        if latents.ndim not in (3, 4, 5) or latents.shape[0] != 1:
            raise ModelError(f"latents {list(latents.shape)} are not of one image; give one row of a batch")
        latents = latents[0].detach().double().cpu()
        if latents.ndim == 3:
            return [latents.permute(1, 2, 0)], 1
        if latents.ndim == 4:
            # Wan and others have the channels first; CogVideoX has the frames first.
            first_size, second_size = latents.shape[:2]
            if first_size != self._channels and second_size == self._channels:
                latents = latents.transpose(0, 1)
            return list(latents.permute(1, 2, 3, 0)), 1
        width, height = size
        num_tokens = latents.shape[0]
        rows = round((num_tokens * height / width) ** 0.5)
        if rows < 1 or num_tokens % rows:
            raise ModelError(f"{num_tokens} tokens have no grid of {width}x{height} pixels")
        return [latents.reshape(rows, num_tokens // rows, -1)], 2


class CallPreviews:
    """The previews of one call, made from the latents after some steps.

        previews = CallPreviews(decoder, pipe.scheduler, {4, 9, 19}, (1024, 1024), show)
        runner(..., watch=StepWatch(on_latents=previews.take_latents, latents_at=previews.latents_at))

    Args:
        steps: the steps, counted from 0, after which a preview is made. The last step is among them, as `fit` needs
            its latents.
        size: (width, height) of the images in pixels.
        on_preview: called with (step, a preview of the first image) if the decoder was fitted before.

    Attributes:
        latents_at: the steps after which the latents are needed.
        last_latents: the latest latents of all images.
        last_step: the step of the latest latents; -1 before the first.
    """

    def __init__(
        self,
        decoder: PreviewDecoder,
        scheduler: Any,
        steps: Collection[int],
        size: tuple[int, int],
        on_preview: Callable[[int, Image.Image], None],
    ) -> None:
        self._decoder = decoder
        self._scheduler = scheduler
        self._steps = frozenset(steps)
        self._size = size
        self._on_preview = on_preview
        self.latents_at = self._steps
        if can_estimate_clean(scheduler):
            # The estimate needs the latents of the step before, too.
            self.latents_at |= {step - 1 for step in steps if step > 0}
        self.last_latents: Tensor | None = None
        self.last_step = -1

    def take_latents(self, step: int, latents: Tensor) -> None:
        """Take the latents after a step, and show a preview of them if one is due."""
        clean = latents
        if self.last_latents is not None and self.last_step == step - 1 and can_estimate_clean(self._scheduler):
            clean = estimate_clean_latents(self._scheduler, step, self.last_latents, latents)
        self.last_latents = latents.detach().clone()
        self.last_step = step
        if step not in self._steps:
            return
        try:
            image = self._decoder.decode(clean[:1], self._size)
        except ModelError:
            # Nothing was fitted yet, or the pipeline draws another size than was asked for: there is no preview.
            return
        self._on_preview(step, image)


def can_estimate_clean(scheduler: Any) -> bool:
    """Return whether it is known how a scheduler mixes images with noise, and that its steps add no noise."""
    config = scheduler.config
    if type(scheduler).__name__ in NOISY_SCHEDULERS:
        return False
    adds_noise = config.get("stochastic_sampling") or str(config.get("algorithm_type")).startswith("sde")
    # A scheduler of a higher order makes more than one step between two latents.
    if adds_noise or getattr(scheduler, "order", 1) != 1:
        return False
    return type(scheduler).__name__.startswith("FlowMatch") or hasattr(scheduler, "_sigma_to_alpha_sigma_t")


def estimate_clean_latents(scheduler: Any, step: int, before: Tensor, after: Tensor) -> Tensor:
    """Extrapolate the line through two successive latents to where there is no noise.

    Args:
        scheduler: the scheduler of the call with its sigmas; `can_estimate_clean` must be true for it.
        step: the step between them, counted from 0.
        before, after: the latents, of any layout.
    """
    # A call that starts from an image begins at a later sigma.
    index = step + (getattr(scheduler, "begin_index", None) or 0)
    sigmas = scheduler.sigmas.double().cpu()[index : index + 2]
    if len(sigmas) < 2:
        return after
    # In flow matching latents are `(1 - sigma) * clean + sigma * noise`; other schedulers know their own scales.
    image_scales, noise_scales = 1 - sigmas, sigmas
    if hasattr(scheduler, "_sigma_to_alpha_sigma_t"):
        image_scales, noise_scales = scheduler._sigma_to_alpha_sigma_t(sigmas)
    divisor = float(noise_scales[1] * image_scales[0] - noise_scales[0] * image_scales[1])
    if divisor == 0:
        return after
    return (before.double() * float(noise_scales[1]) - after.double() * float(noise_scales[0])) / divisor


def _append_ones(grid: Tensor) -> Tensor:
    """Return latents `[h, w, C]` as rows `[h * w, C + 1]` of a regression with a constant."""
    rows = grid.flatten(0, 1)
    return torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1)

"""SeaCache: the change of the latents decides, after a filter like that of the denoiser (arXiv 2602.18993).

Latents are a x clean + b x noise. If clean images have the power S = 1 / |f|^p at frequency f, the best linear denoiser
has the gain a S / (a^2 S + b^2) on each axis, and the gain of a grid is the product over its axes, divided by its mean.
The filtered latents of a step are compared with those of the step before, computed or not. Relative differences add up,
and where their sum reaches a threshold a step computes and the sum begins again. Otherwise what all blocks add is taken
from the line through the last two computed steps.

As in diffusers the latents themselves are filtered. All ranks that split tokens, heads or guidance have them whole, so
only one number is sent for each image: the first rank's, which decides for all, because rounding may differ. Under
PipeFusion each patch is decided by its own rows, and the first stage sends the decisions on, one byte for each patch.

Cost: the filtered latents of one step and two residuals are kept; 8 bytes are sent for each image and branch.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import Field

from ditile.cache.config import Amount, BlockCacheConfig, Calibration, Count, DBCacheConfig, TaylorSeerCalibratorConfig
from ditile.plan.errors import ModelError
from ditile.plan.option_classes import checked

if TYPE_CHECKING:
    from torch import Tensor

    from ditile.cache.unit_decision import CacheCall

TINY = 1e-16
"""A term that keeps a quotient finite, as in the authors' code."""
LEAST_NOISE = 1e-6
"""The smallest share of noise, and of the image."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SeaCacheConfig(BlockCacheConfig):
    """SeaCache: a step is left out while the filtered latents change little.

    Attributes:
        threshold: a step computes where the sum of relative differences since the last computed step reaches this; 0
            leaves nothing out.
        residual_order: 1 continues the line through the last two computed steps, 0 takes the last one.
        retention_steps: the first steps, which compute.
        cache_end_steps: the last steps, which compute.
        max_consecutive_cached: the limit of steps in a row that are left out; 0 sets none.
        power_exp: p of the power 1 / |f|^p of clean images; None is 3 for latents with frames and 2 for others.

    Other attributes are as in `BlockCacheConfig`; names and defaults are as in diffusers.

    Raises:
        ModelError: if a field is not known, or a value is out of its range.
    """

    WORDS = {
        "sea": "threshold",
        "order": "residual_order",
        "W": "retention_steps",
        "end": "cache_end_steps",
        "MC": "max_consecutive_cached",
        "p": "power_exp",
    }
    HINT = "lower retention_steps or cache_end_steps"
    HAS_FORECAST = True

    threshold: Amount = 0.25
    residual_order: Annotated[int, Field(ge=0, le=1)] = 1
    retention_steps: Count = 1
    cache_end_steps: Count = 1
    max_consecutive_cached: Count = 2
    power_exp: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    @checked()
    def resolve_for(self, steps: int, calibrator: Calibration | None) -> tuple[DBCacheConfig, Calibration | None]:
        """Return rules for `steps` steps, with the threshold as a budget, and a line in place of the `calibrator`."""
        # A short generation may have no step between the first and the last steps.
        num_first = min(self.retention_steps, steps)
        num_last = min(self.cache_end_steps, steps - num_first)
        rules = DBCacheConfig(
            Fn_compute_blocks=0,
            # Only the budget decides; without one nothing is left out.
            residual_diff_threshold=float(self.threshold > 0),
            max_accumulated_residual_diff_threshold=self.threshold,
            accumulated_resets=True,
            max_warmup_steps=num_first,
            steps_computation_mask=[1] * num_first + [0] * (steps - num_first - num_last) + [1] * num_last,
            max_continuous_cached_steps=self.max_consecutive_cached or -1,
            couple=self.couple,
            store_dtype=self.store_dtype,
        )
        line = TaylorSeerCalibratorConfig(taylorseer_order=self.residual_order, enable_encoder_calibrator=False)
        return rules, line


class LatentGrid(NamedTuple):
    """The positions of an image's axes in latents.

    Attributes:
        shape: the shape of the grid, as (frames, rows, columns) or (rows, columns), if latents are packed as tokens
            `[B, tokens, C]`, the image first; None if latents have the axes already.
        dims: the dimensions of the axes in the unpacked latents, rows and columns last.
    """

    shape: tuple[int, ...] | None
    dims: tuple[int, ...]


class SpectralFeature:
    """The filtered latents of a call, which SeaCache compares."""

    def __init__(self, config: SeaCacheConfig) -> None:
        self._power = config.power_exp
        # Positions may be on the device, so they are read once.
        self._grids: dict[Hashable, LatentGrid] = {}

    def list_parts(self, call: CacheCall) -> list[tuple[int, Tensor]]:
        """List the latents by patch, each filtered by itself, with the rows of the batch first."""
        # The import is here because the settings are read where torch is missing.
        import torch

        if call.kind not in self._grids:
            self._grids[call.kind] = _find_latent_grid(call)
        grid = self._grids[call.kind]
        # Each rank has all latents, even if it computes only some of the tokens.
        latents: Tensor = call.sample
        if isinstance(call.sample, list | tuple):
            # A list has images of one size.
            latents = torch.stack(list(call.sample))
        elif grid.shape is not None:
            # Tokens of references come after those of the image, and are cut off.
            latents = latents[:, : math.prod(grid.shape)].unflatten(1, grid.shape)
        power = self._power
        if power is None:
            has_frames = len(grid.dims) == 3 and latents.shape[grid.dims[0]] > 1
            power = 3.0 if has_frames else 2.0
        levels = read_noise_level(call.scheduler, call.moment.step)
        rows = latents.shape[grid.dims[-2]]
        parts = []
        for patch, (start, stop, count) in zip(call.moment.patches, call.moment.row_spans(), strict=True):
            # A row of tokens is one or more rows of latents.
            first_row = start * rows // count
            num_rows = stop * rows // count - first_row
            patch_rows = latents.narrow(grid.dims[-2], first_row, num_rows)
            parts.append((patch, filter_latents(patch_rows, grid.dims, levels, power)))
        return parts


def filter_latents(latents: Tensor, dims: Sequence[int], levels: tuple[float, float], power: float) -> Tensor:
    """Apply the best linear denoiser to latents, in float32 at least.

    Args:
        latents: `[B, ..]`.
        dims: the axes of an image.
        levels: the amounts a, b of image and noise.
        power: p of the power 1 / |f|^p of clean images.
    """
    # The import is here because the settings are read where torch is missing.
    import torch

    signal, noise = levels
    # Half precision has no Fourier transform on a CPU.
    wide = latents.to(torch.promote_types(latents.dtype, torch.float32))
    gain = wide.new_ones(())
    for dim in dims:
        length = wide.shape[dim]
        frequencies = torch.fft.fftfreq(length, device=wide.device, dtype=wide.dtype)
        # The power has no bound at frequency 0, which is the mean of an image.
        clean = 1 / (frequencies.abs() ** power + TINY)
        axis_gain = signal * clean / (signal**2 * clean + noise**2 + TINY)
        shape = [1] * wide.ndim
        shape[dim] = length
        gain = gain * axis_gain.view(shape)
    # The mean gain is 1, so that differences in early and late steps can be compared.
    gain = gain / gain.mean()
    spectrum: Tensor = torch.fft.fftn(wide, dim=dims) * gain
    filtered: Tensor = torch.fft.ifftn(spectrum, dim=dims).real
    return filtered


def read_noise_level(scheduler: Any, step: int) -> tuple[float, float]:
    """Return the amounts a, b of image and noise in the latents of a step, a x clean + b x noise.

    Raises:
        ModelError: if the scheduler has neither alphas nor sigmas.
    """
    # Image-to-image pipelines begin in the middle of the timesteps.
    step += getattr(scheduler, "begin_index", None) or 0
    settings = getattr(scheduler, "config", {})
    is_flow = settings.get("use_flow_sigmas") or settings.get("prediction_type") == "flow_prediction"
    # A scheduler that is set to flow may still have the alphas of another process.
    products = getattr(scheduler, "alphas_cumprod", None)
    if products is not None and not is_flow:
        share = float(products[int(scheduler.timesteps[step])])
        share = min(max(share, LEAST_NOISE), 1 - LEAST_NOISE)
        return share**0.5, (1 - share) ** 0.5
    sigmas = getattr(scheduler, "sigmas", None)
    if sigmas is None:
        raise ModelError(
            f"SeaCacheConfig needs the noise in each step, and a scheduler of class {type(scheduler).__name__} does "
            "not say it; use MagCacheConfig, SpectrumConfig or DBCacheConfig"
        )
    sigma = min(max(float(sigmas[step]), LEAST_NOISE), 1 - LEAST_NOISE)
    return 1 - sigma, sigma


def _find_latent_grid(call: CacheCall) -> LatentGrid:
    """Find the axes in the latents of a call. Raises `ModelError` if they are not known."""
    sample = call.sample
    if isinstance(sample, list | tuple) and len({latents.shape for latents in sample}) == 1:
        # A list of images `[C, F, H, W]`.
        return LatentGrid(None, tuple(range(2, sample[0].ndim + 1)))
    if getattr(sample, "ndim", 0) == 4:
        return LatentGrid(None, (2, 3))
    if getattr(sample, "ndim", 0) == 5:
        channels = getattr(getattr(call.model, "config", None), "in_channels", None)
        # CogVideoX has the frames first, and others the channels.
        if sample.shape[1] != channels and sample.shape[2] == channels:
            return LatentGrid(None, (1, 3, 4))
        return LatentGrid(None, (2, 3, 4))
    # The latents are tokens, so only the model's other inputs say where a row ends.
    shape = None
    if getattr(sample, "ndim", 0) == 3:
        shape = _read_packed_shape(call.inputs)
    if shape is None:
        raise ModelError(
            f"SeaCacheConfig filters rows and columns, and those of the latents of {type(call.model).__name__} are not "
            "known; use MagCacheConfig, SpectrumConfig or DBCacheConfig"
        )
    return LatentGrid(shape, tuple(range(1, len(shape) + 1)))


def _read_packed_shape(inputs: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Read the grid of the image in packed latents from the model's inputs. None where it is not known."""
    if inputs.get("img_shapes"):
        # Each row of the batch has an entry; in an edit the entry is a list, of the image's shape and the references'.
        shape = inputs["img_shapes"][0]
        if isinstance(shape[0], list | tuple):
            shape = shape[0]
        return tuple(map(int, shape))
    # LTX-Video gives the lengths of the grid.
    if all(isinstance(inputs.get(name), int) for name in ("num_frames", "height", "width")):
        return inputs["num_frames"], inputs["height"], inputs["width"]
    ids = inputs.get("img_ids")
    if ids is None:
        return None
    # Some pipelines give each row of the batch its own positions, which are equal.
    if ids.ndim == 3:
        ids = ids[0]
    # References have another number in the first column, or come after the last row.
    is_own = ids[:, 0] == ids[0, 0]
    own = ids[is_own.int().cumprod(0).bool()]
    # The tokens of the first row have its number in the second column.
    is_first_row = own[:, 1] == own[0, 1]
    columns = int(is_first_row.int().cumprod(0).sum())
    return len(own) // columns, columns

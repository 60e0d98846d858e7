"""Previews by a linear map that one finished picture teaches: how near they come to pictures of other prompts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchLCMScheduler,
    SASolverScheduler,
    UniPCMultistepScheduler,
)
from PIL import Image

import ditile
from ditile.plan.plan import Plan
from ditile.runner.callbacks import StepWatch
from ditile.runner.load import load
from ditile.runner.runner import Runner, parallelize
from ditile.serve.previews import CallPreviews, PreviewDecoder, can_estimate_clean, estimate_clean_latents
from tests.pool import Pool

PICTURES = [
    "a large yellow triangle above a large blue square on a brown gradient background",
    "a large blue circle to the right of a large red ring on a white gradient background",
]
VIDEOS = [
    "a large red circle moves from left to right on a gray background",
    "a large blue circle moves from left to right on a gray background",
]
EARLY = (1, 4, 9)
"""Steps of 20 whose previews come nearer to the picture one after the other."""


def draw_with_previews(
    runner: Runner, name: str, decoder: PreviewDecoder, prompt: str, seed: int
) -> tuple[Any, dict[int, Image.Image]]:
    """The picture or the frames, and the previews that were shown; the decoder is fitted to them afterwards."""
    call = ditile.defaults(name) | {"generator": torch.Generator().manual_seed(seed), "output_type": "pil"}
    size, last = (call["width"], call["height"]), call["num_inference_steps"] - 1
    shown: dict[int, Image.Image] = {}

    def show(step: int, preview: Image.Image) -> None:
        shown[step] = preview

    previews = CallPreviews(decoder, runner.pipe.scheduler, {*EARLY, last}, size, show)
    assert previews.latents_at == {*EARLY, last} | {0, 3, 8, last - 1}
    watch = StepWatch(on_latents=previews.take_latents, latents_at=previews.latents_at)
    picture = runner(prompt, watch=watch, **call)[0][0]
    if previews.last_latents is not None:
        decoder.fit(previews.last_latents, picture)
    return picture, shown


def measure_psnr(preview: Image.Image, picture: Image.Image) -> float:
    """In dB, between pictures of 32 by 32 means."""
    one, other = (np.asarray(x.resize((32, 32), Image.Resampling.BOX)) / 255.0 for x in (preview, picture))
    return float(-10 * np.log10(((one - other) ** 2).mean() + 1e-12))


def measure_previews(name: str, prompts: list[str], plan: dict[str, Any]) -> list[float]:
    """On a rank: dB of the previews of the last prompt, after the decoder was fitted to those before."""
    runner, decoder = parallelize(load(name), Plan(**plan), device="cpu"), PreviewDecoder()
    for seed, prompt in enumerate(prompts):
        picture, shown = draw_with_previews(runner, name, decoder, prompt, seed)
        assert shown or not seed or runner.mesh.rank
    frames = [picture] if isinstance(picture, Image.Image) else picture
    return [measure_psnr(shown[step], frames[len(frames) // 2]) for step in sorted(shown)]


MODELS = [("shapes-flux", PICTURES, 26), ("shapes-pixart", PICTURES, 28), ("shapes-wan", VIDEOS, 17)]
"""Models, prompts, and the least dB of the last preview. A plain video teaches few colours."""


@pytest.mark.parametrize(("name", "prompts", "least"), MODELS)
def test_previews_of_another_prompt(name: str, prompts: list[str], least: float) -> None:
    """A failure means that clients see noise or wrong colours while a picture is drawn."""
    *early, last = measure_previews(name, prompts, {})
    assert last > least and early == sorted(early) and early[0] > 15, (early, last)


def test_previews_under_a_plan(pool: Pool) -> None:
    """A failure means that previews of a divided model are made of patches of several steps, or on all ranks."""
    first, second = pool.run(measure_previews, 2, "shapes-flux", PICTURES, {"pipefusion": 2, "warmup": 1})
    assert len(first) == 4 and first[-1] > 22 and first == sorted(first) and not second, first


def mix_latents(scheduler: Any, step: int, clean: torch.Tensor, noise: torch.Tensor) -> list[torch.Tensor]:
    """The latents before and after a step of a model that knows the clean ones."""
    sigmas = scheduler.sigmas[step : step + 2].tolist()
    if isinstance(scheduler, FlowMatchEulerDiscreteScheduler) or scheduler.config.get("use_flow_sigmas"):
        return [(1 - sigma) * clean + sigma * noise for sigma in sigmas]
    return [(clean + sigma * noise) / (1 + sigma**2) ** 0.5 for sigma in sigmas]


@pytest.mark.parametrize(
    "scheduler",
    [
        FlowMatchEulerDiscreteScheduler(shift=3.0),
        DPMSolverMultistepScheduler(),
        UniPCMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction"),
    ],
    ids=lambda scheduler: type(scheduler).__name__,
)
def test_the_clean_latents_of_two_steps(scheduler: Any) -> None:
    """Where the line is straight the estimate is exact. A failure means previews of noise.

    Of schedulers that add noise there is none.
    """
    assert not can_estimate_clean(FlowMatchLCMScheduler()) and not can_estimate_clean(SASolverScheduler())
    scheduler.set_timesteps(num_inference_steps=10)
    clean, noise = torch.randn(2, 1, 4, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert can_estimate_clean(scheduler)
    for step in (0, 4, 8):
        estimate = estimate_clean_latents(scheduler, step, *mix_latents(scheduler, step, clean, noise))
        torch.testing.assert_close(estimate, clean, atol=1e-4, rtol=1e-4)
    scheduler.set_begin_index(3)
    estimate = estimate_clean_latents(scheduler, 1, *mix_latents(scheduler, 4, clean, noise))
    torch.testing.assert_close(estimate, clean, atol=1e-4, rtol=1e-4)


def paint(height: int, width: int, seed: int = 0) -> Image.Image:
    """A picture of random colours, each 8 by 8 pixels."""
    colors = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    return Image.fromarray(colors).resize((width, height), Image.Resampling.NEAREST)


def encode_colors(picture: Image.Image, side: int) -> torch.Tensor:
    """Latents `[1, 6, h, w]` that are a linear function of the colours of a picture."""
    small = picture.resize((picture.width // side, picture.height // side), Image.Resampling.BOX)
    mixing = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
    return torch.einsum("lc,hwc->lhw", mixing, torch.tensor(np.array(small)) / 127.5 - 1)[None]


def pack_tokens(latents: torch.Tensor) -> torch.Tensor:
    _, channels, rows, columns = latents.shape
    cut = latents.reshape(1, channels, rows // 2, 2, columns // 2, 2)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(1, rows * columns // 4, channels * 4)


LAYOUTS = {
    "picture": lambda latents: latents,
    "packed": pack_tokens,
    "frames behind channels": lambda latents: torch.stack([0 * latents, latents], dim=2),
    "frames before channels": lambda latents: torch.stack([0 * latents, latents], dim=1),
}


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_each_layout_gives_the_picture_back(layout: str) -> None:
    """Where colours are a linear function of latents. A failure means that rows, columns or frames are mixed up."""
    decoder, (picture, other) = PreviewDecoder(channels=6), (paint(128, 256), paint(64, 32, seed=1))
    frames = [Image.new("RGB", picture.size, (128, 128, 128)), picture]
    for _ in range(2):
        decoder.fit(LAYOUTS[layout](encode_colors(picture, 8)), frames if "frames" in layout else picture)
    preview = decoder.decode(LAYOUTS[layout](encode_colors(other, 8)), other.size)
    nearest = other.resize((4, 8), Image.Resampling.BOX).resize(other.size, Image.Resampling.BICUBIC)
    assert preview.size == other.size and measure_psnr(preview, nearest) > 30

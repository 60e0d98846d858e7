"""Decoded frames in the host's memory, on a simulated GPU: the same frames, and one chunk on the device.

A failure would mean other frames, a tensor on a device where the code after the decoder has none, or a video whose
frames together do not fit a device that each of them fits.
"""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from torch import Tensor

from ditile.parallel.vae.host_frames import HOSTED, install_host_frames
from tests.parallel.vae.test_video import CONFIGS, make
from tests.simulated_gpu.gpu import CALL, SimulatedGpu
from tests.simulated_gpu.messages import simulate_gpu

VIDEOS = [name for name, (kind, _) in CONFIGS.items() if kind in HOSTED]


def decode(name: str, latents: Tensor, *, hosted: bool, tiling: bool, slicing: bool = False) -> tuple[Tensor, int]:
    """The frames, and the most bytes that were alive on the device besides the weights."""
    vae = make(name)
    if tiling:
        vae.enable_tiling()
    if slicing:
        vae.enable_slicing()
    with simulate_gpu(SimulatedGpu()) as gpu, torch.no_grad(), ExitStack() as stack:
        vae = vae.to(gpu.device)
        latents = latents.to(gpu.device)
        if hosted:
            install_host_frames(stack, vae)
        gpu.record.enter_place(CALL)
        before = gpu.record.live_bytes
        frames = vae.decode(latents, return_dict=False)[0]
        assert frames.device.type == ("cpu" if hosted else "cuda")
        return frames.to("cpu"), gpu.record.peak_bytes - before


def make_latents(name: str, frames: int, rows: int, images: int = 1) -> Tensor:
    config = CONFIGS[name][1]
    channels = config.get("latent_channels") or config["z_dim"]
    return torch.randn(images, channels, frames, rows, 4, generator=torch.Generator().manual_seed(0))


def test_every_class_is_here() -> None:
    assert {CONFIGS[name][0] for name in VIDEOS} == HOSTED


@pytest.mark.parametrize("tiling", [False, True])
@pytest.mark.parametrize("name", VIDEOS)
def test_frames_are_the_same(name: str, tiling: bool) -> None:
    latents = make_latents(name, 4, 48 if tiling else 8)
    expected, most_before = decode(name, latents, hosted=False, tiling=tiling)
    found, most = decode(name, latents, hosted=True, tiling=tiling)
    assert torch.equal(found, expected)
    assert most <= most_before


@pytest.mark.parametrize("name", ["wan 2.1", "wan 2.2"])
def test_the_device_holds_one_chunk(name: str) -> None:
    """Whatever the number of frames; without it each of them stays there."""
    most = {}
    for frames in (4, 12):
        for hosted in (False, True):
            most[frames, hosted] = decode(name, make_latents(name, frames, 8), hosted=hosted, tiling=False)[1]
    # The latents are there at once.
    latents = make_latents(name, 8, 8)
    assert most[12, True] - most[4, True] <= 2 * latents.nbytes
    assert most[12, False] - most[4, False] > 10 * latents.nbytes


def test_each_image_of_a_batch_has_its_own_frames() -> None:
    latents = make_latents("wan 2.1", 3, 4, images=2)
    for slicing in (False, True):
        expected, _ = decode("wan 2.1", latents, hosted=False, tiling=False, slicing=slicing)
        assert torch.equal(decode("wan 2.1", latents, hosted=True, tiling=False, slicing=slicing)[0], expected)

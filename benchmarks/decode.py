"""The parallel VAE: seconds and peak memory of decoding one picture, undivided and by rows.

    python -m benchmarks.decode --ranks 1,2,4 --height 1024 --block-size 64

An `AutoencoderKL` of FLUX's layout and widths with random weights decodes in fp32, with one thread a rank. In each
round of N ranks, all decode their rows in blocks, then all decode their whole rows, then rank 0 decodes alone while the
others wait. The table has medians. "CPU" is the CPU time of the busiest rank. "live" is the most memory that all
tensors need at one time on the rank that needs most, counted exactly in a call of its own. "process" is the growth of
the process at the peak of the first call, with the memory that kernels use inside.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import AutoencoderKL

from ditile.distributed.launch import launch
from ditile.distributed.mesh import Axis
from ditile.distributed.transport import Traffic
from ditile.parallel.vae.parallel_vae import ParallelVAE
from ditile.plan.flag_parser import add_arguments, collect_arguments
from ditile.plan.option_classes import define_option
from ditile_lab.bench.session import LiveBytes
from ditile_lab.sessions import allow_all_cores

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeJob:
    """What is measured."""

    ranks: str = define_option("1,2,4", "numbers of ranks, one thread each", metavar="N,N,..")
    height: int = define_option(1024, "pixels")
    width: int = define_option(1024, "pixels")
    block_size: int = define_option(64, "rows that a convolution makes at a time")
    channels: int = define_option(128, "of the widest resolution; FLUX has 128")
    rounds: int = define_option(1, "interleaved rounds")
    check: bool = define_option(False, "print the largest difference from the undivided picture, too")


@dataclass(slots=True)
class DecodeMeasurement:
    """What a rank found out about one way of decoding."""

    seconds: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    live: int = 0
    process: int = 0
    sent: int = 0
    distance: float = 0.0


def autoencoder(job: DecodeJob) -> Any:
    """FLUX's layout with random weights, the same on every rank; the decoder only."""
    torch.manual_seed(0)
    vae: Any = AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        latent_channels=16,
        block_out_channels=tuple(job.channels * k for k in (1, 2, 4, 4)),
        layers_per_block=2,
        norm_num_groups=32,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    vae.encoder = None
    return vae.eval()


@torch.no_grad()
def measure(job: DecodeJob) -> dict[str, DecodeMeasurement]:
    """Every way of decoding, on this rank."""
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    axis = Axis("image", tuple(range(ranks)), rank, dist.group.WORLD if ranks > 1 else None)
    vae = autoencoder(job)
    traffic = Traffic()
    latents = torch.randn(1, 16, job.height // 8, job.width // 8)
    # The way that needs least memory comes first: memory that the allocator keeps would hide the growth of later ways.
    blocks = ParallelVAE(vae, axis, traffic, block_size=job.block_size)
    ways: dict[str, Any] = {f"rows, blocks of {job.block_size}": blocks}
    if ranks > 1:
        ways["rows"] = ParallelVAE(vae, axis, traffic)
    ways["undivided"] = None
    found = {name: DecodeMeasurement() for name in ways}
    pictures = {}
    before = _read_process_status("VmRSS")
    for counted in [*[False] * job.rounds, True]:
        for name, way in ways.items():
            dist.barrier()
            if way is None and rank > 0:
                continue
            with ExitStack() as stack:
                stack.enter_context(allow_all_cores() if way is None else way.install_forwards())
                pictures[name] = _measure_one_decode(vae, latents, found[name], traffic, counted, before)
    if rank == 0:
        for name, picture in pictures.items():
            gap = (picture - pictures["undivided"]).abs().max() / pictures["undivided"].abs().max()
            found[name].distance = float(gap)
    return found


def _measure_one_decode(
    vae: Any, latents: torch.Tensor, found: DecodeMeasurement, traffic: Traffic, counted: bool, before: int
) -> torch.Tensor:
    """Decodes once, for the clock and the size of the process, or for the count of live bytes."""
    traffic.reset_counts()
    if CLEAR.exists():
        CLEAR.write_text("5")  # the peak of the process begins anew
    with LiveBytes() if counted else nullcontext() as live:
        began = time.perf_counter()
        computed = time.process_time()
        picture: torch.Tensor = vae.decode(latents, return_dict=False)[0]
        seconds = time.perf_counter() - began
        busy = time.process_time() - computed
    found.sent = sum(traffic.bytes.values())
    if live is not None:
        found.live = live.peak
    else:
        found.process = found.process or _read_process_status("VmHWM") - before
        found.seconds.append(seconds)
        found.busy.append(busy)
    return picture


def _read_process_status(name: str) -> int:
    """Bytes of this process, by Linux's name for them; 0 elsewhere."""
    lines = STATUS.read_text().splitlines() if STATUS.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, DecodeJob, title="job")
    job = DecodeJob(**collect_arguments(DecodeJob, parser.parse_args()))
    print(
        "| ranks | decoded | s | speed-up | CPU, s | of one | live, MiB | of one | process, MiB | sent by a rank, MiB |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for ranks in map(int, job.ranks.split(",")):
        of_ranks = launch(measure, ranks, (job,), threads=1, stall_timeout=3600.0)
        whole = of_ranks[0]["undivided"]
        for name, mine in reversed(of_ranks[0].items()):
            each = [found[name] for found in of_ranks if found[name].live]
            live, process, sent = (max(getattr(f, what) for f in each) for what in ("live", "process", "sent"))
            ratio = statistics.median(a / b for a, b in zip(whole.seconds, mine.seconds, strict=True))
            busy = max(statistics.median(f.busy) for f in each)
            cells = (
                ranks,
                name,
                f"{statistics.median(mine.seconds):.1f}",
                f"{ratio:.2f}x",
                f"{busy:.1f}",
                f"{busy / statistics.median(whole.busy):.3f}",
                f"{live / 2**20:.0f}",
                f"{live / whole.live:.3f}",
                f"{process / 2**20:.0f}",
                f"{sent / 2**20:.1f}",
            )
            print("|", " | ".join(map(str, cells)), "|", flush=True)
        if job.check:
            print(
                f"largest difference: {max(found.distance for found in of_ranks[0].values()):.1e} of the largest value"
            )


if __name__ == "__main__":
    main()

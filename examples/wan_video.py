"""A video by Wan, over all GPUs that torchrun starts; without a name, by the bundled shapes-wan on two processes.

torchrun --nproc_per_node=8 examples/wan_video.py Wan-AI/Wan2.2-T2V-A14B-Diffusers
python examples/wan_video.py
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from PIL import Image

import ditile


def main() -> None:
    """Generates one video and saves it as an animated WebP."""
    if len(sys.argv) < 2:
        prompt = "a large red circle moves from left to right on a gray background"
        frames, _ = ditile.launch(generate, 2, ("shapes-wan", prompt, 2))
    elif "WORLD_SIZE" in os.environ:
        frames = generate(sys.argv[1], "a ship at dawn", int(os.environ["WORLD_SIZE"]))
    else:
        sys.exit("wan_video.py: WORLD_SIZE is not set; try torchrun --nproc_per_node=8 examples/wan_video.py NAME")
    # Only the first rank has the frames.
    if frames is not None:
        rate = ditile.defaults("shapes-wan").get("fps", 8)
        frames[0].save("wan.webp", save_all=True, append_images=frames[1:], duration=1000 // rate, loop=0)
        print(f"wrote wan.webp, {len(frames)} frames")
    if dist.is_initialized():
        dist.destroy_process_group()


def generate(name: str, prompt: str, ranks: int) -> list[Image.Image] | None:
    """The frames, on the first rank: half of the ranks computes each branch of guidance, and all decode rows."""
    plan = ditile.Plan(cfg=2, ulysses=ranks // 2, vae="rows")
    pipe = ditile.load(name, plan=plan)
    runner = ditile.parallelize(pipe, plan)
    seed = torch.Generator("cpu").manual_seed(0)
    call: dict[str, Any] = ditile.defaults(name) | {"output_type": "pil"}
    result = runner(prompt, generator=seed, output="first", **call)
    return None if result is None else result.frames[0]


if __name__ == "__main__":
    main()

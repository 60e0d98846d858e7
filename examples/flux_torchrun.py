"""FLUX.1-dev over all GPUs of a machine, or of several: torchrun --nproc_per_node=8 examples/flux_torchrun.py"""

import os

import torch
import torch.distributed as dist
from diffusers import FluxPipeline

import ditile


def main() -> None:
    """Draws one picture; rank 0 decodes and saves it."""
    pipe = FluxPipeline.from_pretrained(
        "black-forest-labs/FLUX.1-dev", torch_dtype=torch.bfloat16, use_safetensors=True
    )
    ranks = int(os.environ["WORLD_SIZE"])
    runner = ditile.parallelize(pipe, ditile.Plan(pipefusion=ranks, patches=ranks, warmup=1))
    seed = torch.Generator("cpu").manual_seed(0)
    result = runner("a lighthouse at dawn", height=1024, width=1024, generator=seed, output="first")
    if result is not None:
        print(runner)
        result.images[0].save("lighthouse.png")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

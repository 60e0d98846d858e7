"""FLUX.1-dev over all GPUs of a machine, or of several: torchrun --nproc_per_node=8 examples/flux_torchrun.py"""

import os
import sys

import torch
import torch.distributed as dist

import ditile


def main() -> None:
    """Draws one picture; rank 0 decodes and saves it."""
    if "WORLD_SIZE" not in os.environ:
        sys.exit("flux_torchrun.py: WORLD_SIZE is not set; try torchrun --nproc_per_node=8 examples/flux_torchrun.py")
    ranks = int(os.environ["WORLD_SIZE"])
    plan = ditile.Plan(pipefusion=ranks, patches=ranks, warmup=1)
    pipe = ditile.load("black-forest-labs/FLUX.1-dev", plan=plan)  # of the transformer, this rank's blocks alone
    runner = ditile.parallelize(pipe, plan)
    seed = torch.Generator("cpu").manual_seed(0)
    result = runner("a lighthouse at dawn", height=1024, width=1024, generator=seed, output="first")
    if result is not None:
        print(runner)
        result.images[0].save("lighthouse.png")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

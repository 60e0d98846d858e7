"""An edit of an image, over all GPUs that torchrun starts; without arguments, by shapes-flux on two processes.

torchrun --nproc_per_node=4 examples/edit_image.py Qwen/Qwen-Image-Edit-2511 photo.png "make it night"
python examples/edit_image.py
"""

from __future__ import annotations

import os
import sys
from typing import Any

import diffusers
import torch
import torch.distributed as dist
from PIL import Image

import ditile


def main() -> None:
    """Edits one image and saves the result."""
    if len(sys.argv) < 4:
        edited, _ = ditile.launch(edit_shapes, 2)
    elif "WORLD_SIZE" in os.environ:
        edited = edit(*sys.argv[1:4], int(os.environ["WORLD_SIZE"]))
    else:
        sys.exit('edit_image.py: WORLD_SIZE is not set; try torchrun --nproc_per_node=4 edit_image.py NAME FILE "TEXT"')
    # Only the first rank has the image.
    if edited is not None:
        edited.save("edited.png")
        print("wrote edited.png")
    if dist.is_initialized():
        dist.destroy_process_group()


def edit(name: str, file: str, instruction: str, ranks: int) -> Any:
    """The image after an instruction, by a pipeline that was trained to edit."""
    plan = ditile.Plan(ulysses=ranks)
    pipe = ditile.load(name, plan=plan)
    runner = ditile.parallelize(pipe, plan)
    seed = torch.Generator("cpu").manual_seed(0)
    result = runner(image=Image.open(file).convert("RGB"), prompt=instruction, generator=seed, output="first")
    return None if result is None else result.images[0]


def edit_shapes() -> Any:
    """An image by shapes-flux, and the same image with another shape, by image-to-image."""
    pipe = ditile.load("shapes-flux")
    call = ditile.defaults("shapes-flux")
    plan = ditile.Plan(ulysses=2)
    runner = ditile.parallelize(pipe, plan)
    seed = torch.Generator("cpu").manual_seed(0)
    circle = runner("a large red circle on the left on a gray background", generator=seed, **call).images[0]
    runner.restore()

    # The same weights in the class that starts from an image.
    editor = ditile.parallelize(diffusers.FluxImg2ImgPipeline.from_pipe(pipe), plan)
    result = editor(
        "a large blue square on the left on a gray background",
        image=circle, strength=0.8, generator=seed, output="first", **call,
    )  # fmt: skip
    return None if result is None else result.images[0]


if __name__ == "__main__":
    main()

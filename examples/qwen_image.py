"""Qwen-Image with guidance, over all GPUs that torchrun starts; without a name, on two processes and random weights.

torchrun --nproc_per_node=4 examples/qwen_image.py Qwen/Qwen-Image
python examples/qwen_image.py
"""

from __future__ import annotations

import os
import sys
from typing import Any

import diffusers
import torch
import torch.distributed as dist

import ditile

PROMPT = "a lighthouse at dawn"


def main() -> None:
    """Generates one image and saves it."""
    if len(sys.argv) < 2:
        image, _ = ditile.launch(generate_tiny, 2)
    elif "WORLD_SIZE" in os.environ:
        image = generate(sys.argv[1], int(os.environ["WORLD_SIZE"]))
    else:
        sys.exit("qwen_image.py: WORLD_SIZE is not set; try torchrun --nproc_per_node=4 examples/qwen_image.py NAME")
    # Only the first rank has the image.
    if image is not None:
        image.save("qwen-image.png")
        print("wrote qwen-image.png")
    if dist.is_initialized():
        dist.destroy_process_group()


def generate(name: str, ranks: int) -> Any:
    """The image, on the first rank: half of the ranks computes each branch of guidance."""
    plan = ditile.Plan(cfg=2, ulysses=ranks // 2)
    pipe = ditile.load(name, plan=plan)
    runner = ditile.parallelize(pipe, plan)
    seed = torch.Generator("cpu").manual_seed(0)
    # Without a negative prompt there is no second branch, and cfg=2 is refused.
    result = runner(PROMPT, negative_prompt=" ", true_cfg_scale=4.0, generator=seed, output="first")
    return None if result is None else result.images[0]


def generate_tiny() -> Any:
    """The same with random weights and random embeddings in place of the prompts': colourful noise."""
    runner = ditile.parallelize(make_tiny_pipeline(), ditile.Plan(cfg=2))
    result = runner(
        prompt_embeds=torch.randn(1, 11, 32, generator=torch.Generator().manual_seed(1)),
        prompt_embeds_mask=torch.ones(1, 11, dtype=torch.long),
        negative_prompt_embeds=torch.randn(1, 11, 32, generator=torch.Generator().manual_seed(2)),
        negative_prompt_embeds_mask=torch.ones(1, 11, dtype=torch.long),
        true_cfg_scale=4.0,
        height=128,
        width=128,
        num_inference_steps=4,
        generator=torch.Generator("cpu").manual_seed(0),
        output="first",
    )
    return None if result is None else result.images[0]


def make_tiny_pipeline() -> diffusers.QwenImagePipeline:
    """Qwen-Image's classes with four blocks, and no text encoder; every rank makes the same weights."""
    torch.manual_seed(0)
    transformer = diffusers.QwenImageTransformer2DModel(
        in_channels=16, out_channels=4, num_layers=4, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=32, axes_dims_rope=(2, 2, 4),
    )  # fmt: skip
    vae = diffusers.AutoencoderKLQwenImage(
        base_dim=8, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
    )  # fmt: skip
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    return diffusers.QwenImagePipeline(
        transformer=transformer.eval(), vae=vae.eval(), scheduler=scheduler, text_encoder=None, tokenizer=None
    )


if __name__ == "__main__":
    main()

"""Models with random weights and no text encoder: diffusers classes of any width, for machines without checkpoints.

random-pixart blocks=16 heads=8 head_dim=32      batched guidance, 300 text tokens
random-flux blocks=57 heads=24 head_dim=128      embedded guidance, 512 text tokens, a third of the blocks double
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
from diffusers import (
    AutoencoderKL,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    PixArtSigmaPipeline,
    PixArtTransformer2DModel,
)
from transformers.modeling_utils import local_torch_dtype

from ditile.plan.errors import ModelError
from ditile.plan.option_classes import CallArguments, define_option, options, parse_option
from ditile_lab.bench.options import RANDOM

FAMILIES = ("pixart", "flux")
VAE_SCALE = 8
TEXT = 64
"""Channels of an embedding."""


@options()
class RandomModel:
    """The sizes of a model."""

    family: Literal["pixart", "flux"] = define_option("pixart", "family")
    blocks: int = define_option(16, "blocks; of FLUX a third are double ones")
    heads: int = define_option(8, "attention heads")
    head_dim: int = define_option(32, "width of a head")

    def __post_init__(self) -> None:
        for name, least in (("blocks", 1), ("heads", 1), ("head_dim", 8)):
            if getattr(self, name) < least:
                raise ModelError(f"{name}={getattr(self, name)} of a random model; try {name}={least} or more")
        # Rotary embeddings divide a head into three axes of even widths.
        if self.head_dim % 4:
            raise ModelError(f"head_dim={self.head_dim} of a random model is not a multiple of 4; try head_dim=32")

    @classmethod
    def parse_model_name(cls, text: str) -> RandomModel:
        """Parse a model name such as `random-pixart blocks=16`.

        Raises:
            ModelError: if the name is not known, or a size cannot be read.
        """
        first, *words = text.split() or [""]
        family = first.removeprefix(RANDOM)
        if family not in FAMILIES:
            names = ", ".join(RANDOM + family for family in FAMILIES)
            raise ModelError(
                f"model {text!r} is not known; random ones are {names}, and {RANDOM} before the name of a published "
                f"one, such as {RANDOM}qwen-image"
            )
        known = [field.name for field in dataclasses.fields(cls)]
        values: dict[str, Any] = {"family": family}
        for word in words:
            name, _, value = word.partition("=")
            if name not in known or name in values:
                raise ModelError(f"{word!r} of model {text!r}: write blocks=N, heads=N or head_dim=N, each once")
            try:
                values[name] = parse_option(cls, name, value)
            except ValueError as error:
                raise ModelError(f"{word!r} of model {text!r}: {error}") from None
        return cls(**values)

    def __str__(self) -> str:
        return f"{RANDOM}{self.family} blocks={self.blocks} heads={self.heads} head_dim={self.head_dim}"

    @property
    def pipeline_class(self) -> type:
        """Return the model's class of diffusers' pipelines."""
        return PixArtSigmaPipeline if self.family == "pixart" else FluxPipeline

    def create_transformer(self, size: int) -> Any:
        """Create the transformer for images of `size` pixels a side, with random weights."""
        width = self.heads * self.head_dim
        if self.family == "pixart":
            pixart: Any = PixArtTransformer2DModel(
                num_attention_heads=self.heads,
                attention_head_dim=self.head_dim,
                num_layers=self.blocks,
                cross_attention_dim=width,
                caption_channels=TEXT,
                sample_size=size // VAE_SCALE,
            )
            return pixart.eval()
        double = self.blocks // 3
        # The rotary widths of rows and columns: about three eighths of a head each, and even.
        side = self.head_dim // 4 // 2 * 2 * 3 // 2
        side -= side % 2
        flux: Any = FluxTransformer2DModel(
            in_channels=16,
            num_layers=double,
            num_single_layers=self.blocks - double,
            attention_head_dim=self.head_dim,
            num_attention_heads=self.heads,
            joint_attention_dim=TEXT,
            pooled_projection_dim=TEXT,
            axes_dims_rope=(self.head_dim - 2 * side, side, side),
        )
        return flux.eval()

    def create_pipeline(self, size: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> Any:
        """Create the pipeline with random weights, the same on every rank.

        Args:
            size: pixels of a side.
            device: where the transformer's weights are created, in `dtype` at once; by default on the CPU, in float32.
        """
        # All ranks must have the same weights.
        torch.manual_seed(0)
        vae = AutoencoderKL(
            down_block_types=["DownEncoderBlock2D"] * 4,
            up_block_types=["UpDecoderBlock2D"] * 4,
            block_out_channels=(8, 8, 8, 8),
            norm_num_groups=4,
            latent_channels=4,
            shift_factor=0.0,
        )
        scheduler: Any = DPMSolverMultistepScheduler()
        absent = ["tokenizer", "text_encoder"]
        if self.family == "flux":
            scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
            absent += ["tokenizer_2", "text_encoder_2"]
        if device is None:
            transformer = self.create_transformer(size)
        else:
            with device, local_torch_dtype(dtype):
                transformer = self.create_transformer(size)
        parts: dict[str, Any] = dict.fromkeys(absent) | {"vae": vae, "scheduler": scheduler}
        pipe: Any = self.pipeline_class(transformer=transformer, **parts)
        pipe.set_progress_bar_config(disable=True)
        if dtype != torch.float32:
            pipe.to(dtype)
        if device is not None:
            pipe.to(device)
        return pipe

    def make_call_arguments(
        self,
        height: int,
        width: int,
        steps: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> CallArguments:
        """Make the arguments of a call that returns latents. PixArt has batched guidance, FLUX has embedded guidance.

        Args:
            height, width: pixels.
            steps: denoising steps.
            dtype: the type of the embeddings.
            device: the device of the embeddings, because pipelines do not move their inputs; by default the CPU.
        """
        # These numbers differ from the noise, which has its own seed.
        generator = torch.Generator().manual_seed(1)
        call = {
            "height": height,
            "width": width,
            "num_inference_steps": steps,
            "output_type": "latent",
            "generator": torch.Generator().manual_seed(0),
        }
        if self.family == "flux":
            embeds = torch.randn(1, 512, TEXT, generator=generator).to(device, dtype)
            return call | {"prompt_embeds": embeds, "pooled_prompt_embeds": embeds[:, 0]}
        embeds = torch.randn(1, 300, TEXT, generator=generator).to(device, dtype)
        mask = torch.ones(1, 300, device=device)
        return call | {
            "prompt": None,
            "negative_prompt": None,
            "prompt_embeds": embeds,
            "prompt_attention_mask": mask,
            "negative_prompt_embeds": embeds.flip(1),
            "negative_prompt_attention_mask": mask,
            "use_resolution_binning": False,
            "guidance_scale": 4.5,
        }

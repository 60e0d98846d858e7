"""Tiny transformers of several kinds, and a pipeline that only denoises."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    AutoencoderKLWan,
    ChronoEditTransformer3DModel,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    Flux2Transformer2DModel,
    LTXVideoTransformer3DModel,
    QwenImageTransformer2DModel,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from diffusers.pipelines.flux.pipeline_output import FluxPipelineOutput

from tests.tiny import quiet, randomise


class Denoising(DiffusionPipeline):  # type: ignore[misc]
    """The loop of a pipeline without its encoders: for transformers whose text encoders are too large to make.

    `inputs` are the arguments of the transformer; "free" among them is 0 for tokens of a picture that is given, 1 for
    others, and makes a timestep for each token.
    """

    def __init__(self, transformer: Any, scheduler: Any) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, scheduler=scheduler)

    @torch.no_grad()
    def __call__(
        self, latents: Any, inputs: dict[str, Any], num_inference_steps: int = 2, generator: Any = None
    ) -> FluxPipelineOutput:
        inputs = dict(inputs)
        free = inputs.pop("free", None)
        self.scheduler.set_timesteps(num_inference_steps)
        for t in self.scheduler.timesteps:
            timestep = t.expand(len(latents)) / 1000
            timestep = timestep if free is None else timestep[:, None] * free
            out = self.transformer(hidden_states=latents, timestep=timestep, return_dict=False, **inputs)[0]
            latents = self.scheduler.step(out, t, latents, return_dict=False)[0]
        return FluxPipelineOutput(images=latents)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def padded(text: int, *lengths: int) -> torch.Tensor:
    """A mask of texts of these lengths."""
    return torch.arange(text)[None] < torch.tensor(lengths)[:, None]


def qwen(rows: int, columns: int, text: int) -> tuple[Any, Any, dict[str, Any]]:
    model = QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=3,
        joint_attention_dim=16, axes_dims_rope=(8, 4, 4),
    )  # fmt: skip
    inputs = {"encoder_hidden_states": draw(2, text, 16, seed=1), "img_shapes": [[(1, rows, columns)]] * 2}
    inputs["encoder_hidden_states_mask"] = padded(text, text, text // 2)
    return model, draw(2, rows * columns, 16), inputs


def ltx(rows: int, columns: int, text: int) -> tuple[Any, Any, dict[str, Any]]:
    model = LTXVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=4, attention_head_dim=8, cross_attention_dim=32,
        num_layers=2, caption_channels=16,
    )  # fmt: skip
    inputs = {"encoder_hidden_states": draw(2, text, 16, seed=1), "num_frames": 1, "height": rows, "width": columns}
    inputs["encoder_attention_mask"] = padded(text, text, text // 2).to(torch.int64)
    return model, draw(2, rows * columns, 4), inputs


def flux2(rows: int, columns: int, text: int) -> tuple[Any, Any, dict[str, Any]]:
    model = Flux2Transformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=4,
        joint_attention_dim=32, timestep_guidance_channels=32, axes_dims_rope=(4, 4, 4, 4),
    )  # fmt: skip
    ids = torch.cartesian_prod(torch.arange(1), torch.arange(rows), torch.arange(columns), torch.arange(1))
    words = torch.cartesian_prod(torch.arange(1), torch.arange(1), torch.arange(1), torch.arange(text))
    inputs = {"encoder_hidden_states": draw(2, text, 32, seed=1), "guidance": torch.full((2,), 3.0)}
    inputs |= {"img_ids": ids.expand(2, -1, -1), "txt_ids": words.expand(2, -1, -1)}
    return model, draw(2, rows * columns, 4), inputs


def wan_transformer() -> WanTransformer3DModel:
    return WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=3, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=64, ffn_dim=32, num_layers=2, rope_max_seq_len=1024,
    )  # fmt: skip


def wan(rows: int, columns: int, text: int) -> tuple[Any, Any, dict[str, Any]]:
    inputs = {"encoder_hidden_states": draw(2, text, 16, seed=1)}
    return wan_transformer(), draw(2, 4, 1, 2 * rows, 2 * columns), inputs


def chronoedit(rows: int, columns: int, text: int) -> tuple[Any, Any, dict[str, Any]]:
    """A timestep for each token, as from a picture."""
    model, latents, inputs = wan(rows, columns, text)
    free = (torch.arange(rows * columns) >= columns).float().expand(2, -1)
    inputs |= {"free": free * torch.tensor([[1.0], [0.5]])}
    return ChronoEditTransformer3DModel.from_config(model.config), latents, inputs


MAKE = {"qwen": qwen, "ltx": ltx, "flux2": flux2, "wan": wan, "chronoedit": chronoedit}


def denoising(name: str, rows: int, columns: int, text: int) -> tuple[Denoising, dict[str, Any]]:
    """A pipeline of `MAKE`, and what it is called with."""
    torch.manual_seed(0)
    model, latents, inputs = MAKE[name](rows, columns, text)
    pipe = quiet(Denoising(randomise(model, gain=1.0), FlowMatchEulerDiscreteScheduler()))
    return pipe, {"latents": latents, "inputs": inputs}


def wan_pipeline() -> tuple[WanPipeline, dict[str, Any]]:
    """Wan 2.2: two transformers in turns, two calls of each per step."""
    torch.manual_seed(0)
    vae = AutoencoderKLWan(
        base_dim=3, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False] * 3
    )
    pipe = WanPipeline(
        tokenizer=None, text_encoder=None, vae=vae.eval(), transformer=randomise(wan_transformer(), 0, 1.0),
        transformer_2=randomise(wan_transformer(), 1, 1.0), boundary_ratio=0.6,
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=2.0),
    )  # fmt: skip
    call = {
        "prompt_embeds": draw(1, 9, 16, seed=1), "negative_prompt_embeds": draw(1, 9, 16, seed=2), "height": 48,
        "width": 80, "num_frames": 1, "num_inference_steps": 4, "guidance_scale": 3.0, "output_type": "latent",
    }  # fmt: skip
    return quiet(pipe), call

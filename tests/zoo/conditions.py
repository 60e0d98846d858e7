"""Pipelines that are given more than a prompt: control pictures, and masks of what is kept of a picture."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from diffusers.models.embeddings import ImageProjection, MultiIPAdapterImageProjection
from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor

from tests.more_families import EVERY
from tests.tiny import arguments, flux, randomise, sd3, vae
from tests.zoo.entry import embeds, entry, picture
from tests.zoo.pictures import (
    MANY_WORDS,
    OTHER_EMBEDS,
    PROMPT,
    PROMPTS,
    SAME_LENGTH,
    TINY,
    TINY_LARGER,
    TWO,
    padded,
    qwen_image,
    qwen_image_call,
    size,
    z_image,
)


def qwen_image_controlnet() -> Any:
    config = EVERY["QwenImageTransformer2DModel"].config
    model = diffusers.QwenImageControlNetModel(**config | {"num_layers": 1})
    components = qwen_image(diffusers.QwenImagePipeline).components
    return diffusers.QwenImageControlNetPipeline(**components, controlnet=randomise(model, seed=2, gain=1.0))


def sd3_controlnet() -> Any:
    pipe = sd3()
    config = {name: value for name, value in pipe.transformer.config.items() if not name.startswith("_")}
    config |= {"num_layers": 1, "dual_attention_layers": (), "extra_conditioning_channels": 0}
    model = randomise(diffusers.SD3ControlNetModel(**config), seed=2, gain=1.0)
    return diffusers.StableDiffusion3ControlNetPipeline(**pipe.components, controlnet=model)


def sd3_controlnet_call() -> dict[str, Any]:
    torch.manual_seed(3)  # the autoencoder draws a picture from its distribution, without a generator
    return arguments("sd3") | size(3, 5, 8) | {"control_image": picture(24, 40)}


def sd3_inpaint() -> Any:
    """The pipeline gives models of other than 16 channels the mask as more of these."""
    parts = sd3().components
    config = {name: value for name, value in parts["transformer"].config.items() if not name.startswith("_")}
    model = diffusers.SD3Transformer2DModel(**config | {"in_channels": 16, "out_channels": 16})
    return diffusers.StableDiffusion3InpaintPipeline(**parts | {"vae": vae(16), "transformer": randomise(model)})


def z_image_controlnet() -> Any:
    """It has embeddings and refiners of the transformer."""
    model = diffusers.ZImageControlNetModel(
        control_layers_places=[0, 1], control_refiner_layers_places=[0], control_in_dim=4, dim=40, n_heads=4,
        n_kv_heads=4, n_refiner_layers=1, add_control_noise_refiner="control_noise_refiner",
    )  # fmt: skip
    components = z_image(diffusers.ZImagePipeline).components
    return diffusers.ZImageControlNetPipeline(**components, controlnet=randomise(model, seed=2, gain=1.0))


def flux_ip_adapter() -> Any:
    pipe = flux()
    width = pipe.transformer.inner_dim
    for block in pipe.transformer.transformer_blocks:
        block.attn.set_processor(
            randomise(FluxIPAdapterAttnProcessor(width, CONTEXT, num_tokens=(4,)), seed=3, gain=1.0)
        )
    projection = ImageProjection(cross_attention_dim=CONTEXT, image_embed_dim=8, num_image_text_embeds=4)
    pipe.transformer.encoder_hid_proj = MultiIPAdapterImageProjection([projection])
    return pipe


CONTEXT = 24

ENTRIES = [
    entry(
        "flux-ip-adapter", 12, flux_ip_adapter, lambda: {
            **arguments("flux"), **TINY, "negative_prompt": "a blue square", "true_cfg_scale": 3.0,
            "ip_adapter_image_embeds": [embeds(1, 8)], "negative_ip_adapter_image_embeds": [embeds(1, 8, seed=5)],
        }, larger=TINY_LARGER, other_prompt={"max_sequence_length": 13}, two_images=TWO, padded_prompt=SAME_LENGTH,
    ),
    entry(
        "qwen-image-controlnet", 7, qwen_image_controlnet, lambda: qwen_image_call() | {
            "control_image": picture(24, 40),
        }, larger=size(5, 7, 8) | {"control_image": picture(40, 56)}, other_prompt=OTHER_EMBEDS, two_images=TWO,
        padded_prompt=padded(),
    ),
    entry(
        "stable-diffusion-3-controlnet", 14, sd3_controlnet, sd3_controlnet_call,
        larger=size(5, 7, 8) | {"control_image": picture(40, 56)}, other_prompt={"max_sequence_length": 13},
        two_images=TWO, padded_prompt=SAME_LENGTH,
    ),
    entry(
        "stable-diffusion-3-inpaint", 14, sd3_inpaint, lambda: arguments("sd3") | TINY | {
            "image": picture(12, 20), "mask_image": picture(12, 20, 1), "strength": 0.9,
        }, larger=TINY_LARGER | {"image": picture(20, 28), "mask_image": picture(20, 28, 1)},
        other_prompt={"max_sequence_length": 13}, two_images=TWO, padded_prompt=SAME_LENGTH,
    ),
    entry(
        "z-image-controlnet", 4, z_image_controlnet, lambda: {
            "prompt": PROMPT, "control_image": picture(28, 44), "guidance_scale": 1.0, **size(7, 11, 4),
        }, larger=size(11, 16, 4) | {"control_image": picture(44, 64)}, other_prompt=MANY_WORDS, two_images=TWO,
        padded_prompt=PROMPTS,
    ),
]  # fmt: skip

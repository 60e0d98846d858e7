"""Pipelines that are given more than a prompt: control pictures, and masks of what is kept of a picture."""

from __future__ import annotations

from typing import Any

import diffusers
from diffusers.models.attention_processor import SD3IPAdapterJointAttnProcessor2_0
from diffusers.models.embeddings import ImageProjection, IPAdapterTimeImageProjection, MultiIPAdapterImageProjection
from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor

from tests.families import EVERY
from tests.tiny import arguments, flux, randomise, sd3, vae
from tests.zoo.entry import NEGATIVE_TEXT, embeds, entry, guided, picture
from tests.zoo.more_pictures import MASKED, chroma_call, like_flux
from tests.zoo.pictures import (
    EDIT,
    FLUX,
    FLUX_2,
    OTHER_EMBEDS,
    QWEN_IMAGE,
    TINY,
    TINY_LARGER,
    TURBO,
    Z_IMAGE,
    filled,
    flux_2,
    flux_controlnet,
    masked,
    qwen_image,
    qwen_image_call,
    rebuild,
    size,
    z_image,
)

TRUE_CFG = {"negative_prompt": "a blue square", "true_cfg_scale": 3.0}


def qwen_image_controlnet(cls: Any, **more: Any) -> Any:
    config = EVERY["QwenImageTransformer2DModel"].config
    model = diffusers.QwenImageControlNetModel(**config | {"num_layers": 1, **more})
    components = qwen_image(diffusers.QwenImagePipeline).components
    return cls(**components, controlnet=randomise(model, seed=2, gain=1.0))


def sd3_controlnet(cls: Any, channels: int = 0) -> Any:
    """One that is shown a mask, as one channel more, is shown the picture without what is drawn anew."""
    pipe = sd3()
    config = {name: value for name, value in pipe.transformer.config.items() if not name.startswith("_")}
    config |= {"num_layers": 1, "dual_attention_layers": (), "extra_conditioning_channels": channels}
    model = randomise(diffusers.SD3ControlNetModel(**config), seed=2, gain=1.0)
    return cls(**pipe.components, controlnet=model)


def sd3_inpaint() -> Any:
    """The pipeline gives models of other than 16 channels the mask as more of these."""
    parts = sd3().components
    config = {name: value for name, value in parts["transformer"].config.items() if not name.startswith("_")}
    model = diffusers.SD3Transformer2DModel(**config | {"in_channels": 16, "out_channels": 16})
    return diffusers.StableDiffusion3InpaintPipeline(**parts | {"vae": vae(16), "transformer": randomise(model)})


def z_image_controlnet(channels: int = 4) -> Any:
    model = diffusers.ZImageControlNetModel(
        control_layers_places=[0, 1], control_refiner_layers_places=[0], control_in_dim=channels, dim=40, n_heads=4,
        n_kv_heads=4, n_refiner_layers=1, add_control_noise_refiner="control_noise_refiner",
    )  # fmt: skip
    return randomise(model, seed=2, gain=1.0)


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


def sd3_ip_adapter() -> Any:
    pipe = sd3()
    model, width = pipe.transformer, pipe.transformer.inner_dim
    projection = IPAdapterTimeImageProjection(
        embed_dim=16, output_dim=width, hidden_dim=CONTEXT, depth=1, dim_head=8, heads=3, num_queries=7,
        timestep_in_dim=8,
    )  # fmt: skip
    for number, name in enumerate(model.attn_processors):
        processor = SD3IPAdapterJointAttnProcessor2_0(width, width, model.config.attention_head_dim, CONTEXT)
        model.get_submodule(name.removesuffix(".processor")).set_processor(randomise(processor, seed=number, gain=1.0))
    model.image_proj = randomise(projection, seed=4)
    return pipe


def chroma_inpaint() -> Any:
    pipe = like_flux("ChromaTransformer2DModel", diffusers.ChromaInpaintPipeline)
    # Asked by the pipeline: a value that files of models have, and the class of the transformer does not.
    pipe.transformer.register_to_config(guidance_embeds=False)
    return pipe


CONTEXT = 24
ONE_MASK = "the pipeline makes one mask for all pictures"


def shown(height: int, width: int) -> dict[str, Any]:
    return filled(height, width, "control_mask", "control_image")


ENTRIES = [
    entry(
        "flux-kontext-inpaint", 12, lambda: diffusers.FluxKontextInpaintPipeline(**flux().components),
        lambda: arguments("flux", **TINY, **TRUE_CFG, **filled(12, 20)) | {
            "image_reference": picture(16, 20), "_auto_resize": False, "max_area": 12 * 20, "strength": 0.9,
        }, **FLUX | {"larger": TINY_LARGER | filled(20, 28) | {"max_area": 20 * 28}},
    ),
    entry(
        "flux-2-klein-inpaint", 9, lambda: flux_2(diffusers.Flux2KleinInpaintPipeline, guidance_embeds=False),
        lambda: guided(11, 9, 32) | filled(48, 80) | {
            "image_reference": picture(32, 48), "guidance_scale": 3.0, "strength": 0.9,
        }, **FLUX_2 | {"larger": filled(80, 112)},
    ),
    entry(
        "qwen-image-edit-inpaint", 7, lambda: qwen_image(diffusers.QwenImageEditInpaintPipeline),
        lambda: masked(11) | masked(NEGATIVE_TEXT, negative=True) | filled(64, 96) | {
            "true_cfg_scale": 3.0, "strength": 0.9,
        }, **EDIT | {"larger": filled(64, 64)},
    ),
    entry("chroma-inpaint", 14, chroma_inpaint, lambda: chroma_call() | filled(48, 80) | {"strength": 0.9}, **MASKED),
    entry(
        "chroma-img2img", 14, lambda: like_flux("ChromaTransformer2DModel", diffusers.ChromaImg2ImgPipeline),
        lambda: chroma_call() | {"image": picture(48, 80), "strength": 0.9}, **MASKED,
    ),
    entry(
        "flux-controlnet-inpaint", 12,
        lambda: rebuild(diffusers.FluxControlNetInpaintPipeline, flux_controlnet().components),
        lambda: arguments("flux", **TINY, **filled(12, 20), control_image=picture(12, 20), strength=0.9), **FLUX,
    ),
    entry(
        "stable-diffusion-3-controlnet-inpaint", 14,
        lambda: sd3_controlnet(diffusers.StableDiffusion3ControlNetInpaintingPipeline, channels=1),
        lambda: arguments("sd3", **size(3, 5, 8), **shown(24, 40)), **FLUX | {"larger": size(5, 7, 8) | shown(40, 56)},
    ),
    entry(
        "qwen-image-controlnet-inpaint", 7,
        lambda: qwen_image_controlnet(diffusers.QwenImageControlNetInpaintPipeline, extra_condition_channels=4),
        lambda: qwen_image_call() | shown(24, 40), larger=size(5, 7, 8) | shown(40, 56), other_prompt=OTHER_EMBEDS,
        two_images=ONE_MASK, padded_prompt=ONE_MASK,
    ),
    entry(
        "flux-ip-adapter", 12, flux_ip_adapter, lambda: arguments("flux", **TINY, **TRUE_CFG) | {
            "ip_adapter_image_embeds": [embeds(1, 8)], "negative_ip_adapter_image_embeds": [embeds(1, 8, seed=5)],
        }, **FLUX,
    ),
    entry(
        "stable-diffusion-3-ip-adapter", 14, sd3_ip_adapter,
        lambda: arguments("sd3", **TINY, ip_adapter_image_embeds=embeds(3, 16, rows=2)), **FLUX,
    ),
    entry(
        "qwen-image-controlnet", 7, lambda: qwen_image_controlnet(diffusers.QwenImageControlNetPipeline),
        lambda: qwen_image_call() | {"control_image": picture(24, 40)},
        **QWEN_IMAGE | {"larger": size(5, 7, 8) | {"control_image": picture(40, 56)}},
    ),
    entry(
        "stable-diffusion-3-controlnet", 14, lambda: sd3_controlnet(diffusers.StableDiffusion3ControlNetPipeline),
        lambda: arguments("sd3", **size(3, 5, 8), control_image=shown(24, 40)["control_image"]),
        **FLUX | {"larger": size(5, 7, 8) | {"control_image": picture(40, 56)}},
    ),
    entry(
        "stable-diffusion-3-inpaint", 14, sd3_inpaint, lambda: arguments("sd3", **TINY, **filled(12, 20), strength=0.9),
        **FLUX | {"larger": TINY_LARGER | filled(20, 28)},
    ),
    entry(
        "z-image-controlnet", 4, lambda: diffusers.ZImageControlNetPipeline(
            # The ControlNet has embeddings and refiners of the transformer.
            **z_image(diffusers.ZImagePipeline).components, controlnet=z_image_controlnet(),
        ), lambda: TURBO | {"control_image": picture(28, 44)},
        **Z_IMAGE | {"larger": size(11, 16, 4) | {"control_image": picture(44, 64)}},
    ),
]  # fmt: skip

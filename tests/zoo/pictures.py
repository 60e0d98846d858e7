"""Pipelines that make or edit pictures."""

from __future__ import annotations

import inspect
from typing import Any

import diffusers
import torch
import transformers

from tests.families import EVERY
from tests.tiny import arguments, flux, randomise, vae
from tests.zoo import encoders
from tests.zoo.entry import NEGATIVE_TEXT, OTHER_TEXT, embeds, entry, guided, padded_embeds, picture, transformer

PROMPT, LONG_PROMPT = "a large red circle", "a small blue ring on the left of a green square"
NEGATIVE = "a square"
MANY_WORDS = {"prompt": " ".join([PROMPT] * 10)}  # Z-Image makes both 32 and fewer words 32 tokens
PROMPTS = {"prompt": [PROMPT, LONG_PROMPT]}


def flow(**config: Any) -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(**config)


def size(height: int, width: int, pixels: int = 16) -> dict[str, int]:
    """The size of a picture with so many rows and columns of tokens."""
    return {"height": height * pixels, "width": width * pixels}


def qwen_image_21() -> Any:
    return diffusers.QwenImage21Pipeline(
        scheduler=flow(),
        vae=diffusers.AutoencoderKLQwenImage21(
            base_dim=4, decoder_base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1, 1], num_res_blocks=1,
            latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
        ),
        text_encoder=encoders.qwen3_vl(),
        processor=encoders.qwen_processor(),
        transformer=transformer("QwenImage21Transformer2DModel"),
    )  # fmt: skip


def qwen_image(cls: Any, **config: Any) -> Any:
    """Pipelines that edit make every picture one of 1024 x 1024 pixels or as many: 128 times smaller, 16 tokens."""
    edits = "Edit" in cls.__name__
    autoencoder = encoders.qwen_image_vae()
    if edits:
        autoencoder = encoders.qwen_image_vae(dim_mult=[1] * 5, temperal_downsample=[False] * 7)
        autoencoder = encoders.in_large_squares(autoencoder)
    return cls(
        scheduler=flow(), vae=autoencoder, text_encoder=None, tokenizer=None, **{"processor": None} if edits else {},
        transformer=transformer("QwenImageTransformer2DModel", **config),
    )  # fmt: skip


def z_image(cls: Any, *, config: dict[str, Any] | None = None, **more: Any) -> Any:
    return cls(
        scheduler=flow(), text_encoder=encoders.language(), tokenizer=encoders.chat_tokenizer(),
        # No number of tokens, all of which are multiples of 32, is a width.
        transformer=transformer("ZImageTransformer2DModel", dim=40, axes_dims=[2, 4, 4], **config or {}),
        **{"vae": vae()} | more,
    )  # fmt: skip


def z_image_omni() -> Any:
    config = transformers.Siglip2VisionConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, patch_size=4, num_patches=49,
    )  # fmt: skip
    return z_image(
        diffusers.ZImageOmniPipeline, vae=encoders.vae_8().to(torch.bfloat16),
        siglip=transformers.Siglip2VisionModel(config).eval(),
        siglip_processor=transformers.Siglip2ImageProcessorPil(patch_size=4, max_num_patches=49),
        config={"siglip_feat_dim": 8},
    )  # fmt: skip


def krea_2() -> Any:
    return diffusers.Krea2Pipeline(
        scheduler=flow(), vae=encoders.qwen_image_vae(z_dim=1, latents_mean=[0.0], latents_std=[1.0]),
        text_encoder=None, tokenizer=None, transformer=transformer("Krea2Transformer2DModel"),
        text_encoder_select_layers=(0, 1),
    )  # fmt: skip


def krea_2_text(length: int) -> dict[str, Any]:
    call: dict[str, Any] = {}
    for prefix, seed in (("", 1), ("negative_", 5)):
        call[f"{prefix}prompt_embeds"] = embeds(length, 32, seed=seed).view(1, length, 2, 16)
        call[f"{prefix}prompt_embeds_mask"] = torch.ones(1, length).bool()
    return call


def flux_2_vae() -> Any:
    return diffusers.AutoencoderKLFlux2(
        sample_size=32, down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(4,) * 4, layers_per_block=1, latent_channels=4, norm_num_groups=1, use_quant_conv=False,
        use_post_quant_conv=False,
    )  # fmt: skip


def flux_2(cls: Any, **config: Any) -> Any:
    return cls(
        scheduler=flow(), vae=flux_2_vae(), text_encoder=None, tokenizer=None,
        transformer=transformer("Flux2Transformer2DModel", **config),
    )  # fmt: skip


def masked(length: int, width: int = 32, *, negative: bool = False) -> dict[str, Any]:
    """Embeddings of a prompt and their mask, as arguments."""
    prefix = "negative_" if negative else ""
    mask = torch.ones(1, length, dtype=torch.bool)
    return {f"{prefix}prompt_embeds": embeds(length, width), f"{prefix}prompt_embeds_mask": mask}


def padded(width: int = 32) -> dict[str, Any]:
    """Embeddings of two prompts of unlike length and their mask, and of two negative ones, as arguments."""
    text, mask = padded_embeds(width)
    negative, negative_mask = padded_embeds(width, length=NEGATIVE_TEXT, short=5)
    return {
        "prompt_embeds": text, "prompt_embeds_mask": mask,
        "negative_prompt_embeds": negative, "negative_prompt_embeds_mask": negative_mask,
    }  # fmt: skip


def qwen_image_call() -> dict[str, Any]:
    return masked(11) | masked(NEGATIVE_TEXT, negative=True) | size(3, 5, 8) | {"true_cfg_scale": 3.0}


def qwen_image_edit_call() -> dict[str, Any]:
    return qwen_image_call() | size(3, 5, 256) | {"image": picture(64, 64)}


def flux_edit(cls: Any, channels: int) -> Any:
    """With a transformer that is given more channels than it returns."""
    model = transformer("FluxTransformer2DModel", in_channels=channels, out_channels=16, guidance_embeds=True)
    return rebuild(cls, flux().components | {"transformer": model})


def rebuild(cls: Any, components: dict[str, Any]) -> Any:
    """A pipeline of those components that its class takes."""
    return cls(**{name: components[name] for name in inspect.signature(cls).parameters if name in components})


def flux_controlnet() -> Any:
    """With another model whose results are added behind the blocks of the transformer."""
    config = EVERY["FluxTransformer2DModel"].config
    model = diffusers.FluxControlNetModel(**config | {"num_layers": 1, "num_single_layers": 1})
    return diffusers.FluxControlNetPipeline(**flux().components, controlnet=randomise(model, seed=2, gain=1.0))


TWO = {"num_images_per_prompt": 2}
OTHER_EMBEDS = masked(OTHER_TEXT)
ONE_PROMPT = "the pipeline takes one prompt"

SAME_LENGTH = "the pipeline pads every prompt to one length and gives no mask"
TINY, TINY_LARGER = size(3, 5, 4), size(5, 7, 4)  # with the autoencoder of tests/tiny.py
FLUX: dict[str, Any] = {
    "larger": TINY_LARGER, "other_prompt": {"max_sequence_length": 13}, "two_images": TWO, "padded_prompt": SAME_LENGTH,
}  # fmt: skip
FLUX_2 = FLUX | {"larger": size(5, 7), "other_prompt": {"prompt_embeds": embeds(13, 32)}}
QWEN_IMAGE = FLUX | {"larger": size(5, 7, 8), "other_prompt": OTHER_EMBEDS, "padded_prompt": padded()}
EDIT = QWEN_IMAGE | {"larger": size(5, 7, 256), "padded_prompt": ONE_PROMPT}

GUIDED_PROMPTS = {"prompt": [PROMPT, LONG_PROMPT], "negative_prompt": [NEGATIVE, PROMPT]}
QWEN_IMAGE_21 = FLUX | {"larger": size(6, 10), "other_prompt": {"prompt": LONG_PROMPT}}
Z_IMAGE = FLUX | {"larger": size(11, 16, 4), "other_prompt": MANY_WORDS, "padded_prompt": PROMPTS}
TURBO = {"prompt": PROMPT, "guidance_scale": 1.0, **size(7, 11, 4)}


def filled(height: int, width: int, mask: str = "mask_image", image: str = "image") -> dict[str, Any]:
    """A picture of so many pixels, and the mask of what is drawn anew."""
    torch.manual_seed(3)  # autoencoders draw pictures from their distribution, some without a generator
    return {image: picture(height, width), mask: picture(height, width, 1)}


ENTRIES = [
    entry(
        "qwen-image-2.1", 2, qwen_image_21,
        lambda: {"prompt": PROMPT, "negative_prompt": NEGATIVE, "true_cfg_scale": 3.0, **size(4, 6)},
        **QWEN_IMAGE_21 | {"padded_prompt": GUIDED_PROMPTS},
    ),
    entry(
        "qwen-image-2.1-edit", 2, qwen_image_21, lambda: {
            "prompt": PROMPT, "image": picture(64, 64), "true_cfg_scale": 1.0, "output_resolution": 64, **size(4, 6),
        }, **QWEN_IMAGE_21 | {"padded_prompt": PROMPTS},
    ),
    entry(
        "z-image", 4, lambda: z_image(diffusers.ZImagePipeline),
        lambda: TURBO | {"negative_prompt": NEGATIVE, "guidance_scale": 3.0},
        **Z_IMAGE | {"padded_prompt": GUIDED_PROMPTS},
    ),
    entry(
        "z-image-img2img", 4, lambda: z_image(diffusers.ZImageImg2ImgPipeline),
        lambda: TURBO | {"image": picture(28, 44), "strength": 1.0},
        **Z_IMAGE | {"larger": size(11, 16, 4) | {"image": picture(44, 64)}},
    ),
    entry(
        "z-image-omni", 4, z_image_omni, lambda: TURBO | {"prompt": [PROMPT], "image": picture(64, 64), **size(7, 11)},
        larger=size(11, 16), two_images=TWO,
        # Lists of prompts are made anew, since the pipeline writes into them.
        other_prompt=lambda: {"prompt": [" ".join([PROMPT] * 10)]},
        padded_prompt=lambda: {"prompt": [PROMPT, LONG_PROMPT]},
    ),
    entry(
        "z-image-inpaint", 4, lambda: z_image(diffusers.ZImageInpaintPipeline),
        lambda: TURBO | filled(28, 44) | {"strength": 1.0},
        **Z_IMAGE | {"larger": size(11, 16, 4) | filled(44, 64)},
    ),
    entry(
        "krea-2", 6, krea_2, lambda: krea_2_text(11) | {"guidance_scale": 3.0, **size(3, 5, 8)},
        larger=size(5, 7, 8), other_prompt=krea_2_text(13), two_images=TWO,
        padded_prompt={
            "prompt_embeds": padded_embeds(32)[0].view(2, 11, 2, 16), "prompt_embeds_mask": padded_embeds()[1],
            "negative_prompt_embeds": padded_embeds(32, short=5)[0].view(2, 11, 2, 16),
            "negative_prompt_embeds_mask": padded_embeds(32, short=5)[1],
        },
    ),
    entry("qwen-image", 7, lambda: qwen_image(diffusers.QwenImagePipeline), qwen_image_call, **QWEN_IMAGE),
    entry("qwen-image-edit", 7, lambda: qwen_image(diffusers.QwenImageEditPipeline), qwen_image_edit_call, **EDIT),
    entry(
        "qwen-image-edit-2509", 7, lambda: qwen_image(diffusers.QwenImageEditPlusPipeline), qwen_image_edit_call,
        **EDIT,
    ),
    entry(
        "qwen-image-edit-2511", 7, lambda: qwen_image(diffusers.QwenImageEditPlusPipeline, zero_cond_t=True),
        qwen_image_edit_call, **EDIT,
    ),
    entry(
        "flux-2", 9, lambda: flux_2(diffusers.Flux2Pipeline),
        lambda: {"prompt_embeds": embeds(11, 32), **size(3, 5)}, **FLUX_2,
    ),
    entry(
        "flux-2-klein", 9, lambda: flux_2(diffusers.Flux2KleinPipeline, guidance_embeds=False),
        lambda: guided(11, 9, 32) | size(3, 5) | {"guidance_scale": 3.0}, **FLUX_2,
    ),
    entry(
        "flux-2-klein-edit", 9, lambda: flux_2(diffusers.Flux2KleinPipeline, guidance_embeds=False),
        lambda: {"prompt_embeds": embeds(11, 32), "image": picture(64, 64), "guidance_scale": 1.0, **size(3, 5)},
        **FLUX_2,
    ),
    entry(
        "flux", 12, flux,
        lambda: arguments("flux", **TINY, negative_prompt="a blue square", true_cfg_scale=3.0), **FLUX,
    ),
    entry(
        "flux-img2img", 12, lambda: diffusers.FluxImg2ImgPipeline(**flux().components),
        lambda: arguments("flux", **TINY, image=picture(12, 20), strength=1.0), **FLUX,
    ),
    entry(
        "flux-kontext", 12, lambda: diffusers.FluxKontextPipeline(**flux().components),
        lambda: arguments("flux", **TINY, image=picture(16, 20), _auto_resize=False, max_area=12 * 20),
        **FLUX | {"larger": TINY_LARGER | {"max_area": 20 * 28}},
    ),
    entry(
        "qwen-image-img2img", 7, lambda: qwen_image(diffusers.QwenImageImg2ImgPipeline),
        lambda: qwen_image_call() | {"image": picture(24, 40), "strength": 1.0}, **QWEN_IMAGE,
    ),
    entry(
        "qwen-image-inpaint", 7, lambda: qwen_image(diffusers.QwenImageInpaintPipeline),
        lambda: qwen_image_call() | filled(24, 40) | {"strength": 1.0}, **QWEN_IMAGE,
    ),
    entry(
        "flux-fill", 12, lambda: flux_edit(diffusers.FluxFillPipeline, 16 + 16 + 16),
        lambda: arguments("flux", **TINY, **filled(12, 20), strength=1.0), **FLUX,
    ),
    entry(
        "flux-inpaint", 12, lambda: diffusers.FluxInpaintPipeline(**flux().components),
        lambda: arguments("flux", **TINY, **filled(12, 20), strength=1.0), **FLUX,
    ),
    entry(
        "flux-control", 12, lambda: flux_edit(diffusers.FluxControlPipeline, 32),
        lambda: arguments("flux", **TINY, control_image=picture(12, 20)), **FLUX,
    ),
    entry(
        "flux-2-klein-kv", 9, lambda: flux_2(diffusers.Flux2KleinKVPipeline, guidance_embeds=False),
        lambda: {"prompt_embeds": embeds(11, 32), "image": picture(64, 64), **size(3, 5)}, **FLUX_2,
    ),
    entry(
        "flux-controlnet", 12, flux_controlnet,
        lambda: arguments("flux", **TINY, control_image=picture(12, 20), controlnet_conditioning_scale=0.7), **FLUX,
    ),
]  # fmt: skip

"""Pipelines that make or edit pictures, of families that are used less."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
import transformers

from tests.tiny import arguments, pixart, sd3, vae
from tests.zoo import encoders, videos
from tests.zoo.entry import (
    OTHER_TEXT,
    REMOVED,
    TEXT,
    embeds,
    entry,
    film,
    guided,
    masked_text,
    padded_embeds,
    padded_text,
    picture,
    to_long,
    transformer,
)
from tests.zoo.pictures import (
    FLUX,
    GUIDED_PROMPTS,
    LONG_PROMPT,
    NEGATIVE,
    ONE_PROMPT,
    PROMPT,
    PROMPTS,
    QWEN_IMAGE,
    SAME_LENGTH,
    TINY,
    TINY_LARGER,
    TWO,
    flow,
    flux_2_vae,
    masked,
    padded,
    qwen_image_call,
    size,
)


def like_flux(name: str, cls: Any, **more: Any) -> Any:
    config = more.pop("config", {})
    components = {"scheduler": flow(), "vae": None, "text_encoder": None, "tokenizer": None} | more
    components["vae"] = components["vae"] or encoders.vae_8()
    return cls(**components, transformer=transformer(name, **config))


def chroma_call() -> dict[str, Any]:
    return masked_text(width=32) | size(3, 5) | {"guidance_scale": 3.0}


def lumina_2() -> Any:
    return diffusers.Lumina2Pipeline(
        # Keys are wider than 8 numbers: such products round otherwise where several are one.
        transformer=transformer(
            "Lumina2Transformer2DModel", hidden_size=64, num_attention_heads=4, num_kv_heads=2, axes_dim_rope=(4, 6, 6)
        ),
        scheduler=flow(), vae=encoders.vae_8(), text_encoder=encoders.language("Gemma2"),
        tokenizer=encoders.chat_tokenizer(),
    )  # fmt: skip


def bria_fibo() -> Any:
    language = transformers.SmolLM3Config(**encoders.LANGUAGE | {"num_hidden_layers": 3})
    return diffusers.BriaFiboPipeline(
        transformer=transformer("BriaFiboTransformer2DModel", text_encoder_dim=16), scheduler=flow(),
        vae=encoders.wan_vae(z_dim=16, latents_mean=[0.0] * 16, latents_std=[1.0] * 16, scale_factor_spatial=16),
        text_encoder=transformers.SmolLM3ForCausalLM(language).eval(), tokenizer=encoders.chat_tokenizer(),
    )  # fmt: skip


def longcat_image(cls: Any = diffusers.LongCatImagePipeline, **more: Any) -> Any:
    components = {"vae": encoders.vae_8(), "text_encoder": encoders.language(), "text_processor": None} | more
    pipe = cls(
        scheduler=flow(), tokenizer=encoders.chat_tokenizer(), **components,
        transformer=transformer("LongCatImageTransformer2DModel", joint_attention_dim=16, in_channels=64),
    )  # fmt: skip
    pipe.tokenizer_max_length = TEXT  # instead of 512
    return pipe


def hunyuan_image() -> Any:
    guiders = {
        name: diffusers.guiders.AdaptiveProjectedMixGuidance(adaptive_projected_guidance_start_step=start)
        for name, start in (("guider", 2), ("ocr_guider", 3))
    }
    return diffusers.HunyuanImagePipeline(
        scheduler=flow(), text_encoder=None, tokenizer=None, text_encoder_2=None, tokenizer_2=None, **guiders,
        vae=diffusers.AutoencoderKLHunyuanImage(
            in_channels=3, out_channels=3, latent_channels=4, block_out_channels=(32, 32, 32, 32), layers_per_block=1,
            scaling_factor=0.5, spatial_compression_ratio=8, sample_size=128,
        ),
        transformer=transformer("HunyuanImageTransformer2DModel", text_embed_2_dim=8, patch_size=(1, 1)),
    )  # fmt: skip


def hunyuan_image_text(length: int = TEXT) -> dict[str, Any]:
    """Text of two encoders, the second of which reads what shall be written in the picture."""
    return to_long(videos.hunyuan_video_15_text(length))


def hunyuan_dit() -> Any:
    return diffusers.HunyuanDiTPipeline(
        vae=encoders.vae_8(), text_encoder=None, tokenizer=None, text_encoder_2=None, tokenizer_2=None,
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
        scheduler=diffusers.DDPMScheduler(beta_end=0.004),
        transformer=transformer(
            "HunyuanDiT2DModel", text_len=5, text_len_t5=6, use_style_cond_and_image_meta_size=True,
        ),
    )  # fmt: skip


def hunyuan_dit_text(rows: int = 1) -> dict[str, Any]:
    found = {}
    for prefix, seed in (("", 1), ("negative_", 2)):
        for suffix, length in (("", 5), ("_2", 6)):
            found[f"{prefix}prompt_embeds{suffix}"] = embeds(length, 16, rows, seed)
            found[f"{prefix}prompt_attention_mask{suffix}"] = torch.ones(rows, length)
    return found


def hi_dream() -> Any:
    pipe = diffusers.HiDreamImagePipeline(
        scheduler=flow(), vae=vae(), text_encoder=None, tokenizer=None, text_encoder_2=None, tokenizer_2=None,
        text_encoder_3=None, tokenizer_3=None, text_encoder_4=None, tokenizer_4=None,
        transformer=transformer("HiDreamImageTransformer2DModel", max_resolution=(16, 16)),
    )  # fmt: skip
    pipe.default_sample_size = 10  # every picture has so many latents, squared
    return pipe


def hi_dream_text(length: int = TEXT, rows: int = 1) -> dict[str, Any]:
    found = {}
    for prefix, seed in (("", 1), ("negative_", 2)):
        found |= {
            f"{prefix}prompt_embeds_t5": embeds(length, 32, rows, seed),
            f"{prefix}prompt_embeds_llama3": embeds(length, 16, 2 * rows, seed).unflatten(0, (2, rows)),
            f"{prefix}pooled_prompt_embeds": embeds(rows, 8, seed=seed)[0],
        }  # fmt: skip
    return found


def sana(cls: Any, **config: Any) -> Any:
    sprint = "Sprint" in cls.__name__
    return cls(
        tokenizer=None, text_encoder=None, transformer=transformer("SanaTransformer2DModel", patch_size=1, **config),
        scheduler=diffusers.SCMScheduler() if sprint else flow(shift=3.0),
        vae=diffusers.AutoencoderDC(
            in_channels=3, latent_channels=4, attention_head_dim=2, encoder_block_types=("ResBlock",) * 4,
            decoder_block_types=("ResBlock",) * 4, encoder_block_out_channels=(8,) * 4,
            decoder_block_out_channels=(8,) * 4, encoder_qkv_multiscales=((),) * 4, decoder_qkv_multiscales=((),) * 4,
            encoder_layers_per_block=(1,) * 4, decoder_layers_per_block=(1,) * 4, downsample_block_type="conv",
            upsample_block_type="interpolate", scaling_factor=0.4,
        ),
    )  # fmt: skip


def kandinsky_5(cls: Any, **config: Any) -> Any:
    """With small pictures in place of the sizes that the model was trained for."""
    pipe = videos.kandinsky_5(cls, vae=encoders.vae_8(), config=config)
    pipe.resolutions = [(80, 48), (112, 80)]
    return pipe


def prx() -> Any:
    return like_flux("PRXTransformer2DModel", diffusers.PRXPipeline)


def ideogram_4() -> Any:
    text_encoder = encoders.qwen3_vl(transformers.Qwen3VLModel, layers=36)  # of which some are read
    features = 16 * len(diffusers.pipelines.ideogram4.pipeline_ideogram4.QWEN3_VL_ACTIVATION_LAYERS)
    config = {"in_channels": 16, "llm_features_dim": features}
    return diffusers.Ideogram4Pipeline(
        scheduler=flow(), vae=flux_2_vae(), text_encoder=text_encoder, tokenizer=encoders.chat_tokenizer(),
        transformer=transformer("Ideogram4Transformer2DModel", **config),
        unconditional_transformer=transformer("Ideogram4Transformer2DModel", 1, **config),
    )  # fmt: skip


def joy_image(cls: Any, name: str) -> Any:
    """The pipelines make every picture one of 1024 x 1024 pixels or as many; 128 times smaller, it has 16 tokens.

    They draw the latents of a reference from the global generator: this autoencoder's distribution is narrower than the
    last bit of its mean.
    """
    autoencoder = encoders.wan_vae(
        dim_mult=[1] * 5, temperal_downsample=[False] * 4, scale_factor_spatial=128, latents_mean=[64.0] * 4,
    )  # fmt: skip
    autoencoder = encoders.in_large_squares(autoencoder)
    with torch.no_grad():
        autoencoder.quant_conv.weight[4:], autoencoder.quant_conv.bias[4:] = 0.0, -30.0
        autoencoder.quant_conv.bias[:4] += 64.0
    return cls(
        scheduler=flow(), vae=autoencoder, text_encoder=encoders.qwen3_vl(), tokenizer=encoders.chat_tokenizer(),
        processor=encoders.qwen_processor(max_pixels=64 * 64),
        transformer=transformer(name, hidden_size=48, rope_dim_list=[4, 4, 4]),
    )  # fmt: skip


SMALL, LARGE = size(3, 5), size(5, 7)
GUIDED = {"guidance_scale": 3.0}
NO_BINS = GUIDED | {"use_resolution_binning": False, "negative_prompt": None}
WORDS = GUIDED | {"prompt": PROMPT, "negative_prompt": NEGATIVE}
MASKED_16: dict[str, Any] = {
    "larger": LARGE, "other_prompt": masked_text(OTHER_TEXT), "two_images": masked_text(rows=2),
    "padded_prompt": padded_text(),
}  # fmt: skip
MASKED = MASKED_16 | {
    "other_prompt": masked_text(OTHER_TEXT, 32), "two_images": masked_text(width=32, rows=2),
    "padded_prompt": padded_text(32),
}  # fmt: skip
UNLIKE = FLUX | {"larger": LARGE, "other_prompt": guided(OTHER_TEXT, width=32)}
PIXART = FLUX | {"larger": size(6, 8, 4), "padded_prompt": PROMPTS}
ONE_GUIDED = "with guidance the pipeline itself takes one picture at a time"
PRX = MASKED_16 | {"two_images": ONE_GUIDED, "padded_prompt": ONE_GUIDED}
FOUR = {"negative_prompt": [NEGATIVE] * 2, "images": [film(1, 48, 80) * 2] * 2}
KANDINSKY = videos.KANDINSKY_VARIANTS | {"larger": LARGE}

ENTRIES = [
    entry("stable-diffusion-3", 14, sd3, lambda: arguments("sd3", **TINY), **FLUX),
    entry("pixart-sigma", 20, pixart, lambda: arguments("pixart", **size(4, 6, 4)), **PIXART),
    entry("pixart-alpha", 20, lambda: pixart(alpha=True), lambda: arguments("pixart", **size(4, 6, 4)), **PIXART),
    entry("chroma", 14, lambda: like_flux("ChromaTransformer2DModel", diffusers.ChromaPipeline), chroma_call, **MASKED),
    entry(
        "lumina-2", 14, lumina_2, lambda: WORDS | SMALL | {"max_sequence_length": 29, "system_prompt": "the"},
        **UNLIKE | {
            "other_prompt": {"prompt": LONG_PROMPT, "max_sequence_length": 31}, "padded_prompt": GUIDED_PROMPTS,
        },
    ),
    entry(
        "lumina-next", 20, lambda: like_flux("LuminaNextDiT2DModel", diffusers.LuminaPipeline),
        lambda: masked_text() | SMALL | GUIDED | {"clean_caption": False, "negative_prompt": None}, **MASKED_16,
    ),
    entry(
        "aura-flow", 20, lambda: like_flux("AuraFlowTransformer2DModel", diffusers.AuraFlowPipeline),
        lambda: masked_text(width=32) | SMALL | GUIDED, **MASKED,
    ),
    entry(
        "bria", 20, lambda: like_flux("BriaTransformer2DModel", diffusers.BriaPipeline, vae=vae()),
        lambda: guided(TEXT, TEXT, 32) | size(4, 6, 4) | GUIDED,
        larger=size(6, 8, 4), other_prompt=guided(OTHER_TEXT, OTHER_TEXT, 32), two_images=guided(TEXT, TEXT, 32, 2),
        padded_prompt=SAME_LENGTH,
    ),
    entry(
        "bria-fibo", 20, bria_fibo, lambda: WORDS | SMALL,
        **UNLIKE | {"other_prompt": {"prompt": LONG_PROMPT}, "padded_prompt": GUIDED_PROMPTS},
    ),
    entry(
        "bria-fibo-2", 20, lambda: diffusers.BriaFibo2Pipeline(
            transformer=transformer("BriaFibo2Transformer2DModel"), scheduler=flow(), vae=flux_2_vae(),
            text_encoder=None, processor=None,
        ), lambda: SMALL | GUIDED | {
            "prompt_embeds": embeds(11, 16, 3)[None], "negative_prompt_embeds": embeds(9, 16, 3, seed=2)[None],
        }, **UNLIKE | {
            "other_prompt": {"prompt_embeds": embeds(13, 16, 3)[None]}, "padded_prompt": {
                "prompt_embeds": padded_embeds(48)[0].unflatten(-1, (3, 16)).transpose(1, 2),
                "prompt_embeds_mask": padded_embeds(48)[1],
                "negative_prompt_embeds": embeds(9, 16, 6).unflatten(0, (2, 3)),
            },
        },
    ),
    entry(
        "ovis-image", 14, lambda: like_flux("OvisImageTransformer2DModel", diffusers.OvisImagePipeline),
        lambda: guided(width=32) | SMALL | GUIDED | {"negative_prompt": None}, **UNLIKE,
    ),
    entry(
        "longcat-image", 14, longcat_image, lambda: WORDS | SMALL | {"enable_prompt_rewrite": False},
        **UNLIKE | {"other_prompt": "the pipeline pads every prompt to 512 tokens"},
    ),
    entry(
        "hunyuan-image", 14, hunyuan_image, lambda: hunyuan_image_text() | size(4, 6, 8), larger=size(6, 8, 8),
        other_prompt=hunyuan_image_text(OTHER_TEXT), two_images=TWO,
        padded_prompt=to_long(videos.hunyuan_video_15_padded()),
    ),
    entry(
        "hunyuan-dit", 20, hunyuan_dit, lambda: hunyuan_dit_text() | SMALL | GUIDED | {"use_resolution_binning": False},
        larger=LARGE, other_prompt="the text has the length that the model says", two_images=hunyuan_dit_text(rows=2),
        padded_prompt=hunyuan_dit_text(rows=2) | {
            "prompt_embeds": padded_embeds(16, 5, 3)[0], "prompt_attention_mask": padded_embeds(16, 5, 3)[1].float(),
        },
    ),
    entry(
        "hidream", 14, hi_dream, lambda: hi_dream_text() | size(3, 6, 4) | GUIDED,
        **UNLIKE | {"larger": size(5, 5, 4), "other_prompt": hi_dream_text(OTHER_TEXT)},
    ),
    entry(
        "hidream-square", 14, hi_dream, lambda: hi_dream_text() | size(5, 5, 4) | GUIDED,
        **UNLIKE | {"larger": "a square picture has one size", "other_prompt": hi_dream_text(OTHER_TEXT)},
    ),
    entry(
        "sana", 20, lambda: sana(diffusers.SanaPipeline), lambda: masked_text() | size(4, 5, 32) | NO_BINS,
        **MASKED_16 | {"larger": size(5, 7, 32)},
    ),
    entry(
        "sana-sprint", 20, lambda: sana(
            diffusers.SanaSprintPipeline, guidance_embeds=True, qk_norm="rms_norm_across_heads",
        ), lambda: {
            "prompt_embeds": embeds(11), "prompt_attention_mask": torch.ones(1, 11).bool(),
            "use_resolution_binning": False, "num_inference_steps": 2, "intermediate_timesteps": None,
            **size(4, 5, 32),
        }, larger=size(5, 7, 32),
        other_prompt={"prompt_embeds": embeds(13), "prompt_attention_mask": torch.ones(1, 13).bool()}, two_images=TWO,
        padded_prompt={"prompt_embeds": padded_embeds()[0], "prompt_attention_mask": padded_embeds()[1]},
    ),
    entry(
        "kandinsky-5-image", 14, lambda: kandinsky_5(diffusers.Kandinsky5T2IPipeline),
        lambda: videos.kandinsky_text() | SMALL | GUIDED, **KANDINSKY,
    ),
    entry(
        "kandinsky-5-edit", 14, lambda: kandinsky_5(diffusers.Kandinsky5I2IPipeline, visual_cond=True),
        lambda: videos.kandinsky_text() | SMALL | GUIDED | {"image": picture(48, 80)},
        **KANDINSKY | {"two_images": videos.kandinsky_text(rows=2) | {"image": film(2, 48, 80)}},
    ),
    entry(
        "cogview-3", 20, lambda: like_flux(
            "CogView3PlusTransformer2DModel", diffusers.CogView3PlusPipeline,
            scheduler=diffusers.CogVideoXDDIMScheduler(),
        ), lambda: guided(TEXT, TEXT) | SMALL | GUIDED, larger=LARGE, other_prompt=guided(OTHER_TEXT, OTHER_TEXT),
        two_images=guided(TEXT, TEXT, rows=2), padded_prompt=SAME_LENGTH,
    ),
    entry(
        "cogview-4", 20, lambda: like_flux("CogView4Transformer2DModel", diffusers.CogView4Pipeline),
        lambda: guided() | SMALL | GUIDED, **UNLIKE | {"other_prompt": guided(OTHER_TEXT)},
    ),
    entry("prx", 20, prx, lambda: masked_text() | SMALL | NO_BINS, **PRX),
    entry(
        "prx-distilled", 20, prx,
        lambda: masked_text() | SMALL | {"guidance_scale": 1.0, "use_resolution_binning": False}, **MASKED_16,
    ),
    entry(
        "ernie-image", 14, lambda: like_flux(
            "ErnieImageTransformer2DModel", diffusers.ErnieImagePipeline, vae=flux_2_vae(),
            config={"in_channels": 16, "out_channels": 16},
        ), lambda: SMALL | GUIDED | {
            "prompt_embeds": [embeds(11)[0]], "negative_prompt_embeds": [embeds(9, seed=2)[0]], "use_pe": False,
        }, **UNLIKE | {
            "other_prompt": {"prompt_embeds": [embeds(13)[0]]}, "padded_prompt": {
                "prompt_embeds": [embeds(11)[0], embeds(6)[0]], "negative_prompt_embeds": [embeds(9)[0]] * 2,
            },
        },
    ),
    entry(
        "ideogram-4", 14, ideogram_4,
        lambda: SMALL | GUIDED | {"prompt": PROMPT, "max_sequence_length": 11, "guidance_schedule": None},
        **PIXART | {"larger": LARGE, "transformers": ("transformer", "unconditional_transformer")},
    ),
    entry(
        "glm-image", 14, lambda: diffusers.GlmImagePipeline(
            tokenizer=None, processor=None, text_encoder=None, vision_language_encoder=None, vae=vae(),
            transformer=transformer("GlmImageTransformer2DModel"), scheduler=flow(),
        ), lambda: guided(TEXT, TEXT) | size(4, 6, 4) | GUIDED | {"prior_token_ids": torch.arange(24)[None] % 8},
        **UNLIKE | {
            "larger": size(6, 8, 4) | {"prior_token_ids": torch.arange(48)[None] % 8},
            "other_prompt": guided(OTHER_TEXT, OTHER_TEXT),
        },
    ),
    entry(
        "nucleus-moe", 14, lambda: diffusers.NucleusMoEImagePipeline(
            transformer=transformer(
                "NucleusMoEImageTransformer2DModel", moe_enabled=True, dense_moe_strategy="all_moe", num_experts=4,
                moe_intermediate_dim=16, capacity_factors=[1.0] * 4,
            ), scheduler=flow(), vae=encoders.qwen_image_vae(), text_encoder=None, processor=None,
        ), lambda: qwen_image_call() | GUIDED | {"true_cfg_scale": REMOVED}, **QWEN_IMAGE,
    ),
    entry(
        "joyimage-edit", 14, lambda: joy_image(diffusers.JoyImageEditPipeline, "JoyImageEditTransformer3DModel"),
        lambda: masked(11, 16) | masked(9, 16, negative=True) | GUIDED | {"image": picture(48, 80)},
        larger={"image": picture(64, 64)}, other_prompt=masked(13, 16), two_images=TWO, padded_prompt=padded(16),
    ),
    entry(
        "joyimage-edit-plus", 14,
        lambda: joy_image(diffusers.JoyImageEditPlusPipeline, "JoyImageEditPlusTransformer3DModel"),
        lambda: WORDS | {"images": [film(1, 48, 80) * 2]}, larger={"images": [film(1, 64, 64) * 2]},
        other_prompt={"prompt": LONG_PROMPT},
        two_images=FOUR | {"prompt": [PROMPT] * 2}, padded_prompt=FOUR | PROMPTS,
    ),
    entry(
        "longcat-image-edit", 14, lambda: longcat_image(
            # Makes every picture one of 1024 x 1024 pixels or as many, as `qwen_image` says.
            diffusers.LongCatImageEditPipeline, text_encoder=encoders.qwen2_5_vl(), vae=encoders.vae_8(16, levels=8),
            text_processor=encoders.qwen_processor(transformers.Qwen2VLProcessor, 64 * 64),
        ), lambda: WORDS | {"image": picture(48, 80)},
        larger={"image": picture(64, 64)}, other_prompt="the pipeline pads every prompt to 512 tokens",
        two_images=TWO, padded_prompt=ONE_PROMPT,
    ),
    entry(
        "stable-diffusion-3-img2img", 14, lambda: diffusers.StableDiffusion3Img2ImgPipeline(**sd3().components),
        lambda: arguments("sd3", **TINY, image=picture(12, 20), strength=1.0),
        **FLUX | {"larger": TINY_LARGER | {"image": picture(20, 28)}},
    ),
    entry(
        "prx-pixel", 20, lambda: diffusers.PRXPixelPipeline(
            transformer=transformer(
                "PRXTransformer2DModel", in_channels=3, patch_size=4, bottleneck_size=8, resolution_embeds=True,
            ), scheduler=flow(), text_encoder=None, tokenizer=None, prompt_max_tokens=TEXT,
        ), lambda: masked_text() | size(4, 6, 8) | NO_BINS | {"output_type": "pt"}, **PRX | {"larger": size(6, 8, 8)},
    ),
    entry(
        "dit", 20, lambda: diffusers.DiTPipeline(
            transformer=transformer(
                "DiTTransformer2DModel", out_channels=8, num_embeds_ada_norm=1000, sample_size=10,
            ), vae=vae(), scheduler=diffusers.DDIMScheduler(beta_end=0.004),
        ), lambda: GUIDED | {"class_labels": [1], "output_type": "np"}, larger="the size is the model's",
        other_prompt="the pipeline takes classes, not text", two_images={"class_labels": [1, 2]},
        padded_prompt="the pipeline takes classes, not text",
    ),
]  # fmt: skip

"""Pipelines that make videos, with or without sound."""

from __future__ import annotations

from typing import Any

import diffusers
import torch

from tests.zoo import encoders
from tests.zoo.entry import (
    NEGATIVE_TEXT,
    OTHER_TEXT,
    TEXT,
    embeds,
    entry,
    film,
    guided,
    masked_text,
    padded_embeds,
    padded_text,
    picture,
    transformer,
)
from tests.zoo.pictures import flow

TWO = {"num_videos_per_prompt": 2}
ONE_VIDEO = "the pipeline makes one video at a time: with two, it fails"
ZERO_PADDED = "the pipeline pads every prompt with zeros to one length, and gives no mask"


def size(frames: int, height: int, width: int, *, ratio: int = 4, pixels: int = 16) -> dict[str, int]:
    """The size of a video with so many latent frames, rows and columns of tokens."""
    return {"num_frames": (frames - 1) * ratio + 1, "height": height * pixels, "width": width * pixels}


OTHER_EMBEDS = {"prompt_embeds": embeds(OTHER_TEXT)}


def ltx_2_vae(**config: Any) -> Any:
    vae = diffusers.AutoencoderKLLTX2Video(
        latent_channels=4, block_out_channels=(8,), decoder_block_out_channels=(8,), layers_per_block=(1,),
        decoder_layers_per_block=(1, 1), spatio_temporal_scaling=(True,), decoder_spatio_temporal_scaling=(True,),
        decoder_inject_noise=(False, False), downsample_type=("spatial",), upsample_residual=(False,),
        upsample_factor=(1,), timestep_conditioning=False, patch_size=16, patch_size_t=1, encoder_causal=True,
        decoder_causal=False, **config,
    )  # fmt: skip
    vae.use_framewise_encoding = vae.use_framewise_decoding = False
    return vae


def ltx_2(cls: Any, **config: Any) -> Any:
    heads = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "num_learnable_registers": None}
    connector = {f"{kind}_connector_{name}": value for kind in ("video", "audio") for name, value in heads.items()}
    return cls(
        scheduler=flow(), vae=ltx_2_vae(), text_encoder=None, tokenizer=None,
        audio_vae=diffusers.AutoencoderKLLTX2Audio(
            base_channels=4, output_channels=2, ch_mult=(1,), num_res_blocks=1, attn_resolutions=None, in_channels=2,
            resolution=32, latent_channels=2, norm_type="pixel", causality_axis="height", dropout=0.0,
            mid_block_add_attention=False, sample_rate=16000, mel_hop_length=160, is_causal=True, mel_bins=8,
        ),
        connectors=diffusers.pipelines.ltx2.connectors.LTX2TextConnectors(
            caption_channels=16, text_proj_in_factor=3, connector_rope_base_seq_len=32, rope_double_precision=False,
            rope_type="split", **connector,
        ),
        vocoder=None,
        # Sound tokens are wider than those of the video: products of 8 numbers round otherwise where several are one.
        transformer=transformer(
            "LTX2VideoTransformer3DModel", rope_type="split", audio_attention_head_dim=12, audio_cross_attention_dim=24,
            **config,
        ),
    )  # fmt: skip


def ltx_2_call() -> dict[str, Any]:
    return masked_text(width=48) | size(5, 3, 5, ratio=2, pixels=32) | {
        "guidance_scale": 3.0, "stg_scale": 0.0, "modality_scale": 1.0, "audio_guidance_scale": 3.0,
        "audio_stg_scale": 0.0, "audio_modality_scale": 1.0, "spatio_temporal_guidance_blocks": None,
        "use_cross_timestep": False, "frame_rate": 24.0,
    }  # fmt: skip


LTX_2: dict[str, Any] = {
    "larger": size(7, 3, 6, ratio=2, pixels=32), "other_prompt": masked_text(OTHER_TEXT, 48),
    "two_images": masked_text(width=48, rows=2), "padded_prompt": {
        # Padded in front, as the language model of LTX-2 has it.
        "prompt_embeds": padded_embeds(48)[0].flip(1), "prompt_attention_mask": padded_embeds(48)[1].flip(1),
        "negative_prompt_embeds": embeds(TEXT, 48, 2), "negative_prompt_attention_mask": padded_embeds(48)[1].flip(1),
    },
}  # fmt: skip


def wan(cls: Any, *, vae: Any = None, **more: Any) -> Any:
    return cls(tokenizer=None, text_encoder=None, vae=vae or encoders.wan_vae(), **({"scheduler": unipc()} | more))


def unipc() -> Any:
    return diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )  # fmt: skip


def wan_transformer(seed: int = 0, name: str = "WanTransformer3DModel", **config: Any) -> Any:
    return transformer(name, seed, **config)


def wan_with_image(cls: Any, name: str = "WanTransformer3DModel") -> Any:
    """With keys of an image of its own."""
    model = wan_transformer(name=name, in_channels=12, image_dim=8, added_kv_proj_dim=24)
    return wan(cls, transformer=model, **encoders.clip_vision())


def wan_call() -> dict[str, Any]:
    return guided() | size(5, 3, 4) | {"guidance_scale": 3.0}


def wan_ti2v(cls: Any) -> Any:
    vae = encoders.wan_vae(
        in_channels=12, out_channels=12, is_residual=True, patch_size=2, scale_factor_spatial=16,
        scale_factor_temporal=4, base_dim=4, decoder_base_dim=4,
    )  # fmt: skip
    return wan(cls, vae=vae, transformer=wan_transformer(), expand_timesteps=True)


def ltx(cls: Any) -> Any:
    vae = diffusers.AutoencoderKLLTXVideo(
        latent_channels=4, block_out_channels=(8, 8, 8), decoder_block_out_channels=(8, 8, 8),
        layers_per_block=(1, 1, 1, 1), decoder_layers_per_block=(1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False), decoder_spatio_temporal_scaling=(True, True, False),
        decoder_inject_noise=(False,) * 4, upsample_residual=(False,) * 3, upsample_factor=(1,) * 3,
        timestep_conditioning=False, patch_size=8, patch_size_t=1, encoder_causal=True, decoder_causal=False,
    )  # fmt: skip
    vae.use_framewise_encoding = vae.use_framewise_decoding = False
    return cls(
        scheduler=flow(), vae=vae, text_encoder=None, tokenizer=None,
        transformer=transformer("LTXVideoTransformer3DModel"),
    )  # fmt: skip


def ltx_call() -> dict[str, Any]:
    return masked_text() | size(5, 3, 4, pixels=32) | {"guidance_scale": 3.0}


LTX_VARIANTS: dict[str, Any] = {
    "larger": size(7, 3, 5, pixels=32), "other_prompt": masked_text(OTHER_TEXT),
    "two_images": masked_text(rows=2), "padded_prompt": padded_text(),
}  # fmt: skip


def hunyuan_vae() -> Any:
    return diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4, down_block_types=("HunyuanVideoDownBlock3D",) * 4, norm_num_groups=4, layers_per_block=1,
        up_block_types=("HunyuanVideoUpBlock3D",) * 4, block_out_channels=(8, 8, 8, 8), mid_block_add_attention=False,
    )  # fmt: skip


def hunyuan_video(cls: Any, name: str = "HunyuanVideoTransformer3DModel", **config: Any) -> Any:
    more = config.pop("components", {})
    return cls(
        text_encoder=None, tokenizer=None, text_encoder_2=None, tokenizer_2=None, scheduler=flow(shift=3.0),
        vae=hunyuan_vae(), transformer=transformer(name, **{"patch_size": 2} | config), **more,
    )  # fmt: skip


def hunyuan_video_text(rows: int = 1) -> dict[str, Any]:
    return masked_text(rows=rows) | guided(rows=rows) | {
        "negative_prompt_attention_mask": torch.ones(rows, NEGATIVE_TEXT).bool(),
        "pooled_prompt_embeds": embeds(rows, 8)[0], "negative_pooled_prompt_embeds": embeds(rows, 8, seed=2)[0],
    }  # fmt: skip


def hunyuan_video_call() -> dict[str, Any]:
    """Two calls of the transformer for each step, with texts of unlike length."""
    return hunyuan_video_text() | size(5, 3, 4) | {"true_cfg_scale": 3.0}


HUNYUAN_VARIANTS: dict[str, Any] = {
    "larger": size(7, 3, 5),
    "other_prompt": OTHER_EMBEDS | {"prompt_attention_mask": torch.ones(1, OTHER_TEXT).bool()},
    "two_images": hunyuan_video_text(rows=2), "padded_prompt": hunyuan_video_text(rows=2) | padded_text(),
}  # fmt: skip
HUNYUAN_IMAGE_VARIANTS: dict[str, Any] = HUNYUAN_VARIANTS | {
    variant: HUNYUAN_VARIANTS[variant] | {"image": film(2, 48, 64)} for variant in ("two_images", "padded_prompt")
}  # fmt: skip


def hunyuan_video_15(cls: Any, **more: Any) -> Any:
    pipe = cls(
        text_encoder=None, tokenizer=None, text_encoder_2=None, tokenizer_2=None, scheduler=flow(shift=3.0),
        vae=diffusers.AutoencoderKLHunyuanVideo15(
            latent_channels=4, block_out_channels=(8, 8), layers_per_block=1, spatial_compression_ratio=4,
            temporal_compression_ratio=2, downsample_match_channel=False, upsample_match_channel=False,
        ),
        guider=diffusers.guiders.ClassifierFreeGuidance(guidance_scale=3.0),
        transformer=transformer("HunyuanVideo15Transformer3DModel", in_channels=9, **more.pop("config", {})), **more,
    )  # fmt: skip
    pipe.vision_num_semantic_tokens = 17
    return pipe


def hunyuan_video_15_text(length: int = TEXT, rows: int = 1) -> dict[str, Any]:
    mask, glyphs = torch.ones(rows, length, dtype=torch.bool), torch.ones(rows, 7, dtype=torch.bool)
    return guided(length, length, rows=rows) | {
        "prompt_embeds_mask": mask, "prompt_embeds_2": embeds(7, 8, rows), "prompt_embeds_mask_2": glyphs,
        "negative_prompt_embeds_mask": mask, "negative_prompt_embeds_2": embeds(7, 8, rows, seed=2),
        "negative_prompt_embeds_mask_2": glyphs,
    }  # fmt: skip


def hunyuan_video_15_padded() -> dict[str, Any]:
    text, mask = padded_embeds()
    glyphs, glyph_mask = padded_embeds(8, 7, 3)
    return hunyuan_video_15_text(rows=2) | {
        "prompt_embeds": text, "prompt_embeds_mask": mask, "prompt_embeds_2": glyphs,
        "prompt_embeds_mask_2": glyph_mask, "negative_prompt_embeds_mask": mask,
    }  # fmt: skip


HUNYUAN_15_VARIANTS: dict[str, Any] = {
    "larger": size(7, 3, 5, ratio=2, pixels=4), "other_prompt": hunyuan_video_15_text(OTHER_TEXT),
    "two_images": hunyuan_video_15_text(rows=2),
    "padded_prompt": hunyuan_video_15_padded(),
}  # fmt: skip


def kandinsky_text(length: int = TEXT, negative: int = NEGATIVE_TEXT, rows: int = 1) -> dict[str, Any]:
    """What the pipelines of Kandinsky 5 take: in place of masks, where each prompt begins and the last ends."""
    return {
        "prompt_embeds_qwen": embeds(length, rows=rows), "prompt_embeds_clip": embeds(rows, 8)[0],
        "prompt_cu_seqlens": torch.arange(rows + 1, dtype=torch.int32) * length,
        "negative_prompt_embeds_qwen": embeds(negative, rows=rows, seed=2),
        "negative_prompt_embeds_clip": embeds(rows, 8, seed=2)[0],
        "negative_prompt_cu_seqlens": torch.arange(rows + 1, dtype=torch.int32) * negative,
    }  # fmt: skip


def kandinsky_5(cls: Any, **more: Any) -> Any:
    return cls(
        transformer=transformer("Kandinsky5Transformer3DModel", **more.pop("config", {})), text_encoder=None,
        tokenizer=None, text_encoder_2=None, tokenizer_2=None, scheduler=flow(shift=3.0),
        **{"vae": hunyuan_vae()} | more,
    )  # fmt: skip


KANDINSKY_VARIANTS: dict[str, Any] = {
    "larger": size(7, 3, 5), "other_prompt": kandinsky_text(OTHER_TEXT),
    "two_images": kandinsky_text(rows=2), "padded_prompt": "the pipeline gives the transformer no mask",
}  # fmt: skip


def kandinsky_6(**config: Any) -> Any:
    sound = {
        "audio_vae": diffusers.MMAudioVAE(
            mel_bins=8, latent_channels=4, hidden_channels=8, channel_multipliers=(1, 2), layers_per_block=1,
            sample_rate=800, n_fft=64, hop_length=16,
        ),
        "vocoder": diffusers.MMAudioVocoder(
            num_mels=8, upsample_initial_channel=8, upsample_rates=(4, 4), upsample_kernel_sizes=(8, 8),
            resblock_kernel_sizes=(3,), resblock_dilation_sizes=((1, 3, 5),),
        ),
    }  # fmt: skip
    return diffusers.Kandinsky6TI2VAPipeline(
        transformer=transformer("Kandinsky6Transformer3DModel", **config), text_encoder=None, tokenizer=None,
        text_encoder_2=None, tokenizer_2=None, scheduler=flow(shift=3.0), vae=hunyuan_vae(), **sound,
    )  # fmt: skip


def kandinsky_6_text(length: int = TEXT, rows: int = 1) -> dict[str, Any]:
    return guided(length, rows=rows) | {
        "pooled_prompt_embeds": embeds(rows, 8)[0], "negative_pooled_prompt_embeds": embeds(rows, 8, seed=2)[0],
    }  # fmt: skip


def kandinsky_6_call() -> dict[str, Any]:
    return kandinsky_6_text() | size(5, 3, 4) | {"guidance_scale": 3.0, "sample_audio": True}


KANDINSKY_6_VARIANTS: dict[str, Any] = {
    "larger": size(7, 3, 5), "other_prompt": kandinsky_6_text(OTHER_TEXT), "two_images": TWO,
    "padded_prompt": "a mask is made by the text encoders only, and cannot be given with embeddings",
}  # fmt: skip


def wan_animate() -> Any:
    motion = {
        "motion_encoder_channel_sizes": {"4": 16, "8": 16, "16": 16}, "motion_encoder_size": 16, "motion_style_dim": 8,
        "motion_dim": 4, "motion_encoder_dim": 16, "face_encoder_hidden_dim": 16, "face_encoder_num_heads": 2,
    }  # fmt: skip
    return wan(
        diffusers.WanAnimatePipeline, transformer=wan_transformer(name="WanAnimateTransformer3DModel", **motion),
        **encoders.clip_vision(),
    )  # fmt: skip


def wan_animate_films(frames: int = 17, height: int = 48, width: int = 64) -> dict[str, Any]:
    return {
        "image": picture(height, width), "pose_video": film(frames, height, width),
        "face_video": film(frames, 16, 16, seed=50), "height": height, "width": width,
        "segment_frame_length": frames,
    }  # fmt: skip


def kandinsky_6_sr() -> Any:
    return diffusers.Kandinsky6SRPipeline(
        vae=diffusers.Kandinsky6SRVAE(
            latent_channels=4, encoder_block_out_channels=(8, 8, 8), decoder_block_out_channels=(8, 8, 8),
            layers_per_block=1,
        ),
        # 8 rows and columns of tokens are a block of its sparse attention.
        transformer=transformer("Kandinsky6SRTransformer3DModel", tile_sizes=((32, 32),)),
        scheduler=flow(shift=3.0),
    )  # fmt: skip


WAN_VARIANTS: dict[str, Any] = {
    "larger": size(7, 3, 5), "other_prompt": OTHER_EMBEDS, "two_images": guided(rows=2), "padded_prompt": ZERO_PADDED,
}  # fmt: skip
WAN_IMAGE_VARIANTS: dict[str, Any] = WAN_VARIANTS | {
    "other_prompt": "attention takes the first tokens of a context, all but the last 512, for the image's",
    "two_images": guided(512, 512, rows=2),
}  # fmt: skip
WAN_TI2V = WAN_VARIANTS | {"larger": size(7, 3, 5, pixels=32)}
BOTH = {"transformers": ("transformer", "transformer_2")}

ENTRIES = [
    entry("ltx-2", 3, lambda: ltx_2(diffusers.LTX2Pipeline), ltx_2_call, **LTX_2),
    entry(
        "ltx-2-image-to-video", 3, lambda: ltx_2(
            diffusers.LTX2ImageToVideoPipeline, gated_attn=True, audio_gated_attn=True,
        ), lambda: ltx_2_call() | {"image": picture(96, 128), "image_crf": 0}, **LTX_2,
    ),
    entry(
        "wan-2.2", 5, lambda: wan(
            diffusers.WanPipeline, transformer=wan_transformer(), transformer_2=wan_transformer(1), boundary_ratio=0.875
        ), lambda: wan_call() | {"guidance_scale_2": 2.0}, **WAN_VARIANTS, **BOTH,
    ),
    entry(
        "wan-2.2-image-to-video", 5, lambda: wan(
            diffusers.WanImageToVideoPipeline, transformer=wan_transformer(in_channels=12),
            transformer_2=wan_transformer(1, in_channels=12), boundary_ratio=0.875,
        ), lambda: wan_call() | {"image": picture(48, 64), "guidance_scale_2": 2.0}, **WAN_VARIANTS, **BOTH,
    ),
    entry(
        "wan-2.2-ti2v", 5, lambda: wan_ti2v(diffusers.WanPipeline), lambda: wan_call() | size(5, 3, 4, pixels=32),
        **WAN_TI2V,
    ),
    entry(
        "wan-2.2-ti2v-image", 5, lambda: wan_ti2v(diffusers.WanImageToVideoPipeline),
        lambda: wan_call() | size(5, 3, 4, pixels=32) | {"image": picture(96, 128)}, **WAN_TI2V,
    ),
    entry("ltx", 14, lambda: ltx(diffusers.LTXPipeline), ltx_call, **LTX_VARIANTS),
    entry(
        "ltx-image-to-video", 14, lambda: ltx(diffusers.LTXImageToVideoPipeline),
        lambda: ltx_call() | {"image": picture(96, 128)}, **LTX_VARIANTS,
    ),
    entry(
        "ltx-condition", 14, lambda: ltx(diffusers.LTXConditionPipeline),
        lambda: ltx_call() | {"image": picture(96, 128), "frame_index": 8, "strength": 0.8},
        **LTX_VARIANTS | {"two_images": ONE_VIDEO, "padded_prompt": ONE_VIDEO},
    ),
    entry(
        "hunyuan-video", 14, lambda: hunyuan_video(diffusers.HunyuanVideoPipeline), hunyuan_video_call,
        **HUNYUAN_VARIANTS,
    ),
    entry(
        "hunyuan-video-image-to-video", 14, lambda: hunyuan_video(
            diffusers.HunyuanVideoImageToVideoPipeline, image_condition_type="token_replace", guidance_embeds=True,
            components={"image_processor": None},
        ), lambda: hunyuan_video_call() | {"image": picture(48, 64)}, **HUNYUAN_IMAGE_VARIANTS,
    ),
    entry(
        "hunyuan-skyreels-image-to-video", 14, lambda: hunyuan_video(
            diffusers.HunyuanSkyreelsImageToVideoPipeline, in_channels=8, guidance_embeds=True,
        ), lambda: hunyuan_video_call() | {"image": picture(48, 64)}, **HUNYUAN_IMAGE_VARIANTS,
    ),
    entry(
        "hunyuan-video-1.5", 14, lambda: hunyuan_video_15(diffusers.HunyuanVideo15Pipeline),
        lambda: hunyuan_video_15_text() | size(5, 3, 4, ratio=2, pixels=4), **HUNYUAN_15_VARIANTS,
    ),
    entry(
        "hunyuan-video-framepack", 14, lambda: hunyuan_video(
            diffusers.HunyuanVideoFramepackPipeline, "HunyuanVideoFramepackTransformer3DModel", guidance_embeds=True,
            has_image_proj=True, image_proj_dim=8, has_clean_x_embedder=True, components=encoders.siglip_vision(),
        ), lambda: hunyuan_video_call() | {"image": picture(48, 64), "latent_window_size": 5, **size(5, 4, 4)},
        **HUNYUAN_VARIANTS | {
            "larger": {"image": picture(64, 96), **size(5, 4, 6)}, "two_images": ONE_VIDEO, "padded_prompt": ONE_VIDEO,
        },
    ),
    entry(
        "hunyuan-video-1.5-image-to-video", 14, lambda: hunyuan_video_15(
            diffusers.HunyuanVideo15ImageToVideoPipeline, config={"task_type": "i2v"},
            **encoders.siglip_vision(),
        ), lambda: hunyuan_video_15_text() | {"image": picture(16, 16), "num_frames": 9},
        **HUNYUAN_15_VARIANTS | {"larger": {"num_frames": 13}},
    ),
    entry(
        "kandinsky-5", 14, lambda: kandinsky_5(diffusers.Kandinsky5T2VPipeline),
        lambda: kandinsky_text() | size(5, 3, 4) | {"guidance_scale": 3.0}, **KANDINSKY_VARIANTS,
    ),
    entry(
        "kandinsky-5-image-to-video", 14, lambda: kandinsky_5(
            diffusers.Kandinsky5I2VPipeline, config={"visual_cond": True},
        ), lambda: kandinsky_text() | size(5, 3, 4) | {"guidance_scale": 3.0, "image": picture(48, 64)},
        **KANDINSKY_VARIANTS,
    ),
    entry("kandinsky-6", 14, kandinsky_6, kandinsky_6_call, **KANDINSKY_6_VARIANTS),
    entry(
        "kandinsky-6-image-to-video", 14, lambda: kandinsky_6(visual_cond=True, visual_token_type_num_embeddings=2),
        lambda: kandinsky_6_call() | {"image": picture(48, 64)}, **KANDINSKY_6_VARIANTS,
    ),
    entry(
        "wan-animate", 10, wan_animate, lambda: guided(512, 512) | wan_animate_films() | {"guidance_scale": 3.0},
        **WAN_IMAGE_VARIANTS | {"larger": wan_animate_films(25, 48, 80)},
    ),
    entry(
        "kandinsky-6-super-resolution", 14, kandinsky_6_sr, lambda: {
            "video": film(5, 16, 16), "resolution_scale": 2, "output_type": "pt",
        }, larger={"video": film(9, 16, 16)}, other_prompt="the pipeline takes no text",
        two_images="the pipeline takes one video at a time", padded_prompt="the pipeline takes no text",
    ),
    entry(
        "ltx-2-condition", 3, lambda: ltx_2(diffusers.LTX2ConditionPipeline), lambda: ltx_2_call() | {
            "conditions": diffusers.pipelines.ltx2.pipeline_ltx2_condition.LTX2VideoCondition(
                frames=picture(96, 128), index=0, strength=1.0, crf=0,
            ),
        }, **LTX_2,
    ),
    entry(
        "wan-2.1", 10, lambda: wan(diffusers.WanPipeline, transformer=wan_transformer(), scheduler=flow(shift=3.0)),
        wan_call, **WAN_VARIANTS,
    ),
    entry(
        "wan-2.1-image-to-video", 10, lambda: wan_with_image(diffusers.WanImageToVideoPipeline),
        lambda: wan_call() | guided(512, 512) | {"image": picture(48, 64)}, **WAN_IMAGE_VARIANTS,
    ),
    entry(
        "wan-vace", 10, lambda: wan(
            diffusers.WanVACEPipeline, transformer=wan_transformer(
                name="WanVACETransformer3DModel", vace_in_channels=8 + 64,
            ),
        ), lambda: wan_call() | {
            "video": film(17, 48, 64), "mask": film(17, 48, 64, seed=50),
        }, **WAN_VARIANTS | {
            "larger": size(7, 3, 5) | {"video": film(25, 48, 80), "mask": film(25, 48, 80, seed=50)},
            "two_images": ONE_VIDEO,
        },
    ),
    entry(
        "wan-video-to-video", 10, lambda: wan(
            diffusers.WanVideoToVideoPipeline, transformer=wan_transformer(),
        ), lambda: guided() | {
            "guidance_scale": 3.0, "video": film(17, 48, 64), "height": 48, "width": 64, "strength": 1.0,
        },
        **WAN_VARIANTS | {"larger": {"video": film(25, 48, 80), "height": 48, "width": 80}},
    ),
]  # fmt: skip

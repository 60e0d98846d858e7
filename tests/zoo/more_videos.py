"""Pipelines that make videos, of families that are used less."""

from __future__ import annotations

from typing import Any

import diffusers
import torch

from tests.tiny import vae
from tests.zoo import encoders
from tests.zoo.entry import OTHER_TEXT, TEXT, entry, film, guided, masked_text, padded_text, picture, transformer
from tests.zoo.pictures import LONG_PROMPT, NEGATIVE, PROMPT, flow
from tests.zoo.videos import (
    LTX_VARIANTS,
    ONE_VIDEO,
    WAN_IMAGE_VARIANTS,
    WAN_VARIANTS,
    ZERO_PADDED,
    ltx_2_vae,
    ltx_call,
    size,
    unipc,
    wan,
    wan_call,
    wan_transformer,
    wan_with_image,
)

ONE_SAMPLE = "the pipeline takes one sample at a time"


def cogvideo(cls: Any, name: str = "CogVideoXTransformer3DModel", **config: Any) -> Any:
    rotary = {"use_rotary_positional_embeddings": True, "attention_head_dim": 16}
    return cls(
        tokenizer=None, text_encoder=None,
        vae=diffusers.AutoencoderKLCogVideoX(
            down_block_types=("CogVideoXDownBlock3D",) * 4, up_block_types=("CogVideoXUpBlock3D",) * 4,
            block_out_channels=(8, 8, 8, 8), latent_channels=4, layers_per_block=1, norm_num_groups=2,
            temporal_compression_ratio=4,
        ),
        transformer=transformer(name, **rotary | config),
        scheduler=diffusers.CogVideoXDPMScheduler(prediction_type="v_prediction"),
    )  # fmt: skip


def cogvideo_call() -> dict[str, Any]:
    return guided(TEXT, TEXT) | size(5, 3, 4) | {"guidance_scale": 3.0}


COGVIDEO_VARIANTS: dict[str, Any] = {
    "larger": size(7, 3, 5), "other_prompt": guided(OTHER_TEXT, OTHER_TEXT), "two_images": guided(TEXT, TEXT, rows=2),
    "padded_prompt": "the pipeline pads every prompt to one length, and gives no mask",
}  # fmt: skip


def mochi() -> Any:
    return diffusers.MochiPipeline(
        scheduler=flow(), text_encoder=None, tokenizer=None, transformer=transformer("MochiTransformer3DModel"),
        vae=diffusers.AutoencoderKLMochi(
            latent_channels=4, latents_mean=[0.0] * 4, latents_std=[1.0] * 4, encoder_block_out_channels=(32,) * 4,
            decoder_block_out_channels=(32,) * 4, layers_per_block=(1,) * 5,
        ),
    )  # fmt: skip


def sky_reels(cls: Any, **config: Any) -> Any:
    return wan(cls, transformer=wan_transformer(name="SkyReelsV2Transformer3DModel", **config))


def chrono_edit() -> Any:
    return wan_with_image(diffusers.ChronoEditPipeline, "ChronoEditTransformer3DModel")


def allegro() -> Any:
    vae = diffusers.AutoencoderKLAllegro(
        down_block_types=("AllegroDownBlock3D",) * 4, up_block_types=("AllegroUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8), latent_channels=4, layers_per_block=1, norm_num_groups=2,
        temporal_compression_ratio=4,
    )  # fmt: skip
    return diffusers.AllegroPipeline(
        tokenizer=None, text_encoder=None, vae=vae, scheduler=diffusers.DDIMScheduler(beta_end=0.004),
        transformer=transformer("AllegroTransformer3DModel", caption_channels=16),
    )  # fmt: skip


def sana_video(cls: Any) -> Any:
    return cls(
        tokenizer=None, text_encoder=None, vae=encoders.wan_vae(),
        transformer=transformer("SanaVideoTransformer3DModel"),
        scheduler=flow(shift=3.0) if "ImageTo" in cls.__name__ else diffusers.DPMSolverMultistepScheduler(
            use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=3.0,
        ),
    )  # fmt: skip


def sana_size(frames: int, height: int, width: int) -> dict[str, int]:
    return {"frames": (frames - 1) * 4 + 1, "height": height * 16, "width": width * 16}


def sana_video_call() -> dict[str, Any]:
    return masked_text() | sana_size(5, 2, 6) | {
        "guidance_scale": 3.0, "use_resolution_binning": False, "negative_prompt": None,
    }  # fmt: skip


SANA_VARIANTS: dict[str, Any] = {
    "larger": sana_size(7, 2, 8), "other_prompt": masked_text(OTHER_TEXT), "two_images": masked_text(rows=2),
    "padded_prompt": padded_text(),
}  # fmt: skip


class NoSafetyChecker:
    """In place of NVIDIA's, which is a package of its own: lets everything through."""

    def to(self, *_: Any) -> NoSafetyChecker:
        return self

    def check_text_safety(self, prompt: str) -> bool:
        return True

    def check_video_safety(self, video: Any) -> Any:
        return video


def cosmos(cls: Any, *, vae: Any = None, scheduler: Any = None, **config: Any) -> Any:
    return cls(
        text_encoder=None, tokenizer=None, safety_checker=NoSafetyChecker(), vae=vae or encoders.wan_vae(),
        transformer=transformer(
            # A mask of padding as one more channel needs torchvision.
            "CosmosTransformer3DModel", max_size=(16, 32, 32), concat_padding_mask=False, **config,
        ),
        scheduler=scheduler or flow(use_karras_sigmas=True),
    )  # fmt: skip


def cosmos_1(cls: Any, **config: Any) -> Any:
    vae = diffusers.AutoencoderKLCosmos(
        latent_channels=4, encoder_block_out_channels=(8, 8, 8, 8), decode_block_out_channels=(8, 8, 8, 8),
        attention_resolutions=(8,), resolution=64, num_layers=2, patch_size=4, patch_type="haar", scaling_factor=1.0,
        spatial_compression_ratio=4, temporal_compression_ratio=4,
    )  # fmt: skip
    scheduler = diffusers.EDMEulerScheduler(
        sigma_min=0.002, sigma_max=80, sigma_data=0.5, sigma_schedule="karras", num_train_timesteps=1000,
        prediction_type="epsilon", rho=7.0, final_sigmas_type="sigma_min",
    )  # fmt: skip
    return cosmos(cls, vae=vae, scheduler=scheduler, extra_pos_embed_type="learnable", **config)


SMALL_VARIANTS = LTX_VARIANTS | {"larger": size(7, 3, 5)}
COSMOS_VARIANTS = COGVIDEO_VARIANTS | {"padded_prompt": ZERO_PADDED}


def easy_animate() -> Any:
    vae = diffusers.AutoencoderKLMagvit(
        down_block_types=("SpatialDownBlock3D", *("SpatialTemporalDownBlock3D",) * 3),
        up_block_types=("SpatialUpBlock3D", *("SpatialTemporalUpBlock3D",) * 3), block_out_channels=(8, 8, 8, 8),
        latent_channels=4, layers_per_block=1, norm_num_groups=2, spatial_group_norm=False,
    )  # fmt: skip
    return diffusers.EasyAnimatePipeline(
        vae=vae, text_encoder=None, tokenizer=None, transformer=transformer("EasyAnimateTransformer3DModel"),
        scheduler=flow(),
    )  # fmt: skip


def latte() -> Any:
    return diffusers.LattePipeline(
        tokenizer=None, text_encoder=None, vae=vae(),
        transformer=transformer("LatteTransformer3DModel", out_channels=8, video_length=5),
        scheduler=diffusers.DDIMScheduler(beta_end=0.004),
    )  # fmt: skip


def any_flow(name: str, **config: Any) -> Any:
    return wan(
        getattr(diffusers, f"{name}Pipeline"), scheduler=diffusers.FlowMapEulerDiscreteScheduler(shift=3.0),
        transformer=wan_transformer(name=f"{name}Transformer3DModel", **config),
    )  # fmt: skip


def helios() -> Any:
    return wan(
        diffusers.HeliosPipeline, scheduler=diffusers.HeliosScheduler(
            stage_range=[0, 1], stages=1, use_dynamic_shifting=True,
        ),
        transformer=wan_transformer(
            name="HeliosTransformer3DModel", has_multi_term_memory_patch=True, guidance_cross_attn=True,
            zero_history_timestep=True,
        ),
    )  # fmt: skip


def motif(cls: Any) -> Any:
    return cls(
        scheduler=flow(shift=3.0), vae=encoders.wan_vae(), text_encoder=None, tokenizer=None,
        transformer=transformer("MotifVideoTransformer3DModel", in_channels=9), feature_extractor=None,
        guider=diffusers.guiders.ClassifierFreeGuidance(guidance_scale=3.0),
    )  # fmt: skip


def cosmos_3() -> Any:
    return diffusers.Cosmos3OmniPipeline(
        transformer=transformer("Cosmos3OmniTransformer", rope_axes_dim=[2, 1, 1]), vae=encoders.wan_vae(),
        text_tokenizer=encoders.chat_tokenizer(512), scheduler=unipc(), safety_checker=NoSafetyChecker(),
        enable_safety_checker=False,
    )  # fmt: skip


def cosmos_3_call() -> dict[str, Any]:
    return {
        "prompt": PROMPT, "negative_prompt": NEGATIVE, "guidance_scale": 3.0,
        "use_system_prompt": False, "add_resolution_template": False, "add_duration_template": False, **size(5, 3, 4),
    }  # fmt: skip


COSMOS_3: dict[str, Any] = {
    "larger": size(7, 3, 5), "other_prompt": {"prompt": LONG_PROMPT}, "two_images": ONE_SAMPLE,
    "padded_prompt": ONE_SAMPLE,
}  # fmt: skip


def sana_wm_call(frames: int = 33, width: int = 128) -> dict[str, Any]:
    path = torch.eye(4).repeat(frames, 1, 1)
    path[:, 2, 3] = torch.arange(frames) * 0.1  # the camera goes ahead
    return {
        "image": picture(96, width), "prompt": "", "c2w": path.numpy(), "intrinsics": [64.0, 64.0, 64.0, 48.0],
        "height": 96, "width": width, "num_frames": frames, "guidance_scale": 3.0,
    }  # fmt: skip


ENTRIES = [
    entry("cogvideox", 20, lambda: cogvideo(diffusers.CogVideoXPipeline), cogvideo_call, **COGVIDEO_VARIANTS),
    entry(
        "cogvideox-2b", 20, lambda: cogvideo(
            diffusers.CogVideoXPipeline, use_rotary_positional_embeddings=False, max_text_seq_length=TEXT,
        ), cogvideo_call, **COGVIDEO_VARIANTS | {"other_prompt": "the positions of the text are of a fixed length"},
    ),
    entry(
        "cogvideox-image-to-video", 20, lambda: cogvideo(diffusers.CogVideoXImageToVideoPipeline, in_channels=8),
        lambda: cogvideo_call() | {"image": picture(48, 64)},
        **COGVIDEO_VARIANTS | {"two_images": guided(TEXT, TEXT, rows=2) | {"image": film(2, 48, 64)}},
    ),
    entry("mochi", 20, mochi, lambda: ltx_call() | size(5, 3, 4, ratio=6), **LTX_VARIANTS | {
        "larger": size(7, 3, 5, ratio=6),
    }),
    entry("skyreels-v2", 20, lambda: sky_reels(diffusers.SkyReelsV2Pipeline), wan_call, **WAN_VARIANTS),
    entry(
        "skyreels-v2-diffusion-forcing", 20, lambda: sky_reels(diffusers.SkyReelsV2DiffusionForcingPipeline),
        lambda: wan_call() | {"prompt": None}, **WAN_VARIANTS,
    ),
    entry(
        "skyreels-v2-diffusion-forcing-blocks", 20, lambda: sky_reels(
            diffusers.SkyReelsV2DiffusionForcingPipeline, num_frame_per_block=3,
        ), lambda: wan_call() | size(6, 3, 4) | {"prompt": None, "ar_step": 1, "causal_block_size": 3},
        **WAN_VARIANTS | {"larger": size(9, 3, 5)},
    ),
    entry(
        "skyreels-v2-image-to-video", 20,
        lambda: wan_with_image(diffusers.SkyReelsV2ImageToVideoPipeline, "SkyReelsV2Transformer3DModel"),
        lambda: wan_call() | guided(512, 512) | {"image": picture(48, 64)}, **WAN_IMAGE_VARIANTS,
    ),
    entry("allegro", 20, allegro, lambda: ltx_call() | size(5, 3, 4) | {
        "clean_caption": False, "negative_prompt": None,
    }, **SMALL_VARIANTS),
    entry("sana-video", 20, lambda: sana_video(diffusers.SanaVideoPipeline), sana_video_call, **SANA_VARIANTS),
    entry(
        "sana-image-to-video", 20, lambda: sana_video(diffusers.SanaImageToVideoPipeline),
        lambda: sana_video_call() | {"image": picture(32, 96)}, **SANA_VARIANTS,
    ),
    entry("cosmos", 20, lambda: cosmos_1(diffusers.CosmosTextToWorldPipeline), cogvideo_call, **COSMOS_VARIANTS),
    entry(
        "cosmos-video-to-world", 20, lambda: cosmos_1(diffusers.CosmosVideoToWorldPipeline, in_channels=5),
        lambda: cogvideo_call() | {"image": picture(48, 64)}, **COSMOS_VARIANTS,
    ),
    entry(
        "cosmos-2-video-to-world", 20, lambda: cosmos(diffusers.Cosmos2VideoToWorldPipeline, in_channels=5),
        lambda: cogvideo_call() | {"image": picture(48, 64)}, **COSMOS_VARIANTS,
    ),
    entry(
        "easy-animate", 20, easy_animate, lambda: masked_text() | size(5, 3, 4) | {"guidance_scale": 3.0},
        **SMALL_VARIANTS | {"two_images": {"num_images_per_prompt": 2}},
    ),
    entry(
        "latte", 20, latte, lambda: guided(TEXT, TEXT) | {
            "video_length": 5, "height": 8, "width": 24, "guidance_scale": 3.0, "clean_caption": False,
            "negative_prompt": None,
        }, **COSMOS_VARIANTS | {"larger": {"height": 8, "width": 40}, "two_images": {"num_images_per_prompt": 2}},
    ),
    entry(
        "chrono-edit", 20, chrono_edit,
        lambda: wan_call() | guided(512, 512) | size(2, 3, 5) | {"image": picture(48, 80)},
        **WAN_IMAGE_VARIANTS | {"larger": size(2, 5, 7)},
    ),
    entry(
        "chrono-edit-reasoning", 20, chrono_edit, lambda: wan_call() | guided(512, 512) | {
            "image": picture(48, 64), "enable_temporal_reasoning": True, "num_temporal_reasoning_steps": 2,
        }, **WAN_IMAGE_VARIANTS,
    ),
    entry("any-flow", 20, lambda: any_flow("AnyFlow"), cogvideo_call, **COSMOS_VARIANTS),
    entry(
        "any-flow-far", 20, lambda: any_flow(
            "AnyFlowFAR", compressed_patch_size=(1, 4, 4), full_chunk_limit=3, chunk_partition=(1, 2, 2),
        ), lambda: cogvideo_call() | size(5, 4, 6), **COSMOS_VARIANTS | {"larger": size(5, 4, 8)},
    ),
    entry(
        "helios", 20, helios, lambda: wan_call() | {"num_latent_frames_per_chunk": 5},
        **WAN_VARIANTS | {"larger": size(7, 3, 5) | {"num_latent_frames_per_chunk": 7}},
    ),
    entry(
        "motif-video", 20, lambda: motif(diffusers.MotifVideoPipeline), lambda: masked_text() | size(5, 3, 4),
        **SMALL_VARIANTS,
    ),
    entry("cosmos-3", 20, cosmos_3, cosmos_3_call, **COSMOS_3),
    entry(
        "cosmos-3-image-to-video", 20, cosmos_3, lambda: cosmos_3_call() | {"image": picture(48, 64)}, **COSMOS_3,
    ),
    entry(
        "sana-wm", 20, lambda: diffusers.SanaWMPipeline(
            tokenizer=None, text_encoder=None, vae=ltx_2_vae(temporal_compression_ratio=8),
            transformer=transformer("SanaWMTransformer3DModel"), scheduler=flow(shift=3.0),
        ), lambda: masked_text() | sana_wm_call(), larger=sana_wm_call(49, 160),
        other_prompt=masked_text(OTHER_TEXT), two_images=ONE_SAMPLE, padded_prompt=ONE_SAMPLE,
    ),
    entry(
        "motif-image-to-video", 20, lambda: motif(diffusers.MotifVideoImage2VideoPipeline),
        lambda: masked_text() | size(5, 3, 4) | {"image": picture(48, 64), "prompt": None},
        **SMALL_VARIANTS | {"two_images": ONE_VIDEO, "padded_prompt": ONE_VIDEO},
    ),
    entry(
        "cosmos-2.5", 20, lambda: cosmos(diffusers.Cosmos2_5_PredictBasePipeline, scheduler=unipc(), in_channels=5),
        cogvideo_call, **COSMOS_VARIANTS,
    ),
    entry(
        "cosmos-2-text-to-image", 20, lambda: cosmos(diffusers.Cosmos2TextToImagePipeline),
        lambda: guided(TEXT, TEXT) | {"height": 48, "width": 80, "guidance_scale": 3.0},
        **COSMOS_VARIANTS | {"larger": {"height": 80, "width": 112}},
    ),
]  # fmt: skip

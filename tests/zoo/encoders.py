"""Tokenizers, text encoders and autoencoders, tiny and random."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers

from tests.tiny import tokenizer

CHAT = "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
CHAT += "{{ c['text'] }}{% endfor %}{% endif %} {% endfor %}"
SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>",
]  # fmt: skip


def chat_tokenizer(length: int = 64) -> Any:
    """A tokenizer with a chat template, and with the special tokens of Qwen's vision models."""
    made = tokenizer(length)
    made.chat_template = CHAT
    made.add_special_tokens({"additional_special_tokens": SPECIAL})
    for name, token in (("image_token", "<|image_pad|>"), ("video_token", "<|video_pad|>")):
        setattr(made, name, token)
    return made


LANGUAGE = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 2,
    "eos_token_id": 1,
}  # fmt: skip
SIGHT = {"depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}


def language(name: str = "Qwen3") -> Any:
    """A language model without its head, by the name of its family in transformers."""
    return getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**LANGUAGE)).eval()


def qwen3_vl(cls: Any = transformers.Qwen3VLForConditionalGeneration, layers: int = 3) -> Any:
    ids = {token: chat_tokenizer().convert_tokens_to_ids(token) for token in SPECIAL}
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True, "rope_theta": 1e4}
    config = transformers.Qwen3VLConfig(
        text_config=LANGUAGE | {"rope_parameters": rope, "num_hidden_layers": layers},
        vision_config=SIGHT | {"patch_size": 16, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
        image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
    )  # fmt: skip
    return cls(config).eval()


def qwen2_5_vl() -> Any:
    """The vision model of Qwen 2.5, with the ids of its special tokens."""
    ids = {token: chat_tokenizer().convert_tokens_to_ids(token) for token in SPECIAL}
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
    config = transformers.Qwen2_5_VLConfig(
        text_config={name: value for name, value in LANGUAGE.items() if name != "head_dim"} | {"rope_parameters": rope},
        vision_config=SIGHT | {"patch_size": 16, "fullatt_block_indexes": [1], "window_size": 64},
        image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
    )  # fmt: skip
    return transformers.Qwen2_5_VLForConditionalGeneration(config).eval()


def qwen_processor(cls: type = transformers.Qwen3VLProcessor, max_pixels: int = 1 << 20) -> Any:
    """A processor without the half for videos, which needs torchvision."""
    tokenizer = chat_tokenizer()
    sight = transformers.Qwen2VLImageProcessorPil(patch_size=16, min_pixels=1, max_pixels=max_pixels)
    # The processor would refuse to be without that half.
    own = type(cls.__name__, (cls,), {"check_argument_for_proper_class": lambda self, name, argument: type(argument)})
    return own(sight, tokenizer, None, chat_template=tokenizer.chat_template)


def clip_vision(width: int = 8) -> dict[str, Any]:
    """The components of a pipeline that embed an image in 17 tokens."""
    config = transformers.CLIPVisionConfig(
        hidden_size=width, projection_dim=width, num_hidden_layers=2, num_attention_heads=2, image_size=8,
        intermediate_size=16, patch_size=2,
    )  # fmt: skip
    return {
        "image_encoder": transformers.CLIPVisionModelWithProjection(config).eval(),
        "image_processor": transformers.CLIPImageProcessorPil(crop_size=8, size=8),
    }  # fmt: skip


def siglip_vision(width: int = 8) -> dict[str, Any]:
    """The components of a pipeline that embed an image in 16 tokens."""
    config = transformers.SiglipVisionConfig(
        hidden_size=width, num_hidden_layers=2, num_attention_heads=2, image_size=8, intermediate_size=16, patch_size=2,
    )  # fmt: skip
    return {
        "image_encoder": transformers.SiglipVisionModel(config).eval(),
        "feature_extractor": transformers.SiglipImageProcessorPil(size={"height": 8, "width": 8}),
    }  # fmt: skip


def vae_8(channels: int = 4, levels: int = 4) -> Any:
    """The autoencoder of Stable Diffusion, which makes a picture 8 times smaller: twice for every level but one."""
    return diffusers.AutoencoderKL(
        in_channels=3, out_channels=3, down_block_types=["DownEncoderBlock2D"] * levels,
        up_block_types=["UpDecoderBlock2D"] * levels, block_out_channels=(4,) * levels, layers_per_block=1,
        latent_channels=channels, norm_num_groups=2, sample_size=32, scaling_factor=1.0, shift_factor=0.1,
        latents_mean=[0.0] * channels, latents_std=[1.0] * channels,
    ).eval()  # fmt: skip


def qwen_image_vae(**changes: Any) -> Any:
    """The autoencoder of Qwen-Image, which makes pictures smaller by 4 instead of 8."""
    config: dict[str, Any] = {
        "base_dim": 2, "z_dim": 4, "dim_mult": [1, 1, 1], "num_res_blocks": 1, "temperal_downsample": [False, True],
        "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4,
    }  # fmt: skip
    return diffusers.AutoencoderKLQwenImage(**config | changes).eval()


def in_large_squares(vae: Any) -> Any:
    """The same autoencoder with squares of 8 x 8 pixels in its first convolution, for pictures that are never small."""
    first = vae.encoder.conv_in
    vae.encoder.conv_in = type(first)(
        first.in_channels, first.out_channels, (3, 8, 8), stride=(1, 8, 8), padding=(1, 0, 0)
    )  # fmt: skip
    return vae


def wan_vae(**changes: Any) -> Any:
    """The autoencoder of Wan: 8 times smaller, and 4 frames in one."""
    config: dict[str, Any] = {
        "base_dim": 3, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1,
        "temperal_downsample": [False, True, True], "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4,
    }  # fmt: skip
    return diffusers.AutoencoderKLWan(**config | changes).eval()

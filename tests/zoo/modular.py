"""Modular pipelines, whole or the part of one that denoises: trees of blocks in place of a class with one call."""

from __future__ import annotations

import types
from typing import Any

import diffusers
import torch
from diffusers import ClassifierFreeGuidance, LTX2Guidance
from diffusers.modular_pipelines.minimax_h3.modular_blocks_minimax_h3 import MiniMaxH3Blocks

from tests.tiny import flux
from tests.zoo.entry import NEGATIVE_TEXT, OTHER_TEXT, REMOVED, Call, embeds, entry, guided, transformer
from tests.zoo.pictures import FLUX, PROMPT, TWO, flow, krea_2_text, masked, padded, size
from tests.zoo.videos import ltx_2, unipc
from tests.zoo.videos import size as video_size

TWO_VIDEOS = {"num_videos_per_prompt": 2}


def modular(blocks: Any, **components: Any) -> Any:
    """A pipeline of some blocks, with those of the components that they ask for."""
    pipe = blocks.init_pipeline()
    pipe.update_components(**{name: part for name, part in components.items() if name in pipe.component_names})
    return pipe


def core(blocks: Any, name: str = "", **components: Any) -> Any:
    """The part that denoises, of pipelines that are given embeddings."""
    part = blocks().sub_blocks["denoise"]
    return modular(part.sub_blocks[name] if name else part, **{"scheduler": flow(), "guider": guider()} | components)


def guider(scale: float = 3.0, **config: Any) -> Any:
    return ClassifierFreeGuidance(guidance_scale=scale, **config)


def latents(call: Call, output: Any = "latents") -> Call:
    """The arguments of a call that returns latents; its block that decodes is not there, or is run in vain."""
    return lambda: {"output": output, "output_type": REMOVED} | call()


H3_CONFIG = {"attention_head_dim": 16, "in_channels": 24, "audio_in_channels": 32}


def minimax_h3(workflow: str = "", *names: str) -> Any:
    """The part that denoises a video and its sound, in one sequence with the text, by a scheduler each.

    Without a workflow it denoises whatever is given: each calls a checkpoint of its own.
    """
    part = MiniMaxH3Blocks().sub_blocks["denoise"]
    models = {}
    for name in names or ("transformer", "transformer_ref"):
        seed = 3 if name.endswith("ref") else 0
        models[name] = transformer("MiniMaxH3Transformer3DModel", seed, **H3_CONFIG)
    return modular(
        part.sub_blocks[workflow] if workflow else part, scheduler=diffusers.MiniMaxH3Scheduler(12.0),
        audio_scheduler=diffusers.MiniMaxH3Scheduler(3.0), **models,
    )  # fmt: skip


def minimax_h3_call(length: int = 7, height: int = 64, width: int = 32) -> dict[str, Any]:
    return {
        "prompt_embeds": embeds(length), "text_token_tags": torch.ones(length, dtype=torch.long),
        "height": height, "width": width, "num_frames": 124,
    }  # fmt: skip


def keyframes(*anchors: str, height: int = 64) -> dict[str, Any]:
    """Of the size of the video's frames, in the autoencoder's latents."""
    frame = randn(1, 24, 1, height // 16, 2)
    return minimax_h3_call(height=height) | {"keyframe_anchors": anchors, "condition_latents": [frame] * len(anchors)}


def references(length: int = 7, height: int = 64) -> dict[str, Any]:
    """A picture, which has a size of its own, and a voice."""
    kinds = [types.SimpleNamespace(kind="image", has_audio=False), types.SimpleNamespace(kind="audio", has_audio=True)]
    return minimax_h3_call(length, height) | {
        "normalized_references": kinds, "condition_latents": [randn(1, 24, 1, 2, 4)],
        "audio_condition_latents": [randn(10, 32)],
    }  # fmt: skip


def flux_3(workflow: str = "text2image") -> Any:
    return core(diffusers.Flux3AutoBlocks, workflow, transformer=transformer("Flux3Transformer2DModel"))


def anima() -> Any:
    """A Cosmos-Predict2, with a small model for its text within the part that denoises."""
    conditioner = diffusers.AnimaTextConditioner(
        source_dim=16, target_dim=16, model_dim=16, num_layers=1, num_attention_heads=2, target_vocab_size=32,
        min_sequence_length=8,
    )  # fmt: skip
    return core(
        diffusers.AnimaAutoBlocks, "text2image", text_conditioner=conditioner,
        transformer=transformer("CosmosTransformer3DModel", extra_pos_embed_type=None, max_size=(4, 128, 128)),
    )  # fmt: skip


def anima_text(length: int) -> dict[str, Any]:
    """Of two encoders: states of one, and words of the other."""
    call = {}
    for name, tokens in (("", length), ("negative_", NEGATIVE_TEXT)):
        mask = torch.ones(1, tokens, dtype=torch.long)
        call |= {
            f"{name}qwen_prompt_embeds": embeds(tokens), f"{name}qwen_attention_mask": mask,
            f"{name}t5_input_ids": mask, f"{name}t5_attention_mask": mask,
        }  # fmt: skip
    return call


# LTX-2.3 and its children gate attention, and modulate it by the prompt.
GATED = {"gated_attn": True, "audio_gated_attn": True, "cross_attn_mod": True, "audio_cross_attn_mod": True,
         "use_prompt_embeddings": False}  # fmt: skip


def ltx_25(blocks: Any, workflow: str = "", **config: Any) -> Any:
    """The part that denoises a video and its sound."""
    parts = ltx_2(diffusers.LTX2Pipeline, **GATED, **config).components
    guides = {name: LTX2Guidance(guidance_scale=3.0) for name in ("guider", "audio_guider")}
    return core(blocks, workflow, **parts, **guides)


def connected(length: int, rows: int = 1) -> dict[str, Any]:
    """Text behind the connectors, which has a width for the video and one for the sound."""
    call: dict[str, Any] = {"batch_size": rows, "dtype": torch.float32}
    for name, seed in (("", 1), ("negative_", 2)):
        call |= {
            f"{name}connector_prompt_embeds": embeds(length, 16, rows, seed),
            f"{name}connector_audio_prompt_embeds": embeds(length, 24, rows, seed + 2),
            f"{name}connector_attention_mask": torch.ones(rows, length, dtype=torch.long),
        }  # fmt: skip
    return call


def echo() -> Any:
    """Steps its latents itself, without a scheduler. Its part that denoises takes sound of 16 bands."""
    return ltx_25(diffusers.EchoBlocks, audio_in_channels=32, audio_out_channels=32)


def echo_call() -> dict[str, Any]:
    text = {name: value for name, value in connected(11).items() if name.startswith("connector_")}
    return text | {"height": 96, "width": 160, "num_frames": 9, "output": "latents"}


def randn(*shape: int) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(4))


def listed_embeds(length: int, seed: int = 1) -> list[Any]:
    return [embeds(length, 16, seed=seed)[0]]


ONE_VIDEO = "the pipeline makes one video a call"
ONE_LENGTH = "the pipeline is given embeddings, and has no mask for them"
QWEN_CALL = latents(lambda: {**masked(11), **masked(NEGATIVE_TEXT, negative=True), **size(3, 5)})
FLUX_3: dict[str, Any] = {
    "larger": size(5, 7), "other_prompt": guided(OTHER_TEXT, OTHER_TEXT, 32), "two_images": TWO,
    "padded_prompt": ONE_LENGTH,
}  # fmt: skip

ENTRIES = [
    entry(
        "flux-modular", 101, lambda: modular(diffusers.FluxAutoBlocks(), **flux().components),
        latents(lambda: {"prompt": PROMPT, "max_sequence_length": 12, **size(3, 5, 4)}), **FLUX,
    ),
    entry(
        "qwen-image-modular", 102, lambda: core(
            diffusers.QwenImageAutoBlocks, "text2image", transformer=transformer("QwenImageTransformer2DModel"),
        ), QWEN_CALL, **FLUX | {"larger": size(5, 7), "other_prompt": masked(OTHER_TEXT), "padded_prompt": padded},
    ),
    entry(
        "wan-modular", 103, lambda: core(
            diffusers.WanBlocks, scheduler=unipc(),
            transformer=transformer("WanTransformer3DModel", in_channels=16, out_channels=16),
        ), latents(lambda: {**guided(11, 11), **size(5, 3), "num_frames": 9}), larger=size(7, 5),
        other_prompt=guided(OTHER_TEXT, OTHER_TEXT), two_images=TWO_VIDEOS, padded_prompt=ONE_LENGTH,
    ),
    entry(
        "z-image-modular", 104, lambda: core(
            diffusers.ZImageAutoBlocks, "text2image", guider=guider(enabled=True),
            transformer=transformer("ZImageTransformer2DModel", dim=40, axes_dims=[2, 4, 4]),
        ), latents(lambda: {
            "prompt_embeds": listed_embeds(11), "negative_prompt_embeds": listed_embeds(NEGATIVE_TEXT, 2),
            **size(7, 11),
        }),
        larger=size(11, 16), other_prompt={"prompt_embeds": listed_embeds(40)}, two_images=TWO,
        padded_prompt={
            "prompt_embeds": listed_embeds(40) + listed_embeds(11), "negative_prompt_embeds": listed_embeds(9, 2) * 2,
        },
    ),
    entry(
        "krea-2-modular", 105,
        lambda: core(diffusers.Krea2AutoBlocks, transformer=transformer("Krea2Transformer2DModel")),
        latents(lambda: krea_2_text(11) | size(3, 5)), larger=size(5, 7),
        other_prompt=krea_2_text(13), two_images=TWO, padded_prompt="the pipeline is tried with one prompt",
    ),
    entry(
        "minimax-h3", 106, lambda: minimax_h3("t2va", "transformer"),
        latents(minimax_h3_call, ["latents", "audio_latents"]), larger={"height": 96},
        other_prompt=lambda: minimax_h3_call(9), two_images=ONE_VIDEO, padded_prompt=ONE_VIDEO,
    ),
    entry(
        "minimax-h3-keyframes", 106, lambda: minimax_h3("fl2va", "transformer"),
        latents(lambda: keyframes("first", "last"), ["latents", "audio_latents"]),
        larger=lambda: keyframes("first", "last", height=96), other_prompt=lambda: minimax_h3_call(9),
        two_images=ONE_VIDEO, padded_prompt=ONE_VIDEO,
    ),
    entry(
        "minimax-h3-references", 106, lambda: minimax_h3("ref2va", "transformer_ref"),
        latents(references, ["latents", "audio_latents"]), larger=lambda: references(height=96),
        other_prompt=lambda: references(9), two_images=ONE_VIDEO, padded_prompt=ONE_VIDEO,
        transformers=("transformer_ref",),
    ),
    entry(
        "flux-3-edit", 107, lambda: flux_3("image_conditioned"),
        latents(lambda: guided(11, 11, 32) | size(3, 5) | {"image_cond_latents": [randn(1, 16, 2, 3)]}), **FLUX_3,
    ),
    entry("flux-3", 107, flux_3, latents(lambda: guided(11, 11, 32) | size(3, 5)), **FLUX_3),
    entry(
        "anima", 108, anima, latents(lambda: {**anima_text(11), **size(3, 5)}), larger=size(5, 7),
        other_prompt=lambda: anima_text(OTHER_TEXT), two_images=TWO, padded_prompt=ONE_LENGTH,
    ),
    entry(
        "ltx-2.5", 109, lambda: ltx_25(diffusers.LTX25AutoBlocks, "text2video", ff_bias=False),
        latents(lambda: {**connected(11), **video_size(5, 3, 5, ratio=2, pixels=32)}, ["latents", "audio_latents"]),
        larger=video_size(7, 3, 6, ratio=2, pixels=32), other_prompt=lambda: connected(OTHER_TEXT),
        two_images=TWO_VIDEOS, padded_prompt=ONE_LENGTH,
    ),
]  # fmt: skip

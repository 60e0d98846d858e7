"""Real transformers of every family, tiny and random: `FAMILIES[name].make()` and the arguments of its forward.

Each has four blocks or more in its chain, and a batch of two where its forward takes one. Weights and inputs are the
same whenever they are made.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import diffusers
import pytest
import torch
from torch import Tensor, nn

from ditile.model.block_table import find_diffusers_class
from tests.tiny import randomise

BATCH, TEXT, WIDTH = 2, 5, 32
GRID = (3, 4)
TOKENS = GRID[0] * GRID[1]


class Family(NamedTuple):
    """A family: its class by name, a tiny config, and the arguments of a forward; None where only its lists matter."""

    name: str
    config: dict[str, Any]
    inputs: Callable[[], dict[str, Any]] | None = None

    def make(self) -> nn.Module:
        """The transformer, with random weights that are the same every time."""
        torch.manual_seed(0)
        return randomise(self.kind(**self.config), gain=1.0)

    def call(self, model: nn.Module) -> Any:
        """What the transformer returns first."""
        tuples = {"return_dict": False} if "return_dict" in inspect.signature(model.forward).parameters else {}
        out = model(**self.inputs(), **tuples)
        return out[0] if tuples else out

    def on_meta(self) -> nn.Module:
        """The transformer without weights."""
        with torch.device("meta"):
            return self.kind(**self.config)

    @property
    def kind(self) -> Any:
        """Its class. The test is skipped where diffusers is the one for Python 3.10, which does not have all."""
        actual = find_diffusers_class(self.name)
        if actual is None and diffusers.__version__.startswith("0.41."):
            pytest.skip(f"diffusers {diffusers.__version__} has no {self.name}")
        return actual


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def time(value: float = 0.5) -> Tensor:
    return torch.full((BATCH,), value)


def ids(count: int, axes: int = 3) -> Tensor:
    """Positions of image tokens in a grid with 4 columns; of text, where there are fewer than a row, all zero."""
    table = torch.zeros(count, axes)
    if count == TOKENS:
        table[:, 1], table[:, 2] = torch.arange(count) // GRID[1], torch.arange(count) % GRID[1]
    return table


def packed(channels: int = 16, width: int = WIDTH, axes: int = 3, **more: Any) -> Callable[[], dict[str, Any]]:
    """Packed latents, text and the positions of both, as FLUX and its descendants take them."""
    return lambda: {
        "hidden_states": noise(BATCH, TOKENS, channels), "encoder_hidden_states": noise(BATCH, TEXT, width, seed=1),
        "timestep": time(), "img_ids": ids(TOKENS, axes), "txt_ids": ids(TEXT, axes), **more,
    }  # fmt: skip


def picture(channels: int = 4, width: int = WIDTH, text: int = TEXT, **more: Any) -> Callable[[], dict[str, Any]]:
    """Latents of a picture, and text."""
    return lambda: {
        "hidden_states": noise(BATCH, channels, 8, 8), "encoder_hidden_states": noise(BATCH, text, width, seed=1),
        "timestep": time(), **more,
    }  # fmt: skip


def video(channels: int = 4, width: int = 16, text: int = TEXT, **more: Any) -> Callable[[], dict[str, Any]]:
    """Latents of two frames, and text."""
    return lambda: {
        "hidden_states": noise(BATCH, channels, 2, 8, 8), "encoder_hidden_states": noise(BATCH, text, width, seed=1),
        "timestep": time(5.0), **more,
    }  # fmt: skip


HEADS = {"num_attention_heads": 4, "attention_head_dim": 8}
DOUBLE = {"num_layers": 2, "num_single_layers": 3, "in_channels": 16, "patch_size": 1, "joint_attention_dim": WIDTH}
MASK = torch.ones(BATCH, TEXT, dtype=torch.bool)
SIZES = {name: torch.tensor([[16.0, 16.0]] * BATCH) for name in ("original_size", "target_size", "crop_coords")}
POOLED = {"pooled_projections": noise(BATCH, WIDTH, seed=2)}
COG = {
    "num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4, "time_embed_dim": 2,
    "text_embed_dim": 16, "num_layers": 4, "sample_width": 8, "sample_height": 8, "sample_frames": 5, "patch_size": 2,
    "temporal_compression_ratio": 4, "max_text_seq_length": TEXT,
}  # fmt: skip
WAN = {
    "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 16,
    "freq_dim": 32, "ffn_dim": 32, "num_layers": 4, "rope_max_seq_len": 32,
}  # fmt: skip
HUNYUAN = {
    "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 10, "num_layers": 2,
    "num_single_layers": 3, "num_refiner_layers": 1, "patch_size": 1, "patch_size_t": 1, "text_embed_dim": 16,
    "pooled_projection_dim": 8, "rope_axes_dim": (2, 4, 4),
}  # fmt: skip


ROWS = [
    Family("FluxTransformer2DModel", HEADS | DOUBLE | {"pooled_projection_dim": WIDTH, "axes_dims_rope": (2, 2, 4)},
        packed(**POOLED)),
    Family("SD3Transformer2DModel", HEADS | {"sample_size": 8, "patch_size": 2, "in_channels": 4, "num_layers": 4,
        "joint_attention_dim": WIDTH, "caption_projection_dim": WIDTH, "pooled_projection_dim": WIDTH,
        "out_channels": 4, "pos_embed_max_size": 16, "dual_attention_layers": (0, 1), "qk_norm": "rms_norm"},
        picture(**POOLED)),
    Family("PixArtTransformer2DModel", HEADS | {"in_channels": 4, "out_channels": 8, "num_layers": 4,
        "cross_attention_dim": WIDTH, "sample_size": 8, "patch_size": 2, "caption_channels": WIDTH,
        "use_additional_conditions": False}, picture(added_cond_kwargs={"resolution": None, "aspect_ratio": None})),
    Family("ChromaTransformer2DModel", HEADS | DOUBLE | {"axes_dims_rope": (2, 2, 4), "approximator_num_channels": 8,
        "approximator_hidden_dim": 16, "approximator_layers": 1}, packed(attention_mask=torch.ones(BATCH,
        TEXT + TOKENS))),
    Family("BriaTransformer2DModel", HEADS | DOUBLE | {"axes_dims_rope": [2, 2, 4]}, packed()),
    Family("BriaFiboTransformer2DModel", HEADS | DOUBLE | {"axes_dims_rope": [2, 2, 4], "text_encoder_dim": WIDTH},
        packed(text_encoder_layers=[noise(BATCH, TEXT, WIDTH, seed=3 + i) for i in range(5)])),
    Family("OvisImageTransformer2DModel", HEADS | DOUBLE | {"axes_dims_rope": (2, 2, 4), "out_channels": 16}, packed()),
    Family("LongCatImageTransformer2DModel", HEADS | DOUBLE | {"axes_dims_rope": [2, 2, 4]}, packed()),
    Family("Flux2Transformer2DModel", HEADS | DOUBLE | {"axes_dims_rope": (2, 2, 2, 2),
        "timestep_guidance_channels": 16}, packed(axes=4, guidance=time(3.0))),
    Family("Flux3Transformer2DModel", HEADS | {"in_channels": 16, "cond_in_channels": 16, "num_layers": 1,
        "num_single_layers": 4, "joint_attention_dim": WIDTH, "timestep_channels": 16, "axes_dims_rope": (2, 2, 2, 2)},
        packed(axes=4)),
    Family("QwenImageTransformer2DModel", HEADS | {"in_channels": 16, "out_channels": 4, "num_layers": 4,
        "joint_attention_dim": WIDTH, "axes_dims_rope": (2, 2, 4)}, lambda: {"hidden_states": noise(BATCH, TOKENS, 16),
        "encoder_hidden_states": noise(BATCH, TEXT, WIDTH, seed=1), "encoder_hidden_states_mask": MASK,
        "timestep": time(), "img_shapes": [[(1, *GRID)]] * BATCH}),
    Family("AuraFlowTransformer2DModel", HEADS | {"sample_size": 8, "patch_size": 2, "in_channels": 4,
        "num_mmdit_layers": 2, "num_single_dit_layers": 3, "joint_attention_dim": WIDTH,
        "caption_projection_dim": WIDTH, "pos_embed_max_size": 64}, picture()),
    Family("CogVideoXTransformer3DModel", COG, video(hidden_states=noise(BATCH, 2, 4, 8, 8))),
    Family("ConsisIDTransformer3DModel", COG, video(hidden_states=noise(BATCH, 2, 4, 8, 8))),
    Family("CogView3PlusTransformer2DModel", HEADS | {"in_channels": 4, "out_channels": 4, "num_layers": 4,
        "text_embed_dim": 16, "time_embed_dim": 8, "condition_dim": 2, "pos_embed_max_size": 8, "sample_size": 8},
        picture(width=16, **SIZES)),
    Family("CogView4Transformer2DModel", HEADS | {"in_channels": 4, "out_channels": 4, "num_layers": 4,
        "text_embed_dim": 16, "time_embed_dim": 8, "condition_dim": 2, "pos_embed_max_size": 8, "sample_size": 8,
        "rope_axes_dim": (8, 8)}, picture(width=16, **SIZES)),
    Family("MochiTransformer3DModel", HEADS | {"num_layers": 4, "pooled_projection_dim": 16, "in_channels": 4,
        "text_embed_dim": 16, "time_embed_dim": 4, "max_sequence_length": TEXT}, video(encoder_attention_mask=MASK)),
    Family("WanTransformer3DModel", WAN, video()),
    Family("WanVACETransformer3DModel", WAN | {"vace_layers": [0, 2], "vace_in_channels": 4},
        video(control_hidden_states=noise(BATCH, 4, 2, 8, 8, seed=3))),
    Family("ChronoEditTransformer3DModel", WAN, video()),
    Family("SkyReelsV2Transformer3DModel", WAN, video()),
    Family("AnyFlowTransformer3DModel", WAN, video(hidden_states=noise(BATCH, 2, 4, 8, 8),
        timestep=torch.full((BATCH, 2), 5.0), r_timestep=torch.ones(BATCH, 2))),
    Family("HunyuanVideoTransformer3DModel", HUNYUAN, video(encoder_attention_mask=MASK, pooled_projections=noise(BATCH,
        8), guidance=time(1000.0))),
    Family("LTXVideoTransformer3DModel", {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2,
        "attention_head_dim": 8, "cross_attention_dim": 16, "num_layers": 4, "caption_channels": 16},
        lambda: {"hidden_states": noise(BATCH, 32, 4), "encoder_hidden_states": noise(BATCH, TEXT, 16, seed=1),
        "timestep": time(5.0), "encoder_attention_mask": MASK, "num_frames": 2, "height": 4, "width": 4}),
    Family("CosmosTransformer3DModel", {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2,
        "attention_head_dim": 12, "num_layers": 4, "mlp_ratio": 2, "text_embed_dim": 16, "adaln_lora_dim": 4,
        "max_size": (4, 32, 32), "concat_padding_mask": False}, video(fps=30)),
    Family("DiTTransformer2DModel", HEADS | {"in_channels": 4, "num_layers": 4, "sample_size": 8,
        "num_embeds_ada_norm": 8}, lambda: {"hidden_states": noise(BATCH, 4, 8, 8), "timestep": torch.tensor([3, 3]),
        "class_labels": torch.tensor([1, 2])}),
    Family("SanaTransformer2DModel", HEADS | {"in_channels": 4, "out_channels": 4, "num_layers": 4,
        "num_cross_attention_heads": 4, "cross_attention_head_dim": 8, "cross_attention_dim": WIDTH,
        "caption_channels": 16, "sample_size": 8}, picture(width=16)),
    Family("SanaVideoTransformer3DModel", {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2,
        "attention_head_dim": 12, "num_layers": 4, "num_cross_attention_heads": 2, "cross_attention_head_dim": 12,
        "cross_attention_dim": 24, "caption_channels": 16, "sample_size": 8}, video()),
    Family("Lumina2Transformer2DModel", {"sample_size": 8, "in_channels": 4, "hidden_size": 24, "num_layers": 4,
        "num_refiner_layers": 1, "num_attention_heads": 3, "num_kv_heads": 1, "multiple_of": 2, "axes_dim_rope": (4, 2,
        2), "axes_lens": (64, 64, 64), "cap_feat_dim": 16}, picture(width=16, encoder_attention_mask=MASK)),
    Family("ZImageTransformer2DModel", {"in_channels": 4, "dim": 32, "n_layers": 4, "n_refiner_layers": 1, "n_heads": 4,
        "n_kv_heads": 4, "cap_feat_dim": 16, "axes_dims": [4, 2, 2], "axes_lens": [256, 32, 32]},
        lambda: {"x": list(noise(BATCH, 4, 1, 8, 8)), "t": time(), "cap_feats": list(noise(BATCH, TEXT, 16, seed=1))}),
    Family("PRXTransformer2DModel", {"in_channels": 4, "context_in_dim": 16, "hidden_size": 32, "num_heads": 4,
        "depth": 4, "axes_dim": [4, 4]}, picture(width=16)),
    Family("EasyAnimateTransformer3DModel", {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4,
        "out_channels": 4, "patch_size": 2, "sample_width": 8, "sample_height": 8, "num_layers": 4, "mmdit_layers": 4,
        "time_embed_dim": 2, "text_embed_dim": 16}, video()),
    Family("HunyuanDiT2DModel", {"sample_size": 8, "num_layers": 6, "patch_size": 2, "num_attention_heads": 2,
        "attention_head_dim": 8, "in_channels": 4, "hidden_size": 16, "cross_attention_dim": 16,
        "cross_attention_dim_t5": 16, "pooled_projection_dim": 8, "text_len": 4, "text_len_t5": 4,
        "use_style_cond_and_image_meta_size": False}, picture(width=16, text=4, text_embedding_mask=torch.ones(BATCH,
        4), text_embedding_mask_t5=torch.ones(BATCH, 4), encoder_hidden_states_t5=noise(BATCH, 4, 16, seed=3))),
    Family("HunyuanImageTransformer2DModel", {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2,
        "attention_head_dim": 8, "num_layers": 2, "num_single_layers": 3, "num_refiner_layers": 1, "text_embed_dim": 16,
        "rope_axes_dim": (4, 4)}, picture(width=16, encoder_attention_mask=MASK)),
    Family("OmniGenTransformer2DModel", {"in_channels": 4, "hidden_size": 32, "num_attention_heads": 4,
        "num_key_value_heads": 4, "intermediate_size": 32, "num_layers": 4, "pad_token_id": 0, "vocab_size": 50,
        "time_step_dim": 4, "rope_scaling": {"long_factor": [1, 2, 3, 4], "short_factor": [1, 2, 3, 4]}},
        lambda: {"hidden_states": noise(BATCH, 4, 8, 8), "timestep": time(), "input_ids": torch.ones(BATCH,
        TEXT).long(), "input_img_latents": [], "input_image_sizes": {}, "attention_mask": torch.ones(BATCH, 22, 22),
        "position_ids": torch.arange(22)[None].expand(BATCH, -1)}),
    Family("Kandinsky5Transformer3DModel", {"in_visual_dim": 4, "in_text_dim": 16, "in_text_dim2": 8, "time_dim": 16,
        "out_visual_dim": 4, "model_dim": 32, "ff_dim": 32, "num_text_blocks": 1, "num_visual_blocks": 4,
        "axes_dims": (4, 6, 6)}, lambda: {"hidden_states": noise(BATCH, 2, 8, 8, 4),
        "encoder_hidden_states": noise(BATCH, TEXT, 16, seed=1), "timestep": time(5.0),
        "pooled_projections": noise(BATCH, 8, seed=2), "visual_rope_pos": [torch.arange(2), torch.arange(4),
        torch.arange(4)], "text_rope_pos": torch.arange(TEXT)}),
    Family("StableAudioDiTModel", {"sample_size": 4, "in_channels": 4, "num_layers": 4, "attention_head_dim": 8,
        "num_attention_heads": 4, "num_key_value_attention_heads": 4, "out_channels": 4, "cross_attention_dim": 16,
        "time_proj_dim": 8, "global_states_input_dim": 8, "cross_attention_input_dim": 16},
        lambda: {"hidden_states": noise(BATCH, 4, 9), "encoder_hidden_states": noise(BATCH, TEXT, 16, seed=1),
        "timestep": time(), "global_hidden_states": noise(BATCH, 1, 8, seed=2), "rotary_embedding": (torch.ones(10, 4),
        torch.zeros(10, 4))}),
    Family("PriorTransformer", HEADS | {"num_layers": 4, "embedding_dim": 16, "num_embeddings": TEXT,
        "additional_embeddings": 4}, lambda: {"hidden_states": noise(BATCH, 16), "timestep": 2,
        "proj_embedding": noise(BATCH, 16, seed=1), "encoder_hidden_states": noise(BATCH, TEXT, 16, seed=2)}),
    Family("HiDreamImageTransformer2DModel", {"patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 2,
        "num_single_layers": 3, "attention_head_dim": 8, "num_attention_heads": 4, "caption_channels": [32, 16],
        "text_emb_dim": 8, "axes_dims_rope": (4, 2, 2), "max_resolution": (4, 4), "llama_layers": (0, 1, 1, 0, 1)},
        lambda: {"hidden_states": noise(BATCH, 4, 8, 8), "encoder_hidden_states_t5": noise(BATCH, TEXT, 32, seed=1),
        "encoder_hidden_states_llama3": noise(2, BATCH, TEXT, 16, seed=2), "pooled_embeds": noise(BATCH, 8, seed=3),
        "timesteps": time(5.0)}),
]  # fmt: skip
FAMILIES = {family.name: family for family in ROWS}
TEXT_IMAGE_IDS = torch.cat([ids(TEXT), ids(TOKENS)])

RUN = [
    # Some have a forward that runs; of the last ones only the lists are looked at.
    Family("AllegroTransformer3DModel", {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 4,
        "cross_attention_dim": 24, "sample_height": 8, "sample_width": 8, "sample_frames": 2, "caption_channels": 16},
        video(attention_mask=torch.ones(BATCH, 2, 8, 8), encoder_attention_mask=MASK, image_rotary_emb=(((torch.ones(4,
        4), torch.zeros(4, 4)),) * 3, (torch.zeros(1, 32).long(),) * 3))),
    Family("ErnieImageTransformer2DModel", {"hidden_size": 32, "num_attention_heads": 4, "num_layers": 4,
        "ffn_hidden_size": 32, "in_channels": 4, "out_channels": 4, "text_in_dim": 16, "rope_axes_dim": (4, 2, 2)},
        lambda: {"hidden_states": noise(BATCH, 4, 4, 4), "timestep": time(5.0), "text_bth": noise(BATCH, TEXT, 16,
        seed=1), "text_lens": torch.tensor([TEXT] * BATCH)}),
    Family("Ideogram4Transformer2DModel", HEADS | {"in_channels": 4, "num_layers": 4, "intermediate_size": 32,
        "adaln_dim": 16, "llm_features_dim": 16, "mrope_section": (2, 1, 1)}, lambda: {"hidden_states": noise(BATCH,
        TEXT + TOKENS, 4), "timestep": time(), "encoder_hidden_states": noise(BATCH, TEXT + TOKENS, 16, seed=1),
        "position_ids": torch.arange(TEXT + TOKENS)[None, :, None].repeat(BATCH, 1, 3), "segment_ids": torch.ones(BATCH,
        TEXT + TOKENS).long(), "indicator": torch.tensor([[3] * TEXT + [2] * TOKENS] * BATCH)}),
    Family("Krea2Transformer2DModel", HEADS | {"in_channels": 4, "num_layers": 4, "num_key_value_heads": 2,
        "intermediate_size": 32, "timestep_embed_dim": 16, "text_hidden_dim": 16, "num_text_layers": 2,
        "text_num_attention_heads": 2, "text_num_key_value_heads": 2, "text_intermediate_size": 16,
        "num_layerwise_text_blocks": 1, "num_refiner_text_blocks": 1, "axes_dims_rope": (4, 2, 2)},
        lambda: {"hidden_states": noise(BATCH, TOKENS, 4), "encoder_hidden_states": noise(BATCH, TEXT, 2, 16, seed=1),
        "timestep": time(), "position_ids": TEXT_IMAGE_IDS}),
    Family("NucleusMoEImageTransformer2DModel", HEADS | {"in_channels": 16, "out_channels": 4, "num_layers": 4,
        "joint_attention_dim": WIDTH, "axes_dims_rope": (2, 2, 4), "moe_enabled": False, "mlp_ratio": 12.0,
        "num_key_value_heads": 2, "capacity_factors": [8.0] * 4}, lambda: {"hidden_states": noise(BATCH, TOKENS, 16),
        "encoder_hidden_states": noise(BATCH, TEXT, WIDTH, seed=1), "timestep": time(), "img_shapes": [(1,
        *GRID)] * BATCH}),
    Family("JoyImageEditTransformer3DModel", {"in_channels": 4, "hidden_size": 32, "num_attention_heads": 4,
        "text_dim": 16, "num_layers": 4, "rope_dim_list": [2, 2, 4]}, video()),
    Family("LongCatAudioDiTTransformer", {"dit_dim": 32, "dit_depth": 4, "dit_heads": 4, "dit_text_dim": 16,
        "latent_dim": 4}, lambda: {"hidden_states": noise(BATCH, 10, 4), "encoder_hidden_states": noise(BATCH, TEXT, 16,
        seed=1), "encoder_attention_mask": MASK, "timestep": time(), "attention_mask": torch.ones(BATCH, 10).bool(),
        "latent_cond": noise(BATCH, 10, 4, seed=2)}),
    Family("MiniMaxMusic3Transformer1DModel", HEADS | {"in_channels": 4, "condition_dim": 16, "num_layers": 4,
        "ff_inner_dim": 32, "rotary_dim": 4, "fourier_embedding_dim": 16}, lambda: {"hidden_states": noise(BATCH, 4,
        10), "timestep": time(), "encoder_hidden_states": noise(BATCH, 10, 16, seed=1)}),
    Family("StableAudio3DiTModel", {"io_channels": 4, "embed_dim": 64, "depth": 4, "num_heads": 1, "cond_token_dim": 16,
        "global_cond_dim": 8, "local_add_cond_dim": 5, "timestep_features_dim": 16, "num_memory_tokens": 2},
        lambda: {"hidden_states": noise(BATCH, 4, 10), "timestep": time(), "global_hidden_states": noise(BATCH, 8,
        seed=2), "encoder_hidden_states": noise(BATCH, TEXT, 16, seed=1)}),
    Family("AceStepTransformer1DModel", {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "in_channels": 12,
        "audio_acoustic_hidden_dim": 4, "sliding_window": 4}, lambda: {"hidden_states": noise(BATCH, 10, 4),
        "timestep": time(), "timestep_r": time(), "encoder_hidden_states": noise(BATCH, TEXT, 32, seed=1),
        "context_latents": noise(BATCH, 10, 8, seed=2)}),
    Family("GlmImageTransformer2DModel", HEADS | {"in_channels": 4, "out_channels": 4, "num_layers": 4,
        "text_embed_dim": 16, "time_embed_dim": 8, "condition_dim": 2, "prior_vq_quantizer_codebook_size": 8},
        picture(width=16, prior_token_id=torch.ones(BATCH, 16).long(), prior_token_drop=torch.zeros(BATCH, 16).bool(),
        target_size=torch.tensor([[16.0, 16.0]] * BATCH), crop_coords=torch.tensor([[0.0, 0.0]] * BATCH))),
    Family("HeliosTransformer3DModel", {key: value for key,
        value in WAN.items() if key != "rope_max_seq_len"} | {"rope_dim": (4, 4, 4),
        "has_multi_term_memory_patch": False, "guidance_cross_attn": False, "zero_history_timestep": False},
        video(indices_hidden_states=torch.arange(2)[None].repeat(BATCH, 1))),
    Family("HunyuanVideo15Transformer3DModel", {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2,
        "attention_head_dim": 8, "num_layers": 4, "num_refiner_layers": 1, "text_embed_dim": 16, "text_embed_2_dim": 8,
        "image_embed_dim": 8, "rope_axes_dim": (2, 2, 4), "target_size": 16, "task_type": "t2v"},
        video(encoder_attention_mask=MASK, encoder_hidden_states_2=noise(BATCH, 3, 8, seed=3),
        encoder_attention_mask_2=torch.ones(BATCH, 3).bool(), image_embeds=torch.zeros(BATCH, 3, 8))),
    Family("LTX2VideoTransformer3DModel", {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2,
        "attention_head_dim": 8, "cross_attention_dim": 16, "audio_in_channels": 4, "audio_out_channels": 4,
        "audio_num_attention_heads": 2, "audio_attention_head_dim": 4, "audio_cross_attention_dim": 8, "num_layers": 4,
        "caption_channels": 16, "rope_double_precision": False}, lambda: {"hidden_states": noise(BATCH, 32, 4),
        "audio_hidden_states": noise(BATCH, 6, 4, seed=1), "encoder_hidden_states": noise(BATCH, TEXT, 16, seed=2),
        "timestep": time(500.0), "audio_encoder_hidden_states": noise(BATCH, TEXT, 16, seed=3),
        "encoder_attention_mask": MASK, "audio_encoder_attention_mask": MASK, "num_frames": 2, "height": 4, "width": 4,
        "audio_num_frames": 6}),
    Family("LuminaNextDiT2DModel", {"sample_size": 8, "in_channels": 4, "hidden_size": 32, "num_layers": 4,
        "num_attention_heads": 4, "num_kv_heads": 4, "multiple_of": 2, "cross_attention_dim": 16}, picture(width=16,
        encoder_mask=MASK, image_rotary_emb=torch.ones(8, 8, 4, dtype=torch.complex64), cross_attention_kwargs={})),
    Family("MotifVideoTransformer3DModel", {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2,
        "attention_head_dim": 8, "num_layers": 2, "num_single_layers": 4, "num_decoder_layers": 2, "text_embed_dim": 16,
        "rope_axes_dim": (2, 2, 4)}, video(encoder_attention_mask=MASK)),
    Family("Kandinsky6Transformer3DModel", {"in_visual_dim": 4, "out_visual_dim": 4, "in_text_dim": 16,
        "in_text_dim2": 8, "time_dim": 16, "model_dim": 32, "ff_dim": 32, "num_text_blocks": 1, "num_visual_blocks": 4,
        "axes_dims": (4, 6, 6), "visual_cond": False, "in_audio_dim": 4, "out_audio_dim": 4},
        lambda: {"hidden_states": noise(BATCH, 2, 8, 8, 4), "encoder_hidden_states": noise(BATCH, TEXT, 16, seed=1),
        "timestep": time(5.0), "pooled_projections": noise(BATCH, 8, seed=2), "audio_hidden_states": noise(BATCH, 6, 4,
        seed=3)}),
    Family("UVit2DModel", {"hidden_size": 16, "cond_embed_dim": 8, "micro_cond_encode_dim": 2,
        "micro_cond_embed_dim": 10, "encoder_hidden_size": 8, "vocab_size": 32, "codebook_size": 16, "in_channels": 8,
        "block_out_channels": 8, "num_res_blocks": 1, "block_num_heads": 1, "num_hidden_layers": 4,
        "num_attention_heads": 1, "intermediate_size": 16, "sample_size": 8, "downsample": True, "upsample": True},
        lambda: {"input_ids": torch.arange(128).view(BATCH, 8, 8) % 16, "pooled_text_emb": noise(BATCH, 8, seed=2),
        "encoder_hidden_states": noise(BATCH, TEXT, 8, seed=1), "micro_conds": torch.ones(BATCH, 5)}),
    Family("Transformer2DModel", HEADS | {"in_channels": 32, "num_layers": 4, "cross_attention_dim": 16},
        lambda: {"hidden_states": noise(BATCH, 32, 4, 4), "encoder_hidden_states": noise(BATCH, TEXT, 16, seed=1)}),
    Family("BriaFibo2Transformer2DModel", {"in_channels": 4, "dim": 32, "n_layers": 4, "n_refiner_layers": 1,
        "n_heads": 4, "cap_feat_dim": 16, "injection_layer_ids": (1, 3), "perceiver_num_layers": 1,
        "min_num_gist_tokens": 2, "max_num_gist_tokens": 4, "gist_step": 1, "gist_min_text_len": 2,
        "gist_max_text_len": 8, "axes_dims": (4, 2, 2), "axes_lens": (64, 32, 32)},
        lambda: {"hidden_states": noise(BATCH, 4, 8, 8), "encoder_hidden_states": noise(BATCH, 3, TEXT, 16, seed=1),
        "timestep": time()}),
    Family("QwenImage21Transformer2DModel", HEADS | {"in_channels": 4, "out_channels": 4, "num_layers": 4,
        "context_in_dim": 16, "axes_dims_rope": (2, 2, 4)}, lambda: {"hidden_states": noise(BATCH, 16, 4),
        "encoder_hidden_states": noise(BATCH, TEXT, 16, seed=1), "timestep": time(), "img_shapes": [[(1, 4,
        4)]] * BATCH, "img_mask": torch.tensor([[False] * TEXT + [True] * 4] * BATCH)}),
    Family("WanAnimateTransformer3DModel", WAN | {"in_channels": 12, "latent_channels": 4, "image_dim": 8,
        "inject_face_latents_blocks": 2}),
    Family("HunyuanVideoFramepackTransformer3DModel", HUNYUAN | {"guidance_embeds": False}),
    Family("JoyImageEditPlusTransformer3DModel", {"in_channels": 4, "hidden_size": 32, "num_attention_heads": 4,
        "text_dim": 16, "num_layers": 4, "rope_dim_list": [2, 2, 4]}),
    Family("Kandinsky6SRTransformer3DModel", {"in_visual_dim": 4, "out_visual_dim": 4, "time_dim": 16, "model_dim": 32,
        "ff_dim": 32, "num_visual_blocks": 4, "axes_dims": (4, 6, 6)}),
    Family("MiniMaxH3Transformer3DModel", HEADS | {"hidden_size": 32, "num_layers": 4, "num_refiner_layers": 1,
        "ffn_dim": 32, "in_channels": 4, "audio_in_channels": 4, "text_dim": 16, "freq_dim": 16,
        "time_embed_hidden_dim": 16, "time_embed_dim": 16, "rope_freq_dim": 2}),
    Family("Cosmos3OmniTransformer", {"head_dim": 8, "hidden_size": 32, "intermediate_size": 32, "latent_channel": 4,
        "num_attention_heads": 4, "num_hidden_layers": 4, "num_key_value_heads": 2, "patch_latent_dim": 16,
        "vocab_size": 50}),
    Family("SanaWMLTX2RefinerTransformer3DModel", {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2,
        "attention_head_dim": 8, "cross_attention_dim": 16, "num_layers": 4, "caption_channels": 16,
        "audio_num_attention_heads": 2, "audio_attention_head_dim": 4, "audio_cross_attention_dim": 8}),
    Family("SanaWMTransformer3DModel", {"in_channels": 4, "num_layers": 4, "hidden_size": 32, "num_attention_heads": 4,
        "linear_head_dim": 8, "caption_channels": 16, "chunk_plucker_post_attn_blocks": 4}),
    Family("LatteTransformer3DModel", HEADS | {"in_channels": 4, "num_layers": 2, "cross_attention_dim": WIDTH,
        "sample_size": 8, "patch_size": 2, "num_embeds_ada_norm": 10, "norm_type": "ada_norm_single",
        "caption_channels": 16, "video_length": 2, "norm_elementwise_affine": False}),
    Family("AnyFlowFARTransformer3DModel", WAN),
    Family("WanAnimate2Transformer3DModel", {"in_dim": 4, "dim": 24, "ffn_dim": 32, "freq_dim": 32, "text_dim": 16,
        "out_dim": 4, "num_heads": 2, "num_layers": 4}),
    Family("RFD4ProteinaTransformer", {"nlayers": 2, "token_dim": 24, "nheads": 2, "dim_cond": 16}),
]  # fmt: skip
EVERY = FAMILIES | {family.name: family for family in RUN}

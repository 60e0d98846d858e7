"""The other rows of the table: some with a forward that runs, and those of which only the lists are looked at."""

from __future__ import annotations

import torch

from tests.families import (
    BATCH,
    FAMILIES,
    GRID,
    HEADS,
    HUNYUAN,
    MASK,
    TEXT,
    TOKENS,
    WAN,
    WIDTH,
    Family,
    ids,
    noise,
    picture,
    time,
    video,
)

TEXT_IMAGE_IDS = torch.cat([ids(TEXT), ids(TOKENS)])

RUN = [
    Family(
        "AllegroTransformer3DModel",
        {
            "num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 4, "cross_attention_dim": 24,
            "sample_height": 8, "sample_width": 8, "sample_frames": 2, "caption_channels": 16,
        },
        video(
            attention_mask=torch.ones(BATCH, 2, 8, 8), encoder_attention_mask=MASK,
            image_rotary_emb=(
                ((torch.ones(4, 4), torch.zeros(4, 4)),) * 3, (torch.zeros(1, 32).long(),) * 3,
            ),
        ),
    ),
    Family(
        "ErnieImageTransformer2DModel",
        {
            "hidden_size": 32, "num_attention_heads": 4, "num_layers": 4, "ffn_hidden_size": 32, "in_channels": 4,
            "out_channels": 4, "text_in_dim": 16, "rope_axes_dim": (4, 2, 2),
        },
        lambda: {
            "hidden_states": noise(BATCH, 4, 4, 4), "timestep": time(5.0), "text_bth": noise(BATCH, TEXT, 16, seed=1),
            "text_lens": torch.tensor([TEXT] * BATCH),
        },
    ),
    Family(
        "Ideogram4Transformer2DModel",
        HEADS | {
            "in_channels": 4, "num_layers": 4, "intermediate_size": 32, "adaln_dim": 16, "llm_features_dim": 16,
            "mrope_section": (2, 1, 1),
        },
        lambda: {
            "hidden_states": noise(BATCH, TEXT + TOKENS, 4), "timestep": time(),
            "encoder_hidden_states": noise(BATCH, TEXT + TOKENS, 16, seed=1),
            "position_ids": torch.arange(TEXT + TOKENS)[None, :, None].repeat(BATCH, 1, 3),
            "segment_ids": torch.ones(BATCH, TEXT + TOKENS).long(),
            "indicator": torch.tensor([[3] * TEXT + [2] * TOKENS] * BATCH),
        },
    ),
    Family(
        "Krea2Transformer2DModel",
        HEADS | {
            "in_channels": 4, "num_layers": 4, "num_key_value_heads": 2, "intermediate_size": 32,
            "timestep_embed_dim": 16, "text_hidden_dim": 16, "num_text_layers": 2, "text_num_attention_heads": 2,
            "text_num_key_value_heads": 2, "text_intermediate_size": 16, "num_layerwise_text_blocks": 1,
            "num_refiner_text_blocks": 1, "axes_dims_rope": (4, 2, 2),
        },
        lambda: {
            "hidden_states": noise(BATCH, TOKENS, 4), "encoder_hidden_states": noise(BATCH, TEXT, 2, 16, seed=1),
            "timestep": time(), "position_ids": TEXT_IMAGE_IDS,
        },
    ),
    Family(
        "NucleusMoEImageTransformer2DModel",
        HEADS | {
            "in_channels": 16, "out_channels": 4, "num_layers": 4, "joint_attention_dim": WIDTH,
            "axes_dims_rope": (2, 2, 4), "moe_enabled": False,
            "mlp_ratio": 12.0, "num_key_value_heads": 2, "capacity_factors": [8.0] * 4,
        },
        lambda: {
            "hidden_states": noise(BATCH, TOKENS, 16), "encoder_hidden_states": noise(BATCH, TEXT, WIDTH, seed=1),
            "timestep": time(), "img_shapes": [(1, *GRID)] * BATCH,
        },
    ),
    Family(
        "JoyImageEditTransformer3DModel",
        {
            "in_channels": 4, "hidden_size": 32, "num_attention_heads": 4, "text_dim": 16, "num_layers": 4,
            "rope_dim_list": [2, 2, 4],
        },
        video(),
    ),
    Family(
        "LongCatAudioDiTTransformer",
        {"dit_dim": 32, "dit_depth": 4, "dit_heads": 4, "dit_text_dim": 16, "latent_dim": 4},
        lambda: {
            "hidden_states": noise(BATCH, 10, 4), "encoder_hidden_states": noise(BATCH, TEXT, 16, seed=1),
            "encoder_attention_mask": MASK, "timestep": time(), "attention_mask": torch.ones(BATCH, 10).bool(),
            "latent_cond": noise(BATCH, 10, 4, seed=2),
        },
    ),
    Family(
        "MiniMaxMusic3Transformer1DModel",
        HEADS | {
            "in_channels": 4, "condition_dim": 16, "num_layers": 4, "ff_inner_dim": 32, "rotary_dim": 4,
            "fourier_embedding_dim": 16,
        },
        lambda: {
            "hidden_states": noise(BATCH, 4, 10), "timestep": time(),
            "encoder_hidden_states": noise(BATCH, 10, 16, seed=1),
        },
    ),
    Family(
        "StableAudio3DiTModel",
        {
            "io_channels": 4, "embed_dim": 64, "depth": 4, "num_heads": 1, "cond_token_dim": 16, "global_cond_dim": 8,
            "local_add_cond_dim": 5, "timestep_features_dim": 16, "num_memory_tokens": 2,
        },
        lambda: {
            "hidden_states": noise(BATCH, 4, 10), "timestep": time(), "global_hidden_states": noise(BATCH, 8, seed=2),
            "encoder_hidden_states": noise(BATCH, TEXT, 16, seed=1),
        },
    ),
    Family(
        "AceStepTransformer1DModel",
        {
            "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 8, "in_channels": 12, "audio_acoustic_hidden_dim": 4,
            "sliding_window": 4,
        },
        lambda: {
            "hidden_states": noise(BATCH, 10, 4), "timestep": time(), "timestep_r": time(),
            "encoder_hidden_states": noise(BATCH, TEXT, 32, seed=1), "context_latents": noise(BATCH, 10, 8, seed=2),
        },
    ),
    Family(
        "GlmImageTransformer2DModel",
        HEADS | {
            "in_channels": 4, "out_channels": 4, "num_layers": 4, "text_embed_dim": 16, "time_embed_dim": 8,
            "condition_dim": 2, "prior_vq_quantizer_codebook_size": 8,
        },
        picture(
            width=16, prior_token_id=torch.ones(BATCH, 16).long(), prior_token_drop=torch.zeros(BATCH, 16).bool(),
            target_size=torch.tensor([[16.0, 16.0]] * BATCH), crop_coords=torch.tensor([[0.0, 0.0]] * BATCH),
        ),
    ),
    Family(
        "HeliosTransformer3DModel",
        {key: value for key, value in WAN.items() if key != "rope_max_seq_len"} | {
            "rope_dim": (4, 4, 4), "has_multi_term_memory_patch": False, "guidance_cross_attn": False,
            "zero_history_timestep": False,
        },
        video(indices_hidden_states=torch.arange(2)[None].repeat(BATCH, 1)),
    ),
    Family(
        "HunyuanVideo15Transformer3DModel",
        {
            "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 4,
            "num_refiner_layers": 1, "text_embed_dim": 16, "text_embed_2_dim": 8, "image_embed_dim": 8,
            "rope_axes_dim": (2, 2, 4), "target_size": 16, "task_type": "t2v",
        },
        video(
            encoder_attention_mask=MASK, encoder_hidden_states_2=noise(BATCH, 3, 8, seed=3),
            encoder_attention_mask_2=torch.ones(BATCH, 3).bool(), image_embeds=torch.zeros(BATCH, 3, 8),
        ),
    ),
    Family(
        "LTX2VideoTransformer3DModel",
        {
            "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 8,
            "cross_attention_dim": 16, "audio_in_channels": 4, "audio_out_channels": 4, "audio_num_attention_heads": 2,
            "audio_attention_head_dim": 4, "audio_cross_attention_dim": 8, "num_layers": 4, "caption_channels": 16,
            "rope_double_precision": False,
        },
        lambda: {
            "hidden_states": noise(BATCH, 32, 4), "audio_hidden_states": noise(BATCH, 6, 4, seed=1),
            "encoder_hidden_states": noise(BATCH, TEXT, 16, seed=2), "timestep": time(500.0),
            "audio_encoder_hidden_states": noise(BATCH, TEXT, 16, seed=3), "encoder_attention_mask": MASK,
            "audio_encoder_attention_mask": MASK, "num_frames": 2, "height": 4, "width": 4, "audio_num_frames": 6,
        },
    ),
    Family(
        "LuminaNextDiT2DModel",
        {
            "sample_size": 8, "in_channels": 4, "hidden_size": 32, "num_layers": 4, "num_attention_heads": 4,
            "num_kv_heads": 4, "multiple_of": 2, "cross_attention_dim": 16,
        },
        picture(
            width=16, encoder_mask=MASK, image_rotary_emb=torch.ones(8, 8, 4, dtype=torch.complex64),
            cross_attention_kwargs={},
        ),
    ),
    Family(
        "MotifVideoTransformer3DModel",
        {
            "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2,
            "num_single_layers": 4, "num_decoder_layers": 2, "text_embed_dim": 16, "rope_axes_dim": (2, 2, 4),
        },
        video(encoder_attention_mask=MASK),
    ),
    Family(
        "Kandinsky6Transformer3DModel",
        {
            "in_visual_dim": 4, "out_visual_dim": 4, "in_text_dim": 16, "in_text_dim2": 8, "time_dim": 16,
            "model_dim": 32, "ff_dim": 32, "num_text_blocks": 1, "num_visual_blocks": 4, "axes_dims": (4, 6, 6),
            "visual_cond": False, "in_audio_dim": 4, "out_audio_dim": 4,
        },
        lambda: {
            "hidden_states": noise(BATCH, 2, 8, 8, 4), "encoder_hidden_states": noise(BATCH, TEXT, 16, seed=1),
            "timestep": time(5.0), "pooled_projections": noise(BATCH, 8, seed=2),
            "audio_hidden_states": noise(BATCH, 6, 4, seed=3),
        },
    ),
    Family(
        "UVit2DModel",
        {
            "hidden_size": 16, "cond_embed_dim": 8, "micro_cond_encode_dim": 2, "micro_cond_embed_dim": 10,
            "encoder_hidden_size": 8, "vocab_size": 32, "codebook_size": 16, "in_channels": 8,
            "block_out_channels": 8, "num_res_blocks": 1, "block_num_heads": 1, "num_hidden_layers": 4,
            "num_attention_heads": 1, "intermediate_size": 16, "sample_size": 8, "downsample": True, "upsample": True,
        },
        lambda: {
            "input_ids": torch.arange(128).view(BATCH, 8, 8) % 16, "pooled_text_emb": noise(BATCH, 8, seed=2),
            "encoder_hidden_states": noise(BATCH, TEXT, 8, seed=1), "micro_conds": torch.ones(BATCH, 5),
        },
    ),
    Family(
        "Transformer2DModel",
        HEADS | {"in_channels": 32, "num_layers": 4, "cross_attention_dim": 16},
        lambda: {"hidden_states": noise(BATCH, 32, 4, 4), "encoder_hidden_states": noise(BATCH, TEXT, 16, seed=1)},
    ),
    Family(
        "BriaFibo2Transformer2DModel",
        {
            "in_channels": 4, "dim": 32, "n_layers": 4, "n_refiner_layers": 1, "n_heads": 4, "cap_feat_dim": 16,
            "injection_layer_ids": (1, 3), "perceiver_num_layers": 1, "min_num_gist_tokens": 2,
            "max_num_gist_tokens": 4, "gist_step": 1, "gist_min_text_len": 2, "gist_max_text_len": 8,
            "axes_dims": (4, 2, 2), "axes_lens": (64, 32, 32),
        },
        lambda: {
            "hidden_states": noise(BATCH, 4, 8, 8), "encoder_hidden_states": noise(BATCH, 3, TEXT, 16, seed=1),
            "timestep": time(),
        },
    ),
    Family(
        "QwenImage21Transformer2DModel",
        HEADS | {
            "in_channels": 4, "out_channels": 4, "num_layers": 4, "context_in_dim": 16, "axes_dims_rope": (2, 2, 4),
        },
        lambda: {
            "hidden_states": noise(BATCH, 16, 4), "encoder_hidden_states": noise(BATCH, TEXT, 16, seed=1),
            "timestep": time(), "img_shapes": [[(1, 4, 4)]] * BATCH,
            "img_mask": torch.tensor([[False] * TEXT + [True] * 4] * BATCH),
        },
    ),
    Family(
        "WanAnimateTransformer3DModel",
        WAN | {"in_channels": 12, "latent_channels": 4, "image_dim": 8, "inject_face_latents_blocks": 2},
    ),
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
MORE = {family.name: family for family in RUN}
EVERY = FAMILIES | MORE

"""Pipelines that make sound, and one that makes proteins."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
import transformers

from tests.tiny import t5, tokenizer
from tests.zoo import encoders
from tests.zoo.entry import OTHER_TEXT, REMOVED, TEXT, entry, masked_text, padded_text, to_long, transformer
from tests.zoo.pictures import LONG_PROMPT, PROMPT

TWO = {"num_waveforms_per_prompt": 2}


def oobleck(channels: int) -> Any:
    """An autoencoder that has a latent for every two samples, of which there are 40 in a second."""
    return diffusers.AutoencoderOobleck(
        encoder_hidden_size=6, downsampling_ratios=[1, 2], decoder_channels=3, decoder_input_channels=channels,
        audio_channels=2, channel_multiples=[2, 4], sampling_rate=40,
    ).eval()  # fmt: skip


def stable_audio() -> Any:
    return diffusers.StableAudioPipeline(
        vae=oobleck(4), text_encoder=t5(16), tokenizer=tokenizer(TEXT),
        projection_model=diffusers.pipelines.stable_audio.StableAudioProjectionModel(
            text_encoder_dim=16, conditioning_dim=16, min_value=0, max_value=32,
        ),
        transformer=transformer("StableAudioDiTModel", sample_size=23, global_states_input_dim=32),
        scheduler=diffusers.EDMDPMSolverMultistepScheduler(
            prediction_type="v_prediction", sigma_data=1.0, sigma_max=80,
        ),
    )  # fmt: skip


def stable_audio_text(length: int = TEXT, rows: int = 1) -> dict[str, Any]:
    return to_long(masked_text(length, rows=rows, mask="attention_mask"))


def stable_audio_3() -> Any:
    return diffusers.StableAudio3Pipeline(
        vae=diffusers.AutoencoderSAME(
            audio_channels=2, patch_size=2, encoder_channels=8, encoder_c_mults=(2,), encoder_strides=(2,),
            encoder_transformer_depths=(1,), latent_dim=4, use_differential_attention=False, dim_heads=4, ff_mult=2,
            sampling_rate=16,
        ),
        text_encoder=None, tokenizer=None,
        duration_embedder=diffusers.pipelines.stable_audio_3.StableAudio3DurationEmbedder(
            output_dim=16, fourier_dim=16,
        ),
        transformer=transformer("StableAudio3DiTModel", global_cond_dim=16, num_heads=2),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(num_train_timesteps=1, shift=1.0),
    )  # fmt: skip


def ace_step() -> Any:
    shape = {
        "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "sliding_window": 4,
    }  # fmt: skip
    return diffusers.AceStepPipeline(
        vae=oobleck(4), text_encoder=encoders.language(), tokenizer=encoders.chat_tokenizer(),
        transformer=transformer("AceStepTransformer1DModel"),
        condition_encoder=diffusers.pipelines.ace_step.AceStepConditionEncoder(
            text_hidden_dim=16, timbre_hidden_dim=4, num_lyric_encoder_hidden_layers=1,
            num_timbre_encoder_hidden_layers=1, **shape,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(num_train_timesteps=1, shift=1.0),
    )  # fmt: skip


def longcat_audio() -> Any:
    config = transformers.UMT5Config(d_model=16, d_kv=8, num_layers=2, num_heads=2, d_ff=32, vocab_size=64)
    return diffusers.LongCatAudioDiTPipeline(
        vae=diffusers.LongCatAudioDiTVae(
            in_channels=1, channels=16, c_mults=[1, 2], strides=[2], latent_dim=4, encoder_latent_dim=8,
            downsampling_ratio=2, sample_rate=40,
        ),
        text_encoder=transformers.UMT5EncoderModel(config).eval(), tokenizer=tokenizer(64),
        transformer=transformer("LongCatAudioDiTTransformer"),
    )  # fmt: skip


def proteina() -> Any:
    schedule = {"schedule_mode": "log", "noise_mode": "1/t", "tsr_k": 1.0, "tsr_sigma": 0.1, "tail_steps": 1}
    features: dict[str, Any] = {
        "feats_seq": ("xt_bb_ca", "xt_local_latents", "token_type"),
        "feats_cond_seq": ("time_emb_bb_ca", "time_emb_local_latents"), "feats_pair_repr": ("xt_bb_ca_pair_dists",),
    }  # fmt: skip
    sizes = {"latent_dim": 4, "pair_repr_dim": 16, "token_dim": 24, "nheads": 2, "dim_cond": 16}
    return diffusers.RFD4ProteinaPipeline(
        transformer=transformer("RFD4ProteinaTransformer", nlayers=4, tri_mult_c=16, **sizes, **features),
        vae=diffusers.RFD4ProteinaAutoencoder(
            atom37_mask=[[True] * 37] * 147, allowed_residue_types=[[True] * 147] * 7, nlayers=1, **sizes
        ),
        bb_ca_scheduler=diffusers.RFD4ProteinaScheduler(**schedule),
        local_latents_scheduler=diffusers.RFD4ProteinaScheduler(**schedule), recycle_depths=[0, 0, 0],
    )  # fmt: skip


def proteina_call(tokens: int = 15, rows: int = 1, short: int | None = None) -> dict[str, Any]:
    """What there is of each token of a protein; the last ones of the second are padding where it is `short`."""
    real = torch.ones(rows, tokens, dtype=torch.bool)
    real[1:, short or tokens :] = False
    return {
        "padding_mask": real, "is_in_context_conditioning": ~real | False, "supports_local_latent": real,
        "token_type": torch.zeros(rows, tokens).long(), "num_inference_steps": REMOVED, "output_type": "pt",
        "conditioning_features": {
            "condition_sequence_1_residue": torch.zeros(rows, tokens).long(),
            "molecule_iid": torch.zeros(rows, tokens).long(),
        },
        "generator": [torch.Generator().manual_seed(row) for row in range(rows)],
    }  # fmt: skip


SPEECH = {"prompt": PROMPT, "lyrics": "left right", "audio_duration": 1.3}
ACE_STEP: dict[str, Any] = {
    "larger": {"audio_duration": 2.3}, "other_prompt": {"prompt": LONG_PROMPT},
    "two_images": {"prompt": [PROMPT] * 2, "lyrics": ["left right"] * 2},
    "padded_prompt": {"prompt": [PROMPT, LONG_PROMPT], "lyrics": ["left right"] * 2},
}  # fmt: skip
MASK = "encoder_attention_mask"

ENTRIES = [
    entry(
        "stable-audio", 13, stable_audio,
        lambda: stable_audio_text() | {"audio_end_in_s": 1.0, "guidance_scale": 3.0},
        larger="the transformer has one length", other_prompt=stable_audio_text(OTHER_TEXT),
        two_images=stable_audio_text(rows=2), padded_prompt=to_long(padded_text(mask="attention_mask")),
    ),
    entry(
        "stable-audio-3", 13, stable_audio_3, lambda: masked_text(mask=MASK) | {"duration": 5.0, "guidance_scale": 3.0},
        larger={"duration": 9.0}, other_prompt=masked_text(OTHER_TEXT, mask=MASK), two_images=TWO,
        padded_prompt=padded_text(mask=MASK),
    ),
    entry("ace-step", 13, ace_step, lambda: SPEECH | {"guidance_scale": 3.0}, **ACE_STEP),
    entry("ace-step-turbo", 13, ace_step, lambda: SPEECH | {"guidance_scale": 1.0}, **ACE_STEP),
    entry(
        "longcat-audio", 20, longcat_audio,
        lambda: {"prompt": PROMPT, "negative_prompt": "a square", "audio_duration_s": 1.0, "guidance_scale": 3.0},
        larger={"audio_duration_s": 2.0}, other_prompt={"prompt": LONG_PROMPT},
        two_images={"prompt": [PROMPT] * 2, "negative_prompt": ["a square"] * 2},
        padded_prompt={"prompt": [PROMPT, LONG_PROMPT], "negative_prompt": ["a square"] * 2},
    ),
    entry(
        "proteina", 20, proteina, proteina_call, larger=lambda: proteina_call(35),
        other_prompt="the pipeline takes no text", two_images=lambda: proteina_call(rows=2),
        padded_prompt=lambda: proteina_call(rows=2, short=11),
    ),
]  # fmt: skip

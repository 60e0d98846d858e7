"""The frames of a VAE of chunks, which a modular pipeline has. Its folder is planned for in `test_recorded`."""

from __future__ import annotations

import diffusers
import pytest

from ditile.plan.errors import ModelError
from ditile.planner.footprint import VaeScale, measure_vae_scale

H3_VAE = {
    "block_out_channels": (8,) * 6, "layers_per_block": 1, "norm_num_groups": 2, "decoder_num_layers": 1,
    "decoder_num_attention_heads": 2, "decoder_attention_head_dim": 32,
}  # fmt: skip


def test_frames_of_a_vae_of_chunks() -> None:
    """17 frames are 5 latent frames, and the last 5 are 2, for any sizes of its layers; of other VAEs each latent frame
    has as many.

    A failure means that a video is refused that the model makes, or priced with other tokens."""
    scale = measure_vae_scale(diffusers.AutoencoderKLMiniMaxH3, H3_VAE)
    assert scale == VaeScale(16, 17, 5, "latent_channels", 5, 2) and scale.counted_frames == (7, 12)
    assert [scale.count_latent_frames(frames) for frames in (22, 39, 124)] == [7, 12, 37]
    for frames, near in ((121, 124), (110, 124), (4, 5)):
        with pytest.raises(ModelError, match=f"frames={frames} are not a multiple of 17 and 5 more; try frames={near}"):
            scale.count_latent_frames(frames)
    assert VaeScale(8, 4).count_latent_frames(81) == 21 and VaeScale(8, 4).counted_frames == (3, 4)

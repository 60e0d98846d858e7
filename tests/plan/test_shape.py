"""What follows from the arguments of a pipeline's call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ditile.plan.shape import count_images


@pytest.mark.parametrize(
    ("call", "images"),
    [
        ({"prompt": "a ring"}, 1),
        ({"prompt": ["a ring", "a disk"], "num_images_per_prompt": 3}, 6),
        ({"prompt": ["a song"], "num_waveforms_per_prompt": 2}, 2),
        ({"prompt": "a film", "num_videos_per_prompt": 2, "num_frames": 81}, 2),
        ({"prompt": None, "prompt_embeds": torch.zeros(2, 5, 8), "num_images_per_prompt": 2}, 4),
        ({"prompt_embeds_t5": torch.zeros(3, 5, 8)}, 3),
        ({"prompt_embeds_llama3": torch.zeros(2, 3, 5, 8), "prompt_embeds_t5": torch.zeros(3, 5, 8)}, 3),
        ({"batch_size": 5}, 5),
        ({"class_labels": [1, 2, 3]}, 3),
        ({"class_labels": 7, "batch_size": 2}, 2),
        ({"image": torch.zeros(3, 8, 8), "batch_size": 8}, 1),
        ({"image": torch.zeros(2, 3, 8, 8), "num_images_per_prompt": 2}, 4),
        ({"latents": torch.zeros(2, 5, 8)}, 2),
        ({"labels": [1, 2]}, 2),
        ({"image_size": (64, 64), "conditioning_scale": [0.5, 0.5]}, 1),
        ({}, 1),
    ],
)
def test_images_of_a_call(call: dict[str, Any], images: int) -> None:
    """A failure means that a plan shares out another number of images than the pipeline makes."""
    assert count_images(call) == images

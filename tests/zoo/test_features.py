"""What families with a spec have, those whose anatomy is derived have too: warmup modes, LoRAs, the table of ranks."""

from __future__ import annotations

import pytest
import torch

from ditile.model.anatomies import find_anatomy, forget_anatomy
from ditile.runner.runner import build_single_runner
from ditile_lab.study.prove import ensure_anatomies
from tests.pool import Pool
from tests.zoo.features import (
    PATCHES,
    draw_after_a_refusal,
    draw_by_rows,
    draw_in_every_mode,
    draw_padded_micro_batches,
    draw_stale_in_mode,
    draw_with_a_longer_prompt,
    draw_with_lora,
    leave_out_a_block,
)
from tests.zoo.own import OWN

pytestmark = pytest.mark.filterwarnings("ignore")
NAMES = ("wan-2.1", "qwen-image", "z-image")


@pytest.mark.parametrize("name", NAMES)
def test_warmup_modes(pool: Pool, name: str) -> None:
    """A failure means that a mode was written for the families of a spec alone."""
    for problems in pool.run(draw_in_every_mode, 2, name):
        assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("name", "mode", "variant"),
    [
        ("wan-2.1", "sequence", "call"),
        ("flux-2-klein", "sequence", "call"),
        ("lumina-2", "sequence", "call"),
        ("stable-audio-3", "sequence", "call"),
        ("qwen-image", "sequence", "padded_prompt"),
    ],
)
def test_stale_keys_of_warmup_modes(pool: Pool, name: str, mode: str, variant: str) -> None:
    """A failure means that a stage keeps keys or masks of another form than those that its layers make."""
    for problems in pool.run(draw_stale_in_mode, 2, name, mode, variant):
        assert not problems, "\n".join(problems)


@pytest.mark.parametrize("name", NAMES)
def test_loras(pool: Pool, name: str) -> None:
    """A failure means that the source of a forward is another one with a LoRA, or that a stage has none of it."""
    for problems in pool.run(draw_with_lora, 2, name):
        assert not problems, "\n".join(problems)


@pytest.mark.parametrize("name", [*NAMES, "ltx", "hunyuan-video"])
def test_rows_of_the_picture(pool: Pool, name: str) -> None:
    """A failure means that a video has seams, or that ranks have other frames."""
    for problems in pool.run(draw_by_rows, 2, name):
        assert not problems, "\n".join(problems)


@pytest.mark.parametrize("name", PATCHES)
def test_a_call_after_a_refusal(pool: Pool, name: str) -> None:
    """A failure means that a server must start its ranks again because somebody asked for a picture too small."""
    for problems in pool.run(draw_after_a_refusal, 2, name):
        assert not problems, "\n".join(problems)


def test_a_prompt_that_a_callback_replaces(pool: Pool) -> None:
    """A failure means that the end of the new prompt is dropped in silence."""
    for problems in pool.run(draw_with_a_longer_prompt, 2, "cogvideox"):
        assert not problems, "\n".join(problems)


@pytest.mark.parametrize("name", OWN)
def test_random_state(name: str) -> None:
    """A failure means that a picture without a generator depends on whether its model was looked at before."""
    pipe = OWN[name].make()
    forget_anatomy(pipe.transformer)
    before = torch.get_rng_state()
    ensure_anatomies(pipe, build_single_runner)
    assert find_anatomy(pipe.transformer) is not None and torch.equal(torch.get_rng_state(), before)


def test_a_block_that_is_left_out(pool: Pool) -> None:
    """A failure means a wrong picture in silence: stages meet at a block that one of them does not reach."""
    assert all("ran 3 blocks at" in said and "same blocks in every call" in said
               for said in pool.run(leave_out_a_block, 2, "wan-2.1"))  # fmt: skip


def test_rows_of_masks(pool: Pool) -> None:
    """A failure means that a micro-batch is given the mask of another's prompts."""
    assert not any(pool.run(draw_padded_micro_batches, 2, "qwen-image"))

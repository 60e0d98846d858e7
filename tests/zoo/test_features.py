"""What families with a spec have, those whose anatomy is derived have too: warmup modes, LoRAs, the table of ranks."""

from __future__ import annotations

import pytest

from tests.pool import Pool
from tests.zoo.features import (
    PATCHES,
    draw_after_a_refusal,
    draw_by_rows,
    draw_in_every_mode,
    draw_with_a_longer_prompt,
    draw_with_lora,
)

pytestmark = pytest.mark.filterwarnings("ignore")
NAMES = ("wan-2.1", "qwen-image", "z-image")


@pytest.mark.parametrize("name", NAMES)
def test_warmup_modes(pool: Pool, name: str) -> None:
    """A failure means that a mode was written for the families of a spec alone."""
    for problems in pool.run(draw_in_every_mode, 2, name):
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

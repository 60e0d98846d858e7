"""What families with a spec have, those whose anatomy is derived have too: warmup modes, LoRAs, the table of ranks."""

from __future__ import annotations

import pytest

from tests.pool import Pool
from tests.zoo.features import draw_by_rows, draw_in_every_mode, draw_with_lora

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

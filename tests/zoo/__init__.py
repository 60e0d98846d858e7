"""Real pipelines of diffusers with tiny random weights: every one that calls a diffusion transformer, offline."""

from __future__ import annotations

from tests.zoo import pictures, sounds, videos
from tests.zoo.entry import VARIANTS, Entry

__all__ = ["LEFT_OUT", "VARIANTS", "ZOO", "Entry"]

ENTRIES = [*pictures.ENTRIES, *videos.ENTRIES, *sounds.ENTRIES]
ZOO: dict[str, Entry] = {one.name: one for one in sorted(ENTRIES, key=lambda one: one.use_rank)}

# Pipeline classes that are not here, and why.
LEFT_OUT: dict[str, str] = {}

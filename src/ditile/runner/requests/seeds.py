"""The seeds of a request: where the first one comes from, which seed each image gets, and the generators of noise.

Nothing here imports torch by itself.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Generator
    from torch.distributed import ProcessGroup

SEED_LIMIT = 2**31
"""A random seed is below it, as JSON and other programs keep seeds in 32 bits with a sign."""


def choose_random_seed() -> int:
    """A seed for a request that names none."""
    return secrets.randbelow(SEED_LIMIT)


def agree_on_seed(seed: int | None, group: ProcessGroup | None) -> int:
    """The seed of a request; if it names none, a random one that rank 0 chooses and sends to all ranks of a group."""
    from ditile.distributed.transport import gather_json

    if seed is not None:
        return seed
    return int(gather_json(choose_random_seed(), group)[0])


def list_seeds(first: int, num_images: int) -> list[int]:
    """The seeds of the images of a request: each image's seed is one more than the seed of the image before it."""
    return list(range(first, first + num_images))


def make_generators(seeds: Sequence[int]) -> list[Generator]:
    """One generator of noise for each seed; on the CPU, so that every rank and every device draws the same noise."""
    import torch

    return [torch.Generator("cpu").manual_seed(seed) for seed in seeds]

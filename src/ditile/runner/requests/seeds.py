"""The seeds of a request: the choice of the first one, the seed of each image, and the generators of noise.

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
"""The limit of a random seed, which is below it: JSON and other programs keep seeds in 32 bits with a sign."""


def choose_random_seed() -> int:
    """Choose a seed for a request without one."""
    return secrets.randbelow(SEED_LIMIT)


def agree_on_seed(seed: int | None, group: ProcessGroup | None) -> int:
    """Agree on the seed of a request. If it names none, rank 0 chooses a random one and sends it to all ranks of a
    group."""
    from ditile.distributed.transport import gather_json

    if seed is not None:
        return seed
    return int(gather_json(choose_random_seed(), group)[0])


def list_seeds(first: int, num_images: int) -> list[int]:
    """List the seeds of the images of a request. Each image's seed is one more than the seed of the previous image."""
    return list(range(first, first + num_images))


def make_generators(seeds: Sequence[int]) -> list[Generator]:
    """Make one generator of noise for each seed. It is on the CPU, so that every rank and every device generates the
    same noise."""
    import torch

    return [torch.Generator("cpu").manual_seed(seed) for seed in seeds]

"""The seed of a request: the choice of a random one, and the agreement of ranks on it.

Nothing here imports torch by itself.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

"""The seed of a request. Nothing here imports torch."""

from __future__ import annotations

import secrets

SEED_LIMIT = 2**31
"""Random seeds are below this limit, because JSON and other programs keep seeds in 32 bits with a sign."""


def choose_random_seed() -> int:
    """Choose a seed for a request without one."""
    return secrets.randbelow(SEED_LIMIT)

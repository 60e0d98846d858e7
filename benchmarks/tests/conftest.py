"""The environment and the pool of ranks of tests/."""

from tests.conftest import pool

__all__ = ["pool"]

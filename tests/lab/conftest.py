"""Commands that a test calls in its own process fork their ranks; those of a process of its own start interpreters."""

import pytest


@pytest.fixture(autouse=True)
def commands_fork_their_ranks(forked_ranks: None) -> None:
    pass

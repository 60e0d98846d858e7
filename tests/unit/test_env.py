"""What is left out of the log: how torchao complains while it is imported, and nothing else."""

from __future__ import annotations

import logging

import pytest

from ditile import env


@pytest.mark.parametrize("name", env.TORCHAO)
def test_only_complaints_of_an_import_are_left_out(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """A failure means that a user reads a dozen lines about kernels, or misses a warning that concerns him."""
    for _ in range(2):
        env.hush_torchao()
    logger = logging.getLogger(name)
    logger.warning(env.TORCHAO[name] + " and so on", *["one"] * env.TORCHAO[name].count("%s"))
    logger.warning("weights were skipped")
    assert [record.getMessage() for record in caplog.records if record.name == name] == ["weights were skipped"]

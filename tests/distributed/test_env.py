"""What is left out of the log: how torchao complains while it is imported, and nothing else."""

from __future__ import annotations

import logging
import os

import pytest

from ditile.distributed import env


@pytest.mark.parametrize("name", env.TORCHAO)
def test_only_complaints_of_an_import_are_left_out(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """A failure means that a user reads a dozen lines about kernels, or misses a warning that concerns him."""
    for _ in range(2):
        env.silence_torchao()
    logger = logging.getLogger(name)
    logger.warning(env.TORCHAO[name] + " and so on", *["one"] * env.TORCHAO[name].count("%s"))
    logger.warning("weights were skipped")
    assert [record.getMessage() for record in caplog.records if record.name == name] == ["weights were skipped"]


def test_what_is_said_while_connecting_is_no_answer(capfd: pytest.CaptureFixture[str]) -> None:
    """torch 2.9's gloo prints on standard output. A failure means that `--json -` is no JSON there."""
    with pytest.raises(ZeroDivisionError), env.redirect_native_stdout():
        os.write(1, b"connected\n")
        raise ZeroDivisionError
    os.write(1, b"{}\n")
    assert tuple(capfd.readouterr()) == ("{}\n", "connected\n")

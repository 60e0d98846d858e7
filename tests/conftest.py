"""Fixtures of every test. Tests never use the network, assert the ages of keys, and use one torch thread."""

import gc
import os
from collections.abc import Iterator

os.environ |= {
    "DITILE_CHECK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}

import pytest
import torch

from ditile.runner.requests import console
from tests import rotation
from tests.pool import Pool, fork_ranks

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rotate", action="store_true", help="of the tests that are marked `rotating`, run a tenth")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the rows of long tables that another commit runs."""
    if not config.getoption("--rotate"):
        return
    items[:], left = rotation.choose_rows(items)
    config.hook.pytest_deselected(items=left)


def pytest_collection_finish() -> None:
    """What was imported is not looked through again by the garbage collector: half a million objects each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command says while it takes long does not depend on how busy the machine is."""
    monkeypatch.setattr(console, "STATUS_SECONDS", 600.0)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """The ranks that all tests share: `pool.run(fn, ranks, *args)`."""
    with Pool() as pool:
        yield pool


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_ranks(monkeypatch)

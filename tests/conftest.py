"""Fixtures of every test. Tests never use the network, assert the ages of keys, and use one torch thread."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

os.environ |= {"DITILE_CHECK": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

import pytest
import torch

from ditile.runner.requests import console
from tests import suites
from tests.pool import Pool, fork_ranks

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    help_ = "run the tests that tests/commit.txt names, or all others; without it run both"
    parser.addoption("--suite", choices=["commit", "nightly"], help=help_)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files without a test of a commit: to import them takes long."""
    if config.getoption("--suite") != "commit" or not collection_path.is_file():
        return None
    files = {name.partition("::")[0] for name in suites.read_commit_list()}
    return collection_path.relative_to(config.rootpath).as_posix() not in files or None


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of the other suite."""
    suite = config.getoption("--suite")
    if suite is None:
        return
    names = suites.read_commit_list()
    commit, nightly = suites.split_suites(items, names)
    lost = suites.find_lost_names(items, names)
    if suite == "commit" and config.args == ["tests"] and lost:
        commit.append(suites.LostNames.from_parent(session, name="commit.txt", lost=lost))
    items[:], left = (commit, nightly) if suite == "commit" else (nightly, commit)
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


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test has a working directory of its own."""
    monkeypatch.chdir(tmp_path)

"""Real servers that the tests of this folder share; each is started for the first test that asks for it."""

from collections.abc import Iterator

import pytest

from tests.serve.running import RunningServer, run_server


@pytest.fixture(scope="session")
def flux_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Pictures from a pipeline of two ranks."""
    with run_server("shapes-flux", "--pipefusion", "2", state=tmp_path_factory.mktemp("flux") / "state") as server:
        yield server


@pytest.fixture(scope="session")
def pixart_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Pictures from both branches of guidance on a rank each, with a cache."""
    flags = ("--cfg", "2", "--cache", "--max-warmup-steps", "1", "--rdt", "0.5")
    with run_server("shapes-pixart", *flags, state=tmp_path_factory.mktemp("pixart") / "state") as server:
        yield server


@pytest.fixture(scope="session")
def wan_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Videos from two ranks that divide the tokens."""
    with run_server("shapes-wan", "--ulysses", "2", state=tmp_path_factory.mktemp("wan") / "state") as server:
        yield server

"""Real servers that the tests of this folder share; each is started for the first test that asks for it.

Ranks that a test starts in its own process are forked; those of a server in a process of its own are interpreters.
"""

import asyncio
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.running import PIXART_FLAGS, RunningServer, run_server
from tests.serve.servers import Served, connect_openai

SECONDS = 200.0


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine, for so many seconds at most."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**arguments), SECONDS))
    return True


@pytest.fixture(autouse=True)
def ranks_are_forked(request: pytest.FixtureRequest) -> None:
    """Tests marked `alone` send signals to ranks, which they find by the words of their interpreters."""
    if request.node.get_closest_marker("alone") is None:
        request.getfixturevalue("forked_ranks")


@pytest.fixture(scope="session")
def flux_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Pictures from a pipeline of two ranks."""
    with run_server("shapes-flux", "--pipefusion", "2", state=tmp_path_factory.mktemp("flux") / "state") as server:
        yield server


@pytest.fixture(scope="session")
def pixart_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Pictures from both branches of guidance on a rank each, with a cache and a file of the transformer."""
    with run_server("shapes-pixart", *PIXART_FLAGS, state=tmp_path_factory.mktemp("pixart") / "state") as server:
        yield server


@pytest.fixture(scope="session")
def wan_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Videos from two ranks that divide the tokens."""
    with run_server("shapes-wan", "--ulysses", "2", state=tmp_path_factory.mktemp("wan") / "state") as server:
        yield server


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[Any]:
    """OpenAI's client of the server of a file."""
    with connect_openai(served.url) as client:
        yield client


@pytest.fixture
def full_pace(served: Served) -> None:
    """Ranks that paint do so at once, and do not fail."""
    served.group.pace, served.group.failure = 0.0, None

"""Runs the server: listens, starts the ranks, and ends both when it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import uvicorn
from fastapi import FastAPI

from ditile.plan.errors import DitileError, ModelError
from ditile.plan.extras import require_extra
from ditile.plan.plan import Plan
from ditile.runner.requests.cache_options import CacheOptions
from ditile.serve.app import create_app, write_access_log
from ditile.serve.group import GroupEvent, RankGroup
from ditile.serve.jobs import RanksFailedError
from ditile.serve.link import GroupSetup
from ditile.serve.options import ServeOptions
from ditile.serve.page.mount import mount_page
from ditile.serve.service import GroupFactory, Service

OPEN_REQUESTS_SECONDS = 5
"""How long answers that are under way get, after the jobs have ended."""


def run_server(
    options: ServeOptions, plan: Plan, cache: CacheOptions, predict: Callable[[], Awaitable[Mapping[str, Any]]]
) -> int:
    """Serves until SIGTERM or SIGINT, or with `exit_on_failure` until the ranks have failed; returns the exit code.

    Args:
        options, plan, cache: what to serve, and how the ranks compute.
        predict: gives what `/v1/plan` says of the plan besides measurements, as JSON types.

    Raises:
        DitileError: if the address is taken, the state folder cannot be used, or the model, the plan or an option does
            not fit.
    """
    with open_listener(options) as listener:
        # The port names the state folder, and 0 is none.
        options = dataclasses.replace(options, port=listener.getsockname()[1])
        with write_access_log(sys.stdout):
            return asyncio.run(_serve_until_told(options, plan, cache, predict, listener))


def open_listener(options: ServeOptions) -> socket.socket:
    """The socket that the server listens on. Raises `ModelError` if it cannot have the address."""
    try:
        family = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((options.host, options.port), family=family, backlog=1024)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ModelError(
            f"host={options.host!r}, port={options.port}: the server cannot listen there ({reason}); try another "
            "--port, or --port 0 for a free one"
        ) from error
    # Connections inherit it. asyncio sets it for sockets that name their protocol alone, which this one does not; an
    # answer would wait 40 ms for the client's acknowledgement of its headers.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def choose_groups(options: ServeOptions, plan: Plan, cache: CacheOptions) -> GroupFactory:
    """What makes the groups of ranks, on this machine or on a cluster; called in the event loop of the server."""
    loop, world = asyncio.get_running_loop(), plan.world
    setup = GroupSetup(
        model=options.model,
        engine=options,
        plan=plan,
        cache=cache,
        lora_dir=options.lora_dir,
        max_loras=options.max_loras,
    )
    if options.ray is not None:
        require_extra("ray", f"ray={options.ray!r}")
        from ditile.serve.ray_replicas.groups import RayApplication

        return RayApplication(setup, options).make_group

    def make_group(name: str, on_event: Callable[[GroupEvent], None]) -> RankGroup:
        own_setup = dataclasses.replace(setup, local_ranks=(int(name) * world, options.replicas * world))
        return RankGroup(name, own_setup, loop, on_event)

    return make_group


async def _serve_until_told(
    options: ServeOptions,
    plan: Plan,
    cache: CacheOptions,
    predict: Callable[[], Awaitable[Mapping[str, Any]]],
    listener: socket.socket,
) -> int:
    make_group = choose_groups(options, plan, cache)
    service = Service(options, make_group, {"cache": cache.describe_settings()})
    app = create_app(service)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_graceful_shutdown=OPEN_REQUESTS_SECONDS,
    )
    server = DrainingServer(config, service, options.drain)
    with server.take_signals():
        has_failed = await _serve_and_drain(app, server, service, plan, predict, listener)
    return int(options.exit_on_failure and has_failed)


async def _serve_and_drain(
    app: FastAPI,
    server: DrainingServer,
    service: Service,
    plan: Plan,
    predict: Callable[[], Awaitable[Mapping[str, Any]]],
    listener: socket.socket,
) -> bool:
    """Serves until the server is told to end; returns whether its ranks have failed."""
    await service.start()
    try:
        mount_page(app, service)  # which takes seconds, while the ranks load the model
        serving = asyncio.create_task(server.serve([listener]))
        ready = asyncio.create_task(_announce(service, listener, plan))
        predicted = asyncio.create_task(_predict_when_ready(service, predict))
        failed = asyncio.create_task(_end_when_failed(service, server, service.options.exit_on_failure))
        await asyncio.wait((serving, ready), return_when=asyncio.FIRST_COMPLETED)
        if ready.done() and ready.exception() is not None:
            server.should_exit = True
        await serving
        if ready.done() and not server.is_told:
            ready.result()
        has_failed = failed.done()  # a task that is cancelled is done too
        for task in (ready, predicted, failed):
            task.cancel()
        await asyncio.wait((ready, predicted, failed))
    finally:
        await service.drain(0)
    return has_failed


class DrainingServer(uvicorn.Server):
    """Ends on the first SIGTERM or SIGINT when its running jobs have ended, on a second one at once.

    Args:
        config: of uvicorn.
        service: what is drained.
        seconds: how long running jobs get.
    """

    def __init__(self, config: uvicorn.Config, service: Service, seconds: float) -> None:
        super().__init__(config)
        self._service, self._seconds = service, seconds
        self._draining: asyncio.Task[None] | None = None
        self._at_once: asyncio.Task[None] | None = None

    @property
    def is_told(self) -> bool:
        """Whether a signal has told the server to end."""
        return self._draining is not None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """What uvicorn does with signals: nothing, as `take_signals` takes them before the ranks start."""
        yield

    @contextlib.contextmanager
    def take_signals(self) -> Iterator[None]:
        """Signals end the server, also while its ranks still load the model."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._handle_signal, number)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _handle_signal(self, number: int) -> None:
        if self._draining is None:
            name = signal.Signals(number).name
            print(f"ditile: {name}: running jobs get {self._seconds:g} s; once more ends them", file=sys.stderr)
            self._draining = asyncio.create_task(self._drain_and_exit())
        else:
            self._at_once = asyncio.create_task(self._service.drain(0))
            self.force_exit = True

    async def _drain_and_exit(self) -> None:
        await self._service.drain(self._seconds)
        self.should_exit = True


async def _announce(service: Service, listener: socket.socket, plan: Plan) -> None:
    """Says where the server is, when its ranks can draw."""
    host, port = listener.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    try:
        await service.wait_until_ready()
    except RanksFailedError:
        # The log has the reason, and the server goes on to tell it to those who ask.
        return
    text = f" with {plan}" if plan != Plan() else ""
    print(f"ditile: {service.options.model}{text} on http://{host}:{port}", file=sys.stderr, flush=True)


async def _end_when_failed(service: Service, server: uvicorn.Server, exits: bool) -> None:
    await service.wait_until_failed()
    if exits:
        server.should_exit = True


async def _predict_when_ready(service: Service, predict: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
    # The prediction takes a core for some seconds, which the ranks need to start.
    with contextlib.suppress(DitileError):  # of a server that does not start `_announce` tells
        await service.wait_until_ready()
        service.note_plan_facts(await predict())

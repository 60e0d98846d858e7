"""Runs the server: listens, starts the ranks, and on a signal stops both."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator

import uvicorn
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse

from ditile.distributed import env
from ditile.plan.errors import DitileError, ModelError
from ditile.plan.extras import is_installed, require_extra
from ditile.plan.option_classes import JsonObject
from ditile.plan.plan import Plan
from ditile.runner.requests.cache_options import CacheOptions
from ditile.runner.requests.pictures import hide_local_path
from ditile.serve.app import create_app, write_access_log
from ditile.serve.jobs import RanksFailedError
from ditile.serve.link import WorkerSetup
from ditile.serve.options import ServeOptions
from ditile.serve.replica import EventHandler, LocalReplica
from ditile.serve.service import ReplicaFactory, Service

# How long responses that are still being sent may take after the jobs have ended.
OPEN_REQUESTS_SECONDS = 5
Predict = Callable[[], Awaitable[JsonObject]]


def run_server(options: ServeOptions, plan: Plan, cache: CacheOptions, predict: Predict) -> int:
    """Serves until SIGTERM or SIGINT, or with `exit_on_failure` until the ranks have failed; returns the exit code.

    Args:
        options, plan, cache: what to serve, and how the ranks compute.
        predict: returns what `/v1/plan` reports about the plan in addition to measurements, as JSON types.

    Raises:
        DitileError: if the address is taken, the state folder cannot be used, or the model cannot run with this plan
            and these options.
    """
    with open_listener(options) as listener:
        # The state folder's name contains the port, so for port 0 the port that the system chose must be known.
        options = dataclasses.replace(options, port=listener.getsockname()[1])
        with write_access_log(sys.stdout):
            return asyncio.run(_serve_until_told(options, plan, cache, predict, listener))


def open_listener(options: ServeOptions) -> socket.socket:
    """Opens the socket that the server listens on. Raises `ModelError` if the address is not available."""
    try:
        family = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((options.host, options.port), family=family, backlog=1024)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ModelError(
            f"host={options.host!r}, port={options.port}: the server cannot listen there ({reason}); try another "
            "--port, or --port 0 for a free one"
        ) from error
    # asyncio sets this option only for sockets made with an explicit protocol, and `create_server` names none. Without
    # it a response waits 40 ms until the client acknowledges its headers. Accepted connections inherit the option.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def choose_replicas(options: ServeOptions, plan: Plan, cache: CacheOptions) -> ReplicaFactory:
    """The function that makes the replicas, on this machine or on a Ray cluster."""
    setup = WorkerSetup(
        model=options.model,
        engine=options,
        plan=plan,
        cache=cache,
        lora_dir=options.lora_dir,
        max_loras=options.max_loras,
        components=options.components,
    )
    if options.ray is not None:
        require_extra("ray", f"ray={options.ray!r}")
        from ditile.serve.ray_replicas.application import RayApplication

        application = RayApplication(setup, options)
        # Before anything says that a model loads.
        application.check_address()
        return application.make_replica

    def make_replica(name: str, on_event: EventHandler) -> LocalReplica:
        local_ranks = (int(name) * plan.world, options.replicas * plan.world)
        return LocalReplica(name, dataclasses.replace(setup, local_ranks=local_ranks), on_event)

    return make_replica


async def _serve_until_told(
    options: ServeOptions, plan: Plan, cache: CacheOptions, predict: Predict, listener: socket.socket
) -> int:
    make_replica = choose_replicas(options, plan, cache)
    service = Service(options, make_replica, {"cache": cache.describe_settings(hide_local_path)})
    app = create_app(service)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_graceful_shutdown=OPEN_REQUESTS_SECONDS,
    )
    server = DrainingServer(config, service)
    # Loading takes seconds to minutes, and nothing else is printed before it ends.
    print(f"ditile: {options.model}: the ranks load the model ..", file=sys.stderr, flush=True)
    with server.take_signals():
        has_failed = await _serve_and_drain(app, server, service, plan, predict, listener)
    return int(options.exit_on_failure and has_failed)


async def _serve_and_drain(
    app: FastAPI, server: DrainingServer, service: Service, plan: Plan, predict: Predict, listener: socket.socket
) -> bool:
    """Serves until a signal stops the server; returns whether its ranks have failed."""
    await service.start()
    try:
        # Building the page takes seconds, in which the ranks load the model.
        add_page(app, service)
        serving = asyncio.create_task(server.serve([listener]))
        ready = asyncio.create_task(_announce(service, listener, plan))
        predicted = asyncio.create_task(_predict_when_ready(service, predict))
        failed = asyncio.create_task(_end_when_failed(service, server))
        await asyncio.wait((serving, ready), return_when=asyncio.FIRST_COMPLETED)
        if ready.done() and ready.exception() is not None:
            server.should_exit = True
        await serving
        if ready.done() and not server.is_told:
            # Raises the error if the ranks could not start.
            ready.result()
        # Read before the tasks are cancelled: a cancelled task counts as done too.
        has_failed = failed.done()
        for task in (ready, predicted, failed):
            task.cancel()
        await asyncio.wait((ready, predicted, failed))
    finally:
        await service.drain(0)
    return has_failed


def add_page(app: FastAPI, service: Service) -> None:
    """Add the web page to an app, or a line that says how to get the page."""
    if service.options.no_page or not is_installed("gradio"):
        hint = "serve without --no-page" if service.options.no_page else "pip install 'ditile[page]'"
        text = f"This is ditile's server, which has no page here; {hint}. Its routes: /openapi.json\n"
        app.add_api_route("/", lambda: PlainTextResponse(text), methods=["GET"], include_in_schema=False)
        return
    # Gradio reads these variables when it is imported.
    env.set_page_variables()
    from ditile.serve.page.layout import mount_page

    mount_page(app)


class DrainingServer(uvicorn.Server):
    """Stops on the first SIGTERM or SIGINT once its running jobs have ended, and on the second one at once."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._draining: asyncio.Task[None] | None = None
        self._at_once: asyncio.Task[None] | None = None

    @property
    def is_told(self) -> bool:
        """Whether a signal has asked the server to stop."""
        return self._draining is not None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Disables uvicorn's own handling of signals: `take_signals` handles them from before the ranks start."""
        yield

    @contextlib.contextmanager
    def take_signals(self) -> Iterator[None]:
        """Lets signals stop the server, even while its ranks are still loading the model."""
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
            seconds = self._service.options.drain
            print(f"ditile: {name}: running jobs get {seconds:g} s; once more ends them", file=sys.stderr)
            self._draining = asyncio.create_task(self._drain_and_exit(seconds))
        else:
            self._at_once = asyncio.create_task(self._service.drain(0))
            self.force_exit = True

    async def _drain_and_exit(self, seconds: float) -> None:
        await self._service.drain(seconds)
        self.should_exit = True


async def _announce(service: Service, listener: socket.socket, plan: Plan) -> None:
    """Prints the server's address once its ranks are ready."""
    host, port = listener.getsockname()[:2]
    if ":" in host:
        host = f"[{host}]"
    try:
        await service.wait_until_ready()
    except RanksFailedError:
        # The reason is in the log. The server keeps running and reports it to clients.
        return
    model = service.options.model
    if plan != Plan():
        model = f"{model} with {plan}"
    print(f"ditile: {model} on http://{host}:{port}", file=sys.stderr, flush=True)


async def _end_when_failed(service: Service, server: uvicorn.Server) -> None:
    await service.wait_until_failed()
    if service.options.exit_on_failure:
        server.should_exit = True


async def _predict_when_ready(service: Service, predict: Predict) -> None:
    # The prediction waits because it keeps one core busy for some seconds, and the ranks need the cores to start.
    # If they do not start, `_announce` reports the error.
    with contextlib.suppress(DitileError):
        await service.wait_until_ready()
        service.note_plan_facts(await predict())

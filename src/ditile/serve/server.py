"""The run of the server: it listens, starts the ranks, and on a signal stops both."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import logging
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ditile.distributed import env
from ditile.plan.errors import DitileError, ModelError, StateError
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

# Seconds for responses that are still being sent after the jobs have ended.
OPEN_REQUESTS_SECONDS = 5
# Limits of a request's line and headers: seconds since the connection or the previous answer, and bytes.
HEAD_SECONDS = 20.0
MAX_HEAD_BYTES = 2**16
# Connections that the system keeps until they are accepted, and those accepted at once, before they are counted.
BACKLOG = 1024
ACCEPTED_AT_ONCE = 16
MAX_CONNECTIONS = 4096
# Threads in the executor of the event loop.
NUM_THREADS = 8
# A repeated exception is logged once in this many seconds.
REPEAT_SECONDS = 60.0


def run_server(options: ServeOptions, plan: Plan, cache: CacheOptions) -> int:
    """Serve until SIGTERM or SIGINT, and return the exit code.

    With `exit_on_failure` it also ends when the ranks have failed.

    Raises:
        DitileError: if the address is taken, the state folder cannot be used, or the model cannot run with this plan
            and these options.
    """
    with open_listener(options) as listener:
        # The state folder's name contains the port, so for port 0 the port that the system chose must be known.
        options = dataclasses.replace(options, port=listener.getsockname()[1])
        with write_access_log(sys.stdout):
            return asyncio.run(_serve_until_told(options, plan, cache, listener))


def open_listener(options: ServeOptions) -> socket.socket:
    """Open the server's listening socket. Raises `ModelError` if the address is not available."""
    try:
        family = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((options.host, options.port), family=family, backlog=BACKLOG)
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
    """Return the function for making the replicas, on this machine or on a Ray cluster."""
    setup = WorkerSetup(options=options, plan=plan, cache=cache)
    if options.ray is not None:
        require_extra("ray", f"ray={options.ray!r}")
        from ditile.serve.ray_replicas.cluster import RayCluster

        cluster = RayCluster(setup)
        # The address is checked before a message says that the model loads.
        cluster.check_address()
        return cluster.make_replica

    def make_replica(name: str, on_event: EventHandler) -> LocalReplica:
        local_ranks = (int(name) * plan.world, options.replicas * plan.world)
        return LocalReplica(name, dataclasses.replace(setup, local_ranks=local_ranks), on_event)

    return make_replica


async def _serve_until_told(options: ServeOptions, plan: Plan, cache: CacheOptions, listener: socket.socket) -> int:
    make_replica = choose_replicas(options, plan, cache)
    service = Service(options, make_replica, {"cache": cache.describe_settings(hide_local_path)})
    app = create_app(service)
    server = DrainingServer(configure_http(app), service)
    # All threads start now, since later the system may allow no more of them.
    executor = ThreadPoolExecutor(NUM_THREADS)
    all_run = threading.Barrier(NUM_THREADS)
    try:
        for _ in range(NUM_THREADS):
            executor.submit(all_run.wait)
    except RuntimeError as error:
        all_run.abort()
        raise StateError(f"the server cannot start {NUM_THREADS} threads: {error}; allow more processes") from None
    asyncio.get_running_loop().set_default_executor(executor)
    # Loading takes seconds to minutes, and nothing else is printed before it ends.
    print(f"ditile: {options.model}: the ranks load the model ..", file=sys.stderr, flush=True)
    repeat_filter = RepeatFilter()
    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).addFilter(repeat_filter)
    with server.take_signals():
        num_ended, num_waiting = await service.start()
        if num_ended or num_waiting:
            found = f"{num_ended} jobs that have ended, and {num_waiting} videos that are generated now"
            print(f"ditile: an earlier server left {found}", file=sys.stderr, flush=True)
        try:
            # Building the page takes seconds, in which the ranks load the model.
            add_page(app, service)
            serving = asyncio.create_task(server.serve([listener]))
            ready = asyncio.create_task(_announce(service, listener, plan))
            failed = asyncio.create_task(_watch_ranks(service, plan, server))
            await asyncio.wait((serving, ready), return_when=asyncio.FIRST_COMPLETED)
            if ready.done() and ready.exception() is not None:
                server.should_exit = True
            await serving
            if ready.done() and not server.is_told:
                # This raises the error if the ranks could not start.
                ready.result()
            # Read before the tasks are cancelled: a cancelled task counts as done too.
            has_failed = failed.done()
            for task in (ready, failed):
                task.cancel()
            await asyncio.wait((ready, failed))
        finally:
            await service.drain(0)
    return int(options.exit_on_failure and has_failed)


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


class TimedConnection(HttpToolsProtocol):
    """A connection with a time limit for the head of its next request.

    Args:
        waiting: the connections without a request, in the order in which they began to wait. If there are too many
            connections, the first of these is closed for a new one.
        max_connections: the most connections that the server keeps.
    """

    def __init__(self, waiting: dict[TimedConnection, None], max_connections: int, **values: Any) -> None:
        super().__init__(**values)
        self._waiting = waiting
        self._max_connections = max_connections
        self._timer: asyncio.TimerHandle | None = None
        self._is_in_body = False
        self._num_head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to wait for the first request."""
        super().connection_made(transport)
        self._wait_for_head()
        if len(self.connections) > self._max_connections:
            oldest = next(iter(self._waiting))
            oldest.transport.abort()
            del self._waiting[oldest]

    def data_received(self, data: bytes) -> None:
        """Read on, and refuse headers that are too large."""
        # The count is set to 0 when the parser finds the end of the headers, since only the parser knows where that is.
        if not self._is_in_body:
            self._num_head_bytes += len(data)
        super().data_received(data)
        if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The headers are too large.")

    def on_headers_complete(self) -> None:
        """Begin a request."""
        self._num_head_bytes = 0
        self._is_in_body = True
        self._end_waiting()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Note that the body of a request is complete."""
        self._is_in_body = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Wait for the next request, if it has not begun."""
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting for a request."""
        self._end_waiting()
        super().connection_lost(exc)

    def _wait_for_head(self) -> None:
        self._waiting[self] = None
        # Unlike uvicorn's own limit, it is not reset by a client that sends a byte now and then.
        self._timer = self.loop.call_later(HEAD_SECONDS, self.timeout_keep_alive_handler)

    def _end_waiting(self) -> None:
        self._waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()


def configure_http(app: FastAPI) -> uvicorn.Config:
    """Return how uvicorn serves an app."""
    max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The other half is for other files, ranks, and connections that are not counted yet.
    max_connections = MAX_CONNECTIONS if max_files == resource.RLIM_INFINITY else min(max_files // 2, MAX_CONNECTIONS)
    waiting: dict[TimedConnection, None] = {}
    return uvicorn.Config(
        app,
        # uvicorn calls this function like a class.
        http=functools.partial(TimedConnection, waiting, max_connections),  # type: ignore[arg-type]
        ws="none",
        backlog=ACCEPTED_AT_ONCE,
        log_config=None,
        # uvicorn's warnings would be one line for each client that does not speak HTTP.
        log_level="error",
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_graceful_shutdown=OPEN_REQUESTS_SECONDS,
    )


class RepeatFilter(logging.Filter):
    """Drops an exception that was logged within the last minute, since clients may cause any number of one kind."""

    def __init__(self) -> None:
        super().__init__()
        self._last_times: dict[tuple[object, ...], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is logged."""
        if record.exc_info is None or record.exc_info[2] is None:
            return True
        innermost = record.exc_info[2]
        while innermost.tb_next is not None:
            innermost = innermost.tb_next
        place = (record.exc_info[0], innermost.tb_frame.f_code, innermost.tb_lineno)
        now = time.monotonic()
        last_time = self._last_times.get(place)
        if last_time is not None and now < last_time + REPEAT_SECONDS:
            return False
        self._last_times[place] = now
        return True


class DrainingServer(uvicorn.Server):
    """A server that stops on the first signal after its running jobs, and at once on a second SIGTERM or SIGINT."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._draining: asyncio.Task[None] | None = None
        self._at_once: asyncio.Task[None] | None = None

    @property
    def is_told(self) -> bool:
        """Return whether a signal has asked the server to stop."""
        return self._draining is not None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections."""
        await super().startup(sockets)
        # uvicorn uses one number both for accepting at once and for the system's backlog.
        for listener in sockets or []:
            listener.listen(BACKLOG)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Disable uvicorn's own handling of signals. `take_signals` handles them, from before the ranks start."""
        yield

    @contextlib.contextmanager
    def take_signals(self) -> Iterator[None]:
        """Let signals stop the server, even while its ranks are still loading the model."""
        loop = asyncio.get_running_loop()
        numbers = [signal.SIGTERM, signal.SIGINT]
        # Under nohup SIGHUP is ignored, and the server outlives its terminal.
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self._handle_signal, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _handle_signal(self, number: signal.Signals) -> None:
        if self._draining is None:
            seconds = self._service.options.drain
            self._draining = asyncio.create_task(self._drain_and_exit(seconds))
            # A closed terminal raises an error on writing.
            with contextlib.suppress(OSError):
                print(f"ditile: {number.name}: running jobs get {seconds:g} s; once more ends them", file=sys.stderr)
        # The system and the shell may each say that a terminal was closed.
        elif number != signal.SIGHUP:
            self._at_once = asyncio.create_task(self._service.drain(0))
            self.force_exit = True

    async def _drain_and_exit(self, seconds: float) -> None:
        try:
            await self._service.drain(seconds)
        finally:
            # Whatever has failed, a server that was told to end must end.
            self.should_exit = True


async def _announce(service: Service, listener: socket.socket, plan: Plan) -> None:
    """Print the server's address once its ranks are ready."""
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


async def _watch_ranks(service: Service, plan: Plan, server: uvicorn.Server) -> None:
    """Predict the time of a call once the ranks are ready, and return when they have failed."""
    # The prediction waits because it keeps one core busy for some seconds, and the ranks need the cores to start.
    # If they do not start, `_announce` reports the error.
    with contextlib.suppress(DitileError):
        await service.wait_until_ready()
        service.plan_facts |= await _predict_call(service.options, plan)
    await service.wait_until_failed()
    if service.options.exit_on_failure:
        server.should_exit = True


async def _predict_call(options: ServeOptions, plan: Plan) -> JsonObject:
    """Return the prediction of `ditile plan`, as JSON types; empty if this machine was never measured.

    It runs in a process of its own, as it needs torch.
    """
    if options.profile is None and not env.find_profile_path().exists():
        return {}
    flags = [f"--component={name}={file}" for name, file in options.components.items()]
    if options.profile is not None:
        flags.append(f"--profile={options.profile}")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ditile", "plan", "--model", options.model, *flags),
        *("--price", str(plan), "--devices", str(plan.world), "--json", "-"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        answer, _ = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    # If the model cannot be planned, there is no prediction.
    if process.returncode != 0:
        return {}
    return {"predicted": json.loads(answer)}

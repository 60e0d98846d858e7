"""`ditile serve --forward`: clients call the transformer alone, and keep text, VAE and sampler.

This process reads and checks messages, and never imports torch. Each connection has a thread; requests wait in one
queue for the ranks, which get the bytes of the tensors as they came.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import math
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from ditile.distributed import env
from ditile.distributed.failure_detection import LaunchLimits
from ditile.distributed.launch import launch
from ditile.plan.errors import ModelError, RankError, StoppedError, quote_value
from ditile.plan.numbers import is_number
from ditile.plan.option_classes import JsonObject
from ditile.plan.plan import Plan
from ditile.plan.single_calls import choose_call_plan
from ditile.runner.model_files import find_transformer_source
from ditile.runner.requests.cache_options import CacheOptions
from ditile.serve.api_keys import ApiKeys, read_api_keys
from ditile.serve.forward.addresses import BACKLOG, listen_on_address, read_peer_user
from ditile.serve.forward.messages import (
    CONTENT,
    PROTOCOL,
    SILENT_SECONDS,
    ForwardMessage,
    MessageError,
    StreamError,
    decode_value,
    encode_header,
    receive_message,
)
from ditile.serve.link import Message, SocketLink, WorkerSetup
from ditile.serve.options import ServeOptions
from ditile.serve.replica import STOPPED_SECONDS

LOG = logging.getLogger("ditile")
MAX_CONNECTIONS = 64
# Seconds for a client of a port to show its key.
KEY_SECONDS = 20.0
# Seconds in which the other ranks fail too, once one has refused a call.
REFUSAL_SECONDS = 10.0
# Seconds and bytes for which a connection is read on before it is closed, so that its client reads the reason.
LINGER_SECONDS = 1.0
LINGER_BYTES = 2**20


@dataclass
class Session:
    """The state of a connection.

    Attributes:
        is_known: whether its requests are served: its user is this one, or it has shown a key.
        loras: the LoRAs of its calls, by name.
    """

    is_known: bool
    loras: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WaitingCall:
    """A request for the ranks, its deadline, and the queue for the answer: a message with its tensors, or an error."""

    header: JsonObject
    content: bytearray
    deadline: float
    answers: queue.SimpleQueue[tuple[JsonObject, bytes] | MessageError]


def run_forward_server(options: ServeOptions, plan: Plan, cache: CacheOptions) -> int:
    """Serve calls of a transformer until a signal or a failed rank ends the server, and return the exit code.

    Raises:
        DitileError: if an option or the plan does not fit, the address is not available, or a rank failed.
    """
    call_plan = choose_call_plan(plan)
    check_forward_options(options, cache)
    find_transformer_source(options.model, options.forward_component, options.components)
    keys = read_api_keys(options.api_key)
    with listen_on_address(options.find_forward_address(), keys) as (listener, address):
        setup = WorkerSetup(options=options, plan=call_plan, cache=cache)
        name = options.model if plan == Plan() else f"{options.model} with {plan}"
        server = ForwardServer(setup, listener, keys, f"{options.forward_component} of {name} on {address}", str(plan))
        print(
            f"ditile: {options.model}: the ranks load its {options.forward_component} ..", file=sys.stderr, flush=True
        )
        try:
            server.run_ranks()
        except StoppedError:
            return 0
    return 0


def check_forward_options(options: ServeOptions, cache: CacheOptions) -> None:
    """Check that no option is for whole images. Raises `ModelError` with the first that is."""
    default = ServeOptions()
    for name in options.list_http_names():
        value = getattr(options, name)
        if value != getattr(default, name):
            raise ModelError(
                f"{name}={quote_value(value)} is for a server of whole images; leave it out with --forward"
            )
    if options.cuda_graphs:
        raise ModelError("cuda_graphs=True plays steps of one loop, and each call is a loop of its own; leave it out")
    if cache.build_cache_arguments()["cache_config"] is not None:
        raise ModelError("a cache leaves out work by the steps of a run, which calls do not tell; leave it out")


class ForwardServer:
    """The connections of a forward server, and the queue before its ranks.

    Args:
        setup: the settings of the ranks.
        listener: takes connections once the ranks are ready.
        keys: of clients of a port.
        title: names the model and the address.
        plan: as clients see it.
    """

    def __init__(self, setup: WorkerSetup, listener: socket.socket, keys: ApiKeys, title: str, plan: str) -> None:
        self._setup = setup
        self._options = setup.options
        self._listener = listener
        self._keys = keys
        self._title = title
        self._plan = plan
        self._model: JsonObject = {}
        self._calls: queue.Queue[WaitingCall] = queue.Queue(setup.options.max_queue)
        self._reports: queue.SimpleQueue[tuple[int, Message, bytes]] = queue.SimpleQueue()
        self._connections: set[socket.socket] = set()
        self._is_busy = False
        self._failure: RankError | None = None
        # When the last signal lets the server end.
        self._end_at: float | None = None

    def run_ranks(self) -> None:
        """Run the ranks in this thread until they end.

        Raises:
            StoppedError: if a signal has ended them.
            DitileError: if one failed.
        """
        world = self._setup.plan.world
        pairs = [socket.socketpair() for _ in range(world)]
        self._links = [SocketLink(ours.detach()) for ours, _ in pairs]
        readers = []
        for rank, link in enumerate(self._links):
            readers.append(self._start_thread(self._receive_reports, rank, link))
        try:
            with self._take_signals():
                launch(
                    run_rank,
                    world,
                    (self._setup,),
                    threads=self._options.threads,
                    stall_timeout=self._options.stall_timeout,
                    limits=LaunchLimits(stopped=STOPPED_SECONDS),
                    links=[theirs.fileno() for _, theirs in pairs],
                    check=self._check_run,
                )
        finally:
            # This wakes the threads that wait for connections and for messages.
            for connection in (self._listener, *self._connections):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            # The readers end when every process has closed the other end.
            for _, theirs in pairs:
                theirs.close()
            for reader in readers:
                reader.join()
            for link in self._links:
                link.close_connection()
        raise RankError(0, "left", "the ranks have left")

    def end(self) -> None:
        """End the server after the running call; called again, at once."""
        seconds = self._options.drain if self._end_at is None else 0.0
        self._end_at = time.monotonic() + seconds

    def _start_thread(self, function: Any, *args: Any) -> threading.Thread:
        thread = threading.Thread(target=function, args=args, daemon=True)
        thread.start()
        return thread

    @contextlib.contextmanager
    def _take_signals(self) -> Iterator[None]:
        """Let a signal end the server after the running call, and a second one at once."""

        def end(number: int, _: FrameType | None) -> None:
            self.end()

        # Python lets only the main thread set handlers.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _check_run(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._end_at is not None and (time.monotonic() > self._end_at or not self._is_busy):
            raise StoppedError("the server was told to end")

    def _receive_reports(self, rank: int, link: SocketLink) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                message, files = link.receive_message()
                if message["kind"] == "ready":
                    self._model = message
                    self._listener.listen(BACKLOG)
                    print(f"ditile: {self._title}", file=sys.stderr, flush=True)
                    self._start_thread(self._serve_queue)
                    self._start_thread(self._accept_connections)
                else:
                    self._reports.put((rank, message, files.get(CONTENT, b"")))

    # The methods below serve the queue, in one thread.

    def _serve_queue(self) -> None:
        with contextlib.suppress(OSError):
            while self._failure is None:
                call = self._calls.get()
                self._is_busy = True
                if time.monotonic() < call.deadline:
                    call.answers.put(self._run_call(call))
                self._is_busy = False

    def _run_call(self, call: WaitingCall) -> tuple[JsonObject, bytes] | MessageError:
        """Let the ranks run a call, and return what they answer."""
        files = {CONTENT: bytes(call.content)}
        for link in self._links:
            link.send_message(call.header, files)
        answer: tuple[JsonObject, bytes] = ({}, b"")
        errors: dict[int, str] = {}
        waiting = set(range(len(self._links)))
        deadline = math.inf
        while waiting and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                rank, message, content = self._reports.get(timeout=LINGER_SECONDS)
                waiting.discard(rank)
                if message["kind"] == "failed":
                    errors[rank] = message["error"]
                    deadline = min(deadline, time.monotonic() + REFUSAL_SECONDS)
                elif rank == 0:
                    answer = (message.get("header", {}), content)
        if not errors:
            return answer
        rank = min(errors)
        # Ranks that did not refuse it wait for the others in the middle of the call.
        if len(errors) < len(self._links):
            self._failure = RankError(rank, "refused", f"refused a call that other ranks began: {errors[rank]}")
        return MessageError(errors[rank])

    # The methods below serve one connection, in a thread of its own.

    def _accept_connections(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                if len(self._connections) < MAX_CONNECTIONS:
                    self._connections.add(connection)
                    self._start_thread(self._serve_connection, connection)
                else:
                    with connection:
                        self._refuse(connection, f"there are {MAX_CONNECTIONS} connections already; close one")

    def _serve_connection(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError):
                session = self._open_session(connection)
                if session is not None:
                    self._serve_session(connection, session)
        finally:
            self._connections.discard(connection)

    def _open_session(self, connection: socket.socket) -> Session | None:
        """Return the session of a connection; None for another user's."""
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return Session(is_known=False)
        user = read_peer_user(connection)
        if user != os.geteuid():
            LOG.warning("forward: user %d has connected and is not the server's; the connection is closed", user)
            return None
        return Session(is_known=True)

    def _serve_session(self, connection: socket.socket, session: Session) -> None:
        while True:
            try:
                # A client without a key sends nothing else.
                limit = self._options.forward_bytes if session.is_known else 0
                message = receive_message(connection, limit, None if session.is_known else KEY_SECONDS)
                if message is None:
                    return
                answer, content = self._answer_request(message, session)
            except MessageError as error:
                answer, content = {"ok": False, "error": str(error)}, b""
            except StreamError as error:
                LOG.warning("forward: %s; the connection is closed", error)
                self._refuse(connection, str(error))
                return
            connection.settimeout(SILENT_SECONDS)
            connection.sendall(encode_header(answer))
            connection.sendall(content)

    def _refuse(self, connection: socket.socket, reason: str) -> None:
        """Send a last line, and let the client read it before the connection is closed."""
        with contextlib.suppress(OSError):
            connection.settimeout(LINGER_SECONDS)
            connection.sendall(encode_header({"ok": False, "error": reason}))
            connection.shutdown(socket.SHUT_WR)
            num_bytes = 0
            while num_bytes < LINGER_BYTES and (part := connection.recv(2**16)):
                num_bytes += len(part)

    def _answer_request(self, message: ForwardMessage, session: Session) -> tuple[JsonObject, bytes]:
        """Return the answer to a request.

        Raises:
            MessageError: if it is refused.
            StreamError: if its client has no key.
        """
        header = message.header
        operation = header.get("op")
        if operation == "hello":
            return self._greet(header, session), b""
        if not session.is_known:
            raise StreamError("the first request must be hello, with a key")
        if operation == "forward":
            arguments = header.get("arguments")
            if not isinstance(arguments, dict):
                raise MessageError(f"arguments={quote_value(arguments)} is not an object of names and values")
            tensors = header.get("tensors", [])
            # The ranks decode them; here their form is checked.
            for value in arguments.values():
                decode_value(value, tensors)
            request = {"op": "forward", "arguments": arguments, "tensors": tensors, "loras": session.loras}
            answer, content = self._wait_for_ranks(request, message.content)
            return {"ok": True, **answer}, content
        if operation == "loras":
            loras = self._read_loras(header.get("loras"))
            self._wait_for_ranks({"op": "loras", "loras": loras}, bytearray())
            session.loras = loras
        elif operation == "start":
            self._wait_for_ranks({"op": "start"}, bytearray())
        else:
            raise MessageError(f"op={quote_value(operation)} is not known; try hello, forward, loras or start")
        return {"ok": True}, b""

    def _greet(self, header: JsonObject, session: Session) -> JsonObject:
        if not session.is_known:
            secret = str(header.get("key")).encode()
            # Every key is compared, so that the time does not reveal a nearly right one.
            if not any([hmac.compare_digest(key, secret) for _, key in self._keys]):
                raise StreamError("the key is not known")
            session.is_known = True
        if header.get("protocol") != PROTOCOL:
            raise MessageError(f"protocol={quote_value(header.get('protocol'))} is not known; this one is {PROTOCOL}")
        greeting: JsonObject = {"ok": True, "protocol": PROTOCOL}
        greeting |= {name: self._model[name] for name in ("model", "config", "dtype")}
        greeting |= {"plan": self._plan, "ranks": self._setup.plan.world, "loras": self._options.list_lora_stems()}
        return greeting

    def _read_loras(self, entries: Any) -> dict[str, float]:
        """Return LoRAs by name. Raises `MessageError` if there is no such LoRA, or its strength is no number."""
        if not isinstance(entries, list):
            raise MessageError(f"loras={quote_value(entries)} is not a list")
        names = self._options.list_lora_stems()
        loras: dict[str, float] = {}
        for entry in entries:
            if not isinstance(entry, dict):
                raise MessageError(f"lora={quote_value(entry)} is not an object with a name and a strength")
            name = entry.get("name")
            if name not in names or name in loras:
                there = ", ".join(names) or "none; give --lora-dir"
                raise MessageError(f"lora={quote_value(name)} is unknown or named twice; there are {there}")
            strength = entry.get("strength")
            if not is_number(strength) or not math.isfinite(strength):
                raise MessageError(f"strength={quote_value(strength)} of {name} is not a number")
            loras[name] = float(strength)
        if len(loras) > self._options.max_loras:
            raise MessageError(f"{len(loras)} LoRAs are more than --max-loras {self._options.max_loras}")
        return loras

    def _wait_for_ranks(self, request: JsonObject, content: bytearray) -> tuple[JsonObject, bytes]:
        """Put a request into the queue, and return the ranks' answer.

        Raises:
            MessageError: if they refuse it, or it has to wait for too long.
        """
        seconds = self._options.timeout
        call = WaitingCall(request, content, time.monotonic() + seconds, queue.SimpleQueue())
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            raise MessageError(f"{self._options.max_queue} calls wait already; try again later") from None
        try:
            answer = call.answers.get(timeout=seconds)
        except queue.Empty:
            raise MessageError(f"the call had no answer within --timeout {seconds:g}") from None
        if isinstance(answer, MessageError):
            raise answer
        return answer


def run_rank(setup: WorkerSetup) -> None:
    """Serve calls on this rank, until the server dismisses it or has gone."""
    # This imports torch, which the server never does.
    from ditile.serve.forward.ranks import ForwardRank

    fd = env.read_link_fd()
    assert fd is not None, "a rank of the server has a link to it"
    # The standard output belongs to the server.
    with contextlib.redirect_stdout(sys.stderr):
        ForwardRank(setup, SocketLink(fd)).serve_calls()

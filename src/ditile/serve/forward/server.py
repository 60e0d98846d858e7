"""`ditile serve --forward`: clients call only the transformer, and keep text, VAE and sampler.

This process reads and checks messages, and never imports torch. Each connection has a thread; they take turns at the
ranks, which get the bytes of the tensors as they came.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import multiprocessing.connection
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from ditile.plan.errors import DitileError, ModelError, RankError, quote_value
from ditile.plan.option_classes import JsonObject
from ditile.plan.plan import Plan
from ditile.plan.single_calls import choose_call_plan
from ditile.runner.model_files import find_transformer_source
from ditile.runner.requests.cache_options import CacheOptions
from ditile.serve.api_keys import ApiKeys, read_api_keys
from ditile.serve.forward.addresses import listen_on_address
from ditile.serve.forward.messages import (
    CONTENT,
    PROTOCOL,
    ForwardRequest,
    MessageError,
    StreamError,
    parse_request,
    receive_message,
    send_message,
)
from ditile.serve.link import SocketLink, WorkerSetup
from ditile.serve.options import ServeOptions
from ditile.serve.replica import launch_linked_ranks

LOG = logging.getLogger("ditile")
OPTIONS = ("forward", "forward_component", "forward_bytes", "api_key", "lora_dir", "max_loras", "max_queue", "timeout")
"""The options that `ServeOptions` adds to those it inherits, and that a forward server takes."""
# Seconds for a client of a port to show its key.
KEY_SECONDS = 20.0
# Seconds for the other ranks to refuse a call too, once one has.
REFUSAL_SECONDS = 10.0
# Before a refused connection closes, at most so many parts of its message are read, each within so many seconds.
LINGER_SECONDS = 1.0
LINGER_PARTS = 16
# Seconds until the next connection is accepted, after one could not be.
ACCEPT_SECONDS = 0.1


def run_forward_server(options: ServeOptions, plan: Plan, cache: CacheOptions) -> int:
    """Serve calls of a transformer until a signal or a failed rank ends the server, and return the exit code.

    Raises `DitileError` if an option or the plan does not fit, the address is not available, or a rank failed.
    """
    call_plan = choose_call_plan(plan)
    check_forward_options(options, cache)
    find_transformer_source(options.model, options.forward_component, options.components)  # an early check
    keys = read_api_keys(options.api_key)
    with listen_on_address(str(options.forward), keys) as (listener, address):
        setup = WorkerSetup(options=options, plan=call_plan, cache=cache)
        model = options.model if plan == Plan() else f"{options.model} with {plan}"
        component = options.forward_component
        title = f"{component} of {model} on {address}"
        print(f"ditile: {options.model}: the ranks load its {component} ..", file=sys.stderr, flush=True)
        # `launch` turns signals into these.
        with contextlib.suppress(KeyboardInterrupt, SystemExit):
            ForwardServer(setup, listener, keys, title, str(plan)).run_ranks()
    return 0


def check_forward_options(options: ServeOptions, cache: CacheOptions) -> None:
    """Check that no option is for whole images. Raises `ModelError` with the first that is."""
    default = ServeOptions()
    for name in ("text_after", *ServeOptions.__annotations__):  # its own, and one that it inherits
        value = getattr(options, name)
        if name not in OPTIONS and value != getattr(default, name):
            raise ModelError(
                f"{name}={quote_value(value)} is for a server of whole images; leave it out with --forward"
            )
    if options.cuda_graphs:
        raise ModelError("cuda_graphs=True plays steps of one loop, and each call is a loop of its own; leave it out")
    if cache.build_cache_arguments()["cache_config"] is not None:
        raise ModelError(
            "a cache skips work by the step of a run, and a single call does not say its step; leave it out"
        )


class ForwardServer:
    """The connections of a forward server, which take turns at its ranks.

    Args:
        listener: takes connections; they wait until the ranks are ready.
        title: names the model and the address.
        plan: as clients see it.
    """

    def __init__(self, setup: WorkerSetup, listener: socket.socket, keys: ApiKeys, title: str, plan: str) -> None:
        self._setup = setup
        self._options = setup.options
        self._listener = listener
        self._keys = keys
        self._title = title
        self._greeting: JsonObject = {"protocol": PROTOCOL, "plan": plan, "ranks": setup.plan.world}
        self._links: Sequence[SocketLink] = ()
        self._turn = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._failure: DitileError | None = None
        self._is_ending = False

    def run_ranks(self) -> None:
        """Run the ranks in this thread until they end. Always raises: `DitileError`, or what a signal raises."""
        try:
            launch_linked_ranks(self._setup, self._start_serving, self._raise_failure)
        finally:
            self._is_ending = True
            # This wakes the threads that wait for connections and for messages.
            for connection in (self._listener, *self._connections):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        raise RankError(0, "left", "the ranks have left")

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _start_serving(self, links: Sequence[SocketLink]) -> None:
        """Begin to accept connections once the ranks are ready."""
        self._links = links
        # A link ends without a message if its rank ended before it was ready.
        with contextlib.suppress(EOFError, OSError):
            description, _ = links[0].receive_message()
            self._greeting |= description
            print(f"ditile: {self._title}", file=sys.stderr, flush=True)
            threading.Thread(target=self._accept_connections, daemon=True).start()

    def _accept_connections(self) -> None:
        while not self._is_ending:
            with contextlib.suppress(OSError, RuntimeError):
                connection, _ = self._listener.accept()
                self._connections.add(connection)
                threading.Thread(target=self._serve_connection, args=(connection,), daemon=True).start()
                continue
            # No descriptor or thread was free, or the server ends.
            time.sleep(ACCEPT_SECONDS)

    # The methods below serve one connection, in a thread of its own.

    def _serve_connection(self, connection: socket.socket) -> None:
        # EOFError and OSError: its client or a rank has gone.
        with contextlib.suppress(EOFError, OSError), connection:
            try:
                if len(self._connections) > self._options.max_queue:
                    raise StreamError(f"there are {self._options.max_queue} connections already; close one")
                self._serve_requests(connection)
            except StreamError as error:
                LOG.warning("forward: %s; the connection is closed", error)
                send_message(connection, {"ok": False, "error": str(error)})
                connection.shutdown(socket.SHUT_WR)
                # Its client reads the reason only after it has sent its message.
                connection.settimeout(LINGER_SECONDS)
                for _ in range(LINGER_PARTS):
                    if not connection.recv(2**16):
                        break
            finally:
                self._connections.discard(connection)

    def _serve_requests(self, connection: socket.socket) -> None:
        """Answer requests until their client leaves.

        Raises `StreamError` if a message cannot be read, or a key is missing.
        """
        # The system lets no other user connect to the path.
        is_known = connection.family == socket.AF_UNIX
        while True:
            # Until its key is known, a client may send no tensors.
            limit = self._options.forward_bytes if is_known else 0
            message = receive_message(connection, limit, None if is_known else KEY_SECONDS)
            if message is None:
                return
            header, content = message
            try:
                request = parse_request(header)
                # Every key is compared, so that the time does not reveal a nearly right one.
                matches = [hmac.compare_digest(key, request.key.encode()) for _, key in self._keys]
                is_known = is_known or any(matches)
                if not is_known:
                    raise StreamError("the key is not known; the first request must be hello, with a key")
                answer, answer_content = self._answer_request(request, content)
            except MessageError as error:
                if not is_known:
                    raise StreamError(str(error)) from None
                send_message(connection, {"ok": False, "error": str(error)})
            else:
                send_message(connection, {"ok": True, **answer}, answer_content)

    def _answer_request(self, request: ForwardRequest, content: bytearray) -> tuple[JsonObject, bytes]:
        """Return the answer to a request, and its tensors. Raises `MessageError` if it is refused."""
        names = self._options.list_lora_stems()
        if request.op == "hello":
            return {**self._greeting, "loras": names}, b""
        unknown = sorted(request.loras.keys() - names)
        if unknown:
            there = ", ".join(names) or "none; give --lora-dir"
            raise MessageError(f"lora={quote_value(unknown[0])} is unknown; there are {there}")
        if len(request.loras) > self._options.max_loras:
            raise MessageError(f"{len(request.loras)} LoRAs are more than --max-loras {self._options.max_loras}")
        seconds = self._options.timeout
        if not self._turn.acquire(timeout=min(seconds, threading.TIMEOUT_MAX)):
            raise MessageError(f"the call had no turn within --timeout {seconds:g}")
        try:
            return self._call_ranks(request.model_dump(), content)
        finally:
            self._turn.release()

    def _call_ranks(self, request: JsonObject, content: bytearray) -> tuple[JsonObject, bytes]:
        """Let the ranks make a call, and return the answer of the first. Raises `MessageError` if they refuse it."""
        if self._failure is not None:
            # The ranks are about to end, and would answer an earlier call.
            raise MessageError(str(self._failure))
        # The bytes as they came, without a copy for each rank.
        sent: Any = {CONTENT: content}
        for link in self._links:
            link.send_message(request, sent)
        answer: tuple[JsonObject, bytes] = ({}, b"")
        errors: dict[int, str] = {}
        waiting = list(self._links)
        seconds = None
        while waiting:
            ready: list[Any] = multiprocessing.connection.wait(waiting, seconds)  # type: ignore[arg-type]
            # No more answers come: ranks that did not refuse are stuck in the call, waiting for those that did.
            if not ready:
                break
            for link in ready:
                waiting.remove(link)
                message, files = link.receive_message()
                if "error" in message:
                    errors[self._links.index(link)] = message["error"]
                    seconds = REFUSAL_SECONDS
                elif files:
                    answer = message, files[CONTENT]
        if not errors:
            return answer
        rank, reason = next(iter(errors.items()))
        if len(errors) < len(self._links):
            self._failure = RankError(rank, "refused", f"refused a call that other ranks began: {reason}")
        raise MessageError(reason)

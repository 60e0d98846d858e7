"""Replicas on a Ray cluster: each rank is an actor in a bundle of its replica's placement group.

The server is the driver of the cluster. It starts the actors, polls them, and watches the ranks by the rules of
`launch` (`failure_detection.find_first_failure`); actors end with the server that started them. Nothing here imports
torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ditile.distributed import env
from ditile.distributed.env import RankPlace
from ditile.distributed.failure_detection import (
    LaunchLimits,
    RankResult,
    RankState,
    find_first_failure,
    is_consequence,
    make_error,
)
from ditile.distributed.heartbeat import RankFailure
from ditile.plan.errors import DitileError, RankError, StateError
from ditile.serve.jobs import Files, shorten_line
from ditile.serve.link import Message, WorkerSetup
from ditile.serve.ray_replicas.actor import RankActor
from ditile.serve.replica import NOT_STARTED, EventHandler, Replica

LOG = logging.getLogger("ditile")
CONNECT_SECONDS = 10.0
WATCH_SECONDS = 0.2
# Seconds after the first failure, for an earlier cause to arrive from another node.
GRACE = 1.0
# Seconds without a batch after which a replica above `--replicas` ends its ranks.
IDLE_SECONDS = 300.0
# Seconds without room for a replica after which the log says so.
ROOM_SECONDS = 5.0
# The concurrency group of an actor for messages to its rank. Its single thread keeps their order.
SENDING = "sending"
# Logger -> part of a message to hide: Ray logs it though all is well. A cluster without a token is still reported.
RAY_COMPLAINTS = {
    "ray._private.worker": "SIGTERM handler is not set",
    "ray._private.authentication.authentication_token_setup": "Token authentication is enabled",
}


class RayCluster:
    """The connection of a server to its cluster, and the factory of its replicas."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self._options = setup.options
        # None is the cluster of this machine, which Ray starts if there is none.
        self._address = None if self._options.ray == "local" else self._options.ray
        self._connecting = threading.Lock()
        self._num_replicas = 0
        self._ray: Any = None

    def make_replica(self, name: str, on_event: EventHandler) -> RayReplica:
        """Make a replica of the server. It must be called in the server's event loop."""
        self._num_replicas += 1
        is_spare = self._num_replicas > self._options.replicas
        return RayReplica(name, self._setup, on_event, self, is_spare=is_spare)

    def check_address(self) -> None:
        """Raise `StateError` if nothing listens at the cluster's address, for which Ray would wait for minutes."""
        if self._address is not None:
            host, _, port = self._address.rpartition(":")
            with self._explain_connection_errors():
                socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()

    def connect(self) -> Any:
        """Return the module of Ray, connected to the cluster. Raises `StateError` if the cluster cannot be reached."""
        env.prepare_ray()
        with self._connecting, self._explain_connection_errors():
            if self._ray is None:
                self._ray = importlib.import_module("ray")
                for name, phrase in RAY_COMPLAINTS.items():
                    logging.getLogger(name).addFilter(env.PhraseFilter(phrase))
            if not self._ray.is_initialized():
                # Output of the cluster's processes stays in its logs; only failures of ranks are reported here.
                self._ray.init(self._address, include_dashboard=False, configure_logging=False, log_to_driver=False)
        return self._ray

    def leave(self) -> None:
        """Leave the cluster when the last replica has ended. A cluster that `connect` has started ends then."""
        self._num_replicas -= 1
        if not self._num_replicas and self._ray is not None:
            self._ray.shutdown()

    @contextlib.contextmanager
    def _explain_connection_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError, ValueError) as error:
            raise StateError(
                f"ray={self._options.ray!r}: no cluster can be reached from this machine ({shorten_line(error)}); "
                "start its node here with ray start, with RAY_AUTH_MODE=token for both if it asks for a token; "
                "or leave the address out"
            ) from error


class RayReplica(Replica):
    """The ranks of one replica on the nodes of a cluster.

    Args:
        is_spare: whether its ranks end when they have had no batch for a while.
    """

    def __init__(
        self, name: str, setup: WorkerSetup, on_event: EventHandler, cluster: RayCluster, *, is_spare: bool
    ) -> None:
        super().__init__(name, setup, on_event)
        self._cluster = cluster
        if is_spare:
            self._idle_seconds = min(IDLE_SECONDS, self._idle_seconds or IDLE_SECONDS)
        self._actors: Sequence[Any] = ()

    async def end(self) -> None:
        """End the ranks for good, and leave the cluster with the last replica."""
        await super().end()
        await asyncio.to_thread(self._cluster.leave)

    def _deliver(self, message: Message, files: Files | None) -> None:
        for actor in self._actors:
            actor.send.options(concurrency_group=SENDING).remote(json.dumps(message), files or {})

    def _run_ranks(self, leaves: threading.Event) -> DitileError | None:
        self._post(self._note_start)
        try:
            ray = self._cluster.connect()
        except DitileError as error:
            return error
        self._post(_restore_signal_handler)
        gone_errors = (ray.exceptions.RayError, ConnectionError, TimeoutError)
        placement = None
        try:
            options = self._setup.options
            bundle: dict[str, float] = {"CPU": options.threads or 1}
            if options.device != "cpu" and ray.cluster_resources().get("GPU"):
                bundle["GPU"] = 1
            placement = ray.util.placement_group([bundle] * self._setup.plan.world, strategy="PACK")
            if not placement.wait(timeout_seconds=ROOM_SECONDS):
                LOG.warning("replica %s waits for room in the cluster: %s for each rank", self.name, bundle)
            while not placement.wait(timeout_seconds=WATCH_SECONDS):
                self._raise_if_killed()
            self._actors = _start_ranks(ray, placement, bundle, self._setup)
            return self._watch_ranks(ray, self._actors, leaves)
        except DitileError as error:
            return error
        except gone_errors as error:
            return RankError(0, NOT_STARTED, f"{NOT_STARTED}: {shorten_line(error)}")
        finally:
            self._actors = ()
            # This ends the actors too. The cluster may have gone.
            with contextlib.suppress(*gone_errors):
                if placement is not None:
                    ray.util.remove_placement_group(placement)

    def _watch_ranks(self, ray: Any, actors: Sequence[Any], leaves: threading.Event) -> DitileError | None:
        """Hand on what rank 0 answers until the ranks end, and return the reason; None if `leaves` was set."""
        limits = LaunchLimits(stall=self._setup.options.stall_timeout, grace=GRACE)
        ranks = list(map(RankState, range(len(actors))))
        polls = {actors[rank.number].poll.remote(): rank for rank in ranks}
        while not leaves.is_set():
            self._raise_if_killed()
            looked_at = time.monotonic()
            done, _ = ray.wait(list(polls), num_returns=len(polls), timeout=WATCH_SECONDS)
            for poll in done:
                rank = polls.pop(poll)
                self._read_news(ray, poll, rank)
                if rank.outcome is None:
                    polls[actors[rank.number].poll.remote()] = rank
            if not polls and all(isinstance(rank.outcome, RankResult) for rank in ranks):
                return StateError("the ranks have left")
            for rank in ranks:
                rank.detect_silence(limits, looked_at)
            first_failure = find_first_failure(ranks, limits, looked_at)
            if first_failure is not None:
                failure, number = first_failure
                if is_consequence(failure):
                    # The ranks on other nodes may notice the end of a node before Ray does.
                    failure = failure._replace(cause="another rank has gone", traceback="")
                return make_error(failure, number)
        return None

    def _read_news(self, ray: Any, poll: Any, rank: RankState) -> None:
        """Read the report of an actor about its rank."""
        try:
            signs, answers, end = ray.get(poll)
        except ray.exceptions.RayError as error:
            culprit = "node" if "node has died" in str(error) else "process"
            rank.outcome = RankFailure(time.monotonic(), f"its {culprit} has gone", shorten_line(error))
            return
        rank.signs.read_signs(signs)
        for message, files in answers:
            self._take_message(json.loads(message), files)
        if end:
            # The clocks of nodes differ, so the time of failure is now.
            rank.outcome = RankFailure(time.monotonic(), *end[1:])
        elif end is not None:
            rank.outcome = RankResult(None)


def _start_ranks(ray: Any, placement: Any, bundle: dict[str, float], setup: WorkerSetup) -> list[Any]:
    """Start the ranks, each as an actor in a bundle of the placement group. They meet at rank 0."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    actor_class = ray.remote(concurrency_groups={SENDING: 1})(RankActor)
    actors = []
    for number in range(setup.plan.world):
        options = actor_class.options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            # Two besides `SENDING`, since a waiting poll must not block another call.
            max_concurrency=2,
            runtime_env={"env_vars": env.build_actor_environment()},
            scheduling_strategy=PlacementGroupSchedulingStrategy(placement, number),
        )
        actors.append(options.remote(setup, os.getcwd()))
    found: list[tuple[str, str, int]] = ray.get([actor.find_place.remote() for actor in actors])
    _, master, port = found[0]
    nodes = [node for node, _, _ in found]
    starts = []
    for number, (node, address, _) in enumerate(found):
        local_rank = nodes[:number].count(node)
        place = RankPlace(number, len(nodes), local_rank, nodes.count(node), setup.options.threads or 1)
        starts.append(actors[number].start_rank.remote(place, address, master, port))
    ray.get(starts)
    return actors


def _restore_signal_handler() -> None:
    """Restore Python's handler of SIGTERM. Ray's own handler, set when it connects, aborts the process after 3 s."""
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    signal.siginterrupt(signal.SIGTERM, False)

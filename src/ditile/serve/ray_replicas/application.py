"""The server's side of replicas on a Ray cluster: an application of Ray Serve, and the server's replicas that use it.

Each `RayReplica` is a place for one batch at a time; Ray Serve chooses the replica that generates the batch. There are
as many places as there may be replicas, so that waiting batches make Ray Serve start another one. Clients connect only
to this server: Ray Serve's own HTTP proxies are off. Nothing here imports torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from ditile.distributed import env
from ditile.plan import errors
from ditile.plan.errors import DitileError, RankError, StateError
from ditile.runner.requests.facts import ModelFacts
from ditile.serve.jobs import Files, shorten_line
from ditile.serve.link import Batch, WorkerSetup
from ditile.serve.options import ServeOptions
from ditile.serve.ray_replicas.deployment import RankDeployment, shorten_error
from ditile.serve.replica import EventHandler, Replica

LOG = logging.getLogger("ditile")
DEPLOYMENT = "ranks"
# Seconds between looks at the running replicas, and until a batch is offered again if a replica was about to end.
LOOK_SECONDS = 0.5
CONNECT_SECONDS = 10.0
# Seconds until replicas are deployed again if their ranks fail at each start.
AGAIN_SECONDS = 10.0
# Seconds after a lost batch in which Ray Serve may still count its replica as running.
SETTLE_SECONDS = 3.0
# Logger -> part of a message to hide, logged though all is well. A cluster without a token is still reported.
RAY_COMPLAINTS = {
    "ray._private.worker": "SIGTERM handler is not set",
    "ray._private.authentication.authentication_token_setup": "Token authentication is enabled",
}
# Delays until Ray Serve starts a replica for waiting batches, and ends one that has none.
DELAYS = {"metrics_interval_s": 2.0, "look_back_period_s": 4.0, "upscale_delay_s": 2.0, "downscale_delay_s": 300.0}


class ReplicaStatus(NamedTuple):
    """Ray Serve's report on the replicas.

    Attributes:
        running: the number of replicas that can generate.
        has_failed: whether Ray Serve has given up after three failed starts of a replica.
        message: why some do not run; empty if all is well.
        is_missing: whether the cluster does not know the application.
    """

    running: int
    has_failed: bool
    message: str
    is_missing: bool = False

    @property
    def is_lost(self) -> bool:
        """Return whether no replica will come before they are deployed again."""
        return self.has_failed or self.is_missing


class RayApplication:
    """The replicas of one server, as an application of Ray Serve.

    Args:
        setup: the settings of the ranks.
        options: the address of the cluster, and how many replicas there are.

    Attributes:
        handle: Ray Serve's handle for sending batches; None before there are replicas.
    """

    def __init__(self, setup: WorkerSetup, options: ServeOptions) -> None:
        self._setup = make_paths_absolute(setup)
        self._options = options
        # The name stays the same after a restart, and differs between servers.
        place = f"{socket.gethostname()}:{options.find_state_folder().absolute()}"
        digest = hashlib.sha256(place.encode()).hexdigest()
        self._name = f"ditile-{digest[:12]}"
        self.handle: Any = None
        self._replicas: list[RayReplica] = []
        self._facts: ModelFacts | None = None
        self._keeper: asyncio.Task[None] | None = None
        # A signal may stop the server while a thread deploys.
        self._deploying = threading.Lock()
        self._is_leaving = False

    def make_replica(self, name: str, on_event: EventHandler) -> RayReplica:
        """Make a replica of the server. It must be called in the server's event loop."""
        replica = RayReplica(name, self, on_event)
        self._replicas.append(replica)
        return replica

    def start(self) -> None:
        """Deploy the application, if it was not deployed yet."""
        if self._keeper is None:
            self._keeper = asyncio.ensure_future(self._keep_replicas())
            self._keeper.add_done_callback(self._note_end_of_keeper)

    async def end(self) -> None:
        """End the application, and leave the cluster. Each replica may call this."""
        if self._keeper is not None:
            keeper = self._keeper
            self._keeper = None
            keeper.cancel()
            self._is_leaving = True
            await asyncio.wait([keeper])
            await asyncio.to_thread(self._leave_cluster)

    async def _keep_replicas(self) -> None:
        """Tell the replicas how many of them run, until the server ends."""
        await asyncio.to_thread(self._deploy)
        restore_signal_handler()
        last_message = ""
        while not self._is_leaving:
            try:
                status = await asyncio.to_thread(self._look_at_replicas)
                if status.running and self._facts is None:
                    await self._ask_facts()
            except _list_ray_errors() as error:
                status = ReplicaStatus(0, False, shorten_error(error))
            if not status.running and status.message not in ("", last_message):
                LOG.warning("no replica runs: %s", status.message)
                last_message = status.message
            self._share_status(status)
            # Ranks that have never been ready are not started again, as in `LocalReplica`.
            if status.has_failed and self._facts is None:
                return
            if status.is_lost:
                await asyncio.sleep(AGAIN_SECONDS)
                await asyncio.to_thread(self._deploy)
            else:
                await asyncio.sleep(LOOK_SECONDS)

    def _share_status(self, status: ReplicaStatus) -> None:
        """Tell each replica whether one of Ray Serve runs for it."""
        count = status.running
        # Above the least number, waiting batches make Ray Serve start more replicas.
        if count >= self._options.replicas:
            count = len(self._replicas)
        # Places with a batch, or ready ones, keep their replica.
        order = {"drawing": 0, "ready": 1}
        replicas = sorted(self._replicas, key=lambda replica: order.get(replica.state, 2))
        for number, replica in enumerate(replicas):
            replica.note_status(status, self._facts, is_running=number < count)

    @property
    def _address(self) -> str | None:
        """Return the address of a running cluster; None starts one on this machine."""
        return None if self._options.ray == "local" else self._options.ray

    def check_address(self) -> None:
        """Check that something listens at the cluster's address.

        Raises `StateError` if not; blocks for seconds at most.
        """
        if self._address is None:
            return
        host, _, port = self._address.rpartition(":")
        with self._explain_connection_errors():
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()

    def _note_end_of_keeper(self, keeper: asyncio.Task[None]) -> None:
        """Tell the replicas why they will never run."""
        error = None if keeper.cancelled() else keeper.exception()
        if error is None:
            return
        LOG.debug("the application has ended", exc_info=error)
        if not isinstance(error, DitileError):
            error = StateError(f"Ray Serve: {shorten_error(error)}")
        for replica in self._replicas:
            replica.note_refusal(error)

    def _deploy(self) -> None:
        """Connect to the cluster and ask for the replicas; blocks for seconds.

        Raises:
            StateError: if the cluster cannot be reached.
        """
        ray, serve = _import_ray()
        with self._deploying:
            if self._is_leaving:
                return
            if not ray.is_initialized():
                self._connect_to_cluster(ray)
            serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
            # `serve.start` has set its own level.
            logging.getLogger("ray.serve").setLevel(logging.ERROR)
            # A killed server may have left its application. One without room to start may take long to end.
            with contextlib.suppress(TimeoutError):
                serve.delete(self._name)
            target = serve.RunTarget(self._describe_deployment(ray, serve), name=self._name, route_prefix=None)
            (self.handle,) = serve.run_many([target], wait_for_applications_running=False)

    def _connect_to_cluster(self, ray: Any) -> None:
        for name, phrase in RAY_COMPLAINTS.items():
            logging.getLogger(name).addFilter(env.PhraseFilter(phrase))
        # Ray itself would retry the connection for many minutes.
        self.check_address()
        with self._explain_connection_errors():
            # Output of the cluster's processes stays in its logs; only failures of ranks are reported here.
            ray.init(self._address, include_dashboard=False, configure_logging=False, log_to_driver=False)

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

    def _describe_deployment(self, ray: Any, serve: Any) -> Any:
        """Describe the replicas for Ray Serve. Each has a placement group with a bundle for each rank."""
        engine = self._setup.engine
        bundle: dict[str, float] = {"CPU": engine.threads or 1}
        if engine.device != "cpu" and ray.cluster_resources().get("GPU"):
            bundle["GPU"] = 1
        least = self._options.replicas
        most = self._options.num_groups
        number: dict[str, Any] = {"num_replicas": least}
        if most > least:
            scaling = {"min_replicas": least, "max_replicas": most, "target_ongoing_requests": 1, **DELAYS}
            number = {"autoscaling_config": scaling}
        deployment = serve.deployment(RankDeployment).options(
            name=DEPLOYMENT,
            **number,
            ray_actor_options={"num_cpus": 0},
            placement_group_bundles=[bundle] * self._setup.plan.world,
            placement_group_strategy="PACK",
            max_ongoing_requests=1,
            graceful_shutdown_wait_loop_s=0.5,
            health_check_period_s=1,
            graceful_shutdown_timeout_s=self._options.timeout,
            logging_config={"log_level": "WARNING", "enable_access_log": False},
        )
        return deployment.bind(self._setup, bundle)

    def _look_at_replicas(self) -> ReplicaStatus:
        """Ask Ray Serve for the state of the replicas; blocks."""
        _, serve = _import_ray()
        application = serve.status().applications.get(self._name)
        if application is None:
            return ReplicaStatus(0, False, "the cluster has no such application any more", is_missing=True)
        has_failed = application.status == "DEPLOY_FAILED"
        status = application.deployments.get(DEPLOYMENT)
        if status is None:
            return ReplicaStatus(0, has_failed, "")
        running = status.replica_states.get("RUNNING", 0)
        return ReplicaStatus(running, has_failed, shorten_error(status.message))

    async def _ask_facts(self) -> None:
        """Ask a replica for the facts of the model. Raises its refusal."""
        described = json.loads(await self.handle.describe.remote())
        if "refused" in described:
            name, message = described["refused"]
            raise getattr(errors, name)(message)
        self._facts = ModelFacts.from_json(described["facts"])

    def _leave_cluster(self) -> None:
        ray, serve = _import_ray()
        with self._deploying:
            if not ray.is_initialized():
                return
            with contextlib.suppress(*_list_ray_errors()):
                # The handle's thread would go on asking a cluster that this process has left.
                if self.handle is not None:
                    self.handle.shutdown()
                serve.delete(self._name, _blocking=False)
            # This also ends a cluster that `ray.init` has started.
            ray.shutdown()


class RayReplica(Replica):
    """A place for one batch at a time on the replicas of an application."""

    def __init__(self, name: str, application: RayApplication, on_event: EventHandler) -> None:
        super().__init__(name, on_event)
        self._application = application
        self._task: asyncio.Task[None] | None = None
        self._stream: Any = None
        # False while the batch waits for a replica of Ray Serve, True once one generates it.
        self._has_begun = False
        self._down_since = -math.inf

    def start(self) -> None:
        """Start the replicas. Ray Serve starts them again when they fail."""
        self._application.start()

    def generate(self, batch: Batch) -> None:
        """Give a batch to the first idle replica."""
        self._note_batch(batch)
        self._has_begun = False
        message, files = batch.to_message()
        work = self._stream_batch(batch.id, json.dumps(message), files)
        self._task = self._loop.create_task(work)

    def stop(self, batch_id: str) -> None:
        """End a batch here at once, and on its ranks within two steps. Does nothing if it has ended."""
        if self._batch_id == batch_id:
            self._drop_stream()
            self._batch_id = None
            self._has_begun = False
            self._loop.call_soon(self._note_ended, batch_id)

    async def end(self) -> None:
        """End the replicas for good."""
        self._drop_stream()
        await self._application.end()

    def note_status(self, status: ReplicaStatus, facts: ModelFacts | None, *, is_running: bool) -> None:
        """Note whether a replica of Ray Serve runs for this one."""
        # The stream of a batch reports the end of its replica.
        if self._has_begun:
            return
        waiting = self._batch_id
        is_up = self.state in ("ready", "drawing")
        if is_running and facts is not None and not is_up:
            if time.monotonic() > self._down_since + SETTLE_SECONDS:
                self._note_ready(facts)
                self.state = "ready" if waiting is None else "drawing"
        elif status.has_failed and not status.running and self.state != "failed":
            self._drop_stream()
            error = RankError(0, "failed", f"no replica starts: {status.message}")
            self._note_down(error, has_failed=True)
        elif not is_running and (is_up or (status.is_lost and self.state == "starting")):
            # A waiting batch is not lost, since the next replica generates it.
            self._batch_id = None
            reason = status.message or "another one is started"
            self._note_down(RankError(0, "gone", f"its replica has gone: {reason}"))
            self._batch_id = waiting

    def note_refusal(self, error: DitileError) -> None:
        """Note that no replica will ever run."""
        self._note_down(error)

    def _note_down(self, error: DitileError, has_failed: bool = False) -> None:
        self._down_since = time.monotonic()
        self._has_begun = False
        super()._note_down(error, has_failed)

    def _note_ended(self, batch_id: str) -> None:
        self._has_begun = False
        super()._note_ended(batch_id)

    def _drop_stream(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._stream is not None:
            self._stream.cancel()

    async def _stream_batch(self, batch_id: str, message: str, files: Files) -> None:
        """Offer the batch to replicas until one generates it, and report the answers of that replica."""
        from ray.exceptions import RayTaskError

        begun = False
        while not begun:
            try:
                stream = self._application.handle.options(stream=True).generate.remote(batch_id, message, files)
                self._stream = stream
                async for text, output_files in stream:
                    answer = json.loads(text)
                    if answer["kind"] == "begun":
                        begun = True
                        self._has_begun = True
                        self._tell("begun", batch_id)
                    elif answer["kind"] == "down":
                        self._note_down(RankError(**answer["error"]))
                        return
                    elif answer["kind"] != "away":
                        self._handle_message(answer, output_files)
            except _list_ray_errors() as error:
                # The batch was stopped, so this error is not reported.
                if self._batch_id != batch_id:
                    return
                has_failed = isinstance(error, RayTaskError)
                if begun or has_failed:
                    reason = "its replica has gone, its process or its node"
                    if has_failed:
                        reason = "its replica failed"
                    self._note_down(RankError(0, type(error).__name__, reason, str(error)))
                    return
            # If the replica ended before it began, the batch is offered to another one.
            if not begun:
                await asyncio.sleep(LOOK_SECONDS)


def restore_signal_handler() -> None:
    """Restore Python's handler of SIGTERM. Ray's own handler, set when it connects, aborts the process after 3 s."""
    handler = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is threading.main_thread() and handler is not None:
        signal.signal(signal.SIGTERM, handler)
        signal.siginterrupt(signal.SIGTERM, False)


def make_paths_absolute(setup: WorkerSetup) -> WorkerSetup:
    """Return the setup for processes with other working folders."""
    cache = setup.cache
    model = setup.model
    lora_dir = setup.lora_dir
    components = {name: os.path.abspath(file) for name, file in setup.components.items()}
    if cache.lora is not None:
        absolute = tuple(choice.describe(_make_path_absolute) for choice in cache.loras.values())
        cache = dataclasses.replace(cache, lora=absolute)
    if os.path.isdir(model):
        model = os.path.abspath(model)
    if lora_dir is not None:
        lora_dir = os.path.abspath(lora_dir)
    return dataclasses.replace(setup, model=model, cache=cache, lora_dir=lora_dir, components=components)


def _make_path_absolute(source: str) -> str:
    """Return a path as an absolute one; a hub id stays, since it is not a path."""
    return os.path.abspath(source) if os.path.exists(source) else source


def _import_ray() -> tuple[Any, Any]:
    """Ray and its Serve, which few servers need."""
    env.prepare_ray()
    import ray
    from ray import serve

    return ray, serve


def _list_ray_errors() -> tuple[type[Exception], ...]:
    """Return the errors of Ray and Ray Serve for a process, a node or a cluster that has gone."""
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    return RayError, RayServeException, TimeoutError

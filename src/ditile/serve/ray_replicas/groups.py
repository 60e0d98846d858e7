"""The server's side of replicas on a Ray cluster: an application of Ray Serve, and the groups that draw by it.

Each group is a place for one batch at a time; which replica draws the batch is Ray Serve's choice. There are as many
groups as there may be replicas, so that batches that wait for a replica let Ray Serve start another one. Clients
connect to this server alone: Ray Serve's own HTTP proxies are off. Nothing here imports torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ditile.distributed import env
from ditile.plan import errors
from ditile.plan.errors import DitileError, RankError, StateError
from ditile.runner.requests.facts import ModelFacts
from ditile.serve.group import Batch, BatchBegun, GroupEvent, ReplicaGroup
from ditile.serve.link import GroupSetup
from ditile.serve.options import ServeOptions
from ditile.serve.ray_replicas.replica import Replica, shorten_error

LOG = logging.getLogger("ditile")
DEPLOYMENT = "ranks"
LOOK_SECONDS = 0.5
"""How often the server looks how many replicas run, and asks for another one if a replica was about to end."""
CONNECT_SECONDS = 10.0
AGAIN_SECONDS = 10.0
"""After how long replicas are deployed again whose ranks fail whenever they start."""
SETTLE_SECONDS = 3.0
"""After a batch was lost, how long Ray Serve may still count its replica among those that run."""
RAY_COMPLAINTS = {
    "ray._private.worker": "SIGTERM handler is not set",
    "ray._private.authentication.authentication_token_setup": "Token authentication is enabled",
}
"""Logger -> a part of what it says though all is well; that a cluster asks for no token is shown."""
DELAYS = {"metrics_interval_s": 2.0, "look_back_period_s": 4.0, "upscale_delay_s": 2.0, "downscale_delay_s": 300.0}
"""How soon Ray Serve starts a replica where batches wait, and ends one where none do."""


class ReplicaStatus(NamedTuple):
    """What Ray Serve says of the replicas.

    Attributes:
        running: how many can draw.
        has_failed: whether it has given up, as a replica did not start three times.
        message: why some do not run; empty if all is well.
        is_missing: whether the cluster does not know the application.
    """

    running: int
    has_failed: bool
    message: str
    is_missing: bool = False

    @property
    def is_lost(self) -> bool:
        """Whether no replica comes before they are deployed again."""
        return self.has_failed or self.is_missing


class RayApplication:
    """The replicas of one server, as an application of Ray Serve.

    Args:
        setup: what the ranks load.
        options: the address of the cluster, and how many replicas there are.

    Attributes:
        handle: Ray Serve's, to send batches by; None before there are replicas.
    """

    def __init__(self, setup: GroupSetup, options: ServeOptions) -> None:
        self._setup, self._options = make_paths_absolute(setup), options
        # The same after a restart, and another one for each server.
        place = f"{socket.gethostname()}:{options.find_state_folder().absolute()}"
        self._name = f"ditile-{hashlib.sha256(place.encode()).hexdigest()[:12]}"
        self.handle: Any = None
        self._groups: list[RayGroup] = []
        self._facts: ModelFacts | None = None
        self._keeper: asyncio.Task[None] | None = None
        # A server may be told to end while it deploys.
        self._deploying, self._leaving = threading.Lock(), False

    def make_group(self, name: str, on_event: Callable[[GroupEvent], None]) -> RayGroup:
        """A group that draws by these replicas; called in the event loop of the server."""
        self._groups.append(RayGroup(name, self, asyncio.get_running_loop(), on_event))
        return self._groups[-1]

    def start(self) -> None:
        """Starts the replicas, if they are not started yet; groups hear how many run."""
        if self._keeper is None:
            self._keeper = asyncio.ensure_future(self._keep_replicas())
            self._keeper.add_done_callback(self._note_end_of_keeper)

    async def end(self) -> None:
        """Ends the replicas, and leaves the cluster; groups may all call this."""
        if self._keeper is not None:
            keeper, self._keeper = self._keeper, None
            keeper.cancel()
            self._leaving = True
            await asyncio.wait([keeper])
            await asyncio.to_thread(self._leave_cluster)

    async def _keep_replicas(self) -> None:
        """Tells the groups how many replicas run, for as long as the server does."""
        await asyncio.to_thread(self._deploy_replicas)
        restore_signal_handler()
        last_message = ""
        while not self._leaving:
            try:
                status = await asyncio.to_thread(self._look_at_replicas)
                if status.running and self._facts is None:
                    await self._ask_facts()
            except _list_ray_errors() as error:
                status = ReplicaStatus(0, False, shorten_error(error))
            if not status.running and status.message not in ("", last_message):
                LOG.warning(f"no replica runs: {status.message}")
                last_message = status.message
            self._share_replicas(status)
            if status.has_failed and self._facts is None:
                # Ranks that have never been ready are left alone, as those of `RankGroup` are.
                return
            await asyncio.sleep(AGAIN_SECONDS if status.is_lost else LOOK_SECONDS)
            if status.is_lost:
                await asyncio.to_thread(self._deploy_replicas)

    def _share_replicas(self, status: ReplicaStatus) -> None:
        """Tells the groups for which of them there is a replica. Above the least number of replicas, batches that wait
        for one let Ray Serve start it."""
        left = status.running if status.running < self._options.replicas else len(self._groups)
        order = {"drawing": 0, "ready": 1}
        for number, group in enumerate(sorted(self._groups, key=lambda one: order.get(one.state, 2))):
            group.note_replicas(status, self._facts, has_replica=number < left)

    def _note_end_of_keeper(self, keeper: asyncio.Task[None]) -> None:
        """Tells the groups why there will be no replicas."""
        error = None if keeper.cancelled() else keeper.exception()
        if error is not None:
            LOG.debug("the application has ended", exc_info=error)
            known = error if isinstance(error, DitileError) else StateError(f"Ray Serve: {shorten_error(error)}")
            for group in self._groups:
                group.note_refusal(known)

    def _deploy_replicas(self) -> None:
        """Connects to the cluster and asks for the replicas. Blocks for seconds.

        Raises:
            StateError: if the cluster cannot be reached.
        """
        ray, serve = _import_ray()
        with self._deploying:
            if self._leaving:
                return
            if not ray.is_initialized():
                self._connect_to_cluster(ray)
            serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
            # Serve has set its own.
            logging.getLogger("ray.serve").setLevel(logging.ERROR)
            # Of a server that was killed. It may be long in ending what has no room to start.
            with contextlib.suppress(TimeoutError):
                serve.delete(self._name)
            target = serve.RunTarget(self._describe_deployment(), name=self._name, route_prefix=None)
            (self.handle,) = serve.run_many([target], wait_for_applications_running=False)

    def _connect_to_cluster(self, ray: Any) -> None:
        for name, phrase in RAY_COMPLAINTS.items():
            logging.getLogger(name).addFilter(env.PhraseFilter(phrase))
        address = None if self._options.ray == "local" else self._options.ray
        try:
            if address is not None:
                # Ray itself would try for many minutes.
                host, _, port = address.rpartition(":")
                socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
            # What processes of the cluster print stays in its logs; why a rank failed is told here.
            ray.init(address, include_dashboard=False, configure_logging=False, log_to_driver=False)
        except (OSError, RuntimeError, ValueError) as error:
            line = " ".join(str(error).split())[:300]
            raise StateError(
                f"ray={self._options.ray!r}: no cluster can be reached from this machine ({line}); start its node here "
                "with ray start, with RAY_AUTH_MODE=token for both if it asks for a token; or leave the address out"
            ) from error

    def _describe_deployment(self) -> Any:
        """The replicas as Ray Serve wants them: each has a placement group with a bundle for each rank."""
        ray, serve = _import_ray()
        engine, least, most = self._setup.engine, self._options.replicas, self._options.num_groups
        bundle: dict[str, float] = {"CPU": engine.threads or 1}
        if engine.device != "cpu" and ray.cluster_resources().get("GPU"):
            bundle["GPU"] = 1
        scaling = {"min_replicas": least, "max_replicas": most, "target_ongoing_requests": 1, **DELAYS}
        number = {"num_replicas": least} if least == most else {"autoscaling_config": scaling}
        deployment = serve.deployment(Replica).options(
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
        """What Ray Serve says of the replicas. Blocks."""
        _, serve = _import_ray()
        application = serve.status().applications.get(self._name)
        if application is None:
            return ReplicaStatus(0, False, "the cluster has no such application any more", is_missing=True)
        status = application.deployments.get(DEPLOYMENT)
        running = 0 if status is None else status.replica_states.get("RUNNING", 0)
        message = "" if status is None else shorten_error(status.message)
        return ReplicaStatus(running, application.status == "DEPLOY_FAILED", message)

    async def _ask_facts(self) -> None:
        """Asks a replica what the model takes. Raises what it says does not fit."""
        described = json.loads(await self.handle.describe.remote())
        if "refused" in described:
            kind, message = described["refused"]
            raise getattr(errors, kind)(message)
        self._facts = ModelFacts.from_json(described["facts"])

    def _leave_cluster(self) -> None:
        ray, serve = _import_ray()
        with self._deploying:
            if not ray.is_initialized():
                return
            with contextlib.suppress(*_list_ray_errors()):
                if self.handle is not None:
                    # Its thread would go on to ask a cluster that this process has left.
                    self.handle.shutdown()
                serve.delete(self._name, _blocking=False)
            # It ends a cluster that `ray.init` has started.
            ray.shutdown()


class RayGroup(ReplicaGroup):
    """A place for one batch at a time on the replicas of an application.

    Args:
        name: of the group.
        application: whose replicas draw.
        loop: the event loop of the server.
        on_event: called there with each event.
    """

    def __init__(
        self,
        name: str,
        application: RayApplication,
        loop: asyncio.AbstractEventLoop,
        on_event: Callable[[GroupEvent], None],
    ) -> None:
        super().__init__(name, loop, on_event)
        self._application = application
        self._task: asyncio.Task[None] | None = None
        self._stream: Any = None
        self._has_begun = False
        """Whether a replica draws the batch; it waits for one before."""
        self._down_since = -math.inf

    def start(self) -> None:
        """Starts the replicas; Ray Serve starts them again when they fail."""
        self._application.start()

    def draw(self, batch: Batch) -> None:
        """Gives a replica a batch to draw, as soon as one draws no other."""
        message, files = self._note_batch(batch)
        self._has_begun = False
        self._task = self._loop.create_task(self._draw_batch(batch.id, json.dumps(message), files))

    def stop(self, batch_id: str) -> None:
        """Ends a batch: here at once, and within two steps on its ranks. Does nothing if it has ended."""
        if self._batch_id == batch_id:
            self._drop_stream()
            self._batch_id, self._has_begun = None, False
            self._loop.call_soon(self._note_ended, batch_id, True)

    async def end(self) -> None:
        """Ends the replicas for good."""
        self._drop_stream()
        await self._application.end()

    def note_replicas(self, status: ReplicaStatus, facts: ModelFacts | None, *, has_replica: bool) -> None:
        """Notes whether there is a replica for this group. Of one that draws its batch the answers tell the same."""
        if self._has_begun:
            return
        waiting, can_draw = self._batch_id, self.state in ("ready", "drawing")
        if has_replica and facts is not None and not can_draw:
            if time.monotonic() > self._down_since + SETTLE_SECONDS:
                self._note_ready(facts)
                self.state = "ready" if waiting is None else "drawing"
        elif status.has_failed and not status.running and self.state != "failed":
            self._drop_stream()
            self._note_down(RankError(0, "failed", f"no replica starts: {status.message}"), has_failed=True)
        elif not has_replica and (can_draw or (status.is_lost and self.state == "starting")):
            # A batch that waits is not lost: the next replica draws it.
            self._batch_id = None
            self._note_down(RankError(0, "gone", f"its replica has gone: {status.message or 'another one is started'}"))
            self._batch_id = waiting

    def note_refusal(self, error: DitileError) -> None:
        """Notes that no replica will ever run."""
        self._note_down(error)

    def _note_down(self, error: DitileError, has_failed: bool = False) -> None:
        self._down_since, self._has_begun = time.monotonic(), False
        super()._note_down(error, has_failed)

    def _note_ended(self, batch_id: str, stopped: bool) -> None:
        self._has_begun = False
        super()._note_ended(batch_id, stopped)

    def _drop_stream(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._stream is not None:
            self._stream.cancel()

    async def _draw_batch(self, batch_id: str, message: str, files: dict[str, bytes]) -> None:
        """Tells what a replica answers. One that has not begun the batch when it ends leaves it to another one."""
        from ray.exceptions import RayTaskError

        begun = False
        while not begun:
            try:
                self._stream = self._application.handle.options(stream=True).draw.remote(batch_id, message, files)
                async for text, drawn_files in self._stream:
                    answer = json.loads(text)
                    if "begun" in answer:
                        begun = self._has_begun = True
                        self._on_event(BatchBegun(self, batch_id))
                    if "down" in answer:
                        self._note_down(RankError(**answer["down"]))
                        return
                    if "batch" in answer:
                        self._handle_answer(answer, drawn_files)
            except _list_ray_errors() as error:
                if self._batch_id != batch_id:
                    return  # it was stopped
                if begun or isinstance(error, RayTaskError):
                    reason = "failed" if isinstance(error, RayTaskError) else "has gone, its process or its node"
                    self._note_down(RankError(0, type(error).__name__, f"its replica {reason}", str(error)))
                    return
            if not begun:
                await asyncio.sleep(LOOK_SECONDS)


def restore_signal_handler() -> None:
    """Gives SIGTERM back to Python. Ray's own handler, set when it connects, aborts the process after 3 s."""
    handler = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is threading.main_thread() and handler is not None:
        signal.signal(signal.SIGTERM, handler)
        signal.siginterrupt(signal.SIGTERM, False)


def make_paths_absolute(setup: GroupSetup) -> GroupSetup:
    """The setup for processes with other working folders."""
    cache, model = setup.cache, setup.model
    if cache.lora is not None and Path(cache.lora).exists():
        cache = dataclasses.replace(cache, lora=str(Path(cache.lora).absolute()))
    return dataclasses.replace(
        setup,
        model=str(Path(model).absolute()) if Path(model).is_dir() else model,
        cache=cache,
        lora_dir=None if setup.lora_dir is None else str(Path(setup.lora_dir).absolute()),
    )


def _import_ray() -> tuple[Any, Any]:
    """Ray and its Serve, which few servers need."""
    env.prepare_ray()
    import ray
    from ray import serve

    return ray, serve


def _list_ray_errors() -> tuple[type[Exception], ...]:
    """What calls of Ray and of Ray Serve raise where a process, a node or the cluster has gone."""
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    return RayError, RayServeException, TimeoutError

"""A replica of Ray Serve: the ranks of a plan, each in a bundle of the replica's placement group.

The deployment watches its ranks by the rules of `launch` (`failure_detection.find_first_failure`). If one fails, the
whole replica ends, and Ray Serve starts another one in its place. It generates one batch at a time and streams what
rank 0 answers, in messages of text of JSON and bytes; its own are

    {"kind": "begun"}                      the first message of a batch that this replica generates
    {"kind": "away"}                       the replica ends and generates nothing: another one must
    {"kind": "down", "error": {...}}       a rank has failed, and the batch is lost
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from ditile.distributed import env
from ditile.distributed.env import RankPlace
from ditile.distributed.failure_detection import (
    LaunchLimits,
    RankState,
    find_first_failure,
    is_consequence,
    make_error,
)
from ditile.distributed.heartbeat import RankFailure
from ditile.plan.errors import DitileError, RankError
from ditile.serve.jobs import Files
from ditile.serve.link import WorkerSetup
from ditile.serve.ray_replicas.actor import ActorPlace, Answer, RankActor, RankNews
from ditile.serve.replica import STOP_AGAIN_SECONDS

# Seconds from the failure of a rank to the end of the replica, for its report to arrive.
END_SECONDS = 0.5
WATCH_SECONDS = 0.2
# The concurrency group of an actor for messages to its rank. Its single thread keeps their order.
SENDING = "sending"
# Seconds after the first failure, for an earlier cause to arrive from another node.
GRACE = 1.0


class RankDeployment:
    """Ranks that Ray Serve runs. It calls the methods in one event loop.

    Args:
        setup: the settings of the ranks.
        bundle: the resources of each rank: "CPU" and "GPU".

    Raises:
        RankError: if a rank fails while it loads the model. `describe` reports what does not fit.
    """

    async def __init__(self, setup: WorkerSetup, bundle: dict[str, float]) -> None:  # type: ignore[misc]
        self._setup = setup
        self._limits = LaunchLimits(stall=setup.engine.stall_timeout, grace=GRACE)
        self._ranks = [RankState(number) for number in range(setup.plan.world)]
        self._facts: Any = None
        self._error: DitileError | None = None
        self._has_started = asyncio.Event()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._listener: asyncio.Queue[Answer] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._actors = _create_actors(setup, bundle)
        await self._start_ranks()
        for rank in self._ranks:
            self._spawn_task(self._follow_rank(rank))
        self._spawn_task(self._watch_ranks())
        await self._has_started.wait()
        self.check_health()

    async def describe(self) -> str:
        """Return the model's facts, `{"facts": ...}`, or the reason of a refusal, `{"refused": [type, message]}`."""
        error = self._error
        if error is not None:
            return json.dumps({"refused": [type(error).__name__, str(error)]})
        return json.dumps({"facts": self._facts})

    async def generate(self, batch_id: str, message: str, files: Files) -> AsyncIterator[Answer]:
        """Give each rank a batch and yield the answers of rank 0. A caller that ends this early stops the batch."""
        # A batch that was stopped earlier may not have ended yet.
        while not self._is_idle.is_set():
            await self._is_idle.wait()
        if self._error is not None:
            yield json.dumps({"kind": "away"}), {}
            return
        self._is_idle.clear()
        answers: asyncio.Queue[Answer] = asyncio.Queue()
        self._listener = answers
        try:
            self._send(message, files)
            yield json.dumps({"kind": "begun"}), {}
            while not (self._is_idle.is_set() and answers.empty()):
                yield await answers.get()
        finally:
            if self._listener is answers:
                self._listener = None
            if not self._is_idle.is_set():
                self._spawn_task(self._stop_batch(batch_id))

    def check_health(self) -> None:
        """Raise the error of the ranks, if they have failed. Ray Serve calls this, and replaces the replica."""
        if isinstance(self._error, RankError):
            raise self._error

    def _spawn_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        # The loop has only a weak reference to the task.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _send(self, message: str, files: Files) -> None:
        for actor in self._actors:
            actor.send.options(concurrency_group=SENDING).remote(message, files)

    async def _stop_batch(self, batch_id: str) -> None:
        # The batch's call may not have begun when the first message arrives.
        while not self._is_idle.is_set():
            self._send(json.dumps({"stop": batch_id}), {})
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._is_idle.wait(), STOP_AGAIN_SECONDS)

    async def _start_ranks(self) -> None:
        """Tell each actor its place. The ranks meet at rank 0."""
        from ray.exceptions import RayError

        try:
            calls = [actor.find_place.remote() for actor in self._actors]
            places: list[ActorPlace] = await asyncio.gather(*calls)
            per_node = Counter(place.node for place in places)
            placed = Counter[str]()
            threads = self._setup.engine.threads or 1
            for number, own in enumerate(places):
                place = RankPlace(number, len(places), placed[own.node], per_node[own.node], threads)
                placed[own.node] += 1
                await self._actors[number].start_rank.remote(place, own, places[0])
        except RayError as error:
            raise RankError(0, "not started", f"the ranks cannot be started: {shorten_error(error)}") from None

    async def _follow_rank(self, rank: RankState) -> None:
        """Read the reports of an actor until its rank has ended."""
        from ray.exceptions import RayError

        while rank.outcome is None:
            try:
                news: RankNews = await self._actors[rank.number].poll.remote()
            except RayError as error:
                # Standard error is one of Ray's logs.
                print(f"rank {rank.number}: {error}", file=sys.stderr)
                culprit = "node" if "node has died" in str(error) else "process"
                rank.outcome = RankFailure(time.monotonic(), "gone", f"its {culprit} has gone")
                return
            rank.signs.read_signs(news.signs)
            for answer in news.answers:
                self._handle_answer(answer)
            if news.failure is not None:
                # The clocks of nodes differ, so the time of failure is now.
                rank.outcome = RankFailure(time.monotonic(), *news.failure[1:])

    async def _watch_ranks(self) -> None:
        """End this replica if a rank fails, is silent or makes no progress."""
        first_failure = None
        while first_failure is None:
            looked = time.monotonic()
            await asyncio.sleep(WATCH_SECONDS)
            for rank in self._ranks:
                rank.detect_silence(self._limits, looked)
            first_failure = find_first_failure(self._ranks, self._limits, looked)
        failure, number = first_failure
        if is_consequence(failure):
            # Ray may learn of a node's end after the ranks on the others have.
            failure = failure._replace(message="another rank has gone, its process or its node", traceback="")
        self._note_failure(make_error(failure, number))

    def _note_failure(self, error: DitileError) -> None:
        if not self._has_started.is_set():
            self._error = error
            self._has_started.set()
            return
        # An error after the ranks were ready is not a fault of the model, and another replica may run.
        if not isinstance(error, RankError):
            error = RankError(0, type(error).__name__, str(error))
        self._error = error
        self._is_idle.set()
        if self._listener is not None:
            fields = {name: getattr(error, name) for name in ("rank", "cause", "message", "traceback")}
            self._listener.put_nowait((json.dumps({"kind": "down", "error": fields}), {}))
        asyncio.get_running_loop().call_later(END_SECONDS, os._exit, 1)

    def _handle_answer(self, answer: Answer) -> None:
        message = json.loads(answer[0])
        if message["kind"] == "ready":
            self._facts = message["facts"]
            self._has_started.set()
            return
        if message["kind"] == "ended":
            self._is_idle.set()
        if self._listener is not None:
            self._listener.put_nowait(answer)


def _create_actors(setup: WorkerSetup, bundle: dict[str, float]) -> list[Any]:
    """Create the actors of the ranks, each in a bundle of the placement group.

    Ray Serve has made the group for this replica.
    """
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    placement = ray.util.get_current_placement_group()
    assert placement is not None, "Ray Serve has made one"
    # Ray's type hints lack this argument of actors.
    actor_class = ray.remote(concurrency_groups={SENDING: 1})(RankActor)  # type: ignore[call-overload]
    actors = []
    for number in range(setup.plan.world):
        options = actor_class.options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            # Two besides `SENDING`, since a waiting poll must not block another call.
            max_concurrency=2,
            runtime_env={"env_vars": env.build_actor_environment()},
            scheduling_strategy=PlacementGroupSchedulingStrategy(placement, number),
        )
        actors.append(options.remote(setup))
    return actors


def shorten_error(error: BaseException | str) -> str:
    """Return the line of an error of Ray, or of a message, with the reason; the first line if none has it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return ""
    reasons = [line for line in lines if " because " in line or "Error: " in line]
    line = reasons[-1] if reasons else lines[0]
    return line.partition(" Worker exit")[0][:300]

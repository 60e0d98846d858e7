"""A replica of Ray Serve: the ranks of a plan, each in a bundle of the replica's placement group.

The replica watches its ranks by the rules of `launch` (`supervise.find_first_failure`). If one fails, the whole replica
ends, and Ray Serve starts another one in its place. It draws one batch at a time and streams what rank 0 answers, in
messages of text of JSON and bytes; its own are

    {"begun": true}                    the first message of a batch that this replica draws
    {"away": true}                     the replica ends and draws nothing: another one has to be asked
    {"down": {"rank": ..., ...}}       a rank has failed, and the batch is lost
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
from ditile.distributed.failure_rules import (
    LaunchLimits,
    RankState,
    find_first_failure,
    is_consequence,
    make_error,
)
from ditile.distributed.heartbeat import RankFailure
from ditile.plan.errors import DitileError, RankError
from ditile.serve.group import STOP_AGAIN_SECONDS
from ditile.serve.link import GroupSetup
from ditile.serve.ray_replicas.actor import ActorPlace, RankActor, RankNews

Answer = tuple[str, dict[str, bytes]]
END_SECONDS = 0.5
"""From the failure of a rank to the end of the replica, for the news of it to arrive."""
WATCH_SECONDS = 0.2
SENDING = "sending"
"""The concurrency group of an actor whose one thread gives its rank the messages, in their order."""
GRACE = 1.0
"""Seconds after the first failure, for an earlier cause to arrive from another node."""


class Replica:
    """Ranks that draw. Ray Serve calls its methods in one event loop.

    Args:
        setup: what the ranks load.
        bundle: what each of them has: "CPU" and "GPU".

    Raises:
        RankError: if a rank fails while it loads the model. What the model, the plan or an option does not fit is told
            by `describe`.
    """

    async def __init__(self, setup: GroupSetup, bundle: dict[str, float]) -> None:  # type: ignore[misc]
        self._setup = setup
        self._limits = LaunchLimits(stall=setup.engine.stall_timeout, grace=GRACE)
        self._ranks = [RankState(number) for number in range(setup.plan.world)]
        self._facts: Any = None
        self._error: DitileError | None = None
        self._has_started, self._is_idle = asyncio.Event(), asyncio.Event()
        self._is_idle.set()
        self._listener: asyncio.Queue[Answer] | None = None
        self._actors = _create_actors(setup, bundle)
        await self._start_ranks()
        self._tasks: set[asyncio.Task[None]] = set()
        for rank in self._ranks:
            self._spawn_task(self._follow_rank(rank))
        self._spawn_task(self._watch_ranks())
        await self._has_started.wait()
        if isinstance(self._error, RankError):
            raise self._error

    async def describe(self) -> str:
        """What the model takes, `{"facts": ...}`; or why it cannot be served so, `{"refused": [type, message]}`."""
        if self._error is not None:
            return json.dumps({"refused": [type(self._error).__name__, str(self._error)]})
        return json.dumps({"facts": self._facts})

    async def draw(self, batch_id: str, message: str, files: dict[str, bytes]) -> AsyncIterator[Answer]:
        """Draws a batch and yields what rank 0 answers; a caller that ends this early stops the batch.

        Args:
            batch_id: of the batch.
            message, files: for each rank.
        """
        # A batch that was stopped before may not have ended yet.
        while not self._is_idle.is_set():
            await self._is_idle.wait()
        if self._error is not None:
            yield json.dumps({"away": True}), {}
            return
        self._is_idle.clear()
        answers = self._listener = asyncio.Queue()
        try:
            self._send(message, files)
            yield json.dumps({"begun": True}), {}
            while True:
                answer = await answers.get()
                yield answer
                if self._is_idle.is_set() and answers.empty():
                    break
        finally:
            if self._listener is answers:
                self._listener = None
            if not self._is_idle.is_set():
                self._spawn_task(self._stop_batch(batch_id))

    def check_health(self) -> None:
        """Raises the error of the ranks, if they have failed. Ray Serve calls this, and replaces the replica."""
        if isinstance(self._error, RankError):
            raise self._error

    def _spawn_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        # The loop alone would not keep it.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _send(self, message: str, files: dict[str, bytes]) -> None:
        for actor in self._actors:
            actor.send.options(concurrency_group=SENDING).remote(message, files)

    async def _stop_batch(self, batch_id: str) -> None:
        while not self._is_idle.is_set():
            self._send(json.dumps({"stop": batch_id}), {})
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._is_idle.wait(), STOP_AGAIN_SECONDS)

    async def _start_ranks(self) -> None:
        """Tells each actor its place. The ranks meet where rank 0 is."""
        from ray.exceptions import RayError

        try:
            places: list[ActorPlace] = await asyncio.gather(*(actor.find_place.remote() for actor in self._actors))
            per_node = Counter(place.node for place in places)
            seen = Counter[str]()
            for number, (actor, own) in enumerate(zip(self._actors, places, strict=True)):
                threads = self._setup.engine.threads or 1
                place = RankPlace(number, len(places), seen[own.node], per_node[own.node], threads)
                seen[own.node] += 1
                await actor.start_rank.remote(place, own, places[0])
        except RayError as error:
            raise RankError(0, "not started", f"the ranks cannot be started: {shorten_error(error)}") from None

    async def _follow_rank(self, rank: RankState) -> None:
        """Reads what an actor tells, until its rank has ended."""
        from ray.exceptions import RayError

        while rank.outcome is None:
            try:
                news: RankNews = await self._actors[rank.number].poll.remote()
            except RayError as error:
                print(f"rank {rank.number}: {error}", file=sys.stderr)  # into Ray's logs
                what = "node" if "node has died" in str(error) else "process"
                rank.outcome = RankFailure(time.monotonic(), "gone", f"its {what} has gone")
                return
            rank.signs.read_signs(news.signs)
            for answer in news.answers:
                self._handle_answer(answer)
            if news.failure is not None:
                rank.outcome = RankFailure(time.monotonic(), *news.failure[1:])

    async def _watch_ranks(self) -> None:
        """Ends this replica if a rank fails, is silent or makes no progress."""
        while True:
            looked = time.monotonic()
            await asyncio.sleep(WATCH_SECONDS)
            for rank in self._ranks:
                rank.detect_silence(self._limits, looked)
            found = find_first_failure(self._ranks, self._limits, looked)
            if found is not None:
                failure, number = found
                if is_consequence(failure):
                    # Ray may learn of a node's end after the ranks on the others have.
                    failure = failure._replace(message="another rank has gone, its process or its node", traceback="")
                self._note_failure(make_error(failure, number))
                return

    def _note_failure(self, error: DitileError) -> None:
        if self._has_started.is_set():
            # What ends ranks that could draw is no fault of the model: another replica may be right.
            cause = error if isinstance(error, RankError) else RankError(0, type(error).__name__, str(error))
            self._error = cause
            down = {"rank": cause.rank, "cause": cause.cause, "message": cause.message, "traceback": cause.traceback}
            self._is_idle.set()
            if self._listener is not None:
                self._listener.put_nowait((json.dumps({"down": down}), {}))
            asyncio.get_running_loop().call_later(END_SECONDS, os._exit, 1)
        else:
            self._error = error
            self._has_started.set()

    def _handle_answer(self, answer: Answer) -> None:
        message = json.loads(answer[0])
        if "ready" in message:
            self._facts = message["ready"]
            self._has_started.set()
            return
        if "ended" in message:
            self._is_idle.set()
        if self._listener is not None:
            self._listener.put_nowait(answer)


def _create_actors(setup: GroupSetup, bundle: dict[str, float]) -> list[Any]:
    """The actors of the ranks, each in a bundle of the placement group that Ray Serve has made for this replica."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = ray.util.get_current_placement_group()
    assert group is not None, "Ray Serve has made one"
    options = {
        "num_cpus": bundle.get("CPU", 0),
        "num_gpus": bundle.get("GPU", 0),
        "max_concurrency": 2,  # beside `SENDING`; a call that waits for news is not to keep another one waiting
        "runtime_env": {"env_vars": env.build_actor_environment()},
    }
    strategies = [PlacementGroupSchedulingStrategy(group, number) for number in range(setup.plan.world)]
    # Its types do not know this argument of actors.
    actor = ray.remote(concurrency_groups={SENDING: 1})(RankActor)  # type: ignore[call-overload]
    return [actor.options(**options, scheduling_strategy=strategy).remote(setup) for strategy in strategies]


def shorten_error(error: BaseException | str) -> str:
    """The line of an error of Ray, or of a message, that says why, or its first one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reasons = [line for line in lines if " because " in line or "Error: " in line]
    return " ".join([*reasons[-1:], *lines][:1]).partition(" Worker exit")[0][:300]

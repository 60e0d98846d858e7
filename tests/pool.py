"""One pool of ranks for all tests: starting gloo and importing diffusers costs seconds, a case milliseconds.

    def test_sum(pool):
        assert pool.run(summed, 2, 1.0) == [2.0, 2.0]

    @on_ranks(2)
    def test_rank(name):  # the body runs on each of two ranks
        assert dist.get_world_size() == 2

Each case gets a fresh process group of exactly `ranks` workers. A worker that failed, or whose peers did, may
hold half of a collective: after a failure all workers of the case are replaced.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import functools
import gc
import importlib
import inspect
import io
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from ditile.distributed import supervise
from ditile.distributed.heartbeat import die_with_parent

MOST = 16
"""Ranks of the largest case."""

FORKS = multiprocessing.get_context("forkserver")
"""Workers are forked from one process that has imported everything: a rank costs milliseconds, and half the memory."""
FORKS.set_forkserver_preload(["tests.runner.cases"])

STACK_SIGNAL = signal.SIGUSR1
STORE_PORT = "DITILE_TEST_STORE"
NUM_PIPES = 3
"""Descriptors of the pipes between `launch` and a rank."""


class CaseError(AssertionError):
    """A case failed on some ranks; the message has the traceback of each.

    Attributes:
        tracebacks: by rank; of a rank that hangs, its stack.
    """

    def __init__(self, what: str, tracebacks: dict[int, str]) -> None:
        super().__init__("\n".join([what, *(f"--- rank {r} ---\n{text}" for r, text in tracebacks.items())]))
        self.tracebacks = tracebacks


class Worker:
    """One process of the pool, and the parent's ends of its two pipes."""

    def __init__(self, directory: Path, number: int) -> None:
        self.stacks = directory / f"stacks-{number}"
        theirs_in, self.jobs = FORKS.Pipe(duplex=False)
        self.results, theirs_out = FORKS.Pipe(duplex=False)
        self.process = FORKS.Process(target=_work, args=(theirs_in, theirs_out, self.stacks), daemon=True)
        self.process.start()
        theirs_in.close()
        theirs_out.close()

    def stack(self) -> str:
        """Asks for the Python stacks of its threads."""
        if self.stacks.exists() and self.process.pid and self.process.is_alive():
            os.kill(self.process.pid, STACK_SIGNAL)
            time.sleep(0.3)
        text = self.stacks.read_text(errors="replace") if self.stacks.exists() else ""
        return text or f"(no stack; exit code {self.process.exitcode})"

    def end(self) -> None:
        """Kills it, however it is blocked."""
        self.process.kill()
        self.process.join()
        self.jobs.close()
        self.results.close()
        self.stacks.unlink(missing_ok=True)


class Pool:
    """Up to `MOST` ranks, started when they are first needed. A context: its end ends them."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []
        self._started = self._cases = 0

    def __enter__(self) -> Pool:
        self._port, self._store = _serve()
        self._directory = tempfile.TemporaryDirectory(prefix="ditile-pool-")
        return self

    def __exit__(self, *_: object) -> None:
        self._replace(len(self._workers))
        self._directory.cleanup()

    def run(self, fn: Callable[..., Any], ranks: int, *args: Any, timeout: float = 120.0) -> list[Any]:
        """What `fn(*args)` returns on each of `ranks` ranks, in their order.

        Raises:
            CaseError: if a rank raises or dies, or any has not answered after `timeout` seconds.
        """
        if not 1 <= ranks <= MOST:
            raise ValueError(f"ranks={ranks}: the pool has 1 to {MOST}")
        workers, done = self._ready(ranks), False
        self._cases += 1
        call = pickle.dumps((fn, args))
        try:
            for rank, worker in enumerate(workers):
                worker.jobs.send_bytes(pickle.dumps(Case(self._cases, rank, ranks, self._port, timeout, call)))
            answers = self._gather(workers, time.monotonic() + timeout)
            failed = {rank: answer.traceback for rank, answer in sorted(answers.items()) if not answer.ok}
            hung = {rank: workers[rank].stack() for rank in range(ranks) if rank not in answers}
            done = not failed and not hung
        finally:  # a test that was interrupted leaves no half-run case to the next one
            if not done:
                self._replace(ranks)
        if not done:
            name = getattr(fn, "__name__", repr(fn))
            what = f"{name} failed on rank(s) {list(failed)}" if failed else f"{name} hung for {timeout:g} s"
            silent = f"; rank(s) {list(hung)} did not answer" if hung else ""
            raise CaseError(f"{what}{silent}, of {ranks}", failed | hung)
        return [pickle.loads(answers[rank].value) for rank in range(ranks)]

    def _gather(self, workers: Sequence[Worker], deadline: float) -> dict[int, Answer]:
        """Answers by rank. Once one has failed, the others get two seconds more: they may wait for it."""
        answers: dict[int, Answer] = {}
        open_ends = {worker.results: rank for rank, worker in enumerate(workers)}
        while open_ends and (left := deadline - time.monotonic()) > 0:
            for end in wait(list(open_ends), left):
                rank = open_ends.pop(cast(Connection, end))
                answers[rank] = _answer(end, workers[rank])
                if not answers[rank].ok:
                    deadline = min(deadline, time.monotonic() + 2)
        return answers

    def _ready(self, ranks: int) -> list[Worker]:
        self._workers = [worker for worker in self._workers if worker.process.is_alive()]
        while len(self._workers) < ranks:
            self._started += 1
            self._workers.append(Worker(Path(self._directory.name), self._started))
        return self._workers[:ranks]

    def _replace(self, ranks: int) -> None:
        for worker in self._workers[:ranks]:
            worker.end()
        del self._workers[:ranks]


class RankBody(NamedTuple):
    """The body of a test of `on_ranks`, by its names: a worker finds the test under them, and not the function."""

    module: str
    name: str

    def __call__(self, arguments: dict[str, Any]) -> None:
        getattr(importlib.import_module(self.module), self.name).__wrapped__(**arguments)


def on_ranks(ranks: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let the body of a test run on each of so many ranks, with the test's arguments."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        # Pytest leaves the first folder out where the second one is a package.
        module = f"tests.{body.__module__.removeprefix('tests.')}"

        @functools.wraps(body)
        def test(pool: Pool, **arguments: Any) -> None:
            pool.run(RankBody(module, body.__name__), ranks, arguments)

        signature = inspect.signature(body)
        pool = inspect.Parameter("pool", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = signature.replace(parameters=[pool, *signature.parameters.values()])  # type: ignore[attr-defined]
        return test

    return decorate


class ForkedProcess:
    """What `launch` asks of `subprocess.Popen`, of a rank that is forked from the fork server instead: no imports.

    Its command is `python -c CODE WORDS..`, and the numbers of its pipes are its last words. After its pipes it may
    inherit a link to its parent.
    """

    def __init__(self, command: Sequence[str], *, env: dict[str, str], pass_fds: Sequence[int], **_: Any) -> None:
        descriptors = [DupFd(fd) for fd in (1, 2, *pass_fds)]
        self._process = FORKS.Process(target=_run_command, args=(command[2:-NUM_PIPES], env, descriptors))
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> None:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a rank", timeout or 0)

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self._process.pid or 0, number)


def fork_ranks(patch: Any) -> None:
    """Lets `launch` fork its ranks, which costs milliseconds; test_launch and `faulty` start new interpreters.

    `patch` is a `pytest.MonkeyPatch`.
    """
    # Its descriptors would have other numbers in a fork.
    patch.setattr("ditile.distributed.launch.create_private_network", contextlib.nullcontext)
    patch.setattr(supervise, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": ForkedProcess}))


def _run_command(command: Sequence[str], env: dict[str, str], descriptors: Sequence[Any]) -> None:
    os.setsid()
    out, err, *others = (descriptor.detach() for descriptor in descriptors)
    pipes, links = others[:NUM_PIPES], others[NUM_PIPES:]
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.environ.clear()
    # They have other numbers here than in the parent.
    os.environ |= env | {"DITILE_PROGRESS_FD": str(pipes[-1])}
    if links:
        os.environ["DITILE_LINK_FD"] = str(links[0])
    sys.argv = ["-c", *command[1:], *map(str, pipes)]
    exec(command[0], {})


class Case(NamedTuple):
    """What a worker is sent."""

    number: int
    rank: int
    world: int
    port: int
    timeout: float
    call: bytes


class Answer(NamedTuple):
    """What a worker sends back: the pickle of its result, or a traceback."""

    ok: bool
    value: bytes = b""
    traceback: str = ""


def _serve() -> tuple[int, Any]:
    """The store by which the ranks of all cases find each other, on the loopback interface alone: its port, and it.

    A file costs 10 ms more for each group: those who wait for it look that often.
    """
    import torch.distributed as dist

    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())
    return port, store


def share(key: str, make: Callable[..., Any], *args: Any) -> Any:
    """What `make(*args)` returned to the first rank of the pool that asked for `key`, in any case; others wait for it.

    Beside the pool each asker makes its own.
    """
    if STORE_PORT not in os.environ:
        return make(*args)
    store = _join(int(os.environ[STORE_PORT]))
    if store.add(f"asked for {key}", 1) == 1:
        try:
            store.set(key, pickle.dumps(Answer(True, pickle.dumps(make(*args)))))
        except BaseException:
            store.set(key, pickle.dumps(Answer(False, traceback=traceback.format_exc())))
            raise
    answer: Answer = pickle.loads(store.get(key))
    assert answer.ok, f"the rank that was to make {key} failed:\n{answer.traceback}"
    return pickle.loads(answer.value)


@functools.cache
def _join(port: int) -> Any:
    """A worker's connection to it, made once: that costs more than a case."""
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", port, is_master=False)


def _answer(end: Any, worker: Worker) -> Answer:
    try:
        answer: Answer = pickle.loads(end.recv_bytes())
    except EOFError:
        worker.process.join(5)
        text = f"the process ended with exit code {worker.process.exitcode}\n{worker.stack()}"
        return Answer(False, traceback=text)
    return answer


def _work(jobs: Connection, results: Connection, stacks: Path) -> None:
    """The life of a worker: cases until the pipe ends."""
    import torch

    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("default")  # errors in the test process only
    os.environ |= {"DITILE_CHECK": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    gc.freeze()  # what was imported is not looked through again
    with stacks.open("w") as file:
        faulthandler.enable(file)
        faulthandler.register(STACK_SIGNAL, file, all_threads=True)
        with contextlib.suppress(EOFError):
            while True:
                case = pickle.loads(jobs.recv_bytes())
                results.send_bytes(pickle.dumps(_run(case)))


def _run(case: Case) -> Answer:
    import torch
    import torch.distributed as dist

    os.environ |= {"RANK": str(case.rank), "LOCAL_RANK": str(case.rank), "WORLD_SIZE": str(case.world)}
    os.environ[STORE_PORT] = str(case.port)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(str(case.number), _join(case.port)),
            rank=case.rank,
            world_size=case.world,
            timeout=datetime.timedelta(seconds=case.timeout + 60),  # the pool notices first
        )
        fn, args = pickle.loads(case.call)
        torch.manual_seed(0)
        # A case before may have computed in another type.
        torch.set_default_dtype(torch.float32)
        value = pickle.dumps(fn(*args))
        dist.barrier()  # a rank that left before its peers were done would break their connections
        dist.destroy_process_group()
        gc.collect()  # runners are cycles, and the threads of each group in one wake up a hundred times a second
        return Answer(True, value)
    except BaseException:  # SystemExit and pytest's Failed too: the parent shows whatever ended the case
        text = io.StringIO()
        traceback.print_exc(file=text)
        return Answer(False, traceback=text.getvalue())

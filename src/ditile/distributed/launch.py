"""Start the ranks of one machine: `launch(fn, ranks)` runs `fn` in each and returns what each of them returned.

    images = launch(generate, 4, (plan, prompt))

Each rank is a new process with an initialised `torch.distributed` group. No process or file outlives the call. (A
parent that is killed by SIGKILL leaves small files in the temporary directory, but no process.) Arguments and results
travel as pickles over anonymous pipes that no other user can open.

Why it uses neither torchrun nor `start_processes` of `torch.distributed.elastic.multiprocessing`: these return values
and errors too. But they neither end a run without progress, nor show the stacks of all ranks when one hangs, nor name
the rank that failed first where others saw its connection break. And they import torch in the parent, which `launch`
never does. For many machines use torchrun.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import functools
import multiprocessing.spawn
import os
import pickle
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from ditile.distributed import cpus, env
from ditile.distributed.env import RankPlace
from ditile.distributed.failure_detection import LaunchLimits, RankResult
from ditile.distributed.files import guard_standard_stream, open_closed_streams
from ditile.distributed.heartbeat import describe_error, die_with_parent, send_heartbeats
from ditile.distributed.private_network import create_private_network, join_user_space, make_groups
from ditile.distributed.supervise import HEADER, STACK_SIGNAL, RankProcess, terminate_ranks, watch_ranks
from ditile.plan.errors import PlanError, StateError
from ditile.plan.option_classes import Count, Seconds, checked


@checked(PlanError)
def launch(
    fn: Callable[..., Any],
    ranks: Count,
    args: tuple[Any, ...] | list[Any] = (),
    *,
    threads: Count | None = None,
    stall_timeout: Seconds = 600.0,
    progress: Callable[[int, int], None] | None = None,
    limits: LaunchLimits | None = None,
    links: Sequence[int] | None = None,
    check: Callable[[], None] | None = None,
    local_ranks: tuple[int, int] | None = None,
) -> list[Any]:
    """Run `fn(*args)` in each of `ranks` new processes, and return the results in the order of the ranks.

    Args:
        fn: a function that can be imported by its module and name, from a script's `__main__` too.
        ranks: how many processes; where there are as many GPUs, each has its own.
        args: the arguments of `fn`, the same in every rank.
        threads: torch threads of each rank; by default the cores are split evenly.
        stall_timeout: seconds without progress of any rank after which the run is ended.
        progress: called in this process as `progress(rank, reports)` when a rank has reported progress, with the number
            of reports since the last call. A rank reports each micro-step of a runner, and each tensor that it reads.
        limits: the other time limits; `stall_timeout` replaces its `stall`.
        links: file descriptors of this process, one for each rank, which finds its own by `env.read_link_fd`.
        check: called at least ten times a second in this process; what it raises ends the run.
        local_ranks: if other runs share this machine, the place of rank 0 among the ranks of all runs, and the number
            of these ranks. Each rank takes a GPU and cores by its place.

    Raises:
        PlanError: if `ranks`, `threads` or `stall_timeout` is out of range, or a rank raised one.
        StateError: if `fn` or `args` cannot be sent, or this process is itself a rank; or a rank raised one.
        ModelError, LoadError: if a rank raised one.
        RankError: if a rank failed in any other way; it names the first one that failed.
    """
    open_closed_streams()
    first_local_rank, local_world = local_ranks or (0, ranks)
    threads = threads or max(1, cpus.count_usable_cores() // local_world)
    if env.read_progress_fd() is not None and not env.is_under_torchrun():
        raise StateError(
            "launch() was called inside a rank; call it once, in a script under `if __name__ == '__main__':`"
        )
    job = _pickle_call(fn, args)
    prepare = _find_main_module(job, getattr(fn, "__name__", "fn")) | {"sys_argv": sys.argv}
    times = dataclasses.replace(limits or LaunchLimits(), stall=float(stall_timeout))
    started: list[RankProcess] = []
    with (
        unwind_on_signals() as check_interrupt,
        tempfile.TemporaryDirectory(prefix="ditile-") as directory,
        create_private_network() as network,
    ):
        network_fds = network or ()
        checks = [check_interrupt]
        if check is not None:
            checks.append(check)
        try:
            for number in range(ranks):
                place = RankPlace(number, ranks, first_local_rank + number, local_world, threads)
                rank_call = f"run_rank_process({tuple(place)}, {directory!r}, {network_fds}, {prepare})"
                code = f"import sys; sys.path[:] = {sys.path}; from {__name__} import run_rank_process; {rank_call}"
                command = (sys.executable, "-c", code, "ditile-rank", str(number))
                link = None if links is None else links[number]
                descriptors = network_fds if link is None else (*network_fds, link)
                environ = functools.partial(env.build_rank_environment, place, directory, link)
                stacks = Path(directory, f"stacks-{number}")
                started.append(RankProcess(number, command, environ, job, stacks, descriptors))
            return watch_ranks(started, times, progress, checks)
        finally:
            terminate_ranks(started, times)
            # The next print begins a new line, also if a rank left a progress bar open.
            if Path(directory, _OPEN_LINE).exists():
                print(file=sys.stderr, flush=True)


def run_rank_process(
    numbers: Sequence[int],
    directory: str,
    descriptors: Sequence[int],
    prepare: dict[str, Any],
) -> None:
    """Run a rank from its start to its end. Its command line ends with the numbers of its three pipes."""
    place = RankPlace(*numbers)
    # This comes before there is a second thread: a process with several cannot enter a user namespace.
    network = _join_network(descriptors)
    control, report, heartbeats = map(int, sys.argv[-3:])
    guard_standard_stream("stderr", 2)
    # A Ctrl-C reaches all processes of a terminal; the parent alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    # What the rank starts must not keep the pipes open after the rank has ended.
    for fd in (control, report, heartbeats):
        os.set_inheritable(fd, False)
    with open(Path(directory, f"stacks-{place.rank}"), "w") as stacks:
        faulthandler.enable(stacks)
        faulthandler.register(STACK_SIGNAL, stacks, all_threads=True)
        size = int.from_bytes(_read_bytes(control, HEADER), "little")
        job = _read_bytes(control, size)
        dismissed = threading.Event()
        threading.Thread(target=_wait_for_dismissal, args=(control, dismissed), daemon=True).start()
        threading.Thread(target=send_heartbeats, args=(heartbeats,), daemon=True).start()
        try:
            # This comes before the imports of the script: the parent has shown these complaints already.
            env.drop_import_complaints()
            multiprocessing.spawn.prepare(prepare)
            _set_up_process_group(place, directory, network)
            fn, args = pickle.loads(job)
            del job
            outcome = pickle.dumps(RankResult(fn(*args)), pickle.HIGHEST_PROTOCOL)
        # SystemExit is caught too: whatever ends a rank must be reported.
        except BaseException as error:
            outcome = pickle.dumps(describe_error(error))
        # The result is not lost if the reader of the standard output has gone.
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        with open(report, "wb") as pipe:
            pipe.write(len(outcome).to_bytes(HEADER, "little"))
            pipe.write(outcome)
        # The connections stay open until all ranks are done: a peer that sees them closed would fail as well.
        dismissed.wait()
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
        # The handler must be off before its file is closed.
        faulthandler.disable()


def _join_network(descriptors: Sequence[int]) -> int | None:
    """Return the descriptor of the run's private network, if this process may enter the network."""
    for fd in descriptors:
        os.set_inheritable(fd, False)
    # A network that root made belongs to no other user namespace.
    if descriptors and (len(descriptors) == 1 or join_user_space(descriptors[1])):
        return descriptors[0]
    return None


def _set_up_process_group(place: RankPlace, directory: str, network: int | None) -> None:
    import torch
    import torch.distributed as dist

    from ditile.distributed import backend as backends

    # The first report says that this rank has started: from now on shorter limits apply.
    env.report_progress()
    rank = place.rank
    world = place.world
    device = backends.pick_device(None, place.local_rank)
    if device.type == "cpu":
        pin_to_own_cores(place.local_rank, place.local_world, place.threads)
    torch.set_num_threads(place.threads)
    backends.make_device_current(device)
    store = dist.FileStore(str(Path(directory, "store")), world)  # type: ignore[attr-defined]
    store.set_timeout(backends.PEER_TIMEOUT)
    # All ranks enter the private network or none does: otherwise they could not reach each other.
    store.set(f"network-{rank}", str(network is not None))
    if not all(store.get(f"network-{peer}") == b"True" for peer in range(world)):
        network = None
    env.set_network_fd(network)
    with make_groups():
        backend = backends.choose_backend(store, rank, world, device)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=backends.PEER_TIMEOUT)


def pin_to_own_cores(number: int, world: int, threads: int) -> None:
    """Pin a rank to its own cores, if the ranks fill all cores. Otherwise the system may move it."""
    # A rank that is moved to a core of another one makes the whole pipeline wait. Where cores are to spare, other
    # programs may run on them.
    cores = cpus.list_usable_cores()
    if sys.platform == "linux" and world * threads <= len(cores) < (world + 1) * threads:
        os.sched_setaffinity(0, cores[number * threads : (number + 1) * threads])


def _wait_for_dismissal(control: int, dismissed: threading.Event) -> None:
    """Wait for the byte that lets this rank leave. Ends the process if the parent has gone."""
    if not os.read(control, 1):
        os._exit(1)
    dismissed.set()


def _read_bytes(fd: int, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = os.read(fd, min(count - len(data), 1 << 20))
        if not part:
            # The parent is gone, so there is no process to report to.
            os._exit(1)
        data += part
    return bytes(data)


def _pickle_call(fn: Callable[..., Any], args: Sequence[Any]) -> bytes:
    """Return the frame of a call.

    Plain pickle is used, since multiprocessing's would send tensors through shared memory.
    """
    try:
        payload = pickle.dumps((fn, args), pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise StateError(
            f"fn={fn!r} cannot be sent to other processes: {error}; "
            f"give a function at the top of a module, and arguments that can be pickled"
        ) from error
    return len(payload).to_bytes(HEADER, "little") + payload


def _find_main_module(job: bytes, name: str) -> dict[str, str]:
    """Return the arguments by which `multiprocessing.spawn.prepare` finds the parent's `__main__`. Empty if `job` needs
    none.

    Raises:
        StateError: if `__main__` is in no file. The message names the function, `name`.
    """
    # A pickle names the module of each function and class in it.
    if b"__main__" not in job:
        return {}
    main = sys.modules["__main__"]
    # A script that was started by `python -m` has a spec.
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return {"init_main_from_name": spec.name}
    path = getattr(main, "__file__", None)
    if path is None or not Path(path).exists():
        raise StateError(
            f"fn={name!r} or one of its arguments is defined in a notebook or an interactive session, from which ranks "
            "cannot import it; write it in a file, such as a cell that begins with %%writefile draw.py, and call "
            f"launch(draw.{name}, ..) after import draw; or start ditile serve and generate over HTTP"
        )
    return {"init_main_from_path": str(Path(path).absolute())}


@contextlib.contextmanager
def unwind_on_signals() -> Iterator[Callable[[], None]]:
    """Make SIGTERM and SIGHUP raise SystemExit while ranks run, so that no process or file is left.

    Yields a function that raises KeyboardInterrupt after a Ctrl-C that was lost. (Python prints an exception in a
    destructor and goes on.)
    """
    interrupted = threading.Event()

    def exit_on_signal(number: int, frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    def raise_interrupt(number: int, frame: FrameType | None) -> NoReturn:
        interrupted.set()
        raise KeyboardInterrupt

    def check_interrupt() -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt

    handlers = {signal.SIGTERM: exit_on_signal, signal.SIGHUP: exit_on_signal, signal.SIGINT: raise_interrupt}
    previous_handlers: dict[signal.Signals, Any] = {}
    # Python lets only the main thread set handlers.
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            previous = signal.getsignal(number)
            # A handler that the user's program has set stays.
            if previous in (signal.SIG_DFL, signal.default_int_handler):
                previous_handlers[number] = previous
                signal.signal(number, handler)
    try:
        yield check_interrupt
    finally:
        for number, previous in previous_handlers.items():
            signal.signal(number, previous)


_OPEN_LINE = "open-line"


@contextlib.contextmanager
def mark_open_line(*, shown: bool = True) -> Iterator[None]:
    """Tell the parent of this rank that a progress bar stands on the last line. A killed rank does not end that
    line."""
    folder = env.read_shared_directory()
    if folder is None or not shown:
        yield
        return
    mark = folder / _OPEN_LINE
    mark.touch()
    try:
        yield
    finally:
        mark.unlink(missing_ok=True)

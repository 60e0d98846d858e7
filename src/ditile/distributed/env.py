"""Environment variables. This is the only module that reads `os.environ`.

DITILE_CHECK=1          every attention asserts that the ages of its keys are what the schedule says; recorded steps
                        check each copy that they leave out; sent differences carry digests of their bases
DITILE_CUDA_GRAPHS=0    nothing is recorded as CUDA graphs, whatever `cuda_graphs` says
DITILE_PROGRESS_FD      set by `launch`, and by ranks under torchrun: a file descriptor to the rank's watcher
DITILE_NETWORK_FD       set by ranks of `launch`: a file descriptor of the run's private network
DITILE_DIRECTORY        set by `launch`: a folder for files that its ranks share, removed when the run is over
DITILE_PROFILE          where `ditile calibrate` keeps its measurements of this machine
DITILE_API_KEY          the key that `ditile serve` asks for if --api-key names no file
DITILE_LINK_FD          set by `launch`: the file descriptor of a rank's link to its parent, or empty
XDG_CACHE_HOME, XDG_STATE_HOME   the user's folders for caches and for data
GRADIO_ANALYTICS_ENABLED, HF_HUB_DISABLE_TELEMETRY   set by `ditile serve`, for its page
RAY_USAGE_STATS_ENABLED, RAY_ENABLE_AUTO_CONNECT     0 for `ditile serve --ray`, unless they are set
TRANSFORMERS_VERBOSITY  "error" for the command line, unless it is set
RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT   set by torchrun and by `launch`
TORCHELASTIC_RUN_ID     set by torchrun
GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME   set for ranks that ditile starts: the network interface
OMP_NUM_THREADS         set by `launch`: the threads of a rank
OMP_WAIT_POLICY         "passive" for ditile's processes, unless it, GOMP_SPINCOUNT or KMP_BLOCKTIME is set
CUDA_DEVICE_MAX_CONNECTIONS   32 for the ranks that `launch` starts, unless it is set
GLIBC_TUNABLES          `launch` adds the glibc.malloc settings that it lacks, for the ranks that it starts
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ditile.plan.errors import PlanError, StateError
from ditile.plan.plan import Plan

DEVICE_QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
"""With fewer queues than streams, a kernel may queue behind a receive that waits for another rank."""
_PLACE_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


class Torchrun(NamedTuple):
    """The place of this process among the processes that torchrun (or `ditile.launch`) started.

    Attributes:
        rank, world: among all processes that were started together.
    """

    rank: int
    world: int
    local_rank: int


def should_check_key_ages() -> bool:
    """Return whether `DITILE_CHECK=1` asks for its checks, such as the one on the ages of keys."""
    return os.environ.get("DITILE_CHECK", "0") not in ("", "0")


def forbids_cuda_graphs() -> bool:
    """Return whether `DITILE_CUDA_GRAPHS=0` switches recorded steps off.

    Raises:
        StateError: if it is anything but 0 or 1.
    """
    text = os.environ.get("DITILE_CUDA_GRAPHS", "")
    if text not in ("", "0", "1"):
        raise StateError(f"DITILE_CUDA_GRAPHS={text[:20]!r} of the environment is not 0 or 1; unset it")
    return text == "0"


def find_profile_path() -> Path:
    """Return the path of this machine's profile."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("DITILE_PROFILE") or cache / "ditile" / "profile.json")


def find_data_folder() -> Path:
    """Return the folder for data of this user that outlives a program."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "ditile"


def read_api_key() -> str | None:
    """Return the key that a server asks for. None if the environment has none."""
    return os.environ.get("DITILE_API_KEY") or None


def set_page_variables() -> None:
    """Make Gradio send no statistics. This must be called before Gradio is imported."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"


def read_link_fd() -> int | None:
    """Return the descriptor of this rank's link to its parent; None without a link."""
    return _read_number("DITILE_LINK_FD")


def _read_number(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text else None


def read_torchrun_place() -> Torchrun | None:
    """Read this process's place from torchrun's variables. None outside torchrun, and where they name only one process.

    A script that sets the variables itself may leave out LOCAL_RANK, which is then RANK.

    Raises:
        PlanError: if the variables do not name a rank.
    """
    values = {}
    for name in _PLACE_VARIABLES:
        if name in os.environ:
            values[name] = os.environ[name].strip()
    if "RANK" not in values or "WORLD_SIZE" not in values:
        return None
    numbers = {}
    for name, value in values.items():
        # Longer numbers are not ranks, and Python refuses to read thousands of digits.
        if value.isdecimal() and len(value) < 10:
            numbers[name] = int(value)
    if numbers.keys() != values.keys() or numbers["RANK"] >= numbers["WORLD_SIZE"]:
        listed = ", ".join(f"{name}={value[:20]!r}" for name, value in values.items())
        raise PlanError(
            f"{listed} of the environment do not make a rank among ranks; unset them, or start with torchrun"
        )
    if numbers["WORLD_SIZE"] == 1:
        # Containers and schedulers set both variables also for a single process.
        return None
    return Torchrun(numbers["RANK"], numbers["WORLD_SIZE"], numbers.get("LOCAL_RANK", numbers["RANK"]))


def check_torchrun_world(plan: Plan) -> None:
    """Raise `PlanError` unless a plan uses all ranks that torchrun's variables promise. The error names the
    variables."""
    place = read_torchrun_place()
    if place is None or place.world == plan.world:
        return
    try:
        plan.check_world(place.world)
    except PlanError as error:
        raise PlanError(
            f"{error}; RANK={place.rank} and WORLD_SIZE={place.world} are in the environment: unset them if torchrun "
            "did not start this process"
        ) from None


def describe_master() -> str:
    """Return the meeting place of torchrun's ranks, as host:port."""
    return f"{os.environ.get('MASTER_ADDR', '(no MASTER_ADDR)')}:{os.environ.get('MASTER_PORT', '(no MASTER_PORT)')}"


def read_master_address() -> str:
    """Return the address where ranks meet: MASTER_ADDR, or this machine's own."""
    return os.environ.get("MASTER_ADDR", "127.0.0.1")


def is_first_on_host() -> bool:
    """Return whether this process is the first that torchrun started on this machine, or torchrun did not start it."""
    return not is_under_torchrun() or os.environ.get("LOCAL_RANK", "0") == "0"


def read_local_world() -> int | None:
    """Return the number of ranks that torchrun has started on this machine. None if the environment does not say."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdigit() else None


def read_launched_local_rank() -> int | None:
    """Return the place of this rank of `launch` among the ranks of this machine. None in another process."""
    if read_shared_directory() is None:
        return None
    return int(os.environ["LOCAL_RANK"])


def read_progress_fd() -> int | None:
    """Return the file descriptor for this rank's reports to its watcher. None if it has no watcher."""
    # A user may have exported it from a rank by mistake.
    text = os.environ.get("DITILE_PROGRESS_FD", "")
    if text and not (text.isdecimal() and len(text) < 10):
        raise StateError(f"DITILE_PROGRESS_FD={text[:20]!r} of the environment is not a whole number; unset it")
    return int(text) if text else None


def read_shared_directory() -> Path | None:
    """Return the folder that the ranks of a `launch` share. None outside `launch`."""
    text = os.environ.get("DITILE_DIRECTORY", "")
    return Path(text) if text else None


IMPORT_COMPLAINTS = {
    "torchao": "Failed to load ",
    "torch.utils._pytree": " is an Enum subclass",
    "diffusers.quantizers.torchao.torchao_quantizer": "Unable to import `torchao`",
    "transformers.utils.import_utils": "requires torchvision (not installed)",
}
"""Logger -> a part of its complaint when diffusers imports torchao and transformers. They are harmless: torchao's
missing kernels are not used, and images are prepared without torchvision."""


class PhraseFilter(NamedTuple):
    """A filter of a logger that drops messages with a phrase."""

    phrase: str

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is kept."""
        return self.phrase not in str(record.msg)


def silence_library_imports() -> None:
    """Silence imports of transformers and torchao, in this process and in those that it starts.

    It is for the command line: a user's script may want to see the messages of transformers.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    drop_import_complaints()


WAITING = {"OMP_WAIT_POLICY": "passive"}
"""How OpenMP's threads wait for each other, unless the user chooses. A spinning thread occupies a core that another
thread needs: with two threads and other programs on two cores, passes of an MLP took 4 to 45 times as long."""


def prefer_passive_waiting() -> None:
    """Let threads of this process sleep while they wait for each other. This must come before torch is imported."""
    os.environ.update(_choose_waiting())


def has_no_wait_policy() -> bool:
    """Return whether no OpenMP wait variable is set; OpenMP threads then spin."""
    return bool(_choose_waiting())


def _choose_waiting() -> dict[str, str]:
    # The user has chosen by one of the variables of GNU's or LLVM's OpenMP.
    if not os.environ.keys().isdisjoint(("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")):
        return {}
    return WAITING


def drop_import_complaints() -> None:
    """Drop messages that torchao and transformers log when diffusers imports them. Other messages are kept."""
    for name, phrase in IMPORT_COMPLAINTS.items():
        logging.getLogger(name).addFilter(PhraseFilter(phrase))


@contextlib.contextmanager
def redirect_native_stdout() -> Iterator[None]:
    """Send the standard output of torch's native code to standard error, while process groups are made.

    gloo in torch 2.9 prints its connections, and standard output may be JSON that a program reads.
    """
    try:
        saved_stdout = os.dup(1)
    except OSError:  # there is no standard output
        yield
        return
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(saved_stdout, 1)
        os.close(saved_stdout)


def report_progress() -> None:
    """Report progress of this rank to its watcher. Does nothing without a watcher."""
    send_to_watcher(b".")


def send_to_watcher(data: bytes) -> None:
    """Send bytes of `heartbeat` to this rank's watcher: `launch`'s parent, or `torchrun_watcher`'s process."""
    fd = read_progress_fd()
    if fd is not None:
        os.write(fd, data)


def read_network_fd() -> int | None:
    """Return the descriptor of the private network of a run of `launch`; None without such a network."""
    return _read_number("DITILE_NETWORK_FD")


def set_network_fd(fd: int | None) -> None:
    """Set or forget the descriptor of the private network."""
    os.environ["DITILE_NETWORK_FD"] = "" if fd is None else str(fd)


def set_progress_fd(fd: int) -> None:
    """Set the descriptor on which this rank reports progress, under torchrun."""
    os.environ["DITILE_PROGRESS_FD"] = str(fd)


def is_under_torchrun() -> bool:
    """Return whether torchrun started this process, or an ancestor of it."""
    return "TORCHELASTIC_RUN_ID" in os.environ


MALLOC = {"hugetlb": 1, "mmap_threshold": 2**25, "trim_threshold": 2**29}
"""glibc's malloc settings in ranks, unless GLIBC_TUNABLES says otherwise. Huge pages: with small pages the speed of a
matrix product depends on which pages a process got, by up to 15 % on one core. Up to 512 MiB stay allocated: memory
returned to the system after an operation must be mapped again for the next one."""


def _merge_malloc_tunables() -> str:
    user_tunables = os.environ.get("GLIBC_TUNABLES", "")
    tunables = [user_tunables] if user_tunables else []
    for name, value in MALLOC.items():
        if f"malloc.{name}=" not in user_tunables:
            tunables.append(f"glibc.malloc.{name}={value}")
    return ":".join(tunables)


class RankPlace(NamedTuple):
    """The place of a rank that `launch` starts.

    Attributes:
        rank, world: among the ranks of its run.
        local_rank, local_world: among the ranks on this machine: under `launch` those of all runs, and in a cluster
            only those of its own run.
        threads: number of CPU threads it may use.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    threads: int


def build_rank_environment(rank: RankPlace, directory: str, link_fd: int | None, progress_fd: int) -> dict[str, str]:
    """Build the whole environment of a rank that `launch` starts."""
    # Connections stay on the loopback device, even if variables of a multi-host run are still exported.
    interface = "lo0" if sys.platform == "darwin" else "lo"
    # An empty value replaces a number that this process may have inherited.
    link = "" if link_fd is None else str(link_fd)
    own = {
        "DITILE_PROGRESS_FD": str(progress_fd),
        "DITILE_DIRECTORY": directory,
        "DITILE_LINK_FD": link,
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": str(rank.threads),
    }
    return DEVICE_QUEUES | os.environ | _choose_waiting() | _build_place_variables(*rank[:4], interface) | own


def set_actor_place(place: RankPlace, master: str, port: int, interface: str) -> None:
    """Give this process, an actor of a cluster, the place of a rank. This must come before it joins the others.

    Args:
        place: the place of this process.
        master, port: where the ranks meet.
        interface: the network interface for connections to the other ranks.
    """
    meeting = {"MASTER_ADDR": master, "MASTER_PORT": str(port)}
    os.environ.update(_build_place_variables(*place[:4], interface) | meeting)


def build_actor_environment() -> dict[str, str]:
    """Build the variables that a process must have before it starts, if it is to become a rank."""
    return _choose_waiting() | {"GLIBC_TUNABLES": _merge_malloc_tunables()}


def has_one_device_queue() -> bool:
    """Return whether all streams of a GPU share one queue, as with Megatron's settings."""
    return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"


def prepare_ray() -> None:
    """Keep Ray from sending statistics, unless the user chose, and from connecting to a cluster by itself.

    It must be called before Ray is imported.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Otherwise a call of Ray after `ray.shutdown` would connect again.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")


def _build_place_variables(rank: int, world: int, local_rank: int, local_world: int, interface: str) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_world),
        "GLIBC_TUNABLES": _merge_malloc_tunables(),
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
    }

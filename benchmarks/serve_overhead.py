"""What `ditile serve` costs beside `runner(...)`: the same picture by a runner here and by a server, in turns.

    python -m benchmarks.serve_overhead --steps 10 --size 192 --pairs 12

Both draw with one rank of one thread, and only one of them draws at a time. Each is first in every other pair. The
seconds of the server are those of its client, from the request to the picture that it has decoded from the answer;
those of the runner are of the call alone, which ends with a picture in memory and writes no file. CPU seconds are of
the process that draws; of the server also those of its own process.
"""

from __future__ import annotations

import argparse
import base64
import io
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
from PIL import Image

from benchmarks.serve_load import find_ranks
from ditile.plan.flag_parser import add_arguments, collect_arguments
from ditile.plan.option_classes import define_option
from ditile.plan.plan import Plan
from ditile.runner.model_files import defaults
from ditile.runner.requests.arguments import build_call_arguments, build_object_arguments
from ditile.runner.requests.cache_options import CacheOptions
from ditile.runner.requests.options import GenerateOptions
from ditile.runner.requests.prepare import prepare_runner
from ditile.serve.options import ServeOptions
from ditile_lab.rows import write_json_file
from tests.serve.running import RunningServer, run_server

PROMPT = "a large red circle on the left on a gray background"


@dataclass(frozen=True, kw_only=True, slots=True)
class OverheadJob:
    """The picture that is drawn, and how often."""

    model: str = define_option("shapes-flux", "the model")
    steps: int = define_option(10, "denoising steps")
    size: int = define_option(192, "height and width in pixels")
    pairs: int = define_option(12, "pictures of each, by turns")


class TakenTime(NamedTuple):
    """What a picture took.

    Attributes:
        wall: seconds.
        cpu: seconds of CPUs in the processes that drew it.
    """

    wall: float
    cpu: float


def build_runner_call(wanted: OverheadJob) -> Callable[[int], Image.Image]:
    """A function that draws the picture of a seed by a runner in this process."""
    engine = ServeOptions(model=wanted.model, threads=1)
    pipe, runner = prepare_runner(wanted.model, engine, Plan(), CacheOptions())
    pipe.set_progress_bar_config(disable=True)

    def draw(seed: int) -> Image.Image:
        options = GenerateOptions(
            model=wanted.model, prompt=PROMPT, steps=wanted.steps, height=wanted.size, width=wanted.size, seed=seed
        )
        call = build_call_arguments(pipe, options, defaults(wanted.model))
        image: Image.Image = runner(**call, **build_object_arguments(pipe, options, [seed])).images[0]
        return image

    return draw


def ask_for_picture(client: httpx.Client, wanted: OverheadJob, seed: int) -> Image.Image:
    """The picture of a seed by the server."""
    body = {"prompt": PROMPT, "seed": seed, "num_inference_steps": wanted.steps, "size": f"{wanted.size}x{wanted.size}"}
    answer = client.post("/v1/images/generations", json=body)
    answer.raise_for_status()
    image = Image.open(io.BytesIO(base64.b64decode(answer.json()["data"][0]["b64_json"])))
    image.load()
    return image


def take_time(
    draw: Callable[[int], Image.Image], seed: int, processes: list[psutil.Process]
) -> tuple[TakenTime, Image.Image]:
    """Draws the picture of a seed; returns what it took, and the picture."""
    cpu = sum_cpu_seconds(processes)
    began = time.perf_counter()
    image = draw(seed)
    return TakenTime(time.perf_counter() - began, sum_cpu_seconds(processes) - cpu), image


def sum_cpu_seconds(processes: list[psutil.Process]) -> float:
    """CPU seconds that processes have used so far."""
    times = [process.cpu_times() for process in processes]
    return sum(each.user + each.system for each in times)


def measure_pairs(wanted: OverheadJob, server: RunningServer) -> dict[str, list[TakenTime]]:
    """What each picture took, by who drew it.

    Raises:
        AssertionError: if the two pictures of a pair differ.
    """
    own = psutil.Process(server.process.pid)
    processes = {"runner": [psutil.Process()], "server": [own, *find_ranks(server)]}
    draw = build_runner_call(wanted)
    taken = {"runner": list[TakenTime](), "server": list[TakenTime]()}
    with server.client() as client:
        ways: dict[str, Callable[[int], Image.Image]] = {
            "runner": draw,
            "server": lambda seed: ask_for_picture(client, wanted, seed),
        }
        for pair in range(-1, wanted.pairs):  # the first is not counted
            pictures = []
            for way in sorted(ways, reverse=bool(pair % 2)):
                one, image = take_time(ways[way], pair + 1, processes[way])
                pictures.append(image.tobytes())
                if pair >= 0:
                    taken[way].append(one)
            assert pictures[0] == pictures[1], f"the pictures of pair {pair} differ"
    return taken


def summarize_pairs(taken: dict[str, list[TakenTime]]) -> dict[str, Any]:
    """Medians of the seconds, and by what part the server takes more: the median of the pairs' ratios, less 1."""
    found: dict[str, Any] = {"pairs": len(taken["runner"])}
    for kind in TakenTime._fields:
        values = {way: [getattr(one, kind) for one in ones] for way, ones in taken.items()}
        found |= {f"{way}_{kind}_s": statistics.median(ones) for way, ones in values.items()}
        ratios = [server / runner for runner, server in zip(values["runner"], values["server"], strict=True)]
        found[f"more_{kind}"] = statistics.median(ratios) - 1
    return found


def format_table(found: dict[str, Any]) -> str:
    """The table for people."""
    lines = [f"{found['pairs']} pairs{'':>10}{'runner':>10}{'server':>10}{'more':>10}"]
    for kind, title in (("wall", "seconds"), ("cpu", "CPU seconds")):
        runner = found[f"runner_{kind}_s"]
        server = found[f"server_{kind}_s"]
        lines.append(f"{title:18}{runner:10.3f}{server:10.3f}{found[f'more_{kind}']:+10.1%}")
    return "\n".join(lines)


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, OverheadJob, title="overhead")
    parser.add_argument("--out", type=Path, help="write it as JSON", metavar="FILE")
    given = parser.parse_args()
    wanted = OverheadJob(**collect_arguments(OverheadJob, given))
    with (
        tempfile.TemporaryDirectory(prefix="ditile-overhead-") as folder,
        run_server(wanted.model, "--threads", "1", state=Path(folder, "state")) as server,
    ):
        found = summarize_pairs(measure_pairs(wanted, server))
    print(format_table(found))
    if given.out is not None:
        write_json_file(given.out, found)


if __name__ == "__main__":
    main()

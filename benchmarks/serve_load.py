"""Load on a real `ditile serve`: clients that leave, ranks and a server that are killed; and what became of each job.

    python -m benchmarks.serve_load --requests 300 --clients 16

A fifth of the clients' requests is given up at a random moment: of a picture the connection is closed, a video is
deleted. Ranks are killed in the first half, and then the server, which is started again on the same state folder.
Memory is compared between the two halves of what follows. It needs Linux, which says what a process has for itself.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import random
import signal
import sqlite3
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from ditile.plan.flag_parser import add_arguments, collect_arguments
from ditile.plan.option_classes import define_option
from tests.serve.running import RunningServer

DRAW = "/v1/images/generations"
VIDEOS = "/v1/videos"
MOST_GROWTH = 0.05
"""Of memory between the two halves of the second half of the requests."""
SAMPLE_SECONDS = 0.5
LOST = httpx.TransportError
"""What a request meets whose server has gone, or has no address yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadJob:
    """What is asked for, and what is killed."""

    model: str = define_option("shapes-pixart", "the model that is served")
    flags: str = define_option("", "further flags of ditile serve, in one word")
    requests: int = define_option(300, "requests")
    clients: int = define_option(16, "clients, each with one request at a time")
    rank_kills: int = define_option(2, "ranks that are killed, in the first half")
    server_kills: int = define_option(1, "times that the server is killed, in the first half")
    steps: int = define_option(2, "most steps of a request")
    size: str = define_option("32x32", "of the pictures, or of the frames of a video")
    seed: int = define_option(0, "of what is random")

    @property
    def is_video(self) -> bool:
        """Whether videos are asked for."""
        return "wan" in self.model


@dataclass(slots=True)
class LoadResult:
    """What became of the requests.

    Attributes:
        ends: by request, how its client saw it end: done, failed, left, deleted or cut, the last by a server that went.
        contents: by request, the file that its client got.
        rows: by request, the job in the store.
        reasons: of failures.
        before: rows that had ended when the server was killed.
        samples: by process, (requests that had ended, RSS, PSS) in bytes.
        seconds: of all, and of each request that was answered.
    """

    ends: dict[int, str] = field(default_factory=dict)
    contents: dict[int, bytes] = field(default_factory=dict)
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    before: dict[int, dict[str, Any]] = field(default_factory=dict)
    samples: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)
    seconds: float = 0.0
    waits: list[float] = field(default_factory=list)


class Load:
    """A server, its clients and who kills.

    Args:
        wanted: what to do.
        folder: of the state and the log.
    """

    def __init__(self, wanted: LoadJob, folder: Path) -> None:
        self._wanted = wanted
        self._state = folder / "state"
        self._chance, self.result = random.Random(wanted.seed), LoadResult()
        self._server = self._start_server()
        self._next = iter(range(wanted.requests))
        self._seen: set[psutil.Process] = set()
        self._is_over = False

    def _start_server(self) -> RunningServer:
        # What is accepted must be there to be counted at the end.
        flags = ("--keep-results", "100000", "--threads", "1", *self._wanted.flags.split())
        return RunningServer(self._wanted.model, flags, self._state)

    def run_load(self) -> LoadResult:
        """Runs all of it, and ends the server."""
        try:
            self._server.wait_until_ready()
            asyncio.run(self._run_clients())
            code = self._server.end(signal.SIGTERM)
            assert code == 0, f"the server ended with {code}: {self._server.log[-2000:]}"
            assert "Traceback" not in self._server.log, self._server.log
        finally:
            self._server.end(signal.SIGKILL)
        self.result.rows = read_rows(self._state)
        return self.result

    def find_orphans(self) -> list[psutil.Process]:
        """Processes of servers that have ended, which are left."""
        return psutil.wait_procs(list(self._seen), timeout=5)[1]

    async def _run_clients(self) -> None:
        began = time.monotonic()
        watching = [asyncio.create_task(self._kill_processes()), asyncio.create_task(self._sample_memory())]
        try:
            await asyncio.gather(*(self._run_client() for _ in range(self._wanted.clients)))
        finally:
            self._is_over = True
            await asyncio.gather(*watching)
        self.result.seconds = time.monotonic() - began

    async def _run_client(self) -> None:
        async with httpx.AsyncClient(timeout=300, trust_env=False) as client:
            for number in self._next:
                leaves = self._chance.random() < 0.2
                # Some leave before the job is taken, some in its middle, some while it waits.
                patience = self._chance.choice([0.01, 0.3, 2.0]) * self._chance.random() if leaves else None
                ask = self._ask_for_video if self._wanted.is_video else self._ask_for_picture
                since = time.monotonic()
                self.result.ends[number] = await ask(client, number, patience)
                self.result.waits.append(time.monotonic() - since)

    def _build_body(self, number: int) -> dict[str, Any]:
        steps = self._chance.randint(1, self._wanted.steps)
        body = {"prompt": "a red ring", "seed": number, "num_inference_steps": steps, "size": self._wanted.size}
        return body | ({"num_frames": 1, "output_format": "gif"} if self._wanted.is_video else {})

    async def _post_until_taken(self, client: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> httpx.Response:
        """The answer of a server that has taken the request; none is taken while it starts."""
        while True:
            try:
                answer = await client.post(self._server.url + path, json=body)
            except (httpx.ConnectError, httpx.UnsupportedProtocol):
                await asyncio.sleep(0.2)
                continue
            code = answer.json()["error"]["code"] if answer.status_code >= 400 else None
            if answer.status_code != 429 and code != "not_ready":
                return answer
            await asyncio.sleep(0.2)

    async def _ask_for_picture(self, client: httpx.AsyncClient, number: int, patience: float | None) -> str:
        body = self._build_body(number)
        try:
            # A client that gives up closes its connection.
            answer = await asyncio.wait_for(self._post_until_taken(client, DRAW, body), patience)
        except (TimeoutError, asyncio.TimeoutError):
            return "left"
        except LOST:
            return "cut"
        if answer.status_code == 200:
            self.result.contents[number] = base64.b64decode(answer.json()["data"][0]["b64_json"])
            return "done"
        self.result.reasons[answer.json()["error"]["message"].partition(";")[0]] += 1
        return "failed"

    async def _ask_for_video(self, client: httpx.AsyncClient, number: int, patience: float | None) -> str:
        try:
            answer = await self._post_until_taken(client, VIDEOS, self._build_body(number))
        except LOST:
            return "cut"
        assert answer.status_code == 200, answer.text
        path = f"{VIDEOS}/{answer.json()['id']}"
        until = time.monotonic() + (1e9 if patience is None else patience)
        while True:
            try:
                if time.monotonic() > until:
                    answer = await client.delete(self._server.url + path)
                    # A server that was killed may have deleted it before it could say so.
                    assert answer.status_code in (200, 404), answer.text
                    return "deleted"
                video = (await client.get(self._server.url + path)).json()
                if video["status"] == "completed":
                    answer = await client.get(f"{self._server.url}{path}/content")
                    self.result.contents[number] = answer.content
                    return "done"
            except LOST:
                await asyncio.sleep(0.2)
                continue
            if video["status"] == "failed":
                self.result.reasons[video["error"]["message"].partition(";")[0]] += 1
                return "failed"
            await asyncio.sleep(0.1)

    async def _kill_processes(self) -> None:
        """Kills one thing after another, evenly in the first half of the requests."""
        kills = ["rank"] * self._wanted.rank_kills + ["server"] * self._wanted.server_kills
        for count, target in enumerate(kills, 1):
            while len(self.result.ends) < count * self._wanted.requests // (2 * len(kills) + 1):
                if self._is_over:
                    return
                await asyncio.sleep(0.05)
            if target == "rank":
                while not (ranks := find_ranks(self._server)) and not self._is_over:
                    await asyncio.sleep(0.05)
                for rank in ranks[-1:]:
                    rank.kill()
            else:
                self._server.end(signal.SIGKILL)
                self.result.before = {n: row for n, row in read_rows(self._state).items() if row["ended"]}
                self._server = self._start_server()
                await asyncio.to_thread(self._server.wait_until_ready)

    async def _sample_memory(self) -> None:
        while not self._is_over:
            with suppress(psutil.Error):
                for name, process in self._list_processes():
                    self._seen.add(process)
                    # The key has the process: one that was started again is another.
                    memory = process.memory_full_info()
                    key = f"{name} ({process.pid})"
                    self.result.samples.setdefault(key, []).append((len(self.result.ends), memory.rss, memory.pss))
            await asyncio.sleep(SAMPLE_SECONDS)

    def _list_processes(self) -> Iterator[tuple[str, psutil.Process]]:
        if not self._server.url:
            return  # it starts
        yield "server", psutil.Process(self._server.process.pid)
        for number, rank in enumerate(find_ranks(self._server)):
            yield f"rank {number}", rank


def find_ranks(server: RunningServer) -> list[psutil.Process]:
    """The ranks of a server, in their order."""
    found = []
    with suppress(psutil.Error):
        for process in psutil.Process(server.process.pid).children():
            with suppress(psutil.Error):
                words = process.cmdline()
                if words[3:4] == ["ditile-rank"]:
                    found.append((int(words[4]), process))
    return [process for _, process in sorted(found, key=lambda pair: pair[0])]


def read_rows(state: Path) -> dict[int, dict[str, Any]]:
    """The jobs of a state folder: the seed, which is the number of the request -> columns, and names of its files.

    Raises:
        AssertionError: if a request has two jobs.
    """
    rows: dict[int, dict[str, Any]] = {}
    with closing(sqlite3.connect(state / "jobs.db")) as database:
        database.row_factory = sqlite3.Row
        for row in database.execute("SELECT * FROM jobs"):
            number = json.loads(row["request"])["options"]["seed"]
            assert number not in rows, f"request {number} is two jobs"
            folder = state / "jobs" / row["id"]
            rows[number] = dict(row) | {"files": {path.name: path.read_bytes() for path in folder.glob("*")}}
    return rows


def find_wrong_jobs(result: LoadResult, num_requests: int) -> list[str]:
    """What is not as it must be: jobs that were lost, drawn twice or without a reason, files of other jobs."""
    wrong = [f"request {n} has no end" for n in range(num_requests) if n not in result.ends]
    for number, end in result.ends.items():
        row = result.rows.get(number)
        if row is None:
            # Who left, or lost the server, may have done so before the job was taken.
            if end not in ("left", "cut", "deleted"):
                wrong.append(f"request {number} is {end}, and has no job")
            continue
        wrong += [f"request {number}: {what}" for what in _find_wrong_row(row, end, result.contents.get(number))]
    for number, row in result.before.items():
        now = result.rows.get(number)
        if now is not None and any(now[name] != row[name] for name in ("state", "ended", "attempts", "drawn", "files")):
            wrong.append(f"request {number} had ended, and changed after the server's restart")
    return wrong


def _find_wrong_row(row: Mapping[str, Any], end: str, content: bytes | None) -> Iterator[str]:
    state = row["state"]
    files = row["files"]
    fits = {"done": ("done",), "failed": ("failed",), "deleted": (), "left": ("cancelled", "done", "failed")}
    if state not in fits.get(end, ("done", "failed", "cancelled")):
        yield f"{end} for its client, {state} in the store"
    if (state == "done") != bool(files):
        yield f"{state}, with the files {list(files)}"
    if state == "failed" and not (row["failure"] and json.loads(row["failure"])["message"]):
        yield "failed without a reason"
    if end == "done" and content not in files.values():
        yield "its client has another file than the store"
    if state == "done" and row["kind"] == "image" and row["attempts"] != 1:
        yield f"drawn {row['attempts']} times"


def measure_growth(result: LoadResult, num_requests: int) -> dict[str, tuple[float, float, float, float]]:
    """Memory in the second half of the requests, by process.

    Returns:
        Of RSS and PSS each: MiB in the middle of the third quarter, and by what part the last quarter has more.
    """
    growth = {}
    for name, samples in result.samples.items():
        third = [sample for sample in samples if num_requests // 2 <= sample[0] < 3 * num_requests // 4]
        last = [sample for sample in samples if sample[0] >= 3 * num_requests // 4]
        if len(third) > 1 and len(last) > 1:
            values: list[float] = []
            for kind in (1, 2):
                before, after = (statistics.median(sample[kind] for sample in part) for part in (third, last))
                values += [before / 2**20, after / before - 1]
            growth[name] = (values[0], values[1], values[2], values[3])
    return growth


def format_tables(result: LoadResult, num_requests: int) -> str:
    """The tables, of 80 columns at most."""
    states = Counter(row["state"] for row in result.rows.values())
    lines = [f"{'':14}{'done':>10}{'failed':>10}{'left':>10}{'deleted':>10}{'cut off':>10}{'cancelled':>12}"]
    seen = Counter(result.ends.values())
    counts = [seen[name] for name in ("done", "failed", "left", "deleted", "cut")]
    lines.append(f"{'for clients':14}" + "".join(f"{count:10}" for count in counts) + f"{'':>12}")
    lines.append(f"{'in the store':14}{states['done']:10}{states['failed']:10}{'':30}{states['cancelled']:12}")
    waits = sorted(result.waits)
    lines.append(
        f"{num_requests} requests in {result.seconds:.0f} s; an answer took {statistics.median(waits):.2f} s in the "
        f"middle, {waits[-1]:.1f} s at most"
    )
    lines += [f"{count:4} failed: {reason}"[:80] for reason, count in result.reasons.most_common()]
    lines.append(f"{'second half':22}{'RSS MiB':>10}{'more':>10}{'PSS MiB':>10}{'more':>10}")
    for name, (rss, more, pss, more_pss) in measure_growth(result, num_requests).items():
        lines.append(f"{name:22}{rss:10.1f}{more:10.1%}{pss:10.1f}{more_pss:10.1%}")
    return "\n".join(lines)


def main() -> int:
    """Runs the load and prints the tables; returns 1 if something is not as it must be."""
    parser = argparse.ArgumentParser(description="Load, kills and clients that leave, on a real server.")
    add_arguments(parser, LoadJob, title="load")
    wanted = LoadJob(**collect_arguments(LoadJob, parser.parse_args()))
    with tempfile.TemporaryDirectory(prefix="ditile-load-") as folder:
        result = Load(wanted, Path(folder)).run_load()
    print(format_tables(result, wanted.requests))
    wrong = find_wrong_jobs(result, wanted.requests)
    wrong += [
        f"{name} grew by {max(rss, pss):.1%}"
        for name, (_, rss, _, pss) in measure_growth(result, wanted.requests).items()
        if max(rss, pss) > MOST_GROWTH
    ]
    print("\n".join(wrong) or "nothing lost, nothing twice, memory flat")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())

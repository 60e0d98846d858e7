"""Runs what no commit runs, in parts: `python -m tests.nightly [PART ...]`, which `make nightly` calls.

A part takes at most an hour on two cores. Each writes a line into nightly.txt: the commit, the part, its seconds and
how it ended. Without names, parts that passed on this commit are not run again: a night goes on where it stopped.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "nightly.txt"
HOUR = 3600.0
NO_TESTS = 5
"""The exit code of pytest where it has nothing to run."""
PARTS: Mapping[str, tuple[str, ...]] = {
    "cache": ("tests/cache",),
    "cli": ("tests/cli",),
    "cluster": ("tests/serve/test_ray.py",),
    "distributed": ("tests/distributed",),
    "extras": ("tests/packaging",),
    "lab": ("tests/lab", "tests/training"),
    "model": ("tests/model",),
    "parallel": ("tests/parallel",),
    "pipefusion": ("tests/parallel/pipefusion",),
    "planner": ("tests/plan", "tests/planner"),
    "processes": (
        "tests/distributed/test_launch.py",
        "tests/lab/bench/test_worlds.py",
        "tests/runner/test_slow_loads.py",
        "tests/serve/test_load.py",
    ),
    "recorded": (
        "tests/cache/test_cache_recorded.py",
        "tests/model/test_recorded_changes.py",
        "tests/model/test_recorded_steps.py",
        "tests/planner/test_simulated_gpu.py",
    ),
    "runner": ("tests/runner",),
    "serve": ("tests/serve",),
    "zoo": ("tests/zoo",),
    "zoo-families": ("tests/zoo/test_families.py",),
    "zoo-recorded": ("tests/zoo/test_recorded.py",),
}
"""Part -> folders and files of tests. A file is in the part that names it, or else its nearest folder."""
IN_TURN = {"cluster", "extras", "processes"}
"""Parts whose tests have limits of time, or fill the machine: one test at a time."""
COMMANDS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "commit": (("make", "test"), ("make", "check")),
    "benchmarks": ((sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile", "benchmarks/tests"),),
    "mutants": ((sys.executable, "-m", "tests.mutants"),),
    "faults": ((sys.executable, "-m", "tests.distributed.faulty"),),
}
"""Parts that are other commands."""


def find_part(file: str) -> str | None:
    """Return the part that runs a file of tests."""
    names = {path: part for part, paths in PARTS.items() for path in paths}
    for path in (file, *(parent.as_posix() for parent in Path(file).parents)):
        if path in names:
            return names[path]
    return None


def list_commands(part: str) -> list[tuple[str, ...]]:
    """Return the commands of a part."""
    if part in COMMANDS:
        return [*COMMANDS[part]]
    files = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "tests").rglob("test_*.py"))]
    own = [file for file in files if find_part(file) == part]
    workers = () if part in IN_TURN else ("-n", "2", "--dist", "worksteal")
    return [(sys.executable, "-m", "pytest", *workers, "--suite", "nightly", *own)]


def run_part(part: str) -> str:
    """Run a part and return how it ended."""
    end = time.monotonic() + HOUR
    for command in list_commands(part):
        try:
            done = subprocess.run(command, cwd=ROOT, timeout=end - time.monotonic(), check=False)
        except subprocess.TimeoutExpired:
            return "took more than an hour"
        if done.returncode not in (0, NO_TESTS):
            return "failed"
    return "passed"


def read_commit() -> str:
    """Return the short hash of what is checked out, with a plus where files differ from it."""
    git = ("git", "-C", str(ROOT))
    commit = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True).strip()
    is_changed = subprocess.run([*git, "diff", "--quiet", "HEAD"], check=False).returncode != 0
    return commit + ("+" if is_changed else "")


def list_passed(commit: str) -> set[str]:
    """Return the parts that passed on a commit; none where files were changed since."""
    if not RESULTS.exists() or commit.endswith("+"):
        return set()
    rows = [line.split(maxsplit=3) for line in RESULTS.read_text("utf-8").splitlines()]
    return {part for of, part, _, ending in rows if of == commit and ending == "passed"}


def main(names: Iterable[str]) -> int:
    every = [*COMMANDS, *PARTS]
    asked = [*names]
    unknown = [name for name in asked if name not in every]
    if unknown:
        print(f"there is no part {', '.join(unknown)}; there are {', '.join(every)}", file=sys.stderr)
        return 2
    commit = read_commit()
    passed = list_passed(commit)
    failed = 0
    for part in asked or [part for part in every if part not in passed]:
        print(f"=== {part}", flush=True)
        begin = time.monotonic()
        ending = run_part(part)
        failed += ending != "passed"
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(f"{commit} {part} {time.monotonic() - begin:.0f} {ending}\n")
    print(RESULTS.read_text("utf-8") if RESULTS.exists() else "")
    return min(failed, 1)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

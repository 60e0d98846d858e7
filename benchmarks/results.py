"""Makes the table of docs/results.md from the submissions in benchmarks/data/submitted.

ditile bench --plans "ulysses=2; pipefusion=2 patches=4" --model NAME --submit benchmarks/data/submitted/NAME.json
python -m benchmarks.results
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.page import DOCS, fill_page_blocks
from ditile.distributed import files
from ditile.plan.numbers import format_number
from ditile_lab.bench.submission import Submission, SubmittedRun

SUBMITTED = Path(__file__).parent / "data" / "submitted"
PAGE = DOCS / "results.md"


def read_submissions() -> dict[str, Submission]:
    """Name of each file -> what it has, the newest first."""
    submissions = {}
    for path in SUBMITTED.glob("*.json"):
        submissions[path.name] = Submission.model_validate_json(path.read_text("utf-8"))
    return dict(sorted(submissions.items(), key=lambda item: (item[1].date, item[0]), reverse=True))


def write_results(submissions: dict[str, Submission]) -> str:
    """A heading, the facts and a table for each submission."""
    return "\n".join(line for name, submission in submissions.items() for line in _iterate_lines(name, submission))


def _iterate_lines(name: str, submission: Submission) -> Iterator[str]:
    versions = ", ".join(f"{package} {version}" for package, version in submission.versions.model_dump().items())
    link = f"[{name}](../benchmarks/data/submitted/{name})"
    yield f"\n## {submission.date}, {submission.cards} x {submission.card}: {submission.model}\n"
    yield f"{submission.dtype or 'default type'}, {submission.steps} steps, {versions}; {link}."
    if submission.remark:
        yield f"{submission.remark}."
    yield "\n| size | plan | cache | seconds | speed-up | digest |\n|:--|:--|:--|--:|--:|:--|"
    for run in submission.runs:
        size = "default" if run.height is None else f"{run.width} x {run.height}"
        plan = f"`{run.plan}`" if run.plan else "one rank"
        cache = f"`{run.cache}`" if run.cache else ""
        digest = f"`{run.digest[:12]}`" if run.digest else ""
        speed_up = find_speed_up(submission, run)
        yield f"| {size} | {plan} | {cache} | {format_number(run.seconds)} | {speed_up} | {digest} |"


def find_speed_up(submission: Submission, run: SubmittedRun) -> str:
    """Over the plain pipeline of the same size, if that was measured too."""
    for plain in submission.runs:
        if not plain.plan and not plain.cache and (plain.height, plain.width) == (run.height, run.width):
            return f"{plain.seconds / run.seconds:.2f}x"
    return ""


def main() -> None:
    """Writes the page."""
    block = write_results(read_submissions())
    files.write_atomically(PAGE, fill_page_blocks(PAGE.read_text("utf-8"), {"results": block}))


if __name__ == "__main__":
    main()

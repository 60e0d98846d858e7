"""docs/results.md is what the submitted files say, and each of them is one that `ditile bench --submit` could write."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from benchmarks import results
from benchmarks.page import fill_page_blocks
from ditile_lab.bench.submission import Submission


def test_the_page_is_what_was_submitted() -> None:
    """A failure means: run `python -m benchmarks.results`."""
    submissions = results.read_submissions()
    assert len(submissions) >= 2
    page = results.PAGE.read_text("utf-8")
    assert fill_page_blocks(page, {"results": results.write_results(submissions)}) == page


@pytest.mark.parametrize("path", sorted(results.SUBMITTED.glob("*.json")), ids=lambda path: path.stem)
def test_a_file_is_as_it_is_written(path: results.Path) -> None:
    text = path.read_text("utf-8")
    assert Submission.model_validate_json(text).model_dump_json(indent=1) + "\n" == text


@pytest.mark.parametrize(
    ("field", "value"),
    [("seconds", 0), ("seconds", "nan"), ("plan", "ulisses=2"), ("digest", "abc"), ("user", "ann"), ("height", -1)],
)
def test_what_no_bench_writes_is_refused(field: str, value: object) -> None:
    submission = next(iter(results.read_submissions().values())).model_dump(mode="json")
    submission["runs"][0][field] = value
    with pytest.raises(ValidationError, match=field):
        Submission.model_validate(submission)

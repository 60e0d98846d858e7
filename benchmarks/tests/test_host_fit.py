"""The host of a GPU, fitted to ranks that were measured alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import host_fit
from benchmarks.host_fit import AloneLine, fit_profile, read_alone_lines
from ditile.cli.main import main
from ditile.plan.errors import ModelError
from ditile.planner import hardware
from ditile.planner.profile import Profile

MEASURED = Path(__file__).parents[1] / "data" / "gpu"
H200 = hardware.load_profile("h200-nvlink")
MODEL = "random-flux.1-dev"
"""The sizes of FLUX.1-dev, as the lines of the H200 are of."""


def read_h200_lines(name: str, *, recorded: bool = False) -> list[dict[str, Any]]:
    """Ranks in a file of the script that measured the H200, as `ditile bench --alone` writes them."""
    lines = []
    for text in (MEASURED / f"{name}.jsonl").read_text().splitlines():
        row = json.loads(text)
        if row["part"] != "alone" or row.keys() & {"error", "cuda_graphs", "compile", "family"}:
            continue
        line = {"model": MODEL, "plan": row["plan"], "rank": row["rank"], "steps": row["steps"], "recorded": recorded}
        line |= {"height": row["px"], "width": row["px"], "step_s": row["step_s"], "messages": row["messages_step"]}
        lines.append(line | {"machine": {"gpus": ["NVIDIA H200"]}})
    return lines


def write_lines(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_host_of_an_h200_is_fitted(tmp_path: Path) -> None:
    """A failure means another fit than that of the profile which comes with the package."""
    rows = read_h200_lines("h200-alone") + read_h200_lines("h200-alone-2")
    base = replace(H200, block_s=0.0, link=replace(H200.link, call_s=0.0))
    fitted = fit_profile(base, read_alone_lines(write_lines(tmp_path / "alone.jsonl", rows)))
    assert fitted.block_s == pytest.approx(H200.block_s, rel=0.1)
    assert fitted.link.call_s == pytest.approx(H200.link.call_s, rel=0.1)
    assert replace(fitted, block_s=H200.block_s, link=H200.link) == H200, "what lines do not say is the base's"


LINE = AloneLine(model=MODEL, plan="ulysses=4", rank=0, steps=(6, 16), step_s=1.0, height=512, width=512, messages=115)


@pytest.mark.parametrize(
    "lines",
    [
        [replace(LINE, step_s=0.3)],
        # As many messages for each block.
        [replace(LINE, step_s=0.3), replace(LINE, step_s=0.4, plan="tensor=4")],
        # The GPU is the limit, or the calls are recorded.
        [replace(LINE, step_s=0.001), replace(LINE, plan="ring=4", messages=172.0, step_s=0.001)],
        [replace(LINE, step_s=0.3, recorded=True), replace(LINE, plan="ring=4", messages=172.0, recorded=True)],
    ],
)
def test_lines_that_tell_too_little_are_refused(lines: list[AloneLine]) -> None:
    with pytest.raises(ModelError, match="do not tell a block's seconds from a message's"):
        fit_profile(H200, lines)


GOOD = {"model": MODEL, "plan": "ulysses=4", "rank": 0, "steps": [6, 16], "step_s": 0.1, "height": 512, "width": 512}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no json", "line 1 is none of `ditile bench --alone` (it: Invalid JSON"),
        (json.dumps(GOOD | {"rank": 4}), "rank 4 of 'ulysses=4' cannot be counted"),
    ],
)
def test_bad_files_get_one_line(text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is written."""
    path = tmp_path / "alone.jsonl"
    path.write_text(text)
    out = tmp_path / "profile.json"
    monkeypatch.setattr("sys.argv", ["host_fit", str(path), "--hardware", "h200-nvlink", "--out", str(out)])
    with pytest.raises(SystemExit) as caught:
        host_fit.main()
    shown = str(caught.value)
    assert said in shown and "\n" not in shown
    assert not out.exists()


def test_the_script_writes_what_plan_reads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = read_h200_lines("h200-alone") + read_h200_lines("h200-alone-2")
    out = tmp_path / "profile.json"
    lines = str(write_lines(tmp_path / "lines.jsonl", rows))
    words = ["host_fit", lines, "--hardware", "h200-nvlink", "--name", "mine", "--out", str(out)]
    monkeypatch.setattr("sys.argv", words)
    host_fit.main()
    assert capsys.readouterr().out.strip() == str(out)
    written = Profile.from_json_file(out)
    assert written.name == "mine" and f"fitted to {len(rows)} lines" in written.source
    assert main(["plan", "--model", "flux.1-dev", "--profile", str(out), "--price", "ulysses=8", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["hardware"] == "mine"

"""`ditile generate --plan`: a whole plan in one piece, or the one that is predicted to be the fastest."""

from __future__ import annotations

import dataclasses
import io
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch.distributed

from ditile import plan_for
from ditile.cli.main import main
from ditile.planner.hardware import add_interlink, load_profile
from ditile.planner.profile import Curve, Profile
from ditile.planner.question import PlanQuestion
from tests.pool import Pool

PROMPT = ("generate", "a red circle", "--dry-run")


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Profile:
    """This machine, as if it were eight slow GPUs on fast links."""
    slow = Curve((1.0,), (1e9,))
    found = dataclasses.replace(load_profile("l40-pcie"), matmul=slow, attention=slow)
    path = tmp_path / "machine.json"
    path.write_text(found.to_json())
    monkeypatch.setenv("DITILE_PROFILE", str(path))
    return found


def test_a_plan_in_one_piece_is_that_of_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PROMPT, "--plan", "pipefusion=2 patches=4"]) == 0
    whole = capsys.readouterr().out
    assert main([*PROMPT, "--pipefusion", "2", "--patches", "4"]) == 0
    assert capsys.readouterr().out == whole


def test_auto_is_what_the_planner_puts_first(measured: Profile, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PROMPT, "--plan", "auto", "--height", "256", "--width", "256"]) == 0
    said = capsys.readouterr().out
    best = plan_for("shapes-pixart", height=256, width=256)
    assert said.startswith(f"planned: {best} (predicted ") and best.world > 1
    assert f"on {measured.name})" in said.splitlines()[0]


def test_auto_is_told_the_type_of_messages_alone(measured: Profile, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PROMPT, "--plan", "auto wire_dtype=int8", "--height", "256", "--width", "256"]) == 0
    assert capsys.readouterr().out.startswith("planned: ")
    assert main([*PROMPT, "--plan", "auto wire_dtype=int8 vae=rows"]) == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1 and "auto chooses all but" in shown.err


def test_under_torchrun_every_rank_works(measured: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure would mean a plan for three of four ranks, and one that waits for ever."""
    from ditile.planner.choose import answer_question

    found = answer_question(PlanQuestion(devices=3), all_devices=True).result
    assert found.prices and all(price.plan.world == 3 for price in found.prices)


def on_a_host(profiles: list[str], local: list[int], *words: str) -> tuple[int, str, str]:
    """Exit code and what is said by one of torchrun's ranks: its host has a profile of its own, or none."""
    rank, out, err = torch.distributed.get_rank(), io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setenv("DITILE_PROFILE", profiles[rank])
        patch.setenv("LOCAL_RANK", str(local[rank]))
        # The pool has yet to use the group.
        patch.setattr("ditile.distributed.torchrun.leave_process_group", lambda: None)
        return main([*PROMPT, *words]), out.getvalue(), err.getvalue()


def test_on_several_hosts_all_take_the_plan_of_the_first(pool: Pool, measured: Profile, tmp_path: Path) -> None:
    """Two hosts, of which the second was not measured, and a link between them that is hardly one. A failure means
    ranks that draw by different plans and wait for ever, or a plan for one host."""
    plans = {}
    for rate in ("400Gbit", "1Mbit"):
        path = tmp_path / f"{rate}.json"
        path.write_text(add_interlink(measured, rate).to_json())
        words = (str(path), str(tmp_path / "none.json")), (0, 0), "--plan", "auto"
        (code, first, _), (other_code, second, _) = pool.run(on_a_host, 2, *words)
        assert (code, other_code) == (0, 0)
        said, _, report = first.partition("\n")
        assert said.startswith("planned: ") and "planned: " not in second and report == second
        plans[rate] = float(said.partition("predicted ")[2].split()[0])
    assert plans["1Mbit"] > plans["400Gbit"]


@pytest.mark.parametrize(
    ("local", "said"),
    [
        ((0, 0), "ditile: hosts=2 are joined by a link; measure it"),
        ((0, 1, 0), "ditile: the hosts have 2, 1 ranks, and a plan is chosen for hosts of one size"),
    ],
)
def test_what_the_first_host_refuses_all_do(
    pool: Pool, measured: Profile, tmp_path: Path, local: tuple[int, ...], said: str
) -> None:
    """A failure means one rank that ends and others that wait for it."""
    path = str(tmp_path / "machine.json")
    answers = pool.run(on_a_host, len(local), (path,) * len(local), local, "--plan", "auto")
    assert {code for code, _, _ in answers} == {2} and len({err for _, _, err in answers}) == 1
    assert answers[0][2].startswith(said) and answers[0][2].count("\n") == 1

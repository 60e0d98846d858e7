"""`ditile verify` ticks what holds and crosses what does not. A failure would mean a proof that proves nothing."""

from __future__ import annotations

import contextlib
from logging import NOTSET
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers import Flux2Transformer2DModel

from ditile.cli import main, verify
from ditile.cli.verdict import Check, PlanVerdict, build_verdict_table
from ditile.cli.verify import run_plan_checks
from ditile.model.recording.kept_tapes import StaticInput
from ditile.plan import cost
from ditile.plan.errors import JoinError
from ditile.plan.plan import Plan
from ditile.runner.requests.console import LINE_WIDTH
from ditile.runner.requests.options import VerifyOptions
from ditile.runner.runner import LOG, Runner
from ditile_lab.machine import recorded_cases
from tests import tiny
from tests.parallel.sequence import planned
from tests.pool import Pool, on_ranks
from tests.recorded_calls import record_on_cpu
from tests.runner.cases import MAKE, call_of

STEPS = 4
NAMES = [
    "with no stale keys: the image of one device",
    "this model may be computed in patches",
    "the same call twice: one image, on all ranks",
    "stale keys are as old as scheduled",
    "the CPU does not wait for the GPU within steps",
    "ranks send as many bytes as calculated",
    "a second call needs no more memory",
]


def proven(name: str, plan: dict[str, Any]) -> tuple[list[Check], str]:
    return run_plan_checks(
        lambda _: MAKE[name](), lambda _: call_of(name, height=40, width=56), Plan(**plan), STEPS, "cpu"
    )


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("flux", {"pipefusion": 2, "patches": 3}),
        ("flux true cfg", {"pipefusion": 2, "ulysses": 2, "patches": 3}),
        ("sd3.5 medium", {"ring": 2, "tensor": 2}),
    ],
)
def test_a_plan_that_holds(pool: Pool, name: str, plan: dict[str, Any]) -> None:
    """Every rank comes to the same verdict; what is exact bit for bit says so."""
    ranks = Plan(**plan).world
    answers = pool.run(proven, ranks, name, plan)
    checks, where = answers[0]
    assert all(answer == answers[0] for answer in answers)
    stale = "pipefusion" in plan or "distrifusion" in plan
    wanted = dict.fromkeys(NAMES, True) | {NAMES[4]: None} | ({} if stale else {NAMES[3]: None})
    wanted |= {NAMES[1]: None} if plan.keys() <= {"cfg", "data"} else {}
    assert {check.name: check.ok for check in checks} == wanted, checks
    if set(plan) == {"pipefusion", "patches"}:
        assert checks[0].says == "equal bit for bit"
    assert f"{ranks} rank(s) on cpu" in where and torch.__version__ in where


class HalfTransformer(Flux2Transformer2DModel):  # type: ignore[misc]
    """Takes and returns float32."""

    def __call__(self, **given: Any) -> Any:
        return tuple(x.float() for x in super().__call__(**halved(given)))


def halved(given: dict[str, Any]) -> dict[str, Any]:
    tensors = {k: v for k, v in given.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
    return given | {name: value.bfloat16() for name, value in tensors.items()}


@on_ranks(2)
def test_latents_that_are_finer_than_the_model() -> None:
    """A failure: a plan is crossed for what the model's own type rounds."""
    plan = {"ring": 2}
    call = planned.denoising("flux2", 4, 6, 9)[1] | {"num_inference_steps": STEPS}

    def make(_: Plan | None) -> Any:
        pipe = planned.denoising("flux2", 4, 6, 9)[0]
        pipe.transformer.to(torch.bfloat16)
        pipe.transformer.__class__ = HalfTransformer
        return pipe

    checks = run_plan_checks(make, lambda _: call | {"generator": torch.Generator()}, Plan(**plan), STEPS, "cpu")[0]
    assert checks[0].ok and "(up to 5e-02 is rounding)" in checks[0].says, checks[0]
    assert float(checks[0].says.split()[2]) > verify.ROUNDING_BY_DTYPE[torch.float32]


def test_branches_of_true_guidance_are_proven(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A failure: what the refusal advises is not there, or does nothing; or gloo's errors in a run that passes."""
    tiny.flux(guidance=True).save_pretrained(tmp_path)
    words = ("verify", "--model", str(tmp_path), "--cfg", "2", "--steps", "3", "--height", "32", "--width", "24")
    assert main.main([*words, "--threads", "1", "--guidance", "3", "--true-cfg", "2"]) == 0
    out, err = capfd.readouterr()
    assert "✓ │ proven" in out and "bit for bit" in out and "cfg=2" in out
    assert "failed to connect" not in err


def test_ranks_of_torchrun_meet_before_the_first_runs_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure means that the others give up on it while it fetches, and blame the network."""

    def refused(*_: Any, **__: Any) -> None:
        raise RuntimeError("refused")

    monkeypatch.setattr(dist, "rendezvous", refused)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(verify, "load", lambda *_, **__: pytest.fail("it loads first"))
    with pytest.raises(JoinError, match="rank 0 of 2 cannot connect"):
        verify.verify_plan(VerifyOptions(threads=1), Plan(pipefusion=2))
    assert LOG.level == NOTSET, "a check ends with the log as it was"


@pytest.mark.parametrize(
    ("what", "crossed", "says"),
    [
        ("weights", {NAMES[0]}, "largest difference"),
        ("bytes", {NAMES[5]}, "by formula 1"),
        ("memory", {NAMES[6]}, "rank 1 holds 4.0 KB more"),
        ("seed", {NAMES[0], NAMES[2]}, "the second call differs"),
    ],
)
@on_ranks(2)
def test_what_is_wrong_is_crossed(what: str, crossed: set[str], says: str) -> None:
    rank = dist.get_rank()

    def make(_: Plan | None) -> Any:
        pipe = tiny.flux()
        if what == "weights" and rank == 1:
            pipe.transformer.single_transformer_blocks[-1].proj_out.weight.data *= 1.01
        return pipe

    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        if what == "bytes":
            patch.setattr(cost, "count_traffic_bytes", lambda job, rank: {"activations": 1})
        if what == "memory" and rank == 1:
            kept: list[torch.Tensor] = []
            stock = Runner._run_pipeline

            def leaking(self: Runner, *args: Any) -> Any:
                kept.append(torch.zeros(1000))
                return stock(self, *args)

            patch.setattr(Runner, "_run_pipeline", leaking)
        if what == "seed":
            seeds = iter(range(100))
            call = lambda _: call_of("flux", seed=next(seeds))  # noqa: E731
        else:
            call = lambda _: call_of("flux")  # noqa: E731
        checks = run_plan_checks(make, call, Plan(pipefusion=2), STEPS, "cpu")[0]
        assert {check.name for check in checks if check.ok is False} == crossed, checks
        assert any(says in check.says for check in checks if check.ok is False), checks


def test_the_verdict_is_a_table_and_an_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ticked, crossed = Check("this", True, "so"), Check("that", False, " ".join(["not so"] * 30))
    for checks, code, word in (([ticked], 0, "✓ │ proven"), ([ticked, crossed], 1, "✗ │ not proven")):
        verdict = PlanVerdict("a plan" + " of many words" * 9, checks)
        monkeypatch.setattr(verify, "verify_plan", lambda proof, plan, verdict=verdict: verdict)
        assert main.main(["verify", "--patches", "4"]) == code
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= LINE_WIDTH
        assert word in out and "a plan" in out and build_verdict_table(verdict).row_count == len(checks) + 1


def fill_once(static: StaticInput, source: torch.Tensor, *_: Any, **__: Any) -> None:
    """Copy a tensor the first time only."""
    if static._source is None:
        static.tensor.copy_(source)
        static._source = source


def compare_on_cpu(folder: str, is_right: bool) -> list[tuple[str, bool, str]]:
    """On a rank: the cases of `--recorded`, where the recorder of the tests stands for CUDA graphs."""
    options = VerifyOptions(model=folder, steps=3, height=32, width=24, device="cpu", threads=1)
    with record_on_cpu(), pytest.MonkeyPatch.context() as patch:
        if not is_right:
            patch.setattr(StaticInput, "fill", fill_once)
            patch.setattr(recorded_cases, "FailingCaptures", contextlib.nullcontext)
        return verify.compare_on_rank(options, Plan(pipefusion=2, patches=2))


@pytest.mark.parametrize("is_right", [True, False])
def test_recorded_steps_are_compared_with_code(pool: Pool, is_right: bool, tmp_path: Path) -> None:
    """Captures fail on the first rank alone. Where they do not, and tapes read old inputs, each case is crossed."""
    tiny.flux().save_pretrained(tmp_path)
    first, second = pool.run(compare_on_cpu, 2, str(tmp_path), is_right)
    assert first == second
    assert [name for name, *_ in first] == [*recorded_cases.CASES]
    assert [ok for _, ok, _ in first] == [is_right] * len(first), first
    assert all(says.startswith("the result differs") != is_right for *_, says in first), first

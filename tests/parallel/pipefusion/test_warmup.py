"""Warmup modes equal serial warmup: on every rank, in every family, with batched guidance and with two calls.

Bitwise where no matrix has another shape; else 1e-5 relative in fp32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusion3Pipeline

from ditile.plan.errors import ModelError
from ditile.plan.plan import Plan
from ditile.plan.schedule import PatchSchedule
from ditile.plan.simulate import bound_speedup
from ditile.runner.runner import parallelize
from tests import tiny
from tests.parallel.sequence.test_tokens import TOLERANCE, plain_and_divided
from tests.pool import CaseError, Pool, on_ranks
from tests.runner.cases import MAKE, close, divided, run, same
from tests.runner.loras import folder_of, load

FLOAT = 4
TWO = {"prompt": ["a red circle", "a blue square"]}
ODD = {"height": 40, "width": 56, "max_sequence_length": 7}


def as_serial(pool: Pool, name: str, ranks: int, mode: dict[str, Any], *, exact: bool = False, **call: Any) -> None:
    """Some warmup, two steps of it, and nothing but warmup: the mode's pictures are those of serial warmup."""
    plans = [{"pipefusion": ranks, "patches": 3, "warmup": w} for w in (1, 2, 99)]
    both = [plan | also for plan in plans for also in ({}, mode)]
    for rank, (plain, *results) in enumerate(pool.run(plain_and_divided, ranks, name, both, call)):
        for plan, serial, got in zip(plans, results[::2], results[1::2], strict=True):
            what = f"{name} {plan} {mode} rank {rank}"
            same(got, serial, what) if exact else close(got, serial, what)
        close(results[-1], plain, f"{name} all synchronous, rank {rank}")
        assert float((results[0] - plain).abs().max() / plain.abs().max()) > 100 * TOLERANCE, "nothing was stale"


PIPELINED = {"warmup_mode": "pipelined"}


@pytest.mark.parametrize(("name", "ranks"), [("pixart sigma", 3), ("sd3.5 medium", 2)])
def test_pieces_of_a_batched_call(pool: Pool, name: str, ranks: int) -> None:
    """Guidance in one call of two rows. A failure means that a piece fills, or reads, the keys of other rows."""
    as_serial(pool, name, ranks, PIPELINED, **ODD)


def test_unequal_pieces(pool: Pool) -> None:
    """Two pictures with guidance over three stages: 2 + 1 + 1 rows, arguments without rows among the batched ones."""
    as_serial(pool, "pixart sigma", 3, PIPELINED, **TWO)
    as_serial(pool, "flux embedded guidance", 3, PIPELINED, **TWO)


@pytest.mark.parametrize("also", [{"ulysses": 2}, {"ring": 2}])
def test_pieces_with_shared_tokens(pool: Pool, also: dict[str, int]) -> None:
    """A failure means that a rank of a stage holds the keys of other rows than its neighbour."""
    plan = {"pipefusion": 2, "patches": 3, "warmup": 2} | also
    serial, got = (pool.run(plain_and_divided, 4, "sd3.5 medium", [plan | mode], ODD) for mode in ({}, PIPELINED))
    for rank in range(4):
        close(got[rank][1], serial[rank][1], f"{also} rank {rank}")


def guidance_ends(plan: dict[str, Any]) -> Any:
    """With the first step, as by diffusers' `SD3CFGCutoffCallback`."""
    pipe, tensors = MAKE["sd3.5 medium"](), ["prompt_embeds", "pooled_prompt_embeds"]

    def end(pipe: Any, step: int, timestep: Any, given: dict[str, Any]) -> dict[str, Any]:
        if step == 0:
            # A callback of the user is not read before the first step.
            pipe._guidance_scale = float(step)
        return {name: given[name][-1:] for name in tensors}

    call = {"callback_on_step_end": end, "callback_on_step_end_tensor_inputs": tensors}
    return run(parallelize(pipe, Plan(**plan)), "sd3.5 medium", **call)


@pytest.mark.parametrize(
    "plan",
    [
        *({"pipefusion": 2, "warmup": 99} | also for also in (PIPELINED, {}, {"patches": 1})),
        # Each half of cfg has one row before and after.
        *({"cfg": 2, axis: 2, "warmup": 1} for axis in ("pipefusion", "distrifusion")),
    ],
    ids=str,
)
def test_rows_and_branches_that_change_in_mid_run_are_refused(pool: Pool, plan: dict[str, Any]) -> None:
    """On whatever stage. A failure means that it computes with other rows, or attends to keys of no prompt."""
    with pytest.raises(CaseError, match="guidance ends in mid-run, which cannot be divided"):
        pool.run(guidance_ends, Plan(**plan).world, plan)


class EndsGuidance(StableDiffusion3Pipeline):  # type: ignore[misc]
    """Ends guidance after the first step, by a property of its own that no callback changes."""

    @property
    def do_classifier_free_guidance(self) -> bool:
        return not self.scheduler.step_index


def end_guidance_unseen() -> None:
    pipe = tiny.quiet(EndsGuidance(**MAKE["sd3.5 medium"]().components))
    run(parallelize(pipe, Plan(pipefusion=2, patches=2, warmup=99)), "sd3.5 medium")


def test_rows_that_change_unseen_are_refused(pool: Pool) -> None:
    """A failure means that a stage waits for rows that the one before does not send."""
    with pytest.raises(CaseError, match="the batch changed from 2 to 1 rows during the run"):
        pool.run(end_guidance_unseen, 2)


SEQUENCE = {"warmup_mode": "sequence"}


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["pixart sigma", "sd3.5 medium", "flux true cfg"])
def test_shared_tokens(pool: Pool, name: str) -> None:
    """Blocks are lent; nothing divides, and one rank has no text of PixArt's kind.

    A failure means that a token is computed nowhere or twice, or a block with the weights of another.
    """
    for ranks in (2, 3):
        as_serial(pool, name, ranks, SEQUENCE, **ODD)


def weights(mode: dict[str, Any]) -> tuple[int, int, dict[str, int]]:
    """On a rank: parameters in blocks, keys kept, bytes sent."""
    pipe = MAKE["pixart sigma"]()
    runner = parallelize(pipe, Plan(pipefusion=2, patches=2, warmup=2, **mode))
    run(runner, "pixart sigma")
    assert runner.report is not None
    blocks = sum(p.numel() for p in pipe.transformer.transformer_blocks.parameters())
    return blocks, runner.report.key_bytes, runner.report.sent


def test_who_holds_and_sends_what(pool: Pool) -> None:
    """Streamed weights are not kept, own ones are never sent; every stage keeps the keys of its own layers alone.

    A failure in the first means that `sequence` costs the memory that it is there to spare.
    """
    serial, sequence = (pool.run(weights, 2, mode) for mode in ({}, SEQUENCE))
    share = serial[0][0]
    assert [blocks for blocks, _, _ in serial] == [blocks for blocks, _, _ in sequence] == [share, share]
    assert [keys for _, keys, _ in sequence] == [keys for _, keys, _ in serial]
    lent = [sent["weights"] for _, _, sent in sequence]
    assert lent[0] >= 2 * share * FLOAT and max(lent) < 1.1 * 2 * share * FLOAT, "two steps, to one other rank"


@on_ranks(2)
def test_loras_are_lent_fused_or_refused(tmp_path: Path) -> None:
    """A failure means that some ranks compute the first steps without the LoRA."""
    folder = folder_of("flux", tmp_path)
    pipe = MAKE["flux"]()
    plan = {"pipefusion": 2, "patches": 3, "warmup": 99}
    runner = parallelize(pipe, Plan(**plan, **SEQUENCE))
    load("one")(pipe, folder)
    with pytest.raises(ModelError, match="LoRA layers"):
        run(runner, "flux")
    pipe.fuse_lora(lora_scale=0.7)
    pipe.unload_lora_weights()
    plain = MAKE["flux"]()
    load("one")(plain, folder)
    plain.fuse_lora(lora_scale=0.7)
    close(run(runner, "flux"), run(plain, "flux"), "fused, and lent")


def casting(transformer: Any) -> None:
    transformer.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["serial", "pipelined", "sequence"])
@on_ranks(2)
def test_weights_that_are_cast_for_each_use(mode: str) -> None:
    """A failure means that a rank computes with weights as they are stored, or raises while others wait for it."""
    pipe = MAKE["flux"]()
    casting(pipe.transformer)
    wanted = run(pipe, "flux")
    runner = parallelize(pipe, Plan(pipefusion=2, warmup=4, warmup_mode=mode))  # type: ignore[arg-type]
    if mode != "sequence":
        (same if mode == "serial" else close)(run(runner, "flux"), wanted, mode)
        return
    for _ in range(2):  # a second call is not one after a picture that broke off
        with pytest.raises(ModelError, match="enable_layerwise_casting.* use another warmup_mode"):
            run(runner, "flux")


@on_ranks(2)
def test_auto_shares_what_can_be_sent(tmp_path: Path) -> None:
    """Weights are sent, with a second synchronous step; LoRAs that come later, on one stage too, are not. A failure
    means that a stage waits for weights that nobody sends, or that a picture lacks its LoRA."""
    folder = folder_of("flux", tmp_path)
    pipe, plan = MAKE["flux"](), {"pipefusion": 2, "patches": 3}
    with divided(pipe, **plan, warmup=2) as runner:
        wanted = run(runner, "flux")
    runner = parallelize(pipe, Plan(**plan, warmup_mode="auto"))
    close(run(runner, "flux"), wanted, "shared")
    assert runner.report is not None and runner.plan == Plan(**plan, warmup=2, warmup_mode="sequence")
    assert (runner.report.warmup_mode, runner.report.synchronous) == ("sequence", [0, 1])
    load("one")(pipe, folder)
    got = run(runner, "flux")
    assert (runner.report.warmup_mode, runner.report.synchronous) == ("serial", [0])
    other = MAKE["flux"]()
    serial = parallelize(other, Plan(**plan))
    load("one")(other, folder)
    same(got, run(serial, "flux"), "with LoRAs, stage after stage")
    pipe.unload_lora_weights()
    close(run(runner, "flux"), wanted, "shared again")
    assert runner.report.warmup_mode == "sequence"


def test_what_auto_stands_for() -> None:
    """A failure means that a plan is refused, or that the planner prices another one than runs."""
    for plan, mode, warmup in (
        (Plan(pipefusion=4, warmup_mode="auto"), "sequence", 2),
        (Plan(pipefusion=4, warmup=3, warmup_mode="auto"), "sequence", 3),
        (Plan(pipefusion=4, warmup=0, warmup_mode="auto"), "serial", 0),
        (Plan(pipefusion=2, ulysses=2, warmup_mode="auto"), "serial", 1),
        (Plan(warmup_mode="auto"), "serial", 1),
        (Plan(pipefusion=4, warmup_mode="pipelined"), "pipelined", 1),
    ):
        resolved, schedule = plan.resolve_warmup(), PatchSchedule.from_plan(plan, 4)
        assert (resolved.warmup_mode, resolved.warmup) == (mode, warmup) == (schedule.mode, schedule.warmup), plan
    assert Plan(pipefusion=4, warmup_mode="auto").resolve_warmup(streams=False) == Plan(pipefusion=4)
    bounds = [
        PatchSchedule.from_plan(Plan(pipefusion=4, patches=4, warmup_mode=mode), 4) for mode in ("serial", "auto")
    ]
    assert [round(bound_speedup(bound), 2) for bound in bounds] == [2.06, 3.37]

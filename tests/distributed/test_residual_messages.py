"""Messages that travel as differences: both ends keep one base, what a plan sends, and what it does to an image.

The bundled models have heads of 32 numbers, so that a head has one scale of two bytes: 4.5 or 3.5 bits a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import ditile
from ditile.distributed.wire import LARGEST_CODE, ResidualPacking, SiteBases, select_packings
from ditile.model.hooks.generation import Generation
from ditile.model.recording.first_play import has_same_bits
from ditile.plan import cost
from ditile.plan.errors import PlanError, StateError, StoppedError
from ditile.plan.plan import Plan
from ditile.plan.schedule import MicroStep, PatchSchedule
from ditile.runner.runner import build_recorder, parallelize
from tests.distributed.test_wire import SIZES, measure_error
from tests.pool import Pool

BITS = {"residual4": 4, "residual3": 3}
OF_BF16 = {"residual4": 0.28, "residual3": 0.22}
LEAST_DECIBELS = {"residual4": 40.0, "residual3": 30.0}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STEPS = {"shapes-flux": 6, "shapes-pixart": 20}
"""With few steps the solver of PixArt makes much of every rounding, that of int8 too."""
SIDES = {"shapes-flux": 64, "shapes-pixart": 128}
PLANS = {
    "ulysses=2": ("ulysses", 1, 0),
    "ulysses=2 async_ulysses=true": ("ulysses", 1, 0),
    "ring=2": ("ring", 1, 0),
    "gather=2": ("gather", 1, 0),
    "distrifusion=2 warmup=1": ("distrifusion", 2, 1),
    "pipefusion=2 patches=2 warmup=1": ("activations", 2, 0),
    "pipefusion=2 patches=1": ("activations", 1, 0),
}
"""Plan -> the kind of its messages, the steps in which they travel in full, and the last steps without any."""


def move_both(packing: ResidualPacking, x: Tensor, base: Tensor, there: Tensor) -> Tensor:
    """Send x as a difference; return what arrived."""
    packed = packing.pack_difference(x, base)
    assert packed.shape == packing.pack_shape(x.shape) and packed.dtype == torch.uint8
    got = packing.unpack_difference(packed, there)
    assert has_same_bits(base, there), "the two ends differ"
    return got


@pytest.mark.parametrize("wire_dtype", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_both_ends_keep_one_base_and_errors_do_not_add_up(wire_dtype: str, dtype: torch.dtype) -> None:
    """A failure means that an error of one step stays, or that sender and receiver round unlike."""
    random = torch.Generator().manual_seed(0)
    packing = ResidualPacking(wire_dtype, checks=True)
    for size in SIZES:
        x = torch.randn(3, 5, size, generator=random)
        base = x.to(dtype)
        there = base.clone()
        for step in range(12):
            x = x + 0.1 * torch.randn(3, 5, size, generator=random)
            error = measure_error(move_both(packing, x.to(dtype), base, there), x.to(dtype))
            assert error < 0.3 / (2 ** BITS[wire_dtype] - 2), (size, step, error)
        last = move_both(packing, base.clone(), base, there)
        assert has_same_bits(last, base)


@pytest.mark.parametrize("wire_dtype", BITS)
def test_bytes_of_a_message(wire_dtype: str) -> None:
    """A failure means that codes do not fill their bytes: two in one, or eight in three."""
    packing = ResidualPacking(wire_dtype)
    for size, run in ((7, 7), (32, 32), (72, 24), (128, 32), (3072, 32)):
        eights = -(-size // 8)
        assert packing.pack_shape((2, size)) == (2, eights * BITS[wire_dtype] + 2 * size // run)
    codes = torch.arange(64).remainder(2 * LARGEST_CODE[wire_dtype] + 1).float().view(2, 32)
    code_bytes = packing._write_codes(codes)
    assert code_bytes.shape == (2, 4 * BITS[wire_dtype])
    assert torch.equal(packing._read_codes(code_bytes), codes)
    nothing = torch.empty(0, 32)
    assert move_both(packing, nothing, nothing.clone(), nothing.clone()).shape == nothing.shape


@pytest.mark.parametrize("wire_dtype", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_difference_changes_no_bit(wire_dtype: str, dtype: torch.dtype) -> None:
    """A failure means that code zero is not zero, or changes the sign of a zero."""
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0], x[1, ::2], x[2] = 0.0, -0.0, torch.finfo(dtype).max
    base, there = x.clone(), x.clone()
    assert has_same_bits(move_both(ResidualPacking(wire_dtype), x, base, there), x)
    assert has_same_bits(base, x)


@pytest.mark.parametrize("wire_dtype", BITS)
def test_what_is_no_number_arrives_so_and_its_base_begins_anew(wire_dtype: str) -> None:
    """A failure means that NaN is lost, spreads to numbers that do not share its scale, or stays."""
    packing = ResidualPacking(wire_dtype)
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(0))
    base, there = x.clone(), x.clone()
    broken = x.clone()
    broken[1, 40], broken[2, 70] = math.nan, -math.inf
    got = move_both(packing, broken, base, there)
    assert got[1, 32:64].isnan().all() and got[2, 64:].isnan().all()
    assert base.isfinite().all() and not base[1, 32:64].any() and not base[2, 64:].any()
    got[1, 32:64], got[2, 64:] = x[1, 32:64], x[2, 64:]
    assert torch.equal(got, x)
    for _ in range(3):
        got = move_both(packing, x, base, there)
    assert measure_error(got, x) < 0.01
    kept: SiteBases = {}
    assert packing.begin_message(kept).unpack_vectors(broken, 0) is broken
    assert kept[0].isfinite().all()


def test_the_first_message_of_a_size_travels_in_full_and_bases_are_compared() -> None:
    """A failure means that the first message of a size is taken as a difference, or that unlike bases go unseen."""
    packing = select_packings(Plan(ring=2, wire_dtype="residual4"))["ring"]
    now, is_first = Generation(), []
    for rows in (2, 2, 1, 1, 2):
        message = packing.begin_message(now.find_bases("layer", "keys", rows))
        assert message is not None
        sent = message.pack_vectors(torch.ones(rows, 32))
        assert sent.dtype == message.dtype or message.dtype is None
        is_first.append(message.dtype is None)
    assert is_first == [True, False, True, False, False] and packing.begin_message(None) is None
    now.schedule = PatchSchedule(stages=2, patches=2, steps=3, warmup=1)
    now.enter_micro_step(MicroStep(0, None))
    assert now.find_bases("layer", "keys", 2) is None and not now.memory.bases
    now.enter_micro_step(MicroStep(1, 0))
    assert now.find_bases("layer", "keys", 2) == {}
    checked, x = ResidualPacking("residual3", checks=True), torch.ones(2, 32)
    other = x.clone()
    other[1, 3] = 1 + 1e-7
    with pytest.raises(StateError, match=r"wire_dtype=residual3: a base of \(2, 32\) is not that of its sender"):
        checked.unpack_difference(checked.pack_difference(x, x.clone()), other)


def test_what_is_refused() -> None:
    """A failure means that sums travel as differences, or that a recording repeats a message of another size."""
    with pytest.raises(PlanError, match="wire_dtype=residual4 packs what stages and ranks"):
        Plan(tensor=2, wire_dtype="residual4")
    with pytest.raises(PlanError, match="cuda_graphs=True repeats messages of one size, and wire_dtype=resid"):
        build_recorder(True, Plan(ring=2, wire_dtype="residual3"), torch.device("cuda"))
    assert not Plan(ring=2, wire_dtype="residual3").can_be_recorded and not select_packings(Plan(ring=2))


class Drawn(NamedTuple):
    """Of a plan on a rank: bytes by kind, counted and by formula; of bases, kept and by formula; and the image."""

    counted: dict[str, int]
    by_formula: dict[str, int]
    base_bytes: tuple[int, int]
    image: Tensor


def draw(model: str, plans: list[str], checks: bool = False) -> list[Drawn]:
    pipe, drawn = ditile.load(model), []
    pipe.set_progress_bar_config(disable=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DITILE_CHECK", str(int(checks)))
        for text in plans:
            runner = parallelize(pipe, Plan.parse(text), keep_weights=True)
            kept: list[int] = []
            image = call(runner, lambda now, kept=kept: kept.append(count_base_bytes(now)))
            job, traffic = runner.job(), runner.mesh.traffic
            assert job is not None
            counted = {k: size for k, size in traffic.bytes.items() if size and k not in ("control", "callback")}
            rank = runner.mesh.rank
            bases = max(kept), job.plan_rank(rank).base_bytes
            drawn.append(Drawn(counted, cost.count_traffic_bytes(job, rank), bases, image))
            runner.restore()
    return drawn


def call(runner: Any, look: Callable[[Generation], object]) -> Tensor:
    """The image of a call, in which each step ends with a look at the generation."""
    now = runner._parts.loop.generation

    def look_at_step(*_: Any) -> dict[str, Any]:
        look(now)
        return {}

    arguments: dict[str, Any] = {"callback_on_step_end": look_at_step}
    model = "shapes-flux"
    if "PixArt" in type(runner.pipe).__name__:
        arguments = {"callback": look_at_step, "use_resolution_binning": False}
        model = "shapes-pixart"
    arguments |= {"height": SIDES[model], "width": SIDES[model], "num_inference_steps": STEPS[model]}
    arguments |= {"output_type": "pt", "generator": torch.Generator().manual_seed(0)}
    image: Tensor = runner("a large red circle on a gray background", **arguments).images
    return image


def count_base_bytes(now: Any) -> int:
    return sum(x.nbytes for bases in now.memory.bases.values() for x in bases.values())


def measure_decibels(one: Tensor, other: Tensor) -> float:
    return -10 * math.log10(max(float((one - other).double().pow(2).mean()), 1e-12))


@pytest.mark.parametrize("model", ["shapes-flux", "shapes-pixart"])
@pytest.mark.parametrize("plan", PLANS)
def test_plans_send_less_and_draw_nearly_the_same(pool: Pool, model: str, plan: str) -> None:
    """A failure means that a kind of message is not packed, that ranks keep unlike bases, or that errors add up."""
    kind, full, left_out = PLANS[plan]
    steps = STEPS[model] - left_out
    of_ranks = pool.run(draw, 2, model, [plan, *(f"{plan} wire_dtype={wire}" for wire in BITS)])
    for rank, (exact, *packed) in enumerate(of_ranks):
        assert exact.base_bytes == (0, 0)
        for index, (wire, drawn) in enumerate(zip(BITS, packed, strict=True)):
            assert drawn.counted == drawn.by_formula
            kept, predicted = drawn.base_bytes
            assert kept <= predicted <= 3 * kept
            assert torch.equal(drawn.image, of_ranks[0][1 + index].image)
            if kind in exact.counted:
                share = (drawn.counted[kind] / exact.counted[kind] - full / steps) / (1 - full / steps)
                # Of fp32, which has twice the bytes.
                assert 2 * share == pytest.approx(OF_BF16[wire], rel=0.03)
            assert measure_decibels(drawn.image, exact.image) > LEAST_DECIBELS[wire], f"{wire}, rank {rank}"


def stop_and_draw(plan: str) -> list[Tensor]:
    """On a rank: an image with bases compared, after one that was drawn to its end, and after one that was stopped."""
    (whole,) = draw("shapes-flux", [plan], checks=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DITILE_CHECK", "1")
        pipe = ditile.load("shapes-flux")
        pipe.set_progress_bar_config(disable=True)
        runner = parallelize(pipe, Plan.parse(plan))
    images = [whole.image, call(runner, id)]
    with pytest.raises(StoppedError):
        call(runner, lambda now: runner.stop())
    return [*images, call(runner, id)]


@pytest.mark.parametrize("plan", PLANS)
def test_a_stopped_call_leaves_no_base(pool: Pool, plan: str) -> None:
    """A failure means that a call begins with what an earlier one left, on some rank or on all."""
    for images in pool.run(stop_and_draw, 2, f"{plan} wire_dtype=residual4"):
        for image in images[1:]:
            assert torch.equal(image, images[0])

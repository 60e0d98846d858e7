"""Messages in eight bits a number: how exact one is, what a plan sends, and that all ranks draw one picture of it.

A model's numbers are not Gaussian's: a few channels are far larger than the others. So messages of that kind are tested
too, and the errors of int8 stay within what `distributed.wire` says of any numbers.

Messages that travel as differences come after them: both ends keep one base. The bundled models have heads of 32
numbers, so that a head has one scale of two bytes: 4.5 or 3.5 bits a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ditile
from ditile.distributed.transport import Traffic, start_gather
from ditile.distributed.wire import LARGEST_CODE, ResidualPacking, SiteBases, VectorPacking, select_packings
from ditile.model.hooks.generation import Generation
from ditile.model.recording.first_play import has_same_bits
from ditile.plan import cost
from ditile.plan.errors import PlanError, StateError, StoppedError
from ditile.plan.plan import Plan
from ditile.plan.schedule import MicroStep, PatchSchedule
from ditile.runner.runner import build_recorder, parallelize
from tests.pool import Pool, on_ranks
from tests.runner.cases import MAKE, divided, draw_plain, run

MOST_ERROR = {"fp8": 0.03, "int8": 0.01}
"""Relative errors of a message."""
SIZES = (7, 32, 72, 128, 3072)


def measure_error(got: Tensor, wanted: Tensor) -> float:
    """The length of the difference as a share of the length of what was sent."""
    return float(torch.linalg.vector_norm((got - wanted).double()) / torch.linalg.vector_norm(wanted.double()))


def make_messages(size: int) -> dict[str, Tensor]:
    """Messages `[3, 5, size]`: tokens alike, some far larger, with a few large channels, and with one channel alone."""
    random = torch.Generator().manual_seed(size)
    gaussian = torch.randn(3, 5, size, generator=random)
    channels = torch.ones(size)
    channels[:: max(size // 3, 1)] = 40
    alone = torch.zeros(3, 5, size)
    alone[..., 0] = gaussian[..., 0]
    unlike = gaussian * torch.tensor([1e-3, 1.0, 1e3]).view(3, 1, 1)
    return {"gaussian": gaussian, "unlike tokens": unlike, "large channels": gaussian * channels, "alone": alone}


@pytest.mark.parametrize("wire_dtype", MOST_ERROR)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_message_is_nearly_what_was_sent(wire_dtype: str, dtype: torch.dtype) -> None:
    """A failure means that scales are of too many numbers, or are rounded down, so that the largest code overflows."""
    packing = VectorPacking(wire_dtype)
    for size in SIZES:
        for name, message in make_messages(size).items():
            sent = message.to(dtype)
            packed = packing.pack_vectors(sent)
            got = packing.unpack_vectors(packed, size, dtype)
            assert packed.shape == packing.pack_shape(sent.shape) and got.dtype == dtype and got.shape == sent.shape
            tokens = measure_error(got, sent), max(map(measure_error, got.flatten(0, 1), sent.flatten(0, 1)))
            assert tokens[0] < MOST_ERROR[wire_dtype], (name, size, tokens)
            assert (got.signbit() == sent.signbit())[got != 0].all()


@pytest.mark.parametrize("wire_dtype", MOST_ERROR)
def test_numbers_that_have_no_code(wire_dtype: str) -> None:
    """A failure means that zeros become NaN, or that NaN, by which a rehearsal and a check know a patch, is lost."""
    packing, sent = VectorPacking(wire_dtype), torch.zeros(3, 32)
    sent[1, 3], sent[2, 30] = math.nan, math.inf
    got = packing.unpack_vectors(packing.pack_vectors(sent), 32, sent.dtype)
    assert torch.equal(got[0], sent[0]) and got[1, 3].isnan() and got[2, 30].isnan()
    nothing = torch.empty(2, 0, 32)
    assert packing.unpack_vectors(packing.pack_vectors(nothing), 32, nothing.dtype).shape == nothing.shape


class Sent(NamedTuple):
    """Of a plan on a rank: bytes by kind, counted and by formula; messages by kind; the picture and the plain one."""

    counted: dict[str, int]
    by_formula: dict[str, int]
    messages: dict[str, int]
    picture: Tensor
    plain: Tensor


def draw_plans(name: str, plans: list[str]) -> list[Sent]:
    pipe, call, drawn = MAKE[name](), {"height": 40, "width": 56}, []
    plain = draw_plain(name, **call)
    for text in plans:
        with divided(pipe, **Plan.parse(text).to_dict()) as runner:
            picture, job, traffic = run(runner, name, **call), runner.job(), runner.mesh.traffic
            assert job is not None
            counted, messages = ({k: n for k, n in d.items() if k != "control"} for d in (traffic.bytes, traffic.calls))
            drawn.append(Sent(counted, cost.count_traffic_bytes(job, runner.mesh.rank), messages, picture, plain))
    return drawn


PLANS = {
    2: ["pipefusion=2 patches=3", "ulysses=2", "ulysses=2 async_ulysses=true", "ring=2", "gather=2",
        "distrifusion=2", "pipefusion=2 warmup_mode=sequence"],
    4: ["pipefusion=4 warmup_mode=sequence", "pipefusion=2 patches=3 ulysses=2", "pipefusion=2 patches=3 ring=2",
        "pipefusion=2 tensor=2 patches=2 split_scheme=sequence", "ulysses=4", "ring=4", "ulysses=2 ring=2",
        "ulysses=2 gather=2", "distrifusion=2 ulysses=2"],
}  # fmt: skip


@pytest.mark.parametrize(("name", "ranks"), [("flux", 2), ("flux", 4), ("pixart sigma", 2), ("sd3.5 medium", 4)])
def test_plans_send_what_the_formula_says_and_all_ranks_draw_one_picture(pool: Pool, name: str, ranks: int) -> None:
    """A failure means that a kind of message is not packed, or one is that must be exact, or ranks unpack unlike."""
    plans = [f"{plan}{wire}" for plan in PLANS[ranks] for wire in ("", " wire_dtype=int8", " wire_dtype=fp8")]
    of_ranks = pool.run(draw_plans, ranks, name, plans)
    for rank, of_plans in enumerate(of_ranks):
        for index, (text, sent) in enumerate(zip(plans, of_plans, strict=True)):
            where = f"{name}, {text}, rank {rank}"
            assert {kind: size for kind, size in sent.counted.items() if size} == sent.by_formula, where
            assert torch.equal(sent.picture, of_ranks[0][index].picture), where
            exact, wire = of_plans[index - index % 3], Plan.parse(text).wire_dtype
            assert sent.messages == exact.messages, where
            if wire is None:
                continue
            packed = {kind for kind in sent.counted if sent.counted[kind] < exact.counted[kind]}
            assert packed == {kind for kind in exact.by_formula if kind in cost.PACKED_KINDS}, where
            assert measure_error(sent.picture, exact.picture) < 0.1, where
            assert not torch.equal(sent.picture, exact.picture), where


@on_ranks(2)
def test_what_must_be_exact_is_sent_as_it_is() -> None:
    """A failure means that predictions, or other kinds that steps are made of, are rounded."""
    wire_dtype = "int8"
    traffic = Traffic(packings=select_packings(Plan(ring=2, wire_dtype=wire_dtype)))
    own, group = torch.randn(2, 32, generator=torch.Generator().manual_seed(dist.get_rank())), dist.group.WORLD
    kinds = ("prediction", "keys")
    exact, packed = [start_gather(own, [(2, 32)] * 2, group, traffic, kind).wait_for_tensors() for kind in kinds]
    for rank, (one, other) in enumerate(zip(exact, packed, strict=True)):
        assert torch.equal(one, torch.randn(2, 32, generator=torch.Generator().manual_seed(rank)))
        assert 0 < measure_error(other, one) < MOST_ERROR["int8"]


BITS = {"residual4": 4, "residual3": 3}
OF_BF16 = {"residual4": 0.28, "residual3": 0.22}
LEAST_DECIBELS = {"residual4": 40.0, "residual3": 30.0}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STEPS = {"shapes-flux": 6, "shapes-pixart": 20}
"""With few steps the solver of PixArt makes much of every rounding, that of int8 too."""
SIDES = {"shapes-flux": 64, "shapes-pixart": 128}
RESIDUAL_PLANS = {
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
    for size, length in ((7, 7), (32, 32), (72, 24), (128, 32), (3072, 32)):
        eights = -(-size // 8)
        assert packing.pack_shape((2, size)) == (2, eights * BITS[wire_dtype] + 2 * size // length)
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
@pytest.mark.parametrize("plan", RESIDUAL_PLANS)
def test_plans_send_less_and_draw_nearly_the_same(pool: Pool, model: str, plan: str) -> None:
    """A failure means that a kind of message is not packed, that ranks keep unlike bases, or that errors add up."""
    kind, full, left_out = RESIDUAL_PLANS[plan]
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


@pytest.mark.parametrize("plan", RESIDUAL_PLANS)
def test_a_stopped_call_leaves_no_base(pool: Pool, plan: str) -> None:
    """A failure means that a call begins with what an earlier one left, on some rank or on all."""
    for images in pool.run(stop_and_draw, 2, f"{plan} wire_dtype=residual4"):
        for image in images[1:]:
            assert torch.equal(image, images[0])

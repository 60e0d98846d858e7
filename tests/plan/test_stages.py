"""The cut of blocks into stages: by hand, or with the slowest stage as fast as it can be; and what a block costs."""

from __future__ import annotations

import itertools

import pytest
import torch
from diffusers import FluxTransformer2DModel
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.blocks import compute_stage_loads, measure
from ditile import Plan
from ditile.model.anatomies import build_block_hooks
from ditile.model.call_families import FLUX
from ditile.model.hooks.block_hooks import TransformerHooks
from ditile.model.known import CONFIGS
from ditile.parallel.pipefusion.block_costs import BlockCosts, CostModel, divide_blocks
from ditile.plan.stages import cut_stages
from ditile.planner.search import weigh_ends, weigh_shares
from ditile.planner.subject import PlanSubject
from tests import tiny


def worst(costs: list[float], stages: list[range]) -> float:
    return max(sum(costs[block] for block in stage) for stage in stages)


def every_cut(blocks: int, stages: int) -> list[list[range]]:
    stops = itertools.combinations(range(1, blocks), stages - 1)
    return [[range(a, b) for a, b in itertools.pairwise((0, *inner, blocks))] for inner in stops]


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.data())
def test_balanced_is_the_best_of_all_cuts(costs: list[int], data: st.DataObject) -> None:
    """Against brute force. A failure means that a stage is slower than it must be, and so is every picture."""
    stages = data.draw(st.integers(1, len(costs)))
    cut = cut_stages(costs, stages)
    assert [block for stage in cut for block in stage] == list(range(len(costs)))
    assert len(cut) == stages and all(cut)
    assert worst(costs, cut) == min(worst(costs, other) for other in every_cut(len(costs), stages))


@pytest.mark.parametrize(
    ("plan", "speeds", "shares"),
    [
        ("pipefusion=2", (2, 1), "stage_weights=2,1"),
        ("ring=3", (1, 2, 4), "token_weights=1,2,4"),
        # Two of one kind and two of another: each stage has one of both.
        ("pipefusion=2 ulysses=2", (2, 1, 2, 1), "token_weights=2,1"),
        # A rank of tensor has its share of each stage.
        ("pipefusion=2 tensor=2", (2, 1, 1, 1), "stage_weights=1.5,1 tensor_weights=1.5,1"),
        # Equal halves of guidance: the slower one decides.
        ("pipefusion=2", (1.01, 1), ""),
    ],
)
def test_shares_follow_the_speeds(plan: str, speeds: tuple[float, ...], shares: str) -> None:
    """A failure means that a fast device waits for a slow one."""
    weighted = weigh_shares(Plan.parse(plan), speeds)
    assert weighted == Plan.parse(f"{plan} {shares}")


@pytest.mark.parametrize(
    ("plan", "speeds", "weights"),
    [
        ("cfg=2 vae=rows", (2, 1), "rank_weights=2,1"),
        ("cfg=2", (2, 1), ""),
        # The other weights say it.
        ("ring=2 vae=rows token_weights=2,1", (2, 1), ""),
        # They are of stages, not of ranks, or not of this machine.
        (
            "pipefusion=2 tensor=2 vae=rows stage_weights=1.5,1 tensor_weights=1.5,1",
            (2, 1, 1, 1),
            "rank_weights=2,1,1,1",
        ),
        ("pipefusion=2 text=split stage_blocks=3,2", (3, 2), "rank_weights=1.5,1"),
    ],
)
def test_decode_and_text_follow_the_speeds_of_ranks(plan: str, speeds: tuple[float, ...], weights: str) -> None:
    """A failure means that a fast rank has decoded long before a slow one."""
    assert weigh_ends(Plan.parse(plan), speeds) == Plan.parse(f"{plan} {weights}")


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.data())
def test_speeds_and_ends_count(costs: list[int], data: st.DataObject) -> None:
    """Against brute force again: devices of unequal speed, and what the first and the last stage do besides."""
    stages = data.draw(st.integers(1, len(costs)))
    speeds = data.draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=stages, max_size=stages))
    ends = data.draw(st.tuples(st.integers(0, 9), st.integers(0, 9)))
    slowest = max(compute_stage_loads(costs, cut_stages(costs, stages, None, speeds, ends), speeds, ends))
    assert slowest == min(
        max(compute_stage_loads(costs, other, speeds, ends)) for other in every_cut(len(costs), stages)
    )


def test_by_hand() -> None:
    """The numbers given are the numbers of blocks."""
    assert cut_stages([1.0] * 6, 3, (1, 2, 3)) == [range(1), range(1, 3), range(3, 6)]


@pytest.fixture(scope="module")
def real_flux() -> TransformerHooks:
    """FLUX.1-dev at its real widths in bf16, without weights."""
    with torch.device("meta"):
        transformer = FluxTransformer2DModel(num_layers=19, num_single_layers=38, guidance_embeds=True)
    return build_block_hooks(transformer.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_planner_cuts_as_ranks_will(dtype: torch.dtype) -> None:
    """A stage of FLUX.1-dev is planned with the blocks that its rank will own, in the type in which they are loaded.

    A failure means that seconds and memory are predicted of stages that never run.
    """
    plan, call = Plan(pipefusion=4, patches=4), {"height": 1024, "width": 1024, "num_inference_steps": 4, "prompt": ""}
    subject = PlanSubject.from_configs("flux.1-dev", CONFIGS / "flux.1-dev")
    with torch.device("meta"):
        transformer = FluxTransformer2DModel(num_layers=19, num_single_layers=38, guidance_embeds=True).to(dtype)
    owned = divide_blocks(build_block_hooks(transformer), plan)
    # One subject plans for both types, whichever was asked for first.
    planned = [subject.make_plan_job(plan, subject.make_call_shape(call, size)).stages for size in (4, 2)]
    assert planned[dtype is torch.bfloat16] == owned
    assert planned[0] != planned[1]


def imbalance(costs: BlockCosts, stages: list[range]) -> float:
    of_stage = compute_stage_loads(costs.blocks, stages, None, (costs.first, costs.last))
    return max(of_stage) * len(stages) / sum(of_stage)


def test_real_flux_over_eight_is_balanced(real_flux: TransformerHooks) -> None:
    """At most 1.05 of the mean, by what a GPU takes for 8 patches; blocks cut evenly by number would be at 1.2.

    A failure means that the slowest stage holds up all others by more than 5 %.
    """
    costs = CostModel.from_model_hooks(real_flux, FLUX).count_costs(8, 256)
    assert imbalance(costs, divide_blocks(real_flux, Plan(pipefusion=8))) < 1.05
    by_number = cut_stages([1.0] * 57, 8)
    assert imbalance(costs, by_number) > 1.15


def test_counted_by_hand(real_flux: TransformerHooks) -> None:
    """One patch and no ridge: both kinds of block meet 12 C^2 weights with each of 4096 + 512 tokens.

    With 8 patches and a ridge of 256, the text's half of a double block takes 512 + 7 * 256 tokens' time.
    """
    width, tokens = 3072, 4096 + 512
    attention = 2 * width * tokens**2
    costs = CostModel.from_model_hooks(real_flux, FLUX).count_costs(1, 1)
    assert costs.blocks[0] == costs.blocks[-1] == 12 * width**2 * tokens + attention
    assert costs.first == costs.last == 64 * width * 4096
    costs = CostModel.from_model_hooks(real_flux, FLUX).count_costs(8, 256)
    assert costs.blocks[0] == pytest.approx(12 * width**2 * (4096 + 512 + 7 * 256) + attention, rel=0.04)
    assert costs.blocks[-1] == pytest.approx(12 * width**2 * tokens + attention, rel=0.02)


@pytest.mark.parametrize("family", list(tiny.FAMILIES))
def test_measured_on_this_device(family: str) -> None:
    """A time for each block and both ends, and the pipeline as it was. A failure means that a block was not timed."""
    pipe = tiny.FAMILIES[family]()
    before = pipe(**tiny.arguments(family)).images
    costs = measure(pipe, 2, tiny.arguments(family))
    assert len(costs.blocks) == len(build_block_hooks(pipe.transformer).chain)
    assert min(*costs.blocks, costs.first, costs.last) > 0
    assert torch.equal(pipe(**tiny.arguments(family)).images, before)

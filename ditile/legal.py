"""What a model and a size allow: everything that is illegal in a plan for them, each with what would work. Pure.

There is little: a stage needs a block, a patch a row of tokens, a rank a token, a rank of tensor whole heads, half of
the ranks a branch of guidance. A replica without images is idle, and allowed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ditile.layout import cut_rows

if TYPE_CHECKING:
    from ditile.plan import Plan

WORTH = 0.7
"""A pipeline that can reach less than this share of its stages' speed is worth a warning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What is known of a model and a call; None is not known, and nothing is said about it.

    Attributes:
        model: what to call it.
        blocks: blocks that stages are cut from.
        heads: attention heads.
        rows: token rows of the image.
        tokens_per_row: image tokens in each.
        text: text tokens in joint attention.
        branches: branches of guidance: rows of the batch for each image, times transformer calls per step.
    """

    model: str = "this model"
    blocks: int | None = None
    heads: int | None = None
    rows: int | None = None
    tokens_per_row: int | None = None
    text: int = 0
    branches: int | None = None


def illegal(plan: Plan, facts: Facts) -> list[str]:
    """Everything that the facts forbid, one line each."""
    return [
        *_blocks(plan, facts),
        *_heads(plan, facts),
        *_rows(plan, facts),
        *_tokens(plan, facts),
        *_batch(plan, facts),
    ]


def _blocks(plan: Plan, facts: Facts) -> Iterator[str]:
    blocks, model = facts.blocks, facts.model
    if blocks is None:
        return
    if plan.pipefusion > blocks:
        yield f"pipefusion={plan.pipefusion} exceeds the {blocks} blocks of {model}; try 1 to {blocks}"
    elif plan.stage_blocks is not None and sum(plan.stage_blocks) != blocks:
        yield (
            f"stage_blocks={','.join(map(str, plan.stage_blocks))} has {sum(plan.stage_blocks)} blocks and {model} has "
            f"{blocks}; give {plan.pipefusion} numbers that add up to {blocks}"
        )


def _heads(plan: Plan, facts: Facts) -> Iterator[str]:
    heads, model = facts.heads, facts.model
    if heads is None:
        return
    if heads % plan.tensor:
        yield f"tensor={plan.tensor} does not divide the {heads} heads of {model}; try {divisors(heads)}"
    elif plan.uaa is False and (own := heads // plan.tensor) % plan.ulysses:
        of_each = f"{own} heads" + (f" of each of tensor={plan.tensor}" if plan.tensor > 1 else "")
        yield (
            f"ulysses={plan.ulysses} does not divide the {of_each} of {model} and uaa is off; try {divisors(own)}, "
            "or leave uaa out"
        )


def _rows(plan: Plan, facts: Facts) -> Iterator[str]:
    rows = facts.rows
    if rows is None:
        return
    if plan.distrifusion > rows:
        yield (
            f"distrifusion={plan.distrifusion} exceeds the {rows} token rows of this image, a patch for each rank; "
            f"try 1 to {rows}, or a taller image"
        )
    if plan.patches is not None and plan.patches > rows:
        yield f"patches={plan.patches} exceeds the {rows} token rows of this image; try 1 to {rows}, or a taller image"
    elif plan.num_patches > rows and (facts.blocks is None or plan.pipefusion <= facts.blocks):
        yield (
            f"pipefusion={plan.pipefusion} makes as many patches, more than the {rows} token rows of this image; try "
            f"patches=1 to {rows}, or a taller image"
        )


def _tokens(plan: Plan, facts: Facts) -> Iterator[str]:
    """Every rank needs a token of every patch that it shares."""
    rows, each = facts.rows, facts.tokens_per_row
    patches = plan.distrifusion if plan.distrifusion > 1 else plan.num_patches
    if rows is None or each is None or patches > rows:
        return
    text = 0 if plan.distrifusion > 1 else facts.text / each
    least = each * min(cut_rows(rows, patches, text))
    if plan.token_ranks > least:
        yield (
            f"ring={plan.ring} x ulysses={plan.ulysses} share out a patch of {least} tokens, less than one each; "
            f"try a product of 1 to {least}, fewer patches than {patches}, or a larger image"
        )


def _batch(plan: Plan, facts: Facts) -> Iterator[str]:
    if facts.branches is not None and plan.cfg > facts.branches:
        yield (
            f"cfg={plan.cfg} shares out branches of guidance, and this call has {facts.branches}; raise guidance_scale "
            "or --guidance (of FLUX: true_cfg_scale with a negative_prompt, or --true-cfg) above 1, or use cfg=1"
        )


def divisors(number: int) -> str:
    """The degrees that divide a number, as text."""
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def advice(plan: Plan, bound: float) -> str | None:
    """What to say where warmup and the filling of the pipeline eat more than 30 % of the gain; else None.

    Args:
        plan: the plan.
        bound: the speed-up over one rank that its stages can reach, as `Schedule.bound` has it.
    """
    stages = plan.pipefusion
    if stages == 1 or bound >= WORTH * stages:
        return None
    few = f"patches={stages} or more, " if plan.num_patches < stages else ""
    less = "less warmup, " if plan.least_warmup > 1 else ""
    mode = "another warmup_mode, " if plan.warmup_mode == "serial" else ""
    return (
        f"pipefusion={stages} can be at most {bound:.1f}x as fast as one rank here: warmup and the filling of the "
        f"pipeline eat {1 - bound / stages:.0%}; try more steps, {few}{less}{mode}"
        f"or fewer stages and ulysses or tensor beside them"
    )

"""What the axes of tokens send, alone and with stages: counted on every rank, and equal to sums worked out by hand.

A rank's tokens of a layer are its even shares of each patch and of the text, which rides with patch 0; the first ranks
have one more. Per layer and micro-step, in tokens of one head each way, b rows of a call, d channels of a head, fp32:

- Ulysses: a rank sends its tokens of q, k and v to those that own their heads, and to each the output of its tokens.
- Ring: K and V of every rank but the next, passed on in n - 1 messages, where nothing is kept.
- PipeFusion x ring: a rank's own fresh K and V to the n - 1 others, once for every patch.
- DistriFusion: a rank's own image K and V to the n - 1 others, but not in the last step, which no other follows.

With even shares these are the formulas of `test_closed_formulas`. Predictions are gathered apart (kind "prediction").
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from ditile.plan import cost
from ditile.plan.plan import Plan
from tests import tiny
from tests.pool import Pool
from tests.runner.cases import MAKE, divided, run

STEPS, ROWS, COLUMNS, FLOAT = 3, 10, 14, 4
SIZE = {"height": 4 * ROWS, "width": 4 * COLUMNS, "num_inference_steps": STEPS}
HEADS, HEAD = 4, 8
LATENTS = ROWS * COLUMNS * 16


class Job(NamedTuple):
    """What a family makes of a call.

    Attributes:
        layers: of each block, the text tokens that each of its attention layers sees beside the image.
        stages: the blocks of two stages.
        patches: the rows of three patches, the text counted as work of the first.
        rows: rows of a transformer call.
        calls: transformer calls in a step.
        out: channels of a token behind the blocks.
    """

    layers: list[list[int]]
    stages: tuple[int, int]
    patches: tuple[int, int, int]
    rows: int
    calls: int
    out: int


JOBS = {
    "flux true cfg": Job([[12]] * 5, (3, 2), (3, 4, 3), rows=1, calls=2, out=32),
    "pixart sigma": Job([[0]] * 4, (3, 1), (3, 4, 3), rows=2, calls=1, out=32),
    "sd3.5 medium": Job([[28, 0], [28, 0], [28], [28]], (2, 2), (2, 4, 4), rows=2, calls=1, out=32),
}
DISTRI_ROWS = {2: (5, 5), 3: (3, 4, 3), 4: (2, 3, 3, 2)}

PLANS = {
    2: ["ulysses=2", "ulysses=2 async_ulysses=true", "ring=2", "distrifusion=2", "distrifusion=2 warmup=0",
        "distrifusion=2 warmup=3", "patches=3 ulysses=2", "patches=3 ring=2 warmup=2"],
    3: ["ulysses=3", "ring=3", "distrifusion=3 warmup=2"],
    4: ["ulysses=2 ring=2", "ulysses=4", "ring=4", "distrifusion=2 ulysses=2", "distrifusion=4 warmup=0",
        "pipefusion=2 patches=3 ulysses=2", "pipefusion=2 patches=3 ulysses=2 warmup=0",
        "pipefusion=2 patches=3 ulysses=2 warmup=3", "pipefusion=2 patches=3 ring=2",
        "pipefusion=2 patches=3 ring=2 warmup=2", "pipefusion=2 patches=1 ring=2"],
    8: ["pipefusion=2 patches=3 ulysses=2 ring=2", "ulysses=8", "pipefusion=2 patches=3 ulysses=4 warmup=2"],
}  # fmt: skip


def even(number: int, ranks: int) -> list[int]:
    """Shares of a number."""
    return [number // ranks + (rank < number % ranks) for rank in range(ranks)]


class Rank:
    """One rank of a plan, counted with ulysses innermost, then ring or distrifusion, then stages."""

    def __init__(self, job: Job, plan: Plan, rank: int) -> None:
        self.job, self.plan = job, plan
        self.outer_size, self.inner_size = plan.ring * plan.distrifusion, plan.ulysses
        self.size = self.outer_size * self.inner_size
        self.stage, self.index = divmod(rank, self.size)
        self.outer, self.inner = divmod(self.index, self.inner_size)
        self.heads = even(HEADS, self.inner_size)
        self.bytes, self.calls = Counter[str](), Counter[str]()

    def count(self, kind: str, numbers: int, calls: int = 1) -> None:
        self.bytes[kind] += numbers * self.job.rows * self.job.calls * FLOAT
        self.calls[kind] += calls * self.job.calls

    @property
    def patches(self) -> tuple[int, ...]:
        """Rows of each patch."""
        return self.job.patches if self.plan.num_patches == 3 else (ROWS,)

    def tokens(self, text: int, patches: list[int]) -> list[int]:
        """Tokens of each rank of the stage in a layer that sees so much text, when some patches are at hand."""
        if self.plan.distrifusion > 1:
            words = even(text, self.inner_size)
            image = [even(rows * COLUMNS, self.inner_size) for rows in DISTRI_ROWS[self.plan.distrifusion]]
            return [word + share for shares in image for word, share in zip(words, shares, strict=True)]
        runs = [self.patches[p] * COLUMNS for p in patches] + ([text] if 0 in patches else [])
        return [sum(shares) for shares in zip(*(even(run, self.size) for run in runs), strict=True)]

    def micros(self, step: int) -> list[list[int]]:
        """The patches of each micro-step."""
        patches = list(range(len(self.patches)))
        return [patches] if step < self.warmup or self.plan.distrifusion > 1 else [[p] for p in patches]

    @property
    def warmup(self) -> int:
        return int(self.plan.warmup)

    def keeps(self, step: int) -> bool:
        """Whether keys of a step are read in the next."""
        several = len(self.patches) * self.plan.distrifusion > 1
        return several and step + 1 < STEPS and step + 1 >= self.warmup

    def layers(self) -> Iterator[int]:
        """The text of each attention layer of this stage."""
        first, blocks = self.job.stages[0], self.job.layers
        if self.plan.pipefusion == 2:
            blocks = blocks[first:] if self.stage else blocks[:first]
        for block in blocks:
            yield from block


def ulysses(rank: Rank, tokens: list[int]) -> None:
    """q, k and v of own tokens to the heads of the others, the output of own heads to the tokens of the others."""
    first = rank.outer * rank.inner_size
    mine, own_heads = tokens[rank.index], rank.heads[rank.inner]
    others = [k for k in range(rank.inner_size) if k != rank.inner]
    there = sum(3 * mine * rank.heads[k] for k in others)
    back = sum(tokens[first + k] * own_heads for k in others)
    rank.count("ulysses", (there + back) * HEAD, 4 if rank.plan.async_ulysses else 2)


def of_lines(rank: Rank, tokens: list[int]) -> list[int]:
    """Tokens that the ranks along the outer axis have after Ulysses."""
    return [sum(tokens[k * rank.inner_size : (k + 1) * rank.inner_size]) for k in range(rank.outer_size)]


def ring(rank: Rank, tokens: list[int]) -> None:
    """Passed round: first one's own, then what came."""
    lines, width = of_lines(rank, tokens), rank.heads[rank.inner] * HEAD
    for turn in range(rank.outer_size - 1):
        rank.count("ring", 2 * lines[rank.outer - turn] * width)


def to_all(rank: Rank, kind: str, tokens: list[int], *, at_once: bool) -> None:
    """One's own to each of the others along the outer axis, as a message to each or as one collective."""
    numbers, others = 2 * of_lines(rank, tokens)[rank.outer] * rank.heads[rank.inner] * HEAD, rank.outer_size - 1
    for share in [others] if at_once else [1] * others:
        rank.count(kind, numbers * share)


def attention(rank: Rank, step: int, patches: list[int], text: int) -> None:
    """One layer at one micro-step."""
    tokens, plan = rank.tokens(text, patches), rank.plan
    if plan.ulysses > 1:
        ulysses(rank, tokens)
    if plan.distrifusion > 1 and (step < rank.warmup or rank.keeps(step)):
        to_all(rank, "distrifusion", rank.tokens(0, patches), at_once=False)
    if plan.ring > 1:
        stale = len(rank.patches) > 1 and (step >= rank.warmup or rank.keeps(step))
        to_all(rank, "ring", tokens, at_once=True) if stale else ring(rank, tokens)


def expected(job: Job, plan: Plan, number: int) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes and messages of a rank by kind."""
    rank = Rank(job, plan, number)
    whole, text = range(len(rank.patches)), job.layers[0][0]
    for step in range(STEPS):
        for patches in rank.micros(step):
            for layer_text in rank.layers():
                attention(rank, step, patches, layer_text)
            if rank.size > 1 and rank.stage == plan.pipefusion - 1:
                rank.count("prediction", rank.tokens(0, patches)[rank.index] * job.out * (rank.size - 1))
        for patch in whole if rank.stage < plan.pipefusion - 1 else []:
            rank.count("activations", rank.tokens(text, [patch])[rank.index] * tiny.WIDTH)
    if plan.pipefusion > 1 and rank.stage == 1:
        rank.bytes.update(latents=(STEPS - 1) * LATENTS * FLOAT, result=LATENTS * FLOAT)
        rank.calls.update(latents=(STEPS - 1) * len(whole), result=1)
    return dict(rank.bytes), dict(rank.calls)


class Counted(NamedTuple):
    """What a rank counted under a plan, and what the package's formulas say of it."""

    sent: dict[str, int]
    messages: dict[str, int]
    key_bytes: int
    sent_by_formula: dict[str, int]
    key_bytes_by_formula: int


def count_plans(name: str, plans: list[str], split: tuple[int, int]) -> list[Counted]:
    """On a rank: bytes and messages by kind, of each plan."""
    pipe, counted = MAKE[name](), []
    for text in plans:
        plan = Plan.parse(text).to_dict()
        if plan["pipefusion"] == 2:
            plan["stage_blocks"] = split
        with divided(pipe, **plan) as runner:
            run(runner, name, **SIZE)
            job, rank, traffic = runner.job(), runner.mesh.rank, runner.mesh.traffic
            assert job is not None and runner.report is not None
            sent, messages = ({k: n for k, n in t.items() if k != "control"} for t in (traffic.bytes, traffic.calls))
            formulas = cost.count_traffic_bytes(job, rank), cost.count_key_store_bytes(job, rank)
            counted.append(Counted(sent, messages, runner.report.key_bytes, *formulas))
    return counted


@pytest.mark.parametrize(
    ("name", "ranks"), [*((name, ranks) for name in JOBS for ranks in (2, 3, 4)), ("sd3.5 medium", 8)]
)
def test_every_rank_sends_what_it_must(pool: Pool, name: str, ranks: int) -> None:
    """A failure means that padding, dummies or stale keys travel, that keys are exchanged again for every patch, or
    that something is agreed by messages; of the formulas, that tables promise something else.
    """
    job = JOBS[name]
    for rank, of_plans in enumerate(pool.run(count_plans, ranks, name, PLANS[ranks], job.stages)):
        for plan, counted in zip(PLANS[ranks], of_plans, strict=True):
            where = f"{name}, {plan}, rank {rank}"
            assert (counted.sent, counted.messages) == expected(job, Plan.parse(plan), rank), where
            assert {k: n for k, n in counted.sent.items() if n} == counted.sent_by_formula, where
            assert counted.key_bytes == counted.key_bytes_by_formula, where


P, H, LAYERS = ROWS * COLUMNS, tiny.WIDTH, 4
CLOSED: dict[str, tuple[Callable[[int], float], Callable[[int], int]]] = {
    "ring": (lambda n: 2 * (n - 1) / n * P * H * LAYERS, lambda n: (n - 1) * LAYERS),
    "ulysses": (lambda n: 4 * (n - 1) / n**2 * P * H * LAYERS, lambda n: 2 * LAYERS),
    "distrifusion": (lambda n: 2 * (n - 1) / n * P * H * LAYERS, lambda n: (n - 1) * LAYERS),
    "activations": (lambda n: P * H, lambda n: 3),
}
"""Numbers and messages per rank and step, for a batch of one; a batch of two sends twice as much."""


@pytest.mark.parametrize(
    ("plan", "ranks", "kind"),
    [("ring=2", 2, "ring"), ("ring=4", 4, "ring"), ("ulysses=2", 2, "ulysses"), ("ulysses=4", 4, "ulysses"),
     ("distrifusion=2 warmup=3", 2, "distrifusion"), ("pipefusion=2 patches=3", 2, "activations")],
)  # fmt: skip
def test_closed_formulas(plan: str, ranks: int, kind: str) -> None:
    """The paper's table (2405.14430), where shares are even. A failure means that the sums above are other ones."""
    job, (numbers, messages) = JOBS["pixart sigma"], CLOSED[kind]
    sent, calls = expected(job, Plan.parse(plan), 0)
    assert sent[kind] == STEPS * job.rows * FLOAT * numbers(ranks)
    assert calls[kind] == STEPS * messages(ranks)


@pytest.mark.parametrize("axis", ["ulysses", "ring"])
def test_patches_cost_no_bytes(axis: str) -> None:
    """Keys of a token are exchanged once in a step, whatever the patches; xDiT sends 1.4 to 3.8 times as much."""
    stale, whole = (
        sum(
            expected(JOBS["flux true cfg"], Plan.parse(f"{axis}=2 patches={m} warmup=0"), rank)[0][axis]
            for rank in (0, 1)
        )
        for m in (3, 1)
    )
    assert stale == whole

"""Traffic of each parallel method: counted on real ranks, beside the table of the PipeFusion paper (arXiv 2405.14430).

    python -m benchmarks.traffic --ranks 2,4

A PixArt with random weights: batched guidance (two rows of a call), fp32. Counted is what a rank sends in a step that
others precede and follow: a run is made with one step more than another, and their difference is taken.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ditile.distributed.launch import launch
from ditile.plan.flag_parser import add_arguments, collect_arguments
from ditile.plan.option_classes import define_option
from ditile.plan.plan import Plan
from ditile.runner.runner import parallelize
from ditile_lab.bench.random_models import RandomModel

ROWS = 2
FLOAT = 4
STEPS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class TrafficJob:
    """What is counted."""

    ranks: str = define_option("2,4", "numbers of ranks")
    blocks: int = define_option(8, "blocks")
    heads: int = define_option(8, "attention heads")
    head_dim: int = define_option(32, "width of a head")
    size: int = define_option(512, "pixels of a side; 16 x 16 pixels are a token")

    @property
    def random_model(self) -> RandomModel:
        """The pipeline and its call."""
        return RandomModel(blocks=self.blocks, heads=self.heads, head_dim=self.head_dim)

    @property
    def num_image_tokens(self) -> int:
        """Image tokens."""
        return (self.size // 16) ** 2

    @property
    def channels(self) -> int:
        """Width of a token."""
        return self.heads * self.head_dim


class TrafficMethod(NamedTuple):
    """One way to divide the work over n ranks.

    Attributes:
        plan: of n ranks.
        paper: what the paper's table 1 says, which takes (n - 1) / n for 1.
        formula: what a rank sends in a step, in words.
        factors: the same: those of p h and of p h L, for n ranks and one row of the batch.
        kinds: what the formula is about; the rest is counted apart.
        least: the smallest n.
    """

    name: str
    plan: Callable[[int], Plan]
    paper: str
    formula: str
    factors: Callable[[int], tuple[float, float]]
    kinds: tuple[str, ...]
    least: int = 2

    def bytes_by_formula(self, job: TrafficJob, n: int) -> float:
        """By the formula."""
        once, each = self.factors(n)
        return (once + each * job.blocks) * job.num_image_tokens * job.channels * ROWS * FLOAT


METHODS = (
    TrafficMethod(
        "tensor",
        lambda n: Plan(tensor=n),
        "4 p h L",
        "6 (n-1)/n p h L",
        lambda n: (0, 6 * (n - 1) / n),
        ("tensor",),
    ),
    TrafficMethod(
        "DistriFusion",
        lambda n: Plan(distrifusion=n),
        "2 p h L",
        "2 (n-1)/n p h L",
        lambda n: (0, 2 * (n - 1) / n),
        ("distrifusion",),
    ),
    TrafficMethod(
        "ring",
        lambda n: Plan(ring=n),
        "2 p h L",
        "2 (n-1)/n p h L",
        lambda n: (0, 2 * (n - 1) / n),
        ("ring",),
    ),
    TrafficMethod(
        "Ulysses",
        lambda n: Plan(ulysses=n),
        "4/n p h L",
        "4 (n-1)/n^2 p h L",
        lambda n: (0, 4 * (n - 1) / n**2),
        ("ulysses",),
    ),
    TrafficMethod(
        "PipeFusion",
        lambda n: Plan(pipefusion=n),
        "2 p h",
        "p h",
        lambda n: (1, 0),
        ("activations",),
    ),
    TrafficMethod(
        "PipeFusion n/2 x Ulysses 2",
        lambda n: Plan(pipefusion=n // 2, ulysses=2),
        "",
        "p h/2 + 2/n p h L",
        lambda n: (1 / 2, 2 / n),
        ("activations", "ulysses"),
        least=4,
    ),
    TrafficMethod(
        "PipeFusion n/2 x ring 2",
        lambda n: Plan(pipefusion=n // 2, ring=2),
        "",
        "p h/2 + 2/n p h L",
        lambda n: (1 / 2, 2 / n),
        ("activations", "ring"),
        least=4,
    ),
)


class TrafficCount(NamedTuple):
    """What one rank sends in a step: bytes and messages of a method's own kinds, and bytes of all others."""

    bytes: int
    calls: int
    beside: int


def count_bytes_of_step(job: TrafficJob, method: TrafficMethod, n: int) -> TrafficCount:
    """What this rank sends in a step."""
    runner = parallelize(job.random_model.create_pipeline(job.size), method.plan(n), device="cpu")
    found = []
    for steps in (STEPS, STEPS + 1):
        runner(**job.random_model.make_call_arguments(job.size, job.size, steps))
        traffic = runner.mesh.traffic
        found.append((dict(traffic.bytes), dict(traffic.calls)))
    (fewer, fewer_calls), (more, more_calls) = found
    sent = {kind: more[kind] - fewer[kind] for kind in more}
    calls = sum(more_calls[kind] - fewer_calls[kind] for kind in method.kinds if kind in more)
    own = sum(sent.get(kind, 0) for kind in method.kinds)
    return TrafficCount(own, calls, sum(sent.values()) - own)


def count_all(job: TrafficJob, n: int) -> list[TrafficCount]:
    """On a rank: every method that n ranks can do."""
    return [count_bytes_of_step(job, method, n) for method in METHODS if n >= method.least]


def make_traffic_table(job: TrafficJob, counted: Mapping[int, list[list[TrafficCount]]]) -> list[str]:
    """The lines of the table, in Markdown; of the ranks, the one that sends most.

    Args:
        job: what was counted.
        counted: what `count_all` gave on every rank, by the number of ranks.
    """
    lines = ["| method | n | the paper | a rank sends | KB | counted, KB | messages | beside, KB |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for index, method in enumerate(METHODS):
        for n, of_ranks in counted.items():
            if n < method.least:
                continue
            place = sum(n >= other.least for other in METHODS[:index])
            sent = [of_methods[place] for of_methods in of_ranks]
            most = max(sent)
            beside = max(rank.beside for rank in sent)
            by_formula = method.bytes_by_formula(job, n) / 1000
            lines.append(
                f"| {method.name} | {n} | {method.paper} | {method.formula} | {by_formula:.1f} | "
                f"{most.bytes / 1000:.1f} | {most.calls} | {beside / 1000:.1f} |"
            )
    return lines


def main() -> None:
    """Counts and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, TrafficJob, title="job")
    job = TrafficJob(**collect_arguments(TrafficJob, parser.parse_args()))
    numbers = [int(n) for n in job.ranks.split(",")]
    print("\n".join(make_traffic_table(job, {n: launch(count_all, n, (job, n), threads=1) for n in numbers})))


if __name__ == "__main__":
    main()

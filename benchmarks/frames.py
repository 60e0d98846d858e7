"""Python calls into ditile that one attention layer and one micro-step make, counted.

    python -m benchmarks.frames

shapes-flux, 128 px, 3 steps, two gloo ranks on the CPU. A frame is a call event of `sys.setprofile` whose code is the
package's (generator expressions count each time they are resumed), on rank 0, in the second of two calls. Counts are
exact: they do not depend on the machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

import ditile
from ditile.parallel.attention.kernel import dispatch_to_core
from ditile.parallel.pipefusion.executor import PipeFusion
from ditile.plan.plan import Plan
from ditile.runner.load import load
from ditile.runner.runner import parallelize
from ditile_lab.rows import write_json_file

PACKAGE = str(Path(ditile.__file__).parent)
PROMPT = "a large red circle on the left on a gray background"
PLANS: Mapping[str, Mapping[str, Any]] = {
    "ulysses": {"ulysses": 2},
    "pipefusion": {"pipefusion": 2, "patches": 2, "warmup": 1},
}
LIMITS = {"ulysses": 49, "pipefusion": 12}
"""Frames of one attention layer that are allowed."""

MICRO_STEP_LIMIT = 451
"""Frames of one asynchronous micro-step of the first of two stages that are allowed."""


class FrameCounts(NamedTuple):
    """What was counted on one rank.

    Attributes:
        total: frames of the whole call.
        attentions: frames of each attention layer, from diffusers' dispatch on, in order.
        micro_steps: frames from the beginning of each micro-step to that of the next, the last one left out.
    """

    total: int
    attentions: list[int]
    micro_steps: list[int]


class FrameProfile:
    """A profile function that counts the package's frames.

    Args:
        attention: the code whose calls are counted by themselves.
        micro_step: the code that each micro-step calls once.
    """

    def __init__(self, attention: CodeType, micro_step: CodeType) -> None:
        self._attention = attention
        self._micro_step = micro_step
        self.total = 0
        self._attention_start = 0
        self.attentions: list[int] = []
        self.micro_step_starts: list[int] = []

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        """Called by the interpreter at each call and return."""
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            if code is self._micro_step:
                self.micro_step_starts.append(self.total)
            elif code is self._attention:
                self._attention_start = self.total
            self.total += 1
        elif event == "return" and code is self._attention:
            self.attentions.append(self.total - self._attention_start)


def count_frames(plan: Mapping[str, Any]) -> FrameCounts:
    """On a rank: counts the frames of a second picture under a plan."""
    runner = parallelize(load("shapes-flux"), Plan(**plan), device="cpu")
    profile = FrameProfile(dispatch_to_core.__code__, PipeFusion.begin_transformer_call.__code__)
    for is_counted in (False, True):
        random = torch.Generator().manual_seed(0)
        sys.setprofile(profile if is_counted else None)
        try:
            runner(PROMPT, height=128, width=128, num_inference_steps=3, output_type="latent", generator=random)
        finally:
            sys.setprofile(None)
    starts = profile.micro_step_starts
    micro_steps = [end - start for start, end in zip(starts, starts[1:], strict=False)]
    return FrameCounts(profile.total, profile.attentions, micro_steps)


def find_attention_frames(counts: FrameCounts) -> int:
    """The frames of one attention layer in the last micro-step, when all that is made once is there."""
    layers = len(counts.attentions) // (len(counts.micro_steps) + 1)
    return max(counts.attentions[-layers:])


def find_micro_step_frames(counts: FrameCounts) -> int:
    """The frames of the longest asynchronous micro-step: the first one of all is a synchronous step."""
    return max(counts.micro_steps[1:])


def make_frames_table(counts_of_plan: Mapping[str, FrameCounts]) -> Table:
    """What was counted, for people."""
    table = Table("plan", "one attention", "at most", "one micro-step of stage 0", "3 steps")
    for name, counts in counts_of_plan.items():
        cells = find_attention_frames(counts), LIMITS[name], find_micro_step_frames(counts), counts.total
        table.add_row(name, *map(str, cells))
    return table


def main() -> None:
    """Counts and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write it as JSON", metavar="FILE")
    given = parser.parse_args()
    counts = {name: ditile.launch(count_frames, 2, (plan,))[0] for name, plan in PLANS.items()}
    Console().print(make_frames_table(counts))
    if given.out is not None:
        write_json_file(given.out, {name: one._asdict() for name, one in counts.items()})


if __name__ == "__main__":
    main()

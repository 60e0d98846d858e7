"""How to cut a video into patches: runs of its tokens (frame by frame), or the same rows of every frame.

    python -m benchmarks.video_patches --captions 20 --patches 2,4

The bundled video model generates held-out captions in one process, and its self-attention is given the keys that a
patch would see under a plan: what is not fresh is of the step before. PSNR is against the same noise without stale
keys, over all frames of a clip. The controls attend to their own patch alone. For rows, `pipefusion` here is what
ditile generates (see the tests); runs are simulated only.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from ditile.plan.flag_parser import add_arguments, collect_arguments
from ditile.plan.option_classes import define_option
from ditile.runner.load import load
from ditile.runner.model_files import defaults
from ditile_lab.quality.metrics import compute_psnr
from ditile_lab.rows import write_json_file
from training.evaluate import list_captions
from training.motion_check import score_clips

Clips = NDArray[np.uint8]  # [N, F, H, W, 3]
MODEL = "shapes-wan"
METHODS = ("pipefusion", "distrifusion", "own patch only")
CUTS = ("runs", "rows")
GRID = (3, 8, 8)
"""Frames, rows and columns of tokens of the model's clips."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CutJob:
    """What is measured."""

    captions: int = define_option(20, "held-out captions")
    patches: str = define_option("2,4", "numbers of patches")
    steps: int = define_option(20, "denoising steps")
    warmup: int = define_option(1, "synchronous steps")
    out: str | None = define_option(None, "write the rows as JSON", metavar="FILE")


def number_patches(cut: str, patches: int, grid: tuple[int, int, int] = GRID) -> Tensor:
    """The patch of each token, `[tokens]`, in the order of the sequence."""
    frames, rows, columns = grid
    if cut == "runs":
        tokens = frames * rows * columns
        return torch.arange(tokens) * patches // tokens
    patch_of_row = torch.arange(rows) * patches // rows
    return patch_of_row.view(1, rows, 1).expand(grid).flatten()


class StaleAttention(TorchFunctionMode):
    """Self-attention over all tokens, of which each patch sees fresh keys and values and some of the step before.

    Args:
        of_patch: the patch of each token.
        method: whose keys are fresh: of earlier patches and its own, or of its own alone, or there are no others.
        warmup: steps in which all are fresh.
        calls: of the transformer in a step.
    """

    def __init__(self, of_patch: Tensor, method: str, warmup: int, calls: int = 2) -> None:
        super().__init__()
        self._of_patch = of_patch
        self._method = method
        self._warmup = warmup
        self._calls = calls
        self._kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._transformer_calls = self._layer = 0

    def end_transformer_call(self, *_: Any) -> None:
        """A hook after the transformer."""
        self._transformer_calls = self._transformer_calls + 1
        self._layer = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Attends; every other function runs as it is."""
        named = dict(kwargs or {})
        if func is not scaled_dot_product_attention:
            return func(*args, **named)
        if not args:
            args = [named.pop(name) for name in ("query", "key", "value")]
        q, k, v = args
        tokens = len(self._of_patch)
        # Cross-attention has other keys.
        if (q.shape[-2], k.shape[-2]) != (tokens, tokens):
            return func(q, k, v, **named)
        key = (self._transformer_calls % self._calls, self._layer)
        self._layer += 1
        old = self._kept.get(key)
        self._kept[key] = k, v
        if old is None or self._transformer_calls // self._calls < self._warmup:
            return func(q, k, v, **named)
        out = torch.empty_like(q)
        for patch in range(int(self._of_patch.max()) + 1):
            own = self._of_patch == patch
            if self._method == "own patch only":
                keys = k[..., own, :]
                values = v[..., own, :]
            else:
                fresh = own[:, None]
                if self._method == "pipefusion":
                    # Earlier patches of this step have passed through the layer already.
                    fresh = (self._of_patch <= patch)[:, None]
                keys = torch.where(fresh, k, old[0])
                values = torch.where(fresh, v, old[1])
            out[..., own, :] = func(q[..., own, :], keys, values, **named)
        return out


def generate_clips(
    pipe: Any, captions: Sequence[str], steps: int, make_attention: Callable[[], StaleAttention] | None = None
) -> Clips:
    """One clip a caption, whose place in the list is its seed, attended to so."""
    clips = []
    call = defaults(MODEL) | {"num_inference_steps": steps, "output_type": "np"}
    for index, caption in enumerate(captions):
        with contextlib.ExitStack() as stack:
            if make_attention is not None:
                attention = stack.enter_context(make_attention())
                handle = pipe.transformer.register_forward_hook(attention.end_transformer_call)
                stack.callback(handle.remove)
            out = pipe(caption, generator=torch.Generator().manual_seed(index), **call)
        clips.append(np.rint(out.frames[0] * 255).astype(np.uint8))
    return np.stack(clips)


def measure_cuts(pipe: Any, captions: Sequence[str], job: CutJob) -> Iterator[dict[str, Any]]:
    """A row for one process, and for each number of patches, method and cut."""
    reference = generate_clips(pipe, captions, job.steps)
    yield {"method": "one process", "all_right": score_clips(list(reference), captions)["all_right"]}
    for patches, method, cut in itertools.product(map(int, job.patches.split(",")), METHODS, CUTS):
        make = functools.partial(StaleAttention, number_patches(cut, patches), method, job.warmup)
        clips = generate_clips(pipe, captions, job.steps, make)
        decibels = compute_psnr(_join_frames(clips), _join_frames(reference))
        yield {
            "method": method,
            "cut": cut,
            "patches": patches,
            "psnr": float(decibels.mean()),
            "psnr_min": float(decibels.min()),
            "error": float(decibels.std() / len(captions) ** 0.5),
            "all_right": score_clips(list(clips), captions)["all_right"],
        }


def _join_frames(clips: Clips) -> Clips:
    """One high image a clip, `[N, F * H, W, 3]`."""
    return clips.reshape(clips.shape[0], -1, *clips.shape[3:])


def make_cuts_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Both cuts side by side."""
    table = Table("patches", "method")
    for cut in CUTS:
        table.add_column(f"{cut}: mean PSNR, dB (error; lowest)", justify="right")
    lines: dict[tuple[int, str], dict[str, str]] = {}
    for row in rows:
        # One process has no cut.
        if "cut" in row:
            line = lines.setdefault((row["patches"], row["method"]), {})
            line[row["cut"]] = f"{row['psnr']:.1f} ({row['error']:.1f}; {row['psnr_min']:.1f})"
    for (patches, method), line in lines.items():
        table.add_row(str(patches), method, *(line[cut] for cut in CUTS))
    return table


def main() -> None:
    """Measures, prints a line of JSON per row, and a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, CutJob, title="job")
    job = CutJob(**collect_arguments(CutJob, parser.parse_args()))
    pipe: Any = load(MODEL)
    rows: list[dict[str, Any]] = []
    pipe.set_progress_bar_config(disable=True)
    for row in measure_cuts(pipe, list_captions(MODEL, job.captions), job):
        rows.append(row)
        print(json.dumps(row), flush=True)
        if job.out is not None:
            write_json_file(Path(job.out), rows)
    Console(width=100).print(make_cuts_table(rows))


if __name__ == "__main__":
    main()

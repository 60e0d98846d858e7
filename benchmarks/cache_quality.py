"""Quality and speed of caches on the bundled models: PSNR to pictures without a cache, and speed-up over no cache.

    python -m benchmarks.cache_quality --model shapes-pixart --captions 100 --out pixart.jsonl
    python -m benchmarks.cache_quality --model shapes-flux --steps 50 --settings "F=1 W=4 R=0.2" --out flux.jsonl
    python -m benchmarks.plots pareto pixart.jsonl flux.jsonl curves.png

cache-dit is measured too if it is installed. One process with one thread draws one picture at a time. Every caption is
drawn by all settings in turn, in an order that rotates; a speed-up is the median over captions of the ratio to the
picture without a cache. Seconds are of CPU time, which equals wall time for one thread on an idle machine (wall time is
written too). Results are added to `--out`, caption by caption, and are not measured again. Without a cache all
pipelines draw the same picture, bit for bit, which is checked before the first caption. Settings with masks of fewer
steps than are drawn are left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.utils.logging import disable_progress_bar
from rich.console import Console
from rich.table import Table

from benchmarks import peer
from benchmarks.cache_settings import COMMON, ENGINES, OWN, THEIRS, CacheSetting, parse_cache_settings
from ditile.measure.evaluate.caption_check import judge_picture
from ditile.measure.evaluate.metrics import Pictures, compute_psnr, compute_ssim
from ditile.model.known import ASSETS
from ditile.plan.errors import DitileError, StateError
from ditile.plan.flags import add_arguments, collect_arguments, define_option
from ditile.runner.caching import enable_cache, summary
from ditile.runner.load import defaults, load

PLAIN = CacheSetting("", "no cache")
SPEEDS = (1.5, 2.0, 3.0, 4.0)
PROOF = 2  # steps of the picture that proves pipelines equal before they are cached
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheQualityJob:
    """What is measured."""

    model: str = define_option("shapes-pixart", "bundled model")
    captions: int = define_option(100, "captions of the held-out list")
    steps: int = define_option(20, "denoising steps")
    engines: str = define_option(",".join(ENGINES), "engines that are given the settings")
    settings: str = define_option("; ".join(COMMON + OWN), "settings, with ; between them", metavar="SETTINGS")
    out: str = define_option("cache_quality.jsonl", "lines of JSON, one for each picture", metavar="FILE")


class Stopwatch:
    """CPU and wall seconds of some calls."""

    def __init__(self) -> None:
        self.cpu = self.wall = 0.0

    def wrap_timed_call(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, timed."""

        def call_and_time(*args: Any, **kwargs: Any) -> Any:
            cpu, wall = time.thread_time(), time.perf_counter()
            result = call(*args, **kwargs)
            self.cpu += time.thread_time() - cpu
            self.wall += time.perf_counter() - wall
            return result

        return call_and_time


class CachePainter:
    """A pipeline with a setting.

    Args:
        job: what is drawn.
        setting: the setting of its cache, which `enable_setting_cache` enables.
    """

    def __init__(self, job: CacheQualityJob, setting: CacheSetting) -> None:
        self._job, self.setting = job, setting
        pipe: Any = load(job.model)
        self._pipe = pipe
        self._pipe.set_progress_bar_config(disable=True)
        self._call = defaults(job.model)
        if setting.engine == THEIRS:
            peer.keep_apart(self._pipe)
        self._is_cached = False
        self._whole, self._outside = Stopwatch(), Stopwatch()
        self._pipe.encode_prompt = self._outside.wrap_timed_call(self._pipe.encode_prompt)
        self._pipe.vae.decode = self._outside.wrap_timed_call(self._pipe.vae.decode)

    def enable_setting_cache(self) -> None:
        """Enables the cache of the setting."""
        self._is_cached = bool(self.setting.engine)
        if self.setting.engine == THEIRS:
            separate = self._call.get("true_cfg_scale", 1) > 1  # cache-dit's adapter of FLUX does not see it
            peer.enable_for(self._pipe, self.setting.cache_config, self.setting.calibrator, self._job.steps, separate)
        elif self.setting.engine:
            enable_cache(self._pipe, self.setting.cache_config, self.setting.calibrator)

    def draw_picture(self, place: int, caption: str, steps: int | None = None) -> tuple[Pictures, Row]:
        """The picture `[1, H, W, 3]` of a caption, in so many steps if not in all, and what it took."""
        for watch in (self._whole, self._outside):
            watch.cpu = watch.wall = 0.0
        generator = torch.Generator().manual_seed(place)
        call = self._whole.wrap_timed_call(self._pipe)
        options = self._call | {"num_inference_steps": steps or self._job.steps}
        result = call(caption, output_type="np", generator=generator, **options)
        took = {
            "cpu_s": self._whole.cpu,
            "wall_s": self._whole.wall,
            "outside_cpu_s": self._outside.cpu,
            "outside_wall_s": self._outside.wall,
        }
        return (result.images * 255).round().astype(np.uint8), took | self._left_out()

    def _left_out(self) -> Row:
        """The steps that were left out, a mean over branches, and the share of runs of blocks that was."""
        if not self._is_cached:
            return {"steps_left_out": 0.0, "blocks_left_out": 0.0}
        if self.setting.engine == THEIRS:
            steps = peer.left_out(self._pipe)
            blocks = sum(len(found) for found in peer.blocks_of(self._pipe))
            middle = blocks - self.setting.cache_config.Fn_compute_blocks - self.setting.cache_config.Bn_compute_blocks
            return {"steps_left_out": steps, "blocks_left_out": steps / self._job.steps * middle / blocks}
        [report] = summary(self._pipe, logging=False)
        steps = statistics.fmean(len(each.skipped) for each in report.decisions) if report.decisions else 0.0
        return {"steps_left_out": steps, "blocks_left_out": report.saved}


def measure(
    job: CacheQualityJob, settings: list[CacheSetting], captions: list[str], done: set[tuple[int, str, str]]
) -> Iterable[Row]:
    """A row for each caption and setting that is not done.

    Raises:
        StateError: if a pipeline draws another picture than the plain one before it has a cache.
    """
    wanted = [s for s in settings if any((k, s.engine, s.text) not in done for k in range(len(captions)))]
    if not wanted:
        return
    plain = CachePainter(job, PLAIN)
    first, _ = plain.draw_picture(0, captions[0], PROOF)
    painters = [plain]
    for setting in wanted:
        painters.append(CachePainter(job, setting))
        if not np.array_equal(painters[-1].draw_picture(0, captions[0], PROOF)[0], first):
            raise StateError(f"a pipeline for {setting} draws another picture before it is cached")
        painters[-1].enable_setting_cache()
    for place, caption in enumerate(captions):
        todo = [p for p in painters[1:] if (place, p.setting.engine, p.setting.text) not in done]
        if not todo:
            continue
        order = [plain, *todo]
        turn = place % len(order)
        drawn = {painter.setting: painter.draw_picture(place, caption) for painter in order[turn:] + order[:turn]}
        reference, base = drawn[PLAIN]
        for setting, (picture, took) in drawn.items():
            yield {
                "model": job.model,
                "steps": job.steps,
                "caption": place,
                "engine": setting.engine,
                "setting": setting.text,
                "psnr": float(compute_psnr(picture, reference)[0]),
                "ssim": float(compute_ssim(picture, reference)[0]),
                "all_right": judge_picture(picture[0], caption).all_right,
                "plain_cpu_s": base["cpu_s"],
                "plain_wall_s": base["wall_s"],
                "plain_outside_cpu_s": base["outside_cpu_s"],
                **took,
            }
        print(f"{job.model}: {place + 1} of {len(captions)} captions", file=sys.stderr, flush=True)


def read_picture_rows(path: Path, model: str | None = None, steps: int | None = None) -> list[Row]:
    """What a file has, of a model and number of steps if these are given."""
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines]
    return [r for r in found if model in (None, r["model"]) and steps in (None, r["steps"])]


def average_picture_rows(rows: Iterable[Row]) -> list[Row]:
    """One row for each model, number of steps and setting, the slowest first."""
    of_setting: dict[tuple[str, int, str, str], list[Row]] = {}
    for row in rows:
        of_setting.setdefault((row["model"], row["steps"], row["engine"], row["setting"]), []).append(row)
    made: list[Row] = []
    for (model, steps, engine, setting), found in of_setting.items():
        denoised = [(r["plain_cpu_s"] - r["plain_outside_cpu_s"]) / (r["cpu_s"] - r["outside_cpu_s"]) for r in found]
        made.append(
            {
                "model": model,
                "steps": steps,
                "engine": engine,
                "setting": setting,
                "captions": len(found),
                "speedup": statistics.median(r["plain_cpu_s"] / r["cpu_s"] for r in found),
                "speedup_wall": statistics.median(r["plain_wall_s"] / r["wall_s"] for r in found),
                "speedup_denoise": statistics.median(denoised),
                "psnr": statistics.fmean(r["psnr"] for r in found),
                "ssim": statistics.fmean(r["ssim"] for r in found),
                "all_right": 100 * statistics.fmean(r["all_right"] for r in found),
                "steps_left_out": statistics.fmean(r["steps_left_out"] for r in found),
                "blocks_left_out": 100 * statistics.fmean(r["blocks_left_out"] for r in found),
            }
        )
    return sorted(made, key=lambda row: (row["model"], row["steps"], row["speedup"]))


def find_speed_quality_front(rows: Iterable[Row], engine: str) -> list[tuple[float, float]]:
    """(speed-up, PSNR) of an engine's settings that no other of its settings beats in both, the slowest first."""
    kept: list[tuple[float, float]] = []
    for point in sorted(((r["speedup"], r["psnr"]) for r in rows if r["engine"] == engine), reverse=True):
        if not kept or point[1] > kept[-1][1]:
            kept.append(point)
    return kept[::-1]


def interpolate_front_psnr(rows: Iterable[Row], engine: str, speedup: float) -> float | None:
    """The PSNR of an engine's front at a speed-up, between its settings in proportion; None if it is never so fast."""
    points = find_speed_quality_front(rows, engine)
    if not points or speedup > points[-1][0]:
        return None
    xs, ys = zip(*points, strict=True)
    return float(np.interp(speedup, xs, ys))


def make_cache_quality_table(found: Iterable[Row]) -> Table:
    """The means for people."""
    shown = Table("engine", "setting", "speed-up", "denoising", "PSNR", "SSIM", "right, %", "steps", "blocks, %")
    for row in found:
        shown.add_row(
            row["engine"],
            row["setting"],
            f"{row['speedup']:.2f}x",
            f"{row['speedup_denoise']:.2f}x",
            f"{row['psnr']:.1f}",
            f"{row['ssim']:.4f}",
            f"{row['all_right']:.0f}",
            f"{row['steps_left_out']:.1f}",
            f"{row['blocks_left_out']:.0f}",
        )
    return shown


def at_speeds(found: Sequence[Row]) -> Table:
    """PSNR of each model and engine at some speed-ups."""
    shown = Table("model", "engine", *(f"{speedup:g}x" for speedup in SPEEDS))
    for column in shown.columns[2:]:
        column.justify = "right"
    for model in dict.fromkeys(row["model"] for row in found):
        mine = [row for row in found if row["model"] == model]
        for engine in ENGINES:
            reached = (interpolate_front_psnr(mine, engine, speedup) for speedup in SPEEDS)
            shown.add_row(model, engine, *("-" if db is None else f"{db:.1f} dB" for db in reached))
    return shown


def main() -> None:
    """Measures what is not measured yet, and prints a table of all that is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, CacheQualityJob, title="job")
    job = CacheQualityJob(**collect_arguments(CacheQualityJob, parser.parse_args()))
    torch.set_num_threads(1)
    disable_progress_bar()
    try:
        settings = [
            setting for setting in parse_cache_settings(job.engines, job.settings) if setting.fits_num_steps(job.steps)
        ]
        captions = (ASSETS / "captions.txt").read_text("utf-8").splitlines()[: job.captions]
        out = Path(job.out)
        done = {(r["caption"], r["engine"], r["setting"]) for r in read_picture_rows(out, job.model, job.steps)}
        with out.open("a", encoding="utf-8") as file:
            for row in measure(job, settings, captions, done):
                file.write(json.dumps(row) + "\n")
                file.flush()
    except DitileError as error:
        raise SystemExit(f"error: {error}") from error
    found = average_picture_rows(read_picture_rows(out, job.model, job.steps))
    for shown in (make_cache_quality_table(found), at_speeds(found)):
        Console(width=120).print(shown)


if __name__ == "__main__":
    main()

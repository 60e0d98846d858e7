"""The figure of an evaluation: what plans and caches gain, and what they do to pictures."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.patches import Patch

from ditile.cli.evaluate.options import ORIGINAL
from ditile.cli.evaluate.store import select_pareto_front as undominated

MARKERS = "osD^vP*XhdHp<>8"


COLOURS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#bbbbbb", "#000000")


def tradeoff(found: Mapping[str, Any], out: Path) -> None:
    """Draws the settings of an evaluation, PSNR over latency: a colour for each plan, a marker for each cache, a line
    through those that no other beats. The same picture as the original's has no finite PSNR, and is drawn at the top.
    """
    rows = found["settings"]
    plans, caches = (list(dict.fromkeys(row[name] for row in rows)) for name in ("plan", "cache"))
    finite = [row["psnr"] for row in rows if row["psnr"] < 100]
    low, high = (min(finite), max(finite)) if finite else (30.0, 40.0)
    room = max(2.0, 0.15 * (high - low))
    top = high + 2 * room
    figure, axes = plt.subplots(figsize=(9.6, 5))

    def locate_row(row: Mapping[str, Any]) -> tuple[float, float]:
        return 100 * row["latency_ratio"], row["psnr"] if row["psnr"] < 100 else top

    axes.plot(*zip(*map(locate_row, undominated(rows)), strict=True), color="#999999", lw=1.2, zorder=1)
    for row in rows:
        x, y = locate_row(row)
        colour, marker = COLOURS[plans.index(row["plan"]) % 8], MARKERS[caches.index(row["cache"]) % len(MARKERS)]
        spread = [[x - 100 * row["latency_lowest"]], [100 * row["latency_highest"] - x]]
        axes.errorbar(
            x, y, xerr=spread, color=colour, marker=marker, ms=8, lw=0.8, mec="white", mew=0.6, zorder=2, alpha=0.9
        )
    axes.axhline(high + room, color="#cccccc", lw=0.8, ls="--")
    axes.set_ylim(low - room, top + 0.8 * room)
    ticks = [tick for tick in axes.get_yticks() if low - room <= tick <= high + 0.4 * room]
    axes.set_yticks([*ticks, top], [*(f"{tick:g}" for tick in ticks), "same\npicture"])
    axes.set_xlim(left=0)
    axes.set_xlabel("time of a picture, % of the original pipeline's (median; bars: lowest and highest)")
    axes.set_ylabel("mean PSNR to the original's picture (dB)")
    count = found["captions"]["count"]
    axes.set_title(f"{found['model']}, {count} caption(s), {found['measured']['machine']}", fontsize=10)
    axes.grid(alpha=0.3)
    _legend(axes, plans, caches)
    _save_figure(figure, out)


def _legend(axes: Any, plans: Sequence[str], caches: Sequence[str]) -> None:
    """Colours and markers, beside the figure."""
    one = {ORIGINAL.plan: "one process"}
    shown = [Patch(color=COLOURS[k % 8], label=textwrap.fill(one.get(p, p), 34)) for k, p in enumerate(plans)]
    shown += [
        axes.plot([], [], MARKERS[k % len(MARKERS)], color="#555555", label=_cache_label(cache))[0]
        for k, cache in enumerate(caches)
    ]
    axes.legend(handles=shown, frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0))


def _cache_label(cache: str) -> str:
    return "no cache" if cache == ORIGINAL.cache else textwrap.fill(cache, 34)


def _save_figure(figure: Any, out: Path) -> None:
    figure.tight_layout()
    figure.savefig(out, dpi=110)
    plt.close(figure)

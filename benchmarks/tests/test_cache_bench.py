"""What the benchmarks of caches are told, and what they make of their rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cache_overhead import OURS, PLAIN, Transformer, make_overhead_rows
from benchmarks.cache_quality import (
    average_image_rows,
    find_speed_quality_front,
    interpolate_front_psnr,
    read_image_rows,
)
from benchmarks.cache_settings import COMMON, OWN, CacheSetting, parse_cache_settings
from ditile.cache.config import DBCacheConfig, DBPruneConfig, FoCaCalibratorConfig, TaylorSeerCalibratorConfig
from ditile.cache.config_text import parse_cache_line
from ditile.plan.errors import ModelError


def test_a_line_is_a_config_and_a_calibrator() -> None:
    """Short names and the fields' own. A failure means that a row of the table is of other settings than it says."""
    setting = CacheSetting("ditile", "F=1 W=4 R=0.12 MC=3 couple=row taylor=2")
    assert setting.cache_config == DBCacheConfig(
        Fn_compute_blocks=1,
        max_warmup_steps=4,
        residual_diff_threshold=0.12,
        max_continuous_cached_steps=3,
        couple="row",
    )
    assert setting.calibrator == TaylorSeerCalibratorConfig(taylorseer_order=2)
    assert CacheSetting("ditile", "F=1 foca").calibrator == FoCaCalibratorConfig()
    assert CacheSetting("ditile", "F=1 prune R=0.1").cache_config == DBPruneConfig(
        Fn_compute_blocks=1, residual_diff_threshold=0.1
    )
    assert CacheSetting("ditile", "F=1 mask=2,1/1,2 policy=static").cache_config.steps_computation_mask == (
        1,
        1,
        0,
        1,
        0,
        1,
    )
    assert CacheSetting("ditile", "F=1").calibrator is None
    assert CacheSetting("ditile", "F=1 mask=2,1/1,2").fits_num_steps(6) and not CacheSetting(
        "ditile", "F=1 mask=2,1/1,2"
    ).fits_num_steps(7)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "F=1 Z=3",
            "'Z=3' is not a word of a cache in one line; known are F, B, R, W, I, M, MC, budget, resets, mask, p",
        ),
        ("foo", "'foo' is not a word"),
        ("F=1 = 2", "'=' is not a word"),
        ("F = 1", "'F=' has no value; write it without blanks, as in F=1"),
        ("F=1 F=2", "'F=2' says Fn_compute_blocks a second time in 'F=1 F=2'"),
        ("F=1 Fn_compute_blocks=1", "'Fn_compute_blocks=1' says Fn_compute_blocks a second time"),
        ("F=1 R=1 reach=0.5", "reach=0.5 is how far the forecast of taylor goes; add taylor=1"),
        ("F=1 dmd=6 reach=0.5", "reach=0.5 is how far the forecast of taylor goes"),
        ("F=1 foca=3", "'foca=3': foca takes no value"),
    ],
)
def test_a_line_that_is_no_cache(line: str, says: str) -> None:
    """A failure means that a word is left out without a word, or that names are listed which nobody wrote."""
    with pytest.raises(ModelError) as caught:
        parse_cache_line(line)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_settings_of_both_engines() -> None:
    """A failure means that an engine is not given a setting, or one that it cannot have."""
    lines = "; ".join(COMMON + OWN)
    made = parse_cache_settings("ditile,cache-dit", lines)
    assert [s.text for s in made if s.engine == "ditile"] == [*COMMON, *OWN]
    assert [s.text for s in made if s.engine == "cache-dit"] == list(COMMON), "F=0 is ours alone"
    for engines, line, message in (
        ("ditile,peer", "F=1", "'peer' is not known"),
        ("ditile", "F=1 G=2", "'G=2' is not a word"),
        ("ditile", "F=1 foca dmd", "there is one calibrator"),
        ("ditile", "mask=quick", "is not known"),
    ):
        with pytest.raises(ModelError, match=message):
            parse_cache_settings(engines, line)


def test_means_over_captions(tmp_path: Path) -> None:
    """Ratios are taken caption by caption. A failure means that the table says something else than was measured."""
    row: dict[str, Any] = {
        "model": "m",
        "steps": 20,
        "engine": "ditile",
        "setting": "F=1",
        "ssim": 0.9,
        "all_right": True,
        "plain_outside_cpu_s": 1.0,
        "outside_cpu_s": 1.0,
        "plain_wall_s": 9.0,
        "wall_s": 3.0,
        "steps_left_out": 4.0,
        "blocks_left_out": 0.25,
    }
    found = [
        row | {"caption": k, "plain_cpu_s": plain, "cpu_s": cpu, "psnr": psnr}
        for k, (plain, cpu, psnr) in enumerate([(4.0, 2.0, 30.0), (9.0, 3.0, 40.0), (16.0, 4.0, 50.0)])
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in found), "utf-8")
    assert read_image_rows(path, "m", 50) == [] and read_image_rows(tmp_path / "none.jsonl") == []
    [mean] = average_image_rows(read_image_rows(path, "m", 20))
    assert (mean["speedup"], mean["speedup_wall"], mean["speedup_denoise"]) == (3.0, 3.0, 4.0)
    assert (mean["psnr"], mean["all_right"], mean["blocks_left_out"], mean["captions"]) == (40.0, 100.0, 25.0, 3)


def test_the_front_of_an_engine() -> None:
    """A failure means that an engine is drawn with settings that another of its own beats, or beyond its reach."""
    points = [(1.0, 100.0), (1.5, 40.0), (1.6, 44.0), (2.0, 40.0), (2.0, 39.0), (3.0, 30.0)]
    measured = [{"engine": "ditile", "speedup": x, "psnr": y} for x, y in points]
    assert find_speed_quality_front(measured, "ditile") == [(1.0, 100.0), (1.6, 44.0), (2.0, 40.0), (3.0, 30.0)]
    assert interpolate_front_psnr(measured, "ditile", 2.5) == pytest.approx(35.0)
    assert (
        interpolate_front_psnr(measured, "ditile", 3.1) is None
        and interpolate_front_psnr(measured, "cache-dit", 1.5) is None
    )


def test_overhead_is_over_no_cache() -> None:
    """A failure means that the time of the blocks is counted as the cache's."""
    times = {2: {(PLAIN, ""): 5.0, (OURS, "off"): 7.0}, 57: {(PLAIN, ""): 60.0, (OURS, "off"): 73.0}}
    _, ours = make_overhead_rows(times)
    assert ours["added_us"] == {2: 2.0, 57: 13.0}
    assert ours["per_block_us"] == pytest.approx(11 / 55)
    assert len(Transformer(3).blocks) == 3

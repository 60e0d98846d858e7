"""Caches as text: files, lines and flags. A failure would mean that a text says one thing and the run does another."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ditile import Plan, PlanError
from ditile.cache.cache_dit import ParallelismConfig
from ditile.cache.config import (
    Calibration,
    DBCacheConfig,
    DBPruneConfig,
    DMDCalibratorConfig,
    FoCaCalibratorConfig,
    TaylorSeerCalibratorConfig,
)
from ditile.cache.config_text import (
    load_configs,
    parse_cache_line,
)
from ditile.cache.step_mask import check_step_mask
from ditile.plan.errors import LoadError, ModelError
from ditile.plan.flag_parser import add_arguments, collect_arguments, normalize_flags
from ditile.runner.requests.cache_options import CacheOptions

HYBRID = """
cache_config:
  max_warmup_steps: 8
  warmup_interval: 2
  max_cached_steps: -1
  max_continuous_cached_steps: 2
  Fn_compute_blocks: 1
  Bn_compute_blocks: 0
  residual_diff_threshold: 0.12
  enable_taylorseer: true
  taylorseer_order: 1
parallelism_config:
  ulysses_size: auto
  tp_size: 2
  parallel_kwargs:
    attention_backend: native
    extra_parallel_modules: ["text_encoder", "vae"]
"""


def named(configs: dict[str, Any]) -> dict[str, Any]:
    """Without the sections that are absent, cache_config apart; all five are there."""
    assert list(configs) == [
        "cache_config", "calibrator_config", "parallelism_config", "attention_backend", "quantize_config"
    ]  # fmt: skip
    return {name: config for name, config in configs.items() if config is not None or name == "cache_config"}


def test_the_documented_file(tmp_path: Path) -> None:
    path = tmp_path / "hybrid.yaml"
    path.write_text(HYBRID)
    found = load_configs(path)
    assert found == load_configs(str(path))
    assert named(found) == {
        "cache_config": DBCacheConfig(
            Fn_compute_blocks=1, warmup_interval=2, max_continuous_cached_steps=2, residual_diff_threshold=0.12
        ),
        "calibrator_config": TaylorSeerCalibratorConfig(taylorseer_order=1),
        "parallelism_config": ParallelismConfig(
            ulysses_size="auto",
            tp_size=2,
            parallel_kwargs={"attention_backend": "native", "extra_parallel_modules": ["text_encoder", "vae"]},
        ),
    }
    assert found["parallelism_config"].to_plan(8) == Plan(ulysses=4, tensor=2, text="split", vae="rows")


def test_json_and_all_sections(tmp_path: Path) -> None:
    content = {
        "cache_config": {"steps_computation_mask": "fast"},
        "calibrator_config": {"calibrator_type": "foca"},
        "quantize_config": {"quant_type": "int8_weight_only", "exclude_layers": ["embed"]},
        "attention_backend": "native",
    }
    path = tmp_path / "all.json"
    path.write_text(json.dumps(content))
    assert (
        named(load_configs(path))
        == named(load_configs(content))
        == {
            "cache_config": DBCacheConfig(steps_computation_mask="fast"),
            "calibrator_config": FoCaCalibratorConfig(),
            "quantize_config": content["quantize_config"],
            "attention_backend": "native",
        }
    )


COUNT, STEP = st.integers(0, 12), st.integers(-1, 12)
MASK = st.sampled_from(["slow", "ultra", "2,1/3", "6,1,1/1,2,5"])
FIELDS: dict[str, tuple[str, str, st.SearchStrategy[Any]]] = {
    "Fn_compute_blocks": ("F", "--Fn", COUNT),
    "Bn_compute_blocks": ("B", "--Bn", COUNT),
    "residual_diff_threshold": ("R", "--rdt", st.floats(0, 2)),
    "max_warmup_steps": ("W", "--max_warmup_steps", COUNT),
    "warmup_interval": ("I", "--wi", st.integers(1, 5)),
    "max_cached_steps": ("M", "--mc", STEP),
    "max_continuous_cached_steps": ("MC", "--mcc", STEP),
    "steps_computation_mask": ("mask", "--steps-mask", MASK),
    "steps_computation_policy": ("policy", "--steps-policy", st.sampled_from(["dynamic", "static"])),
}
"""The word in a line and the flag of each field."""
FORECASTS: dict[tuple[str, str, str], Calibration | None] = {
    ("", "", ""): None,
    ("taylor", "--taylorseer", "enable_taylorseer"): TaylorSeerCalibratorConfig(),
    ("foca", "--foca", "enable_foca"): FoCaCalibratorConfig(),
    ("dmd", "--dmd", "enable_dmd"): DMDCalibratorConfig(),
}


@given(
    st.fixed_dictionaries({}, optional={name: values for name, (_, _, values) in FIELDS.items()}),
    st.sampled_from(list(FORECASTS)), st.booleans(),
)  # fmt: skip
def test_a_line_a_file_and_flags_say_the_same(values: dict[str, Any], forecast: tuple[str, ...], prunes: bool) -> None:
    """And what the configs' own fields say."""
    mask = values.get("steps_computation_mask")
    fields = values | ({} if mask is None else {"steps_computation_mask": check_step_mask(mask)})
    cache, calibrator = (DBPruneConfig if prunes else DBCacheConfig)(**fields), FORECASTS[forecast]  # type: ignore[index]
    wanted = {"cache_config": cache} | ({} if calibrator is None else {"calibrator_config": calibrator})
    word, flag, key = forecast
    short = [f"{FIELDS[name][0]}={value}" for name, value in values.items()]
    long = [f"{name}={value}" for name, value in values.items()]
    for words in (short, long):
        line = " ".join([*words, word, "prune" if prunes else "F=8" if "Fn_compute_blocks" not in values else ""])
        found = parse_cache_line(line)
        assert found == wanted and type(found["cache_config"]) is type(cache), line
        assert CacheOptions(cache_line=line).build_cache_arguments() == wanted
    section = values | ({key: True} if key else {}) | {"cache_type": "DBPrune" if prunes else "DBCache"}
    assert named(load_configs({"cache_config": section})) == wanted
    assert load_configs(section, return_dict=False) == tuple(load_configs({"cache_config": section}).values())
    argv = [f"{FIELDS[name][1]}={value}" for name, value in values.items()]
    parser = argparse.ArgumentParser()
    add_arguments(parser, CacheOptions, title="cache")
    flags = parser.parse_args(normalize_flags(["--prune" if prunes else "--cache", *([flag] if flag else []), *argv]))
    assert CacheOptions(**collect_arguments(CacheOptions, flags)).build_cache_arguments() == wanted


def test_words_of_a_line() -> None:
    assert parse_cache_line("none") == {"cache_config": None}
    found = parse_cache_line("F=0 taylor=2 reach=0.5 budget=0.3 resets couple=row")
    assert found == {
        "cache_config": DBCacheConfig(
            Fn_compute_blocks=0, max_accumulated_residual_diff_threshold=0.3, accumulated_resets=True, couple="row"
        ),
        "calibrator_config": TaylorSeerCalibratorConfig(taylorseer_order=2, taylorseer_reach=0.5),
    }
    assert parse_cache_line("dmd=8")["calibrator_config"] == DMDCalibratorConfig(dmd_history=8)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"cache_conf": {}}, "did you mean cache_config?"),
        ({"cache_config": {"enable_taylorseer": True, "enable_dmd": True}}, "leave one out"),
        ({"parallelism_config": {"ulyses_size": 2}}, "did you mean ulysses_size?"),
        ({"quantize_config": {"backend": "cache_dit"}}, "try one of|torchao"),
        ({"parallelism_config": {"ulysses_size": "auto", "tp_size": "auto"}}, "ulysses_size and tp_size are auto"),
        ({"cache_config": {"residual_diff_threshold": 10**400}}, "should be"),
    ],
)
def test_what_is_refused(content: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says) as caught:
        load_configs(content)
    assert "\n" not in str(caught.value)


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join(9 * ['*' + last])}]\n" for last, name in zip("abcdefgh", "bcdefghi", strict=True)
)
"""400 characters that stand for 400 million."""


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.yaml", "a: [", "is not YAML"),
        ("a.yaml", "!!python/object/apply:os.getcwd []", "is not YAML"),  # only plain values are read
        ("b.yaml", None, "cannot be read"),
        ("a.json", '{"a": ' + "[" * 100_000, "nested too deep"),
        ("a.yaml", BOMB, "more than 100000 values"),
        ("a.yaml", f"cache_config: {{rdt: 0x{9000 * 'f'}}}", "more than 1024 bits"),
    ],
)
def test_files_that_will_not_do(tmp_path: Path, name: str, text: str | None, says: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(LoadError, match=says) as caught:
        load_configs(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_auto_counts_the_ranks_that_torchrun_started(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ParallelismConfig(ulysses_size="auto", ring_size=2)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert config.to_plan() == Plan(ulysses=3, ring=2)
    monkeypatch.setenv("WORLD_SIZE", "5")
    with pytest.raises(PlanError, match="ulysses=auto with ring=2: 5 rank"):
        config.to_plan()
    monkeypatch.delenv("RANK")
    assert ParallelismConfig(ulysses_size="auto").to_plan() == Plan()

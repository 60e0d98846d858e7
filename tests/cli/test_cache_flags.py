"""Flags of the cache. A failure would mean that a command line that people know is refused, or means something else."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest

from ditile.cache.config import DBCacheConfig, DBPruneConfig, FoCaCalibratorConfig, TaylorSeerCalibratorConfig
from ditile.cli import main
from ditile.plan.errors import PlanError
from ditile.plan.flag_parser import collect_arguments, normalize_flags
from ditile.runner.requests.cache_options import CacheOptions, LoraChoice


def parsed(*words: str) -> argparse.Namespace:
    return main.build_parser().parse_args(normalize_flags(["generate", *words]))


def read(*words: str) -> CacheOptions:
    return CacheOptions(**collect_arguments(CacheOptions, parsed("a", *words)))


LONG = """--cache --prune --Fn 1 --Bn 2 --rdt 0.12 --max-warmup-steps 4 --warmup-interval 2 --max-cached-steps 8
--max-continuous-cached-steps 3 --taylorseer --taylorseer-order 2 --steps-mask fast --steps-policy static --quantize
--parallel-type ulysses --disable-compute-comm-overlap --track-memory --lora a.safetensors --perf"""
SHORT = """--cache --prune --Fn=1 --Bn=2 --rdt=0.12 --w 4 --wi 2 --mc 8 --mcc 3 --taylorseer -order 2 --steps_mask fast
--steps_policy=static -q --parallel ulysses --dcco --track_memory --lora=a.safetensors --perf"""


@pytest.mark.parametrize("words", [LONG, SHORT])
def test_known_flags(words: str) -> None:
    assert read(*words.split()) == CacheOptions(
        cache=True, prune=True, Fn=1, Bn=2, rdt=0.12, max_warmup_steps=4, warmup_interval=2, max_cached_steps=8,
        max_continuous_cached_steps=3, taylorseer=True, taylorseer_order=2, steps_mask="fast", steps_policy="static",
        quantize=True, parallel_type="ulysses", disable_compute_comm_overlap=True, track_memory=True,
        lora=("a.safetensors",), perf=True,
    )  # fmt: skip


def test_degrees_of_a_parallel_type(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match="start it with torchrun, or say how many: --tensor 2"):
        read("--parallel", "tp").collect_plan_values({})
    assert read("--parallel", "tp").collect_plan_values({"tensor": 2}) == {"tensor": 2}
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert read("--parallel", "ring").collect_plan_values({}) == {"ring": 4}
    assert read("--parallel", "ulysses").collect_plan_values({"cfg": 2}) == {"cfg": 2, "ulysses": 2}
    with pytest.raises(PlanError, match="start a multiple of 3"):
        read("--parallel", "ulysses").collect_plan_values({"tensor": 3})


def test_flags_win_over_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(
        "cache_config: {Fn_compute_blocks: 1, max_warmup_steps: 4, enable_taylorseer: true, taylorseer_order: 2}\n"
        "parallelism_config: {ulysses_size: 2, tp_size: 2}\n"
        "quantize_config: {quant_type: int8, exclude_layers: [embed]}\n"
        "attention_backend: native\n"
    )
    alone = read("--config", str(path))
    assert alone.build_cache_arguments() == {
        "cache_config": DBCacheConfig(Fn_compute_blocks=1, max_warmup_steps=4),
        "calibrator_config": TaylorSeerCalibratorConfig(taylorseer_order=2),
        "quantize_config": {"quant_type": "int8", "exclude_layers": ["embed"]},
        "attention_backend": "native",
    }
    assert alone.collect_plan_values({"tensor": 1}) == {"ulysses": 2, "tensor": 1}
    both = read("--config", str(path), "--w", "8", "--prune", "-order", "1", "-q").build_cache_arguments()
    assert both["cache_config"] == DBPruneConfig(Fn_compute_blocks=1, max_warmup_steps=8)
    assert both["calibrator_config"] == TaylorSeerCalibratorConfig(taylorseer_order=1)
    assert both["quantize_config"] == {"quant_type": "float8_weight_only", "exclude_layers": ["embed"]}
    assert read("--config", str(path), "--foca").build_cache_arguments()["calibrator_config"] == FoCaCalibratorConfig()


@pytest.mark.parametrize(
    "text", ["style.safetensors:0.1234567", r"C:\loras\style.safetensors", "transformer_2=a.safetensors:2.5"]
)
def test_a_lora_is_described_as_it_was_named(text: str) -> None:
    """A failure: another scale, where an option is written and read again."""
    assert LoraChoice.parse(text).describe() == text


def test_a_lora_lies_in_the_home_of_its_user() -> None:
    """A failure: bash leaves ~ in `--lora=~/a` and in what is quoted, and the file would not be found."""
    assert LoraChoice.parse("transformer_2=~/a.safetensors:0.5").source == os.path.expanduser("~/a.safetensors")

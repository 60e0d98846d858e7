"""Flags of the cache. A failure would mean that a command line that people know is refused, or means something else."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from ditile import Plan
from ditile.cache.config import (
    DBCacheConfig,
    DBPruneConfig,
    DMDCalibratorConfig,
    FoCaCalibratorConfig,
    TaylorSeerCalibratorConfig,
)
from ditile.cli import main
from ditile.cli.cache_options import QUANTIZE_TYPES, CacheOptions
from ditile.cli.flag_aliases import merge_alias_values
from ditile.cli.options import GenerateOptions, RunOptions
from ditile.errors import DitileError, ModelError, PlanError
from ditile.plan.flags import collect_arguments, list_flags, normalise_flags


def parsed(*words: str) -> argparse.Namespace:
    return main.build_parser().parse_args(normalise_flags(["generate", *words]))


def read(*words: str) -> CacheOptions:
    return CacheOptions(**collect_arguments(CacheOptions, parsed("a", *words)))


def made(kind: type, *words: str) -> dict[str, Any]:
    arguments = parsed(*words)
    return merge_alias_values(arguments, kind, collect_arguments(kind, arguments))


@pytest.mark.parametrize(
    ("flag", "field", "default", "text", "value"),
    [
        ("--cache", "cache", False, None, True),
        ("--prune", "prune", False, None, True),
        ("--Fn", "Fn", 8, "1", 1),
        ("--Bn", "Bn", 0, "2", 2),
        ("--rdt", "rdt", 0.08, "0.12", 0.12),
        ("--max-warmup-steps", "max_warmup_steps", 8, "4", 4),
        ("--max_warmup_steps", "max_warmup_steps", 8, "4", 4),
        ("--w", "max_warmup_steps", 8, "4", 4),
        ("--warmup-interval", "warmup_interval", 1, "2", 2),
        ("--wi", "warmup_interval", 1, "2", 2),
        ("--max-cached-steps", "max_cached_steps", -1, "8", 8),
        ("--mc", "max_cached_steps", -1, "-1", -1),
        ("--max-continuous-cached-steps", "max_continuous_cached_steps", -1, "3", 3),
        ("--mcc", "max_continuous_cached_steps", -1, "3", 3),
        ("--taylorseer", "taylorseer", False, None, True),
        ("--foca", "foca", False, None, True),
        ("--dmd", "dmd", False, None, True),
        ("--steps-mask", "steps_mask", None, "fast", "fast"),
        ("--steps-policy", "steps_policy", "dynamic", "static", "static"),
        ("--quantize", "quantize", False, None, True),
        ("-q", "quantize", False, None, True),
        ("--parallel-type", "parallel_type", None, "ulysses", "ulysses"),
        ("--parallel", "parallel_type", None, "tp", "tp"),
        ("--disable-compute-comm-overlap", "disable_compute_comm_overlap", False, None, True),
        ("--dcco", "disable_compute_comm_overlap", False, None, True),
        ("--track-memory", "track_memory", False, None, True),
        ("--lora", "lora", None, "a.safetensors", "a.safetensors"),
        ("--perf", "perf", False, None, True),
    ],
)
def test_known_flags_and_their_defaults(flag: str, field: str, default: Any, text: str | None, value: Any) -> None:
    assert getattr(CacheOptions(), field) == default
    found = read("--cache", flag, *([] if text is None else [text]))
    assert getattr(found, field) == value and type(getattr(found, field)) is type(value)


@pytest.mark.parametrize("flag", ["--taylorseer-order", "-order"])
def test_the_order_of_taylorseer(flag: str) -> None:
    assert CacheOptions().taylorseer_order == 1
    assert read("--cache", "--taylorseer", flag, "1").taylorseer_order == 1
    assert read("--cache", "--taylorseer", f"{flag}=2").taylorseer_order == 2


def test_the_type_of_quantization() -> None:
    assert CacheOptions().quantize_type == "float8_weight_only"
    for name in QUANTIZE_TYPES:
        assert read("-q", "--quantize-type", name).build_cache_arguments()["quantize_config"] == {"quant_type": name}
    assert read("--quantize").build_cache_arguments() == {
        "cache_config": None, "quantize_config": {"quant_type": "float8_weight_only"},
    }  # fmt: skip


def test_flags_that_are_other_options() -> None:
    assert GenerateOptions(**made(GenerateOptions, "--prompt", "a cat")).prompt == "a cat"
    assert made(GenerateOptions, "a", "--model-path", "m", "--steps", "3", "--height", "64", "--width", "32") == {
        "prompt": "a", "model": "m", "steps": 3, "height": 64, "width": 32,
    }  # fmt: skip
    assert made(GenerateOptions, "a", "--negative-prompt", "b")["negative_prompt"] == "b"
    assert (
        made(RunOptions, "a", "--attn", "flash")
        == {"attention": "flash"}
        == made(RunOptions, "a", "--attention", "flash")
    )
    assert made(Plan, "a", "--ulysses-anything") == {"uaa": True} == made(Plan, "a", "--uaa")
    assert made(Plan, "a") == {} == made(RunOptions, "a")
    assert RunOptions().attention is None


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (GenerateOptions, ("a", "--prompt", "b")),
        (GenerateOptions, ("a", "--model", "m", "--model-path", "n")),
        (RunOptions, ("a", "--attn", "flash", "--attention", "native")),
        (Plan, ("a", "--ulysses-anything", "--no-uaa")),
    ],
)
def test_a_flag_and_its_alias_may_not_disagree(kind: type, words: tuple[str, ...]) -> None:
    with pytest.raises(DitileError, match="give one of them"):
        made(kind, *words)
    assert made(RunOptions, "a", "--attn", "flash", "--attention", "flash") == {"attention": "flash"}


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("", {"cache_config": None}),
        ("--cache", {"cache_config": DBCacheConfig()}),
        (
            "--cache --Fn 1 --Bn 0 --rdt 0.12 --w 4 --wi 2 --mc 20 --mcc 3",
            {
                "cache_config": DBCacheConfig(
                    Fn_compute_blocks=1, residual_diff_threshold=0.12, max_warmup_steps=4, warmup_interval=2,
                    max_cached_steps=20, max_continuous_cached_steps=3,
                )
            },
        ),
        (
            "--cache --taylorseer --taylorseer-order 1 --Fn 1",
            {"cache_config": DBCacheConfig(Fn_compute_blocks=1), "calibrator_config": TaylorSeerCalibratorConfig()},
        ),
        ("--cache --foca", {"cache_config": DBCacheConfig(), "calibrator_config": FoCaCalibratorConfig()}),
        ("--prune --dmd", {"cache_config": DBPruneConfig(), "calibrator_config": DMDCalibratorConfig()}),
        (
            "--cache --steps-mask ultra --steps-policy static",
            {"cache_config": DBCacheConfig(steps_computation_mask="ultra", steps_computation_policy="static")},
        ),
        (
            "--cache --steps-mask 2,1/3",
            {"cache_config": DBCacheConfig(steps_computation_mask=(1, 1, 0, 0, 0, 1))},
        ),
    ],
)  # fmt: skip
def test_what_the_flags_ask_for(words: str, wanted: dict[str, Any]) -> None:
    found = read(*words.split()).build_cache_arguments()
    assert found == wanted and type(found["cache_config"]) is type(wanted["cache_config"])


def test_the_command_lines_of_the_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the examples, behind the name of the script; --compile is no option of the cache."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for line in (
        "--cache --Fn 8 --Bn 0 --rdt 0.08",
        "--cache --quantize --quantize-type float8_weight_only",
        "--cache --parallel-type ulysses --attn flash --uaa",
        "--cache --parallel ulysses",
        "--cache --quantize --Fn 1 --Bn 0",
        "--cache --taylorseer --taylorseer-order 1 --Fn 1",
    ):
        found = read(*line.split())
        assert found.build_cache_arguments()["cache_config"] is not None
        assert Plan(**found.collect_plan_values(made(Plan, "a", *line.split()))).world == (
            2 if "parallel" in line else 1
        )


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
    ("words", "says"),
    [
        ("--Fn 1", "--Fn says how to cache, and nothing is cached; add --cache"),
        ("--taylorseer", "add --cache"),
        ("--steps-mask fast", "add --cache"),
        ("--cache --Fn -1", "Fn_compute_blocks=-1"),
        ("--cache --rdt -1", "residual_diff_threshold=-1"),
        ("--cache --taylorseer --foca", "--taylorseer and --foca"),
        ("--cache -order 2", "add it"),
        ("--cache --steps-mask fats", "did you mean fast?"),
        ("--quantize-type int8", "is for --quantize"),
        ("-q --quantize-type int3", "quantize_type='int3'"),
        ("--fuse-lora", "add --lora FILE"),
        ("--config nothing.yaml", "nothing.yaml"),
        ("--cache --steps-policy lazy", "one of dynamic, static"),
        ("--parallel pp", "one of tp, ulysses, ring"),
    ],
)
def test_what_is_refused(words: str, says: str) -> None:
    with pytest.raises(DitileError, match=says) as caught:
        read(*words.split())
    assert "\n" not in str(caught.value)


def test_no_flag_is_there_twice() -> None:
    """`argparse` refuses a flag that two options share; near misses find aliases too."""
    flags = [name for kind in main.COMMANDS["generate"].options for name in list_flags(kind)]
    assert len(flags) == len(set(flags))
    with pytest.raises(PlanError, match="did you mean --track-memory?"):
        main._parse_arguments(["generate", "a", "--track-memry"])

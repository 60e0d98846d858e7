"""`ditile generate` with caches, LoRAs and few bits, on a tiny FLUX of five blocks, and what its flags mean.

A failure would mean that a flag is accepted and does nothing, or that nobody is told what was left out.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from ditile.cache.config import DBCacheConfig, DBPruneConfig, FoCaCalibratorConfig, TaylorSeerCalibratorConfig
from ditile.cli import generate, main
from ditile.plan.errors import PlanError
from ditile.plan.flag_parser import collect_arguments, normalize_flags
from ditile.runner.requests.cache_options import CacheOptions, LoraChoice
from tests import tiny
from tests.cli.test_cli import ditile, opened
from tests.runner.loras import folder_of

pytestmark = pytest.mark.usefixtures("elsewhere")

CALL = {"height": 32, "width": 24, "num_inference_steps": 4, "max_sequence_length": 12}
CACHE = ("--cache", "--Fn", "1", "--w", "2", "--rdt", "1")
"""Both steps after the warmup are left out, whatever they are."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "flux"
    tiny.flux().save_pretrained(folder)
    (folder / "generation.json").write_text(json.dumps(CALL))
    return str(folder)


@pytest.fixture(scope="module")
def loras(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of("flux", tmp_path_factory.mktemp("loras"))


def drawn(capsys: pytest.CaptureFixture[str], model: str, *words: str) -> dict[str, Any]:
    """The summary of a run, and the table beside it."""
    prompt = () if "--prompts-file" in words else ("a red circle",)
    words = ("generate", *prompt, "--model", model, "--seed", "7", "--threads", "1", *words, "--json", "-")
    assert main.main(list(words)) == 0
    out, err = capsys.readouterr()
    facts: dict[str, Any] = json.loads(out)
    return facts | {"table": err}


def pixels(path: str) -> Any:
    return np.asarray(opened(path))


def test_the_summary_says_what_was_left_out(capsys: pytest.CaptureFixture[str], model: str) -> None:
    facts = drawn(capsys, model, *CACHE, "--taylorseer", "--out", "a.png")
    (entry,) = facts["cache"]["contexts"]
    assert entry["cached_steps"] == [[2, 3]] and entry["settings"] == "DBCache_F1B0_W2I1M0MC0_R1_T1O1"
    assert entry["blocks_saved"] == facts["cache"]["blocks_saved"] == pytest.approx(2 / 4 * 4 / 5)
    assert "40% of blocks saved" in facts["table"] and "2 of 4 steps cached whole (2-3)" in facts["table"]
    said = json.loads(opened("a.png").text["cache"])
    assert said == facts["settings"] and said["cache_config"]["Fn_compute_blocks"] == 1
    assert said["calibrator_config"]["kind"] == "TaylorSeerCalibratorConfig"

    plain = drawn(capsys, model, "--out", "b.png")
    assert "cache" not in plain and "cache" not in opened("b.png").text
    never = drawn(capsys, model, "--cache", "--Fn", "1", "--rdt", "0", "--out", "c.png")
    assert never["cache"] == {"blocks_saved": 0.0, "contexts": []} and "compute every step" in never["table"]
    assert np.array_equal(pixels("b.png"), pixels("c.png")) and not np.array_equal(pixels("a.png"), pixels("b.png"))


def test_weights_memory_and_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """--perf draws four times, and the picture is that of one time."""
    calls: list[float] = []
    summed = generate.compute_median_reports
    monkeypatch.setattr(
        generate, "compute_median_reports", lambda reports: calls.append(len(reports)) or summed(reports)
    )
    words = ("-q", "--quantize-type", "int8_weight_only")
    facts = drawn(capsys, model, *CACHE, *words, "--track-memory", "--perf", "--out", "a.png")
    assert calls == [3] and len(facts["measured_seconds"]) == 3
    assert sorted(facts["measured_seconds"])[1] == facts["seconds"]["total"]
    assert facts["key_bytes"] == [0] and facts["cache_bytes"][0] > 0
    for word in ("int8_weight_only", "held by caches", "medians of 3 runs"):
        assert word in facts["table"]
    drawn(capsys, model, *CACHE, *words, "--out", "b.png")
    assert np.array_equal(pixels("a.png"), pixels("b.png"))
    drawn(capsys, model, *CACHE, "--out", "c.png")
    assert not np.array_equal(pixels("a.png"), pixels("c.png")), "nothing was quantized"


def test_several_loras_with_their_scales(capsys: pytest.CaptureFixture[str], model: str, loras: Path) -> None:
    """The image is that of a pipeline of diffusers with these adapters and scales; the other flag has no scale."""
    one = str(loras / "one.safetensors")
    two = str(loras / "two.safetensors")
    facts = drawn(capsys, model, "--lora", f"{one}:0.5", "--lora", two, "--out", "both.png")
    assert facts["settings"]["lora"] == f"{one}:0.5, {two}" and "two.safetensors" in facts["table"]
    assert "No LoRA keys" not in facts["table"] and "peft_config" not in facts["table"]
    pipe = tiny.quiet(diffusers.FluxPipeline.from_pretrained(model))
    for name in ("one", "two"):
        pipe.load_lora_weights(loras, weight_name=f"{name}.safetensors", adapter_name=name)
    pipe.set_adapters(["one", "two"], [0.5, 1.0])
    wanted = pipe("a red circle", **CALL, generator=torch.Generator().manual_seed(7)).images[0]
    assert np.array_equal(pixels("both.png"), np.asarray(wanted))
    # Each rank reads its share of the weights, and cuts the LoRAs alike.
    drawn(capsys, model, "--lora", f"{one}:0.5", "--lora", two, "--tensor", "2", "--out", "shared.png")
    assert np.abs(pixels("shared.png").astype(int) - pixels("both.png")).max() <= 1
    drawn(capsys, model, "--lora", f"{one}:0.5", "--out", "one.png")
    assert not np.array_equal(pixels("both.png"), pixels("one.png"))


def test_two_stages_and_a_file_of_prompts(capsys: pytest.CaptureFixture[str], model: str, loras: Path) -> None:
    """Every stage says what it left out, of each picture; the same command with other settings draws anew."""
    Path("prompts.txt").write_text("a red circle\na blue square\n")
    words = ("--prompts-file", "prompts.txt", "--out-dir", "d", *CACHE, "--lora", str(loras / "one.safetensors"))
    words += ("--fuse-lora", "--pipefusion", "2", "--patches", "1")
    assert main.main(["generate", *words, "--model", model, "--threads", "1", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    facts = json.loads(out)
    assert [entry["stage"] for entry in facts["cache"]["contexts"]] == [0, 1]
    for entry in facts["cache"]["contexts"]:
        assert entry["cached_steps"] == [[2, 3], [2, 3]] and entry["steps"] == 8
    assert "stage 1, " in err and "4 of 8 steps cached whole, 40% of blocks saved" in err
    assert drawn(capsys, model, *words, "--seed", "0")["skipped"] == 2, "the same settings, the same pictures"
    words = ("--prompts-file", "prompts.txt", "--out-dir", "d", "--seed", "0")
    assert drawn(capsys, model, *words, *CACHE)["skipped"] == 0
    assert drawn(capsys, model, *words, *CACHE)["skipped"] == 2
    assert drawn(capsys, model, *words, *CACHE[:-1], "0.9")["skipped"] == 0
    assert drawn(capsys, model, *words)["skipped"] == 0


def test_the_flags_under_torchrun(model: str) -> None:
    """--parallel-type takes the ranks that torchrun started, and all of them draw the one seed that the first chose."""
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "ditile")
    flags = ["--parallel", "ulysses", "--uaa", "--dcco", "--attn", "native", "--out", "a.png", "--json", "a.json"]
    done = ditile("generate", "a red circle", "--model-path", model, *flags, *CACHE, module=launcher)
    assert done.returncode == 0, done.stderr
    facts = json.loads(Path("a.json").read_text())
    assert facts["ranks"] == 2 and opened("a.png").text["seed"] == str(facts["seed"])
    assert facts["plan"] == "ulysses=2 uaa=True" and facts["cache"]["contexts"][0]["cached_steps"] == [[2, 3]]


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

"""examples/run_flux_cp.py with the command lines of cache-dit's guides, on a FLUX of ten blocks.

A failure would mean that a command line which people know is refused, or leaves nothing out. And what the examples read
on each rank, without reading it.
"""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._dynamo import config as dynamo

import ditile
from ditile import Plan
from tests.cache.test_cache_dit_scripts import flux
from tests.pool import Pool

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("models") / "flux"
    flux(2, 8).save_pretrained(path)
    call = {"height": 32, "width": 24, "num_inference_steps": 12, "max_sequence_length": 12}
    (path / "generation.json").write_text(json.dumps(call))
    return str(path)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Plan | None]:
    """The plans that a pipeline is loaded for and then divided by; nothing is loaded, and nothing drawn."""
    plans: list[Plan | None] = []

    def divided(pipe: Any, plan: Plan, **_: Any) -> Any:
        plans.append(plan)
        return lambda *_, **__: None

    monkeypatch.setattr(ditile, "load", lambda name, *, plan=None: plans.append(plan))
    monkeypatch.setattr(ditile, "load_lora", lambda pipe, source: None)
    monkeypatch.setattr(ditile, "parallelize", divided)
    return plans


def example(name: str) -> dict[str, Any]:
    """What an example defines."""
    return runpy.run_path(str(ROOT / "examples" / name))


def test_flux_torchrun_reads_what_its_plan_gives_a_rank(
    seen: list[Plan | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure means that every rank has the whole of FLUX in its memory."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    example("flux_torchrun.py")["main"]()
    assert seen == [Plan(pipefusion=4, patches=4)] * 2


@pytest.mark.parametrize(
    ("line", "loaded"),
    [
        ("--parallel-type tp", Plan(tensor=2)),
        ("--parallel-type tp --lora a.safetensors", None),
        ("--parallel-type ulysses --lora a.safetensors", Plan(ulysses=2)),
    ],
)
def test_run_flux_cp_reads_what_its_plan_gives_a_rank(
    seen: list[Plan | None], monkeypatch: pytest.MonkeyPatch, line: str, loaded: Plan | None
) -> None:
    """But for a LoRA under `tensor`, which is cut with the whole weights."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["run_flux_cp.py", *line.split()])
    names = example("run_flux_cp.py")
    args, options = names["parse_arguments"](), names["CacheOptions"]
    names["prepare_runner"](args, options(**names["collect_arguments"](options, args)))
    assert seen[0] == loaded and seen[1] in (Plan(tensor=2), Plan(ulysses=2))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--cache --Fn 8 --Bn 0 --rdt 0.08 --track-memory --perf", "DBCache_F8B0_W8I1M0MC0_R0.08"),
        ("--cache --quantize --compile --Fn 1 --Bn 0 --steps 10 --height 16 --width 16", "DBCache_F1B0"),
    ],
)
def test_the_command_lines_of_the_example(
    tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str,
    says: str,
) -> None:  # fmt: skip
    """In this process. Nothing is compiled: what inductor makes of blocks has tests of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run_flux_cp.py", "--model-path", folder, *line.split()])
    with dynamo.patch(disable=True):
        runpy.run_path(str(ROOT / "examples" / "run_flux_cp.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert says in said and "what the cache left out" in said
    assert ("peak memory" in said) == ("--track-memory" in line)
    assert (tmp_path / "flux.png").exists()


def run_example_on_rank(words: list[str]) -> str:
    """What the example prints on a rank."""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(sys, "argv", ["run_flux_cp.py", *words])
        # The pool ends the group itself.
        patch.setattr(dist, "destroy_process_group", lambda: None)
        runpy.run_path(str(ROOT / "examples" / "run_flux_cp.py"), run_name="__main__")
    return said.getvalue()


def test_the_example_on_two_ranks(pool: Pool, tmp_path: Path, folder: str) -> None:
    line = "--cache --parallel-type ulysses --uaa --dcco --attn native"
    words = ["--model-path", folder, "--out", str(tmp_path / "flux.png"), *line.split()]
    first, second = pool.run(run_example_on_rank, 2, words)
    assert "under ulysses=2 uaa=True" in first and "what the cache left out" in first and not second
    assert (tmp_path / "flux.png").exists()

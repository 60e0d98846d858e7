"""LoRAs that are switched between the calls of one runner: each picture as if only those of its call were loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ditile
from ditile.plan.errors import ModelError
from ditile.runner.lora import forget_loras, list_loaded_loras, select_loras
from tests.pool import on_ranks
from tests.runner.cases import MAKE, different, run, same
from tests.runner.loras import folders_of


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return folders_of(["flux", "sd3.5 medium"], tmp_path_factory)


def load(pipe: Any, folder: Path, *adapters: str) -> None:
    for adapter in adapters:
        ditile.load_lora(pipe, folder, weight_name=f"{adapter}.safetensors", adapter_name=adapter)


def count_bytes(pipe: Any) -> int:
    return sum(x.numel() * x.element_size() for x in pipe.transformer.parameters())


CHOICES: list[dict[str, float]] = [{"one": 1.0}, {"two": 0.5}, {"one": 0.4, "narrow": 1.5}, {"narrow": 1.0}]


def draw_fresh(name: str, folder: Path, plan: dict[str, Any], scales: dict[str, float]) -> Any:
    """The picture of a runner into which these LoRAs alone were loaded."""
    pipe = MAKE[name]()
    runner = ditile.parallelize(pipe, ditile.Plan(**plan))
    load(pipe, folder, *scales)
    if scales:
        pipe.set_adapters(list(scales), list(scales.values()))
    return run(runner, name)


PLANS: list[dict[str, Any]] = [{"pipefusion": 2, "warmup": 1}, {"ulysses": 2}, {"data": 2}]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("name", ["flux", "sd3.5 medium"])
@on_ranks(2)
def test_each_call_has_its_own_loras(folders: dict[str, Path], name: str, plan: dict[str, Any]) -> None:
    """A failure means that the LoRA of one request changes the picture of another, or that memory grows."""
    folder = folders[name]
    wanted = [draw_fresh(name, folder, plan, scales) for scales in CHOICES]
    plain = draw_fresh(name, folder, plan, {})
    pipe = MAKE[name]()
    runner = ditile.parallelize(pipe, ditile.Plan(**plan))
    before = count_bytes(pipe)
    select_loras(runner, {})
    same(run(runner, name), plain, f"{name} {plan}: before any LoRA")
    load(pipe, folder, "one", "two", "narrow")
    for scales, picture in [*zip(CHOICES, wanted, strict=True)] * 2:
        select_loras(runner, scales)
        same(run(runner, name), picture, f"{name} {plan}: {scales}")
        different(picture, plain)
        select_loras(runner, {})
        same(run(runner, name), plain, f"{name} {plan}: without")
    full = count_bytes(pipe)
    forget_loras(runner, ["two"])
    assert before < count_bytes(pipe) < full and list_loaded_loras(pipe) == {"one", "narrow"}
    select_loras(runner, CHOICES[2])
    same(run(runner, name), wanted[2], f"{name} {plan}: after another was deleted")
    forget_loras(runner, ["one", "narrow"])
    assert count_bytes(pipe) == before and not list_loaded_loras(pipe)
    same(run(runner, name), plain, f"{name} {plan}: after the last was deleted")
    load(pipe, folder, "two")
    select_loras(runner, CHOICES[1])
    same(run(runner, name), wanted[1], f"{name} {plan}: loaded again")


def test_what_is_not_loaded_is_refused(folders: dict[str, Path]) -> None:
    """A failure means a picture without the LoRA that was asked for."""
    pipe = MAKE["flux"]()
    with pytest.raises(ModelError, match="LoRA 'one' is not loaded; there are none"):
        select_loras(pipe, {"one": 1.0})
    load(pipe, folders["flux"], "one")
    with pytest.raises(ModelError, match="LoRA 'two' is not loaded; there are one"):
        select_loras(pipe, {"one": 1.0, "two": 1.0})
    with pytest.raises(ModelError, match="scale nan"):
        select_loras(pipe, {"one": float("nan")})
    with pytest.raises(ModelError, match="'two' is not loaded"):
        forget_loras(pipe, ["two"])

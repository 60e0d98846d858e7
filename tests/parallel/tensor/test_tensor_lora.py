"""LoRAs that were loaded before tensor parallelism is applied work on, are switched, fused and unloaded, as ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import ditile
from ditile.plan.errors import ModelError, StateError
from ditile.plan.plan import Plan
from ditile.runner.runner import parallelize
from tests import tiny
from tests.parallel.tensor.tensors import sharded
from tests.pool import Pool
from tests.runner.cases import MAKE, measure_error, run, same
from tests.runner.loras import folder_of, load, write

TOLERANCE = 1e-5


def refused(folder: Path) -> list[str]:
    pipe, results = MAKE["flux"](), []
    load("one")(pipe, folder)
    with sharded(pipe.transformer, "row") as cut:
        cut.guard_pipeline_loaders(pipe)
        pipe.fuse_lora()
        for wrong in (
            cut.restore_whole_weights,
            lambda: load("two")(pipe, folder),
            lambda: pipe.transformer.load_lora_adapter({}),
        ):
            with pytest.raises(StateError) as caught:
                wrong()
            results.append(str(caught.value))
        pipe.unfuse_lora()
    load("two")(pipe, folder)
    return results


def test_what_needs_whole_weights_is_refused(pool: Pool, tmp_path: Path) -> None:
    """A failure: a LoRA is silently lost with the share that it was fused into, or loaded into a part of the model."""
    for fused, loaded, adapter in pool.run(refused, 2, folder_of("flux", tmp_path)):
        assert "are fused into this rank's share of transformer_blocks.0.attn.to_q, and [] were when it" in fused
        assert (
            "FluxPipeline.load_lora_weights needs whole weights" in loaded and "before the model is divided" in loaded
        )
        assert "FluxTransformer2DModel.load_lora_adapter needs whole weights" in adapter


PLAN = Plan(tensor=2, tensor_weights=(1, 3))


def into_a_share(model: Path, loras: Path) -> tuple[list[str], Tensor]:
    """What is said to LoRAs before `parallelize`, and the picture of a pipeline that was loaded whole.

    That of one that was loaded for the plan, into which the LoRA is loaded after it, is the same.
    """
    pipe, said = tiny.quiet(ditile.load(str(model), plan=PLAN)), []
    for adapter in ("one", "narrow"):
        with pytest.raises(ModelError) as caught:
            ditile.load_lora(pipe, loras, weight_name=f"{adapter}.safetensors", adapter_name=adapter)
        said.append(str(caught.value))
    assert not hasattr(pipe.transformer, "peft_config"), "it was touched"
    runner = parallelize(pipe, PLAN)
    whole: Any = tiny.quiet(ditile.load(str(model)))
    ditile.load_lora(whole, loras, weight_name="one.safetensors", adapter_name="one")
    picture = run(parallelize(whole, PLAN), "flux")
    ditile.load_lora(pipe, loras, weight_name="one.safetensors", adapter_name="one")
    same(run(runner, "flux"), picture, "loaded after parallelize")
    return said, picture


def test_a_pipeline_that_was_loaded_for_the_plan_takes_loras_after_the_cut(pool: Pool, tmp_path: Path) -> None:
    """A failure: a traceback from inside another library or, of the narrow one, a weight that zeros were added to."""
    plain = MAKE["flux"]()
    plain.save_pretrained(tmp_path / "model")
    write("flux", tmp_path, "one", 1)
    write("flux", tmp_path, "narrow", 3, within="single_transformer_blocks.0.proj_out")
    load("one")(plain, tmp_path)
    wanted = run(plain, "flux")
    for said, picture in pool.run(into_a_share, 2, tmp_path / "model", tmp_path):
        for line in said:
            assert "of this FluxTransformer2DModel only a share of tensor=2 was loaded" in line
            assert "call parallelize, and load the LoRA into its runner's pipeline" in line
        assert measure_error(picture, wanted) < TOLERANCE

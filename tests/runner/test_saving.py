"""A pipeline of which a rank has a part refuses to be saved or copied, and writes nothing; a whole one is saved."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn

from ditile.model.hooks.placeholders import LORA_LOADERS, SAVING_METHODS
from ditile.plan.errors import StateError
from ditile.plan.plan import Plan
from ditile.runner.runner import parallelize
from tests.parallel.text.test_text import deeper
from tests.pool import on_ranks
from tests.runner.cases import run

DIVIDED = [
    {"pipefusion": 2},
    {"tensor": 2},
    {"tensor": 2, "split_scheme": "sequence"},
    {"pipefusion": 2, "warmup_mode": "sequence", "patches": 2},
    {"ulysses": 2, "text": "split"},
]


WAYS: list[Callable[[Any, Path], Any]] = [
    lambda owner, folder: owner.save_pretrained(folder),
    lambda owner, _: owner.push_to_hub("nobody/nothing"),
    lambda owner, _: copy.deepcopy(owner),
    lambda owner, _: torch.save(owner, io.BytesIO()),
]
"""How a pipeline or a model may be saved."""
WAYS_OF_MODELS: list[Callable[[Any, Path], Any]] = [
    lambda model, _: model.state_dict(),
    lambda model, _: get_peft_model_state_dict(model, adapter_name="one"),
]
"""How else a model may be saved."""


def refuse_all(pipe: Any, models: list[nn.Module], folder: Path) -> None:
    """Every way to save a pipeline and its models raises `StateError` and writes nothing."""
    ways = [(pipe, way) for way in WAYS] + [(model, way) for model in models for way in (*WAYS, *WAYS_OF_MODELS)]
    for owner, save in ways:
        if save is WAYS_OF_MODELS[1] and not hasattr(owner, "peft_config"):
            continue
        with pytest.raises(StateError, match=f"of this {type(owner).__name__} would lack weights"):
            save(owner, folder)
    assert not folder.exists()


def saved(pipe: Any, folder: Path) -> dict[str, Tensor]:
    """The tensors of all models of a pipeline, as it saves them."""
    pipe.save_pretrained(folder)
    weights = sorted(folder.glob("*/*.safetensors"))
    return {f"{file.parent.name}.{name}": tensor for file in weights for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("plan", DIVIDED, ids=str)
@on_ranks(2)
def test_a_part_of_a_pipeline_is_not_saved(tmp_path: Path, plan: dict[str, Any]) -> None:
    """A failure means a folder that looks like a model and lacks half of the weights, or a pipeline that can never be
    saved again."""
    divided, pipe = Plan(**plan), deeper("sd3.5 medium")
    own = tmp_path / str(torch.distributed.get_rank())
    wanted = saved(pipe, own / "before")
    runner = parallelize(pipe, divided, keep_weights=True)
    # Those of which each rank has a part.
    prefix = "transformer" if divided.text == "each" else "text_encoder"
    models = [part for name, part in pipe.components.items() if name.startswith(prefix) and part is not None]
    refuse_all(pipe, models, own / "divided")
    run(runner, "sd3.5 medium", num_inference_steps=1)
    refuse_all(pipe, models, own / "divided")
    runner.restore()
    actual = saved(pipe, own / "restored")
    assert list(actual) == list(wanted) and all(torch.equal(actual[name], wanted[name]) for name in wanted)
    copy.deepcopy(pipe)
    attributes = {name for owner in (pipe, *models) for name in vars(owner)}
    assert not attributes & {*SAVING_METHODS, *LORA_LOADERS}

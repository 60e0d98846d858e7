"""`restore` gives the pipeline back bit for bit or says why not, and in the meantime nothing of it has another name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ditile.plan.errors import StateError
from ditile.plan.plan import Plan
from ditile.runner.runner import parallelize
from tests.pool import on_ranks
from tests.runner.cases import MAKE, divided, run, same
from tests.runner.loras import NAMES, Edit, edits, folders_of

STEPS = 4
EXACT = {"patches": 3, "warmup": STEPS}
SHORT = {"num_inference_steps": 2}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return folders_of(NAMES, tmp_path_factory)


def attributes(pipe: Any) -> dict[str, dict[str, Any]]:
    """What the pipeline, its scheduler and every module of its transformer hold."""
    modules = {f"transformer.{path}": dict(vars(module)) for path, module in pipe.transformer.named_modules()}
    return modules | {"pipe": dict(vars(pipe)), "scheduler": dict(vars(pipe.scheduler))}


def list_names(model: Any) -> list[str]:
    """The names of what a model has, in their order: parameters, and then buffers."""
    return [name for name, _ in (*model.named_parameters(), *model.named_buffers())]


@pytest.mark.parametrize("name", NAMES)
@on_ranks(2)
def test_the_pipeline_is_untouched(folders: dict[str, Path], name: str) -> None:
    """A failure means that a LoRA, a saved state or another tool meets other names than the model has."""
    folder = folders[name]
    pipe = MAKE[name]()
    edits(name)["loaded"](pipe, folder)
    everything = list_names(pipe.transformer)
    processors = list(pipe.transformer.attn_processors)
    seen: list[Any] = []

    def look(*_: Any) -> dict[str, Any]:
        seen.append((list_names(pipe.transformer), list(pipe.transformer.attn_processors)))
        return {}

    if name.startswith("pixart"):
        call: dict[str, Any] = {"callback": look}
    else:
        call = {"callback_on_step_end": look, "callback_on_step_end_tensor_inputs": []}
    runner = parallelize(pipe, Plan(pipefusion=2, **EXACT | {"warmup": 1}))
    look()
    assert set(seen[0][0]) < set(everything) and set(seen[0][1]) < set(processors)
    assert seen[0][0] == [path for path in everything if path in set(seen[0][0])]
    run(runner, name, **call)
    before = attributes(pipe)
    run(runner, name, **call)
    look()
    assert len(seen) == 2 + 2 * STEPS and all(actual == seen[0] for actual in seen), f"{name}: keys changed"
    after = attributes(pipe)
    assert list(after) == list(before)
    for path, held in after.items():
        assert list(held) == list(before[path]), f"{path} holds {set(held) ^ set(before[path])}"
        for key, value in held.items():
            was = before[path][key]
            equal = torch.equal(value, was) if isinstance(value, torch.Tensor) else value is was or value == was
            assert equal and type(value) is type(was), f"{path}.{key}: {value}, and was {was}"


def tensors(pipe: Any) -> dict[str, torch.Tensor]:
    return {path: tensor.clone() for path, tensor in pipe.transformer.state_dict().items()}


def as_it_was(pipe: Any, name: str, before: dict[str, torch.Tensor], picture: Any) -> None:
    after = pipe.transformer.state_dict()
    assert list(after) == list(before)
    for path, tensor in after.items():
        assert torch.equal(tensor, before[path]), path
    same(run(pipe, name, **SHORT), picture, "restored")


Since = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
HISTORIES: dict[str, Since] = {
    "nothing": ((), (), ()),
    "loaded before": (("loaded",), (), ()),
    "loaded since": ((), ("loaded",), ("unloaded",)),
    "a second one since": (("loaded",), ("a second one",), ("one deleted", "back")),
    "scaled since": (("loaded",), ("scaled",), ("back",)),
    "disabled since": (("loaded",), ("disabled",), ("enabled",)),
    "switched since": (("loaded", "a second one"), ("switched",), ("two",)),
    "fused since": (("loaded",), ("fused",), ("unloaded", "loaded")),
}
"""Edits before `parallelize`, edits since that stand in the way of `restore`, and edits that take those back."""


def activate(adapter: str) -> Edit:
    return lambda pipe, _: pipe.set_adapters(adapter)


@pytest.mark.parametrize("name", ["flux", "sd3.5 medium"])
@on_ranks(2)
def test_restore_knows_of_loras(folders: dict[str, Path], name: str) -> None:
    """A failure means that `restore` joins blocks of one state with blocks of another: a wrong picture, in silence."""
    folder = folders[name]
    todo = edits(name) | {"back": activate("one"), "two": activate("two")}
    for what, (before, since, back) in HISTORIES.items():
        pipe = MAKE[name]()
        for edit in before:
            todo[edit](pipe, folder)
        weights, picture = tensors(pipe), run(pipe, name, **SHORT)
        runner = parallelize(pipe, Plan(pipefusion=2, **EXACT), keep_weights=True)
        run(runner, name, **SHORT)
        for edit in since:
            todo[edit](pipe, folder)
        if since:
            with pytest.raises(StateError, match="LoRA"):
                runner.restore()
            run(runner, name, **SHORT)
        for edit in back:
            todo[edit](pipe, folder)
        if "fused" not in since:  # which leaves rounding errors behind, here as without a plan
            runner.restore()
            as_it_was(pipe, f"{name}, {what}", weights, picture)


@pytest.mark.parametrize("name", NAMES)
@on_ranks(2)
def test_what_is_cut_says_so(name: str) -> None:
    """A failure means that a pipeline without some of its weights passes for a whole one."""
    pipe = MAKE[name]()
    plan = Plan(pipefusion=2, **EXACT)
    runner = parallelize(pipe, plan)
    wanted = run(runner, name)
    with pytest.raises(StateError, match="keep_weights=True"):
        runner.restore()
    with pytest.raises(StateError, match="cut into stages already"):
        parallelize(pipe, plan)
    same(run(runner, name), wanted, "after refusals")
    whole = MAKE[name]()
    with divided(whole, pipefusion=2, **EXACT) as first, pytest.raises(StateError, match="restore"):
        parallelize(whole, plan, keep_weights=True)
    with pytest.raises(StateError, match="was restored"):
        run(first, name)
    with divided(whole, pipefusion=2, **EXACT) as again:
        same(run(again, name), wanted, "a second runner")


@pytest.mark.parametrize("plan", [{"pipefusion": 2, **EXACT}, {"ulysses": 2}, {"data": 2}], ids=str)
@on_ranks(2)
def test_another_model_is_noticed(plan: dict[str, int]) -> None:
    """A failure means that a model that the user put in is drawn with as if it were divided."""
    name = "flux"
    pipe, model = MAKE[name](), MAKE[name]().transformer
    divided_model = pipe.transformer
    call = {"num_images_per_prompt": 2} if "data" in plan else {}
    runner = parallelize(pipe, Plan(**plan))
    wanted = run(runner, name, **call)
    for other in (model, None):
        pipe.transformer = other
        with pytest.raises(StateError, match="has another model than was divided"):
            run(runner, name, **call)
    pipe.transformer = divided_model
    same(run(runner, name, **call), wanted, "put back")

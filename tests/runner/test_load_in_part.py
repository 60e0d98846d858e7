"""A rank reads its own weights and no others, as diffusers would have read them; a part of a pipeline is not saved."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, FluxTransformer2DModel
from peft import get_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn

import ditile
from ditile import StateError
from ditile.model.hooks.placeholders import LORA_LOADERS, SAVING_METHODS, is_placeholder
from ditile.plan.plan import Plan
from ditile.runner.load import STEM
from ditile.runner.runner import parallelize
from tests import tiny
from tests.parallel.text.test_text import deeper
from tests.pool import Pool, on_ranks
from tests.runner.cases import load_parts, run, same
from tests.runner.loras import load as load_lora
from tests.runner.loras import write

NAMES = {"flux": "flux", "pixart": "pixart sigma", "sd3": "sd3.5 medium"}
SHARDS = "20KB"
RANKS = 3


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A saved pipeline of each family; FLUX's transformer in many files."""
    folders = {}
    for family, make in tiny.FAMILIES.items():
        folders[family] = tmp_path_factory.mktemp(family)
        pipe = make()
        pipe.save_pretrained(folders[family])
        if family == "flux":
            (folders[family] / "transformer" / f"{STEM}.safetensors").unlink()
            pipe.transformer.save_pretrained(folders[family] / "transformer", max_shard_size=SHARDS)
    return folders


def tensors(module: nn.Module) -> dict[str, Tensor]:
    """Every tensor that a module holds: parameters, buffers, saved or not, and plain attributes."""
    actual = {}
    for path, part in module.named_modules():
        held = {**vars(part), **part._parameters, **part._buffers}
        actual |= {f"{path}.{name}": value for name, value in held.items() if isinstance(value, Tensor)}
    return actual


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_what_is_read_is_what_diffusers_reads(models: dict[str, Path], family: str, dtype: torch.dtype) -> None:
    """A failure means another number, dtype, device or config than `from_pretrained` gives."""
    whole = DiffusionPipeline.from_pretrained(models[family], dtype=dtype, use_safetensors=True)
    for text in ("first", "split"):
        seen: set[tuple[str, str]] = set()
        for rank in range(RANKS):
            mine = load_parts(models[family], Plan(pipefusion=RANKS, text=text), rank, dtype)  # type: ignore[arg-type]
            for name, module in mine.items():
                model = getattr(whole, name)
                assert type(module) is type(model) and not module.training
                assert dict(module.config.items()) == dict(model.config.items()) if name == "transformer" else True
                assert (module.dtype, module.device) == (model.dtype, model.device)
                wanted = tensors(model)
                for path, value in tensors(module).items():
                    if path != ".stand_in":
                        assert value.device.type == "cpu" and value.dtype is wanted[path].dtype, path
                        assert torch.equal(value, wanted[path]), path
                        seen.add((name, path))
        assert seen == {(name, path) for name in mine for path in tensors(getattr(whole, name))}


def test_the_hub_is_asked_for_what_is_needed(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure means that a rank downloads files of other stages, or cannot read a sharded model from the cache."""
    fetched = []

    def download(repo: str, file: str, subfolder: str) -> str:
        from huggingface_hub.errors import EntryNotFoundError

        path = models["flux"] / subfolder / file
        if not path.exists():
            raise EntryNotFoundError(str(path))
        fetched.append(file)
        return str(path)

    monkeypatch.setattr("ditile.runner.load.hf_hub_download", download)
    index = json.loads((models["flux"] / "transformer" / f"{STEM}.safetensors.index.json").read_text())["weight_map"]
    for rank in range(2):
        fetched.clear()
        made = load_parts("someone/something", Plan(pipefusion=2), rank, torch.float32)["transformer"]
        needed = {index[name] for name, _ in made.named_parameters()}
        assert {file for file in fetched if file.endswith("safetensors")} == needed < set(index.values())


def test_only_what_a_plan_divides_is_read_in_part(models: dict[str, Path]) -> None:
    """A failure means that a rank which needs all blocks lacks some."""
    assert load_parts(models["flux"], Plan(), 0, torch.float32) == {}
    assert load_parts(models["flux"], Plan(data=2, text="split"), 1, torch.float32) == {}
    mine = load_parts(models["flux"], Plan(cfg=2, text="first"), 1, torch.float32)
    assert list(mine) == ["text_encoder", "text_encoder_2"]
    hybrid = Plan(data=2, cfg=2, pipefusion=2, ulysses=2)
    stages = [held(load_parts(models["flux"], hybrid, rank, torch.float32)["transformer"]) for rank in range(16)]
    assert stages == ([held_by(0)] * 2 + [held_by(1)] * 2) * 4


def held(transformer: FluxTransformer2DModel) -> list[bool]:
    return [not is_placeholder(b) for b in [*transformer.transformer_blocks, *transformer.single_transformer_blocks]]


def held_by(stage: int) -> list[bool]:
    return [(index < 2) == (stage == 0) for index in range(5)]


def divided(model: Path, name: str, text: str, lora: Path | None) -> tuple[Tensor, list[str]]:
    """The picture of a pipeline that was loaded in part, and what it says to other plans."""
    plan = Plan(pipefusion=2, text=text, warmup=99)  # type: ignore[arg-type]
    pipe: Any = tiny.quiet(ditile.load(str(model), plan=plan))
    said = []
    others: list[tuple[Plan, dict[str, Any]]] = [
        (Plan(pipefusion=2, text=text, stage_blocks=(1, 3)), {}),  # type: ignore[arg-type]
        (plan, {"keep_weights": True}),
    ]
    if text != "each":
        others.append((Plan(pipefusion=2), {}))
    for other, options in others:
        with pytest.raises(StateError) as caught:
            parallelize(pipe, other, **options)
        said.append(str(caught.value))
    runner = parallelize(pipe, plan)
    with pytest.raises(StateError, match="cut into stages already"):
        parallelize(pipe, plan)
    if lora is not None:
        ditile.load_lora(pipe, lora, weight_name="narrow.safetensors", adapter_name="narrow")
    assert "single" in str(runner) or "blocks" in str(runner)  # the table knows the whole
    return run(runner, name), said


@pytest.mark.parametrize(("family", "text"), [("sd3", "each"), ("pixart", "first"), ("sd3", "split")])
def test_a_pipeline_loaded_in_part_draws_the_same(
    pool: Pool, models: dict[str, Path], tmp_path: Path, family: str, text: str
) -> None:
    """A failure means that what was loaded for a plan is not what the plan needs, or passes for another's."""
    name, lora = NAMES[family], None
    pipe: Any = tiny.quiet(ditile.load(str(models[family])))
    if family == "sd3":
        write(name, tmp_path, "narrow", 3, within="transformer_blocks.0.")
        load_lora("narrow")(pipe, tmp_path)
        lora = tmp_path
    wanted = run(pipe, name)
    for rank, (picture, said) in enumerate(pool.run(divided, 2, models[family], name, text, lora)):
        same(picture, wanted, f"{name} {text}, rank {rank}")
        assert len(said) == (2 if text == "each" else 3) and not any("\n" in line for line in said)
        assert "load it for this plan" in said[0] and "keep_weights=True" in said[1]
        assert text == "each" or "load the pipeline for this plan" in said[2]


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


def save_all(pipe: Any, folder: Path) -> dict[str, Tensor]:
    """The tensors of all models of a pipeline, as it saves them."""
    pipe.save_pretrained(folder)
    weights = sorted(folder.glob("*/*.safetensors"))
    return {f"{file.parent.name}.{name}": tensor for file in weights for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("plan", DIVIDED, ids=str)
@on_ranks(2)
def test_a_part_of_a_pipeline_is_not_saved(tmp_path: Path, plan: dict[str, Any]) -> None:
    """A failure means a folder that lacks half of the weights, or a pipeline that can never be saved again."""
    cut, pipe = Plan(**plan), deeper("sd3.5 medium")
    own = tmp_path / str(torch.distributed.get_rank())
    wanted = save_all(pipe, own / "before")
    runner = parallelize(pipe, cut, keep_weights=True)
    # Those of which each rank has a part.
    prefix = "transformer" if cut.text == "each" else "text_encoder"
    models = [part for name, part in pipe.components.items() if name.startswith(prefix) and part is not None]
    refuse_all(pipe, models, own / "divided")
    run(runner, "sd3.5 medium", num_inference_steps=1)
    refuse_all(pipe, models, own / "divided")
    runner.restore()
    actual = save_all(pipe, own / "restored")
    assert list(actual) == list(wanted) and all(torch.equal(actual[name], wanted[name]) for name in wanted)
    copy.deepcopy(pipe)
    attributes = {name for owner in (pipe, *models) for name in vars(owner)}
    assert not attributes & {*SAVING_METHODS, *LORA_LOADERS}

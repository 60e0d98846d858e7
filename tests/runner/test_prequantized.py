"""Checkpoints that diffusers' quantizers saved: a rank reads its share, and the image is that of diffusers' pipeline.

torchao's run here. bitsandbytes prints while it is imported, so its part runs where it is installed: an environment of
`tests/packaging`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ditile
from ditile import LoadError, ModelError
from ditile.model.hooks.placeholders import count_parameter_bytes, count_tensor_bytes
from ditile.plan.errors import PlanError
from ditile.plan.plan import Plan
from ditile.runner.load import count_quantized_components, list_components, load_component_file, load_model
from tests.pool import Pool
from tests.runner.cases import find_component
from tests.runner.prequantized_files import FILE, compute_in_float32, make_pipeline, rewrite_file, save_quantized
from tests.runner.single_files import save_configs
from tests.runner.test_gguf import CASES, draw, measure_error
from tests.zoo.rows import EVERY

pytestmark = pytest.mark.filterwarnings("ignore")


def load_share(folder: Path, plan: Plan, rank: int) -> Any:
    """The transformer that a rank reads."""
    return load_model(find_component(folder), plan, rank, torch.float32)


def list_parts(tensor: Any) -> list[Tensor]:
    """The plain tensors that a parameter is made of."""
    if hasattr(tensor, "__tensor_flatten__"):
        return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    state = getattr(tensor, "quant_state", None)
    if state is not None:
        parts = [value for value in state.as_dict(packed=True).values()]
        return [tensor.detach().as_subclass(Tensor), *parts]
    return [tensor]


def check_shares(folder: Path, name: str) -> None:
    """Two stages have the parts of all weights, bit for bit, and no rank more than its own."""
    theirs = dict(make_pipeline(name, folder).transformer.named_parameters())
    whole = load_share(folder, Plan(), 0)
    assert count_parameter_bytes(whole) == sum(map(count_tensor_bytes, theirs.values()))
    seen = set()
    for rank in range(2):
        mine = load_share(folder, Plan(pipefusion=2), rank)
        for key, parameter in mine.named_parameters():
            assert type(parameter) is type(theirs[key]), key
            for part, wanted in zip(list_parts(parameter), list_parts(theirs[key]), strict=True):
                assert part.dtype == wanted.dtype and torch.equal(part, wanted), key
            seen.add(key)
        assert count_parameter_bytes(mine) < 0.9 * count_parameter_bytes(whole)
    assert seen == theirs.keys()
    stored = count_quantized_components(list_components(folder))["transformer"]
    quantized = [x for x in theirs.values() if len(list_parts(x)) > 1]
    assert quantized and 0 <= stored.quantized_bytes - sum(map(count_tensor_bytes, quantized)) < 2000 * len(quantized)
    plain = type(whole).from_config(dict(whole.config, quantization_config=None))
    assert stored.quantized + stored.plain == sum(x.numel() for x in plain.parameters())


def read_refusal(folder: Path, name: str, key: str) -> str:
    """The line that says why a plan is refused."""
    plan = Plan(**CASES[key].plan)
    pipe = EVERY[name].make()
    with pytest.raises((PlanError, ModelError)) as refused:
        pipe.transformer = load_share(folder, plan, dist.get_rank())
        ditile.parallelize(pipe, plan)
    return str(refused.value)


def draw_shares(folder: Path, name: str, keys: list[str]) -> list[str]:
    """What is wrong with the images of ranks that read their shares."""
    warnings.simplefilter("ignore")
    theirs = make_pipeline(name, folder)
    wanted = {variant: draw(theirs, name, variant) for variant in ("call", "two_images")}
    problems = []
    for key in keys:
        case = CASES[key]
        plan = Plan(**case.plan)
        pipe = EVERY[name].make()
        pipe.transformer = load_share(folder, plan, dist.get_rank())
        compute_in_float32(pipe.transformer)
        image = draw(ditile.parallelize(pipe, plan), name, case.variant)
        error = measure_error(image, wanted[case.variant])
        if not error <= case.tolerance:
            problems.append(f"{key}: {error}")
    return problems


ROWS = [
    ("flux", "Int8WeightOnlyConfig"),
    ("z-image", "Float8WeightOnlyConfig"),
    ("wan-2.1", "Int8WeightOnlyConfig"),
    ("qwen-image", "Float8WeightOnlyConfig"),
    ("flux", "nf4"),
    ("wan-2.1", "nf4 twice"),
]
FEW = ("stages", "ulysses", "tensor")
"""What is asked of models that repeat the mechanism on other classes."""


@pytest.mark.parametrize(("name", "quant_type"), ROWS)
def test_a_rank_reads_its_share(pool: Pool, tmp_path: Path, name: str, quant_type: str) -> None:
    """A failure: scales of other rows, a weight that is read whole, or one that is unpacked."""
    options = {"max_shard_size": "40KB"}
    if quant_type.startswith("nf4"):
        pytest.importorskip("bitsandbytes")
        # diffusers itself cannot read a weight of bitsandbytes from two files.
        options = {}
    folder = save_quantized(name, quant_type, tmp_path / "model", **options)
    assert (len(list((folder / "transformer").glob("*.safetensors"))) > 1) is bool(options)
    check_shares(folder, name)
    keys = [key for key in CASES if key != "plain"] if name == "flux" else [*FEW]
    if quant_type.startswith("nf4"):
        for key, line in (("tensor", "tensor=2 cannot cut weights of nf4"), ("offload", "is a Params4bit")):
            keys = [k for k in keys if k != key]
            assert all(line in refusal for refusal in pool.run(read_refusal, 2, folder, name, key))
    for problems in pool.run(draw_shares, 2, folder, name, keys):
        assert not problems


def draw_cut(folder: Path, name: str) -> Tensor:
    """The image where a pipeline that diffusers loaded whole is cut."""
    return draw(ditile.parallelize(make_pipeline(name, folder), Plan(tensor=2)), name)


def test_a_whole_pipeline_is_cut_too(pool: Pool, tmp_path: Path) -> None:
    """A failure: scales stay those of all rows."""
    folder = save_quantized("flux", "Int8WeightOnlyConfig", tmp_path / "model")
    wanted = draw(make_pipeline("flux", folder), "flux")
    for image in pool.run(draw_cut, 2, folder, "flux"):
        assert measure_error(image, wanted) < 1e-5


def test_one_file_is_read_as_its_folder_is(tmp_path: Path) -> None:
    folder = save_quantized("flux", "Int8WeightOnlyConfig", tmp_path / "model")
    file = str(folder / "transformer" / FILE)
    pipe = EVERY["flux"].make()
    configs = save_configs(pipe, tmp_path / "configs")
    wanted = draw(make_pipeline("flux", folder), "flux")
    pipe.transformer = load_component_file(find_component(configs), file, Plan(), 0, torch.float32)
    assert torch.equal(draw(pipe, "flux"), wanted)
    for rank in range(2):
        part = load_component_file(find_component(configs), file, Plan(pipefusion=2), rank, torch.float32)
        assert count_parameter_bytes(part) < 0.8 * count_parameter_bytes(pipe.transformer)


Change = Callable[[dict[str, Tensor], dict[str, str]], object]
SCALE = "proj_out._weight_scale"
CHANGES: dict[str, tuple[Change, str]] = {
    "no scale": (lambda tensors, _: tensors.pop(SCALE), f"proj_out.weight lacks its part {SCALE}"),
    "plain": (lambda _, metadata: metadata.clear(), "has a quantization_config, and the weights with it are plain"),
    "unknown class": (
        lambda _, metadata: metadata.update({"proj_out.weight": '{"_type": "X"}'}),
        "has weights of torchao that this version does not know",
    ),
}


@pytest.mark.parametrize("key", CHANGES)
def test_what_is_not_whole_is_refused(tmp_path: Path, key: str) -> None:
    """In one line, on every rank."""
    folder = save_quantized("flux", "Int8WeightOnlyConfig", tmp_path / "model")
    change, line = CHANGES[key]
    rewrite_file(folder / "transformer" / FILE, change)
    for rank in range(2):
        with pytest.raises(LoadError) as refused:
            load_share(folder, Plan(pipefusion=2), rank)
        assert line in str(refused.value) and "\n" not in str(refused.value)

"""Checkpoints that diffusers' quantizers saved: a rank reads its share, and the image is that of diffusers' pipeline.

torchao's run here. bitsandbytes prints while it is imported, so its part runs where it is installed: an environment of
`tests/packaging`.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from diffusers import BitsAndBytesConfig, TorchAoConfig
from diffusers.quantizers.bitsandbytes.bnb_quantizer import BnB4BitDiffusersQuantizer
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import ditile
from ditile import LoadError, ModelError
from ditile.model.hooks.placeholders import count_parameter_bytes, count_tensor_bytes
from ditile.plan.errors import PlanError
from ditile.plan.plan import Plan
from ditile.runner.load import load_model, match_component_files
from tests.pool import Pool
from tests.runner.cases import find_component
from tests.runner.single_files import save_configs
from tests.runner.test_gguf import CASES, draw, measure_error
from tests.zoo.rows import EVERY

FILE = "diffusion_pytorch_model.safetensors"


def make_config(quant_type: str) -> Any:
    """A config of torchao's by its class, or one of bitsandbytes: nf4, or nf4 with quantized scales."""
    if not quant_type.startswith("nf4"):
        from torchao import quantization

        return TorchAoConfig(getattr(quantization, quant_type)())
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=quant_type == "nf4 twice",
        bnb_4bit_compute_dtype=torch.float32,
        llm_int8_skip_modules=["proj_out"],
    )


def load_by_diffusers(kind: Any, folder: Path, **options: Any) -> Any:
    """A transformer as diffusers loads it, which refuses bitsandbytes on CPUs though it computes there."""
    with (
        patch.object(BnB4BitDiffusersQuantizer, "validate_environment"),
        patch.object(BnB4BitDiffusersQuantizer, "update_device_map", return_value={"": "cpu"}),
    ):
        return kind.from_pretrained(folder, torch_dtype=torch.float32, **options)


def compute_in_float32(model: nn.Module) -> None:
    """Keeps bitsandbytes from its kernel for AVX-512, which rounds to bfloat16 and so enlarges any last bit."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def save_quantized(name: str, quant_type: str, folder: Path, **options: Any) -> Path:
    """A folder with the configs of a pipeline of the zoo, and its transformer quantized and saved by diffusers."""
    pipe = EVERY[name].make()
    save_configs(pipe, folder)
    plain = folder / "plain"
    pipe.transformer.save_pretrained(plain)
    config = make_config(quant_type)
    quantized = load_by_diffusers(type(pipe.transformer), plain, quantization_config=config)
    shutil.rmtree(plain)
    quantized.save_pretrained(folder / "transformer", **options)
    return folder


def make_pipeline(name: str, folder: Path) -> Any:
    """The pipeline of diffusers with the saved transformer, as it loads it."""
    pipe = EVERY[name].make()
    pipe.transformer = load_by_diffusers(type(pipe.transformer), folder / "transformer")
    # A mapped file has numbers anywhere, and a product of a CPU rounds by where they begin: a copy begins as ours do.
    for module in pipe.transformer.modules():
        for key, weight in module.named_parameters(recurse=False):
            if not hasattr(weight, "quant_state"):
                setattr(module, key, nn.Parameter(weight.detach().clone(), requires_grad=False))
    compute_in_float32(pipe.transformer)
    return pipe


def rewrite_file(path: Path, change: Any) -> None:
    """Changes the tensors and the metadata of a file."""
    with safe_open(path, "pt") as opened:
        metadata = dict(opened.metadata() or {})
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    change(tensors, metadata)
    save_file(tensors, path, metadata)


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
    stored = match_component_files(folder, {}, ())[0]["transformer"]
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
    ("flux", "nf4"),
    ("wan-2.1", "nf4 twice"),
]
FEW = ("stages", "ulysses", "tensor")
"""What is asked of models that repeat the mechanism on other classes."""


@pytest.mark.filterwarnings("ignore")
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


@pytest.mark.filterwarnings("ignore")
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

"""A transformer in ComfyUI's integers keeps them, and its image is one under every plan."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ditile
from ditile import ModelError
from ditile.model.hooks.placeholders import count_parameter_bytes, count_tensor_bytes
from ditile.parallel.block_formats import find_row_blocks
from ditile.plan import extras
from ditile.plan.errors import PlanError
from ditile.plan.plan import Plan
from ditile.runner.load import load_component_file
from ditile.runner.lora import fuse_loras
from ditile.runner.weights import convrot_weight
from ditile.runner.weights.convrot_weight import ConvRotInt8
from ditile.runner.weights.single_file import ConvertedFile, SingleFile
from tests.model.hooks.compiling import WAYS, Counting
from tests.pool import Pool
from tests.recorded_calls import record_on_cpu
from tests.runner.cases import different, divided, find_component, measure_distance, measure_error, same
from tests.runner.single_files import (
    COMFY,
    ORIGINAL,
    copy_weights,
    multiply_by_rules,
    quantize_convrot,
    save_configs,
    save_convrot,
)
from tests.runner.test_gguf import CASES, draw
from tests.runner.test_lora_files import STAGES, write_styles
from tests.zoo.rows import EVERY

FILE = "convrot.safetensors"
TOLERANCE = 0.02
"""Where ranks add in another order some input is rounded the other way, and that is as much as int8 itself changes;
under `tensor` each rank rounds its share of a token."""
EXACT = {("wan-2.1", "ulysses"), ("wan-2.1", "cfg")}
"""Here all that tokens pass between two attentions is in integers, and attention adds in the same order."""
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(("size", "most", "bound"), [(256, 127, 0.015), (1, 127, 0.015), (64, 7, 0.2)])
def test_a_product_is_that_of_the_rules(size: int, most: int, bound: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure means that a Linear rotates, rounds or scales otherwise than ComfyUI, that a token's result depends on
    its neighbours, or that a compiler cannot capture it."""
    # How many halves there are to round differs with the numbers.
    torch.manual_seed(0)
    weight, x = torch.randn(48, 512), torch.randn(2, 40, 512)
    # As models have them: a few large channels, which the rotation spreads over the group.
    x[..., :3] *= 8
    integers, scale, numbers = quantize_convrot(weight, size, most)
    linear = nn.Linear(512, 48).requires_grad_(False)
    full = nn.functional.linear(x, weight, linear.bias)
    linear.weight = nn.Parameter(ConvRotInt8(integers, scale, [1, size], torch.float32), requires_grad=False)
    out = linear(x)
    # A token of zeros is the bias.
    assert torch.equal(linear(x * 0), linear.bias.expand_as(out))
    wanted = multiply_by_rules(x, integers, scale, size) + linear.bias
    # A few halves are rounded the other way in float64.
    assert measure_distance(out, wanted.float()) < 2e-4
    assert measure_distance(out, full) < (bound if size > 1 else 3 * bound)
    for rows in (1, 3, 17):
        assert torch.equal(linear(x[:, :rows]), out[:, :rows])
    assert torch.equal(linear(x[0, 0]), out[0, 0])
    assert torch.equal(torch.compile(linear, backend="aot_eager", fullgraph=True)(x), out)
    # Where no kernel is exact, inputs are not rounded.
    monkeypatch.setattr(convrot_weight, "HAS_VNNI", False)
    assert measure_distance(linear(x), nn.functional.linear(x, numbers, linear.bias)) < 1e-6


def write_model(folder: Path, name: str, **options: Any) -> Any:
    """A folder of configs, with a file in integers and one of the numbers that they stand for. Return the pipeline."""
    pipe = EVERY[name].make()
    save_configs(pipe, folder)
    weights = ORIGINAL[name](copy_weights(pipe.transformer))
    save_convrot(weights, folder / FILE, folder / "plain.safetensors", COMFY, **options)
    return pipe


def load_share(folder: Path, name: str, plan: Plan, rank: int, file: str = FILE) -> Any:
    """A pipeline whose transformer is read from a file, as a rank of a plan does."""
    pipe = EVERY[name].make()
    pipe.transformer = load_component_file(find_component(folder), str(folder / file), plan, rank, torch.float32)
    return pipe


def list_kept(pipe: Any) -> list[Tensor]:
    return [tensor for tensor in pipe.transformer.parameters() if isinstance(tensor, ConvRotInt8)]


def draw_shares(folder: Path, name: str, keys: list[str]) -> list[str]:
    """What is wrong with the images of ranks that read their shares, or that cut a whole pipeline."""
    warnings.simplefilter("ignore")
    whole = load_share(folder, name, Plan(), 0)
    wanted = {variant: draw(whole, name, variant) for variant in ("call", "two_images")}
    plain = draw(load_share(folder, name, Plan(), 0, "plain.safetensors"), name)
    problems = []
    for key in keys:
        case = CASES[key]
        plan = Plan(**case.plan)
        pipe = load_share(folder, name, plan, dist.get_rank())
        assert list_kept(pipe)
        image = draw(ditile.parallelize(pipe, plan), name, case.variant)
        tolerance = TOLERANCE
        if case.tolerance == 0 or (name, key) in EXACT:
            tolerance = 0.0
        error = measure_error(image, wanted[case.variant])
        if not error <= tolerance:
            problems.append(f"{key}: {error}")
        if key == "tensor":
            with divided(whole, tensor=2) as runner:
                same(draw(runner, name), image, "a whole pipeline that is cut")
    error = measure_error(wanted["call"], plain)
    if not 0 < error < 0.05:
        problems.append(f"to the full type: {error}")
    return problems


@pytest.mark.parametrize("name", ["flux-2", "z-image", "wan-2.1"])
def test_images_are_those_of_one_rank(pool: Pool, tmp_path: Path, name: str) -> None:
    """A failure means that a share has the scales of other rows, is cut within a group, or is not kept in integers."""
    pipe = write_model(tmp_path, name)
    keys = [key for key in CASES if key != "plain" and (name, key) != ("flux-2", "cfg")]
    for problems in pool.run(draw_shares, 2, tmp_path, name, keys):
        assert not problems, "\n".join(problems)
    whole = load_share(tmp_path, name, Plan(), 0)
    config = tmp_path / "transformer" / "config.json"
    stored = ConvertedFile.match_config(
        SingleFile.read_header(tmp_path / FILE), type(pipe.transformer), config
    ).count_stored_weights()
    assert stored.quantized_bytes == sum(count_tensor_bytes(tensor) for tensor in list_kept(whole))
    assert stored.quantized == sum(tensor.numel() for tensor in list_kept(whole))
    assert stored.quantized + stored.plain == sum(tensor.numel() for tensor in pipe.transformer.parameters())
    assert count_parameter_bytes(load_share(tmp_path, name, Plan(pipefusion=2), 0).transformer) < 0.8 * (
        count_parameter_bytes(whole.transformer)
    )


def be_refused(folder: Path, name: str) -> list[str]:
    """Why a plan is refused that would cut groups: where shares are read, and where a whole pipeline is cut."""
    lines = []
    with pytest.raises(PlanError) as refused:
        load_share(folder, name, Plan(tensor=2), dist.get_rank())
    lines.append(str(refused.value))
    pipe = load_share(folder, name, Plan(), 0)
    with pytest.raises(PlanError) as refused:
        ditile.parallelize(pipe, Plan(tensor=2))
    return [*lines, str(refused.value)]


def test_what_integers_do_not_take_is_refused(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line: a cut within a group, another type of weights, LoRAs in the weights, and a package that lacks."""
    # A row of one group is not cut either, though it has one scale.
    row = ConvRotInt8(torch.ones(3, 64, dtype=torch.int8), torch.ones(3, 1), [1, 64], torch.float32)
    assert find_row_blocks(row) == ("ConvRotInt8", 64, 64)
    write_model(tmp_path, "flux-2", group_size=64)
    for lines in pool.run(be_refused, 2, tmp_path, "flux-2"):
        for line in lines:
            assert "blocks of 64 ConvRotInt8 weights in the rows of" in line and "\n" not in line
    with pytest.raises(ModelError, match=r"was loaded with \d+ Linears quantized \(ConvRotInt8\)"):
        ditile.quantize(load_share(tmp_path, "flux-2", Plan(), 0), "int8")
    monkeypatch.setattr(extras, "is_installed", lambda package: package != "torchao")
    with pytest.raises(ModelError, match=r"convrot.safetensors needs torchao, .*; pip install 'ditile\[quantize\]'"):
        load_share(tmp_path, "flux-2", Plan(), 0)


def draw_with_lora(folder: Path, plan: dict[str, Any]) -> list[Tensor]:
    """Images with a LoRA and without it, and of compiled blocks."""
    warnings.simplefilter("ignore")
    pipe = load_share(folder, "flux", Plan(**plan), dist.get_rank())
    runner = ditile.parallelize(pipe, Plan(**plan))
    images = [draw(runner, "flux")]
    backend = Counting()
    WAYS["blocks"](pipe, backend=backend)
    images.append(draw(runner, "flux"))
    assert backend.graphs
    ditile.load_lora(pipe, folder / "diffusers.safetensors", adapter_name="own")
    images.append(draw(runner, "flux"))
    with pytest.raises(ModelError, match=r"fuse_lora=True .* is quantized; leave it out"):
        fuse_loras(pipe)
    return images


def test_loras_compiled_blocks_and_recorded_calls(pool: Pool, tmp_path: Path) -> None:
    """A failure means that a LoRA is rotated with its layer, or that a compiled or recorded call has other numbers."""
    write_styles(tmp_path, write_model(tmp_path, "flux").transformer, "flux")
    plain, compiled, styled = pool.run(draw_with_lora, 1, tmp_path, {})[0]
    same(compiled, plain)
    different(styled, plain)
    for images in pool.run(draw_with_lora, 2, tmp_path, STAGES):
        same(images, [plain, compiled, styled])
    with record_on_cpu() as recorders:
        runner = ditile.parallelize(load_share(tmp_path, "flux", Plan(), 0), Plan(), cuda_graphs=True)
        for _ in range(3):
            same(draw(runner, "flux"), plain)
        assert recorders[0].num_played > recorders[0].num_recorded, recorders[0].problems
    # The LoRA adds what it adds to the numbers that the integers stand for.
    pipe = load_share(tmp_path, "flux", Plan(), 0, "plain.safetensors")
    pipe.load_lora_weights(tmp_path, weight_name="diffusers.safetensors", adapter_name="own")
    assert measure_error(styled, draw(pipe, "flux")) < 0.05

"""Quantized models stay near the plain ones, in fewer bytes, under plans too."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ditile
from ditile.model.hooks.placeholders import count_parameter_bytes, list_quantized_parameters
from ditile.plan.errors import ModelError
from ditile.plan.plan import Plan
from ditile.runner.runner import parallelize
from ditile.runner.weights.quantize import EXCLUDED, list_quantization_records
from tests import tiny
from tests.families import EVERY
from tests.pool import Pool
from tests.runner.cases import MAKE, divided, measure_distance, run, same
from tests.zoo import ZOO

# of the latents after 4 steps, relative, for random weights; measured: between a fifth and two thirds of each
BOUNDS = {
    "float8_weight_only": 0.08,
    "int8_weight_only": 0.03,
    "int8": 0.05,
    "int4_weight_only": 0.25,
    "bitsandbytes_4bit": 0.65,
}
# most bytes of a quantized layer of 32-bit weights, scales of rows of 32 numbers included
SHARES = {"float8_weight_only": 0.4, "int8_weight_only": 0.4, "int8": 0.4, "int4_weight_only": 0.3}
SHARES["bitsandbytes_4bit"] = 0.25


@pytest.mark.parametrize(
    ("family", "quant_type"),
    [*(("flux", quant_type) for quant_type in BOUNDS), ("pixart sigma", "int8"), ("sd3.5 medium", "int8")],
)
def test_a_picture_stays_near_in_fewer_bytes(family: str, quant_type: str) -> None:
    """A failure: a type is another one than its name says, or layers were left out or taken by mistake."""
    if quant_type.startswith("bitsandbytes"):
        pytest.importorskip("bitsandbytes")
    plain = run(MAKE[family](), family)
    pipe = MAKE[family]()
    before = count_parameter_bytes(pipe.transformer)
    names = {name for name, m in pipe.transformer.named_modules() if isinstance(m, nn.Linear)}
    assert ditile.quantize(pipe, quant_type, group_size=32) is pipe
    (actual,) = list_quantization_records(pipe.transformer)
    got = run(pipe, family)
    assert 0 < measure_distance(got, plain) < BOUNDS[quant_type]
    assert {*actual.layers, *actual.left} == {n for n in names if not any(word in n for word in EXCLUDED)}
    assert (actual.bytes_before, actual.bytes_after) == (before, count_parameter_bytes(pipe.transformer))
    own = [pipe.transformer.get_submodule(name) for name in actual.layers]
    numbers = sum(layer.in_features * layer.out_features for layer in own)
    saved = actual.bytes_before - actual.bytes_after
    assert saved > 4 * numbers * (1 - SHARES[quant_type])


def test_types_by_component_and_layer() -> None:
    """A failure means that a config quantizes other layers than it says, or some before all were tried."""
    pipe = tiny.flux()
    plan = {"attn.to_q": "int8_per_tensor", "attn.to_k": "float8_weight_only"}
    config = {"components_to_quantize": {
        "transformer": {"quant_type": "int8_weight_only", "regional_quantize": True, "precision_plan": plan},
        "text_encoder_2": {"quant_type": "int8_weight_only", "exclude_layers": ["wo"]},
    }}  # fmt: skip
    for wrong, hint in (
        ({"unet": {}}, "FluxPipeline has no component 'unet'"),
        (
            {"transformer": {"precision_plan": {"attn.to_x": "int8"}}},
            "no layer of FluxTransformer2DModel has 'attn.to_x'",
        ),
    ):
        with pytest.raises(ModelError, match=hint):
            ditile.quantize(pipe, quantize_config={"components_to_quantize": config["components_to_quantize"] | wrong})
        assert not list_quantized_parameters(pipe.text_encoder_2)
    ditile.quantize(pipe, quantize_config=config)
    layers = {each.quant_type: each.layers for each in list_quantization_records(pipe.transformer)}
    assert layers.keys() == {"int8", "float8_weight_only", "int8_weight_only"}
    assert all("attn.to_q" in name for name in layers["int8"]) and len(layers["int8"]) == 5
    assert all("attn.to_k" in name for name in layers["float8_weight_only"])
    assert all("transformer_blocks." in name for name in list_quantized_parameters(pipe.transformer)), "repeated blocks"
    assert not any("wo" in name for name in list_quantized_parameters(pipe.text_encoder_2))
    run(pipe, "flux")


@pytest.mark.parametrize("name", ["Kandinsky5Transformer3DModel", "WanTransformer3DModel"])
def test_what_diffusers_keeps_in_float32_is_left(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A failure means that modulation loses its precision, or that one such layer refuses bfloat16 to all others."""
    model: Any = EVERY[name].make()
    model.save_pretrained(tmp_path)
    model = type(model).from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    linears = {path: layer for path, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    kept = {path for path, layer in linears.items() if layer.weight.dtype == torch.float32}
    assert kept and len(kept) < len(linears)
    with pytest.raises(ModelError, match=r"float8 cannot run on cpu in bfloat16 \("):
        ditile.quantize(model, "float8", exclude_layers=())
    with caplog.at_level(logging.INFO, "ditile"):
        ditile.quantize(model, "int8_weight_only", exclude_layers=())
    (actual,) = list_quantization_records(model)
    assert set(actual.left) == kept and {*actual.layers, *kept} == set(linears)
    assert f"_keep_in_fp32_modules: {next(iter(actual.left))}" in caplog.text
    assert all(type(linears[path].weight) is nn.Parameter for path in kept)
    with pytest.raises(ModelError, match=f"are quantized already, {len(kept)} are of its _keep_in_fp32_modules, and "):
        ditile.quantize(model, "int8_weight_only", exclude_layers=())


def test_every_transformer_of_a_pipeline_is_quantized() -> None:
    """A failure means that half of the weights stay as large as they are, without a word."""
    pipe = ZOO["ideogram-4"].make()
    ditile.quantize(pipe, "int8_weight_only")
    one, other = (list_quantization_records(model)[0] for model in (pipe.transformer, pipe.unconditional_transformer))
    assert one.layers == other.layers
    prior = EVERY["PriorTransformer"].make()
    image_encoder = nn.Sequential(nn.Linear(8, 8))
    ditile.quantize(SimpleNamespace(prior=prior, image_encoder=image_encoder, tokenizer=None), "int8_weight_only")
    assert list_quantization_records(prior) and not list_quantized_parameters(image_encoder)


STEPS = 4
PLANS: dict[str, dict[str, Any]] = {
    "stages": {"pipefusion": 2, "patches": 3, "warmup": STEPS},
    "patches": {"pipefusion": 2, "patches": 3, "warmup": 1},
    "heads": {"ulysses": 2},
    "ring": {"ring": 2},
    "branches": {"cfg": 2},
}
ONE = {"patches": {"patches": 3, "warmup": 1}}  # what stale keys do is there on one rank too
EXACT = ("stages", "patches")
PLANS_OF_TYPE = {"int8": tuple(PLANS), "bitsandbytes_4bit": tuple(PLANS)}
"""Activations are quantized, or weights are packed; other types of weights only move with the blocks."""
# Where sums are in another order. An activation that is rounded to 8 bits may go the other way for its last bit, and
# that is as much as the type itself changes.
TOLERANCE = {"float8_weight_only": 1e-5, "int8_weight_only": 1e-5, "int4_weight_only": 1e-5, "int8": 0.05}
TOLERANCE["bitsandbytes_4bit"] = 1e-5


def made(name: str, quant_type: str) -> Any:
    return ditile.quantize(MAKE[name](), quant_type, group_size=32)


def before_and_after(name: str, quant_type: str, plans: list[dict[str, Any]]) -> list[tuple[Tensor, bool]]:
    """Quantized, then divided: the picture under each plan, and whether the restored pipeline makes the old one."""
    pipe, actual = made(name, quant_type), []
    plain, names = run(pipe, name), list_quantized_parameters(pipe.transformer)
    for plan in plans:
        with divided(pipe, **plan) as runner:
            assert list_quantized_parameters(pipe.transformer)
            actual.append((run(runner, name), False))
        actual[-1] = (
            actual[-1][0],
            torch.equal(run(pipe, name), plain) and list_quantized_parameters(pipe.transformer) == names,
        )
    return actual


@pytest.mark.parametrize(
    ("name", "quant_type"),
    [*(("flux true cfg", each) for each in BOUNDS), ("pixart sigma", "int8"), ("sd3.5 medium", "int4_weight_only")],
)
def test_divided_pictures_are_those_of_one_rank(pool: Pool, name: str, quant_type: str) -> None:
    """A failure: stages lose scales, placeholders are not filled again, or tokens see other scales than on one rank."""
    if quant_type.startswith("bitsandbytes"):
        pytest.importorskip("bitsandbytes")
    plans = PLANS_OF_TYPE.get(quant_type, ("patches", "heads"))
    alone = [ONE.get(plan, {}) for plan in plans]
    wanted = [picture for picture, _ in pool.run(before_and_after, 1, name, quant_type, alone)[0]]
    for rank, results in enumerate(pool.run(before_and_after, 2, name, quant_type, [PLANS[k] for k in plans])):
        for plan, (picture, restored), picture_of_one in zip(plans, results, wanted, strict=True):
            assert restored, plan
            if plan in EXACT:
                same(picture, picture_of_one, f"{plan}, rank {rank}")
            else:
                assert measure_distance(picture, picture_of_one) < TOLERANCE[quant_type], plan


def tensor_parallel(name: str, quant_type: str) -> tuple[Tensor, Tensor]:
    """The pictures of a pipeline that is quantized before and of one that is quantized after it is cut."""
    pipe = made(name, quant_type)
    with divided(pipe, tensor=2) as runner:
        before = run(runner, name)
    pipe = MAKE[name]()
    runner = parallelize(pipe, Plan(tensor=2))
    ditile.quantize(pipe, quant_type, group_size=16)
    return before, run(runner, name)


@pytest.mark.parametrize("quant_type", ["float8_weight_only", "int8_weight_only", "int8"])
def test_tensor_parallel_shares(pool: Pool, quant_type: str) -> None:
    """Cut weights have the scales of one rank. Those of shares that are quantized apart differ, and are as near."""
    plain = run(MAKE["flux"](), "flux")
    alone = run(made("flux", quant_type), "flux")
    results = pool.run(tensor_parallel, 2, "flux", quant_type)
    for before, after in results:
        assert measure_distance(before, alone) < TOLERANCE[quant_type]
        assert 0 < measure_distance(after, plain) < BOUNDS[quant_type]
        same(before, results[0][0])
        same(after, results[0][1])


@pytest.mark.parametrize(("has_vnni", "most"), [(True, 127), (False, 63)])
def test_integers_fit_the_sums_of_a_cpu(has_vnni: bool, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure means that CPUs without VNNI, whose sums of two products have 16 bits, multiply wrong numbers."""
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: has_vnni)
    model = ditile.quantize(nn.Sequential(nn.Linear(64, 32)), "int8")
    weight: Any = model[0].weight
    assert most - 1 <= weight.qdata.int().abs().max() <= most + 1
    assert bool(weight.act_quant_kwargs.reduce_range) is not has_vnni

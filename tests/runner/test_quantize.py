"""Quantized models stay near the plain ones, in fewer bytes; what cannot be done is refused before anything changes."""

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
from ditile.runner.quantize import EXCLUDED, QuantizationRecord, list_quantization_records
from tests import tiny
from tests.more_families import EVERY
from tests.runner.cases import MAKE, run
from tests.zoo import ZOO

FAMILIES = ("flux", "pixart sigma", "sd3.5 medium")

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


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def unchanged(model: nn.Module, before: dict[str, Tensor]) -> bool:
    return not list_quantized_parameters(model) and all(
        torch.equal(p, before[name]) for name, p in model.named_parameters()
    )


def record(pipe: Any) -> QuantizationRecord:
    (actual,) = list_quantization_records(pipe.transformer)
    return actual


@pytest.mark.parametrize("quant_type", BOUNDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_picture_stays_near_in_fewer_bytes(family: str, quant_type: str) -> None:
    """A failure: a type is another one than its name says, or layers were left out or taken by mistake."""
    if quant_type.startswith("bitsandbytes"):
        pytest.importorskip("bitsandbytes")
    plain = run(MAKE[family](), family)
    pipe = MAKE[family]()
    before = count_parameter_bytes(pipe.transformer)
    names = {name for name, m in pipe.transformer.named_modules() if isinstance(m, nn.Linear)}
    assert ditile.quantize(pipe, quant_type, group_size=32) is pipe
    actual = record(pipe)
    got = run(pipe, family)
    assert 0 < float((got - plain).norm() / plain.norm()) < BOUNDS[quant_type]
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


def test_what_a_kernel_cannot_take_is_left_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    """torch's 4-bit kernel on CPUs wants outputs that 16 divides."""
    model = nn.ModuleDict({"good": nn.Linear(64, 32), "odd": nn.Linear(64, 24), "narrow": nn.Linear(16, 32)})
    with caplog.at_level(logging.INFO, "ditile"):
        ditile.quantize(model, "int4_weight_only", group_size=32)
    (actual,) = list_quantization_records(model)
    assert actual.layers == ("good",) and set(actual.left) == {"odd", "narrow"}
    assert list_quantized_parameters(model) == ["good.weight"]
    assert "1 layers quantized, 2 left as they are" in caplog.text and "no kernel takes 32 x 16: narrow" in caplog.text


@pytest.mark.parametrize(
    ("quant_type", "options", "message"),
    [
        ("float9", {}, "quant_type='float9' should be 'float8_weight_only', 'int8_weight_only'"),
        ("float8", {}, "quant_type=float8 cannot run on cpu in float32"),
        (
            "int8",
            {"exclude_layers": ["block", "_out", "embed"]},
            "no layer to quantize: 0 of its Linears",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_changes(
    quant_type: str, options: dict[str, Any], message: str
) -> None:
    pipe = tiny.flux()
    before = weights(pipe.transformer)
    with pytest.raises(ModelError, match=message) as refused:
        ditile.quantize(pipe, quant_type, **options)
    assert "\n" not in str(refused.value)
    assert unchanged(pipe.transformer, before) and not list_quantization_records(pipe.transformer)


def in_bfloat16(name: str, folder: Path) -> nn.Module:
    """A model of a family, as diffusers loads it."""
    model = EVERY[name].make()
    model.save_pretrained(folder)  # type: ignore[operator]
    loaded: nn.Module = type(model).from_pretrained(folder, torch_dtype=torch.bfloat16)  # type: ignore[attr-defined]
    return loaded


@pytest.mark.parametrize("name", ["Kandinsky5Transformer3DModel", "WanTransformer3DModel"])
def test_what_diffusers_keeps_in_float32_is_left(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A failure means that modulation loses the precision that the model was given for it, or that one such layer
    refuses all the others a type for bfloat16."""
    model = in_bfloat16(name, tmp_path)
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
    with pytest.raises(ModelError, match=f"are quantized already, .* and {len(kept)} are of its _keep_in_fp32_modules"):
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

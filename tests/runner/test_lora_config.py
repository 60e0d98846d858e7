"""What is a property of a whole LoRA is the same on every stage: alphas, ranks, DoRA, biases."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ditile
from ditile.model.known import ASSETS
from ditile.plan.errors import ModelError
from ditile.plan.plan import Plan
from ditile.runner.digest import describe_loras
from ditile.runner.load import load
from tests.runner.cases import load_parts

MODEL = "shapes-flux"
STAGES = 2


def list_layers(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    """Layers of all blocks, and the head, whose name is also that of layers in single blocks."""
    layers = []
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name.endswith(("attn.to_q", "net.2", "proj_mlp", "proj_out")):
            layers.append((name, layer))
    return layers


def make_factors(model: nn.Module, rank: Callable[[str], int] = lambda name: 4) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(3)
    state = {}
    for name, layer in list_layers(model):
        path = f"transformer.{name}"
        state[f"{path}.lora_A.weight"] = 0.3 * torch.randn(rank(name), layer.in_features, generator=random)
        state[f"{path}.lora_B.weight"] = 0.3 * torch.randn(layer.out_features, rank(name), generator=random)
    return state


def is_single(name: str) -> bool:
    return name.startswith("single")


def add_alphas(state: dict[str, Tensor], find_alpha: Callable[[str], float | None]) -> dict[str, Tensor]:
    for key in [key for key in state if key.endswith(".lora_A.weight")]:
        path = key.removesuffix(".lora_A.weight")
        alpha = find_alpha(path.removeprefix("transformer."))
        if alpha is not None:
            state[f"{path}.alpha"] = torch.tensor(alpha)
    return state


def add_everywhere(model: nn.Module, leaf: str) -> dict[str, Tensor]:
    state = make_factors(model)
    random = torch.Generator().manual_seed(4)
    for name, layer in list_layers(model):
        state[f"transformer.{name}.{leaf}"] = 0.5 + torch.rand(layer.out_features, generator=random)
    return state


CASES: dict[str, Callable[[nn.Module], dict[str, Tensor]]] = {
    "alphas of the later blocks": lambda model: add_alphas(
        make_factors(model), lambda name: 1.0 if is_single(name) else None
    ),
    "alphas of the first blocks": lambda model: add_alphas(
        make_factors(model), lambda name: None if is_single(name) else 1.0
    ),
    "an alpha of the head": lambda model: add_alphas(
        make_factors(model), lambda name: 3.0 if name == "proj_out" else 1.0
    ),
    "ranks": lambda model: make_factors(model, lambda name: 2 if is_single(name) else 4),
    "a rank of the head, and alphas": lambda model: add_alphas(
        make_factors(model, lambda name: 2 if name == "proj_out" else 4), lambda name: 2.0 if is_single(name) else 1.0
    ),
    "DoRA": lambda model: add_everywhere(model, "lora_magnitude_vector"),
    "a bias": lambda model: add_everywhere(model, "lora_B.bias"),
}


def describe_layers(model: nn.Module) -> dict[str, Any]:
    layers = {}
    for name, layer in model.named_modules():
        if hasattr(layer, "merged_adapters"):
            alphas = layer.lora_alpha
            factors = {key: value for key, value in layer.state_dict().items() if "base_layer" not in key}
            strength = {key: (layer.r[key], float(alphas[key]), float(layer.scaling[key])) for key in layer.r}
            layers[name] = (strength, factors)
    return layers


@pytest.mark.parametrize("case", CASES)
def test_a_stage_has_the_config_of_the_whole_file(case: str) -> None:
    """A failure means that a LoRA has another strength on some stages."""
    plain = load(MODEL)
    state = CASES[case](plain.transformer)
    plain.load_lora_weights(dict(state))
    whole = describe_layers(plain.transformer)
    described = []
    seen: set[str] = set()
    for rank in range(STAGES):
        pipe = load(MODEL)
        part = load_parts(ASSETS / MODEL, Plan(pipefusion=STAGES), rank, torch.float32)["transformer"]
        pipe.register_modules(transformer=part)
        ditile.load_lora(pipe, dict(state))
        own = describe_layers(part)
        for name, (strength, factors) in own.items():
            assert strength == whole[name][0], name
            assert factors.keys() == whole[name][1].keys()
            for key, value in factors.items():
                assert torch.equal(value, whole[name][1][key]), key
        seen |= own.keys()
        uses = describe_loras({"transformer": part})
        described.append({key: value for key, value in uses.items() if key.startswith("config ")})
    assert seen == whole.keys() != set()
    assert described[0] and described == described[:1] * STAGES


@pytest.mark.parametrize("leaf", ["lora_magnitude_vector", "lora_B.bias"])
def test_a_layer_that_lacks_what_others_have_is_refused(leaf: str) -> None:
    """A failure means that peft leaves a parameter empty, and the call fails somewhere inside of torch."""
    pipe = load(MODEL)
    state = add_everywhere(pipe.transformer, leaf)
    del state[f"transformer.proj_out.{leaf}"]
    with pytest.raises(ModelError, match=f"has {leaf} in 36 layers, and proj_out lacks it"):
        ditile.load_lora(pipe, state)
    assert not hasattr(pipe.transformer, "peft_config")


def test_a_lora_in_fp8_is_loaded_as_diffusers_does() -> None:
    plain, pipe = load(MODEL), load(MODEL)
    state = {key: value.to(torch.float8_e4m3fn) for key, value in make_factors(pipe.transformer).items()}
    plain.load_lora_weights(dict(state))
    ditile.load_lora(pipe, dict(state))
    whole, own = (describe_layers(each.transformer)["proj_out"][1] for each in (plain, pipe))
    assert all(torch.equal(own[key].float(), value.float()) for key, value in whole.items())
    state["transformer.proj_out.lora_A.weight"] = torch.full((4, 1), math.nan).to(torch.float8_e4m3fn)
    with pytest.raises(ModelError, match="not finite"):
        ditile.load_lora(pipe, state)

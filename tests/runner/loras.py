"""Random LoRAs of the tiny pipelines, and what users do with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import utils
from diffusers.loaders.peft import PeftAdapterMixin
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer

import ditile
from tests.runner.cases import MAKE

NAMES = ("flux", "sd3.5 medium", "pixart sigma")

Edit = Callable[[Any, Path], Any]


def load(adapter: str, file: str = "") -> Edit:
    options = {"weight_name": f"{file or adapter}.safetensors", "adapter_name": adapter}
    return lambda pipe, folder: pipe.load_lora_weights(folder, **options)


def load_divided(adapter: str, file: str = "") -> Edit:
    """As ditile loads it, on stages too that have none of its layers."""
    options = {"weight_name": f"{file or adapter}.safetensors", "adapter_name": adapter}
    return lambda pipe, folder: ditile.load_lora(pipe, folder, **options)


def loader_edits(one: str, two: str, load: Callable[[str], Edit]) -> dict[str, Edit]:
    """What a user does to a pipeline, one after the other; a picture is made after each."""
    return {
        "loaded": load(one),
        "scaled": lambda pipe, _: pipe.set_adapters(one, 0.3),
        "a second one": load(two),
        "switched": lambda pipe, _: pipe.set_adapters(one),
        "both": lambda pipe, _: pipe.set_adapters([one, two], [0.5, 0.8]),
        "disabled": lambda pipe, _: pipe.disable_lora(),
        "enabled": lambda pipe, _: pipe.enable_lora(),
        "fused": lambda pipe, _: pipe.fuse_lora(lora_scale=0.7),
        "unfused": lambda pipe, _: pipe.unfuse_lora(),
        "one deleted": lambda pipe, _: pipe.delete_adapters(two),
        "unloaded": lambda pipe, _: pipe.unload_lora_weights(),
    }


WITH_LOADER = loader_edits("one", "two", load)


def _peft_load(adapter: str) -> Edit:
    def load(pipe: Any, folder: Path) -> None:
        PeftModel.from_pretrained(pipe.transformer, folder / adapter, adapter_name=adapter)

    return load


def _peft_layers(do: Callable[[Any], Any]) -> Edit:
    return lambda pipe, _: [do(layer) for layer in pipe.transformer.modules() if isinstance(layer, BaseTunerLayer)]


def _peft_activate(names: list[str], weights: list[float]) -> Edit:
    return lambda pipe, _: utils.set_weights_and_activate_adapters(pipe.transformer, names, weights)


def _peft_unload(pipe: Any, _: Path) -> None:
    utils.recurse_remove_peft_layers(pipe.transformer)
    del pipe.transformer.peft_config


WITH_PEFT: dict[str, Edit] = {
    "loaded": _peft_load("one"),
    "scaled": _peft_activate(["one"], [0.3]),
    "disabled": _peft_layers(lambda layer: layer.enable_adapters(False)),
    "enabled": _peft_layers(lambda layer: layer.enable_adapters(True)),
    "fused": _peft_layers(lambda layer: layer.merge()),
    "unfused": _peft_layers(lambda layer: layer.unmerge()),
    "unloaded": _peft_unload,
}
"""PixArt's pipelines have no loader for LoRAs; its trainers write folders of peft."""


def edits(name: str) -> dict[str, Edit]:
    return WITH_PEFT if name.startswith("pixart") else WITH_LOADER


def narrow_edits(load: Callable[[str], Edit]) -> dict[str, Edit]:
    """The same with a LoRA of a single block, which is then loaded first, and behind the other, too."""
    again = {"narrow alone": load("narrow"), "one again": load("one"), "all unloaded": WITH_LOADER["unloaded"]}
    return loader_edits("one", "narrow", load) | again | {"one behind": load("one"), "narrow behind": load("narrow")}


def layers(transformer: Any, within: str = "") -> list[str]:
    """Every linear layer: of all blocks, embeddings, modulations and the head."""
    actual = transformer.named_modules()
    return [path for path, module in actual if isinstance(module, torch.nn.Linear) and path.startswith(within)]


def write(name: str, folder: Path, adapter: str, seed: int, within: str = "") -> None:
    """Saves a random LoRA in which no factor is zero."""
    pipe = MAKE[name]()
    config = LoraConfig(r=1 + seed, lora_alpha=2, target_modules=layers(pipe.transformer, within))
    random = torch.Generator().manual_seed(seed)
    model = get_peft_model(pipe.transformer, config)
    for path, parameter in model.named_parameters():
        if "lora_" in path:
            parameter.data = 0.15 * torch.randn(parameter.shape, generator=random)
    if not isinstance(pipe.transformer, PeftAdapterMixin):
        model.save_pretrained(folder / adapter)
        return
    factors = get_peft_model_state_dict(pipe.transformer)
    pipe.save_lora_weights(folder, transformer_lora_layers=factors, weight_name=f"{adapter}.safetensors")


def folder_of(name: str, folder: Path) -> Path:
    """Two LoRAs of all layers, and one of the first block alone."""
    write(name, folder, "one", 1)
    write(name, folder, "two", 2)
    write(name, folder, "narrow", 3, within="transformer_blocks.0.")
    return folder


def folders_of(names: Iterable[str], factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder with LoRAs for each family."""
    return {name: folder_of(name, factory.mktemp(name.replace(" ", "-"))) for name in names}

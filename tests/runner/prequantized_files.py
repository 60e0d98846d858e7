"""Transformers that the quantizers of diffusers have saved, beside the configs of their pipeline."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from diffusers import BitsAndBytesConfig, TorchAoConfig
from diffusers.quantizers.bitsandbytes.bnb_quantizer import BnB4BitDiffusersQuantizer
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from tests.runner.single_files import save_configs
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
    compute_in_float32(pipe.transformer)
    return pipe


def rewrite_file(path: Path, change: Any) -> None:
    """Changes the tensors and the metadata of a file."""
    with safe_open(path, "pt") as opened:
        metadata = dict(opened.metadata() or {})
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    change(tensors, metadata)
    save_file(tensors, path, metadata)

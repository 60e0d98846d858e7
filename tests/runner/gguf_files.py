"""Small files of the format GGUF, written as those of model sites are: matrices in blocks, the rest as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from diffusers import GGUFQuantizationConfig
from gguf import GGMLQuantizationType as Type
from torch import nn

from tests.more_families import EVERY as FAMILIES
from tests.runner.single_files import write_file
from tests.zoo import ZOO

WIDE = {"attention_head_dim": 64, "num_attention_heads": 8}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "flux": ("FluxTransformer2DModel", WIDE | {"num_single_layers": 2, "axes_dims_rope": (16, 24, 24)}),
    "flux-2": ("Flux2Transformer2DModel", WIDE | {"num_single_layers": 2, "axes_dims_rope": (16, 16, 16, 16)}),
    "qwen-image": ("QwenImageTransformer2DModel", WIDE | {"num_layers": 2, "axes_dims_rope": (16, 24, 24)}),
    "z-image": ("ZImageTransformer2DModel", {"dim": 192, "n_heads": 6, "axes_dims": [8, 12, 12], "n_layers": 2}),
    "wan-2.1": ("WanTransformer3DModel", WIDE | {"num_layers": 2, "ffn_dim": 1024}),
}
"""Families, and configs with rows of whole blocks: of 256 numbers for each of two ranks, but for Z-Image of 32."""
SPREAD = 0.03
"""Of the numbers of weights that are made of random bytes."""


def pack_random_blocks(count: int, quant_type: Type, seed: int) -> np.ndarray[Any, Any]:
    """Blocks of a K type, which numpy cannot quantize to: random bytes with scales that give numbers near 0."""
    _, size = gguf.GGML_QUANT_SIZES[quant_type]
    blocks = np.random.default_rng(seed).integers(0, 256, (count, size), dtype=np.uint8)
    # Levels are 4 or 5 bits with a mean that the minimum takes away, or 6 bits around 0, each times scales of 6 or 8.
    if quant_type == Type.Q6_K:
        blocks[:, -2:] = np.full((count, 1), SPREAD / 1300, dtype=np.float16).view(np.uint8)
        return blocks
    middle = {Type.Q4_K: 7.5, Type.Q5_K: 15.5}[quant_type]
    scale = SPREAD / (31 * middle)
    blocks[:, 0:2] = np.full((count, 1), scale, dtype=np.float16).view(np.uint8)
    blocks[:, 2:4] = np.full((count, 1), scale * middle, dtype=np.float16).view(np.uint8)
    return blocks


def pack_weight(weight: np.ndarray[Any, Any], quant_type: Type, seed: int) -> np.ndarray[Any, Any]:
    """The bytes of a matrix in a type, row by row."""
    if quant_type not in (Type.Q4_K, Type.Q5_K, Type.Q6_K):
        return gguf.quants.quantize(weight, quant_type)
    numbers, _ = gguf.GGML_QUANT_SIZES[quant_type]
    blocks = pack_random_blocks(weight.size // numbers, quant_type, seed)
    return blocks.reshape(len(weight), -1)


def write_gguf(path: Path, model: nn.Module, quant_type: Type) -> None:
    """Writes a model's weights: those of Linears with rows of whole blocks in the type, others in 16 bits or in 32."""
    numbers, _ = gguf.GGML_QUANT_SIZES[quant_type]
    linears = {f"{path}.weight" for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    writer = gguf.GGUFWriter(path, "diffusion")
    for seed, (name, tensor) in enumerate(model.state_dict().items()):
        values = tensor.float().numpy()
        if name not in linears:
            writer.add_tensor(name, values)
        elif values.shape[1] % numbers:
            writer.add_tensor(name, values.astype(np.float16))
        else:
            writer.add_tensor(name, pack_weight(values, quant_type, seed), raw_dtype=quant_type)
    write_file(writer)


def make_model(name: str, **changes: Any) -> Any:
    """The transformer of a family with a config of `CONFIGS`."""
    class_name, config = CONFIGS[name]
    family = FAMILIES[class_name]
    return family._replace(config=family.config | config | changes).make()


def write_model(folder: Path, name: str, quant_type: str, **changes: Any) -> None:
    """A file of a family's transformer, with its config."""
    model = make_model(name, **changes)
    model.save_config(folder)
    write_gguf(folder / "model.gguf", model, Type[quant_type])


def load_pipeline(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A pipeline of diffusers with the transformer of a file of `write_model`, as a user loads it."""
    kind = FAMILIES[CONFIGS[name][0]].kind
    pipe = ZOO[name].make()
    pipe.transformer = kind.from_single_file(
        str(folder / "model.gguf"),
        quantization_config=GGUFQuantizationConfig(compute_dtype=dtype),
        config=str(folder),
        torch_dtype=dtype,
    )
    return pipe

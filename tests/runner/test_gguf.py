"""A transformer of a GGUF file makes the image of diffusers' own pipeline under every plan; a rank has its share."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
import torch
from diffusers import GGUFQuantizationConfig
from gguf import GGMLQuantizationType as Type
from torch import Tensor, nn

from ditile.model.hooks.placeholders import count_parameter_bytes
from ditile.plan.errors import PlanError
from ditile.plan.plan import Plan
from ditile.runner.runner import parallelize
from tests.families import EVERY as FAMILIES
from tests.pool import Pool
from tests.runner.cases import divided, measure_error, same
from tests.runner.single_files import write_file
from tests.zoo import ZOO
from tests.zoo.rows import ENOUGH, list_tensors

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


TOLERANCE = 1e-5
"""Ranks that divide tokens, heads or the batch, or sum over shares, add up in another order."""


class Case(NamedTuple):
    """A plan of two ranks, the call of the zoo that it computes, and how far its image may be from the plain one."""

    plan: dict[str, Any]
    variant: str = "call"
    tolerance: float = TOLERANCE


CASES = {
    "plain": Case({}, tolerance=0.0),
    "stages": Case({"pipefusion": 2, "patches": 2, "warmup": ENOUGH}, tolerance=0.0),
    "offload": Case({"pipefusion": 2, "patches": 2, "warmup": ENOUGH, "offload": "blocks"}, tolerance=0.0),
    "ulysses": Case({"ulysses": 2}),
    "ring": Case({"ring": 2}),
    "tensor": Case({"tensor": 2}),
    "distrifusion": Case({"distrifusion": 2, "warmup": ENOUGH}),
    "cfg": Case({"cfg": 2}),
    "data": Case({"data": 2}, "two_images"),
}
WITHOUT = {"flux-2": {"cfg"}}
"""FLUX.2's pipeline computes one branch."""


def draw(pipe: Any, name: str, variant: str = "call", steps: int = 2) -> Tensor:
    """What the pipeline or runner makes of a call of the zoo, in few steps: each unpacks every weight."""
    return list_tensors(pipe(**getattr(ZOO[name], variant)() | {"num_inference_steps": steps}))[0]


def draw_in_every_case(folder: Path, name: str, keys: list[str]) -> tuple[dict[str, Tensor], dict[str, int]]:
    """The image of each case, and the bytes of weights that this rank had meanwhile; `whole` are all bytes."""
    images = {}
    pipe = load_pipeline(folder, name)
    held = {"whole": count_parameter_bytes(pipe.transformer)}
    for key in keys:
        with divided(pipe, **{"data": 1} | CASES[key].plan) as runner:
            images[key] = draw(runner, name, CASES[key].variant)
            held[key] = count_parameter_bytes(pipe.transformer)
    held["restored"] = count_parameter_bytes(pipe.transformer)
    return images, held


MECHANISMS = [("flux-2", "Q5_K"), ("z-image", "Q8_0")]
"""Outputs of several parts in blocks of 256 numbers, and blocks of 32; FLUX.1 and Wan are read in test_single_files."""
FILES = [
    *MECHANISMS,
    ("wan-2.1", "Q4_K"),
    *(("flux", "Q6_K"), ("flux", "Q5_1"), ("flux", "BF16"), ("qwen-image", "Q4_0")),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "quant_type"), FILES)
def test_images_are_those_of_diffusers_own_pipeline(pool: Pool, tmp_path: Path, name: str, quant_type: str) -> None:
    """A failure: a share that is not of whole blocks, a weight unpacked otherwise, or one that is kept whole."""
    write_model(tmp_path, name, quant_type)
    pipe = load_pipeline(tmp_path, name)
    wanted = {variant: draw(pipe, name, variant) for variant in ("call", "two_images")}
    keys = [key for key in CASES if key != "plain" and key not in WITHOUT.get(name, ())]
    results = pool.run(draw_in_every_case, 2, tmp_path, name, keys)
    results += pool.run(draw_in_every_case, 1, tmp_path, name, ["plain"])
    for images, held in results:
        for key, image in images.items():
            case = CASES[key]
            if case.tolerance:
                assert measure_error(image, wanted[case.variant]) < case.tolerance, key
            else:
                same(image, wanted[case.variant], key)
        assert held["restored"] == held["whole"]
        if "tensor" in held:
            # Modulations, norms and what is outside of blocks are whole on every rank.
            assert held["tensor"] < 0.8 * held["whole"]
            assert held["stages"] < 0.8 * held["whole"]


def be_refused(folder: Path) -> str:
    pipe = load_pipeline(folder, "flux")
    with pytest.raises(PlanError) as refused:
        parallelize(pipe, Plan(tensor=2))
    draw(pipe, "flux", steps=1)
    return str(refused.value)


def test_a_cut_within_a_block_is_refused(pool: Pool, tmp_path: Path) -> None:
    """A failure: a rank would begin in the middle of a block, and read its scales from numbers."""
    write_model(tmp_path, "flux", "Q4_K", num_attention_heads=12)
    for line in pool.run(be_refused, 2, tmp_path):
        assert line == (
            "tensor=2 does not divide the 3 blocks of 256 Q4_K weights in the rows of "
            "transformer_blocks.0.attn.to_out.0; try 1, 3"
        )

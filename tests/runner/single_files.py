"""Files of transformers as people have them: under the names of the authors, of ComfyUI and of diffusers; and GGUF."""

from __future__ import annotations

import itertools
import json
import math
import re
import struct
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import gguf
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

import ditile
from ditile.plan.plan import Plan
from tests.runner.cases import load_parts
from tests.zoo.rows import EVERY, compare_drawings, list_tensors

COMFY = "model.diffusion_model."
Weights = dict[str, Tensor]

WAN_NAMES = {
    "^scale_shift_table": "head.modulation",
    "scale_shift_table": "modulation",
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "proj_out": "head.head",
    "attn1": "self_attn",
    "attn2": "cross_attn",
    ".to_out.0.": ".o.",
    ".to_q.": ".q.",
    ".to_k.": ".k.",
    ".to_v.": ".v.",
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
    # The two norms change their names with each other.
    "norm2": "norm_of_text",
    "norm3": "norm2",
    "norm_of_text": "norm3",
}
Z_IMAGE_NAMES = {
    "all_final_layer.2-1.": "final_layer.",
    "all_x_embedder.2-1.": "x_embedder.",
    ".attention.norm_k.": ".attention.k_norm.",
    ".attention.norm_q.": ".attention.q_norm.",
    ".attention.to_out.0.": ".attention.out.",
}
FLUX_2_NAMES = {
    "time_guidance_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "time_guidance_embed.timestep_embedder.linear_2": "time_in.out_layer",
    "time_guidance_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
    "time_guidance_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
    "x_embedder": "img_in",
    "context_embedder": "txt_in",
    "stream_modulation_img.linear": "stream_modulation_img.lin",
    "stream_modulation_txt.linear": "stream_modulation_txt.lin",
    "single_stream_modulation.linear": "single_stream_modulation.lin",
    "^norm_out.linear": "final_layer.adaLN_modulation.1",
    "^proj_out": "final_layer.linear",
    "^single_transformer_blocks": "single_blocks",
    r"(?<=single_blocks\.\d\.)attn.norm_q.weight": "norm.query_norm.scale",
    r"(?<=single_blocks\.\d\.)attn.norm_k.weight": "norm.key_norm.scale",
    "^transformer_blocks": "double_blocks",
    "attn.norm_q.weight": "img_attn.norm.query_norm.scale",
    "attn.norm_k.weight": "img_attn.norm.key_norm.scale",
    "attn.to_out.0": "img_attn.proj",
    "ff.linear_in": "img_mlp.0",
    "ff.linear_out": "img_mlp.2",
    "attn.norm_added_q.weight": "txt_attn.norm.query_norm.scale",
    "attn.norm_added_k.weight": "txt_attn.norm.key_norm.scale",
    "attn.to_add_out": "txt_attn.proj",
    "ff_context.linear_in": "txt_mlp.0",
    "ff_context.linear_out": "txt_mlp.2",
    "attn.to_qkv_mlp_proj": "linear1",
    "attn.to_out": "linear2",
}
"""Patterns of diffusers' names -> those of the authors, in the order in which they are replaced."""


def rename(name: str, names: Mapping[str, str]) -> str:
    for own, original in names.items():
        name = re.sub(own, original, name)
    return name


def rename_all(weights: Weights, names: Mapping[str, str]) -> Weights:
    return {rename(name, names): tensor for name, tensor in weights.items()}


def fuse(weights: Weights, parts: tuple[str, str, str], fused: str) -> Weights:
    """The weights with each three projections as one."""
    result = dict(weights)
    for name in weights:
        if parts[0] in name:
            rows = [result.pop(name.replace(parts[0], part)) for part in parts]
            result[name.replace(parts[0], fused)] = torch.cat(rows)
    return result


def write_z_image_names(weights: Weights) -> Weights:
    fused = fuse(weights, (".attention.to_q.", ".attention.to_k.", ".attention.to_v."), ".attention.qkv.")
    return rename_all(fused, Z_IMAGE_NAMES)


def write_flux_2_names(weights: Weights) -> Weights:
    fused = fuse(weights, ("attn.to_q.", "attn.to_k.", "attn.to_v."), "img_attn.qkv.")
    fused = fuse(fused, ("attn.add_q_proj.", "attn.add_k_proj.", "attn.add_v_proj."), "txt_attn.qkv.")
    scale, shift = fused["norm_out.linear.weight"].chunk(2)
    fused["norm_out.linear.weight"] = torch.cat([shift, scale])
    return rename_all(fused, FLUX_2_NAMES)


ORIGINAL: dict[str, Callable[[Weights], Weights]] = {
    "flux": dict,
    "flux-2": write_flux_2_names,
    "qwen-image": dict,
    "z-image": write_z_image_names,
    "wan-2.1": partial(rename_all, names=WAN_NAMES),
}
"""Family -> its weights under the authors' names; diffusers knows those of FLUX.1 at one width alone, 3072."""


def save_configs(pipe: Any, folder: Path) -> Path:
    """A folder that has the configs of a pipeline's transformers, and none of their weights."""
    index: dict[str, Any] = {"_class_name": type(pipe).__name__}
    for name in ("transformer", "transformer_2"):
        transformer = getattr(pipe, name, None)
        if transformer is not None:
            transformer.save_config(folder / name)
            index[name] = ["diffusers", type(transformer).__name__]
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def copy_weights(transformer: nn.Module) -> Weights:
    return {name: tensor.detach().clone().contiguous() for name, tensor in transformer.state_dict().items()}


def save_single_file(transformer: nn.Module, family: str, path: Path, *, prefix: str = "") -> Path:
    weights = ORIGINAL[family](copy_weights(transformer))
    save_file({prefix + name: tensor.contiguous() for name, tensor in weights.items()}, path)
    return path


def read_with_diffusers(pipe: Any, folder: Path, files: dict[str, str]) -> Any:
    """The pipeline with transformers from files, as diffusers reads them."""
    for name, file in files.items():
        quantization: Any = {}
        if file.endswith(".gguf"):
            config = diffusers.GGUFQuantizationConfig(compute_dtype=torch.float32)
            quantization = {"quantization_config": config, "torch_dtype": torch.float32}
        model = type(pipe.transformer).from_single_file(file, config=f"{folder}/{name}", **quantization)
        # diffusers leaves weights where they are in the mapped file, and where memory is not aligned a kernel may sum
        # in another order.
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        setattr(pipe, name, model)
    return pipe


def compare_images(name: str, folder: Path, files: dict[str, str]) -> list[str]:
    """What is wrong on a rank where each reads its share of files of transformers."""
    warnings.simplefilter("ignore")
    entry = EVERY[name]
    want = list_tensors(read_with_diffusers(entry.make(), folder, files)(**entry.call()))
    problems = []
    # Without stale keys stages compute what one rank does; shares of weights add in another order.
    for plan, tolerance in ((Plan(pipefusion=2, warmup=99), 0.0), (Plan(tensor=2), 1e-5)):
        pipe = entry.make()
        parts = load_parts(folder, plan, dist.get_rank(), torch.float32, None, files)
        assert parts.keys() == files.keys()
        pipe.register_modules(**parts)
        got = list_tensors(ditile.parallelize(pipe, plan)(**entry.call()))
        if problem := compare_drawings(got, want, tolerance):
            problems.append(f"{plan}: {problem}")
    return problems


def quantize_scaled_fp8(weight: Tensor, counts: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """A weight in fp8, a scale for each of so many blocks of its dimensions, and their product."""
    sizes = []
    for dim, count in enumerate(counts):
        size = 128 if count == -(-weight.shape[dim] // 128) else weight.shape[dim] // count
        sizes.append(torch.arange(weight.shape[dim]) // size)
    sizes += [torch.zeros(size, dtype=torch.int64) for size in weight.shape[len(counts) :]]
    scale = 0.01 + torch.rand(counts)
    # Blocks by the numbers of their rows and columns, which is another way than a reader has.
    spread = scale.reshape(*counts, *[1] * (weight.ndim - len(counts)))[torch.meshgrid(*sizes, indexing="ij")]
    stored = (weight / spread).to(torch.float8_e4m3fn)
    return stored, scale, stored.float() * spread


def save_scaled_fp8(transformer: nn.Module, family: str, path: Path, plain: Path) -> None:
    """ComfyUI's and authors' file of a transformer in fp8, each weight with the next way of scales; and its numbers."""
    scaled: Weights = {COMFY + "scaled_fp8": torch.empty(0, dtype=torch.float8_e4m3fn)}
    numbers = {}
    word = torch.tensor(list(b'{"format": "float8_e4m3fn", "full_precision_matrix_mult": true}'), dtype=torch.uint8)
    for index, (name, tensor) in enumerate(ORIGINAL[family](copy_weights(transformer)).items()):
        numbers[name] = tensor.contiguous()
        scaled[COMFY + name] = tensor.to(torch.bfloat16).contiguous()
        if tensor.ndim < 2 or not name.endswith(".weight"):
            numbers[name] = scaled[COMFY + name].float()
            continue
        rows, *others = tensor.shape
        columns = others[0]
        layer = COMFY + name.removesuffix(".weight")
        ways: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = [
            ("scale_weight", (1,), ()),
            ("weight_scale", (rows,), (rows,)),
            ("scale_weight", (rows,), (rows, 1)),
            ("weight_scale_inv", (-(-rows // 128), -(-columns // 128)), (-(-rows // 128), -(-columns // 128))),
            ("weight_scale", (rows, columns // 2), (rows, columns // 2, 1)),
        ]
        ending, counts, shape = ways[index % len(ways) if tensor.ndim == 2 and columns % 2 == 0 else index % 3]
        stored, scale, numbers[name] = quantize_scaled_fp8(tensor, counts)
        scaled |= {layer + ".weight": stored, f"{layer}.{ending}": scale.reshape(shape)}
        scaled |= {layer + ".scale_input": torch.ones(()), layer + ".comfy_quant": word.clone()}
    save_file(scaled, path)
    save_file(numbers, plain)


def build_rotation(size: int) -> Tensor:
    """The regular Hadamard matrix of ConvRot: a sign is minus where an odd number of digits to the base of 4 add up to
    3, one of the row and one of the column."""
    matrix = torch.empty(size, size, dtype=torch.float64)
    for row in range(size):
        for column in range(size):
            sign, left, right = 1, row, column
            for _ in range(round(math.log(size, 4))):
                sign = -sign if left % 4 + right % 4 == 3 else sign
                left, right = left // 4, right // 4
            matrix[row, column] = sign / math.sqrt(size)
    return matrix


def quantize_convrot(weight: Tensor, size: int, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """A weight in integers up to some number, a scale for each row, and the numbers they stand for; a size of 1 is not
    rotated."""
    rotation = torch.block_diag(*[build_rotation(size)] * (weight.shape[1] // size))
    rotated = weight.double() @ rotation.T
    scale = (rotated.abs().amax(1, keepdim=True).float() / most).clamp(min=1e-30)
    integers = (rotated / scale).round().clamp(-most, most)
    return integers.to(torch.int8), scale, (integers * scale.double() @ rotation).float()


def pack_int4(integers: Tensor) -> Tensor:
    """Two numbers in a byte, the even column in its lower bits."""
    even, odd = (integers[:, start::2].int() % 16 for start in (0, 1))
    return (even + 16 * odd).to(torch.uint8).view(torch.int8)


def multiply_by_rules(x: Tensor, integers: Tensor, scale: Tensor, size: int) -> Tensor:
    """What ComfyUI makes of tokens and a rotated weight in int8: each token is rotated, and rounded with its scale."""
    rotation = torch.block_diag(*[build_rotation(size)] * (x.shape[-1] // size))
    rotated = x.double() @ rotation.T
    scales = rotated.abs().amax(-1, keepdim=True) / 127
    return ((rotated / scales).round().long() @ integers.long().T) * scales * scale.double().flatten()


def save_convrot(
    weights: Weights, path: Path, plain: Path, prefix: str = "", group_size: int = 16, ways: Sequence[int] = range(4)
) -> None:
    """ComfyUI's file of weights in integers, each matrix in the next way, and the numbers that they stand for: int4
    (1), int8 without a rotation (2), or with one, as the header (0) or a tensor (3) says."""
    stored: Weights = {}
    numbers = {}
    header = {}
    cycle = itertools.cycle(ways)
    for name, tensor in weights.items():
        layer = name.removesuffix(".weight")
        if tensor.ndim != 2 or tensor.shape[1] % group_size or layer == name:
            stored[prefix + name] = tensor.to(torch.bfloat16).contiguous()
            numbers[name] = stored[prefix + name].float()
            continue
        way = next(cycle)
        settings: dict[str, Any] = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": group_size}
        size, most = group_size, 127
        if way == 1:
            settings = {"format": "convrot_w4a4", "params": {"convrot_groupsize": 4}}
            size, most = 4, 7
        elif way == 2:
            settings = {"format": "int8_tensorwise", "per_row": True}
            size = 1
        integers, scale, numbers[name] = quantize_convrot(tensor, size, most)
        assert (numbers[name] - tensor).norm() < 2 * tensor.norm() / most
        if most == 7:
            integers, scale = pack_int4(integers), scale.flatten()
        stored |= {prefix + name: integers, f"{prefix}{layer}.weight_scale": scale}
        if way:
            word = json.dumps(settings).encode()
            stored[f"{prefix}{layer}.comfy_quant"] = torch.tensor(list(word), dtype=torch.uint8)
        else:
            header[layer] = settings
    metadata = json.dumps({"format_version": "1.0", "layers": header})
    save_file(stored, path, {"_quantization_metadata": metadata})
    save_file(numbers, plain)


def add_quantized(writer: gguf.GGUFWriter, name: str, values: Any, quant_type: Any) -> None:
    """Adds a matrix of whole blocks in a type, and another tensor as it is."""
    if values.ndim == 2 and values.shape[1] % gguf.GGML_QUANT_SIZES[quant_type][0] == 0:
        writer.add_tensor(name, gguf.quants.quantize(values, quant_type), raw_dtype=quant_type)
    else:
        writer.add_tensor(name, values)


def write_file(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def save_gguf(
    transformer: nn.Module, family: str, path: Path, quant_type: Any = gguf.GGMLQuantizationType.Q8_0
) -> Path:
    """The same of GGUF: matrices of whole blocks in a type, others as they are."""
    writer = gguf.GGUFWriter(path, family)
    for name, tensor in ORIGINAL[family](copy_weights(transformer)).items():
        add_quantized(writer, name, tensor.float().numpy(), quant_type)
    write_file(writer)
    return path


def save_encoder_gguf(
    encoder: Any, architecture: str, path: Path, quant_type: Any = gguf.GGMLQuantizationType.Q8_0
) -> Path:
    """A text encoder as llama.cpp's converter writes it: under names of its own, and with a vocabulary."""
    config = encoder.config
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(f"a {config.model_type}")
    writer.add_token_list([f"token {number}" for number in range(config.vocab_size)])
    writer.add_token_scores([0.0] * config.vocab_size)
    writer.add_head_count(config.num_attention_heads)
    if hasattr(config, "num_key_value_heads"):
        writer.add_head_count_kv(config.num_key_value_heads)
    for own_name, tensor in encoder.state_dict().items():
        module, _, leaf = own_name.rpartition(".")
        name = names.get_name(module) or names.get_name(f"model.{module}")
        if name is None:
            continue
        values = tensor.float().numpy()
        if architecture == "llama" and module.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if module.endswith("q_proj") else config.num_key_value_heads
            values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        if architecture.startswith("gemma") and "norm" in module:
            values = values + 1
        add_quantized(writer, f"{name}.{leaf}", values, quant_type)
    write_file(writer)
    return path


def write_sparse_flux(path: Path, *, guidance: bool = True) -> None:
    """ComfyUI's file of FLUX.1 at its own size."""
    write_sparse_file(path, list_flux_shapes(guidance))


def write_sparse_file(path: Path, own_shapes: dict[str, list[int]]) -> None:
    """A file of ComfyUI at its own size, in bfloat16, whose content is a hole on the disk."""
    shapes = {COMFY + name: shape for name, shape in own_shapes.items()}
    header: dict[str, Any] = {}
    offset = 0
    for name, shape in shapes.items():
        size = 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)


AUTHORS_NAMES: dict[str, dict[str, str]] = {
    "MiniMaxH3Transformer3DModel": {
        "^proj_in.": "video_patch_proj.", "^proj_out.": "final_layer.video_out.",
        "token_refiner.refiner_blocks.": "token_refiner.blocks.", "time_embedder.linear_1.": "time_embedder.proj_in.",
        "time_embedder.linear_2.": "time_embedder.proj_out.", "audio_proj_in.": "audio_patch_proj.",
        "context_embedder.": "condition_proj.", "norm_out.norm.": "final_layer.norm.",
        "norm_out.linear.": "final_layer.adaln_proj.linear.", "audio_proj_out.": "final_layer.audio_out.",
        ".attn.norm_q.": ".attn.q_norm.", ".attn.norm_k.": ".attn.k_norm.", ".attn.to_out.0.": ".attn.out_proj.",
        ".ff.net.0.proj.": ".mlp.fc1.", ".ff.net.2.": ".mlp.fc2.", "transformer_blocks.": "blocks.",
        ".attn.to_q.": ".attn.qkv_proj.",
    },
    "Flux3Transformer2DModel": {
        "^proj_out.": "final_layer.image.linear.", "^mode_blocks.": "content_mode_blocks.",
        "target_timestep_embedder.linear_1.": "ref_time_in.in_layer.", ".attn.to_q.": ".q_proj.",
        "target_timestep_embedder.linear_2.": "ref_time_in.out_layer.", ".attn.to_k.": ".k_proj.",
        "timestep_embedder.linear_1.": "time_in.in_layer.", "timestep_embedder.linear_2.": "time_in.out_layer.",
        "norm_out.linear.": "final_layer.image.adaLN_modulation.1.", "single_transformer_blocks.": "single_blocks.",
        ".attn.to_v.": ".v_proj.", ".attn.to_out.0.": ".attn_out.", ".attn.norm_q.weight": ".norm.query_norm.scale",
        ".attn.norm_k.weight": ".norm.key_norm.scale", ".ff.linear_in.": ".mlp_in.", ".ff.linear_out.": ".mlp_out.",
        "x_embedders.": "emb_in.", "context_embedder.": "txt_in.", ".linear.weight": ".lin.weight",
        "final_layer.image.lin.": "final_layer.image.linear.",
    },
    "LTX2VideoTransformer3DModel": {
        "^proj_in.": "patchify_proj.", "^audio_proj_in.": "audio_patchify_proj.", "^time_embed.": "adaln_single.",
        "^audio_time_embed.": "audio_adaln_single.", "^prompt_adaln.": "prompt_adaln_single.",
        "audio_prompt_adaln.": "audio_prompt_adaln_single.", "video_a2v_cross_attn_scale_shift_table":
        "scale_shift_table_a2v_ca_video", "audio_a2v_cross_attn_scale_shift_table": "scale_shift_table_a2v_ca_audio",
        "av_cross_attn_video_scale_shift.": "av_ca_video_scale_shift_adaln_single.", "norm_q": "q_norm",
        "av_cross_attn_video_a2v_gate.": "av_ca_a2v_gate_adaln_single.", "norm_k": "k_norm",
        "av_cross_attn_audio_scale_shift.": "av_ca_audio_scale_shift_adaln_single.",
        "av_cross_attn_audio_v2a_gate.": "av_ca_v2a_gate_adaln_single.",
    },
}  # fmt: skip
"""The same of models of which a test makes headers alone."""


def list_authors_shapes(model: nn.Module) -> dict[str, list[int]]:
    """A transformer's tensors as its authors name them."""
    kind = type(model).__name__
    shapes: dict[str, list[int]] = {}
    for own_name, tensor in model.state_dict().items():
        name, shape = rename(own_name, AUTHORS_NAMES[kind]), list(tensor.shape)
        if kind.startswith("MiniMax") and ".attn.to_" in name:
            # Keys and values are rows of the same tensor as queries.
            continue
        if ".attn.qkv_proj." in name:
            shape[0] *= 3
        shapes[name] = shape
    return shapes


def list_flux_shapes(guidance: bool) -> dict[str, list[int]]:
    """FLUX.1's tensors as its authors name them."""
    width = 3072
    shapes: dict[str, list[int]] = {"img_in": [width, 64], "txt_in": [width, 4096]}
    for name, size in {"time_in": 256, "vector_in": 768, **({"guidance_in": 256} if guidance else {})}.items():
        shapes |= {f"{name}.in_layer": [width, size], f"{name}.out_layer": [width, width]}
    tensors: dict[str, list[int]] = {}
    for block in range(19):
        for stream in ("img", "txt"):
            prefix = f"double_blocks.{block}.{stream}"
            shapes |= {f"{prefix}_mod.lin": [6 * width, width], f"{prefix}_attn.qkv": [3 * width, width]}
            shapes |= {f"{prefix}_attn.proj": [width, width], f"{prefix}_mlp.0": [4 * width, width]}
            shapes |= {f"{prefix}_mlp.2": [width, 4 * width]}
            tensors |= {f"{prefix}_attn.norm.{key}_norm.scale": [128] for key in ("query", "key")}
    for block in range(38):
        prefix = f"single_blocks.{block}"
        shapes |= {f"{prefix}.modulation.lin": [3 * width, width], f"{prefix}.linear1": [7 * width, width]}
        shapes |= {f"{prefix}.linear2": [width, 5 * width]}
        tensors |= {f"{prefix}.norm.{key}_norm.scale": [128] for key in ("query", "key")}
    shapes |= {"final_layer.linear": [64, width], "final_layer.adaLN_modulation.1": [2 * width, width]}
    for name, shape in shapes.items():
        tensors |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return tensors

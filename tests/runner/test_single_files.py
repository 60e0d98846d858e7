"""Transformers in one file: their tensors and images are those that diffusers makes of the same file, in shares too."""

from __future__ import annotations

import functools
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

import ditile
from ditile import LoadError, ModelError
from ditile.model.hooks.placeholders import init_on_meta_device
from ditile.model.known import CONFIGS, find_known_model
from ditile.plan.plan import Plan
from ditile.runner.load import load_component_file, split_model_file
from ditile.runner.model_files import find_model_source, leave_one_of_each
from ditile.runner.weights.checkpoint import Checkpoint, open_tensors
from ditile.runner.weights.convrot import IntegerFormat, WeightSettings
from ditile.runner.weights.single_file import ConvertedFile, FileTensor, SingleFile, find_base_models
from tests import tiny
from tests.pool import on_ranks
from tests.runner.cases import find_component
from tests.runner.single_files import (
    COMFY,
    ORIGINAL,
    compare_images,
    copy_weights,
    list_authors_shapes,
    quantize_convrot,
    save_configs,
    save_convrot,
    save_gguf,
    save_scaled_fp8,
    save_single_file,
    write_sparse_file,
    write_sparse_flux,
)
from tests.zoo.rows import EVERY

FAMILIES = tuple(ORIGINAL)
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of configs for each family, with the file of its transformer under the authors' names."""
    made = {}
    for family in FAMILIES:
        folder = tmp_path_factory.mktemp("files") / family
        pipe = EVERY[family].make()
        made[family] = save_configs(pipe, folder)
        save_single_file(pipe.transformer, family, folder / "model.safetensors")
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_are_those_of_diffusers(folders: dict[str, Path], family: str) -> None:
    """A failure means that a tensor was renamed, cut or joined in another way than diffusers does."""
    folder = folders[family]
    file = folder / "model.safetensors"
    whole = EVERY[family].make().transformer
    theirs = type(whole).from_single_file(str(file), config=str(folder / "transformer"))
    mine: Any = load_component_file(find_component(folder), str(file), Plan(), 0, torch.float32)
    assert type(mine) is type(theirs) and not mine.training
    assert dict(mine.config) | {"_name_or_path": ""} == dict(theirs.config) | {"_name_or_path": ""}
    wanted = copy_weights(theirs)
    assert wanted.keys() == mine.state_dict().keys()
    for name, tensor in mine.state_dict().items():
        assert torch.equal(tensor, wanted[name]) and torch.equal(tensor, whole.state_dict()[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_of_gguf_are_those_of_diffusers(tmp_path: Path, folders: dict[str, Path], family: str) -> None:
    """A failure means that a weight is unpacked, or that other blocks are read than diffusers reads."""
    whole = EVERY[family].make().transformer
    file = save_gguf(whole, family, tmp_path / "model.gguf")
    theirs = type(whole).from_single_file(
        str(file),
        config=str(folders[family] / "transformer"),
        quantization_config=diffusers.GGUFQuantizationConfig(compute_dtype=torch.float32),
        torch_dtype=torch.float32,
    )
    wanted = dict(theirs.named_parameters())
    seen = set()
    for rank in range(2):
        mine: Any = load_component_file(
            find_component(folders[family]), str(file), Plan(pipefusion=2), rank, torch.float32
        )
        for name, tensor in mine.named_parameters():
            assert hasattr(tensor, "quant_type") is hasattr(wanted[name], "quant_type"), name
            assert torch.equal(torch.as_tensor(tensor), torch.as_tensor(wanted[name])), name
            seen.add(name)
    assert seen == wanted.keys()
    quantized = [name for name, tensor in wanted.items() if hasattr(tensor, "quant_type")]
    config = folders[family] / "transformer" / "config.json"
    stored = ConvertedFile.match_config(SingleFile.read_header(file), type(whole), config).count_stored_weights()
    assert quantized and stored.quantized_bytes == sum(wanted[name].numel() for name in quantized)
    assert stored.quantized + stored.plain == sum(tensor.numel() for tensor in whole.state_dict().values())


@pytest.mark.parametrize("family", ["z-image", "flux-2", "wan-2.1"])
def test_weights_in_fp8_are_multiplied_with_their_scales(tmp_path: Path, folders: dict[str, Path], family: str) -> None:
    """A failure means that a scale is left out, or does not follow its numbers through renaming, cuts and shares."""
    file, plain = tmp_path / "scaled.safetensors", tmp_path / "plain.safetensors"
    save_scaled_fp8(EVERY[family].make().transformer, family, file, plain)
    types = SingleFile.read_header(file).count_types()
    assert set(types) == {"F8_E4M3 with scales", "BF16"} and types["F8_E4M3 with scales"] > 0.8 * types.total()
    for plan, dtype in ((Plan(), torch.bfloat16), (Plan(pipefusion=2), torch.float32), (Plan(tensor=2), torch.float32)):
        for rank in range(plan.world):
            mine, theirs = (
                load_component_file(find_component(folders[family]), str(path), plan, rank, dtype).named_parameters()
                for path in (file, plain)
            )
            for (name, tensor), (_, wanted) in zip(mine, theirs, strict=True):
                assert tensor.dtype == wanted.dtype and torch.equal(tensor, wanted), (plan, name)


def find_greatest_difference(mine: Any, theirs: Any) -> float:
    """Of the weights of two models, in proportion to the weight's greatest number."""
    differences = [0.0]
    for (name, tensor), (_, wanted) in zip(mine.named_parameters(), theirs.named_parameters(), strict=True):
        assert tensor.dtype == wanted.dtype and tensor.shape == wanted.shape, name
        if hasattr(tensor, "qdata"):
            tensor = tensor.dequantize()
        differences.append(float((tensor - wanted).abs().max() / wanted.abs().max()))
    return max(differences)


@pytest.mark.parametrize("family", ["z-image", "flux-2", "wan-2.1"])
def test_weights_in_integers_are_rotated_back(tmp_path: Path, folders: dict[str, Path], family: str) -> None:
    """A failure means integers unpacked or scaled unlike ComfyUI's, or a share that is cut before it is rotated."""
    file, plain = tmp_path / "convrot.safetensors", tmp_path / "plain.safetensors"
    weights = ORIGINAL[family](copy_weights(EVERY[family].make().transformer))
    save_convrot(weights, file, plain, COMFY)
    types = SingleFile.read_header(file).count_types()
    assert set(types) == {"int8_tensorwise", "convrot_w4a4", "BF16"}
    assert types.total() == sum(tensor.numel() for tensor in weights.values())
    for plan in (Plan(), Plan(pipefusion=2), Plan(tensor=2)):
        for rank in range(plan.world):
            mine, theirs = (
                load_component_file(find_component(folders[family]), str(path), plan, rank, torch.float32)
                for path in (file, plain)
            )
            # The reference adds in float64.
            assert find_greatest_difference(mine, theirs) < 1e-6, plan


def test_groups_of_every_size_are_rotated_back() -> None:
    """A failure means that files with groups of 256 columns, which published ones have, are rotated in another way."""
    weight = torch.randn(5, 512)
    for size in (4, 16, 64, 256):
        integers, scale, wanted = quantize_convrot(weight, size, 127)
        settings = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": size}
        rows = IntegerFormat.from_settings(WeightSettings.model_validate(settings)).unpack_rows(integers, scale)
        assert torch.allclose(rows, wanted, rtol=0, atol=1e-5)
    other = WeightSettings.model_validate({"format": "convrot_w4a4", "params": {"convrot_groupsize": 64}})
    assert IntegerFormat.from_settings(other) == ("convrot_w4a4", 64, 2, 1)


def test_rows_of_other_formats_are_not_joined(tmp_path: Path) -> None:
    """A failure means that one of two tensors that become one is rotated like the other."""
    parts = [FileTensor.from_shape(name, (2, 64), "I8") for name in "ab"]
    parts[0].form = IntegerFormat("int8_tensorwise", 64, 1)
    file = SingleFile(tmp_path, {}, open_tensors)
    for wrong in (torch.cat(parts), torch.cat([parts[0][:, :32], parts[0][:, 32:]])):
        wanted = {"weight": torch.empty(wrong.shape, device="meta")}
        with pytest.raises(LoadError, match="made of tensors like [ab], which are quantized in another way"):
            file._check_tensors("Model", {"weight": wrong}, wanted, set())


@pytest.mark.parametrize("family", FAMILIES)
@on_ranks(2)
def test_images_are_those_of_diffusers(folders: dict[str, Path], family: str) -> None:
    """A failure means that a rank reads another part of the file than its stage computes with."""
    files = {"transformer": str(folders[family] / "model.safetensors")}
    assert not (problems := compare_images(family, folders[family], files)), "\n".join(problems)


class MadeBytes(TorchDispatchMode):
    """Counts the bytes of tensors for which memory is taken."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::empty", "aten::cat", "aten::clone", "aten::_to_copy"):
            self.num_bytes += result.numel() * result.element_size()
        return result


@pytest.mark.parametrize("family", ["flux-2", "wan-2.1"])
def test_a_rank_holds_its_share(folders: dict[str, Path], family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure means that a rank reads tensors of others, or makes a tensor in memory that it does not keep."""
    folder = folders[family]
    whole = sum(tensor.numel() * 4 for tensor in load_file(folder / "model.safetensors").values())
    read_into_module = Checkpoint.read_into_module
    for rank in range(2):
        made = MadeBytes()
        read = []

        def count_bytes(*args: Any, made: MadeBytes = made, read: list[int] = read, **kwargs: Any) -> int:
            with made:
                read.append(read_into_module(*args, **kwargs))
            return read[0]

        monkeypatch.setattr(Checkpoint, "read_into_module", count_bytes)
        load_component_file(
            find_component(folder), str(folder / "model.safetensors"), Plan(pipefusion=2), rank, torch.float32
        )
        assert 0.2 * whole < read[0] < 0.8 * whole
        # A little more where halves of a tensor are swapped.
        assert read[0] <= made.num_bytes < 1.1 * read[0]


@pytest.mark.parametrize(
    ("guidance", "base", "others"), [(True, "flux.1-dev", ["flux.1-kontext-dev"]), (False, "flux.1-schnell", [])]
)
def test_a_file_of_comfyui_is_a_published_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, guidance: bool, base: str, others: list[str]
) -> None:
    """A failure means that the names of FLUX.1's authors are not known at its size, or read more than their header."""
    path = tmp_path / "flux.safetensors"
    write_sparse_flux(path, guidance=guidance)
    assert path.stat().st_size > 2 * 10**10
    assert find_base_models(path) == [base, *others]
    assert split_model_file(str(path), {}) == (base, {"transformer": str(path)})
    assert [name in caplog.text for name in others] == [True] * len(others) and bool(caplog.records) is bool(others)
    # The config of the other model does not fit, and that of this one is found.
    other = CONFIGS / ("flux.1-schnell" if guidance else "flux.1-dev") / "transformer" / "config.json"
    converted = ConvertedFile.match_config(SingleFile.read_header(path), diffusers.FluxTransformer2DModel, other)
    assert json.loads(converted.config.read_text())["guidance_embeds"] is guidance
    with pytest.raises(LoadError, match=r"text encoders and the VAE, .* \(--model FOLDER --component NAME=FILE\)"):
        find_model_source(base, components={"transformer": str(path)})
    with path.open("r+b") as file:
        header = file.read(10**6).replace(b'"BF16"', b'"I16" ')
        file.seek(0)
        file.write(header)
    with pytest.raises(LoadError, match="is stored as I16, .* is like black-forest-labs/FLUX.1"):
        find_base_models(path)


@pytest.mark.parametrize("base", ["minimax-h3", "flux.3-klein", "flux.3-klein-base", "ltx-2.5", "ltx-2"])
def test_files_of_new_models_are_known(tmp_path: Path, base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the names of their authors, at their own widths, with one block of each kind. A failure means that a file of
    people's folders is refused, or taken for another model."""
    configs = Path(shutil.copytree(CONFIGS, tmp_path / "configs"))
    for config in configs.glob("*/transformer/config.json"):
        values = json.loads(config.read_text())
        config.write_text(json.dumps(values | leave_one_of_each(values)))
    monkeypatch.setattr("ditile.model.known.CONFIGS", configs)
    known = find_known_model(base)
    assert known is not None
    kind = getattr(diffusers, known.transformer)
    with init_on_meta_device():
        model = kind.from_config(kind.load_config(known.folder / "transformer"))
    shapes, path = list_authors_shapes(model), tmp_path / "model.safetensors"
    write_sparse_file(path, shapes)
    assert find_base_models(path) == [base]
    if base == "minimax-h3":
        write_sparse_file(path, shapes | {"adaln_t_table": [1000, 8]})
        with pytest.raises(LoadError, match="This is a pruned MiniMax-H3 checkpoint"):
            find_base_models(path)


INTEGERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "groups_of_8": ({"convrot": True, "convrot_groupsize": 8}, {}, "its 32 columns are rotated in groups of 8; a size"),
    "blocks": ({"format": "int8_blockwise"}, {}, "comfy_quant says that weights are stored as 'int8_blockwise'"),
    "no_scale": ({}, {"weight_scale": None}, "proj_out.weight is in int8_tensorwise and has no scale"),
    "floats": ({}, {"weight": torch.ones(16, 32)}, r"it is F32 of the shape \[16, 32\]; a matrix of I8 would be"),
}
"""File -> settings of a weight, tensors beside it, and what is wrong with one of both."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole pipeline of FLUX.1 without the weights of its transformer, and these in files beside it."""
    folder = tmp_path_factory.mktemp("saved")
    pipe = tiny.flux()
    pipe.save_pretrained(folder / "pipe")
    weights = copy_weights(pipe.transformer)
    next((folder / "pipe" / "transformer").glob("*.safetensors")).unlink()
    save_file({COMFY + name: tensor for name, tensor in weights.items()}, folder / "good.safetensors")
    short = {f"diffusion_model.{name}": tensor for name, tensor in weights.items()}
    save_file(short | {"vae.weight": torch.ones(2)}, folder / "short.safetensors")
    cut = (folder / "good.safetensors").read_bytes()
    (folder / "cut.safetensors").write_bytes(cut[: len(cut) // 2])
    torch.save(weights, folder / "pickle.safetensors")
    lacking = {name: tensor for name, tensor in weights.items() if name != "proj_out.weight"}
    save_file(lacking, folder / "lacking.safetensors")
    factors = {f"transformer.proj_out.lora_{side}.weight": torch.ones(2, 2) for side in "AB"}
    save_file(factors, folder / "lora.safetensors")
    # Numbers in fp8, with and without scales that they may have.
    fp8 = weights | {"proj_out.weight": weights["proj_out.weight"].to(torch.float8_e4m3fn)}
    save_file(fp8, folder / "fp8.safetensors")
    save_file(fp8 | {"proj_out.weight_scale": torch.ones(7)}, folder / "seven.safetensors")
    mark = {"scaled_fp8": torch.empty(0, dtype=torch.float8_e4m3fn)}
    save_file(fp8 | mark, folder / "marked.safetensors")
    foreign = {"text_encoders.t5xxl." + name: tensor.clone() for name, tensor in (fp8 | mark).items()}
    own = {COMFY + name: tensor for name, tensor in fp8.items()}
    save_file(own | foreign, folder / "several.safetensors")
    word = torch.tensor(list(b'{"format": "nvfp4"}'), dtype=torch.uint8)
    save_file(fp8 | {"proj_out.comfy_quant": word}, folder / "nvfp4.safetensors")
    # A weight in int8 that is not as it should be.
    for name, (changes, tensors, _) in INTEGERS.items():
        settings = json.dumps({"format": "int8_tensorwise"} | changes)
        parts: dict[str, Any] = {
            "weight": torch.ones(16, 32, dtype=torch.int8),
            "weight_scale": torch.ones(16, 1),
            "comfy_quant": torch.tensor(list(settings.encode()), dtype=torch.uint8),
        }
        own = {f"proj_out.{part}": tensor for part, tensor in (parts | tensors).items() if tensor is not None}
        others = {key: tensor for key, tensor in weights.items() if key != "proj_out.weight"}
        save_file(others | own, folder / f"{name}.safetensors")
    save_file(weights | {"proj_out.weight": torch.ones(3, 5)}, folder / "shape.safetensors")
    save_file({"a": torch.ones(2)}, folder / "foreign.safetensors")
    save_file(weights | {"proj_out.weight": weights["proj_out.weight"].char()}, folder / "integers.safetensors")
    whole = save_gguf(pipe.transformer, "flux", folder / "good.gguf").read_bytes()
    (folder / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    # As many tensors as no file has.
    (folder / "many.gguf").write_bytes(whole[:8] + struct.pack("<Q", 2**60) + whole[16:])
    return folder


def test_a_file_in_place_of_a_model(saved: Path) -> None:
    """A failure means that a file is taken for a name, or that nobody says where a file belongs."""
    file = str(saved / "foreign.safetensors")
    with pytest.raises(LoadError, match="has the transformer of no published model; give --model FOLDER --transformer"):
        ditile.load(file)
    with pytest.raises(ModelError, match="give one of them"):
        ditile.load(file, transformer=file)
    for call in (ditile.defaults, functools.partial(ditile.plan_for, hardware="l40-pcie")):
        with pytest.raises(ModelError, match="is a file; give the folder of a pipeline"):
            call(file)


def test_load_of_a_folder_without_a_transformer(saved: Path) -> None:
    """A failure means that a pipeline needs weights of a transformer that it is not asked for."""
    wanted = tiny.flux().transformer.state_dict()
    for name in ("good", "short"):
        pipe: Any = ditile.load(str(saved / "pipe"), transformer=str(saved / f"{name}.safetensors"))
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in pipe.transformer.state_dict().items())
    with pytest.raises(LoadError, match="no weights"):
        ditile.load(str(saved / "pipe"))
    # Numbers in fp8 without a scale are what they say.
    for name in ("fp8", "several"):
        pipe = ditile.load(str(saved / "pipe"), transformer=str(saved / f"{name}.safetensors"))
        assert torch.equal(pipe.transformer.proj_out.weight, wanted["proj_out.weight"].to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cut.safetensors", "not a whole safetensors file"),
        ("cut.gguf", "not a whole GGUF file"),
        ("many.gguf", "not a whole GGUF file"),
        ("pickle.safetensors", "not a whole safetensors file"),
        ("lacking.safetensors", r"lacks .*proj_out.weight"),
        ("lora.safetensors", "is a LoRA, which changes the weights of a model; give --lora "),
        ("seven.safetensors", r"proj_out.weight_scale of the shape \[7\] is not a scale of proj_out.weight"),
        ("marked.safetensors", "marked.safetensors: proj_out.weight is in fp8 and has no scale"),
        ("nvfp4.safetensors", "proj_out.comfy_quant says that weights are stored as 'nvfp4'"),
        ("integers.safetensors", "weight proj_out.weight is stored as I8"),
        ("shape.safetensors", r"weight proj_out.weight has the shape \[3, 5\]"),
        *[(f"{name}.safetensors", message) for name, (_, _, message) in INTEGERS.items()],
    ],
)
def test_broken_files_are_refused(saved: Path, name: str, message: str) -> None:
    """A failure means random weights, a traceback, or code that runs from a file."""
    with pytest.raises((LoadError, ModelError), match=message) as refused:
        ditile.load(str(saved / "pipe"), transformer=str(saved / name))
    assert "\n" not in str(refused.value)

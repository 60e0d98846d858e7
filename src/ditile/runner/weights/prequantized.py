"""Weights that quantizers of diffusers saved as several tensors each: 4 bits of bitsandbytes, and types of torchao.

The parts of a weight are found by their names (bitsandbytes) or by the metadata of the file (torchao), and a rank reads
the parts of its own weights. diffusers' quantizer prepares the model, and the library makes weights from their parts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import torch
from diffusers.quantizers.auto import DiffusersAutoQuantizer
from torch import Tensor, nn

from ditile.parallel.block_formats import RowBlocks, describe_row_blocks, take_pieces
from ditile.parallel.tensor.cuts import TensorCut
from ditile.plan.errors import LoadError, PlanError, join_error_lines
from ditile.plan.extras import require_extra, require_quantizer
from ditile.plan.option_classes import JsonObject
from ditile.runner.model_files import open_safetensors
from ditile.runner.weights.checkpoint import Checkpoint, OpenedTensors

TORCHAO_MARK = "tensor_names"
"""The key that only torchao's metadata has."""
STATE = "quant_state.bitsandbytes__"
"""Begins the name of the part that says how a weight of bitsandbytes is packed; nf4 or fp4 ends it."""
SCALE_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
"""The other parts of such a weight: scales of blocks, the meaning of the packed numbers, and both again if the scales
are quantized too."""
_BUILD_ERRORS = (ValueError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError, RuntimeError)
"""The exceptions of the libraries for parts that do not make a weight."""

Parts = Mapping[str, Mapping[str, str]]
"""Weight -> role of a part -> its name in the file; the first one has the packed numbers."""
Views = Mapping[str, Tensor]
"""Role of a part -> its tensor in the file."""


@dataclass(frozen=True)
class BitsAndBytesWeights:
    """Weights in NF4 or FP4: numbers are packed along all rows, and share scales in blocks."""

    parts: Parts

    @classmethod
    def find_parts(cls, names: Collection[str]) -> BitsAndBytesWeights:
        """Group names such as `proj.weight.absmax` by weight. Required parts are listed even if they are not there."""
        parts: dict[str, dict[str, str]] = {}
        for name in names:
            path, _, part = name.partition(".weight.")
            weight = f"{path}.weight"
            if part.startswith(STATE):
                part = STATE
            if part not in (STATE, *SCALE_PARTS):
                continue
            if weight not in parts:
                parts[weight] = {"": weight}
                for needed in (STATE, *SCALE_PARTS[:2]):
                    parts[weight][needed] = f"{weight}.{needed}"
            parts[weight][part] = name
        return cls(parts)

    def name_type(self, weight: str) -> str:
        """Return bitsandbytes' name of the type, such as nf4."""
        return self.parts[weight][STATE].rpartition("__")[2]

    def measure_weight(self, weight: str, views: Views) -> Sequence[int]:
        """Return the shape in numbers. Raises `ValueError` if a part has another size than the kernels read."""
        state = json.loads(bytes(views[STATE].numpy()))
        shape: list[int] = state["shape"]
        numbers = math.prod(shape)
        counts = {
            "": numbers / views[""].element_size() / 2,  # a byte has two numbers
            "absmax": numbers / state["blocksize"],
            "quant_map": 16,
        }
        if "nested_absmax" in views:
            num_scales = views["absmax"].numel()
            counts["nested_absmax"] = num_scales / state["nested_blocksize"]
            # Scales are quantized in eight bits, and weights in four.
            counts["nested_quant_map"] = 256
        for part, count in counts.items():
            size = views[part].numel()
            if size != math.ceil(count):
                raise ValueError(f"{part or 'the weight'} has {size} elements, and not {count:g}")
        return shape

    def build_weight(self, weight: str, views: Views) -> Tensor:
        """Build a parameter of bitsandbytes, in memory of its own."""
        from bitsandbytes.nn import Params4bit  # type: ignore[import-not-found]

        self.measure_weight(weight, views)
        state = {}
        for part, view in views.items():
            if part:
                name = self.parts[weight][part]
                state[name] = view.clone()
        packed = views[""].clone()
        built: Tensor = Params4bit.from_prequantized(packed, state, device="cpu")
        return built

    def find_row_blocks(self, weight: str, shape: Sequence[int]) -> RowBlocks | None:
        """Return None: scales may be quantized themselves, in blocks that do not end with rows."""
        return None


@dataclass(frozen=True)
class TorchaoWeights:
    """Weights of torchao's tensor classes.

    Attributes:
        parts: the parts of each weight.
        descriptions: weight -> its class, and its values besides tensors.
        build: torchao's function that makes a weight.
    """

    parts: Parts
    descriptions: Mapping[str, JsonObject]
    build: Callable[[JsonObject], Tensor]

    @classmethod
    def read_metadata(cls, metadata: Mapping[str, str], place: Path) -> TorchaoWeights:
        """Read the description of all tensors in the metadata of a file.

        Raises:
            LoadError: if this version of torchao does not know a class.
            ModelError: if torchao is not installed.
        """
        require_extra("quantize", str(place))
        from torchao.prototype.safetensors import safetensors_utils  # type: ignore[import-untyped]

        if not safetensors_utils.is_metadata_torchao(metadata):
            raise LoadError(f"{place} has weights of torchao that this version does not know; update torchao")
        parts: dict[str, dict[str, str]] = {}
        descriptions = {}
        for weight in json.loads(metadata[TORCHAO_MARK]):
            description = json.loads(metadata[weight])
            if "_tensor_data_names" in description:
                path, _, leaf = weight.rpartition(".")
                parts[weight] = {"qdata": f"{path}._{leaf}_qdata"}
                for part in description["_tensor_data_names"]:
                    parts[weight][part] = f"{path}._{leaf}_{part}"
                descriptions[weight] = description
        return cls(parts, descriptions, safetensors_utils.object_from_dict)

    def name_type(self, weight: str) -> str:
        """Return the class, such as Int8Tensor."""
        return str(self.descriptions[weight]["_type"])

    def measure_weight(self, weight: str, views: Views) -> Sequence[int]:
        """Return the shape in numbers."""
        return self.build_weight(weight, views).shape

    def build_weight(self, weight: str, views: Views) -> Tensor:
        """Build a tensor of torchao, which may be a view of its parts."""
        description = self.descriptions[weight]
        data = {**description["_data"], **views}
        whole = {
            "_type": description["_type"],
            "_data": data,
        }
        return self.build(whole)

    def find_row_blocks(self, weight: str, shape: Sequence[int]) -> RowBlocks | None:
        """Return the blocks for cutting a weight; None if it cannot be cut."""
        if "act_pre_scale" in self.parts[weight]:
            return None
        data = self.descriptions[weight]["_data"]
        return describe_row_blocks(self.name_type(weight), data.get("block_size"), shape)


Library = BitsAndBytesWeights | TorchaoWeights
"""The storage format of a checkpoint's weights."""


class StoredWeights(NamedTuple):
    """How many numbers a transformer has, and the bytes of those that stay quantized.

    Attributes:
        quantized, plain: how many numbers stay quantized, and how many are cast to the type of the run.
        quantized_bytes: the bytes of the quantized numbers.
        formats: only for GGUF: type of blocks -> how many numbers are stored so, and in how many weights.
    """

    quantized: int
    plain: int
    quantized_bytes: int
    formats: Mapping[str, tuple[int, int]] = MappingProxyType({})

    def count_bytes(self, numbers: float, element_size: int) -> int:
        """Return the bytes of some numbers, at the average size of all."""
        total = self.quantized_bytes + self.plain * element_size
        return int(numbers * total / (self.quantized + self.plain))


@dataclass(frozen=True)
class PrequantizedCheckpoint:
    """A checkpoint of quantized weights.

    Attributes:
        place: the file or folder, for errors.
        stored: the same checkpoint, with the parts of weights as its tensors.
        library: the format of the weights.
    """

    place: Path
    stored: Checkpoint
    library: Library

    @classmethod
    def recognize(cls, stored: Checkpoint, place: Path) -> PrequantizedCheckpoint | None:
        """Recognize a checkpoint with quantized weights; None if all are plain.

        Raises:
            LoadError: if a weight lacks a part.
            ModelError: if they need torchao, and it is not installed.
        """
        if not stored.files:
            return None
        library: Library = BitsAndBytesWeights.find_parts(stored.files)
        # Each file of a checkpoint has the metadata of all its files.
        with open_safetensors(stored.locate_stored_file(min(stored.files.values())), "pt") as opened:
            metadata = opened.metadata() or {}
        if TORCHAO_MARK in metadata:
            library = TorchaoWeights.read_metadata(metadata, place)
        checkpoint = cls(place, stored, library)
        for weight, parts in library.parts.items():
            missing = parts.values() - stored.files.keys()
            if missing:
                checkpoint.refuse_weight(weight, f"lacks its part {min(missing)}")
        return checkpoint if library.parts else None

    @contextmanager
    def open_file(self, path: Path) -> Iterator[OpenedTensors]:
        """Open a file. Each quantized weight is one tensor in it."""
        with self.stored.open_file(path) as opened:
            yield _OpenedWeights(self, path, opened)

    def list_row_blocks(self, tensors: Mapping[str, Tensor], size: int) -> dict[str, RowBlocks]:
        """Return the blocks for cutting weights over `size` tensor-parallel ranks. `tensors` have the model's shapes.

        Raises:
            PlanError: if a weight cannot be cut.
        """
        row_blocks: dict[str, RowBlocks] = {}
        if size == 1:
            return row_blocks
        for weight in self.library.parts.keys() & tensors.keys():
            blocks = self.library.find_row_blocks(weight, tensors[weight].shape)
            if blocks is None:
                raise PlanError(
                    f"tensor={size} cannot cut weights of {self.library.name_type(weight)}, as {self.place} has; use "
                    "pipefusion, ulysses or ring, or a model in GGUF or in torchao's int8"
                )
            row_blocks[weight] = blocks
        return row_blocks

    def count_stored_weights(self) -> StoredWeights:
        """Count the transformer's numbers, and the bytes of quantized ones, by the headers of all files."""
        quantized = 0
        plain = 0
        quantized_bytes = 0
        for file in sorted(set(self.stored.files.values())):
            with self.open_file(self.stored.locate_stored_file(file)) as opened:
                for name in opened.offset_keys():
                    stored = opened.get_slice(name)
                    numbers = math.prod(stored.get_shape())
                    if isinstance(stored, _QuantizedWeight):
                        quantized += numbers
                        quantized_bytes += stored.count_bytes()
                    else:
                        plain += numbers
        return StoredWeights(quantized, plain, quantized_bytes)

    def build_checkpoint(self, model: Any, dtype: torch.dtype, config: JsonObject | None = None) -> Checkpoint:
        """Build the checkpoint of a model without weights, after preparing it for quantized ones like diffusers.

        Args:
            model: the model.
            dtype: the type in which Linears compute, unless a config names one.
            config: the `quantization_config` of the model; a single file has none.

        Raises:
            LoadError: if a quantized weight belongs to no Linear.
            ModelError: if bitsandbytes is not installed.
        """
        linear = nn.Linear
        if isinstance(self.library, BitsAndBytesWeights):
            require_quantizer("bitsandbytes_4bit", str(self.place))
            from bitsandbytes.nn import Linear4bit

            linear = Linear4bit
            plain = []
            for path, module in model.named_modules():
                if isinstance(module, nn.Linear) and f"{path}.weight" not in self.library.parts:
                    plain.append(path)
            if config is None:
                config = {
                    "quant_method": "bitsandbytes",
                    "load_in_4bit": True,
                    "bnb_4bit_compute_dtype": dtype,
                }
            config = {**config, "llm_int8_skip_modules": plain}
        if config is not None:
            quantizer = DiffusersAutoQuantizer.from_config(dict(config), pre_quantized=True)
            quantizer.preprocess_model(
                model=model,
                device_map=None,
                keep_in_fp32_modules=[],
            )
            quantizer.postprocess_model(model)
            model.hf_quantizer = quantizer
        modules = dict(model.named_modules())
        files = dict(self.stored.files)
        for weight, parts in self.library.parts.items():
            path = weight.removesuffix(".weight")
            if not isinstance(modules.get(path), linear):
                self.refuse_weight(weight, f"is of no Linear of a {type(model).__name__}")
            # A weight is listed under the file of its packed numbers.
            main, *others = parts.values()
            files[weight] = files.pop(main)
            for name in others:
                del files[name]
        return Checkpoint(files, self.stored.locate, self.open_file)

    def refuse_weight(self, weight: str, problem: str) -> NoReturn:
        """Raise `LoadError` for a weight."""
        raise LoadError(f"{self.place}: quantized weight {weight} {problem}; copy it again")


@dataclass(frozen=True)
class _OpenedWeights:
    checkpoint: PrequantizedCheckpoint
    path: Path
    opened: OpenedTensors

    def offset_keys(self) -> list[str]:
        library = self.checkpoint.library
        own_names = {}
        for weight, parts in library.parts.items():
            main, *others = parts.values()
            own_names[main] = weight
            own_names.update(dict.fromkeys(others, ""))
        names = []
        for stored_name in self.opened.offset_keys():
            name = own_names.get(stored_name, stored_name)
            # The other parts are read together with the first one.
            if name:
                names.append(name)
        return names

    def get_slice(self, name: str) -> Any:
        if name in self.checkpoint.library.parts:
            return _QuantizedWeight(self, name)
        return self.opened.get_slice(name)

    def view_parts(self, weight: str) -> dict[str, Tensor]:
        stored = self.checkpoint.stored
        views = {}
        for part, name in self.checkpoint.library.parts[weight].items():
            path = stored.locate_stored_file(stored.files[name])
            opened: Any = self.opened
            # An index may place the scales of a weight in the next file.
            if path != self.path:
                opened = open_safetensors(path, "pt")
            views[part] = opened.get_slice(name)[...]
        return views


@dataclass(frozen=True)
class _QuantizedWeight:
    """A weight of an open file."""

    opened: _OpenedWeights
    name: str

    def get_dtype(self) -> str:
        return self.opened.checkpoint.library.name_type(self.name)

    def get_shape(self) -> list[int]:
        return list(self._call_library("measure_weight"))

    def count_bytes(self) -> int:
        num_bytes = 0
        for view in self.opened.view_parts(self.name).values():
            num_bytes += view.nbytes
        return num_bytes

    def copy_share(self, cut: TensorCut | None, dtype: torch.dtype) -> Tensor:
        weight: Tensor = self._call_library("build_weight")
        # bitsandbytes' parameters are copies already, and their packed bytes cannot be cast.
        if isinstance(weight, nn.Parameter):
            return weight
        weight = weight.to(dtype)
        if cut is None:
            return weight.clone()
        return take_pieces(weight, *cut)

    def _call_library(self, method: str) -> Any:
        checkpoint = self.opened.checkpoint
        try:
            views = self.opened.view_parts(self.name)
            return getattr(checkpoint.library, method)(self.name, views)
        except _BUILD_ERRORS as error:
            checkpoint.refuse_weight(self.name, f"cannot be made of its parts ({join_error_lines(error)})")

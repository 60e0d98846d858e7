"""One file with the weights of a transformer, under the names of diffusers, of ComfyUI or of the model's authors.

diffusers knows how to rename and divide the tensors of each class (`from_single_file`), with functions on tensors in
memory. Here these functions get tensors without data, which record each operation. A rank then replays the operations
on views of the mapped file, for each of its tensors, so that it reads no more than its share.
"""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import diffusers
import torch
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from diffusers.loaders.single_file_utils import DIFFUSERS_DEFAULT_PIPELINE_PATHS, infer_diffusers_model_type
from pydantic import ValidationError
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ditile.model.hooks.placeholders import init_on_meta_device
from ditile.model.known import KnownModel, find_known_model, list_known_models
from ditile.parallel.block_formats import RowBlocks, locate_number, take_pieces
from ditile.parallel.tensor.cuts import TensorCut
from ditile.plan.errors import LoadError, join_error_lines
from ditile.plan.extras import require_extra
from ditile.plan.option_classes import CallArguments, JsonObject
from ditile.runner.model_files import (
    FLOATS,
    FP8,
    GGUF,
    SCALES,
    TRANSFORMER,
    check_config_counts,
    check_model_file,
    leave_one_of_each,
    open_safetensors,
    read_json_object,
)
from ditile.runner.weights.checkpoint import Checkpoint, OpenedTensors, OpenTensors, StoredTensor, open_tensors
from ditile.runner.weights.convrot import (
    GROUP_SIZES,
    INTEGER_FORMATS,
    FileSettings,
    IntegerFormat,
    WeightSettings,
)
from ditile.runner.weights.prequantized import PrequantizedCheckpoint, StoredWeights

if TYPE_CHECKING:
    from ditile.runner.weights.gguf_file import BlockFormat, GgufTensors

PREFIXES = ("model.diffusion_model.", "diffusion_model.")
"""The beginnings of the transformer's tensor names in ComfyUI's files; other names there belong to other models."""
CONFIG = Path("transformer", "config.json")
"""The config of a pipeline's transformer, in its folder. A second transformer has the same config."""
MOST_MISSING = 0.04
"""The share of a model's tensors that may be missing in a file under diffusers' names; files with other names lack
more."""
LEAST_SHARED = 0.5
"""The share of a published model's names that a file needs to be a candidate for that model."""
UNKNOWN = "v1"
"""diffusers' name for an unknown file."""
ACTIVATION_SCALES = ("scale_input", "input_scale")
"""Other tensors possible next to a weight with scales: the scale of its inputs, if they are quantized too."""
FP8_MARK = "scaled_fp8"
"""An empty tensor that marks scaled weights in ComfyUI's first files."""
FORMAT = "comfy_quant"
"""A tensor of JSON: in ComfyUI's later files it says how the weight beside it is stored, if the header does not."""
MOST_IN_FORMAT = 4096
"""The most bytes of such a tensor that are read."""
FP8_FORMATS = ("float8_e4m3fn", "float8_e5m2")
"""The beginnings of ComfyUI's names for formats of fp8 with scales."""
SCALED_BLOCK = 128
"""Rows or columns of a block with one scale. The last block of a weight may be smaller."""
COMPONENT_NAMES = {
    "text_encoder": r"(.*\.)?(shared|embed_tokens|token_embedding|token_embd)\.weight",
    "vae": r"((first_stage_model|vae)\.)?decoder\..*",
}
"""Component -> pattern of names that only its tensors have, in files of any origin, and no transformer's."""
LORA_FACTORS = r"\.lora_(A|B|up|down)\."
"""Parts of the names of a LoRA's tensors."""
MISSED_NAMES = {"LTX2VideoTransformer3DModel": {"prompt_adaln_single.": "prompt_adaln."}}
"""Parts of the authors' names that diffusers' conversion leaves as they are, by class -> diffusers' own. LTX-2.3 and
LTX-2.5 have them."""
CONVERSION_ERRORS = (LookupError, ValueError, TypeError, AttributeError, RuntimeError, AssertionError)
"""The exceptions of diffusers' functions for tensors of another model."""


class _Operation(NamedTuple):
    """The origin of a tensor made from others: a call, and the index of the result, if there are several."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: CallArguments
    place: int | None = None


class FileTensor(Tensor):
    """A tensor of a file, or made from such tensors, on the meta device.

    Attributes:
        stored_name: its name in the file; empty if an operation made it.
        stored_type: the type of its numbers in the file, as the format calls it.
        operation: the operation that made it; None for a tensor of the file.
        form: how it is quantized, if it is; its last dimension then counts bytes.
        scale: the factors of its numbers, in its shape; only a tensor of a file has them.
    """

    scale: FileTensor | None = None
    stored_name: str
    stored_type: str
    operation: _Operation | None
    form: BlockFormat | IntegerFormat | None

    @classmethod
    def from_shape(
        cls, name: str, shape: Sequence[int], stored_type: str, form: BlockFormat | None = None
    ) -> FileTensor:
        """Build a tensor of a file."""
        tensor = torch.empty(tuple(shape), device="meta").as_subclass(cls)
        tensor.stored_name = name
        tensor.stored_type = stored_type
        tensor.operation = None
        tensor.form = form
        return tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function, and record it in the returned tensors."""
        options = kwargs or {}
        result = super().__torch_function__(func, types, args, options)  # type: ignore[no-untyped-call]
        if isinstance(result, FileTensor):
            result._record(_Operation(func, args, options))
        elif isinstance(result, list | tuple):
            for index, part in enumerate(result):
                if isinstance(part, FileTensor):
                    part._record(_Operation(func, args, options, index))
        return result

    def _record(self, operation: _Operation) -> None:
        self.stored_name = ""
        self.operation = operation
        self.form = _list_operands(operation)[0].form

    def get_own_shape(self) -> tuple[int, ...]:
        """Return the shape in numbers."""
        shape = tuple(self.shape)
        if self.form is None:
            return shape
        return (*shape[:-1], shape[-1] // self.form.num_bytes * self.form.numbers)

    def list_stored(self) -> list[FileTensor]:
        """List the tensors in the file from which it is made."""
        if self.operation is None:
            return [self]
        stored = []
        for operand in _list_operands(self.operation):
            stored += operand.list_stored()
        return stored

    def replay_operations(self, read: Callable[[FileTensor], Tensor]) -> Tensor:
        """Make the tensor from stored ones, whose values `read` returns: a view of them, unless parts are joined."""
        if self.operation is None:
            return read(self)
        function, args, kwargs, place = self.operation
        args = tree_map_only(FileTensor, lambda operand: operand.replay_operations(read), args)
        # Joining a single tensor would copy it.
        if function is torch.cat and len(args[0]) == 1:
            return args[0][0]  # type: ignore[no-any-return]
        result: Tensor = function(*args, **kwargs)
        if place is None:
            return result
        return result[place]


FileTensors = dict[str, FileTensor]
"""Name of a tensor -> the tensor."""


def _list_operands(operation: _Operation) -> list[FileTensor]:
    return [leaf for leaf in tree_leaves(operation.args) if isinstance(leaf, FileTensor)]


@dataclass(frozen=True)
class SingleFile:
    """A file with the weights of a transformer.

    Attributes:
        path: the file.
        tensors: name in the file -> its tensor, in the order of the file.
        open_file: opens it.
        gguf: the tensors in the form of GGUF, if it is such a file.
        prequantized: the checkpoint with quantized weights, if a quantizer of diffusers wrote the file.
        marks: names of tensors that mark ComfyUI's models with scaled weights in fp8.
    """

    path: Path
    tensors: FileTensors
    open_file: OpenTensors
    gguf: GgufTensors | None = None
    prequantized: PrequantizedCheckpoint | None = None
    marks: frozenset[str] = frozenset()

    @classmethod
    def read_header(cls, path: Path) -> SingleFile:
        """Read the names and shapes of a file's tensors.

        Raises:
            LoadError: if there is no such file, or it is cut short, or scales are missing: of a weight in integers, or
                of one in fp8 while others have them.
            ModelError: if it is a GGUF file, and the extra is not installed.
        """
        if check_model_file(path) == GGUF:
            require_extra("gguf", str(path))
            from ditile.runner.weights.gguf_file import GgufTensors

            stored_tensors = GgufTensors.read_header(path)
            tensors = {}
            for name, entry in stored_tensors.entries.items():
                tensors[name] = FileTensor.from_shape(name, entry.shape, entry.stored_type, entry.block)
            return cls(path, tensors, lambda _: stored_tensors.open_mapping(), stored_tensors)
        with open_safetensors(path, "pt") as opened:
            stored_checkpoint = Checkpoint(dict.fromkeys(opened.keys(), path.name), lambda _: path)
            prequantized = PrequantizedCheckpoint.recognize(stored_checkpoint, path)
            open_file = open_tensors if prequantized is None else prequantized.open_file
            # What a quantizer divided into several tensors is one tensor here.
            with open_file(path) as grouped:
                tensors = {}
                for name in grouped.offset_keys():
                    stored = grouped.get_slice(name)
                    tensors[name] = FileTensor.from_shape(name, stored.get_shape(), stored.get_dtype())
            if any(re.search(LORA_FACTORS, name) for name in tensors):
                flag = f"--lora {shlex.quote(str(path))}"
                raise LoadError(f"{path} is a LoRA, which changes the weights of a model; give {flag}")
            _attach_formats(path, tensors, opened, (opened.metadata() or {}).get("_quantization_metadata", "{}"))
            marks = frozenset(name for name in tensors if name.rpartition(".")[2] == FP8_MARK)
            scaled = _attach_scales(path, tensors, opened)
            file = cls(path, scaled, open_file, prequantized=prequantized, marks=marks)
        file._refuse_lost_scales()
        return file

    def _refuse_lost_scales(self) -> None:
        """Raise `LoadError` for a matrix in integers without a scale, or in fp8 where others have one.

        ComfyUI takes a missing scale of fp8 for 1. Its own files have no such weights: tensors without a scale there
        (norms, biases, embeddings) have 16 or 32 bits. So the scale was lost if others have one or the file promises
        it, and numbers without it are wrong by factors of hundreds.
        """
        tensors = self.own_tensors
        is_scaled = f"{self.prefix}{FP8_MARK}" in self.marks or any(
            tensor.scale is not None for tensor in tensors.values()
        )
        for name, tensor in tensors.items():
            if tensor.scale is not None:
                continue
            form = ""
            if isinstance(tensor.form, IntegerFormat):
                form = tensor.form.name
            elif is_scaled and name.endswith(".weight") and tensor.ndim > 1 and tensor.stored_type in FP8:
                form = "fp8"
            if form:
                raise LoadError(
                    f"{self.path}: {name} is in {form} and has no scale, and the weights of this file have scales "
                    f"({', '.join(SCALES)}); copy it again, or take another file"
                )

    @property
    def prefix(self) -> str:
        """Return ComfyUI's prefix of the transformer's tensor names; empty if they have none."""
        for prefix in PREFIXES:
            if any(name.startswith(prefix) for name in self.tensors):
                return prefix
        return ""

    @property
    def own_tensors(self) -> FileTensors:
        """Return the transformer's tensors, without ComfyUI's prefix."""
        prefix = self.prefix
        return {name.removeprefix(prefix): self.tensors[name] for name in self.tensors if name.startswith(prefix)}

    def guess_component(self) -> str:
        """Return the component of a file, guessed from its tensor names."""
        for component, pattern in COMPONENT_NAMES.items():
            if any(re.fullmatch(pattern, name) for name in self.own_tensors):
                return component
        return TRANSFORMER

    def count_types(self) -> Counter[str]:
        """Count the transformer's numbers by their type."""
        numbers = Counter[str]()
        for tensor in self.own_tensors.values():
            form = tensor.stored_type
            if isinstance(tensor.form, IntegerFormat):
                form = tensor.form.name
            elif tensor.scale is not None:
                form = f"{form} with scales"
            numbers[form] += math.prod(tensor.get_own_shape())
        return numbers

    def convert_tensors(self, model_class: Any, config: Path) -> FileTensors:
        """Return the tensors needed by a model, under its own names.

        Args:
            model_class: the class of the model.
            config: the file of its config.

        Raises:
            LoadError: if the file lacks a tensor, or has one more, or one of another shape or of integers.
        """
        values = read_json_object(config)
        check_config_counts(values, config)
        model_tensors = _read_model_tensors(model_class, config)
        tensors = self.own_tensors
        unused: set[str] = set()
        missing = model_tensors.keys() - tensors.keys()
        # The names are diffusers' own, which need no conversion, unless many are missing and there are others instead.
        if len(missing) > MOST_MISSING * len(model_tensors) and tensors.keys() - model_tensors.keys():
            if self.prequantized is not None:
                raise LoadError(
                    f"{self.path} has quantized weights under other names than diffusers', whose parts have none "
                    "there; take a folder of diffusers, or a file of GGUF"
                )
            tensors, unused = self._rename_tensors(model_class.__name__, values, tensors)
        self._check_tensors(model_class.__name__, tensors, model_tensors, unused)
        return tensors

    def _rename_tensors(
        self, class_name: str, config: JsonObject, tensors: FileTensors
    ) -> tuple[FileTensors, set[str]]:
        """Rename tensors by diffusers' conversion. Return them, and the names left over."""
        loadable: Any = SINGLE_FILE_LOADABLE_CLASSES.get(class_name)
        if loadable is None:
            return tensors, set()
        # The function removes the tensors that it uses from this dict.
        remaining = dict(tensors)
        try:
            renamed: FileTensors = loadable["checkpoint_mapping_fn"](checkpoint=remaining, config=config)
        except KeyError as error:
            raise LoadError(f"{self.path} lacks the weight {error} of a {class_name}") from error
        except CONVERSION_ERRORS as error:
            # diffusers itself says why only in errors of this type.
            reason = f": {join_error_lines(error)}" if isinstance(error, ValueError) else ""
            raise LoadError(
                f"{self.path} does not have the weights of a {class_name}: it has {len(tensors)} tensor(s), such as "
                f"{min(tensors)}{reason}"
            ) from error
        for part, own_part in MISSED_NAMES.get(class_name, {}).items():
            renamed = {name.replace(part, own_part): tensor for name, tensor in renamed.items()}
        used: set[str] = set()
        for tensor in renamed.values():
            used.update(stored.stored_name for stored in tensor.list_stored())
        return renamed, {name for name, tensor in remaining.items() if tensor.stored_name not in used}

    def _check_tensors(
        self,
        class_name: str,
        tensors: FileTensors,
        model_tensors: Mapping[str, Tensor],
        unused: set[str],
    ) -> None:
        missing = model_tensors.keys() - tensors.keys()
        if missing:
            raise LoadError(
                f"{self.path} lacks {len(missing)} weight(s) of a {class_name}, such as {min(missing)}; it has "
                f"{min(self.tensors, default='none')}"
            )
        # Unknown tensors may be scales, without which the weights would be wrong.
        unknown = unused | (tensors.keys() - model_tensors.keys())
        if unknown:
            example = min(unknown)
            stored_type = ""
            if example in self.own_tensors:
                stored_type = f" ({self.own_tensors[example].stored_type})"
            raise LoadError(
                f"{self.path} has {len(unknown)} tensor(s) that a {class_name} does not take, such as "
                f"{example}{stored_type}"
            )
        for name, model_tensor in model_tensors.items():
            shape = tuple(model_tensor.shape)
            own_shape = tensors[name].get_own_shape()
            if own_shape != shape:
                raise LoadError(
                    f"{self.path}: weight {name} has the shape {list(own_shape)}, and the config says {list(shape)}"
                )
            for stored in tensors[name].list_stored():
                # Integers are rotated back by whole rows, so a weight may be some rows of a tensor, but no part of one.
                is_part = isinstance(stored.form, IntegerFormat) and stored.shape[-1] != tensors[name].shape[-1]
                if is_part or stored.form != tensors[name].form:
                    raise LoadError(
                        f"{self.path}: weight {name} is made of tensors like {stored.stored_name}, which are quantized "
                        f"in another way; take a file of {' or '.join(FP8_FORMATS)}, or another one of GGUF"
                    )
                # The types of a block are checked where the file is read.
                is_quantized = stored.form is not None
                if self.prequantized is not None:
                    is_quantized = stored.stored_name in self.prequantized.library.parts
                # Integers in place of a weight mean nothing without their scales.
                is_number = not model_tensor.is_floating_point() or stored.stored_type in FLOATS + FP8
                if not is_quantized and not is_number:
                    raise LoadError(
                        f"{self.path}: weight {name} is stored as {stored.stored_type}, and a model computes with "
                        "floating point numbers; take a file of those, or of GGUF"
                    )


@dataclass(frozen=True)
class ConvertedFile:
    """A file with the tensors of a model.

    Attributes:
        file: the file.
        model_class: the class of the model.
        config: the config of the model that it fits.
        tensors: name in the model -> the tensor.
    """

    file: SingleFile
    model_class: Any
    config: Path
    tensors: FileTensors

    @property
    def keeps_integers(self) -> bool:
        """Return whether weights stay in integers."""
        return any(isinstance(tensor.form, IntegerFormat) for tensor in self.tensors.values())

    @classmethod
    def match_config(cls, file: SingleFile, model_class: Any, own_config: Path | None) -> ConvertedFile:
        """Match a file to a config: the pipeline's own, or a published model's of the same class.

        Raises:
            LoadError: if it fits none.
        """
        configs = [model.folder / CONFIG for model in _list_published(model_class.__name__)]
        if own_config is not None:
            configs.insert(0, own_config)
        problem: LoadError | None = None
        for config in configs:
            try:
                return cls(file, model_class, config, file.convert_tensors(model_class, config))
            except LoadError as error:
                # The first config is the pipeline's own, and gives the best error.
                problem = problem or error
        raise problem or LoadError(
            f"{file.path}: no config of a {model_class.__name__} is known; give --model FOLDER with one"
        )

    def list_row_blocks(self, size: int = 1) -> dict[str, RowBlocks]:
        """Return the blocks for cutting quantized weights over `size` tensor-parallel ranks.

        Raises:
            PlanError: if a weight cannot be cut.
        """
        if self.file.prequantized is not None:
            return self.file.prequantized.list_row_blocks(self.tensors, size)
        row_blocks = {}
        # diffusers unpacks the weights of these modules.
        unpacked = set(self.model_class._keep_in_fp32_modules or ())
        for name, tensor in self.tensors.items():
            if tensor.form is not None and unpacked.isdisjoint(name.split(".")):
                row_blocks[name] = tensor.form.row_blocks
        return row_blocks

    def count_stored_weights(self) -> StoredWeights:
        """Count the transformer's numbers, and the bytes of those that stay quantized."""
        if self.file.prequantized is not None:
            return self.file.prequantized.count_stored_weights()
        quantized = 0
        plain = 0
        quantized_bytes = 0
        formats: dict[str, tuple[int, int]] = {}
        row_blocks = self.list_row_blocks()
        for name, tensor in self.tensors.items():
            numbers = math.prod(tensor.get_own_shape())
            if name not in row_blocks:
                plain += numbers
                continue
            quantized += numbers
            if isinstance(tensor.form, IntegerFormat):
                # int4 is kept as int8. A row has a scale of four bytes.
                quantized_bytes += numbers + 4 * len(tensor)
            else:
                quantized_bytes += tensor.numel()
                before, weights = formats.get(row_blocks[name].name, (0, 0))
                formats[row_blocks[name].name] = (before + numbers, weights + 1)
        return StoredWeights(quantized, plain, quantized_bytes, formats)

    def build_checkpoint(self, model: Any, dtype: torch.dtype) -> Checkpoint:
        """Build the checkpoint of a model without weights. Its Linears are replaced if the file has quantized ones."""
        if self.file.prequantized is not None:
            return self.file.prequantized.build_checkpoint(model, dtype)
        if self.file.gguf is not None:
            quantized = self.file.gguf.replace_quantized_linears(model, self.tensors, dtype)
        else:
            linears = {f"{path}.weight" for path, module in model.named_modules() if isinstance(module, nn.Linear)}
            quantized = frozenset(linears & self.list_row_blocks().keys())

        @contextmanager
        def open_converted(path: Path) -> Iterator[OpenedTensors]:
            with self.file.open_file(path) as opened:
                yield _ConvertedTensors(opened, self.tensors, quantized)

        path = self.file.path
        return Checkpoint(dict.fromkeys(self.tensors, path.name), lambda _: path, open_converted)


@dataclass(frozen=True)
class _ConvertedTensors:
    """An open file under the names of a model; `quantized` are the weights that stay quantized."""

    opened: OpenedTensors
    tensors: FileTensors
    quantized: frozenset[str]

    def offset_keys(self) -> list[str]:
        places = {name: place for place, name in enumerate(self.opened.offset_keys())}
        return sorted(self.tensors, key=lambda name: places[self.tensors[name].list_stored()[0].stored_name])

    def get_slice(self, name: str) -> StoredTensor:
        tensor = self.tensors[name]
        stays_quantized = name in self.quantized
        if stays_quantized and isinstance(tensor.form, IntegerFormat):
            return IntegerTensor(self.opened, tensor, stays_quantized)
        return ConvertedTensor(self.opened, tensor, stays_quantized)


@dataclass(frozen=True, slots=True)
class ConvertedTensor:
    """A tensor of an open file in a model's form; `stays_quantized` if its blocks of GGUF are not unpacked."""

    opened: OpenedTensors
    tensor: FileTensor
    stays_quantized: bool

    def get_shape(self) -> list[int]:
        return list(self.tensor.get_own_shape())

    def __getitem__(self, index: Any) -> Tensor:
        content = self.tensor.replay_operations(self.read_stored)
        form = self.tensor.form
        if isinstance(form, IntegerFormat):
            rows = index
            columns: Any = ...
            if isinstance(index, tuple) and len(index) == content.ndim:
                rows = index[:-1]
                columns = (..., index[-1])
            # A row is rotated back whole.
            scales = self.tensor.replay_operations(self._read_scales)[rows]
            return form.unpack_rows(content[rows], scales[..., :1])[columns]
        if any(stored.scale is not None for stored in self.tensor.list_stored()):
            # Operations on a weight move its numbers, so the same operations move their scales.
            return content[index].float().mul_(self.tensor.replay_operations(self._read_scales)[index])
        if form is None:
            return content[index]
        if not self.stays_quantized:
            from diffusers.quantizers.gguf.utils import dequantize_gguf_tensor

            return dequantize_gguf_tensor(content)[index]  # type: ignore[no-any-return]
        # An index counts numbers, and a block of GGUF has more numbers than bytes.
        if isinstance(index, tuple) and len(index) == content.ndim:
            dim = content.ndim - 1
            start = locate_number(content, dim, index[-1].start)
            stop = locate_number(content, dim, index[-1].stop)
            index = (*index[:-1], slice(start, stop))
        return content[index]

    def read_stored(self, stored: FileTensor) -> Tensor:
        return self.opened.get_slice(stored.stored_name)[...]  # type: ignore[no-any-return]

    def _read_scales(self, stored: FileTensor) -> Tensor:
        if stored.scale is None:
            return torch.ones(()).expand(stored.shape)
        return stored.scale.replay_operations(self.read_stored)


class IntegerTensor(ConvertedTensor):
    """A weight that stays in integers."""

    def copy_share(self, cut: TensorCut | None, dtype: torch.dtype) -> Tensor:
        """Copy a rank's part of the weight."""
        form = self.tensor.form
        assert isinstance(form, IntegerFormat)
        require_extra("quantize", form.name)
        from ditile.runner.weights.convrot_weight import ConvRotInt8

        stored = form.unpack_integers(self.tensor.replay_operations(self.read_stored))
        scales = self.tensor.replay_operations(self._read_scales)[:, :1]
        weight = ConvRotInt8(stored, scales.float().contiguous(), [1, form.group_size], dtype)
        whole = TensorCut(0, (slice(0, len(stored)),))
        return take_pieces(weight, *(cut or whole))


def _attach_scales(path: Path, tensors: FileTensors, opened: OpenedTensors) -> FileTensors:
    """Attach the scales in an open file to its quantized weights, and return the tensors without them.

    Raises:
        LoadError: if a weight has two scales, or a scale is negative or not finite, or its shape does not fit.
    """
    others = {}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        weight = tensors.get(f"{module}.weight")
        has_scale = weight is not None and (weight.stored_type in FP8 or weight.form is not None)
        if leaf in SCALES and tensor.stored_type in FLOATS and weight is not None and has_scale:
            if weight.scale is not None:
                raise LoadError(f"{path}: {module}.weight has a second scale, {name}; a weight has one")
            values = opened.get_slice(name)[...].float()
            if not values.isfinite().all() or (values < 0).any():
                raise LoadError(f"{path}: {name} has numbers that cannot be scales: negative, infinite or NaN")
            scale = _spread_scale(tensor, weight.shape)
            is_of_blocks = tensor.numel() not in (1, weight.shape[0])
            if scale is None or (weight.form is not None and is_of_blocks):
                raise LoadError(
                    f"{path}: {name} of the shape {list(tensor.shape)} is not a scale of {module}.weight, which has "
                    f"the shape {list(weight.shape)}; one for it, for each of its rows or, in fp8, for blocks of it "
                    "would be"
                )
            weight.scale = scale
            continue
        is_beside_weight = leaf == FP8_MARK or _is_settings(name, tensor) or (leaf in ACTIVATION_SCALES and has_scale)
        if not is_beside_weight:
            others[name] = tensor
    return others


def _spread_scale(scale: FileTensor, shape: Sequence[int]) -> Any:
    """Expand a scale to the shape of its weight; None if it does not fit. It is a view, except for scales of blocks.

    Files have a single scale as [] or [1], one for each row as [rows] or [rows, 1], scales for blocks of rows and
    columns as [n, m], and for blocks within rows as [rows, m, 1].
    """
    counts = list(scale.shape)
    while counts and counts[-1] == 1:
        counts.pop()
    if len(counts) > len(shape) or 0 in counts:
        return None
    counts += [1] * (len(shape) - len(counts))
    spread = scale.reshape(counts)
    for dim, (count, size) in enumerate(zip(counts, shape, strict=True)):
        if count in (1, size):
            continue
        # Blocks of the usual size are tried first, and otherwise blocks that are equal.
        block = SCALED_BLOCK
        if count != -(-size // block):
            block, rest = divmod(size, count)
            if rest or not block:
                return None
        spread = spread.repeat_interleave(block, dim).narrow(dim, 0, size)
    return spread.expand(shape)


def _attach_formats(path: Path, tensors: FileTensors, opened: OpenedTensors, header: str) -> None:
    """Attach ComfyUI's formats to weights in integers.

    Raises:
        LoadError: if a weight is stored in a way that is not known.
    """
    for module, place, settings in _list_settings(path, tensors, opened, header):
        form = settings.format
        is_integer = form in INTEGER_FORMATS
        if settings.is_rotated and not is_integer:
            form = f"{form} with convrot"
        elif str(form).startswith(FP8_FORMATS):
            continue
        if not is_integer:
            raise LoadError(
                f"{path}: {place} says that weights are stored as {form!r}, which is not known here; take a file of "
                f"{' or '.join(FP8_FORMATS + INTEGER_FORMATS)}, or of GGUF"
            )
        # The header leaves out the prefix.
        for prefix in ("", *PREFIXES):
            weight = tensors.get(f"{prefix}{module}.weight")
            if weight is None:
                continue
            if weight.stored_type != "I8" or weight.ndim != 2:
                raise LoadError(
                    f"{path}: {place} says that {module}.weight is stored as {form!r}, and it is {weight.stored_type} "
                    f"of the shape {list(weight.shape)}; a matrix of I8 would be"
                )
            weight.form = IntegerFormat.from_settings(settings)
            size = weight.form.group_size
            columns = weight.get_own_shape()[-1]
            if size not in GROUP_SIZES or columns % size:
                raise LoadError(
                    f"{path}: {place} says that its {columns} columns are rotated in groups of {size}; a size that "
                    "divides them and is a power of 4 would be possible"
                )


def _list_settings(
    path: Path, tensors: FileTensors, opened: OpenedTensors, header: str
) -> list[tuple[str, str, WeightSettings]]:
    """List the settings by which weights are stored, each with its module and the place in the file.

    The place is the header, or a tensor beside the weight.

    Raises:
        LoadError: if the settings are not JSON as ComfyUI writes it.
    """
    listed = []
    # Where the settings are, for the error below too.
    place = "its header"
    try:
        for module, settings in FileSettings.model_validate_json(header).layers.items():
            listed.append((module, place, settings))
        for place, tensor in tensors.items():
            if _is_settings(place, tensor):
                text = bytes(opened.get_slice(place)[:MOST_IN_FORMAT].tolist())
                listed.append((place.rpartition(".")[0], place, WeightSettings.model_validate_json(text)))
    except ValidationError as invalid:
        problem = invalid.errors(include_url=False)[0]
        raise LoadError(f"{path}: {place} is not readable JSON of ComfyUI: {problem['msg']}") from None
    return listed


def _is_settings(name: str, tensor: FileTensor) -> bool:
    """Return whether a tensor says how the weight beside it is stored."""
    return name.rpartition(".")[2] == FORMAT and tensor.stored_type == "U8" and tensor.ndim == 1


def find_base_models(path: Path) -> list[str]:
    """Return the published models with a transformer like a file's, the most likely first.

    Raises:
        LoadError: if no published model has such a transformer.
    """
    file = SingleFile.read_header(path)
    component = file.guess_component()
    if component != TRANSFORMER:
        flag = f"--component {component}={shlex.quote(str(path))}"
        raise LoadError(f"{path} has no transformer; give --model FOLDER {flag}")
    # diffusers guesses a file's model. Where it sets no type for a file, it raises a `NameError`.
    inferred = None
    with suppress(*CONVERSION_ERRORS, NameError):
        kind = infer_diffusers_model_type(dict(file.tensors) | file.own_tensors)
        if kind != UNKNOWN:
            inferred = find_known_model(str(DIFFUSERS_DEFAULT_PIPELINE_PATHS[kind]["pretrained_model_name_or_path"]))
    if inferred is None:
        models = [model for model in list_known_models() if model.hub_id is not None and _shares_names(file, model)]
    else:
        # Models of one class may have the same shapes, and diffusers names the one that the file is meant for.
        alike = [model for model in _list_published(inferred.transformer) if model != inferred]
        models = [inferred, *alike]
    names: list[str] = []
    problem: LoadError | None = None
    for model in models:
        try:
            file.convert_tensors(getattr(diffusers, model.transformer), model.folder / CONFIG)
        except LoadError as error:
            # The error of the most likely model is kept.
            problem = problem or error
            continue
        names.append(model.name)
    if names:
        return names
    flags = f"--model FOLDER --transformer {shlex.quote(str(path))}"
    if problem is None:
        raise LoadError(f"{path} has the transformer of no published model; give {flags}")
    raise LoadError(
        f"{problem} ({path} is like {models[0].hub_id}, and fits none of the configs that come with ditile; with "
        f"another config give {flags})"
    )


def _shares_names(file: SingleFile, model: KnownModel) -> bool:
    """Return whether a file has most names of a published model's transformer, with one block of each kind."""
    model_class = getattr(diffusers, model.transformer)
    config = model.folder / CONFIG
    values = read_json_object(config)
    names = _read_model_tensors(model_class, config, leave_one_of_each(values)).keys()
    enough = LEAST_SHARED * len(names)
    tensors = file.own_tensors
    if len(names & tensors.keys()) < enough:
        # The names may be those of the authors.
        try:
            tensors, _ = file._rename_tensors(model.transformer, values, tensors)
        except LoadError:
            return False
    return len(names & tensors.keys()) >= enough


def _list_published(class_name: str) -> list[KnownModel]:
    """List the published models with a transformer of a class."""
    return [model for model in list_known_models() if model.hub_id and model.transformer == class_name]


def _read_model_tensors(
    model_class: Any, config: Path, changes: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Tensor]:
    """Return the weights of a model made from a config with `changes`, on the meta device."""
    with init_on_meta_device():
        model: nn.Module = model_class.from_config({**model_class.load_config(config.parent), **changes})
    return dict(model.state_dict())

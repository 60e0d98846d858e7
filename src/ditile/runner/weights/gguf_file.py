"""Files of GGUF: where their tensors are, and views of the mapped file. It needs the extra `gguf`.

A quantized weight stays as the file has it, in blocks along its rows. diffusers' `GGUFLinear` computes with it, and
dequantizes it in each call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from diffusers import GGUFQuantizationConfig
from diffusers.quantizers.auto import DiffusersAutoQuantizer
from diffusers.quantizers.gguf.utils import SUPPORTED_GGUF_QUANT_TYPES, GGUFLinear, GGUFParameter
from torch import Tensor

from ditile.parallel.block_formats import RowBlocks
from ditile.plan.errors import LoadError
from ditile.runner.model_files import open_gguf

_PLAIN_TYPES = (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16)


class BlockFormat(NamedTuple):
    """The quantization of a weight: the type, and the numbers and bytes of a block."""

    quant_type: Any
    numbers: int
    num_bytes: int

    @property
    def row_blocks(self) -> RowBlocks:
        """Return the blocks for cutting the weight."""
        return RowBlocks(self.quant_type.name, self.numbers, self.num_bytes)

    def unpack_rows(self, packed: Tensor) -> Tensor:
        """Return the numbers of a weight in float32."""
        return torch.from_numpy(gguf.dequantize(packed.as_subclass(Tensor).numpy(), self.quant_type))


class GgufEntry(NamedTuple):
    """The position of a tensor; the last dimension of a quantized one counts bytes."""

    offset: int
    num_bytes: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    stored_type: str
    block: BlockFormat | None


@dataclass(frozen=True)
class GgufTensors:
    """The tensors of a file, which may be mapped.

    Attributes:
        path: the file.
        entries: name -> where the tensor is, in the order of the file.
        architecture: the model's architecture, as the file calls it; empty if the file does not say.
        mapped: the file; None if it is closed.
    """

    path: Path
    entries: Mapping[str, GgufEntry]
    architecture: str = ""
    mapped: Any = None

    @classmethod
    def read_header(cls, path: Path) -> GgufTensors:
        """Read the positions of the tensors.

        Raises:
            LoadError: if the file is not whole, or has a type of weights that diffusers does not know.
        """
        entries = {}
        reader = open_gguf(path)
        for tensor in sorted(reader.tensors, key=lambda tensor: tensor.data_offset):
            block = None
            kind = tensor.tensor_type
            if kind not in (*_PLAIN_TYPES, *SUPPORTED_GGUF_QUANT_TYPES):
                known = ", ".join(sorted(quant_type.name for quant_type in SUPPORTED_GGUF_QUANT_TYPES))
                raise LoadError(
                    f"{path}: {tensor.name} is of the type {kind.name}, which diffusers cannot compute with; take a "
                    f"file of {known}"
                )
            if kind not in _PLAIN_TYPES:
                block = BlockFormat(kind, *gguf.GGML_QUANT_SIZES[kind])
            entries[tensor.name] = GgufEntry(
                offset=int(tensor.data_offset),
                num_bytes=int(tensor.n_bytes),
                shape=tensor.data.shape,
                dtype=tensor.data.dtype,
                stored_type=tensor.tensor_type.name,
                block=block,
            )
        architecture = reader.get_field("general.architecture")
        if architecture is None:
            return cls(path, entries)
        return cls(path, entries, str(architecture.contents()))

    @contextmanager
    def open_mapping(self) -> Iterator[GgufTensors]:
        """Yield the same tensors, while the file is mapped."""
        # Mapped copy-on-write, because torch warns about views of a read-only mapping.
        yield replace(self, mapped=np.memmap(self.path, mode="c"))

    def offset_keys(self) -> list[str]:
        """Return the names in the order of the file."""
        return list(self.entries)

    def get_slice(self, name: str) -> _GgufTensor:
        """Return a tensor without reading any of it."""
        return _GgufTensor(self, self.entries[name])

    @staticmethod
    def replace_quantized_linears(model: Any, tensors: Mapping[str, Any], dtype: torch.dtype) -> frozenset[str]:
        """Replace the Linears of a model without weights by quantized ones, like diffusers.

        Args:
            model: the model.
            tensors: weight -> its tensor, with the quantization as `form`; `form` is None for plain weights.
            dtype: the type in which Linears compute.

        Returns:
            The names of the weights that stay quantized.
        """
        weights = {}
        for name, tensor in tensors.items():
            block = tensor.form
            if block is not None:
                empty = torch.empty(1, block.num_bytes, dtype=torch.uint8, device="meta")
                weights[name] = GGUFParameter(empty, quant_type=block.quant_type)
        config: Any = GGUFQuantizationConfig(compute_dtype=dtype)
        quantizer = DiffusersAutoQuantizer.from_config(config)
        quantizer.preprocess_model(
            model=model,
            device_map=None,
            state_dict=weights,
            keep_in_fp32_modules=list(model._keep_in_fp32_modules or ()),
        )
        quantizer.postprocess_model(model)
        model.hf_quantizer = quantizer
        names: set[str] = set()
        for path, module in model.named_modules():
            if isinstance(module, GGUFLinear):
                names.add(f"{path}.weight")
        return frozenset(names)


@dataclass(frozen=True, slots=True)
class _GgufTensor:
    tensors: GgufTensors
    entry: GgufEntry

    def get_shape(self) -> list[int]:
        return list(self.entry.shape)

    def __getitem__(self, index: Any) -> Tensor:
        entry = self.entry
        content = self.tensors.mapped[entry.offset : entry.offset + entry.num_bytes]
        tensor = torch.from_numpy(content.view(entry.dtype).reshape(entry.shape))
        if entry.block is not None:
            tensor = GGUFParameter(tensor, quant_type=entry.block.quant_type)
        return tensor[index]

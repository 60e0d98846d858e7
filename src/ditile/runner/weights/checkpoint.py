"""Checkpoints in safetensors, one file or several with an index. Only the tensors that a module still has are read.

A file is mapped into memory, and the mapping is closed after some tens of megabytes: while a checkpoint of any size is
read, neither anonymous nor file-backed memory holds more than the requested tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ditile.distributed import env
from ditile.model.hooks.placeholders import count_tensor_bytes
from ditile.parallel.tensor.cuts import SelectShard, TensorCut
from ditile.plan.errors import LoadError
from ditile.runner.model_files import name_weight_files, open_safetensors, read_weight_map, refuse_missing_weights

MAPPED_BYTES = 64 * 2**20
"""Bytes that are read from one mapping of a file; a single tensor may have more."""


LocateFile = Callable[[str], Path | None]
"""The path of a checkpoint's file by its name, fetched if need be; None if there is none."""


class StoredTensor(Protocol):
    """A tensor of an open file that can be read in parts."""

    def get_shape(self) -> list[int]: ...
    def __getitem__(self, index: Any) -> Tensor: ...


@runtime_checkable
class QuantizedTensor(Protocol):
    """A weight of an open file that several tensors make up."""

    def get_shape(self) -> list[int]: ...
    def copy_share(self, cut: TensorCut | None, dtype: torch.dtype) -> Tensor: ...


class OpenedTensors(Protocol):
    """An open file; `offset_keys` are names in its order, `get_slice` a `StoredTensor` or a `QuantizedTensor`."""

    def offset_keys(self) -> list[str]: ...
    def get_slice(self, name: str) -> Any: ...


OpenTensors = Callable[[Path], AbstractContextManager[OpenedTensors]]


def open_tensors(path: Path) -> AbstractContextManager[OpenedTensors]:
    """Open a safetensors file. Its tensors have the names of the model."""
    opened: AbstractContextManager[OpenedTensors] = open_safetensors(path, "pt")
    return opened


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The locations of a model's tensors.

    Attributes:
        files: tensor -> name of its file.
        locate: finds, and if need be fetches, a file.
        open_file: opens a file that was found.
    """

    files: Mapping[str, str]
    locate: LocateFile
    open_file: OpenTensors = open_tensors

    @classmethod
    def open_checkpoint(cls, locate: LocateFile, stem: str, variant: str | None = None) -> Checkpoint:
        """Open the checkpoint `STEM[.VARIANT].safetensors`, or the files in `STEM.safetensors.index[.VARIANT].json`.

        Raises:
            LoadError: if there is neither, or the file cannot be read.
        """
        single, index = name_weight_files(stem, variant)
        index_path = locate(index)
        if index_path is not None:
            return cls(read_weight_map(index_path), locate)
        path = locate(single)
        if path is None:
            raise LoadError(f"there is neither {single} nor {index}; save the model with save_pretrained")
        with open_safetensors(path, "pt") as tensors:
            return cls(dict.fromkeys(tensors.keys(), single), locate)

    def find_weights(self, names: AbstractSet[str], place: Path) -> Checkpoint:
        """Return the checkpoint together with weights that its index lacks and its files have.

        Raises:
            LoadError: if a weight is in no file.
        """
        if names <= self.files.keys():
            return self
        found = dict(self.files)
        for file in sorted(set(self.files.values())):
            with self.open_file(self.locate_stored_file(file)) as tensors:
                for name in tensors.offset_keys():
                    found.setdefault(name, file)
        refuse_missing_weights(names - found.keys(), place)
        return replace(self, files=found)

    def locate_stored_file(self, file: str) -> Path:
        """Return the path of a file. Raises `LoadError` if it is missing."""
        path = self.locate(file)
        if path is None:
            raise LoadError(f"{file} is missing, and the index in its folder names it; copy the whole model")
        return path

    def read_into_module(
        self, module: nn.Module, dtype: torch.dtype, *, keep_fp32: Sequence[str] = (), part: SelectShard | None = None
    ) -> int:
        """Read only the parameters and persistent buffers of a module, onto the CPU.

        Args:
            module: has tensors of the checkpoint's shapes, on the meta device.
            dtype: the type of all floating point numbers.
            keep_fp32: parts of names that stay float32.
            part: selects this rank's share of a tensor; all of it by default.

        Returns:
            The bytes that were read.

        Raises:
            LoadError: if a file is missing or corrupt, or a tensor is missing or has another shape.
        """
        shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        names_by_file: dict[str, set[str]] = {}
        for name in shapes:
            names_by_file.setdefault(self.files[name], set()).add(name)
        bytes_read = 0
        for file in sorted(names_by_file):
            path = self.locate_stored_file(file)
            for names in _batch_tensor_names(path, self.open_file, names_by_file[file]):
                with self.open_file(path) as tensors:
                    for name in names:
                        stored = tensors.get_slice(name)
                        shape = stored.get_shape()
                        if tuple(shape) != shapes[name]:
                            raise LoadError(
                                f"weight {name} has the shape {list(shape)}, and the config in its folder says "
                                f"{list(shapes[name])}"
                            )
                        cut = None
                        if part is not None:
                            cut = part(name, shapes[name])
                        tensor, num_bytes = _copy_own_part(stored, name, cut, dtype, keep_fp32)
                        bytes_read += num_bytes
                        _store_tensor(module, name, tensor)
                        # The file stays mapped until the last view of it is gone.
                        del stored
                        env.report_progress()
        return bytes_read


def locate_in_folder(path: Path) -> LocateFile:
    """Return a function to locate the files of a folder."""

    def locate_file(name: str) -> Path | None:
        file = path / name
        return file if file.exists() else None

    return locate_file


def _batch_tensor_names(path: Path, open_file: OpenTensors, names: set[str]) -> Iterator[list[str]]:
    """Yield the names in the order of the file, in runs of about `MAPPED_BYTES` bytes."""
    batch: list[str] = []
    size = 0
    with open_file(path) as tensors:
        order = [name for name in tensors.offset_keys() if name in names]
        refuse_missing_weights(names - set(order), path)
        # The size is counted in float32: the exact size of a run does not matter.
        sizes = [math.prod(tensors.get_slice(name).get_shape()) * 4 for name in order]
    for name, num_bytes in zip(order, sizes, strict=True):
        if batch and size + num_bytes > MAPPED_BYTES:
            yield batch
            batch = []
            size = 0
        batch.append(name)
        size += num_bytes
    if batch:
        yield batch


def _copy_own_part(
    stored: StoredTensor | QuantizedTensor,
    name: str,
    cut: TensorCut | None,
    dtype: torch.dtype,
    keep_fp32: Sequence[str],
) -> tuple[Tensor, int]:
    """Return a rank's part of a tensor, and the bytes read for it."""
    if isinstance(stored, QuantizedTensor):
        tensor = stored.copy_share(cut, dtype)
        return tensor, count_tensor_bytes(tensor)
    dim = 0
    views = []
    if cut is None:
        views.append(stored[...])
    else:
        dim = cut.dim
        leading = (slice(None),) * dim
        views += [stored[leading + (piece,)] for piece in cut.pieces]
    num_bytes = sum(view.nbytes for view in views)
    # As in diffusers, a name in `keep_fp32` stands for each path that has it as a part.
    own_dtype = dtype
    if not views[0].is_floating_point():
        own_dtype = views[0].dtype
    elif set(keep_fp32) & set(name.split(".")):
        own_dtype = torch.float32
    # Copy into plain tensors: a view of another class, such as a quantized one, would make tensors of its class.
    if len(views) == 1:
        return torch.empty(views[0].shape, dtype=own_dtype).copy_(views[0]), num_bytes
    return torch.cat(views, dim, out=torch.empty(0, dtype=own_dtype)), num_bytes


def _store_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    if isinstance(tensor, nn.Parameter):
        owner._parameters[leaf] = tensor
    elif leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
    else:
        owner._buffers[leaf] = tensor

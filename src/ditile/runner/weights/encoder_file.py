"""One file with the weights of a model of transformers, such as a text encoder: safetensors or GGUF.

transformers' own loader makes the model, by its rules of names, types and tied weights. It gets tensors that are read
on access, so that a rank with a part of the model reads only that part. GGUF is unpacked tensor by tensor; functions of
transformers rename its tensors and undo the changes that the format makes for an architecture.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import modeling_gguf_pytorch_utils as gguf_models

from ditile.plan.errors import LoadError, join_error_lines
from ditile.runner.model_files import FLOATS, FP8
from ditile.runner.weights.convrot import IntegerFormat
from ditile.runner.weights.single_file import CONVERSION_ERRORS, ConvertedTensor, FileTensors, SingleFile

_SECTIONS = {"general", "tokenizer"}
"""Entries in transformers' list of GGUF architectures that are not architectures."""


@contextmanager
def open_encoder_file(path: Path, kind: Any, config: Any) -> Iterator[dict[str, EncoderTensor]]:
    """Open a file as a model's state dict, whose tensors are read from the file on access.

    Args:
        path: the file.
        kind: the class of the model.
        config: the config of the model.

    Raises:
        LoadError: if the file is not whole, or of an architecture that transformers does not read.
        ModelError: if it is a GGUF file, and the extra is not installed.
    """
    file = SingleFile.read_header(path)
    if file.gguf is None:
        tensors = file.tensors
        for name, tensor in tensors.items():
            module, _, leaf = name.rpartition(".")
            # A quantized weight has other types than floats, or further tensors beside it, which would be left out.
            is_quantized = leaf != "bias" and f"{module}.weight" in tensors
            if leaf == "weight":
                is_quantized = tensor.form is None and tensor.stored_type not in FLOATS + FP8
            if is_quantized:
                raise LoadError(
                    f"{path}: {name} ({tensor.stored_type}) is of weights that are quantized in another way than in "
                    "fp8, int8 or int4 with scales; take a file of those, of float16 or bfloat16, or of GGUF"
                )
    else:
        tensors = _rename_tensors(path, file.gguf.architecture, file.tensors, kind, config)
    weights = {}
    with file.open_file(path) as opened:
        for name, tensor in tensors.items():
            weights[name] = EncoderTensor(opened, tensor, stays_quantized=False)
        yield weights


class EncoderTensor(ConvertedTensor):
    """A tensor of an open file, without its quantization."""

    @property
    def shape(self) -> torch.Size:
        """Return the shape in numbers."""
        return torch.Size(self.tensor.get_own_shape())

    def __getitem__(self, index: Any) -> Tensor:
        form = self.tensor.form
        if form is None or isinstance(form, IntegerFormat):
            return super().__getitem__(index)
        # In float32 like transformers; diffusers would unpack to 16 bits.
        return form.unpack_rows(self.tensor.replay_operations(self.read_stored))[index]


def _rename_tensors(path: Path, architecture: str, tensors: FileTensors, kind: Any, config: Any) -> FileTensors:
    """Rename a GGUF file's tensors for a model, and undo the changes that the format makes for its architecture."""
    known = set(gguf_models.GGUF_SUPPORTED_ARCHITECTURES) - _SECTIONS
    # Files of T5 without a decoder are of "t5encoder".
    model_type = architecture.removesuffix("encoder")
    if model_type not in known:
        raise LoadError(
            f"{path} is of the architecture {architecture!r}, and transformers reads {', '.join(sorted(known))}; take "
            "a .safetensors file with transformers' names"
        )
    processor_class: Any = gguf_models.TENSOR_PROCESSORS.get(architecture, gguf_models.TensorProcessor)
    processor = processor_class(config=config.to_dict())
    renamed = {}
    try:
        with torch.device("meta"):
            model = kind._from_config(config)
        num_layers = config.get_text_config().num_hidden_layers
        # The type is the file's and not the config's, since files of Mistral say "llama".
        names = gguf_models.get_gguf_hf_weights_map(model, processor, model_type, num_layers)
        for stored_name, tensor in tensors.items():
            result = processor.process(tensor, stored_name, tensor_key_mapping=names, parsed_parameters={})
            if result.name in names:
                renamed[names[result.name]] = result.weights
    except (*CONVERSION_ERRORS, NotImplementedError) as error:
        raise LoadError(f"{path} does not fit a {kind.__name__} ({join_error_lines(error)})") from error
    return renamed

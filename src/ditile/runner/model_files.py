"""Locates the files of a model, and checks that they are whole. Nothing here imports torch.

Files that are missing or cut short, and pickles, are refused before any weight is read. huggingface_hub keeps a lock
while it downloads a file, and the other ranks wait for that lock. A waiting rank reports progress as long as the
model's folder in the cache grows.
"""

from __future__ import annotations

import http.client
import os
import re
import ssl
import struct
import threading
import urllib.error
import urllib.request
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ditile.distributed import env, files
from ditile.distributed.heartbeat import is_out_of_memory
from ditile.model.known import (
    ASSETS,
    CONFIGS,
    find_component_folder,
    find_known_model,
    list_known_models,
)
from ditile.plan.errors import LoadError, ModelError, join_error_lines, suggest_nearest
from ditile.plan.extras import require_extra
from ditile.plan.numbers import is_number
from ditile.plan.option_classes import (
    CallArguments,
    Count,
    Frames,
    JsonObject,
    Pixels,
    Scale,
    Steps,
    checked,
    describe_wrong_value,
)

PERIOD = 1.0
"""Seconds between two looks at a download's folder."""
HUB_TIMEOUT = 5.0
"""Seconds in which the hub must answer."""
LAYER_COUNTS = r"(\w+_)?(layers?|blocks?|depth)(_per_\w+)?"
"""Pattern of the config names that count blocks."""
MOST_IN_CONFIGS = {LAYER_COUNTS: 1000, "num_train_timesteps": 10**6}
"""Pattern of a name in a config -> the largest number allowed."""
MODEL_INDEX = "model_index.json"
MODULAR_INDEX = "modular_model_index.json"
"""A folder with one of these two files is a pipeline; if it has both, the first is read."""
TRANSFORMER = "transformer"
"""The component that a weight file is for if no other is named."""
DENOISERS = (TRANSFORMER, "transformer_2")
"""The models that a pipeline calls one after the other, in order; its `boundary_ratio` divides the steps."""
MODULAR_MARK = "_blocks_class_name"
"""The key that only the index of a modular pipeline has."""
FRAME_RATE = "fps"
"""The key of `generation.json` for the frames per second of a video file."""
STEMS = ("diffusion_pytorch_model", "model")
"""The names of weight files without their endings, in diffusers and in transformers."""
SAFETENSORS = "safetensors"
GGUF = "gguf"
FORMATS = {".safetensors": SAFETENSORS, ".sft": SAFETENSORS, ".gguf": GGUF}
"""Ending of a file of weights -> its format."""
MOST_IN_GGUF_HEADER = 30_000
"""Most values allowed in a GGUF header: models have hundreds, and each takes microseconds to read."""
MOST_GGUF_STRINGS = 2_000_000
"""Most strings allowed in the arrays of a GGUF header, such as vocabularies: skipping so many takes 0.1 s or more."""
_GGUF_ERRORS = (
    *(OSError, LookupError, ValueError, TypeError, OverflowError, MemoryError, RecursionError, struct.error),
)
"""The exceptions of the GGUF reader for a file that is cut short, or has an impossible header."""
FLOATS = ("F64", "F32", "F16", "BF16")
FP8 = ("F8_E4M3", "F8_E5M2")
"""Floating point types of safetensors, and its 8-bit types, which may have scales."""
SCALES = ("scale_weight", "weight_scale", "weight_scale_inv")
"""The names of the scale beside an fp8 `weight`: in ComfyUI's older files; in newer files and authors' files;
and in DeepSeek's files, whose `inv` is no inverse."""
MOST_SHOWN = 80
"""Most characters of a wrong value that an error quotes."""
MOST_TENSORS = 30_000
"""Most tensors allowed in a file: transformers have hundreds, or thousands with experts; renaming more is slow."""
# Endings read by torch.load, which runs code from the file.
PICKLES = (".ckpt", ".pt", ".pth", ".bin")
DTYPES = ("float32", "bfloat16", "float16")
ModelSource = Path | str
"""The folder of a pipeline, or its hub id."""
ComponentFiles = Mapping[str, str]
"""Component of a pipeline -> the file with its weights."""
PlainValue = str | bool | int | Scale | None


class FileValues(BaseModel):
    """Values of a JSON file. Some have known types; the others are not checked."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class GenerationValues(FileValues):
    """The values of `generation.json`: arguments of a pipeline's call, without objects."""

    __pydantic_extra__: dict[str, PlainValue | list[PlainValue]] = Field(init=False)
    num_inference_steps: Steps | None = None
    height: Pixels | None = None
    width: Pixels | None = None
    num_frames: Frames | None = None
    frames: Frames | None = None
    video_length: Frames | None = None
    max_sequence_length: Count | None = None
    guidance_scale: Scale | None = None
    guidance_scale_2: Scale | None = None
    true_cfg_scale: Scale | None = None
    strength: Scale | None = None
    negative_prompt: str | None = None
    fps: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


class IndexValues(FileValues):
    """The values of `model_index.json` or `modular_model_index.json`."""

    pipeline: str | None = Field(None, alias="_class_name")
    blocks: str | None = Field(None, alias="_blocks_class_name")


class ConfigValues(FileValues):
    """The values of a component's `config.json`."""

    quantization_config: dict[str, Any] | None = None


class WeightMap(FileValues):
    """The values of the index of a checkpoint in several files."""

    weight_map: dict[str, str]


@checked()
def defaults(model: str) -> CallArguments:
    """Return the call arguments for a model: its size, steps, guidance and others. The command line uses them too.

        runner(prompt, **ditile.defaults("shapes-flux"))

    They come from the `generation.json` in the model's folder; for a published model they are the recommendations of
    its authors. Without either the result is empty, and the pipeline's own defaults apply.

    Args:
        model: the name of a bundled or published model, a folder, or a hub id.

    Raises:
        ModelError: if the model is not known.
        LoadError: if the file is not a JSON object, or a value has another type than its argument.
    """
    call = read_generation_defaults(model)
    call.pop(FRAME_RATE, None)
    return call


def read_generation_defaults(model: str) -> CallArguments:
    """Return the values of `defaults`, and the frame rate of video files, which is not a call argument."""
    source = _locate_model(model, weights=False)
    if isinstance(source, str):
        return {}
    path = source / "generation.json"
    if not path.exists():
        return {}
    return read_json_object(path, GenerationValues)


def find_model_source(
    name: str, variant: str | None = None, *, weights: bool = True, components: ComponentFiles | None = None
) -> ModelSource:
    """Return the folder of a bundled or local model, or the hub id itself.

    Args:
        name: a bundled or published model, a folder, or a hub id.
        variant: the variant of the files that will be read.
        weights: whether weights will be read. Configs are enough to plan a division, and the package has the configs of
            published models.
        components: component -> the file with its weights; by default the model's own are read.

    Raises:
        ModelError: if `name` is none of these, or the value for a component is not a file.
        LoadError: if a folder is not a pipeline, or its weights are missing, cut short or pickles; or if a model of the
            hub is not in its cache, and the hub cannot be reached.
    """
    files = components or {}
    for component, file in files.items():
        check_model_file(file, component)
    source = _locate_model(name, weights=weights)
    if isinstance(source, str):
        try:
            check_hub_access(source)
        except LoadError as error:
            if not files:
                raise
            raise LoadError(
                f"{', '.join(files.values())} has {', '.join(files)} alone, and the other parts, such as text encoders "
                f"and the VAE, are those of {source}: {error} that has them (--model FOLDER --component NAME=FILE)"
            ) from error
    # The package has only configs of published models, and their indexes name no text encoders. In other folders the
    # headers of all weights are checked.
    elif source.parent != CONFIGS:
        index = read_json_object(find_index_file(source) or source, IndexValues)
        refuse_unknown_components(source, index, files)
        for name, (library, _) in list_own_components(source, index):
            if name in files:
                continue
            component_folder = find_component_folder(source, name)
            if not weights:
                if (component_folder / "config.json").exists():
                    check_stored_types(component_folder, variant)
            # An optional component that the pipeline lacks has no library.
            elif library is not None:
                or_give = f", or give --component {name}=FILE"
                _check_component(component_folder, variant, or_give)
    return source


def find_transformer_source(name: str, component: str, components: ComponentFiles) -> ModelSource:
    """Return the folder or hub id from which a single component of a model is read.

    The configs in the package are enough for a published model if a file has the weights.

    Raises:
        ModelError, LoadError: as `find_model_source`.
    """
    source = find_model_source(name, weights=False, components=components)
    if component not in components and isinstance(source, Path) and source.parent == CONFIGS:
        return find_model_source(name)
    return source


def collect_component_files(
    transformer: str | None, components: ComponentFiles | Iterable[str] | None
) -> dict[str, str]:
    """Return the file with the weights of each component.

    Args:
        transformer: the file for the component `transformer`, if there is one.
        components: component -> its file, or texts such as transformer_2=low.gguf.

    Raises:
        ModelError: if a text has no name or no file, or a component has two files or an impossible name.
    """
    pairs: list[tuple[str, str]] = []
    if transformer is not None:
        pairs.append((TRANSFORMER, transformer))
    if isinstance(components, Mapping):
        pairs += components.items()
    else:
        for text in components or ():
            name, _, file = text.partition("=")
            if not name.isidentifier() or not file:
                example_name = name if name.isidentifier() else TRANSFORMER
                raise ModelError(f"component={text!r} is not NAME=FILE; try {example_name}=FILE")
            pairs.append((name, file))
    files: dict[str, str] = {}
    for name, file in pairs:
        if name in files:
            raise ModelError(f"{name} has two files, {files[name]!r} and {file!r}; give one of them")
        if not isinstance(file, str | Path):
            raise ModelError(f"{name}={file!r} is not a file; give a .safetensors or .gguf file")
        # The shell does not expand `~` after `NAME=`.
        files[name] = os.path.expanduser(file)
    return files


def check_model_file(file: Path | str, component: str = TRANSFORMER) -> str:
    """Return the format of a file of weights, by its ending.

    Raises:
        ModelError: if there is no such file, or it needs a package that is not installed.
        LoadError: if its format does not match its ending, or it is a pickle or cut short.
    """
    if not os.path.isfile(file):
        raise ModelError(f"{component}={str(file)!r} is not a file; give a .safetensors or .gguf file")
    path = Path(file)
    if path.suffix in PICKLES:
        raise LoadError(f"{path} is a pickle, which can run code when it is read; take a .safetensors or .gguf file")
    if path.suffix not in FORMATS:
        raise LoadError(f"{path}: its ending is none of {', '.join(FORMATS)}; take a file of such a format")
    if FORMATS[path.suffix] == GGUF:
        names = [tensor.name for tensor in open_gguf(path).tensors]
    else:
        with open_safetensors(path, "np") as opened:
            names = opened.keys()
    if len(names) > MOST_TENSORS:
        raise LoadError(f"{path} has {len(names)} tensors, and no model has more than {MOST_TENSORS}; copy it again")
    return FORMATS[path.suffix]


def _locate_model(name: str, *, weights: bool) -> ModelSource:
    """Return the folder or hub id of a model without opening its files."""
    if not name or not isinstance(name, str | Path):
        raise ModelError(_describe_unknown_model(name))
    folder = Path(os.path.expanduser(name))
    known = find_known_model(str(name))
    # A local pipeline folder takes precedence over a published model of the same name.
    if known is not None and (known.hub_id is None or find_index_file(folder) is None):
        if weights and known.hub_id is not None:
            return known.hub_id
        folder = known.folder
    # Unlike the methods of Path, os.path does not raise for a name that is too long or has a NUL.
    if os.path.isdir(folder):
        if find_index_file(folder) is None:
            raise LoadError(f"{folder} has no model_index.json; give a folder that save_pretrained of a pipeline wrote")
        return folder
    if is_hub_id(str(name)) and not os.path.exists(folder):
        return str(name)
    raise ModelError(_describe_unknown_model(name))


def _describe_unknown_model(name: Any) -> str:
    """Explain why a name is not a model's, and suggest a similar one."""
    path = str(name)
    if os.path.isfile(path):
        return f"model {name!r} is a file; give the folder of a pipeline, and the file as its transformer"
    problem = "is not known"
    if path.startswith((".", "~")) or "/" in path:
        problem = "is not a hub id (owner/name), and there is no such folder"
    hint = suggest_nearest(path, [model.name for model in list_known_models()], "ditile models lists the known ones;")
    return f"model {name!r} {problem}; {hint} a folder saved by save_pretrained and a hub id work too"


def is_hub_id(name: str) -> bool:
    """Return whether a name has the form of a hub id with its owner."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name


def find_index_file(folder: Path) -> Path | None:
    """Return the index of a pipeline's folder; None if it is not a pipeline."""
    for name in (MODEL_INDEX, MODULAR_INDEX):
        if os.path.exists(folder / name):
            return folder / name
    return None


def list_own_components(source: ModelSource, index: JsonObject) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield the name and (library, class) of each component stored next to a pipeline's index.

    Args:
        source: the folder, or the hub id.
        index: the content of its `model_index.json` or `modular_model_index.json`. A modular pipeline may keep
            components in other places, or leave some out.
    """
    for name, entry in index.items():
        if not isinstance(entry, list):
            continue
        if len(entry) == 2:
            yield name, (entry[0], entry[1])
        elif len(entry) == 3 and isinstance(entry[2], dict) and entry[2].get("subfolder", name) == name:
            location = entry[2]
            # A component that was not loaded when the pipeline was saved has its class only in the hint.
            library, class_name = entry[:2]
            hint = location.get("type_hint")
            if isinstance(hint, list) and len(hint) == 2:
                library, class_name = hint
            # The index names the component's original location, but by now the component may lie next to the index.
            place = location.get("pretrained_model_name_or_path")
            is_here = place == source
            if isinstance(source, Path):
                names_source = isinstance(place, str) and Path(place).resolve() == source.resolve()
                is_here = is_here or names_source or (source / name).is_dir()
            if is_here and class_name is not None:
                yield name, (library, class_name)


def refuse_unknown_components(source: ModelSource, index: JsonObject, names: Iterable[str]) -> None:
    """Check that a pipeline's index has all components of these names. Raises `ModelError` otherwise."""
    known = []
    for name, (library, _) in list_own_components(source, index):
        # An optional component that the pipeline lacks has no library.
        if library is not None:
            known.append(name)
    for name in names:
        if name not in known:
            raise ModelError(f"{source} has no component {name!r} to take from a file; it has {', '.join(known)}")


def check_model_folder(folder: Path) -> None:
    """Check that a folder holds a model of safetensors. Raises `LoadError` otherwise, such as for pickles."""
    if not (folder / "config.json").exists():
        raise LoadError(f"{folder} has no config.json; give a folder that save_pretrained of a model wrote")
    _check_component(folder, None)


def _check_component(folder: Path, variant: str | None, or_give: str = "") -> None:
    """Check a component. Raises `LoadError` if it is missing, or has a config.json without whole weights.

    The error ends with `or_give`, a hint at an alternative.
    """
    if not folder.is_dir():
        raise LoadError(f"{folder} is missing, and the index in its folder names it; copy the whole model{or_give}")
    for path in (folder / "config.json", folder / "scheduler_config.json"):
        if path.exists():
            check_config_counts(read_json_object(path, ConfigValues), path)
    if not (folder / "config.json").exists():
        return
    weight_files = _list_weight_files(folder, variant)
    if not weight_files:
        raise LoadError(_explain_missing_weights(folder, or_give))
    for path in weight_files:
        if not path.exists():
            raise LoadError(f"{path} is missing, and the index in its folder names it; copy the whole model")
    check_stored_types(folder, variant)


def has_all_weights(folder: Path) -> bool:
    """Return whether all files of a component's weights are there."""
    paths = _list_weight_files(folder, None)
    return bool(paths) and all(path.exists() for path in paths)


def _explain_missing_weights(folder: Path, or_give: str) -> str:
    """Return why a component has no files of weights under the expected names."""
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    reason = f"{folder} has no weights under the names {' or '.join(f'{stem}.safetensors' for stem in STEMS)}"
    for name in names:
        if name.endswith(PICKLES):
            return f"{reason}, and {name} is a pickle, which can run code; convert it with save_pretrained"
        variant = re.fullmatch(r"\w+\.(\w+)(-\d+-of-\d+)?\.safetensors", name)
        if variant is not None:
            return f"{reason}, but weights of the variant {variant[1]!r}; give ditile.load(.., variant={variant[1]!r})"
    return reason + or_give


def check_stored_types(folder: Path, variant: str | None) -> None:
    """Check the headers of a component's weight files, except for files that are not there.

    diffusers and transformers would cast integers, and leave scales out.

    Raises:
        LoadError: if a file is cut short, or weights mean nothing without a quantizer, which the config does not name.
    """
    is_quantized = bool(read_json_object(folder / "config.json", ConfigValues).get("quantization_config"))
    for path in _list_weight_files(folder, variant):
        if not path.exists():
            continue
        with open_safetensors(path, "np") as tensors:
            names = [] if is_quantized else tensors.keys()
            for name in names:
                leaf = name.rpartition(".")[2]
                stored_type = tensors.get_slice(name).get_dtype()
                if leaf in SCALES or (leaf == "weight" and stored_type not in FLOATS + FP8):
                    raise LoadError(
                        f"{path} has {name} of {stored_type}, so its weights are quantized, and its config.json has no "
                        "quantization_config; take a model of floating point numbers"
                    )


def _list_weight_files(folder: Path, variant: str | None) -> list[Path]:
    """Return the weight files of a component: the variant's if it has some, otherwise the plain ones.

    They are found by their names: a folder may have others, such as the ones a Mac leaves next to each file.
    """
    for stem in STEMS:
        for own_variant in dict.fromkeys((variant, None)):
            single, index = name_weight_files(stem, own_variant)
            # If both exist, diffusers takes the index, and transformers the single file.
            is_single = (folder / single).exists()
            if (folder / index).exists() and not (is_single and stem == STEMS[1]):
                return sorted({folder / name for name in read_weight_map(folder / index).values()})
            if is_single:
                return [folder / single]
    return []


def name_weight_files(stem: str, variant: str | None) -> tuple[str, str]:
    """Return the name of a checkpoint in one file, and the name of the index for several files."""
    middle = f".{variant}" if variant else ""
    return f"{stem}{middle}.safetensors", f"{stem}.safetensors.index{middle}.json"


def read_weight_map(path: Path) -> dict[str, str]:
    """Read the index of a checkpoint in several files: tensor -> file. Raises `LoadError` if it is not an index."""
    weight_map: dict[str, str] = read_json_object(path, WeightMap)["weight_map"]
    return weight_map


def open_safetensors(path: Path, framework: str) -> Any:
    """Open a safetensors file and read only its header. Raises `LoadError` if it is cut short."""
    import safetensors

    try:
        return safetensors.safe_open(path, framework=framework)
    except (safetensors.SafetensorError, OSError) as error:
        refuse_out_of_memory(error)
        raise LoadError(f"{path} is not a whole safetensors file ({join_error_lines(error)}); copy it again") from error


def open_gguf(path: Path) -> Any:
    """Open a GGUF file and read only its header. Its tensors are memory-mapped.

    Raises:
        LoadError: if it is cut short, or has an impossible header.
        ModelError: if the extra `gguf` is not installed.
    """
    require_extra("gguf", str(path))
    import gguf

    class BoundedReader(gguf.GGUFReader):
        num_values = 0
        num_strings = 0

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            self.num_values += 1
            if self.num_values > MOST_IN_GGUF_HEADER:
                raise ValueError(f"its header has more than {MOST_IN_GGUF_HEADER} values")
            if raw_type == gguf.GGUFValueType.ARRAY:
                return self.measure_array(orig_offs), [], [], []
            return super()._get_field_parts(orig_offs, raw_type)

        def measure_array(self, start: int) -> int:
            """Return the size of an array in bytes, without reading its items."""
            order = ">" if self.byte_order == "S" else "<"
            content: Any = self.data
            # An array begins with the type of its items in 4 bytes, and their number in 8.
            item_type, count = struct.unpack_from(f"{order}IQ", content, start)
            offset = start + 12
            if item_type != gguf.GGUFValueType.STRING:
                item_class = self.gguf_scalar_to_np[gguf.GGUFValueType(item_type)]
                return int(12 + count * item_class().itemsize)
            self.num_strings += count
            if self.num_strings > MOST_GGUF_STRINGS:
                raise ValueError(f"its header has more than {MOST_GGUF_STRINGS} strings")
            for _ in range(count):
                (length,) = struct.unpack_from(f"{order}Q", content, offset)
                offset += 8 + length
            return int(offset - start)

    try:
        # Mode "c" copies a page when it is written. With read-only memory torch would warn.
        return BoundedReader(path, "c")
    except _GGUF_ERRORS as error:
        # A damaged header may ask for any amount of memory, so only an OSError means that memory ran out.
        if isinstance(error, OSError):
            refuse_out_of_memory(error)
        raise LoadError(f"{path} is not a whole GGUF file ({join_error_lines(error)}); copy it again") from error


def refuse_out_of_memory(error: Exception) -> None:
    """Raise `MemoryError` if an error reports that memory ran out. The file or model is not at fault then."""
    if is_out_of_memory(error):
        raise MemoryError(join_error_lines(error)) from error


def refuse_missing_weights(names: Collection[str], place: Path) -> None:
    """Raise `LoadError` if the files of a model lack weights of these names."""
    if names:
        raise LoadError(f"{place} lacks {len(names)} weight(s), such as {min(names)}; copy it again")


def check_config_counts(config: JsonObject, path: Path | str) -> None:
    """Raise `LoadError` for a config with more layers or timesteps than any model. Building one would not end."""
    for name, value in config.items():
        for pattern, max_count in MOST_IN_CONFIGS.items():
            if re.fullmatch(pattern, str(name)):
                _check_config_count(name, value, max_count, path)


def leave_one_of_each(config: JsonObject) -> dict[str, int]:
    """Return changes to a config that leave one block of each kind."""
    changes = {}
    for name, value in config.items():
        if re.fullmatch(LAYER_COUNTS, name) and is_number(value) and value > 1:
            changes[name] = 1
    return changes


def _check_config_count(name: str, value: Any, max_count: int, path: Path | str) -> None:
    if isinstance(value, list):
        for item in value:
            _check_config_count(name, item, max_count, path)
    elif is_number(value) and value > max_count:
        raise LoadError(f"{path} says {name}={value}, and no model has more than {max_count}; copy it again")


def choose_dtype_name(source: ModelSource, dtype: str | None, *, on_gpu: bool | None = None) -> str:
    """Return `dtype` if it is given, otherwise bfloat16 on GPUs, and float32 on CPUs and for bundled models.

    Args:
        source: the model's source, as `find_model_source` returns it.
        dtype: one of `DTYPES`, or None.
        on_gpu: whether there are GPUs; None to look, which imports torch.

    Raises:
        ModelError: if the type is not known.
    """
    if dtype is not None:
        if dtype not in DTYPES:
            raise ModelError(f"dtype={dtype!r} is not known; try {', '.join(DTYPES)}")
        return dtype
    if isinstance(source, Path) and source.resolve().parent == ASSETS.resolve():
        return "float32"
    if on_gpu is None:
        # A process that starts ranks needs torch for nothing else, and loading and leaving it take seconds.
        import torch

        on_gpu = torch.cuda.is_available()
    return "bfloat16" if on_gpu else "float32"


def read_json_object(path: Path, kind: type[FileValues] = FileValues) -> JsonObject:
    """Read the object in a JSON file. Raises `LoadError` if there is no object, or a value has the wrong type."""
    try:
        content = files.parse_json(files.read_text(path))
    except (OSError, ValueError) as error:
        refuse_out_of_memory(error)
        raise LoadError(f"{path} is not readable JSON: {join_error_lines(error)}") from error
    if not isinstance(content, dict):
        raise LoadError(f"{path} is not a JSON object")
    try:
        kind.model_validate(content)
    except ValidationError as invalid:
        faults = invalid.errors(include_url=False)
        name = str(faults[0]["loc"][0])
        own_faults = [fault for fault in faults if fault["loc"][0] == name]
        value = content.get(name)
        if len(repr(value)) > MOST_SHOWN:
            value = f"{value!r:.{MOST_SHOWN}}.."
        raise LoadError(f"{path}: {describe_wrong_value(name, value, own_faults, None)}") from None
    return content


def check_weight_source(source: str, option: str) -> None:
    """Check the value of an option for weights, such as a LoRA.

    Raises:
        ModelError: if it is neither a file nor a hub id.
        LoadError: if the file is cut short, or a hub id is not in the hub's cache and cannot be fetched.
    """
    if source and os.path.exists(source):
        if os.path.isfile(source) and source.endswith(".safetensors"):
            open_safetensors(Path(source), "np")
        return
    if not is_hub_id(source):
        raise ModelError(f"{option}={source!r} is not a file; give one, a folder or a hub id (owner/name)")
    check_hub_access(source, "*", option)


@lru_cache(maxsize=64)  # a model that was found stays there
def check_hub_access(repository: str, file: str = "*model_index.json", option: str = "model") -> None:
    """Check that a file is in the hub's cache or can be fetched. Raises `LoadError` otherwise, at once.

    By itself huggingface_hub would retry for half a minute, for each of several files.

    Args:
        repository: the hub id of the model.
        file: a pattern for the names of files in it.
    """
    from huggingface_hub import constants

    # Files fetched before are enough, even if the hub cannot be reached.
    if any(find_blob_folder(repository).parent.glob(f"snapshots/*/{file}")):
        return
    problem = f"{option} {repository!r} is not in the hub's cache {constants.HF_HUB_CACHE}"
    if constants.HF_HUB_OFFLINE:
        raise LoadError(f"{problem}, and HF_HUB_OFFLINE is set; unset it, or give a folder")
    reason = _find_connection_error(constants.ENDPOINT)
    if reason is not None:
        raise LoadError(f"{problem}, and the network does not reach {constants.ENDPOINT} ({reason}); give a folder")


def _find_connection_error(url: str) -> str | None:
    """Return why a server cannot be reached; None if it answers, even with an error."""
    # A proxy for all protocols may speak SOCKS, which urllib does not.
    if "all" in urllib.request.getproxies():
        return None
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=HUB_TIMEOUT).close()
    except (urllib.error.HTTPError, http.client.HTTPException):
        return None
    except OSError as error:
        # urllib does not wrap errors of a connection that breaks later.
        cause = getattr(error, "reason", error)
        # huggingface_hub may trust certificates that Python does not: this server answered.
        if not isinstance(cause, ssl.SSLError):
            return str(cause)
    return None


@contextmanager
def report_download_progress(repository: str) -> Iterator[None]:
    """Report progress of this rank of `launch` whenever the cache folder of a repository (its hub id) has grown.

    A download that hangs reports nothing, so `launch` ends the run after its stall timeout.
    """
    if env.read_progress_fd() is None:
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_report_growth, args=(find_blob_folder(repository), ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def find_blob_folder(repository: str) -> Path:
    """Return the hub's cache folder for the files of a model, including unfinished ones."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repository, repo_type="model"), "blobs")


def _report_growth(folder: Path, ended: threading.Event) -> None:
    """Report progress whenever a folder has changed, until the download has ended."""
    before = _list_file_stats(folder)
    while not ended.wait(PERIOD):
        after = _list_file_stats(folder)
        if after != before:
            env.report_progress()
        before = after


def _list_file_stats(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the size and the time of the last change for each file of a folder."""
    file_stats = {}
    for path in folder.glob("*"):
        # The hub renames finished files, perhaps between `glob` and `stat`.
        with suppress(FileNotFoundError):
            stat = path.stat()
            file_stats[path.name] = (stat.st_size, stat.st_mtime_ns)
    return file_stats

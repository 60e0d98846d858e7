"""Loads the models of a pipeline: a rank's part of the transformer and the text encoders, and the others whole.

What a rank reads in part is built as diffusers builds it, but without weights. Blocks of other stages become
placeholders. Then the weights of what is left are read. A model whose files lack a weight is refused: diffusers and
transformers would fill it with random numbers.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import accelerate  # type: ignore[import-untyped]
import diffusers
import torch
import transformers
from diffusers.models.modeling_utils import no_init_weights
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from torch import Tensor, nn

from ditile.model import registry
from ditile.model.anatomies import build_block_hooks
from ditile.model.hooks.block_hooks import LoadedBlocks
from ditile.model.hooks.placeholders import init_on_meta_device
from ditile.model.known import find_component_folder, name_component_source
from ditile.model.pipeline_calls import DENOISER_NAME
from ditile.parallel.tensor.cuts import TensorCuts
from ditile.parallel.tensor.sharding import find_tensor_table
from ditile.parallel.text.parts import WHOLE, EncoderPlacement, install_guards, read_partial_encoder
from ditile.plan.errors import LoadError
from ditile.plan.extras import require_extra
from ditile.plan.plan import IMAGE, Plan, compute_coordinates, list_subgroups
from ditile.plan.stages import select_local_blocks
from ditile.runner.checkpoint import Checkpoint, LocateFile, locate_in_folder
from ditile.runner.compose import divide_into_stages
from ditile.runner.load import (
    MODEL_INDEX,
    MODULAR_INDEX,
    MODULAR_MARK,
    check_config_counts,
    check_hub_access,
    convert_build_errors,
    is_hub_id,
    list_own_components,
    read_json_object,
)

STEM = "diffusion_pytorch_model"
log = logging.getLogger(__name__)


def load_partial_components(
    source: Path | str, plan: Plan, rank: int, dtype: torch.dtype, variant: str | None = None
) -> dict[str, Any]:
    """The components of a pipeline that a rank reads in part; diffusers reads the others whole.

    Args:
        source: a folder, or a hub id.
        rank: this rank among the plan's.
        dtype: of all floating point numbers, by the rules of diffusers and transformers.

    Raises:
        ModelError, PlanError: if the transformer cannot be divided so.
        LoadError: if files or weights are missing or corrupt.
    """
    image = next(ranks for ranks in list_subgroups(plan, IMAGE) if rank in ranks)
    place = EncoderPlacement.choose_placement(plan.text, image.index(rank), len(image))
    partial_components: dict[str, Any] = {}
    for name, (library, kind) in _read_components(source).items():
        is_denoiser = DENOISER_NAME.fullmatch(name) is not None
        in_part = plan.pipefusion * plan.tensor > 1 if is_denoiser else place != WHOLE
        if not in_part or not kind or not (is_denoiser or name.startswith("text_encoder")):
            continue
        cls, locate = _find_component_class(library, kind), _locate_component_files(source, name)
        config = _find_config(locate, name)
        reason = _find_partial_load_refusal(cls, kind, config)
        if cls is None or reason is not None:
            log.warning("%s is loaded whole on every rank and then divided: %s", name, reason)
        elif is_denoiser:
            partial_components[name] = load_partial_transformer(cls, locate, config, plan, rank, dtype, variant=variant)
        else:
            where, options = _collect_source_options(source, name, locate, variant)
            partial_components[name] = read_partial_encoder(cls, where, place, dtype, **options)
            install_guards(ExitStack(), partial_components[name], name)
    return partial_components


def find_pipeline_kind(source: Path | str) -> Any:
    """What says which call a pipeline has: its class; of a modular one, the pipeline itself without its components.

    Returns:
        None if its model_index.json names no pipeline of diffusers.

    Raises:
        LoadError: if the file cannot be read.
        ModelError: if a modular pipeline has blocks that diffusers has not, or code of its own.
    """
    index = read_model_index(source)
    if MODULAR_MARK in index:
        with convert_build_errors(str(source)):
            return diffusers.ModularPipeline.from_pretrained(str(source), trust_remote_code=False)
    named = _find_component_class("diffusers", index.get("_class_name"))
    return named if named is not None and issubclass(named, diffusers.DiffusionPipeline) else None


def load_modular_pipeline(
    source: Path | str, dtype: torch.dtype, variant: str | None, loaded: Mapping[str, Any]
) -> Any:
    """A modular pipeline with all of the components that its blocks use and its index says where to find.

    Args:
        source, dtype, variant: as in `load_partial_components`.
        loaded: components that were read before.

    Raises:
        LoadError, ModelError: if a component cannot be loaded.
    """
    pipe = find_pipeline_kind(source)
    pipe.register_components(**{name: part for name, part in loaded.items() if name in pipe.component_names})
    for name in pipe.pretrained_component_names:
        spec = pipe.get_component_spec(name)
        if getattr(pipe, name, None) is not None or spec.pretrained_model_name_or_path is None:
            continue
        place = str(spec.pretrained_model_name_or_path)
        if not os.path.exists(place):
            if not is_hub_id(place):
                raise LoadError(f"{place}/{name} is missing, and the index of {source} names it; copy the whole model")
            check_hub_access(place, "*")
        try:
            # Not load_components, which logs what a component raises and goes on without it.
            part = spec.load(dtype=dtype, **_collect_load_options(spec.type_hint, variant))
        except ValueError as error:
            raise LoadError(f"{name} of {place} cannot be loaded: {' '.join(str(error).split())}") from error
        pipe.register_components(**{name: part})
    return pipe


def _collect_load_options(kind: Any, variant: str | None) -> dict[str, Any]:
    """Keyword arguments of `from_pretrained` of a component that has weights; none of others."""
    if isinstance(kind, type) and not issubclass(kind, nn.Module):
        return {}
    return {"use_safetensors": True} | ({} if variant is None else {"variant": variant})


def load_whole_models(
    source: Path | str, dtype: torch.dtype, variant: str | None = None, *, apart: Collection[str] = ()
) -> dict[str, nn.Module]:
    """The other components that are models, whole, each after a check that its files have all of its weights.

    Quantized ones are not among them, nor those of classes that are in neither diffusers nor transformers: their own
    loaders read them, with the pipeline.

    Args:
        source, dtype, variant: as in `load_partial_components`.
        apart: the components that are not read here.

    Raises:
        LoadError: if files or weights are missing or corrupt.
    """
    models: dict[str, nn.Module] = {}
    for name, (library, kind) in _read_components(source).items():
        cls, locate = _find_component_class(library, kind), _locate_component_files(source, name)
        if name in apart or cls is None or not issubclass(cls, (diffusers.ModelMixin, transformers.PreTrainedModel)):
            continue
        config = _find_config(locate, name)
        if _find_partial_load_refusal(cls, str(kind), config) is not None:
            continue
        where, options = _collect_source_options(source, name, locate, variant)
        options["torch_dtype" if issubclass(cls, diffusers.ModelMixin) else "dtype"] = dtype
        from_pretrained: Any = cls.from_pretrained
        models[name], info = from_pretrained(where, use_safetensors=True, output_loading_info=True, **options)
        # Not buffers: those that are missing are computed, as tables of positions are.
        parameters = {key for key, _ in models[name].named_parameters(remove_duplicate=False)}
        if lacking := sorted(parameters & set(info["missing_keys"])):
            raise LoadError(f"{config.parent} lacks {len(lacking)} weight(s), such as {lacking[0]}; copy it again")
    return models


def load_shared_components(source: Path | str, *, apart: Collection[str] = ()) -> dict[str, Any]:
    """The components that are no models (tokenizers, schedulers) and lie in the folder of another bundled model.

    Args:
        source: as in `load_partial_components`.
        apart: the components that are not read here.
    """
    shared: dict[str, Any] = {}
    if not isinstance(source, Path):
        return shared
    for name, (library, kind) in _read_components(source).items():
        cls: Any = _find_component_class(library, kind)
        folder = find_component_folder(source, name)
        if name not in apart and cls is not None and folder.parent != source:
            shared[name] = cls.from_pretrained(str(folder))
    return shared


def load_partial_transformer(
    cls: type[Any],
    locate: LocateFile,
    config: Path,
    plan: Plan,
    rank: int,
    dtype: torch.dtype,
    *,
    variant: str | None = None,
) -> nn.Module:
    """A transformer with the weights of a rank's blocks, and of what every rank has, on the CPU.

    Args:
        cls: its class in diffusers.
        locate: finds its files.
        config: the path of its config.json.

    Raises:
        ModelError: if its anatomy is not known.
        PlanError: if it cannot be cut as the plan says.
        LoadError: if files or weights are missing or corrupt, those of other ranks too.
    """
    made = _build_empty_model(cls, config.parent, dtype)
    block_hooks, at = build_block_hooks(made, registry.choose_model_spec(made)), compute_coordinates(plan, rank)
    owned = select_local_blocks(divide_into_stages(block_hooks, plan), at["pipefusion"], plan.num_whole_stages)
    stored_variant = variant if variant is not None and _has_variant_files(locate, variant) else None
    checkpoint = Checkpoint.open_checkpoint(locate, STEM, stored_variant)
    # Before blocks are emptied, so that a missing weight raises on every rank and not only on its owner.
    if lacking := checkpoint.list_missing_names(made.state_dict()):
        raise LoadError(f"{config.parent} lacks {len(lacking)} weight(s), such as {lacking[0]}; copy it again")
    weights, part, shard = block_hooks.describe_weights(), None, (at["tensor"], plan.tensor)
    if plan.tensor > 1:
        table = find_tensor_table(made, block_hooks.spec, block_hooks.anatomy.tensor)
        part = TensorCuts.match_tensor_table(made, table, *shard).select_shard
    block_hooks.empty_other_blocks(owned, keep=False)
    bytes_read = checkpoint.read_into_module(made, dtype, keep_fp32=cls._keep_in_fp32_modules or (), part=part)
    # After the checkpoint was read, which asks for the names of what is here.
    block_hooks.guard_calls()
    block_hooks.guard_saving()
    block_hooks.loaded_blocks = LoadedBlocks(owned, weights, bytes_read, block_hooks.guards, shard)
    made.register_to_config(_name_or_path=str(config.parent))
    made.eval()
    return block_hooks.transformer


def _build_empty_model(cls: type[Any], config: Path, dtype: torch.dtype) -> Any:
    """The model; tensors that the checkpoint will fill are on the meta device."""
    values, unused, _ = cls.load_config(config, return_unused_kwargs=True, return_commit_hash=True)
    with _use_default_dtype(dtype), init_on_meta_device():
        made = cls.from_config(dict(values), **unused)
    # If all tensors are saved, all are made on the meta device: computing SD3's table takes more memory than a stage.
    if not any(_has_unsaved_tensors(module) for module in made.modules()):
        return made
    # A tensor that is not saved (a table of sines) needs its value, so only parameters are left empty, as in diffusers.
    with _use_default_dtype(dtype), no_init_weights(), accelerate.init_empty_weights():
        return cls.from_config(dict(values), **unused)


def _has_unsaved_tensors(module: nn.Module) -> bool:
    """Whether a module has tensors that are not saved: buffers that are not persistent, plain attributes."""
    saved = (module._parameters, module._buffers, module._modules)
    attributes = [value for value in vars(module).values() if not any(value is part for part in saved)]
    for value in attributes:
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        if any(isinstance(part, Tensor) for part in parts):
            return True
    return bool(module._non_persistent_buffers_set)


@contextmanager
def _use_default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Sets the dtype of modules that are made within it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _locate_component_files(source: Path | str, name: str) -> LocateFile:
    """The files of a component, in a folder or on the hub."""
    if isinstance(source, Path):
        return locate_in_folder(find_component_folder(source, name))

    def locate_hub_file(file: str) -> Path | None:
        # `EntryNotFoundError` is also raised if the file is not in the cache and the hub cannot be reached.
        try:
            return Path(hf_hub_download(source, file, subfolder=name))
        except EntryNotFoundError:
            return None

    return locate_hub_file


def read_model_index(source: Path | str) -> dict[str, Any]:
    """What the index of a pipeline says: name -> [library, class], and of a modular pipeline a dict of where it is.

    Raises:
        LoadError: if there is none.
    """
    locate = _locate_component_files(source, "")
    path = next(filter(None, map(locate, (MODEL_INDEX, MODULAR_INDEX))), None)
    if path is None:
        raise LoadError(f"{source} has no model_index.json, or the hub cannot be reached")
    return read_json_object(path)


def check_component_packages(source: Path | str) -> None:
    """Raises `ModelError` if a component of transformers needs torchvision, which is not installed."""
    import transformers

    for name, (library, class_name) in _read_components(source).items():
        component = getattr(transformers, str(class_name), None) if library == "transformers" else None
        if _lacks_torchvision(component):
            require_extra("vision", f"{name} of {source}, a {class_name},", ["torchvision"])


def _lacks_torchvision(component: Any) -> bool:
    """Whether transformers has a placeholder for a class, or for the part of a processor that reads videos."""
    from transformers import AutoVideoProcessor

    # A placeholder raises for any other attribute than this one.
    if "torchvision" in getattr(component, "_backends", ()):
        return True
    parts = component.get_attributes() if hasattr(component, "get_attributes") else ()
    return "video_processor" in parts and "torchvision" in getattr(AutoVideoProcessor, "_backends", ())


def _read_components(source: Path | str) -> dict[str, tuple[Any, Any]]:
    """The components of a pipeline that are beside its index: name -> (library, class)."""
    return dict(list_own_components(source, read_model_index(source)))


def _find_config(locate: LocateFile, name: str) -> Path:
    """The config of a component. Raises `LoadError` if there is none, or it describes what nobody can build."""
    config = locate("config.json")
    if config is None:
        raise LoadError(f"{name} has no config.json, or the hub cannot be reached; copy the whole model")
    check_config_counts(read_json_object(config), config)
    return config


def _collect_source_options(
    source: Path | str, name: str, locate: LocateFile, variant: str | None
) -> tuple[str, dict[str, Any]]:
    """Where `from_pretrained` finds a component: its folder or hub id, and keyword arguments."""
    where, subfolder = name_component_source(source, name)
    options: dict[str, Any] = {**subfolder}
    if variant is not None and _has_variant_files(locate, variant):
        options["variant"] = variant
    return where, options


def _has_variant_files(locate: LocateFile, variant: str) -> bool:
    """Whether a component has files of a variant; if it has none, diffusers takes the plain ones."""
    stems = (STEM, "model")
    names = [f"{s}{end}" for s in stems for end in (f".{variant}.safetensors", f".safetensors.index.{variant}.json")]
    return any(locate(name) is not None for name in names)


def _find_partial_load_refusal(cls: type[Any] | None, kind: str, config: Path) -> str | None:
    """Why a component cannot be read in part, or None."""
    if cls is None:
        return f"its class {kind} is in neither diffusers nor transformers"
    if read_json_object(config).get("quantization_config"):
        return "its weights are quantised, and only its quantiser knows how to read them"
    return None


def _find_component_class(library: Any, kind: Any) -> type[Any] | None:
    """The class of a component; None if it is in neither diffusers nor transformers."""
    modules = {"diffusers": diffusers, "transformers": transformers}
    found = getattr(modules.get(str(library)), kind, None) if isinstance(kind, str) else None
    return found if isinstance(found, type) else None

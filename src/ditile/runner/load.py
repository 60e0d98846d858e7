"""Loads a pipeline by the name of a bundled model, from a folder, or from the hub, but never from pickles.

Under a plan a rank reads only its share of the weights (docs/loading.md): its part of the transformer and the text
encoders, and the other models whole. To read part of a model, it builds the model as diffusers does, but without
weights, replaces blocks of other stages by placeholders, and reads the remaining weights. A model whose files lack a
weight is refused: diffusers and transformers would fill it with random numbers.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import accelerate  # type: ignore[import-untyped]
import diffusers
import safetensors
import torch
import transformers
from diffusers.models.modeling_utils import no_init_weights
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, StrictDataclassError
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers.modeling_utils import local_torch_dtype

from ditile.distributed.mesh import find_process_rank
from ditile.distributed.start_watcher import begin_watch
from ditile.model.anatomies import build_block_hooks
from ditile.model.hooks.block_hooks import LoadedBlocks
from ditile.model.hooks.placeholders import init_on_meta_device, refuse_saving
from ditile.model.known import find_component_folder, find_known_model, name_component_source
from ditile.model.pipeline_calls import DENOISER_NAME
from ditile.parallel.block_formats import RowBlocks
from ditile.parallel.tensor.cuts import TensorCuts
from ditile.parallel.tensor.sharding import find_tensor_table
from ditile.parallel.text.parts import WHOLE, EncoderPlacement, install_guards, read_partial_encoder
from ditile.plan.errors import DitileError, LoadError, ModelError, join_error_lines
from ditile.plan.extras import advise_torchvision, is_installed, require_extra
from ditile.plan.option_classes import CallArguments, JsonObject, checked
from ditile.plan.plan import IMAGE, Plan, compute_coordinates, list_subgroups
from ditile.runner.compose import divide_into_stages
from ditile.runner.model_files import (
    DENOISERS,
    MODEL_INDEX,
    MODULAR_INDEX,
    MODULAR_MARK,
    STEMS,
    TRANSFORMER,
    ComponentFiles,
    ConfigValues,
    IndexValues,
    ModelSource,
    check_config_counts,
    check_hub_access,
    check_stored_types,
    choose_dtype_name,
    collect_component_files,
    find_model_source,
    find_transformer_source,
    has_all_weights,
    is_hub_id,
    list_own_components,
    name_weight_files,
    read_json_object,
    refuse_missing_weights,
    refuse_out_of_memory,
    refuse_unknown_components,
    report_download_progress,
)
from ditile.runner.weights.checkpoint import Checkpoint, LocateFile, locate_in_folder
from ditile.runner.weights.encoder_file import open_encoder_file
from ditile.runner.weights.prequantized import PrequantizedCheckpoint, StoredWeights
from ditile.runner.weights.single_file import ConvertedFile, SingleFile, find_base_models

STEM = STEMS[0]
LOG = logging.getLogger(__name__)
ANOTHER_HINT = "for another one give --model NAME --transformer FILE"
Components = dict[str, Any]
"""Component of a pipeline -> what was loaded."""
LOADED_WHOLE = "%s is loaded whole on every rank and then divided: %s"
_BUILD_ERRORS = (
    *(ValueError, TypeError, AttributeError, LookupError, ArithmeticError, AssertionError),
    *(RuntimeError, ImportError, NameError, StrictDataclassError),
)
"""The exceptions of diffusers and transformers for a config they cannot build."""


class Component(NamedTuple):
    """A component with files next to the pipeline's index.

    Attributes:
        source: the folder or hub id of the pipeline.
        name: its name in the pipeline.
        library: the package of its class.
        class_name: the name of its class; None for an optional component that the pipeline lacks.
        cls: the class itself; None if it is in neither diffusers nor transformers.
        locate: finds its files, and fetches them if necessary.
        config: its config.json; None if it has none.
        quantization: the quantization in its config; empty if its weights are not quantized.
    """

    source: ModelSource
    name: str
    library: Any
    class_name: Any
    cls: Any
    locate: LocateFile
    config: Path | None
    quantization: JsonObject

    @property
    def folder(self) -> Path:
        """Return the folder of its config. Raises `LoadError` if there is none."""
        if self.config is None:
            raise LoadError(f"{self.name} has no config.json, or the hub cannot be reached; copy the whole model")
        return self.config.parent

    @property
    def is_read_by_share(self) -> bool:
        """Return whether a rank can read its share of the quantized weights (torchao, or 4 bits of bitsandbytes)."""
        method = self.quantization.get("quant_method")
        return bool(method == "torchao" or (method == "bitsandbytes" and self.quantization.get("load_in_4bit")))

    def is_divided(self, plan: Plan, rank: int) -> bool:
        """Return whether a rank of a plan reads only part of the component. Other components are read whole."""
        if DENOISER_NAME.fullmatch(self.name):
            return plan.divides_blocks
        return self.name.startswith("text_encoder") and _choose_placement(plan, rank) != WHOLE


@checked()
def load(
    name: str,
    *,
    dtype: torch.dtype | str | None = None,
    plan: Plan | None = None,
    variant: str | None = None,
    transformer: str | None = None,
    components: ComponentFiles | None = None,
    workflow: str | None = None,
) -> diffusers.DiffusionPipeline | diffusers.ModularPipeline:
    """Load the pipeline of a bundled model, a folder or a hub id onto the CPU.

    A folder with a `modular_model_index.json` and no `model_index.json` is a modular pipeline of diffusers. Its own
    components are read as in any other pipeline, and components that its index places elsewhere are read there.

    Args:
        name: a bundled model, such as shapes-flux; or a folder, or a hub id; or the file of a published model's
            transformer, with the other parts taken from that model.
        dtype: a torch dtype or its name. By default float32 for bundled models and without a GPU, otherwise bfloat16;
            float16 only on request.
        plan: read only this rank's part under this plan; `parallelize` then needs a plan that divides the pipeline in
            the same way. By default the whole pipeline is read.
        variant: the variant of the files, such as "fp16"; components without it use the plain files.
        transformer: a file with the weights of the transformer, .safetensors or .gguf, under the names of diffusers,
            ComfyUI or the authors; by default the model's own are read.
        components: files for other components, such as transformer_2 or text_encoder: component -> its file.
        workflow: the workflow of a modular pipeline to load, as diffusers names it, such as "t2va" of MiniMax-H3;
            components that only other workflows use, such as a second transformer, are not read.

    Raises:
        ModelError: if the name, the dtype or the pipeline's class is not known, the plan cannot divide the pipeline,
            or a component needs a package that is not installed.
        PlanError: if the plan does not fit the model, or does not use all ranks.
        LoadError: if files are missing, corrupt or pickles, or the hub cannot be reached.
    """
    name, files = split_model_file(name, collect_component_files(transformer, components))
    source = find_model_source(name, variant, components=files)
    rank = 0
    if plan is not None:
        begin_watch(None)
        rank = find_process_rank(plan)
    plan = plan or Plan()
    weight_dtype = choose_weight_dtype(source, dtype)
    with ExitStack() as stack:
        stack.enter_context(convert_build_errors(name))
        if isinstance(source, str):
            stack.enter_context(report_download_progress(source))
        components_there = list_components(source, workflow)
        check_component_packages(components_there)
        refuse_unknown_components(source, read_model_index(source), files)
        loaded: Components = {}
        divided = []
        for component in components_there:
            model = load_model(component, plan, rank, weight_dtype, variant, files.get(component.name))
            if model is None:
                continue
            loaded[component.name] = model
            if component.is_divided(plan, rank):
                divided.append(model)
        loaded |= load_shared_components(components_there, loaded=loaded)
        pipe: diffusers.DiffusionPipeline | diffusers.ModularPipeline
        if MODULAR_MARK in read_model_index(source):
            pipe = load_modular_pipeline(source, weight_dtype, variant, loaded, workflow)
        else:
            # DiffusionPipeline itself would read components with a default again, such as Wan's transformers.
            cls = find_pipeline_kind(source) or diffusers.DiffusionPipeline
            pipe = cls.from_pretrained(source, dtype=weight_dtype, use_safetensors=True, variant=variant, **loaded)
    if isinstance(source, str):
        # For a folder, `find_model_source` has already checked the stored types.
        for component in components_there:
            if component.config is not None:
                check_stored_types(component.folder, variant)
    if divided:
        refuse_saving(ExitStack(), pipe, divided)  # for good: the stack is never closed
    return pipe


def load_component(
    name: str, component_name: str, *, dtype: torch.dtype | str | None, plan: Plan, components: ComponentFiles
) -> tuple[nn.Module, Any]:
    """Load this rank's part of one model of a pipeline onto the CPU, and nothing else of the pipeline.

    Args:
        name, components: as in `load`.
        component_name: transformer, vae, or another model of the pipeline.

    Returns:
        The model, and the class of its pipeline; None if that is not diffusers' own.

    Raises:
        ModelError, PlanError, LoadError: as `load`.
    """
    begin_watch(None)
    rank = find_process_rank(plan)
    source = find_transformer_source(name, component_name, components)
    weight_dtype = choose_weight_dtype(source, dtype)
    with convert_build_errors(name):
        by_name = {component.name: component for component in list_components(source)}
        if component_name not in by_name:
            raise ModelError(f"{name!r} has no component {component_name!r}; there are {', '.join(by_name)}")
        component = by_name[component_name]
        if component.cls is None:
            # The class of a vocoder is in the package of its pipeline.
            package = getattr(diffusers.pipelines, str(component.library), None)
            component = component._replace(cls=getattr(package, str(component.class_name), None))
        model = load_model(component, plan, rank, weight_dtype, file=components.get(component_name))
        if model is None:
            raise ModelError(
                f"{component_name} of {name!r} is a {component.class_name} that only its pipeline can load; give a "
                f"file with its weights, as --component {component_name}=FILE"
            )
        return model, find_pipeline_kind(source)


def choose_weight_dtype(source: ModelSource, dtype: torch.dtype | str | None) -> torch.dtype:
    """Return `dtype` if it is given, otherwise the type chosen by `choose_dtype_name`."""
    if isinstance(dtype, torch.dtype):
        return dtype
    weight_dtype: torch.dtype = getattr(torch, choose_dtype_name(source, dtype))
    return weight_dtype


@contextmanager
def convert_build_errors(name: str, refusal: str = "is not one that diffusers can build here") -> Iterator[None]:
    """Turn the exceptions of diffusers and transformers for a model they cannot build into an error of ditile.

    Args:
        name: the name of the model.
        refusal: the text of the error.

    Raises:
        LoadError: for files that are missing or corrupt.
        ModelError: for a config from which they cannot build a model.
    """
    try:
        yield
    except DitileError:
        raise
    except (OSError, safetensors.SafetensorError, *_BUILD_ERRORS) as error:
        refuse_out_of_memory(error)
        reason = join_error_lines(error)
        if isinstance(error, safetensors.SafetensorError):
            raise LoadError(f"model {name!r} has a corrupt safetensors file: {reason}") from error
        if isinstance(error, OSError):
            raise LoadError(f"model {name!r} cannot be loaded: {reason}") from error
        if not isinstance(error, ValueError):
            reason = f"{type(error).__name__}: {reason}"
        raise ModelError(f"model {name!r} {refusal}: {reason}") from error


def split_model_file(name: str, files: dict[str, str]) -> tuple[str, dict[str, str]]:
    """Return the model and the files of its components. A file given as the model is a published model's transformer.

    Raises:
        LoadError, ModelError: if the file cannot be read, fits no published model, or there are two files.
    """
    # Values that cannot be a name are refused by `find_model_source`.
    if name and isinstance(name, str):
        name = os.path.expanduser(name)
    if not name or not os.path.isfile(name):
        return name, files
    if TRANSFORMER in files:
        raise ModelError(f"model {name!r} is a file, and so is transformer={files[TRANSFORMER]!r}; give one of them")
    base, *others = find_base_models(Path(name))
    if others:
        # For example one of the two transformers of Wan 2.2: the other would be missing.
        alike = ", ".join(others)
        LOG.warning("%s is taken for the transformer of %s, and may be that of %s; %s", name, base, alike, ANOTHER_HINT)
    else:
        LOG.info("%s is taken for the transformer of %s; %s", name, base, ANOTHER_HINT)
    return base, {**files, TRANSFORMER: name}


def load_model(
    component: Component, plan: Plan, rank: int, dtype: torch.dtype, variant: str | None = None, file: str | None = None
) -> nn.Module | None:
    """Load a rank's part of a component that is a model, onto the CPU.

    Args:
        file: the file with its weights; by default the pipeline's own files are read.

    Returns:
        The model; None for a component that the pipeline's own loader reads: it is not a model, its class is in neither
        diffusers nor transformers, or it is a quantized model that only its quantizer can read.

    Raises:
        ModelError, PlanError: if the plan cannot divide the component.
        LoadError: if files or weights are missing or corrupt.
    """
    name = component.name
    cls = component.cls
    is_divided = component.is_divided(plan, rank)
    if not is_divided:
        plan = Plan()
        rank = 0
    model: Any
    if component.class_name is None:
        return None
    if file is not None:
        # A separate file takes precedence over the folder's files.
        model = load_component_file(component, file, plan, rank, dtype)
    elif cls is None or not issubclass(cls, (diffusers.ModelMixin, transformers.PreTrainedModel)):
        if is_divided:
            reason = f"its class {component.class_name} is in neither diffusers nor transformers"
            LOG.warning(LOADED_WHOLE, name, reason)
        return None
    else:
        is_share_read = issubclass(cls, diffusers.ModelMixin) and component.is_read_by_share
        if component.quantization and not is_share_read:
            if is_divided:
                LOG.warning(LOADED_WHOLE, name, "its weights are quantized, and only its quantizer can read them")
            return None
        # Without files of a variant diffusers takes the plain ones.
        if variant is not None:
            file_names = [file_name for stem in STEMS for file_name in name_weight_files(stem, variant)]
            if all(component.locate(file_name) is None for file_name in file_names):
                variant = None
        if is_share_read or (is_divided and issubclass(cls, diffusers.ModelMixin)):
            return _load_partial_transformer(component, plan, rank, dtype, variant)
        place, subfolder = name_component_source(component.source, component.name)
        options: CallArguments = {**subfolder}
        if variant is not None:
            options["variant"] = variant
        if not is_divided:
            # diffusers still calls it `torch_dtype` for models.
            dtype_option = "torch_dtype" if issubclass(cls, diffusers.ModelMixin) else "dtype"
            options[dtype_option] = dtype
            model, info = cls.from_pretrained(place, use_safetensors=True, output_loading_info=True, **options)
            # Buffers may be missing: they are computed, such as tables of positions.
            parameters = {key for key, _ in model.named_parameters(remove_duplicate=False)}
            refuse_missing_weights(parameters & set(info["missing_keys"]), component.folder)
            return model  # type: ignore[no-any-return]
        model = read_partial_encoder(cls, place, _choose_placement(plan, rank), dtype, **options)
    if is_divided and not DENOISER_NAME.fullmatch(name):
        install_guards(ExitStack(), model, name)  # for good: the stack is never closed
    return model  # type: ignore[no-any-return]


def _choose_placement(plan: Plan, rank: int) -> EncoderPlacement:
    """Return the part of the text encoders on a rank of a plan."""
    image_ranks = next(ranks for ranks in list_subgroups(plan, IMAGE) if rank in ranks)
    return EncoderPlacement.choose_placement(plan, image_ranks.index(rank))


def find_pipeline_kind(source: ModelSource, workflow: str | None = None) -> Any:
    """Return the class of a pipeline; for a modular pipeline, the pipeline itself without its components.

    Args:
        workflow: take only the blocks of this workflow of a modular pipeline; by default all blocks are taken.

    Returns:
        None if its model_index.json names no pipeline of diffusers.

    Raises:
        LoadError: if the file cannot be read.
        ModelError: if a modular pipeline has its own code or unknown blocks, or another kind is given a workflow.
    """
    index = read_model_index(source)
    if MODULAR_MARK in index:
        with convert_build_errors(str(source)):
            # Older releases of diffusers do not know the argument.
            options = {} if workflow is None else {"workflow": workflow}
            return diffusers.ModularPipeline.from_pretrained(str(source), trust_remote_code=False, **options)
    if workflow is not None:
        raise ModelError(f"workflow={workflow!r}: {source} is no modular pipeline; leave it out")
    cls = _find_component_class("diffusers", index.get("_class_name"))
    if cls is None or not issubclass(cls, diffusers.DiffusionPipeline):
        return None
    return cls


def choose_text_workflow(name: str, components: ComponentFiles | None = None) -> str | None:
    """Return a modular pipeline's workflow for calls with only a prompt; None if it has none, or one transformer.

    Args:
        name, components: as in `load`.

    Raises:
        LoadError, ModelError: as `load`.
    """
    if os.path.isfile(name):
        return None
    source = find_model_source(name, weights=False, components=components)
    index = read_model_index(source)
    known = find_known_model(name)
    # The packaged configs of a published model do not list all its components, but its index on the hub does.
    if MODULAR_MARK in index and known is not None and source == known.folder:
        source = str(known.hub_id)
        index = read_model_index(source)
    if MODULAR_MARK not in index or sum(map(bool, map(DENOISER_NAME.fullmatch, index))) < 2:
        return None
    workflows = find_pipeline_kind(source).blocks._workflow_map or {}
    return next((workflow for workflow, inputs in workflows.items() if inputs == {"prompt": True}), None)


def load_modular_pipeline(
    source: ModelSource, dtype: torch.dtype, variant: str | None, loaded: Components, workflow: str | None = None
) -> Any:
    """Load a modular pipeline with all components of its blocks, except for the ones that are `loaded` already."""
    pipe = find_pipeline_kind(source, workflow)
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
        options: CallArguments = {}
        # Tokenizers and schedulers have no weights, and refuse these arguments.
        if not isinstance(spec.type_hint, type) or issubclass(spec.type_hint, nn.Module):
            options["use_safetensors"] = True
            if variant is not None:
                options["variant"] = variant
        try:
            # `load_components` would only log a component's exception, and go on without it.
            part = spec.load(dtype=dtype, **options)
        except ValueError as error:
            refuse_out_of_memory(error)
            raise LoadError(f"{name} of {place} cannot be loaded: {join_error_lines(error)}") from error
        pipe.register_components(**{name: part})
    return pipe


def load_shared_components(components: Sequence[Component], *, loaded: Collection[str] = ()) -> Components:
    """Load tokenizers and schedulers that lie in the folder of another bundled model, unless they are `loaded`."""
    shared: Components = {}
    for component in components:
        cls: Any = component.cls
        if component.name in loaded or cls is None or not isinstance(component.source, Path):
            continue
        folder = find_component_folder(component.source, component.name)
        if folder.parent != component.source:
            shared[component.name] = cls.from_pretrained(str(folder))
    return shared


def _load_partial_transformer(
    component: Component, plan: Plan, rank: int, dtype: torch.dtype, variant: str | None
) -> nn.Module:
    """Load a transformer with the weights of a rank's blocks and the weights that all ranks share.

    Raises:
        ModelError: if its anatomy is not known, or its quantizer is not installed.
        PlanError: if it cannot be cut as the plan says.
        LoadError: if files or weights are missing or corrupt, even if only other ranks read them.
    """
    folder = component.folder
    model = _build_empty_model(component.cls, folder, dtype)
    checkpoint = Checkpoint.open_checkpoint(component.locate, STEM, variant)
    if not component.quantization:
        return _read_share(model, lambda _: checkpoint, folder, plan, rank, dtype)
    prequantized = _open_prequantized(checkpoint, folder)
    row_blocks = prequantized.list_row_blocks(model.state_dict(), plan.tensor)

    def build_checkpoint(model: Any) -> Checkpoint:
        return prequantized.build_checkpoint(model, dtype, component.quantization)

    return _read_share(model, build_checkpoint, folder, plan, rank, dtype, row_blocks)


def load_component_file(component: Component, file: str, plan: Plan, rank: int, dtype: torch.dtype) -> nn.Module:
    """Load a pipeline's component with the weights of a file: a rank's share if the plan divides it.

    Raises:
        ModelError: if its anatomy is not known, or it is not a model of diffusers or transformers.
        PlanError: if it cannot be cut as the plan says.
        LoadError: if the file is not whole, or does not fit the component.
    """
    converted = check_component_file(component, file)
    if converted is None:
        return _load_encoder_file(component, file, _choose_placement(plan, rank), dtype)
    model = _build_empty_model(component.cls, converted.config.parent, dtype)

    def build_checkpoint(model: Any) -> Checkpoint:
        return converted.build_checkpoint(model, dtype)

    row_blocks = converted.list_row_blocks(plan.tensor)
    return _read_share(model, build_checkpoint, Path(file), plan, rank, dtype, row_blocks)


def check_component_file(component: Component, file: str) -> ConvertedFile | None:
    """Check a file for `load_component_file` by its header. Raises the errors of that function.

    Returns:
        The tensors of the component; None if it is a model of transformers. Their config is that of a published model
        if the file does not fit the component's own.
    """
    cls = component.cls
    if cls is None or not issubclass(cls, (diffusers.ModelMixin, transformers.PreTrainedModel)):
        raise ModelError(
            f"{component.name} of {component.source} is a {component.class_name}, which is not read from one file "
            f"({file})"
        )
    if issubclass(cls, transformers.PreTrainedModel):
        _load_encoder_file(component, file, EncoderPlacement.choose_placement(Plan(), 0), None)
        return None
    converted = ConvertedFile.match_config(SingleFile.read_header(Path(file)), cls, component.config)
    if converted.keeps_integers:
        require_extra("quantize", file)
    if component.config is not None and converted.config != component.config:
        published = converted.config.parent.parent.name
        LOG.warning("%s does not fit the config of %s, and is built by that of %s", file, component.source, published)
    return converted


def _load_encoder_file(
    component: Component, file: str, placement: EncoderPlacement, dtype: torch.dtype | None
) -> nn.Module:
    """Load a rank's part of a transformers model from a weight file; on the meta device if `dtype` is None."""
    cls: Any = component.cls
    folder = component.folder
    if component.quantization:
        raise ModelError(
            f"{component.config} is of quantized weights, and those of {file} are not; remove its quantization_config"
        )
    # The file has only weights; the config and class of the encoder are in the pipeline's folder.
    config = cls.config_class.from_pretrained(folder)
    options: CallArguments = {"config": config, "config_place": folder}
    if component.locate("generation_config.json") is not None:
        options["generation_config"] = transformers.GenerationConfig.from_pretrained(folder)
    with open_encoder_file(Path(file), cls, config) as opened:
        weights: dict[str, Any] = {**opened}
        if dtype is None:
            options["device_map"] = "meta"
            weights = {key: torch.empty(tensor.shape, device="meta") for key, tensor in opened.items()}
        encoder: nn.Module = read_partial_encoder(cls, file, placement, dtype, state_dict=weights, **options)
    return encoder


def _read_share(
    model: Any,
    build_checkpoint: Callable[[Any], Checkpoint],
    place: Path,
    plan: Plan,
    rank: int,
    dtype: torch.dtype,
    row_blocks: Mapping[str, RowBlocks] | None = None,
) -> nn.Module:
    """Read a rank's share into a model without weights. The model then has placeholders for the other blocks."""
    # diffusers keeps these modules in float32, regardless of the dtype.
    keep_fp32 = model._keep_in_fp32_modules or ()
    if not plan.divides_blocks:
        checkpoint = build_checkpoint(model).find_weights(model.state_dict().keys(), place)
        checkpoint.read_into_module(model, dtype, keep_fp32=keep_fp32)
        return _finish_model(model, place)
    block_hooks = build_block_hooks(model)
    coordinates = compute_coordinates(plan, rank)
    stages = divide_into_stages(block_hooks, plan)
    owned = stages[coordinates["pipefusion"]]
    # Describe the blocks of every stage before some are emptied.
    weights = block_hooks.describe_weights()
    index = coordinates["tensor"]
    select_shard = None
    tensor_shares: tuple[int, ...] = (1,)
    if plan.tensor > 1:
        table = find_tensor_table(model, block_hooks.anatomy.tensor)
        cuts = TensorCuts.match_tensor_table(
            model, table, index, plan.tensor, weights=plan.tensor_weights, stored_blocks=row_blocks
        )
        tensor_shares = cuts.shares
        select_shard = cuts.select_shard
    # Cuts are made for plain Linears, so they come before the checkpoint, which may replace Linears by quantized ones.
    # Weights are located before blocks are emptied, so that a missing weight raises on every rank.
    checkpoint = build_checkpoint(model).find_weights(model.state_dict().keys(), place)
    # Empty blocks before weights are read, so that blocks of other ranks are never in memory.
    block_hooks.empty_other_blocks(owned, keep=False)
    bytes_read = checkpoint.read_into_module(model, dtype, keep_fp32=keep_fp32, part=select_shard)
    # Guard after the checkpoint was read: reading calls `state_dict`, which the guards refuse.
    block_hooks.guard_calls()
    block_hooks.guard_saving()
    shard = index, plan.list_tensor_weights()
    block_hooks.loaded_blocks = LoadedBlocks(owned, weights, bytes_read, block_hooks.guards, shard, tensor_shares)
    _finish_model(model, place)
    return block_hooks.transformer


def _finish_model(model: Any, place: Path) -> nn.Module:
    """Finish a model in the same way `from_pretrained` does."""
    model.register_to_config(_name_or_path=str(place))
    finished: nn.Module = model.eval()
    return finished


def _build_empty_model(cls: Any, config: Path, dtype: torch.dtype) -> Any:
    """Build the model. Tensors to be filled from the checkpoint are on the meta device."""
    values, unused, _ = cls.load_config(config, return_unused_kwargs=True, return_commit_hash=True)
    with local_torch_dtype(dtype), init_on_meta_device():
        model = cls.from_config(dict(values), **unused)
    # If all tensors are saved, all are made on the meta device: computing SD3's table takes more memory than a stage.
    if not any(map(_has_unsaved_tensors, model.modules())):
        return model
    # A tensor that is not saved (a table of sines) needs its value, so only parameters are left empty, as in diffusers.
    with local_torch_dtype(dtype), no_init_weights(), accelerate.init_empty_weights():
        return cls.from_config(dict(values), **unused)


def _has_unsaved_tensors(module: nn.Module) -> bool:
    """Return whether a module has tensors that are not saved: non-persistent buffers or plain attributes."""
    # Leave out torch's own tables of saved tensors.
    attributes = dict(vars(module))
    for name in ("_parameters", "_buffers", "_modules"):
        del attributes[name]
    has_tensor = any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(attributes))
    return has_tensor or bool(module._non_persistent_buffers_set)


def _locate_component_files(source: ModelSource, name: str) -> LocateFile:
    """Return the function that locates the files of a component, in a folder or on the hub."""
    if isinstance(source, Path):
        return locate_in_folder(find_component_folder(source, name))

    def locate_hub_file(file: str) -> Path | None:
        # `EntryNotFoundError` is also raised if the file is not in the cache and the hub cannot be reached.
        try:
            return Path(hf_hub_download(source, file, subfolder=name))
        except EntryNotFoundError:
            return None

    return locate_hub_file


def read_model_index(source: ModelSource) -> JsonObject:
    """Read the index of a pipeline: name -> [library, class]. In a modular pipeline a dict with the location is added.

    Raises:
        LoadError: if there is none.
    """
    locate = _locate_component_files(source, "")
    path = locate(MODEL_INDEX) or locate(MODULAR_INDEX)
    if path is None:
        raise LoadError(f"{source} has no model_index.json, or the hub cannot be reached")
    return read_json_object(path, IndexValues)


def check_component_packages(components: Sequence[Component]) -> None:
    """Check that torchvision is installed if a component needs it. Raises `ModelError` otherwise."""
    for component in components:
        if component.library != "transformers":
            continue
        # transformers has a placeholder for a class that lacks a package, or for the video part of a processor. It
        # lists the packages in `_backends`, and raises when asked for a method.
        cls: Any = component.cls
        needed_packages = getattr(cls, "_backends", ())
        if not needed_packages and hasattr(cls, "get_attributes") and "video_processor" in cls.get_attributes():
            needed_packages = getattr(transformers.AutoVideoProcessor, "_backends", ())
        if "torchvision" in needed_packages and not is_installed("torchvision"):
            needed_by = f"{component.name} of {component.source}, a {component.class_name},"
            raise ModelError(f"{needed_by} needs torchvision, which is not installed; {advise_torchvision()}")


def list_components(source: ModelSource, workflow: str | None = None) -> list[Component]:
    """List the components stored next to a pipeline's index; with a workflow, only the ones that it uses.

    Raises:
        LoadError: if an index or a config cannot be read, or no model can be built from it.
    """
    used = None
    if workflow is not None:
        used = find_pipeline_kind(source, workflow).component_names
    components = []
    for name, (library, class_name) in list_own_components(source, read_model_index(source)):
        if used is not None and name not in used:
            continue
        cls = _find_component_class(library, class_name)
        locate = _locate_component_files(source, name)
        config = locate("config.json")
        quantization: JsonObject = {}
        if config is not None:
            values = read_json_object(config, ConfigValues)
            check_config_counts(values, config)
            quantization = values.get("quantization_config") or {}
        components.append(Component(source, name, library, class_name, cls, locate, config, quantization))
    return components


def _find_component_class(library: Any, class_name: Any) -> type[Any] | None:
    """Return the class of a component; None if it is in neither diffusers nor transformers."""
    module = {"diffusers": diffusers, "transformers": transformers}.get(str(library))
    cls = getattr(module, str(class_name), None)
    return cls if isinstance(cls, type) else None


def _open_prequantized(checkpoint: Checkpoint, folder: Path) -> PrequantizedCheckpoint:
    """Open the quantized weights promised by a model's config. Raises `LoadError` if there are none."""
    prequantized = PrequantizedCheckpoint.recognize(checkpoint, folder)
    if prequantized is None:
        raise LoadError(
            f"{folder / 'config.json'} has a quantization_config, and the weights with it are plain; remove it there, "
            "or copy the model again"
        )
    return prequantized


def match_component_files(
    source: ModelSource, files: ComponentFiles, unlisted: Collection[str]
) -> tuple[dict[str, StoredWeights], Path | None]:
    """Check the files given for components of a pipeline, by their headers.

    Args:
        unlisted: components that the pipeline has and its index does not name.

    Returns:
        The stored weights of each transformer that is in a file of its own, or quantized in a folder or the hub's
        cache; and the config that the file of `transformer` fits, or None.

    Raises:
        LoadError: if a file or a part of a weight is missing, or does not fit its component.
        ModelError: if there is no such component, or weights need torchao, which is not installed.
    """
    refuse_unknown_components(source, read_model_index(source), [name for name in files if name not in unlisted])
    stored = {}
    config = None
    for component in list_components(source):
        name = component.name
        if name in files:
            converted = check_component_file(component, files[name])
            if converted is not None and name in DENOISERS:
                stored[name] = converted.count_stored_weights()
                config = converted.config if name == TRANSFORMER else config
            continue
        if name not in DENOISERS or not component.is_read_by_share:
            continue
        # A model on the hub has a folder in the cache with its fetched files.
        folder = component.folder
        if isinstance(component.source, str) and not has_all_weights(folder):
            LOG.warning(
                "the weights of %s in %s are quantized, and are not in the hub's cache: they count as plain ones, so "
                "that a plan takes less memory than it says",
                name,
                component.source,
            )
            continue
        checkpoint = Checkpoint.open_checkpoint(locate_in_folder(folder), STEM)
        stored[name] = _open_prequantized(checkpoint, folder).count_stored_weights()
    return stored, config

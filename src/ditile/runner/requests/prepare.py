"""Makes the runner that serves requests: loads a model, divides it as options say, and warms it up."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ditile.distributed import env
from ditile.distributed.torchrun import join_torchrun
from ditile.plan.errors import LoadError, ModelError
from ditile.plan.numbers import is_whole_number
from ditile.plan.option_classes import CallArguments
from ditile.plan.plan import Plan
from ditile.runner.model_files import (
    DENOISERS,
    ComponentFiles,
)
from ditile.runner.requests.cache_options import CacheOptions
from ditile.runner.requests.console import Status
from ditile.runner.requests.options import DeviceOptions, EngineOptions
from ditile.runner.requests.pipeline_choice import choose_pipeline_class
from ditile.runner.requests.pipelines import enable_required_tiling

if TYPE_CHECKING:
    from ditile.runner.runner import Runner

LEAST_STEPS = 4
STALE_STEPS = 2
"""The warm-up's steps after the synchronous ones: the first such step differs from the steps that follow it."""


def prepare_runner(
    model: str,
    engine: EngineOptions,
    plan: Plan,
    cache: CacheOptions,
    *,
    conditions: Collection[str] = (),
    controlnet: str | None = None,
    components: ComponentFiles | None = None,
    workflow: str | None = None,
) -> tuple[Any, Runner]:
    """Prepare a pipeline on this rank: divided, quantized and with its cache. All ranks call it.

    Args:
        model: a bundled model, a folder or a hub id.
        engine, plan, cache: how to compute.
        conditions: what the calls will start from, which the pipeline's class has to take.
        controlnet: a ControlNet to load: a folder or a hub id.
        components: component -> a file with its weights in place of the model's own.
        workflow: the workflow of a modular pipeline to load.

    Raises:
        DitileError: if the model, the plan or an option does not fit.
    """
    set_up_rank(engine)
    from ditile.runner.load import load

    needs_whole_model = cuts_loras_with_weights(plan, cache)
    with Status(f"loading {model}") as loading:
        load_plan = None if needs_whole_model else plan
        pipe: Any = load(model, dtype=engine.dtype, plan=load_plan, components=components, workflow=workflow)
    enable_required_tiling(pipe)
    if conditions:
        pipe = switch_to_conditions(pipe, conditions, controlnet, engine.dtype)
    runner = divide_pipeline(pipe, engine, plan, cache, is_whole=needs_whole_model)
    if loading.is_shown:
        print("the model is ready; the prompt is encoded before the first step", file=sys.stderr, flush=True)
    return pipe, runner


def prepare_transformer(
    model: str, component: str, engine: EngineOptions, plan: Plan, cache: CacheOptions, components: ComponentFiles
) -> Runner:
    """Prepare a transformer without its pipeline on this rank. All ranks call it.

    Args:
        component: the transformer's name in the pipeline.

    Returns:
        A runner of `TransformerCalls`.

    Raises:
        DitileError: as `prepare_runner`.
    """
    set_up_rank(engine)
    from ditile.runner.load import load_component
    from ditile.runner.transformer_calls import build_transformer_calls

    is_whole = cuts_loras_with_weights(plan, cache)
    with Status(f"loading the {component} of {model}"):
        transformer, owner = load_component(
            model, component, dtype=engine.dtype, plan=Plan() if is_whole else plan, components=components
        )
    return divide_pipeline(build_transformer_calls(transformer, owner), engine, plan, cache, is_whole=is_whole)


def set_up_rank(engine: DeviceOptions) -> None:
    """Silence libraries, and set the threads of this rank."""
    import torch

    silence_libraries()
    if engine.threads is not None:
        torch.set_num_threads(engine.threads)


def cuts_loras_with_weights(plan: Plan, cache: CacheOptions) -> bool:
    """Return whether a rank needs the whole weights to load LoRAs: ranks that divide tokens between Linears cannot load
    one later.
    """
    return bool(cache.loras) and plan.tensor > 1 and plan.split_scheme == "sequence"


def divide_pipeline(pipe: Any, engine: EngineOptions, plan: Plan, cache: CacheOptions, *, is_whole: bool) -> Runner:
    """Divide a loaded pipeline, with its LoRAs, quantization and cache. All ranks call it.

    Args:
        is_whole: whether the whole pipeline was loaded, and not this rank's share.

    Raises:
        DitileError: if the plan or an option does not fit.
    """
    from ditile.model.hooks.compile import set_compile_configs
    from ditile.runner.runner import parallelize

    if plan.tensor == 1 or is_whole:
        load_loras(pipe, cache)
    if engine.compile:
        set_compile_configs(compute_comm_overlap=not cache.disable_compute_comm_overlap)
    # Join after the load, whose time differs from rank to rank: from here on ranks wait for each other.
    join_torchrun(engine.stall_timeout)
    runner = parallelize(
        pipe,
        plan,
        device=engine.device,
        text_after=engine.text_after,
        attention=engine.attention,
        compile=engine.compile,
        cuda_graphs=engine.cuda_graphs,
    )
    if plan.tensor > 1 and not is_whole:
        # Each rank read its share of the weights, and cuts the LoRAs alike.
        load_loras(pipe, cache)
    arguments = cache.build_cache_arguments()
    # `parallelize` has set the attention kernel already.
    arguments.pop("attention_backend", None)
    if arguments["cache_config"] is not None or "quantize_config" in arguments:
        enable_working_cache(runner, arguments)
    return runner


def switch_to_conditions(
    pipe: Any, conditions: Collection[str], controlnet: str | None = None, dtype: str | None = None
) -> Any:
    """Return a pipeline of the same family on the same models, with a call that takes some conditions.

    Raises:
        LoadError, ModelError: if diffusers has no such class, or the ControlNet cannot be loaded or does not fit.
    """
    from ditile.model.pipeline_calls import find_call_owner
    from ditile.runner.siblings import build_sibling_pipeline

    owner = find_call_owner(pipe)
    cls = choose_pipeline_class(owner, conditions, pipe.config, has_controlnet=controlnet is not None)
    if controlnet is None and cls is owner:
        return pipe
    components = {}
    if controlnet is not None:
        components["controlnet"] = load_controlnet(controlnet, dtype or pipe.dtype)
    # A modular pipeline is its own owner, and takes further components.
    if cls is pipe:
        pipe.update_components(**components)
        return pipe
    return build_sibling_pipeline(cls, pipe, {**pipe.components, **components})


def load_controlnet(source: str, dtype: Any) -> Any:
    """Load a ControlNet of diffusers from a folder or the hub, of safetensors and without code of its own.

    Raises:
        LoadError, ModelError: if it is no ControlNet, or its files are missing or corrupt.
    """
    import diffusers

    from ditile.runner.load import choose_weight_dtype, convert_build_errors
    from ditile.runner.model_files import check_model_folder, check_weight_source

    check_weight_source(source, "controlnet")
    if os.path.isdir(source):
        check_model_folder(Path(source))
    with convert_build_errors(source):
        # Any class of diffusers reads the config, which names the class of the model.
        name = str(diffusers.FluxControlNetModel.load_config(source).get("_class_name"))
        cls = getattr(diffusers, name, None)
        if cls is None or "ControlNet" not in name or not issubclass(cls, diffusers.ModelMixin):
            raise ModelError(f"controlnet={source!r} is a {name}, and no ControlNet of diffusers")
        model, info = cls.from_pretrained(
            source,
            torch_dtype=choose_weight_dtype(source, dtype),
            use_safetensors=True,
            output_loading_info=True,
        )
    missing = sorted(info["missing_keys"])
    if missing:
        raise LoadError(f"controlnet={source!r} lacks {len(missing)} weight(s), such as {missing[0]}; copy it again")
    return model


def silence_libraries() -> None:
    """Silence progress bars and empty warnings of libraries, and the log of diffusers on all ranks except rank 0."""
    env.silence_library_imports()
    # diffusers gives this argument to huggingface_hub, which warns of it.
    warnings.filterwarnings("ignore", message="The `local_dir_use_symlinks` argument")
    # peft warns of each LoRA after the first.
    warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")
    from transformers.utils import logging

    # This comes before diffusers is imported, which transformers would warn about.
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    from diffusers.utils import logging as diffusers_logging

    diffusers_logging.disable_progress_bar()
    # diffusers warns of each cast to a type, and then lists the modules that should not be cast: often none.
    models_log = diffusers_logging.get_logger("diffusers.models.modeling_utils")
    models_log.addFilter(env.PhraseFilter("should be kept in float32: []"))
    # diffusers logs the text that it cuts off a prompt; the runner says how much is read.
    for handler in diffusers_logging.get_logger("diffusers").handlers:
        handler.addFilter(env.PhraseFilter("of your input was truncated"))
    # diffusers warns where a LoRA leaves a text encoder as it is; ditile names the unapplied parts of a LoRA itself.
    for name in ("diffusers.loaders.lora_base", "diffusers.loaders.peft"):
        diffusers_logging.get_logger(name).addFilter(env.PhraseFilter("No LoRA keys associated to"))
    place = env.read_torchrun_place()
    if place is not None and place.rank:
        diffusers_logging.set_verbosity_error()


def load_loras(pipe: Any, cache: CacheOptions) -> None:
    """Load the LoRAs of every call with their scales, and add them to the weights if the options say so.

    Raises:
        ModelError: if one cannot be read, does not fit the model, or cannot be added to its weights.
    """
    if not cache.loras:
        return
    from ditile.runner.lora import fuse_loras, load_lora, select_loras

    components = [choice.component for choice in cache.loras.values()]
    second = DENOISERS[1]
    for name, choice in cache.loras.items():
        # With None a warning says that the second transformer gets nothing.
        into_second = None
        if second in components:
            into_second = choice.component == second
        load_lora(pipe, choice.source, adapter_name=name, load_into_transformer_2=into_second)
    select_loras(pipe, cache.lora_scales)
    if cache.fuse_lora:
        fuse_loras(pipe)


def enable_working_cache(target: Any, configs: Mapping[str, Any], label: str = "") -> None:
    """Enable a cache of a pipeline or runner.

    Args:
        configs: the keyword arguments of `enable_cache`.
        label: names the cache in errors.

    Raises:
        ModelError: also if nothing could be left out, for which the API only warns.
    """
    from ditile.cache.cached import IdleCacheWarning
    from ditile.runner.caching import enable_cache

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", IdleCacheWarning)
            enable_cache(target, **configs)
    except IdleCacheWarning as warning:
        prefix = f"{label!r}: " if label else ""
        raise ModelError(f"{prefix}{warning}") from warning


def choose_warm_steps(plan: Plan, *, is_cached: bool, num_preparing_steps: int = 0) -> int | None:
    """Choose the steps of a call that meets all shapes of a longer one. None stands for all steps of the longer one: a
    cache counts on them.

    Args:
        is_cached: whether a cache is enabled.
        num_preparing_steps: `Runner.num_preparing_steps`.
    """
    if is_cached:
        return None
    return max(LEAST_STEPS, plan.warmup + STALE_STEPS) + num_preparing_steps


def warm_runner(runner: Runner, call: CallArguments, *, is_cached: bool) -> None:
    """Make a call of few steps, and drop its result. Every rank calls it.

    Args:
        call: the arguments of the call that follows. Nothing remains of its prompt, seed or numbers.
        is_cached: whether a cache is enabled.

    Raises:
        DitileError: as the call itself.
    """
    from ditile.model.pipeline_calls import list_call_parameters

    preparing = runner.num_preparing_steps
    warm_steps = choose_warm_steps(runner.plan, is_cached=is_cached, num_preparing_steps=preparing)
    parameters = list_call_parameters(runner.pipe)
    steps = call.get("num_inference_steps")
    if steps is None and "num_inference_steps" in parameters:
        steps = parameters["num_inference_steps"].default
    # With `strength` only a part of the steps runs, and a list of sigmas has its own length.
    has_fixed_steps = "strength" in parameters or call.get("sigmas") is not None
    if warm_steps is not None and is_whole_number(steps) and not has_fixed_steps:
        call = {**call, "num_inference_steps": min(steps, warm_steps)}
    runner(**call, output_on="first")


@contextmanager
def silence_advice() -> Iterator[None]:
    """Log only errors within this context. Advice on a plan does not fit the few steps of a check or of a short
    call."""
    log = logging.getLogger("ditile")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)

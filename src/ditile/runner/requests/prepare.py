"""Loads a model and divides it as options say: the runner that draws requests."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ditile.distributed import env
from ditile.distributed.heartbeat import is_out_of_memory
from ditile.distributed.torchrun import join_torchrun
from ditile.plan.errors import DitileError, LoadError, ModelError, PlanError
from ditile.plan.plan import Plan
from ditile.plan.units import format_bytes
from ditile.runner.model_files import find_model_source
from ditile.runner.requests.cache_options import CacheOptions
from ditile.runner.requests.conditions import choose_pipeline_class
from ditile.runner.requests.console import Status
from ditile.runner.requests.options import EngineOptions
from ditile.runner.requests.pipelines import check_prompt_cleaner, enable_required_tiling, returns_videos

if TYPE_CHECKING:
    from ditile.runner.runner import Runner


def prepare_runner(
    model: str,
    engine: EngineOptions,
    plan: Plan,
    cache: CacheOptions,
    *,
    conditions: Collection[str] = (),
    controlnet: str | None = None,
) -> tuple[Any, Runner]:
    """A pipeline on this rank, divided, quantized and with its cache. All ranks call it.

    Args:
        model: a bundled model, a folder or a hub id.
        engine, plan, cache: how to compute.
        conditions: what the calls will start from, which the pipeline's class has to take.
        controlnet: a ControlNet to load: a folder or a hub id.

    Raises:
        DitileError: if the model, the plan or an option does not fit.
    """
    from ditile.model.hooks.compile import set_compile_configs
    from ditile.runner.load import find_pipeline_kind, load
    from ditile.runner.runner import parallelize

    silence_libraries()
    if engine.threads is not None:
        _set_num_threads(engine.threads)
    pipeline = find_pipeline_kind(find_model_source(model))
    returns_videos(pipeline)  # or refuses it
    check_prompt_cleaner(pipeline)
    _check_model_guides(pipeline, model, plan)
    # A LoRA needs whole weights; tensor parallelism then cuts its factors with them.
    needs_whole_model = cache.lora is not None and plan.tensor > 1
    with Status(f"loading {model}{_describe_weights(model)}") as loading:
        pipe: Any = load(model, dtype=engine.dtype, plan=None if needs_whole_model else plan)
    enable_required_tiling(pipe)
    if conditions:
        pipe = switch_to_conditions(pipe, conditions, controlnet, engine.dtype)
    if cache.lora is not None:
        load_lora_weights(pipe, cache.lora)
        if cache.fuse_lora:
            pipe.fuse_lora()
            pipe.unload_lora_weights()
    if engine.compile:
        set_compile_configs(compute_comm_overlap=not cache.disable_compute_comm_overlap)
    join_torchrun(engine.stall_timeout)
    runner = parallelize(
        pipe,
        plan,
        device=engine.device,
        text_after=engine.text_after,
        attention=engine.attention,
        cp_plan=cache.cp_plan,
        compile=engine.compile,
        cuda_graphs=engine.cuda_graphs,
    )
    _enable_cache_and_quantization(runner, cache)
    loading.follow_up("the model is ready; the prompt is encoded before the first step")
    return pipe, runner


def _check_model_guides(pipeline: Any, model: str, plan: Plan) -> None:
    """Raises `PlanError` for cfg with a model of which no call has a second branch of guidance."""
    from ditile.model.pipeline_calls import read_guidance_rule
    from ditile.runner.load import read_model_index

    if plan.cfg == 1 or pipeline is None:
        return
    rule = read_guidance_rule(pipeline, read_model_index(find_model_source(model)))
    if rule is not None and not rule.scales and (reason := rule.explain_cfg_refusal(plan.cfg, pipeline.__name__, {})):
        raise PlanError(reason)


def _describe_weights(model: str) -> str:
    """How many bytes of weights a model's folder has; nothing for one of the hub, which may still be fetched."""
    source = find_model_source(model)
    if not isinstance(source, Path):
        return ""
    return f", {format_bytes(sum(path.stat().st_size for path in source.glob('*/*.safetensors')))} of weights"


def switch_to_conditions(
    pipe: Any, conditions: Collection[str], controlnet: str | None = None, dtype: str | None = None
) -> Any:
    """The pipeline of the family of another one, on the same models, whose call takes some conditions.

    Raises:
        LoadError, ModelError: if diffusers has none, or the ControlNet cannot be loaded or is of another family.
    """
    from ditile.model.pipeline_calls import find_call_owner
    from ditile.runner.siblings import build_sibling_pipeline

    own = find_call_owner(pipe)
    kind = choose_pipeline_class(own, conditions, pipe.config, has_controlnet=controlnet is not None)
    if controlnet is None and kind is own:
        return pipe
    parts = {} if controlnet is None else {"controlnet": load_controlnet(controlnet, dtype or pipe.dtype)}
    if kind is pipe:
        pipe.update_components(**parts)
        return pipe
    return build_sibling_pipeline(kind, pipe, {**pipe.components, **parts})


def load_controlnet(source: str, dtype: Any) -> Any:
    """A ControlNet of diffusers, from a folder or the hub: of safetensors, and without code of its own.

    Raises:
        LoadError, ModelError: if it is none, or its files are missing or corrupt.
    """
    import diffusers

    from ditile.runner.load import choose_weight_dtype, convert_build_errors
    from ditile.runner.model_files import check_model_folder, check_weight_source

    check_weight_source(source, "controlnet")
    if os.path.isdir(source):
        check_model_folder(Path(source))
    with convert_build_errors(source):
        named = diffusers.FluxControlNetModel.load_config(source).get("_class_name")
        cls: Any = getattr(diffusers, str(named), None)
        if cls is None or "ControlNet" not in str(named) or not issubclass(cls, diffusers.ModelMixin):
            raise ModelError(f"controlnet={source!r} is a {named}, and no ControlNet of diffusers")
        wanted = choose_weight_dtype(source, dtype)
        model, info = cls.from_pretrained(source, torch_dtype=wanted, use_safetensors=True, output_loading_info=True)
    if lacking := sorted(info["missing_keys"]):
        raise LoadError(f"controlnet={source!r} lacks {len(lacking)} weight(s), such as {lacking[0]}; copy it again")
    return model


def silence_libraries() -> None:
    """Silences the progress bars of libraries, and the log of diffusers on all ranks but rank 0."""
    env.silence_library_imports()
    # diffusers gives this argument to huggingface_hub, which warns of it.
    warnings.filterwarnings("ignore", message="The `local_dir_use_symlinks` argument")
    from transformers.utils import logging

    # Before diffusers is imported, which transformers would warn about.
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    from diffusers.utils import logging as diffusers_logging

    diffusers_logging.disable_progress_bar()
    place = env.read_torchrun_place()
    if place is not None and place.rank:
        diffusers_logging.set_verbosity_error()


def load_lora_weights(pipe: Any, source: str, name: str | None = None) -> None:
    """Loads a LoRA into this rank's modules.

    Args:
        pipe: the pipeline.
        source: a file, a folder or a hub id.
        name: of its adapter; by default that of peft.

    Raises:
        ModelError: if it cannot be read, or does not fit the model.
    """
    import safetensors

    from ditile.runner.lora import load_lora

    path = Path(source)
    place = {"weight_name": path.name} if path.is_file() else {}
    try:
        load_lora(pipe, str(path.parent) if place else source, adapter_name=name, **place)
    except DitileError:
        raise
    except (OSError, ValueError, RuntimeError, KeyError, ImportError, safetensors.SafetensorError) as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(f"lora={source!r} cannot be loaded: {' '.join(str(error).split())[:300]}") from error


def _enable_cache_and_quantization(runner: Runner, cache: CacheOptions) -> None:
    """Quantizes this rank's weights, and enables the cache.

    Raises:
        ModelError: also if nothing could be left out, for which the API only warns.
    """
    from ditile.cache.cached import IdleCacheWarning
    from ditile.runner.caching import enable_cache

    wanted = cache.build_cache_arguments()
    wanted.pop("attention_backend", None)  # `parallelize` has set it
    if wanted["cache_config"] is None and "quantize_config" not in wanted:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", IdleCacheWarning)
            enable_cache(runner, **wanted)
    except IdleCacheWarning as warning:
        raise ModelError(str(warning)) from warning


def _set_num_threads(count: int) -> None:
    import torch

    torch.set_num_threads(count)

"""Loading a pipeline by the name of a bundled model, from a folder, or from the hub. Safetensors only.

For a plan, a rank reads its share of the weights and nothing else (docs/loading.md).

Files that are missing or cut short, and pickles, are refused before any weight is read. huggingface_hub keeps a lock
while it downloads a file, and other ranks wait for the lock. A waiting rank reports progress as long as the model's
folder in the cache grows.
"""

from __future__ import annotations

import http.client
import os
import re
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ditile.distributed import env, files
from ditile.distributed.heartbeat import is_out_of_memory
from ditile.model.known import (
    ASSETS,
    find_component_folder,
    find_known_model,
    list_bundled_models,
    list_known_models,
    list_published_models,
)
from ditile.plan.checks import is_number, suggest_nearest
from ditile.plan.errors import DitileError, LoadError, ModelError
from ditile.plan.plan import Plan, require_plan

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline, ModularPipeline


PERIOD = 1.0
"""Seconds between two looks at a folder that grows."""
HUB_TIMEOUT = 5.0
"""Seconds in which the hub must answer."""
MOST_IN_CONFIGS = {r"(\w+_)?(layers?|blocks?|depth)(_per_\w+)?": 1000, "num_train_timesteps": 10**6}
"""Patterns of names in a config, and the largest number that they may have."""
_BUILD_ERRORS = (
    *(ValueError, TypeError, AttributeError, LookupError, ArithmeticError, AssertionError),
    *(RuntimeError, ImportError),
)
MODEL_INDEX, MODULAR_INDEX = "model_index.json", "modular_model_index.json"
"""Files, one of which makes a folder a pipeline; where both are, it is the first one's."""
MODULAR_MARK = "_blocks_class_name"
"""The key that the index of a modular pipeline alone has."""
FRAME_RATE = "fps"
"""The key of `generation.json` for the frames a second of a file."""
DTYPES = ("float32", "bfloat16", "float16")


def defaults(model: str) -> dict[str, Any]:
    """The call arguments that suit a model: its size, steps, guidance and others; the command line uses them too.

        runner(prompt, **ditile.defaults("shapes-flux"))

    They are those of the `generation.json` in the model's folder, and for a published model those that its authors
    name. Without either there are none, and the pipeline's own apply.

    Args:
        model: of a bundled or published model; or a folder, or a hub id.

    Raises:
        ModelError: if it is not known.
        LoadError: if the file is no JSON object.
    """
    return {name: value for name, value in read_generation_defaults(model).items() if name != FRAME_RATE}


def read_generation_defaults(model: str) -> dict[str, Any]:
    """The same, and the rate of a video's files, which is no argument of the call. Raises as `defaults` does."""
    source = _locate_model(model, weights=False)
    path = source / "generation.json" if isinstance(source, Path) else None
    return read_json_object(path) if path is not None and path.exists() else {}


def find_model_source(name: str, variant: str | None = None, *, weights: bool = True) -> Path | str:
    """Where a model is: the folder of a bundled or local one, or the hub id itself.

    Args:
        name: of a bundled or published model; or a folder, or a hub id.
        variant: of the files that will be read.
        weights: whether they will be read; to say how a model would be divided, configs are enough, and those of
            published models come with this package.

    Raises:
        ModelError: if `name` is none of them.
        LoadError: if a folder is no pipeline, or its weights are missing, cut short or pickles; or if a model of the
            hub is not in its cache, and the hub cannot be reached.
    """
    source = _locate_model(name, weights=weights)
    if isinstance(source, str):
        check_hub_access(source)
        return source
    return check_pipeline_folder(source, variant) if weights else source


def _locate_model(name: str, *, weights: bool) -> Path | str:
    """The folder or the hub id of a model, of which nothing else was checked."""
    if name and isinstance(name, str | Path):
        known = find_known_model(str(name))
        folder = Path(name)
        if known is not None and (known.hub_id is None or find_index_file(folder) is None):
            if weights and known.hub_id is not None:
                return known.hub_id
            folder = known.folder
        # Unlike the methods of Path, these do not raise for a name that is too long or has a NUL.
        if os.path.isdir(folder):
            return _require_model_index(folder)
        if is_hub_id(str(name)) and not os.path.exists(folder):
            return str(name)
    raise ModelError(_describe_unknown_model(name))


def _describe_unknown_model(name: Any) -> str:
    """Why a name is no model's, and what would be one."""
    hint = suggest_nearest(str(name), [model.name for model in list_known_models()], "")
    hint = hint and f"{hint} "
    text = str(name) if isinstance(name, str | Path) else ""
    if os.path.isfile(text):
        return (
            f"model {name!r} is a file; {hint}give the folder of a pipeline; a checkpoint in one file becomes a folder "
            "by diffusers' from_single_file and save_pretrained"
        )
    if text.startswith((".", "~")) or "/" in text or os.sep in text:
        return (
            f"model {name!r}: there is no such folder, and it is not a hub id (owner/name); {hint}give a "
            "folder that save_pretrained of a pipeline wrote, a hub id, or a name that ditile models lists"
        )
    return (
        f"model {name!r} is not known; {hint}bundled are {', '.join(list_bundled_models())}; published "
        f"{', '.join(list_published_models())}; a folder saved by save_pretrained and a hub id (owner/name) work too"
    )


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of a hub id with its owner."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name


def check_weight_source(source: str, option: str) -> None:
    """Checks what an option names beside the model, such as a LoRA.

    Raises:
        ModelError: if it is neither there nor a hub id.
        LoadError: if it is a hub id, and is not in the hub's cache and cannot be fetched.
    """
    if source and os.path.exists(source):
        return
    if not is_hub_id(source):
        raise ModelError(f"{option}={source!r} is no file; give one, a folder or a hub id (owner/name)")
    check_hub_access(source, "*", option)


def load(
    name: str, *, dtype: torch.dtype | str | None = None, plan: Plan | None = None, variant: str | None = None
) -> DiffusionPipeline | ModularPipeline:
    """The pipeline of a bundled model, a folder or a hub id, on the CPU.

    A folder with a `modular_model_index.json` and no `model_index.json` is a modular pipeline of diffusers. Its own
    components are read as those of any other, and those that its index places elsewhere are read there.

    Args:
        name: of a bundled model, such as shapes-flux; or a folder, or a hub id.
        dtype: a torch dtype or its name. By default float32 for bundled models and where there is no GPU, else
            bfloat16; float16 only if asked for.
        plan: reads only what this rank of the plan owns; `parallelize` takes the pipeline with a plan that divides it
            alike. By default the whole pipeline is read.
        variant: of the files, such as "fp16", for the components that have it.

    Raises:
        ModelError: if the name, the dtype or the pipeline's class is not known, or cannot be divided as planned, or a
            component needs a package that is not installed.
        PlanError: if the plan does not fit the model, or does not use all ranks.
        LoadError: if files are missing, corrupt or pickles, or the hub cannot be reached.
    """
    env.drop_import_complaints()
    # Not at the top of the module, because listing models and reading their options must not import torch.
    import diffusers

    from ditile.distributed.mesh import find_process_rank
    from ditile.distributed.torchrun_watch import START_SECONDS, begin_watch
    from ditile.model.hooks.placeholders import refuse_saving
    from ditile.runner.partial import (
        check_component_packages,
        find_pipeline_kind,
        load_modular_pipeline,
        load_partial_components,
        load_shared_components,
        load_whole_models,
        read_model_index,
    )

    source = find_model_source(name, variant)
    if plan is not None:
        begin_watch(None, START_SECONDS)
    wanted = choose_weight_dtype(source, dtype)
    rank = 0 if plan is None else find_process_rank(require_plan(plan))
    with convert_build_errors(name), report_download_progress(source) if isinstance(source, str) else nullcontext():
        check_component_packages(source)
        partial = {} if plan is None else load_partial_components(source, plan, rank, wanted, variant)
        own = partial | load_whole_models(source, wanted, variant, apart=partial)
        own |= load_shared_components(source, apart=own)
        pipe: DiffusionPipeline | ModularPipeline
        if MODULAR_MARK in read_model_index(source):
            pipe = load_modular_pipeline(source, wanted, variant, own)
        else:
            # Not of DiffusionPipeline, which reads anew what a signature has a default for, such as Wan's transformers.
            pipe = (find_pipeline_kind(source) or diffusers.DiffusionPipeline).from_pretrained(
                source, dtype=wanted, use_safetensors=True, variant=variant, **own
            )
    if partial:
        refuse_saving(ExitStack(), pipe, partial.values())
    return pipe


@contextmanager
def convert_build_errors(name: str, refusal: str = "is not one that diffusers can build here") -> Iterator[None]:
    """Turns what diffusers and transformers raise for a model that they cannot build into an error of ditile.

    Args:
        name: of the model.
        refusal: what the error says of it.

    Raises:
        LoadError: for files that are missing or corrupt.
        ModelError: for a config that describes no model of theirs; such code raises almost anything. What says that
            there is no more memory stays as it is.
    """
    import safetensors
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except DitileError:
        raise
    except (safetensors.SafetensorError, OSError, *_BUILD_ERRORS, StrictDataclassError) as error:
        if is_out_of_memory(error):
            raise
        what = _join_error_lines(error)
        if isinstance(error, safetensors.SafetensorError):
            raise LoadError(f"model {name!r} has a corrupt safetensors file: {what}") from error
        if isinstance(error, OSError):
            raise LoadError(f"model {name!r} cannot be loaded: {what}") from error
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ModelError(f"model {name!r} {refusal}: {kind}{what}") from error


def check_pipeline_folder(folder: Path, variant: str | None = None) -> Path:
    """The folder, after a check that it is a pipeline and that its weights (of a variant) are there and whole.

    Raises:
        LoadError: if something is missing, as far as the headers of the weights say.
    """
    for part, (library, _) in list_own_components(folder, read_json_object(find_index_file(folder) or folder)):
        if library is not None:
            _check_component(find_component_folder(folder, part), variant)
    return folder


def list_own_components(source: Path | str, index: Mapping[str, Any]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """The components that a pipeline has beside its index: name, (library, class).

    Args:
        source: the folder, or the hub id.
        index: what its `model_index.json` or `modular_model_index.json` says. A modular pipeline may have components
            in other places, or have left some out.
    """
    for name, entry in index.items():
        if not isinstance(entry, list):
            continue
        if len(entry) == 2:
            yield name, (entry[0], entry[1])
        elif len(entry) == 3 and isinstance(entry[2], dict) and entry[2].get("subfolder", name) == name:
            where, hint = entry[2].get("pretrained_model_name_or_path"), entry[2].get("type_hint")
            is_here = isinstance(source, Path) and ((source / name).is_dir() or _is_same_folder(where, source))
            library, kind = hint if isinstance(hint, list) and len(hint) == 2 else entry[:2]
            if (is_here or where == source) and kind is not None:
                yield name, (library, kind)


def _is_same_folder(name: Any, folder: Path) -> bool:
    return isinstance(name, str) and Path(name).resolve() == folder.resolve()


def find_index_file(folder: Path) -> Path | None:
    """The file that says what a pipeline's folder has; None if it is no pipeline."""
    return next((path for name in (MODEL_INDEX, MODULAR_INDEX) if os.path.exists(path := folder / name)), None)


def check_model_folder(folder: Path) -> None:
    """Raises `LoadError` for a folder that is no model of safetensors, such as one of pickles."""
    if not (folder / "config.json").exists():
        raise LoadError(f"{folder} has no config.json; give a folder that save_pretrained of a model wrote")
    _check_component(folder, None)


def _require_model_index(folder: Path) -> Path:
    if find_index_file(folder) is None:
        raise LoadError(f"{folder} has no model_index.json; give a folder that save_pretrained of a pipeline wrote")
    return folder


def _check_component(part: Path, variant: str | None) -> None:
    """Raises `LoadError` for a component that is missing, or that has a config.json and no whole weights beside it."""
    if not part.is_dir():
        raise LoadError(f"{part} is missing, and the index beside it names it; copy the whole model")
    for path in (part / "config.json", part / "scheduler_config.json"):
        if path.exists():
            check_config_counts(read_json_object(path), path)
    if not (part / "config.json").exists():
        return
    files = _list_weight_files(part, variant)
    if not files and (pickles := sorted([*part.glob("*.bin"), *part.glob("*.pt"), *part.glob("*.ckpt")])):
        raise LoadError(
            f"{part} has only {pickles[0].name}, a pickle, which can run code when it is read; "
            "convert it with save_pretrained(..., safe_serialization=True)"
        )
    if not files:
        raise LoadError(f"{part} has no weights; a *.safetensors file belongs there")
    for file in files:
        _check_weight_file(file)


def _list_weight_files(part: Path, variant: str | None) -> list[Path]:
    """The files that are there or that an index names: those of the variant if it has some, else all."""
    indices = list(part.glob(f"*.safetensors.index.{variant}.json")) if variant is not None else []
    files = set() if indices or variant is None else set(part.glob(f"*.{variant}.safetensors"))
    if not indices and not files:
        indices, files = list(part.glob("*.safetensors.index.json")), set(part.glob("*.safetensors"))
    for index in indices:
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise LoadError(f"{index} is no index of safetensors files; copy it again")
        files |= {part / file for file in weight_map.values()}
    return sorted(files)


def _check_weight_file(file: Path) -> None:
    import safetensors

    if not file.exists():
        raise LoadError(f"{file} is missing, and the index beside it names it; copy the whole model")
    try:
        with safetensors.safe_open(file, framework="np"):
            return
    except (safetensors.SafetensorError, OSError) as error:
        raise LoadError(f"{file} is no whole safetensors file ({_join_error_lines(error)}); copy it again") from error


def check_config_counts(config: Mapping[str, Any], path: Path | str) -> None:
    """Raises `LoadError` for a config with so many layers or timesteps that building its model would never end."""
    for name, value in config.items():
        most = next((most for pattern, most in MOST_IN_CONFIGS.items() if re.fullmatch(pattern, str(name))), None)
        todo = [value] if most is not None else []
        while todo:
            each = todo.pop()
            todo += each if isinstance(each, list) else ()
            if most is not None and is_number(each) and each > most:
                raise LoadError(f"{path} says {name}={each}, and no model has more than {most}; copy it again")


def choose_weight_dtype(source: Path | str, wanted: torch.dtype | str | None) -> torch.dtype:
    """The type of a model's weights: `wanted` if it is given, else bfloat16 on GPUs, and float32 for bundled models.

    Raises:
        ModelError: if the type is not known.
    """
    import torch

    if isinstance(wanted, torch.dtype):
        return wanted
    weight_dtype: torch.dtype = getattr(torch, choose_dtype_name(source, wanted))
    return weight_dtype


def choose_dtype_name(source: Path | str, wanted: str | None, *, on_gpu: bool | None = None) -> str:
    """The name of what `choose_weight_dtype` chooses. torch is imported only to look for GPUs.

    Args:
        on_gpu: whether there are GPUs; None to look.
    """
    if wanted is None:
        if isinstance(source, Path) and source.resolve().parent == ASSETS.resolve():
            return "float32"
        if on_gpu is None:
            # A process that starts ranks needs torch for nothing else, and loading and leaving it take seconds.
            import torch

            on_gpu = torch.cuda.is_available()
        return "bfloat16" if on_gpu else "float32"
    if wanted not in DTYPES:
        raise ModelError(f"dtype={wanted!r} is not known; try {', '.join(DTYPES)}")
    return wanted


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a file of JSON. Raises `LoadError` if there is none."""
    try:
        content = files.parse_json(files.read_text(path))
    except (OSError, ValueError) as error:
        raise LoadError(f"{path} is no readable JSON: {_join_error_lines(error)}") from error
    if not isinstance(content, dict):
        raise LoadError(f"{path} is no JSON object")
    return content


def _join_error_lines(error: Exception) -> str:
    """An error's message on one line."""
    return " ".join(str(error).split()) or type(error).__name__


@lru_cache(maxsize=64)  # once it is there it stays there
def check_hub_access(repository: str, file: str = "*model_index.json", option: str = "model") -> None:
    """Raises `LoadError` at once for what is not in the hub's cache and cannot be fetched.

    Without this, huggingface_hub would try again for half a minute, for each of several files.

    Args:
        repository: its hub id.
        file: a pattern of a file that it has.
        option: that names it.
    """
    from huggingface_hub import constants

    if any(find_blob_folder(repository).parent.glob(f"snapshots/*/{file}")):
        return
    lacks = f"{option} {repository!r} is not in the hub's cache {constants.HF_HUB_CACHE}"
    if constants.HF_HUB_OFFLINE:
        raise LoadError(f"{lacks}, and HF_HUB_OFFLINE is set; unset it, or give a folder")
    if reason := _find_connection_error(constants.ENDPOINT):
        raise LoadError(f"{lacks}, and the network does not reach {constants.ENDPOINT} ({reason}); give a folder")


def _find_connection_error(url: str) -> str | None:
    """Why a server cannot be reached; None if it answers, whatever it says."""
    if "all" in urllib.request.getproxies():  # such as SOCKS, which urllib does not speak
        return None
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=HUB_TIMEOUT):
            return None
    except (urllib.error.HTTPError, http.client.HTTPException, ssl.SSLError):
        return None
    except urllib.error.URLError as error:
        return None if isinstance(error.reason, ssl.SSLError) else str(error.reason)
    except OSError as error:
        return str(error)


@contextmanager
def report_download_progress(repository: str) -> Iterator[None]:
    """Reports progress of this rank of `launch` whenever the cache folder of a repository (its hub id) has grown.

    A download that hangs reports nothing, so `launch` ends the run after its stall timeout.
    """
    if env.read_progress_fd() is None:
        yield
        return
    left = threading.Event()
    thread = threading.Thread(target=_watch_download, args=(find_blob_folder(repository), left), daemon=True)
    thread.start()
    try:
        yield
    finally:
        left.set()
        thread.join()


def find_blob_folder(repository: str) -> Path:
    """The folder of the hub's cache with the files of a model, unfinished ones included."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repository, repo_type="model"), "blobs")


def _watch_download(folder: Path, left: threading.Event) -> None:
    seen = _list_file_stats(folder)
    while not left.wait(PERIOD):
        before, seen = seen, _list_file_stats(folder)
        if seen != before:
            env.report_progress()


def _list_file_stats(folder: Path) -> dict[str, tuple[int, int]]:
    """The size and time of each file."""
    file_stats = {}
    for path in folder.glob("*"):
        # The hub renames a file that is complete, perhaps between `glob` and `stat`.
        with suppress(FileNotFoundError):
            facts = path.stat()
            file_stats[path.name] = (facts.st_size, facts.st_mtime_ns)
    return file_stats

"""Facts of pipelines: what they make, and the names under which their calls take a video's length and rate.

Most are known by the class, before anything is loaded.

`convert_value_errors` turns a refusal of the pipeline's own code into an error of ditile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import traceback
from collections.abc import Iterator
from typing import Any, Literal

from ditile.model.known import find_known_model
from ditile.plan.errors import DitileError, ModelError, join_error_lines
from ditile.plan.extras import require_extra
from ditile.plan.option_classes import CallArguments
from ditile.plan.shape import FRAME_COUNTS
from ditile.runner.model_files import find_model_source

OutputKind = Literal["image", "video", "sound"]

VIDEO_FIELDS = ("frames", "video", "videos")
"""The names of a result's field that holds videos."""
FRAME_RATES = ("frame_rate", "fps")
"""The names of the argument for a video's rate; a class has at most one of them."""
SOUND_LENGTHS = ("audio_end_in_s", "audio_duration", "audio_duration_s", "audio_length_in_s", "duration")
"""The names of the argument for the seconds of a sound."""
_TEMPORAL_RATIOS = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio", "vae_temporal_scale_factor")
_VAES_OF_TILES = frozenset({"AutoencoderKLAllegro"})
"""VAEs that can decode only in tiles, and otherwise raise after the last step. They take any number of frames: they are
not causal, and their pipelines cut off what is too much."""


def find_model_output(model: str, *, check_packages: bool = False) -> OutputKind:
    """Find what a model makes. For a bundled model this needs no torch.

    Args:
        check_packages: whether to refuse a model whose class needs a package that is not installed.

    Raises:
        ModelError: if its class is known to return neither images nor videos nor sounds.
    """
    known = find_known_model(model)
    if known is not None and known.hub_id is None:
        return "video" if known.is_video else "image"
    from ditile.runner.load import check_component_packages, find_pipeline_kind, list_components

    source = find_model_source(model, weights=False)
    pipeline = find_pipeline_kind(source)
    if check_packages:
        check_prompt_cleaner(pipeline)
        check_component_packages(list_components(source))
    return find_output_kind(pipeline)


def find_output_kind(pipeline: Any) -> OutputKind:
    """Find what a class of pipelines returns; images for a class that is not known.

    Args:
        pipeline: the class, or a modular pipeline; None if it is not known.

    Raises:
        ModelError: if it is known to return neither images nor videos nor sounds.
    """
    if pipeline is None:
        return "image"
    from diffusers.utils.outputs import BaseOutput

    from ditile.model.pipeline_calls import is_modular

    names: list[str] = []
    if is_modular(pipeline):
        names = [output.name for output in pipeline._blocks.outputs]
    else:
        # Take the fields of all output classes in the module of the pipeline's class.
        for cls in vars(sys.modules[pipeline.__module__]).values():
            if isinstance(cls, type) and issubclass(cls, BaseOutput) and dataclasses.is_dataclass(cls):
                names += [field.name for field in dataclasses.fields(cls)]
    if not names or "images" in names:
        return "image"
    if not set(names).isdisjoint(VIDEO_FIELDS):
        return "video"
    if "audios" in names:
        return "sound"
    raise ModelError(
        f"{name_pipeline(pipeline)} returns {names[0]}, and images, videos and sounds are written here; in Python, "
        "ditile.parallelize(pipe, plan)(...) returns the pipeline's own result"
    )


def name_pipeline(pipeline: Any) -> str:
    """Return the name of a class of pipelines, or of the class of a modular pipeline."""
    return str(getattr(pipeline, "__name__", type(pipeline).__name__))


def check_prompt_cleaner(pipeline: Any) -> None:
    """Raise `ModelError` if a class cleans prompts by ftfy, which is not installed. Its call would fail."""
    # Code that asks `is_ftfy_available` can do without ftfy. The names in the code of `basic_clean` show both.
    clean = getattr(sys.modules.get(getattr(pipeline, "__module__", "")), "basic_clean", None)
    names = getattr(getattr(clean, "__code__", None), "co_names", ())
    if pipeline is None or "ftfy" not in names or "is_ftfy_available" in names:
        return
    require_extra("video", f"{name_pipeline(pipeline)} cleans prompts, and", ["ftfy"])


def enable_required_tiling(pipe: Any) -> None:
    """Turn on tiles for a VAE that cannot decode without them."""
    vae: Any = getattr(pipe, "vae", None)
    if type(vae).__name__ in _VAES_OF_TILES:
        vae.enable_tiling()


def find_argument(pipe: Any, names: tuple[str, ...]) -> str | None:
    """Find the first of these names that a pipeline's call takes."""
    from ditile.model.pipeline_calls import list_call_parameters

    parameters = list_call_parameters(pipe)
    return next((name for name in names if name in parameters), None)


def find_frame_rate(pipe: Any, call: CallArguments) -> float | None:
    """Find the frames per second of a call, or the default of its class. None if the class has no such argument."""
    from ditile.model.pipeline_calls import list_call_parameters

    name = find_argument(pipe, FRAME_RATES)
    if name is None:
        return None
    rate = call.get(name, list_call_parameters(pipe)[name].default)
    return float(rate) if isinstance(rate, int | float) else None


def find_frames_ratio(pipe: Any) -> int:
    """Return the number of frames that a VAE makes from each latent frame after the first. 1 if any number of frames is
    possible."""
    if type(getattr(pipe, "vae", None)).__name__ in _VAES_OF_TILES:
        return 1
    for name in _TEMPORAL_RATIOS:
        ratio = getattr(pipe, name, None)
        if isinstance(ratio, int):
            return ratio
    return 1


def check_num_frames(pipe: Any, call: CallArguments) -> None:
    """Raise `ModelError` for a number of frames that the pipeline's VAE cannot make."""
    from ditile.model.pipeline_calls import list_call_parameters

    name = find_argument(pipe, FRAME_COUNTS)
    if name is not None and isinstance(call.get(name), int):
        default = list_call_parameters(pipe)[name].default
        check_frame_count(type(pipe).__name__, call[name], find_frames_ratio(pipe), default)


def check_frame_count(pipeline: str, frames: int, ratio: int, default: Any) -> None:
    """Raise `ModelError` for a number of frames that a causal VAE cannot make. It makes one frame, and then
    groups of `ratio` frames.

    Args:
        pipeline: the name of the class.
        default: the class's default, which is always allowed: some classes make more frames, and cut them off.
    """
    too_many = (frames - 1) % ratio
    if frames == default or too_many == 0:
        return
    below = frames - too_many
    raise ModelError(
        f"frames={frames}: the VAE of {pipeline} makes 1 + a multiple of {ratio}; try frames={below} or "
        f"frames={below + ratio}"
    )


@contextlib.contextmanager
def convert_value_errors(pipe: Any) -> Iterator[None]:
    """Turn a `ValueError` of the pipeline's own code, such as about a size, into a `ModelError`. Others are bugs."""
    from ditile.model.pipeline_calls import iterate_blocks

    try:
        yield
    except DitileError:
        raise
    except ValueError as error:
        own_modules: set[str] = set()
        for owner in (pipe, *iterate_blocks(pipe)):
            own_modules.update(cls.__module__ for cls in type(owner).__mro__)
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__") not in own_modules:
            raise
        raise ModelError(f"{type(pipe).__name__} refuses this call: {join_error_lines(error)}") from error

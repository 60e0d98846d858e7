"""Facts of pipeline classes that are known before anything is loaded: their results, and their image-to-image class.

`convert_value_errors` turns a refusal of the pipeline's own code into an error of ditile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ditile.errors import DitileError, ModelError

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


def find_pipeline_class(source: Path | str) -> type | None:
    """The class of the pipeline in a folder or on the hub; None if it cannot be read, for which loading raises."""
    import diffusers

    try:
        name = diffusers.DiffusionPipeline.load_config(source).get("_class_name")
    except OSError:
        return None
    return getattr(diffusers, name, None) if isinstance(name, str) else None


def check_returns_pictures(pipeline: type | None) -> None:
    """Raises `ModelError` if a class of pipelines is known to return something other than pictures."""
    names = [] if pipeline is None else _list_output_fields(pipeline)
    if pipeline is not None and names and "images" not in names:
        raise ModelError(
            f"{pipeline.__name__} returns {names[0]}, and only pictures are written here; in Python, "
            "ditile.parallelize(pipe, plan)(...) returns the pipeline's own result"
        )


@contextlib.contextmanager
def convert_value_errors(pipe: Any) -> Iterator[None]:
    """Turns a `ValueError` of the pipeline's own code, as of a size, into a `ModelError`; others are bugs."""
    try:
        yield
    except DitileError:
        raise
    except ValueError as error:
        if _find_raising_module(error) not in {cls.__module__ for cls in type(pipe).__mro__}:
            raise
        raise ModelError(f"{type(pipe).__name__} refuses this call: {' '.join(str(error).split())}") from error


def _list_output_fields(pipeline: type) -> list[str]:
    """The fields of all output classes in the module of a pipeline."""
    from diffusers.utils.outputs import BaseOutput

    beside = vars(sys.modules[pipeline.__module__]).values()
    kinds: list[Any] = [kind for kind in beside if isinstance(kind, type) and issubclass(kind, BaseOutput)]
    return [field.name for kind in kinds if dataclasses.is_dataclass(kind) for field in dataclasses.fields(kind)]


def _find_raising_module(error: BaseException) -> str:
    """The module of the code that raised an error."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return "" if place is None else str(place.tb_frame.f_globals.get("__name__"))


def find_image_to_image_class(pipeline: type) -> type:
    """The class of the image-to-image pipeline of the same family. Raises `ModelError` if diffusers has none."""
    from diffusers.pipelines.auto_pipeline import AUTO_IMAGE2IMAGE_PIPELINES_MAPPING, _get_task_class

    image_pipeline: type | None = _get_task_class(
        AUTO_IMAGE2IMAGE_PIPELINES_MAPPING, pipeline.__name__, throw_error_if_not_exist=False
    )
    if image_pipeline is None:
        raise ModelError(
            f"diffusers has no image-to-image pipeline for {pipeline.__name__}; leave --image out, "
            "or try a FLUX.1 or SD3 model"
        )
    return image_pipeline


def convert_to_image_to_image(pipe: DiffusionPipeline) -> DiffusionPipeline:
    """The image-to-image pipeline of the same family, on the same modules.

    Raises:
        ModelError: if diffusers has none.
    """
    from diffusers import AutoPipelineForImage2Image

    find_image_to_image_class(type(pipe))
    converted: DiffusionPipeline = AutoPipelineForImage2Image.from_pipe(pipe)
    return converted

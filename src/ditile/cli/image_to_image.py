"""The pipeline that starts from a picture, of the family of one that does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ditile.errors import ModelError

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


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

"""The sources of captions: the bundled list, a file with one per line, or COCO's annotations."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from ditile.distributed import files
from ditile.model.known import ASSETS
from ditile.plan.errors import ModelError
from ditile.runner.requests.command_options import COCO_PREFIX
from ditile.runner.requests.prompts import read_prompts

BUNDLED_SOURCE = "bundled"
MAX_ANNOTATION_BYTES = 2**30
"""Those of COCO's training set are 90 MB."""


class Caption(NamedTuple):
    """A text to draw.

    Attributes:
        image: the file of the photograph that the caption describes; None where there is none.
    """

    text: str
    image: str | None = None


def load_captions(source: str, count: int | None, default: int) -> list[Caption]:
    """The first `count` captions of a source; if `count` is None, the first `default`, or all if there are fewer.

    Raises:
        ModelError: if the source cannot be read, or has no captions or fewer than `count`.
    """
    if source == BUNDLED_SOURCE:
        captions = [Caption(line) for line in (ASSETS / "captions.txt").read_text("utf-8").splitlines()]
    elif source.startswith(COCO_PREFIX):
        captions = read_coco_captions(Path(source.removeprefix(COCO_PREFIX)))
    else:
        captions = [Caption(line) for line in read_prompts(source, "captions")]
    if count is not None and count > len(captions):
        raise ModelError(f"num={count} exceeds the {len(captions)} captions of {source!r}; try num={len(captions)}")
    return captions[: default if count is None else count]


def read_coco_captions(path: Path) -> list[Caption]:
    """The first caption (lowest id) of each image of a `captions_*.json`, in the order of the images' ids.

    Raises:
        ModelError: if the file cannot be read, is no such file, or has no caption.
    """
    try:
        content = files.parse_json(files.read_file(path, MAX_ANNOTATION_BYTES))
    except (OSError, ValueError) as error:
        raise ModelError(f"captions='{COCO_PREFIX}{path}' cannot be read: {' '.join(str(error).split())}") from error
    try:
        names = {image["id"]: str(image["file_name"]) for image in content.get("images", [])}
        first: dict[int, Any] = {}
        for entry in content["annotations"]:
            image = entry["image_id"]
            if " ".join(entry["caption"].split()) and (image not in first or entry["id"] < first[image]["id"]):
                first[image] = entry
        captions = [Caption(" ".join(first[image]["caption"].split()), names.get(image)) for image in sorted(first)]
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"captions='{COCO_PREFIX}{path}' is no file of COCO captions: 'annotations' have id, image_id and caption"
        ) from error
    if not captions:
        raise ModelError(f"captions='{COCO_PREFIX}{path}' has no caption")
    return captions

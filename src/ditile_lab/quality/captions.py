"""The sources of captions: the bundled list, a file with one per line, or COCO's annotations."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ditile.distributed import files
from ditile.model.known import ASSETS
from ditile.plan.errors import ModelError, join_error_lines
from ditile.runner.requests.outputs import COCO_PREFIX
from ditile.runner.requests.prompts import read_prompts

BUNDLED_SOURCE = "bundled"
# The annotations of COCO's training set are 90 MB.
MAX_ANNOTATION_BYTES = 2**30


class Caption(NamedTuple):
    """A text to generate.

    Attributes:
        image: the file of the photograph that the caption describes; None if there is none.
    """

    text: str
    image: str | None = None


def load_captions(source: str, count: int | None, default: int) -> list[Caption]:
    """Load the first `count` captions of a source; if `count` is None, the first `default`, or all if there are fewer.

    Raises:
        ModelError: if the source cannot be read, or has no captions or fewer than `count`.
    """
    if source.startswith(COCO_PREFIX):
        captions = read_coco_captions(Path(source.removeprefix(COCO_PREFIX)))
    elif source == BUNDLED_SOURCE:
        captions = list(map(Caption, (ASSETS / "captions.txt").read_text("utf-8").splitlines()))
    else:
        captions = list(map(Caption, read_prompts(source, "captions")))
    if count is None:
        return captions[:default]
    if count > len(captions):
        raise ModelError(f"num={count} exceeds the {len(captions)} captions of {source!r}; try num={len(captions)}")
    return captions[:count]


def read_coco_captions(path: Path) -> list[Caption]:
    """Read the first caption (lowest id) of each image in a `captions_*.json`, in the order of the images' ids.

    Raises:
        ModelError: if the file cannot be read, has another format, or has no caption.
    """
    option = f"captions='{COCO_PREFIX}{path}'"
    try:
        content = files.parse_json(files.read_file(path, MAX_ANNOTATION_BYTES))
    except (OSError, ValueError) as error:
        raise ModelError(f"{option} cannot be read: {join_error_lines(error)}") from error
    try:
        names = {image["id"]: str(image["file_name"]) for image in content.get("images", [])}
        # Later entries replace earlier ones, so the lowest id of an image must come last.
        texts = {}
        for entry in sorted(content["annotations"], key=lambda entry: entry["id"], reverse=True):
            text = " ".join(entry["caption"].split())
            if text:
                texts[entry["image_id"]] = text
        captions = [Caption(texts[image], names.get(image)) for image in sorted(texts)]
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{option} is not a file of COCO captions: 'annotations' have id, image_id and caption"
        ) from error
    if not captions:
        raise ModelError(f"{option} has no caption")
    return captions

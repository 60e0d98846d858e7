"""Which rows of a call of the model a rank computes. Pure.

Diffusers puts the branches of guidance one after the other in the batch: all images of branch 0, then all of branch 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ditile.errors import ModelError


@dataclass(frozen=True, slots=True)
class BatchSlice:
    """Some rows of a batch: those of some branches and some images.

    Attributes:
        branches, images: whose rows they are.
        num_branches, num_images: how many there are in the batch.
    """

    branches: range
    images: range
    num_branches: int
    num_images: int

    @classmethod
    def from_batch_size(cls, total: int, images: int) -> BatchSlice:
        """All rows of a batch of `total`, in which every branch has a row for each of `images`.

        Raises:
            ModelError: if that cannot be.
        """
        branches, rest = divmod(total, images)
        if rest or not branches:
            raise ModelError(
                f"a call of the model has {total} row(s) for {images} image(s), so it is not known whose they are; "
                "use a plan with data=1 and cfg=1"
            )
        return cls(range(branches), range(images), branches, images)

    @property
    def batch_size(self) -> int:
        """Rows of the batch."""
        return self.num_branches * self.num_images

    @property
    def slice_size(self) -> int:
        """Rows chosen."""
        return len(self.branches) * len(self.images)

    def select_batch(self, batch: Tensor) -> Tensor:
        """The chosen rows of a tensor `[total, ...]`: a view, unless they lie apart."""
        return batch if self.slice_size == self.batch_size else self.view_as_grid(batch).flatten(0, 1)

    def view_as_grid(self, batch: Tensor) -> Tensor:
        """The same as a view `[branches, images, ...]`."""
        split = batch.unflatten(0, (self.num_branches, self.num_images))
        own = split[self.branches.start : self.branches.stop]
        chosen: Tensor = own[:, self.images.start : self.images.stop]
        return chosen

    def write_slice(self, batch: Tensor, values: Tensor) -> None:
        """Puts `rows` `[count, ...]` where they belong in a contiguous tensor `[total, ...]`."""
        self.view_as_grid(batch).copy_(values.unflatten(0, (len(self.branches), len(self.images))))


def count_images(call: Mapping[str, Any]) -> int:
    """How many images the arguments of a pipeline's call ask for."""
    prompt = call.get("prompt", call.get("class_labels"))
    embeddings = call.get("prompt_embeds")
    if isinstance(prompt, list | tuple):
        prompts = len(prompt)
    elif prompt is None and isinstance(embeddings, Tensor):
        prompts = embeddings.shape[0]
    else:
        prompts = 1
    each = call.get("num_images_per_prompt") or call.get("num_videos_per_prompt") or 1
    return prompts * int(each)


def extract_prediction(result: Any) -> Tensor:
    """The tensor that a model returns, bare, in a tuple or in one of diffusers' output objects."""
    prediction: Tensor = result if isinstance(result, Tensor) else result[0]
    return prediction


def replace_prediction(result: Any, prediction: Tensor) -> Any:
    """A model's result with another tensor in it.

    Raises:
        ModelError: if the model returns more tensors, whose rows are not known.
    """
    if isinstance(result, Tensor):
        return prediction
    others = list(result.values())[1:] if isinstance(result, dict) else list(result[1:])
    if any(isinstance(other, Tensor) for other in others):
        raise ModelError(
            f"a model returned {len(others) + 1} values and cfg and data know what to do with one; "
            "use a plan with data=1 and cfg=1"
        )
    if isinstance(result, tuple):
        return (prediction, *others)
    return type(result)(**{**result, next(iter(result)): prediction})

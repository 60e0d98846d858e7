"""Masks of a pair for each query and key, which blocks make of a mask of keys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ditile.model.hooks.attention_hooks import MaskOfRealPairs
from ditile.plan.anatomy import ListAnatomy
from ditile.plan.errors import ModelError
from ditile_lab.study.merge import merge_lists


class Noted:
    """Attention that keeps the mask it was given."""

    overlaps = False

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        self.mask = mask
        return q


def test_only_a_boolean_mask_of_pairs_is_one_of_keys() -> None:
    """A failure means that padded keys, to which an additive mask of ones and zeros attends, are left out."""
    core, q, real = Noted(), torch.zeros(1, 3, 1, 2), torch.tensor([True, True, False])
    pairs = real[None, None, None] & real[None, None, :, None]
    MaskOfRealPairs(core).attend(q, q, q, mask=pairs)
    assert core.mask is not None and core.mask.equal(real[None, None, None])
    with pytest.raises(ModelError, match="tells queries apart"):
        MaskOfRealPairs(core).attend(q, q, q, mask=pairs.float())


def test_a_mask_that_one_pipeline_needs_whole_is_whole() -> None:
    """A failure means that a family whose pipelines give boolean and additive masks can be divided in none of them."""

    def make_list(kinds: str, attention: str) -> ListAnatomy:
        return ListAnatomy(
            image="x", text=None, returns=("image",), is_tuple=False, tokens=1, has_no_batch=False, joint="none",
            arguments={"mask": (kinds,)}, attention={"attn": (attention,)},
        )  # fmt: skip

    whole, cut = make_list("BK", "J"), make_list("BJ", "J&")
    assert merge_lists("blocks", whole, cut) == whole == merge_lists("blocks", cut, whole)

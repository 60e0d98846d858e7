"""Rows of a batched call: cut as evenly as can be, and joined again."""

from __future__ import annotations

import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput

from ditile.hooks.batch_rows import join_batch_results, slice_batch_arguments
from ditile.plan.layout import split_batch_evenly


def test_parts_are_even_and_whole() -> None:
    """Larger ones first: the pipeline fills with the longest."""
    assert split_batch_evenly(5, 3) == [range(2), range(2, 4), range(4, 5)]
    assert split_batch_evenly(2, 8) == [range(1), range(1, 2)]
    assert split_batch_evenly(4, 1) == [range(4)]


def test_only_what_is_batched_is_cut() -> None:
    """Within mappings and tuples too; not what is as long by chance. A failure means that rows swap their prompts."""
    x = torch.arange(3.0)
    given = {"x": x, "deep": {"mask": x, "scale": 0.5}, "pair": (x, None), "one": x[:1], "number": x[0], "ids": x}
    cut = slice_batch_arguments(given, 3, lambda rows: rows[1:], whole=("ids",))
    assert cut["x"].tolist() == cut["deep"]["mask"].tolist() == cut["pair"][0].tolist() == [1.0, 2.0]
    assert cut["deep"]["scale"] == 0.5 and cut["pair"][1] is None
    assert cut["one"].shape == (1,) and cut["number"].ndim == 0 and cut["ids"] is x


def test_joined_is_what_one_call_returns() -> None:
    """As a tuple and as diffusers' output object."""
    a, b = torch.zeros(2, 3), torch.ones(1, 3)
    assert torch.equal(join_batch_results([(a,), (b,)])[0], torch.cat([a, b]))
    joined = join_batch_results([Transformer2DModelOutput(sample=a), Transformer2DModelOutput(sample=b)])
    assert isinstance(joined, Transformer2DModelOutput)
    assert torch.equal(joined.sample, torch.cat([a, b]))

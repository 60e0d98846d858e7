"""What is said of models before torch is imported. A failure means that something is refused that works."""

from __future__ import annotations

import inspect

import pytest

from ditile.model.known import KnownModel, list_known_models
from ditile.planner.footprint import count_decoder_numbers
from ditile.planner.subject import PlanSubject
from ditile.runner.requests.pipelines import find_output_kind


@pytest.mark.parametrize("known", list_known_models(), ids=lambda known: known.name)
def test_the_table_is_what_the_configs_say(known: KnownModel) -> None:
    subject = PlanSubject.from_configs(known.name, known.folder)
    call = subject.fill_arguments({})
    assert known.is_video == (known.hub_id is None and find_output_kind(subject.pipeline) == "video")
    assert known.transformer == type(subject.transformer).__name__
    assert known.blocks == len(subject.block_hooks.chain)
    assert known.heads == subject.attention_heads[0]
    assert known.token_side == subject.token_side
    assert (known.height, known.width) == (call["height"], call["width"])
    if known.hub_id is not None and known.cuts_rows:
        # Else a peak of memory is not that of the model's own VAE.
        assert subject.decoder is not None
        assert subject.decodes == subject.count_decode_numbers()
        assert subject.decodes == count_decoder_numbers(subject.coder, subject.decoder)
    assert known.cuts_rows == bool(subject.block_hooks.anatomy.grid)
    assert known.bins_sizes == ("use_resolution_binning" in inspect.signature(subject.pipeline.__call__).parameters)

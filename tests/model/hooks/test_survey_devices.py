"""What a survey of the first call copes with on a GPU, for which the meta device stands, and what it advises."""

from __future__ import annotations

from dataclasses import replace

import torch

from ditile.model.anatomies import find_anatomy
from ditile.model.hooks.block_calls import _SurveyPass, read_token_grid
from ditile.model.hooks.block_policy import BlockHook, advise_whole_tokens
from ditile.model.hooks.generation import Generation
from ditile.plan.layout import Grid
from ditile.plan.plan import Plan
from tests.zoo.entry import transformer


def test_a_block_may_be_given_a_table_of_positions_on_another_device() -> None:
    model = transformer("FluxTransformer2DModel")
    anatomy = find_anatomy(model)
    assert anatomy is not None
    of_list = anatomy.lists["transformer_blocks"]
    survey = _SurveyPass("Model", anatomy, 9, "", checks=False)
    call = {
        "hidden_states": torch.empty(1, 6, 32, device="meta"),
        "encoder_hidden_states": torch.empty(1, 3, 32, device="meta"),
        "image_rotary_emb": (torch.ones(9, 16), torch.ones(9, 16)),
    }
    for index, block in enumerate(model.transformer_blocks):
        hook = BlockHook(index, "transformer_blocks", f"transformer_blocks.{index}", block, of_list)
        survey.visit_block(Generation(), hook, dict(call), block.forward)
    assert [flag.device.type for flag in survey.describe_call(None).fed.values()] == ["meta"]


def test_tensor_is_advised_where_a_model_has_it() -> None:
    """Its cuts were derived, or are those of its class."""
    derived, of_class = transformer("WanTransformer3DModel"), transformer("Flux2Transformer2DModel")
    for model, without in ((derived, "data or cfg"), (of_class, "data, cfg or tensor")):
        anatomy = find_anatomy(model)
        assert anatomy is not None
        assert advise_whole_tokens(model, replace(anatomy, tensor={}), Plan()) == f"use a plan of {without}"
        assert "tensor" in advise_whole_tokens(model, anatomy, Plan())
        assert "tensor" not in advise_whole_tokens(model, anatomy, Plan(tensor=2)), "it was tried"


def test_rounded_positions_count_columns_right() -> None:
    """In bfloat16 neither 271 nor 272 columns can be told from the last position."""
    for columns in (255, 257, 271, 272, 320):
        ids = torch.zeros(3, columns, 3)
        ids[..., 1] += torch.arange(3)[:, None]
        ids[..., 2] += torch.arange(columns)
        assert read_token_grid(torch.nn.Module(), ids.flatten(0, 1).to(torch.bfloat16)) == Grid(3, columns)

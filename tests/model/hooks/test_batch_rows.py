"""Rows of a batched call, cut and joined again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch.utils import _pytree as pytree

from ditile.model.anatomies import find_anatomy
from ditile.model.hooks.batch_rows import BatchDimFinder, join_batch_results, slice_batch_arguments
from ditile.model.hooks.block_calls import read_token_grid
from ditile.plan.layout import Grid
from ditile_lab.study.batch_dims import derive_batch_dims
from tests.families import BATCH, FAMILIES, RUN


def test_only_what_is_batched_is_cut() -> None:
    """Within mappings and tuples too; not what is as long by chance. A failure means that rows swap their prompts."""
    x = torch.arange(3.0)
    given = {"x": x, "deep": {"mask": x, "scale": 0.5}, "pair": (x, None), "one": x[:1], "number": x[0], "ids": x}
    cut = slice_batch_arguments(given, 3, lambda rows: rows[1:], whole=("ids",))
    assert cut["x"].tolist() == cut["deep"]["mask"].tolist() == cut["pair"][0].tolist() == [1.0, 2.0]
    assert cut["deep"]["scale"] == 0.5 and cut["pair"][1] is None
    assert cut["one"].shape == (1,) and cut["number"].ndim == 0 and cut["ids"] is x


KINDS = {
    "ChromaTransformer2DModel": ("img_ids", "txt_ids"),
    "BriaFiboTransformer2DModel": ("img_ids", "txt_ids"),  # a list of tensors with rows
    "PixArtTransformer2DModel": (),  # a dict of them
    "LTXVideoTransformer3DModel": (),  # a mask that attention takes with any number of rows, if nothing is computed
    "HunyuanVideoTransformer3DModel": (),
    "Kandinsky5Transformer3DModel": ("text_rope_pos", "visual_rope_pos"),
    "StableAudioDiTModel": ("rotary_embedding",),
    "AllegroTransformer3DModel": ("image_rotary_emb",),
    "LuminaNextDiT2DModel": ("image_rotary_emb",),
    "Krea2Transformer2DModel": ("position_ids",),
    "Lumina2Transformer2DModel": (),  # its forward needs values
}


def make_own(model: Any) -> Any:
    """The model as one of a class of a user's own."""

    class Own(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    model.__class__ = Own
    return model


OWN_OR_NOT = [(name, is_own) for name in KINDS for is_own in (False, True)]


# Its rows are in the second dimension of an argument, which lengths do not show.
@pytest.mark.parametrize(("name", "is_own"), [*OWN_OR_NOT, ("HiDreamImageTransformer2DModel", False)])
def test_the_batch_is_known_from_the_table_and_from_the_forward(name: str, is_own: bool) -> None:
    """Each row by itself is what it is in the whole batch, though text has as many tokens as the batch has rows.

    The forward counts in a class of a user's own. A failure means that positions are cut, or that rows are not, so a
    replica draws another picture or raises.
    """
    family = next(family for family in [*FAMILIES.values(), *RUN] if family.name == name)
    model, inputs = family.make(), family.inputs()
    state = torch.get_rng_state()
    anatomy = find_anatomy(model)
    known = {} if anatomy is None else anatomy.inputs
    if is_own:
        model, known = make_own(model), {}
    dims = BatchDimFinder(model, known).find_dims(inputs, next(iter(inputs)), BATCH)
    assert torch.equal(torch.get_rng_state(), state)
    assert dims is not None
    tensors = {name for name, value in inputs.items() if any(map(torch.is_tensor, pytree.tree_leaves(value)))}
    assert tensors - {path[0].key for path in dims.dims} == set(KINDS.get(name, ()))
    with torch.no_grad():
        whole = model(**inputs, return_dict=False)
        for row in range(BATCH):
            one = model(**dims.slice_arguments(inputs, lambda x, row=row: x[row : row + 1]), return_dict=False)
            first, wanted = (x[0] if isinstance(x, tuple) else x for x in (one, whole))
            assert torch.allclose(first, wanted[row : row + 1], rtol=1e-3, atol=1e-4), row


def test_a_call_that_is_not_possible_is_not_cut() -> None:
    """Two embeddings for four latents raise in the plain pipeline. A failure means that they are drawn mixed."""
    family = FAMILIES["WanTransformer3DModel"]
    inputs = family.inputs() | {"hidden_states": torch.zeros(4, 4, 2, 8, 8), "timestep": torch.zeros(4)}
    assert derive_batch_dims(family.make(), inputs, "hidden_states", 4) is None
    values = FAMILIES["Lumina2Transformer2DModel"]
    two = values.inputs() | {"hidden_states": torch.zeros(4, 4, 8, 8), "timestep": torch.zeros(4)}
    assert derive_batch_dims(values.make(), two, "hidden_states", 4) is None
    assert BatchDimFinder(values.make(), {}).find_dims(two, "hidden_states", 4) is None


def test_joined_is_what_one_call_returns() -> None:
    """As a tuple and as diffusers' output object."""
    a, b = torch.zeros(2, 3), torch.ones(1, 3)
    assert torch.equal(join_batch_results([(a,), (b,)])[0], torch.cat([a, b]))
    assert join_batch_results([([a],), ([b],)])[0] == [a, b], "a list has an entry for each row"
    joined = join_batch_results([Transformer2DModelOutput(sample=a), Transformer2DModelOutput(sample=b)])
    assert isinstance(joined, Transformer2DModelOutput)
    assert torch.equal(joined.sample, torch.cat([a, b]))


def test_rounded_positions_count_columns_right() -> None:
    """In bfloat16 neither 271 nor 272 columns can be told from the last position."""
    for columns in (255, 257, 271, 272, 320):
        ids = torch.zeros(3, columns, 3)
        ids[..., 1] += torch.arange(3)[:, None]
        ids[..., 2] += torch.arange(columns)
        assert read_token_grid(torch.nn.Module(), ids.flatten(0, 1).to(torch.bfloat16)) == Grid(3, columns)

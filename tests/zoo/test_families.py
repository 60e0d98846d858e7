"""Every family under every axis: what holds, and that what does not is refused before the first step.

A row that does not hold has its reason in `holes.py`, from which docs/matrix.md is made.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import diffusers
import pytest
from torch import nn

from ditile.model.anatomies import compute_source_hash, find_anatomy
from ditile.model.hooks.block_calls import read_token_grid
from ditile.plan.errors import DitileError, ModelError
from ditile.plan.plan import Plan
from ditile.runner.runner import build_single_runner, parallelize
from ditile_lab.study.derive import derive_anatomy
from ditile_lab.study.prove import TOLERANCE, ensure_anatomies
from ditile_lab.study.record import list_chain, record_blocks
from tests import tiny
from tests.pool import CaseError, Pool
from tests.zoo import ZOO, matrix, modular
from tests.zoo.derive_table import OTHERS, TABLE, derive_all, derive_rows, prove_calls, prove_rows, record_calls
from tests.zoo.holes import find_hole, has_row
from tests.zoo.own import OWN
from tests.zoo.rows import EVERY, HYBRID, REFERENCES, ROWS, Row, draw_padded_prompts, draw_rows, judge_row

pytestmark = pytest.mark.filterwarnings("ignore")
TIMEOUT = 60.0


@pytest.mark.parametrize("name", EVERY)
def test_a_family_holds_every_row_but_its_holes(pool: Pool, name: str) -> None:
    """A failure names the row: a family draws something else under an axis, or a hole is none any more."""
    entry = EVERY[name]
    pipe = entry.make()
    if name in OWN:
        ensure_anatomies(pipe, build_single_runner)
    transformer, calls = record_calls(pipe, entry)
    patches = choose_patches(transformer, calls["call"])
    found = {"proof": prove(transformer, calls, patches)}
    found |= run_rows(pool, name, patches, {key: row for key, row in ROWS.items() if has_row(name, key)})
    if has_row(name, "hybrid"):
        found |= run_rows(pool, name, patches, {"hybrid": HYBRID}, ranks=4)
    if has_row(name, "references"):
        found |= run_rows(pool, name, patches, {"references": REFERENCES})
    assert not (wrong := find_wrong(name, found)), "\n".join(wrong)


def find_wrong(name: str, found: Mapping[str, str]) -> list[str]:
    """What of an entry is not as the table of holes says, a line each."""
    wrong = []
    for key, problem in found.items():
        hole = find_hole(name, key)
        if hole is None and problem:
            wrong.append(f"{name}, {key}: {problem}")
        elif hole is not None and not problem.startswith("refused: "):
            wrong.append(f"{name}, {key}: {problem or 'holds'}, and is a hole because it {hole.reason}")
    return wrong


def run_rows(pool: Pool, name: str, patches: int, rows: Mapping[str, Row], ranks: int = 2) -> dict[str, str]:
    """What is wrong with each row; empty where it holds."""
    try:
        outcomes = pool.run(draw_rows, ranks, name, patches, rows, timeout=TIMEOUT)
    except CaseError as error:
        # Some row ended in an error that is not a refusal: each by itself says which.
        if len(rows) == 1:
            return {key: describe_error(error) for key in rows}
        return {key: run_rows(pool, name, patches, {key: row}, ranks)[key] for key, row in rows.items()}
    return {key: judge_row(name, row, outcomes, key) for key, row in rows.items()}


def describe_error(error: CaseError) -> str:
    return next(iter(error.tracebacks.values())).strip().splitlines()[-1]


def choose_patches(transformer: nn.Module, call: Mapping[str, Any]) -> int:
    """A number of patches that does not divide the tokens, or the rows of tokens where patches cut no row."""
    anatomy = find_anatomy(transformer)
    if anatomy is None:
        return 3
    chain = list_chain(transformer)
    of_list = anatomy.lists[chain[0].list_name]
    rows = record_blocks(transformer, chain, call)[0].arguments[of_list.image].shape[of_list.tokens]
    if anatomy.grid:
        rows = read_token_grid(transformer, call[anatomy.grid]).rows
    return next(patches for patches in (3, 2, 7, 4) if patches <= rows and rows % patches)


def prove(transformer: nn.Module, calls: Mapping[str, dict[str, Any]], patches: int) -> str:
    """What the proof finds wrong."""
    if find_anatomy(transformer) is None:
        return "refused: it has no anatomy"
    try:
        difference = prove_calls(transformer, calls, patches)
    except DitileError as error:
        return f"refused: {error}"
    return "" if difference <= TOLERANCE else f"differs by {difference:.1e}"


CLASSES = {row["name"]: row["transformer"] for row in json.loads(matrix.TABLE.read_text("utf-8"))["families"]}
"""Entry of the collection -> the class of its transformer."""
FIRST_OF_CLASS = {CLASSES[name]: name for name in reversed(CLASSES)}


@pytest.mark.parametrize("name", FIRST_OF_CLASS.values())
def test_the_shipped_anatomies_are_those_that_are_derived(name: str) -> None:
    """Of a class, from all entries that call it. A failure means: `python -m tests.zoo.derive_table`, and look at what
    changed."""
    cls = CLASSES[name]
    entries = {other: ZOO[other] for other in ZOO if CLASSES[other] == cls}
    for other, entry in OTHERS.items():
        if type(entry.make().transformer).__name__ == cls:
            entries[other] = entry
    derived = derive_rows(prove_rows(derive_all(entries)))
    shipped = json.loads(TABLE.read_text("utf-8"))
    assert json.loads(json.dumps(derived)) == {cls: shipped[cls]} if cls in shipped else not derived


def test_every_class_of_the_shipped_anatomies_is_called_by_an_entry() -> None:
    """A failure means: `python -m tests.zoo.matrix`, or `python -m tests.zoo.derive_table`."""
    assert CLASSES.keys() == ZOO.keys()
    assert json.loads(TABLE.read_text("utf-8")).keys() <= set(CLASSES.values())


def test_the_matrix_of_families_is_up_to_date() -> None:
    """A failure means: `python -m tests.zoo.matrix && python -m benchmarks.matrix_page > docs/matrix.md`."""
    assert json.loads(matrix.TABLE.read_text("utf-8")) == matrix.build_families()


SHARING = ("flux", "qwen-image", "wan-2.1", "z-image", "pixart-sigma", "ace-step-turbo", "stable-audio-3")


@pytest.mark.parametrize("name", SHARING)
def test_stages_share_synchronous_steps(pool: Pool, name: str) -> None:
    """Masks of keys and of pairs, references, frames. A failure means that keys that are kept, or a mask, are not
    those that a step of one stage after the other would have left."""
    row = Row({"pipefusion": 2, "warmup": 1, "warmup_mode": "sequence"}, "stale alone")
    found = run_rows(pool, name, choose_patches(*_record_first_call(name)), {"sequence": row})
    assert found == {"sequence": ""}


@pytest.mark.parametrize("name", [one.name for one in modular.ENTRIES])
def test_three_stages_of_modular_blocks(pool: Pool, name: str) -> None:
    """The stage in the middle has neither fresh latents nor the prediction. A failure means that blocks of the tree
    compute something of them that is used, or that the order of the patches is another one there."""
    rows = {key: ROWS[key]._replace(plan=ROWS[key].plan | {"pipefusion": 3}) for key in ("pipefusion", "stale")}
    found = run_rows(pool, name, choose_patches(*_record_first_call(name)), rows, ranks=3)
    assert not (wrong := find_wrong(name, found)), "\n".join(wrong)


@pytest.mark.parametrize("name", ["qwen-image", "pixart-sigma"])
def test_stages_share_masked_steps(pool: Pool, name: str) -> None:
    """Two prompts of unlike length. A failure means that a stage attends to padding, or masks keys of another rank."""
    pool.run(draw_padded_prompts, 2, name, choose_patches(*_record_first_call(name)), timeout=TIMEOUT)


@pytest.mark.parametrize("name", ["ltx-2", "wan-2.2", "qwen-image-2.1"])
def test_what_stages_cannot_share_runs_in_turn(pool: Pool, name: str) -> None:
    """Two streams, two models, keys of the model's own: warmup_mode=auto is serial, to the bit. A failure means that a
    plan of `ditile plan` is refused for such a model, or draws something else."""
    row = Row({"pipefusion": 2, "warmup": 1, "warmup_mode": "auto"}, "stale alone", 0.0)
    assert run_rows(pool, name, choose_patches(*_record_first_call(name)), {"auto": row}) == {"auto": ""}


def test_a_call_of_another_mode_is_refused() -> None:
    """Without its cache the model computes text and image anew in each step, in attention calls of other kinds."""
    entry = ZOO["qwen-image-2.1"]
    runner = parallelize(tiny.quiet(entry.make()), Plan(patches=3, warmup=1), keep_weights=True)
    with pytest.raises(ModelError, match="is called with no mode, and known are kv_cache_mode=extract"):
        runner(**entry.call(), use_kv_cache=False)


def test_experts_that_choose_among_all_tokens_are_refused() -> None:
    """The table has no row for them either, though the forwards of model and block are those of a model without."""
    transformer, calls = record_calls(ZOO["nucleus-moe"].make(), ZOO["nucleus-moe"])
    assert find_anatomy(transformer) is None
    with pytest.raises(ModelError, match=r"transformer_blocks\.0 computes a token from others, and not by torch"):
        derive_anatomy(transformer, list(calls.values()))
    before = compute_source_hash(transformer, ["transformer_blocks"])
    for block in transformer.transformer_blocks:  # type: ignore[union-attr]
        block.img_mlp = nn.Identity()
    assert compute_source_hash(transformer, ["transformer_blocks"]) != before


class FluxTransformer2DModel(diffusers.FluxTransformer2DModel):
    """Of the name of a row, with a forward of its own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def test_a_row_is_of_the_forwards_that_it_was_derived_from() -> None:
    """A failure means that a model is divided by what holds for another one of its name."""
    transformer = tiny.flux().transformer
    assert find_anatomy(transformer) is not None
    transformer.__class__ = FluxTransformer2DModel
    assert find_anatomy(transformer) is None


def _record_first_call(name: str) -> tuple[nn.Module, Mapping[str, Any]]:
    transformer, calls = record_calls(EVERY[name].make(), EVERY[name])
    return transformer, calls["call"]

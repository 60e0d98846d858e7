"""What survives a step: keys and values in the order of the sequence, with the step that wrote each."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ditile.errors import StateError
from ditile.layout import DUMMY_TEXT, Grid, Joint, Layout
from ditile.memory import KeyStore, Memory

IMAGE, TEXT = 8, 3  # 4 rows of 2 tokens, cut into 2 patches
JOINTS: list[Joint] = ["none", "text_first", "image_first"]


def layout(joint: Joint) -> Layout:
    return Layout.of(Grid(4, 2, 1), 2, 0 if joint == "none" else TEXT, joint)


def keys(tokens: list[float], batch: int = 1) -> Tensor:
    """One head of size 1: `[B, S, 1, 1]`."""
    return torch.tensor(tokens, dtype=torch.float64).view(1, -1, 1, 1).expand(batch, -1, 1, 1).contiguous()


def sequence(joint: Joint, image: list[float], text: list[float]) -> list[float]:
    return {"none": image, "text_first": text + image, "image_first": image + text}[joint]


@pytest.mark.parametrize("joint", JOINTS)
def test_a_patch_goes_over_its_stale_self(joint: Joint) -> None:
    """A whole step, then both patches. Values go with their keys; dummy text is never seen.

    A failure means that attention reads a token at the wrong place, or text that is none.
    """
    where = layout(joint)
    store = KeyStore(where, joint=joint != "none")
    cut = where.tokens(0).stop
    image, text = [float(i) for i in range(IMAGE)], [100.0, 101.0, 102.0]
    whole = sequence(joint, image, text)
    store.fill(keys(whole), -keys(whole), step=3)
    assert store.ages(3) == (0, 0)
    assert store.ages(4) == (1, 1)

    fresh_text = [t + 100 for t in text]
    fresh = sequence(joint, [i + 10 for i in image[:cut]], fresh_text)
    k, v = store.update(keys(fresh), -keys(fresh), patch=0, step=4)
    assert k.flatten().tolist() == sequence(joint, [i + 10 for i in image[:cut]] + image[cut:], fresh_text)
    assert torch.equal(v, -k)
    assert store.ages(4) == (0, 1)

    dummy = [] if joint == "none" else [-1.0] * DUMMY_TEXT
    fresh = sequence(joint, [i + 10 for i in image[cut:]], dummy)
    k, v = store.update(keys(fresh), -keys(fresh), patch=1, step=4)
    assert k.flatten().tolist() == sequence(joint, [i + 10 for i in image], fresh_text)
    assert torch.equal(v, -k)
    assert store.ages(4) == (0, 0)


@pytest.mark.parametrize("joint", JOINTS)
def test_without_warmup_the_rest_is_zero(joint: Joint) -> None:
    """The first patch of the first step attends to zeros behind it, and their age is unknown."""
    where = layout(joint)
    store = KeyStore(where, joint=joint != "none")
    cut, text = where.tokens(0).stop, [] if joint == "none" else [7.0] * TEXT
    fresh = sequence(joint, [5.0] * cut, text)
    k, _ = store.update(keys(fresh), keys(fresh), patch=0, step=0)
    assert k.flatten().tolist() == sequence(joint, [5.0] * cut + [0.0] * (IMAGE - cut), text)
    assert store.ages(0) == (0, None)


@pytest.mark.parametrize("joint", ["text_first", "image_first"])
def test_a_layer_of_the_image_alone(joint: Joint) -> None:
    """In a model with joint attention a layer may see the image only: it keeps no text."""
    where = layout(joint)
    store = KeyStore(where, joint=False)
    whole = [float(i) for i in range(IMAGE)]
    store.fill(keys(whole), keys(whole), step=0)
    cut = where.tokens(0).stop
    k, _ = store.update(keys([9.0] * (IMAGE - cut)), keys([9.0] * (IMAGE - cut)), patch=1, step=1)
    assert k.flatten().tolist() == whole[:cut] + [9.0] * (IMAGE - cut)
    assert store.bytes == 2 * IMAGE * 8


def test_another_batch_is_refused() -> None:
    """Stale keys belong to rows. A failure means that a picture would read another one's keys."""
    store = KeyStore(layout("none"), joint=False)
    store.fill(keys([0.0] * IMAGE, batch=2), keys([0.0] * IMAGE, batch=2), step=0)
    half = keys([0.0] * 4)
    with pytest.raises(StateError, match="from 2 to 1 rows"):
        store.update(half, half, patch=0, step=1)


def test_what_is_kept_does_not_follow_its_source() -> None:
    """The caller's tensors may be written over afterwards."""
    store = KeyStore(layout("none"), joint=False)
    source = keys([1.0] * IMAGE)
    store.fill(source, source, step=0)
    source.zero_()
    k, _ = store.update(keys([2.0] * 4), keys([2.0] * 4), patch=0, step=1)
    assert k.flatten().tolist() == [2.0] * 4 + [1.0] * 4


def test_stores_belong_to_branch_and_layer() -> None:
    """A failure means that guidance reads the keys of the other prompt."""
    memory, where = Memory(), layout("none")
    made = [memory.store(b, name, where, joint=False) for b in (0, 1) for name in ("a", "b")]
    assert len(set(map(id, made))) == 4
    assert memory.store(1, "a", where, joint=False) is made[2]
    assert memory.key_bytes == 0
    made[0].fill(keys([0.0] * IMAGE), keys([0.0] * IMAGE), step=0)
    assert memory.key_bytes == 2 * IMAGE * 8


def test_what_is_remembered_and_for_how_long() -> None:
    """Constants for a generation, or until a callback changes them; what is constant in a step for a step."""
    memory, made = Memory(), iter(range(100))
    assert [memory.constant("x", lambda: next(made)) for _ in range(2)] == [0, 0]
    assert [memory.of_step("x", lambda: next(made)) for _ in range(2)] == [1, 1]
    memory.end_step()
    assert memory.of_step("x", lambda: next(made)) == 2
    assert memory.constant("x", lambda: next(made)) == 0
    memory.forget_constants()
    assert memory.constant("x", lambda: next(made)) == 3


def test_slices_follow_their_source() -> None:
    """A part is cut anew when it comes from another tensor, even of the same values."""
    memory, made = Memory(), iter(range(100))
    first, second = torch.zeros(2), torch.zeros(2)
    found = [memory.sliced("x", source, lambda: next(made)) for source in (first, first, second, first)]
    assert found == [0, 0, 1, 2]


def test_a_buffer_keeps_its_content() -> None:
    """Predictions of other patches stay; another shape or dtype begins with zeros."""
    memory, like = Memory(), torch.zeros(1)
    memory.buffer("x", (2, 3), like)[0] = 1
    assert memory.buffer("x", (2, 3), like).sum() == 3
    assert memory.buffer("x", (2, 4), like).sum() == 0
    assert memory.buffer("x", (2, 4), like.double()).dtype == torch.float64

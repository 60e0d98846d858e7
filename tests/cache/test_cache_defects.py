"""What other caches were seen to get wrong, where no other test here would see it, and copies that make a GPU wait."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ditile
from ditile.cache.forecast import Reuse
from ditile.cache.hooks import CacheHook
from ditile.cache.segment import Residuals, Segment
from ditile.cache.unit_decision import CacheCall, split_into_units
from ditile.model.hooks.protocols import CallPosition, SkipAgreement
from ditile.plan.anatomy import Flow
from ditile.plan.errors import StateError
from tests.cache.pictures import outputs, settings_for
from tests.families import FAMILIES
from tests.runner.cases import MAKE, same

STEPS, SPARE = 8, 4
SETTINGS = settings_for(STEPS, SPARE)
CACHE, EXACT, PRUNE, REST, draw = SETTINGS


def test_one_measure_for_all_lists() -> None:
    """Two lists of blocks measured, and waited for the device, twice in a call; a pruned one must, for each block."""
    for name in ("ChromaTransformer2DModel", "Flux2Transformer2DModel", "HunyuanVideoTransformer3DModel"):
        model = FAMILIES[name].make()
        ditile.enable_cache(model, CACHE.reset(residual_diff_threshold=1e-9, max_warmup_steps=0, num_inference_steps=5))
        with mock.patch.object(SkipAgreement, "sum_over_ranks", autospec=True, side_effect=lambda _, sums: sums) as add:
            outputs(name, model)
        assert add.call_count == 4, name


def test_two_threads_do_not_mix_two_pictures() -> None:
    """The second call is refused before it touches anything, and no other picture is changed by it."""
    pipe = MAKE["flux"]()
    ditile.enable_cache(pipe, CACHE)
    wanted = draw(pipe, "flux")
    inside, refused = threading.Event(), threading.Event()
    errors: list[BaseException] = []
    pictures: list[Any] = []

    def second() -> None:
        inside.wait(60)
        try:
            for _ in range(2):
                draw(pipe, "flux", prompt="two blue squares", num_inference_steps=3)
        except StateError as error:
            errors.append(error)
        refused.set()

    def wait(pipe: Any, step: int, *_: Any) -> dict[str, Any]:
        inside.set()
        assert refused.wait(60)
        return {}

    thread = threading.Thread(target=second)
    thread.start()
    same(draw(pipe, "flux", callback_on_step_end=wait), wanted, "the first thread's")
    thread.join()
    assert len(errors) == 1 and "two threads run one cached FluxPipeline" in str(errors[0])
    thread = threading.Thread(target=lambda: pictures.append(draw(pipe, "flux")))
    thread.start()
    thread.join()
    same(pictures[0], wanted, "one after the other")
    with pytest.raises(RuntimeError):
        draw(pipe, "flux", prompt_embeds=torch.zeros(1, 3, 7), pooled_prompt_embeds=torch.zeros(1, 32), prompt=None)
    same(draw(pipe, "flux"), wanted, "after an error")


BLOCKS, IMAGES = 5, 3


class Block(nn.Module):
    """Adds one to its tokens, and counts the rows it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def forward(self, hidden_states: Tensor, temb: Tensor) -> Tensor:
        self.rows.append(len(hidden_states))
        return hidden_states + temb[:, None, None]


class Operators(TorchDispatchMode):
    """Counts what is asked of torch, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_rows_that_run_are_told_once_a_step_without_a_copy(device: str) -> None:
    """A failure means that every block waits for the GPU, as a copy from pageable memory does: 57 a step in FLUX."""
    blocks = [Block() for _ in range(BLOCKS)]
    hooks = [CacheHook(k, block, Flow(text=None)) for k, block in enumerate(blocks)]
    for hook in hooks:
        hook.install_hook(ExitStack(), None)
    segment = Segment(hooks, Residuals(lambda stream: Reuse()))
    units = split_into_units(2 * IMAGES, IMAGES, "image")
    tokens, temb = torch.zeros(2 * IMAGES, 4, 8, device=device), torch.ones(2 * IMAGES, device=device)

    def step(number: int, skips: list[bool]) -> Tensor:
        segment.apply_decision(CacheCall(CallPosition(number), number, units, 2 * IMAGES), skips, SkipAgreement())
        x = tokens
        for block in blocks:
            x = block(x, temb * (number + 1))
        return x

    step(0, [False] * IMAGES)
    for number, skips in ((1, [False, True, False]), (2, [True, False, True])):
        with Operators() as seen:
            out = step(number, skips)
        assert seen.counts["arange"] == 1 and not seen.counts["_to_copy"], "once, and where the tokens are"
        assert all(block.rows[-1] == 2 * skips.count(False) for block in blocks)
        if device == "cpu":
            wanted = {1: [10.0, 5.0, 10.0], 2: [10.0, 15.0, 10.0]}[number] * 2
            assert out[:, 0, 0].tolist() == wanted


class TextBlock(nn.Module):
    """Adds to its tokens, and makes a text that it was not given."""

    def forward(self, hidden_states: Tensor, temb: Tensor) -> tuple[Tensor, Tensor]:
        out = hidden_states + temb[:, None, None]
        return out, out[:, :1]


def test_a_text_that_a_block_makes_has_all_rows() -> None:
    """A failure would mean an index error, or the text of another image, where some images of a batch are skipped."""
    block = TextBlock()
    hook = CacheHook(0, block, Flow(("image", "text"), text=None))
    hook.install_hook(ExitStack(), None)
    segment = Segment([hook], Residuals(lambda stream: Reuse()))
    units = split_into_units(IMAGES, IMAGES, "image")
    for step, skips in enumerate(([False] * IMAGES, [True, True, False])):
        segment.apply_decision(CacheCall(CallPosition(step), step, units, IMAGES), skips, SkipAgreement())
        _, text = block(torch.zeros(IMAGES, 4, 8), torch.full((IMAGES,), step + 1.0))
    assert text[:, 0, 0].tolist() == [1.0, 1.0, 2.0]

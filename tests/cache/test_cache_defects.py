"""What other caches for diffusion transformers were seen to get wrong, where no other test here would see it."""

from __future__ import annotations

import threading
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import ditile
from ditile.model.hooks.protocols import SkipAgreement
from ditile.plan.errors import StateError
from ditile.runner import caching
from tests.cache.pictures import settings_for
from tests.families import FAMILIES
from tests.parallel.pipefusion.moves import outputs
from tests.parallel.sequence.planned import wan_pipeline
from tests.runner.cases import MAKE, same

STEPS, SPARE = 8, 4
SETTINGS = settings_for(STEPS, SPARE)
CACHE, EXACT, PRUNE, REST, draw = SETTINGS


@pytest.mark.parametrize("scale", [3.0, 1.0])
@pytest.mark.parametrize("model", ["flux true cfg", "wan"])
def test_guidance_is_seen_from_the_calls(model: str, scale: float) -> None:
    """Without guidance there is one call in each step. It was taken for half a step, so that twice the warmup was
    computed, and steps were compared with the last but one."""
    calls = [0]
    if model == "wan":
        pipe, call = wan_pipeline()
        pipe.register_to_config(boundary_ratio=None)
        call |= {"guidance_scale": scale, "num_inference_steps": STEPS}
    else:
        pipe, call = MAKE[model](), {}
    ditile.enable_cache(pipe, CACHE)
    last = block_of(pipe.transformer)
    handle = last.register_forward_pre_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    if model == "wan":
        pipe(**call, generator=torch.Generator().manual_seed(0))
    else:
        draw(pipe, model, true_cfg_scale=scale)
    handle.remove()
    branches = 2 if scale > 1 else 1
    of_first = caching.summary(pipe, logging=False)[0].decisions
    assert [each.skipped for each in of_first] == [REST] * branches
    assert calls[0] >= branches * STEPS


def block_of(transformer: nn.Module) -> nn.Module:
    blocks = getattr(transformer, "blocks", None) or transformer.transformer_blocks
    return blocks[-1]


def test_one_measure_for_all_lists() -> None:
    """A model with two lists of blocks measured, and waited for the device, twice in a call; a pruned one once for
    each block, which it must."""
    for name in ("ChromaTransformer2DModel", "Flux2Transformer2DModel", "HunyuanVideoTransformer3DModel"):
        model = FAMILIES[name].make()
        ditile.enable_cache(model, CACHE.reset(residual_diff_threshold=1e-9, max_warmup_steps=0, num_inference_steps=5))
        with mock.patch.object(SkipAgreement, "sum_over_ranks", autospec=True, side_effect=lambda _, sums: sums) as add:
            outputs(name, model)
        assert add.call_count == 4, name


def test_two_threads_do_not_mix_two_pictures() -> None:
    """The second call is refused before it touches anything, with one clear error; the first one's picture is right,
    and so is the next one from another thread."""
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

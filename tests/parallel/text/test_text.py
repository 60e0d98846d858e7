"""Text encoders on the first rank alone, or in runs of layers. The same encoder runs: bitwise equal, on every rank."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel

from ditile.parallel.text.encoders import TextEncoders, find_text_encoders
from ditile.parallel.text.parts import assign_layer_ranks
from ditile.plan.errors import ModelError, PlanError, StateError
from ditile.plan.plan import Plan
from ditile.runner.runner import parallelize
from tests import tiny
from tests.pool import Pool, on_ranks, share
from tests.runner.cases import MAKE, call_of, different, run, same

NAMES = ("flux true cfg", "pixart sigma", "sd3.5 medium")
CALLS: dict[str, list[dict[str, Any]]] = {
    "flux true cfg": [{}, {"prompt": ["the green square", "a red circle"]}, {"embeds": 12, "negative_prompt": None}],
    "pixart sigma": [{}, {"prompt": ["the green square on the left", "a red circle"]}, {"embeds": 12}],
    "sd3.5 medium": [{}, {"negative_prompt": "blue"}, {"clip_skip": 1}],  # the last reads an inner hidden state
}

EVERY = [*itertools.product(NAMES, ["first", "split"], [2, 3])]


def deeper(name: str) -> Any:
    """A pipeline whose encoders have several layers, not as many as there are ranks."""
    pipe = MAKE[name]()
    for part, encoder in find_text_encoders(pipe).items():
        config = encoder.config
        config.num_hidden_layers = 5 if type(encoder).__name__ == "T5EncoderModel" else 4
        setattr(pipe, part, tiny.randomise(type(encoder)(config), seed=2))
    return pipe


def counts(pipe: Any) -> dict[str, int]:
    return {name: sum(p.numel() for p in part.parameters()) for name, part in find_text_encoders(pipe).items()}


def pictures(
    name: str, mode: str, ranks: int, weights: tuple[float, ...] | None = None
) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Parameters of each encoder: of all, on this rank, and after `restore`."""
    pipe = deeper(name)
    whole = counts(pipe)
    wanted = share(f"deeper {name}", lambda: [run(pipe, name, **call) for call in CALLS[name]])
    different(wanted[1][:1], wanted[0], f"{name}: the prompt has no effect")
    plan = Plan(pipefusion=ranks, text=mode, warmup=99, stage_weights=weights)  # type: ignore[arg-type]
    runner = parallelize(pipe, plan, keep_weights=True)
    here = counts(pipe)
    for call, picture in zip(CALLS[name], wanted, strict=True):
        same(run(runner, name, **call), picture, f"{name}, {mode}, {call}")
    if mode == "first" and runner.mesh.rank == 0:
        assert runner.mesh.traffic.bytes.get("text") or "embeds" in CALLS[name][-1]
    runner.restore()
    same(run(pipe, name, **CALLS[name][0]), wanted[0], "restored")
    return whole, here, counts(pipe)


@pytest.mark.parametrize(("name", "mode", "ranks"), EVERY)
def test_pictures_are_the_plain_pipelines(pool: Pool, name: str, mode: str, ranks: int) -> None:
    """A failure means that a rank draws with other embeddings than the plain pipeline, or holds what it should not."""
    results = pool.run(pictures, ranks, name, mode, ranks)
    whole = results[0][0]
    assert all(after == whole for _, _, after in results)
    for part, everything in whole.items():
        kept_bytes = [here[part] for _, here, _ in results]
        if mode == "first":
            assert kept_bytes == [everything] + [0] * (ranks - 1)
        else:
            after_layers = sum(kept_bytes) - everything  # what every rank holds, as often as there are other ranks
            assert 0 < after_layers <= (ranks - 1) * (2 * tiny.WIDTH + tiny.WIDTH**2), part
            assert max(kept_bytes) < everything, part


@pytest.mark.parametrize(
    ("layers", "weights", "wanted"),
    [
        (5, (1.0, 1.0, 1.0), [0, 1, 1, 2, 2]),
        (1, (1.0, 1.0, 1.0), [2]),
        (4, (1.0, 1.0), [0, 0, 1, 1]),
        (6, (2.0, 1.0), [0, 0, 0, 0, 1, 1]),
        (4, (1.0, 9.0, 1.0), [0, 1, 1, 2]),
    ],
)
def test_runs_are_by_weight(layers: int, weights: tuple[float, ...], wanted: list[int]) -> None:
    """A failure means that a rank holds more than its share."""
    assert assign_layer_ranks(layers, weights) == wanted


def parallelize_error(pipe: Any, plan: Plan, **options: Any) -> str:
    with pytest.raises((StateError, ModelError, PlanError)) as caught:
        parallelize(pipe, plan, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("after", ["offload", "free"])
@pytest.mark.parametrize("name", ["flux", "pixart sigma", "sd3"])
@on_ranks(2)
def test_encoders_leave_before_denoising(name: str, after: str) -> None:
    """A failure means that the encoders take memory while denoising, or do not come back."""
    pipe = deeper(name)
    wanted, embeds = run(pipe, name), call_of(name, embeds=12)
    with_embeds = run(pipe, name, embeds=12)
    seen: list[int] = []

    def look(*_: Any) -> dict[str, Any]:
        names = [key for part in find_text_encoders(pipe).values() for key, _ in part.named_parameters()]
        seen.append(len(names) - names.count("stand_in"))
        return {}

    steps = {"callback": look} if name.startswith("pixart") else {"callback_on_step_end": look}
    if "callback" not in steps:
        steps["callback_on_step_end_tensor_inputs"] = []  # type: ignore[assignment]
    plan = Plan(pipefusion=2, text="split", warmup=99)
    runner = parallelize(pipe, plan, text_after=after, keep_weights=True)  # type: ignore[arg-type]
    same(run(runner, name, **steps), wanted, f"{name} {after}")
    assert len(seen) == 4 and (after == "offload" or not any(seen)), f"{seen} weights of text encoders while denoising"
    if after == "offload":
        assert not any(hasattr(part, "stand_in") for part in find_text_encoders(pipe).values())
        same(run(runner, name), wanted, "a second call")
        runner.restore()
        same(run(pipe, name), wanted, "restored")
        return
    for prompted in (lambda: run(runner, name), lambda: pipe.text_encoder(torch.zeros(1, 4, dtype=torch.long))):
        with pytest.raises(StateError, match="was freed"):
            prompted()
    same(runner(**embeds).images, with_embeds, "embeddings")
    with pytest.raises(StateError, match="text encoders were freed"):
        runner.restore()


def test_encoders_wait_on_the_cpu() -> None:
    """A failure means that the encoders are on the device while denoising or between calls, or not for the next call.

    The device is one that computes nothing: what is moved to it is noted and stays where it is.
    """
    pipe, device = MAKE["flux"](), torch.device("meta")
    mesh = parallelize(pipe, Plan()).mesh
    encoders = TextEncoders(pipe, Plan(), mesh, device, after="offload")
    before = [list(part.state_dict()) for part in find_text_encoders(pipe).values()]
    moves: list[str] = []
    for part in find_text_encoders(pipe).values():
        vars(part)["to"] = lambda to: moves.append(str(to))
    denoiser = torch.nn.Identity()
    for _ in range(2):
        with encoders.install_for_call(denoiser):
            assert moves == ["meta", "meta"]
            for _ in range(3):
                denoiser(torch.zeros(1))
            assert moves == ["meta", "meta", "cpu", "cpu"]
            assert pipe.text_encoder.device == pipe.text_encoder_2.device == device, "pipelines ask the encoders"
        assert moves == ["meta", "meta", "cpu", "cpu"]
        assert [list(part.state_dict()) for part in find_text_encoders(pipe).values()] == before
        moves.clear()


@on_ranks(2)
def test_what_cannot_be_split_is_refused() -> None:
    """A failure means that layers of an unknown encoder are lost in silence."""
    pipe = MAKE["flux"]()
    pipe.text_encoder_2.encoder.block[0].layer[0].SelfAttention.extra = torch.nn.Linear(2, 2)
    runner = parallelize(pipe, Plan(pipefusion=2, text="split", warmup=99))  # inside a layer all is the layer's
    with (
        pytest.raises(ModelError, match="attention weights"),
        runner._parts.encoders.install_for_call(pipe.transformer),
    ):
        pipe.text_encoder(torch.zeros(1, 4, dtype=torch.long), output_attentions=True)
    pipe = MAKE["flux"]()
    pipe.text_encoder.extra = torch.nn.Linear(2, 2)
    assert "where extra of this text encoder" in parallelize_error(pipe, Plan(pipefusion=2, text="split"))
    bert = BertModel(BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1))
    vars(pipe)["text_encoder"] = bert
    assert "cannot cut a BertModel" in parallelize_error(pipe, Plan(pipefusion=2, text="split"))
    assert "should be 'keep', 'offload' or 'free'" in parallelize_error(pipe, Plan(pipefusion=2), text_after="drop")
    whole = sum(p.numel() for p in MAKE["flux"]().transformer.parameters())
    assert sum(p.numel() for p in pipe.transformer.parameters()) == whole, "a refusal changed the transformer"


def raises_on_one_rank(mode: str) -> str:
    """What a rank says where the encoder of rank 0 runs out of memory."""
    pipe = MAKE["flux"]()
    plan = Plan(pipefusion=2, text=mode, warmup=99)  # type: ignore[arg-type]
    runner = parallelize(pipe, plan, trust_code=True)

    def broken(*_: Any, **__: Any) -> None:
        raise MemoryError("no memory\nleft")

    if runner.mesh.rank == 0:
        place = pipe.text_encoder_2.encoder.embed_tokens
        vars(place)["forward"] = broken
    with pytest.raises((MemoryError, StateError)) as caught:
        run(runner, "flux")
    return f"{caught.type.__name__}: {caught.value}"


@pytest.mark.parametrize("mode", ["first", "split"])
def test_an_encoder_that_raises_ends_all_ranks(pool: Pool, mode: str) -> None:
    """A failure means that ranks wait for ever for a text that never comes."""
    first, second = pool.run(raises_on_one_rank, 2, mode)
    assert first == "MemoryError: no memory\nleft"
    assert second == "StateError: the text encoder raised on rank 0: MemoryError: no memory left"

"""LoRAs on a divided pipeline: loaded before or after, switched, scaled, fused and unloaded, as on the plain one.

In fp32 and, at the limit where nothing is stale, bitwise: each stage does the plain pipeline's sums on its blocks. Sums
over shares of weights are in another order: 1e-4 in these models.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import ditile
from ditile.model.known import ASSETS
from ditile.plan.errors import ModelError
from ditile.plan.plan import Plan
from ditile.runner.digest import describe_loras
from ditile.runner.load import load as load_model
from ditile.runner.lora import forget_loras, list_loaded_loras, select_loras
from ditile.runner.runner import parallelize
from tests.pool import Pool, on_ranks, share
from tests.runner.cases import MAKE, different, load_parts, run, same
from tests.runner.loras import NAMES, edits, folders_of, load, load_divided, loader_edits, narrow_edits
from tests.zoo import ZOO
from tests.zoo.rows import ENOUGH

EXACT = {"patches": 3, "warmup": 4}


WITH_TEXT = ("flux", "sd3.5 medium")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder with LoRAs for each family; with one of the text encoder too, and one as trainers save that."""
    made = folders_of(NAMES, tmp_path_factory)
    for name in WITH_TEXT:
        folder = made[name]
        path = "encoder.layers.1.self_attn.q_proj"
        own = path if name == "flux" else f"text_model.{path}"
        random = torch.Generator().manual_seed(5)
        factors = {
            f"lora_{end}.weight": 0.5 * torch.randn(shape, generator=random)
            for end, shape in {"A": (2, 32), "B": (32, 2)}.items()
        }
        narrow = load_file(folder / "narrow.safetensors")
        for file, within in {"with-text": own, "hub-text": f"text_model.{path}"}.items():
            text = {f"text_encoder.{within}.{factor}": value for factor, value in factors.items()}
            save_file(narrow | text, folder / f"{file}.safetensors")
    return made


def list_adapters(pipe: Any) -> Any:
    return pipe.get_list_adapters() if hasattr(pipe, "get_list_adapters") else None


def draw_states(name: str, folder: Path, is_narrow: bool) -> list[tuple[Any, Any]]:
    """The plain pictures and adapters before all edits and after each."""
    pipe = MAKE[name]()
    drawn = [(run(pipe, name), list_adapters(pipe))]
    for edit in (narrow_edits(load) if is_narrow else edits(name)).values():
        edit(pipe, folder)
        drawn.append((run(pipe, name), list_adapters(pipe)))
    return drawn


def check(got: Any, wanted: Any, what: str, *, is_exact: bool) -> None:
    if is_exact:
        same(got, wanted, what)
    else:
        assert float((got - wanted).abs().max() / wanted.abs().max()) < 1e-4, what


def in_every_state(name: str, folder: Path, plan: dict[str, Any], before: list[int], is_narrow: bool = False) -> None:
    is_exact, todo = "tensor" not in plan, narrow_edits(load_divided) if is_narrow else edits(name)
    drawn = share(f"{name} in every state of LoRAs {is_narrow}", draw_states, name, folder, is_narrow)
    for (was, (one, _)), (now, (other, _)) in itertools.pairwise(zip(["plain", *todo], drawn, strict=True)):
        different(one, other, f"plain {name}, {was} and {now}")
    for first in before:
        pipe = MAKE[name]()
        steps = list(zip(todo.items(), drawn[1:], strict=True))
        for (_, edit), _ in steps[:first]:
            edit(pipe, folder)
        runner = parallelize(pipe, Plan(**plan))
        check(run(runner, name), drawn[first][0], f"{name} divided after {first} edits", is_exact=is_exact)
        for (what, edit), (picture, adapters) in steps[first:]:
            edit(pipe, folder)
            check(run(runner, name), picture, f"{name} {what}, divided after {first} edits", is_exact=is_exact)
            assert list_adapters(pipe) == adapters, what


PLANS: list[dict[str, Any]] = [{"pipefusion": 2, **EXACT}, {"tensor": 2}, {"tensor": 2, "split_scheme": "sequence"}]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_state_of_loras_is_the_plain_pipelines(
    pool: Pool, folders: dict[str, Path], name: str, plan: dict[str, Any]
) -> None:
    """A failure means that a LoRA reaches some ranks only, that a constant of an older state is used, or that a factor
    is not cut, or a sum lost with the layer of a LoRA that went."""
    states = list(edits(name))
    before = [0, 1 + states.index("fused")]
    if "tensor" in plan:  # what diffusers loads needs whole weights
        before = [1 + max(states.index(state) for state in ("loaded", "a second one") if state in states)]
    pool.run(in_every_state, 2, name, folders[name], plan, before)


@pytest.mark.parametrize("name", WITH_TEXT)
@on_ranks(3)
def test_a_lora_of_one_block_is_loaded_after_the_cut(folders: dict[str, Path], name: str) -> None:
    """A failure means that a LoRA fails on stages that it does not touch, or that one applies the LoRA before it."""
    in_every_state(name, folders[name], {"pipefusion": 3, **EXACT}, [0], is_narrow=True)


@pytest.mark.parametrize("name", WITH_TEXT)
@on_ranks(2)
def test_scales_of_a_call_and_of_its_steps(folders: dict[str, Path], name: str) -> None:
    """A failure means that what is remembered of an earlier step outlives a LoRA that a callback changed."""
    folder = folders[name]
    pipe = MAKE[name]()
    load("one")(pipe, folder)

    def fade(pipe: Any, step: int, *_: Any) -> dict[str, Any]:
        pipe.set_adapters("one", 0.5 - 0.2 * step)
        return {}

    calls: list[dict[str, Any]] = [
        {"joint_attention_kwargs": {"scale": 0.4}},
        {"callback_on_step_end": fade, "callback_on_step_end_tensor_inputs": []},
    ]
    pictures = [run(pipe, name)]
    for call in calls:
        pipe.set_adapters("one", 1.0)
        pictures.append(run(pipe, name, **call))
        different(pictures[-1], pictures[0], f"{name} {list(call)}")
    runner = parallelize(pipe, Plan(pipefusion=2, **EXACT))
    for call, wanted in zip([{}, *calls], pictures, strict=True):
        pipe.set_adapters("one", 1.0)
        same(run(runner, name, **call), wanted, f"{name} {list(call)}")


@on_ranks(2)
def test_kronecker_factors_are_applied_or_refused() -> None:
    """A failure means that a LoKr is compared, cut or left out as if it were a plain LoRA."""
    family = ZOO["z-image"]
    plain = family.make()
    random = torch.Generator().manual_seed(3)
    state = {}
    for name, layer in plain.transformer.named_modules():
        if isinstance(layer, torch.nn.Linear) and name.startswith("layers.") and name.endswith(("to_q", "to_v")):
            rows, columns = layer.out_features // 4, layer.in_features // 4
            state[f"transformer.{name}.lokr_w1"] = 0.5 * torch.randn(4, 4, generator=random)
            state[f"transformer.{name}.lokr_w2"] = 0.5 * torch.randn(rows, columns, generator=random)
    before = plain(**family.call())[0]
    plain.load_lora_weights(dict(state), adapter_name="one")
    wanted = plain(**family.call())[0]
    different(before, wanted, "LoKr")
    for plan in (Plan(pipefusion=2, warmup=ENOUGH), Plan(data=2)):
        pipe = family.make()
        runner = parallelize(pipe, plan)
        ditile.load_lora(pipe, dict(state), adapter_name="one")
        same(runner(**family.call())[0], wanted, str(plan))
    pipe = family.make()
    parallelize(pipe, Plan(tensor=2))
    with pytest.raises(ModelError, match="is a LOKR, and tensor parallelism cuts plain LoRAs only"):
        ditile.load_lora(pipe, dict(state), adapter_name="one")
    # A name that only fused projections have.
    fused = {f"transformer.transformer_blocks.0.attn.to_qkv.lokr_{factor}": torch.ones(4, 4) for factor in ("w1", "w2")}
    with pytest.raises(ModelError, match="changes transformer_blocks.0.attn.to_qkv.lokr_w1, which is there while"):
        ditile.load_lora(ZOO["flux-2"].make(), fused)


@pytest.mark.parametrize(
    ("name", "file", "text", "after"),
    [
        ("flux", "hub-text", "each", "keep"),
        ("flux", "with-text", "first", "offload"),
        ("sd3.5 medium", "with-text", "split", "offload"),
    ],
)
@on_ranks(2)
def test_loras_of_text_encoders_are_edited(
    folders: dict[str, Path], name: str, file: str, text: str, after: str
) -> None:
    """A failure means that the text encoder's part of a LoRA is lost, refused without need, or misses encoders."""
    folder = folders[name]
    plain, pipe = MAKE[name](), MAKE[name]()
    runner: Any = parallelize(pipe, Plan(pipefusion=2, text=text, **EXACT), text_after=after)  # type: ignore[arg-type]
    same(run(runner, name), run(plain, name), f"{name} {text}")
    load("narrow")(plain, folder)
    of_blocks = run(plain, name)
    plain.unload_lora_weights()
    theirs, ours = (loader_edits("narrow", "", partial(each, file=file)) for each in (load, load_divided))
    for what in ("loaded", "scaled", "disabled", "enabled", "fused", "unfused", "unloaded", "loaded"):
        theirs[what](plain, folder)
        ours[what](pipe, folder)
        picture = run(plain, name)
        if what == "loaded":
            different(picture, of_blocks, "the text encoder's LoRA")
        same(run(runner, name), picture, f"{name} {text} {what}")
        assert pipe.get_list_adapters() == plain.get_list_adapters(), what

    def halved(each: Any, *_: Any) -> dict[str, Any]:
        each.set_adapters("narrow", 0.5)
        return {}

    during = {"callback_on_step_end": halved, "callback_on_step_end_tensor_inputs": []}
    same(run(runner, name, **during), run(plain, name, **during), f"{name} {text} scaled in a call")
    same(run(runner, name), run(plain, name), f"{name} {text} after that call")


def load_adapters(pipe: Any, folder: Path, *adapters: str) -> None:
    for adapter in adapters:
        load_divided(adapter)(pipe, folder)


def count_bytes(pipe: Any) -> int:
    return sum(x.numel() * x.element_size() for x in pipe.transformer.parameters())


CHOICES: list[dict[str, float]] = [{"one": 1.0}, {"two": 0.5}, {"one": 0.4, "narrow": 1.5}, {"narrow": 1.0}]


def draw_fresh(name: str, folder: Path, plan: dict[str, Any], scales: dict[str, float]) -> Any:
    """The picture of a runner into which these LoRAs alone were loaded."""
    pipe = MAKE[name]()
    runner = ditile.parallelize(pipe, ditile.Plan(**plan))
    load_adapters(pipe, folder, *scales)
    if scales:
        pipe.set_adapters(list(scales), list(scales.values()))
    return run(runner, name)


CHOICE_PLANS: list[dict[str, Any]] = [{"pipefusion": 2, "warmup": 1}, {"ulysses": 2}, {"data": 2}]


@pytest.mark.parametrize("plan", CHOICE_PLANS, ids=str)
@on_ranks(2)
def test_each_call_has_its_own_loras(folders: dict[str, Path], plan: dict[str, Any]) -> None:
    """A failure means that the LoRA of one request changes the picture of another, or that memory grows."""
    name = "flux"
    folder = folders[name]
    wanted = [draw_fresh(name, folder, plan, scales) for scales in CHOICES]
    plain = draw_fresh(name, folder, plan, {})
    pipe = MAKE[name]()
    runner = ditile.parallelize(pipe, ditile.Plan(**plan))
    before = count_bytes(pipe)
    select_loras(runner, {})
    same(run(runner, name), plain, f"{name} {plan}: before any LoRA")
    load_adapters(pipe, folder, "one", "two", "narrow")
    for scales, picture in [*zip(CHOICES, wanted, strict=True)] * 2:
        select_loras(runner, scales)
        same(run(runner, name), picture, f"{name} {plan}: {scales}")
        different(picture, plain)
        select_loras(runner, {})
        same(run(runner, name), plain, f"{name} {plan}: without")
    full = count_bytes(pipe)
    forget_loras(runner, ["two"])
    assert before < count_bytes(pipe) < full and list_loaded_loras(pipe) == {"one", "narrow"}
    select_loras(runner, CHOICES[2])
    same(run(runner, name), wanted[2], f"{name} {plan}: after another was deleted")
    forget_loras(runner, ["one", "narrow"])
    assert count_bytes(pipe) == before and not list_loaded_loras(pipe)
    same(run(runner, name), plain, f"{name} {plan}: after the last was deleted")
    load_adapters(pipe, folder, "two")
    select_loras(runner, CHOICES[1])
    same(run(runner, name), wanted[1], f"{name} {plan}: loaded again")


def test_what_is_not_loaded_is_refused(folders: dict[str, Path]) -> None:
    """A failure means a picture without the LoRA that was asked for."""
    pipe = MAKE["flux"]()
    load_adapters(pipe, folders["flux"], "one")
    with pytest.raises(ModelError, match="LoRA 'two' is not loaded; there are one"):
        select_loras(pipe, {"one": 1.0, "two": 1.0})


MODEL = "shapes-flux"
STAGES = 2


def make_state(model: nn.Module, alphas: Sequence[float | None] = (None, None), head: int = 4, leaf: str = "") -> Any:
    """Return random factors for layers of all blocks, and for the head, whose name is also that of layers in them.

    Args:
        alphas: of all but the single blocks, and of these.
        head: the rank of the head.
        leaf: what each layer has besides.
    """
    random = torch.Generator().manual_seed(3)
    state = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear) or not name.endswith(("attn.to_q", "net.2", "proj_mlp", "proj_out")):
            continue
        path, rank = f"transformer.{name}", head if name == "proj_out" else 4
        state[f"{path}.lora_A.weight"] = 0.3 * torch.randn(rank, layer.in_features, generator=random)
        state[f"{path}.lora_B.weight"] = 0.3 * torch.randn(layer.out_features, rank, generator=random)
        alpha = alphas[name.startswith("single")]
        if alpha is not None:
            state[f"{path}.alpha"] = torch.tensor(alpha)
        if leaf:
            state[f"{path}.{leaf}"] = 0.5 + torch.rand(layer.out_features, generator=random)
    return state


CASES: dict[str, dict[str, Any]] = {
    "alphas of the later blocks": {"alphas": (None, 1.0)},
    "a rank of the head, and alphas": {"alphas": (1.0, 2.0), "head": 2},
    "DoRA": {"leaf": "lora_magnitude_vector"},
    "a bias": {"leaf": "lora_B.bias"},
}


def describe_layers(model: nn.Module) -> dict[str, Any]:
    layers = {}
    for name, layer in model.named_modules():
        if hasattr(layer, "merged_adapters"):
            alphas = layer.lora_alpha
            factors = {key: value for key, value in layer.state_dict().items() if "base_layer" not in key}
            strength = {key: (layer.r[key], float(alphas[key]), float(layer.scaling[key])) for key in layer.r}
            layers[name] = (strength, factors)
    return layers


@pytest.mark.parametrize("case", CASES)
def test_a_stage_has_the_config_of_the_whole_file(case: str) -> None:
    """A failure means that a LoRA has another strength on some stages."""
    plain = load_model(MODEL)
    state = make_state(plain.transformer, **CASES[case])
    plain.load_lora_weights(dict(state))
    whole = describe_layers(plain.transformer)
    described = []
    seen: set[str] = set()
    for rank in range(STAGES):
        pipe = load_model(MODEL)
        part = load_parts(ASSETS / MODEL, Plan(pipefusion=STAGES), rank, torch.float32)["transformer"]
        pipe.register_modules(transformer=part)
        ditile.load_lora(pipe, dict(state))
        own = describe_layers(part)
        for name, (strength, factors) in own.items():
            assert strength == whole[name][0], name
            assert factors.keys() == whole[name][1].keys()
            for key, value in factors.items():
                assert torch.equal(value, whole[name][1][key]), key
        seen |= own.keys()
        uses = describe_loras({"transformer": part})
        described.append({key: value for key, value in uses.items() if key.startswith("config ")})
    assert seen == whole.keys() != set()
    assert described[0] and described == described[:1] * STAGES


def test_a_layer_that_lacks_what_others_have_is_refused() -> None:
    """A failure means that peft leaves a parameter empty, and the call fails somewhere inside of torch."""
    leaf = "lora_magnitude_vector"
    pipe = load_model(MODEL)
    state = make_state(pipe.transformer, leaf=leaf)
    del state[f"transformer.proj_out.{leaf}"]
    with pytest.raises(ModelError, match=f"has {leaf} in 36 layers, and proj_out lacks it"):
        ditile.load_lora(pipe, state)
    assert not hasattr(pipe.transformer, "peft_config")

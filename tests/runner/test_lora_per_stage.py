"""LoRAs that are loaded into a pipeline of which each rank holds a part, and switched between the calls of one runner.

In fp32 and bitwise at the limit where nothing is stale: each stage does the plain pipeline's sums on its blocks.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import ditile
from ditile.model.known import ASSETS
from ditile.plan.errors import ModelError
from ditile.plan.plan import Plan
from ditile.runner.digest import describe_loras
from ditile.runner.load import load as load_model
from ditile.runner.lora import forget_loras, list_loaded_loras, select_loras
from ditile.runner.runner import parallelize
from tests.pool import on_ranks, share
from tests.runner.cases import MAKE, different, load_parts, run, same
from tests.runner.loras import folders_of
from tests.zoo import ZOO
from tests.zoo.rows import ENOUGH

EXACT = {"patches": 3, "warmup": 4}
NAMES = ("flux", "sd3.5 medium")
EDITS: dict[str, Any] = {
    "scaled": lambda pipe: pipe.set_adapters("narrow", 0.5),
    "both": lambda pipe: pipe.set_adapters(["one", "narrow"], [0.5, 0.8]),
    "the other": lambda pipe: pipe.set_adapters("one"),
    "disabled": lambda pipe: pipe.disable_lora(),
    "enabled": lambda pipe: pipe.enable_lora(),
    "back": lambda pipe: pipe.set_adapters("narrow"),
    "fused": lambda pipe: pipe.fuse_lora(lora_scale=0.7),
    "unfused": lambda pipe: pipe.unfuse_lora(),
    "deleted": lambda pipe: pipe.delete_adapters("narrow"),
    "unloaded": lambda pipe: pipe.unload_lora_weights(),
}
"""What a user does after two LoRAs were loaded, the second of which is of one block alone."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder with LoRAs for each family; with one of the text encoder too, and one as trainers save that."""
    made = folders_of(NAMES, tmp_path_factory)
    for name, folder in made.items():
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


def load(pipe: Any, folder: Path, adapter: str, *, ours: bool, file: str = "") -> None:
    options = {"weight_name": f"{file or adapter}.safetensors", "adapter_name": adapter}
    if ours:
        ditile.load_lora(pipe, folder, **options)
    else:
        pipe.load_lora_weights(folder, **options)


def edits_of(folder: Path, *, ours: bool) -> dict[str, Any]:
    """The LoRA of a single block is loaded first, and behind the other in the end, when it alone is active."""
    loads = {name: functools.partial(load, folder=folder, adapter=name, ours=ours) for name in ("narrow", "one")}
    return loads | EDITS | {"one again": loads["one"], "narrow again": loads["narrow"]}


def draw_edited(name: str, folder: Path) -> list[tuple[Any, dict[str, list[str]]]]:
    """The plain pictures and adapters, before all edits and after each."""
    pipe = MAKE[name]()
    drawn = [(run(pipe, name), pipe.get_list_adapters())]
    for edit in edits_of(folder, ours=False).values():
        edit(pipe)
        drawn.append((run(pipe, name), pipe.get_list_adapters()))
    return drawn


@pytest.mark.parametrize("name", NAMES)
@on_ranks(3)
def test_a_lora_of_one_block_is_loaded_after_the_cut(folders: dict[str, Path], name: str) -> None:
    """A failure means that a LoRA cannot be loaded on the stages that it does not touch, has no effect there, or that
    one of them still applies the LoRA before it."""
    folder = folders[name]
    drawn, pipe = share(f"{name} with LoRAs of one block", draw_edited, name, folder), MAKE[name]()
    for (one, _), (other, _) in itertools.pairwise(drawn[:3]):
        different(one, other, f"{name}: a LoRA has no effect")
    runner = parallelize(pipe, Plan(pipefusion=3, **EXACT))
    for (what, edit), (picture, adapters) in zip(edits_of(folder, ours=True).items(), drawn[1:], strict=True):
        edit(pipe)
        same(run(runner, name), picture, f"{name} {what}")
        assert pipe.get_list_adapters() == adapters, what


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
    """A failure means that the text encoder's part of a LoRA is lost, refused where the encoder is not, or misses
    encoders that wait for the next call."""
    folder = folders[name]
    plain, pipe = MAKE[name](), MAKE[name]()
    runner: Any = parallelize(pipe, Plan(pipefusion=2, text=text, **EXACT), text_after=after)  # type: ignore[arg-type]
    pictures = [run(plain, name)]
    same(run(runner, name), pictures[0], f"{name} {text}")
    load(plain, folder, "narrow", ours=False)
    of_blocks = run(plain, name)
    plain.unload_lora_weights()
    load(plain, folder, "narrow", ours=False, file=file)
    different(run(plain, name), of_blocks, "the text encoder's LoRA")
    load(pipe, folder, "narrow", ours=True, file=file)
    for what in ("loaded", "scaled", "disabled", "enabled", "fused", "unfused", "unloaded"):
        EDITS.get(what, str)(plain)
        EDITS.get(what, str)(pipe)
        pictures.append(run(plain, name))
        same(run(runner, name), pictures[-1], f"{name} {text} {what}")
        assert pipe.get_list_adapters() == plain.get_list_adapters(), what
    load(plain, folder, "narrow", ours=False, file=file)
    load(pipe, folder, "narrow", ours=True, file=file)

    def halved(each: Any, *_: Any) -> dict[str, Any]:
        each.set_adapters("narrow", 0.5)
        return {}

    during = {"callback_on_step_end": halved, "callback_on_step_end_tensor_inputs": []}
    same(run(runner, name, **during), run(plain, name, **during), f"{name} {text} scaled in a call")
    same(run(runner, name), run(plain, name), f"{name} {text} after that call")


def load_adapters(pipe: Any, folder: Path, *adapters: str) -> None:
    for adapter in adapters:
        ditile.load_lora(pipe, folder, weight_name=f"{adapter}.safetensors", adapter_name=adapter)


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


PLANS: list[dict[str, Any]] = [{"pipefusion": 2, "warmup": 1}, {"ulysses": 2}, {"data": 2}]


@pytest.mark.parametrize("plan", PLANS, ids=str)
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


def list_layers(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    """Layers of all blocks, and the head, whose name is also that of layers in single blocks."""
    layers = []
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name.endswith(("attn.to_q", "net.2", "proj_mlp", "proj_out")):
            layers.append((name, layer))
    return layers


def make_factors(model: nn.Module, rank: Callable[[str], int] = lambda name: 4) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(3)
    state = {}
    for name, layer in list_layers(model):
        path = f"transformer.{name}"
        state[f"{path}.lora_A.weight"] = 0.3 * torch.randn(rank(name), layer.in_features, generator=random)
        state[f"{path}.lora_B.weight"] = 0.3 * torch.randn(layer.out_features, rank(name), generator=random)
    return state


def is_single(name: str) -> bool:
    return name.startswith("single")


def add_alphas(state: dict[str, Tensor], find_alpha: Callable[[str], float | None]) -> dict[str, Tensor]:
    for key in [key for key in state if key.endswith(".lora_A.weight")]:
        path = key.removesuffix(".lora_A.weight")
        alpha = find_alpha(path.removeprefix("transformer."))
        if alpha is not None:
            state[f"{path}.alpha"] = torch.tensor(alpha)
    return state


def add_everywhere(model: nn.Module, leaf: str) -> dict[str, Tensor]:
    state = make_factors(model)
    random = torch.Generator().manual_seed(4)
    for name, layer in list_layers(model):
        state[f"transformer.{name}.{leaf}"] = 0.5 + torch.rand(layer.out_features, generator=random)
    return state


CASES: dict[str, Callable[[nn.Module], dict[str, Tensor]]] = {
    "alphas of the later blocks": lambda model: add_alphas(
        make_factors(model), lambda name: 1.0 if is_single(name) else None
    ),
    "a rank of the head, and alphas": lambda model: add_alphas(
        make_factors(model, lambda name: 2 if name == "proj_out" else 4), lambda name: 2.0 if is_single(name) else 1.0
    ),
    "DoRA": lambda model: add_everywhere(model, "lora_magnitude_vector"),
    "a bias": lambda model: add_everywhere(model, "lora_B.bias"),
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
    state = CASES[case](plain.transformer)
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
    state = add_everywhere(pipe.transformer, leaf)
    del state[f"transformer.proj_out.{leaf}"]
    with pytest.raises(ModelError, match=f"has {leaf} in 36 layers, and proj_out lacks it"):
        ditile.load_lora(pipe, state)
    assert not hasattr(pipe.transformer, "peft_config")

"""Loading says what is wrong with a model, in one line. A failure would mean a traceback, or a pickle that is read."""

from __future__ import annotations

import functools
import inspect
import json
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

import ditile
from ditile import DitileError, LoadError, ModelError
from ditile.model.known import ASSETS, list_bundled_models
from ditile.plan.plan import Plan
from ditile.runner.load import load
from ditile.runner.model_files import check_hub_access, defaults, find_model_source
from tests import tiny
from tests.runner.cases import load_parts

WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a bundled model that a test may damage."""
    return Path(shutil.copytree(ASSETS / "shapes-pixart", tmp_path / "model"))


def message(name: object, kind: type[Exception] = LoadError) -> str:
    with pytest.raises(kind) as caught:
        load(str(name))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_bundled_models_load_in_float32_and_in_another_type(folder: Path) -> None:
    pipe = load("shapes-pixart")
    assert type(pipe).__name__ == "PixArtSigmaPipeline" and pipe.transformer.dtype is torch.float32
    for dtype in ("bfloat16", torch.bfloat16):
        assert load(str(folder), dtype=dtype).transformer.dtype is torch.bfloat16


def test_a_model_that_is_based_on_another_one() -> None:
    """Its transformer is its own, all else is that of its base, and a rank of a plan reads its part. A failure means
    that a model of one file cannot be read, or reads its base's transformer."""
    turbo, base = load("shapes-flux-turbo"), load("shapes-flux")
    assert not torch.equal(turbo.transformer.proj_out.weight, base.transformer.proj_out.weight)
    for name in ("vae", "text_encoder", "text_encoder_2"):
        own, other = (getattr(pipe, name).state_dict() for pipe in (turbo, base))
        assert own.keys() == other.keys() and all(torch.equal(own[key], other[key]) for key in own)
    assert turbo.scheduler.config == base.scheduler.config
    assert turbo.tokenizer.get_vocab() == base.tokenizer.get_vocab() == turbo.tokenizer_2.get_vocab()
    source, plan = ASSETS / "shapes-flux-turbo", Plan(pipefusion=2, text="split")
    parts = load_parts(source, plan, 1, torch.float32)
    assert parts.keys() == {"transformer", "text_encoder", "text_encoder_2"}
    assert torch.equal(parts["transformer"].proj_out.weight, turbo.transformer.proj_out.weight)


def test_defaults_are_those_beside_the_model(folder: Path) -> None:
    assert defaults("shapes-flux")["true_cfg_scale"] > 1
    (folder / "generation.json").unlink()
    assert defaults(str(folder)) == {}
    for wrong, says in (
        ("[1]", "not a JSON object"),
        ('{"true_cfg_scale": NaN}', "true_cfg_scale=nan should be a finite number"),
        ('{"clean_caption": {"deep": 1}}', "clean_caption={'deep': 1} should be a valid"),
    ):
        (folder / "generation.json").write_text(wrong)
        with pytest.raises(LoadError, match=says):
            defaults(str(folder))
    assert defaults("someone/something") == {}
    for model in list_bundled_models():
        known = inspect.signature(type(load(model)).__call__).parameters
        assert defaults(model).keys() <= known.keys(), model


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("./nosuchfolder", "there is no such folder"),
        ("owner/" + "x" * 300, "is not a hub id"),
        ("a\0b", "is not known"),
        ("folder", "has no model_index.json"),
    ],
)
def test_a_name_that_is_neither_a_folder_nor_a_hub_id(
    name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure would mean a traceback of huggingface_hub or of the file system, wherever a name is taken."""
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    assert says in message(name, DitileError)
    for call in (defaults, functools.partial(ditile.plan_for, hardware="l40-pcie")):
        with pytest.raises(DitileError, match=re.escape(says)):
            call(name)


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The hub's cache for this test; what it had there is not remembered for others."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    yield tmp_path / "cache"
    check_hub_access.cache_clear()


def test_a_hub_id_that_cannot_be_had_is_refused_at_once(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline, and where nothing answers. A failure means a minute of tries before a user hears of it."""
    assert "'someone/something' is not in the hub's cache" in message("someone/something")
    assert "HF_HUB_OFFLINE is set" in message("flux.1-dev")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    assert f"the network does not reach {address}" in message("black-forest-labs/FLUX.1-dev")
    snapshot = hub_cache / "models--black-forest-labs--FLUX.1-dev" / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    (snapshot / "model_index.json").touch()
    assert find_model_source("flux.1-dev") == "black-forest-labs/FLUX.1-dev"


def write_without(folder: Path, lost: str, end: str = ".safetensors", weights: str = WEIGHTS) -> None:
    """Saves a model's weights but for one tensor, which has another name."""
    tensors = load_file(folder / weights)
    tensors["renamed"] = tensors.pop(lost)
    save_file(tensors, folder / weights.replace(".safetensors", end), {"format": "pt"})


def write_quantized(folder: Path, dtype: torch.dtype, **scales: torch.Tensor) -> None:
    """Stores one weight in another type, with scales beside it."""
    tensors = load_file(folder / WEIGHTS)
    tensors["proj_out.weight"] = tensors["proj_out.weight"].to(dtype)
    tensors |= {f"proj_out.weight_{name}": scale for name, scale in scales.items()}
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def change_config(name: str, **values: Any) -> Callable[[Path], Any]:
    """Changes a config."""

    def write_config(folder: Path) -> None:
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | values))

    return write_config


LOST_TEXT = "encoder.block.0.layer.0.SelfAttention.q.weight"
SHARD_INDEX = "transformer/diffusion_pytorch_model.safetensors.index.json"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no component": (lambda folder: shutil.rmtree(folder / "vae"), "vae is missing"),
    "no shard": (
        lambda folder: (folder / SHARD_INDEX).write_text(json.dumps({"weight_map": {"a": "part-2.safetensors"}})),
        "part-2.safetensors is missing",
    ),
    "a pickle": (lambda folder: (folder / WEIGHTS).rename((folder / WEIGHTS).with_suffix(".bin")), "pickle"),
    "cut short": (
        lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-1]),
        "not a whole safetensors file",
    ),
    # diffusers alone would draw with a random one
    "no tensor": (
        lambda folder: write_without(folder, "proj_out.weight"),
        "lacks 1 weight(s), such as proj_out.weight",
    ),
    "scales": (
        lambda folder: write_quantized(folder, torch.float8_e4m3fn, scale=torch.ones(())),
        "has proj_out.weight_scale of F32, so its weights are quantized",
    ),
    "a class that is a number": (change_config("model_index.json", _class_name=3), "_class_name=3 should be a valid"),
    "layers": (change_config("transformer/config.json", num_layers=10**9), "says num_layers=1000000000, and no model"),
}
"""What is done to a folder, and what loading says of it."""


@pytest.mark.nightly
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_folder_that_is_damaged(folder: Path, damage: str) -> None:
    spoil, says = DAMAGES[damage]
    spoil(folder)
    assert says in message(folder)
    if damage == "scales":
        # Of a dry run too, which reads no weights.
        with pytest.raises(LoadError, match="so its weights are quantized"):
            find_model_source(str(folder), weights=False)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("transformer/config.json", {"num_attention_heads": "x"}),  # TypeError
        ("vae/config.json", {"block_out_channels": []}),  # IndexError
    ],
    ids=str,
)
def test_a_config_of_no_model(folder: Path, name: str, values: dict[str, Any]) -> None:
    """diffusers and transformers raise almost anything. A failure means a traceback of hundreds of lines."""
    change_config(name, **values)(folder)
    assert "is not one that diffusers can build here: " in message(folder, ModelError)


def test_a_shard_lacks_a_weight_of_its_index(tmp_path: Path) -> None:
    """An index that lacks a weight, as its file does. A failure means random numbers in its place."""
    pipe = tiny.sd3()
    pipe.save_pretrained(tmp_path / "model")
    part = tmp_path / "model" / "text_encoder_3"
    shutil.rmtree(part)
    pipe.text_encoder_3.save_pretrained(part, max_shard_size="20KB")
    index = part / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    shard = content["weight_map"].pop(LOST_TEXT)
    index.write_text(json.dumps(content))
    tensors = load_file(part / shard)
    tensors.pop(LOST_TEXT)
    save_file(tensors, part / shard, {"format": "pt"})
    assert f"lacks 1 weight(s), such as {LOST_TEXT}" in message(tmp_path / "model")

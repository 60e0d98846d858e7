"""Components of a pipeline from files of their own: they are what diffusers and transformers make of the files."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

import ditile
from ditile import LoadError, ModelError
from ditile.plan.plan import Plan
from ditile.planner.subject import PlanSubject
from ditile.runner.load import load_component_file
from ditile.runner.model_files import find_model_source
from tests import tiny
from tests.pool import Pool, on_ranks
from tests.runner.cases import find_component, run
from tests.runner.single_files import (
    compare_images,
    copy_weights,
    save_configs,
    save_encoder_gguf,
    save_gguf,
    save_single_file,
)
from tests.runner.test_gguf import make_model
from tests.zoo import encoders
from tests.zoo.rows import EVERY

pytestmark = pytest.mark.filterwarnings("ignore")
WAN = "wan-2.2"
BOTH = ("transformer", "transformer_2")


@pytest.mark.parametrize("ending", ["safetensors", "gguf"])
def test_two_transformers(pool: Pool, tmp_path: Path, ending: str) -> None:
    """A failure means that the files of two transformers are exchanged, or that one is read from another place."""
    pipe = EVERY[WAN].make()
    # With rows of several blocks of the format, for two ranks.
    for seed, name in enumerate(BOTH):
        setattr(pipe, name, tiny.randomise(make_model("wan-2.1", num_attention_heads=2, ffn_dim=128), seed))
    save_configs(pipe, tmp_path / "model")
    save = save_gguf if ending == "gguf" else save_single_file
    files = {name: str(save(getattr(pipe, name), "wan-2.1", tmp_path / f"{name}.{ending}")) for name in BOTH}
    for problems in pool.run(compare_images, 2, WAN, tmp_path / "model", files):
        assert not problems, "\n".join(problems)


def make_language_model(name: str) -> Any:
    sizes = encoders.LANGUAGE | {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    config = getattr(transformers, f"{name}Config")(**sizes)
    return getattr(transformers, f"{name}Model")(config).eval()


ENCODERS: list[tuple[str, Callable[[], Any]]] = [
    ("t5encoder", tiny.t5),
    ("qwen3", lambda: make_language_model("Qwen3")),
    ("llama", lambda: make_language_model("Llama")),
    ("gemma2", lambda: make_language_model("Gemma2")),
]


@pytest.mark.parametrize(("architecture", "make"), ENCODERS)
def test_an_encoder_of_gguf_is_that_of_transformers(tmp_path: Path, architecture: str, make: Callable[[], Any]) -> None:
    """A failure means that a weight is exchanged, or unpacked to other numbers."""
    encoder = make()
    encoder.config.save_pretrained(tmp_path / "text_encoder")
    index = {"_class_name": "FluxPipeline", "text_encoder": ["transformers", type(encoder).__name__]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    file = save_encoder_gguf(encoder, architecture, tmp_path / "encoder.gguf")
    place = tmp_path / "text_encoder"
    theirs: Any = type(encoder).from_pretrained(place, gguf_file=str(file), config=encoder.config, dtype=torch.bfloat16)
    mine: Any = load_component_file(find_component(tmp_path, "text_encoder"), str(file), Plan(), 0, torch.bfloat16)
    assert type(mine) is type(encoder) and not mine.training
    wanted = theirs.state_dict()
    assert wanted.keys() == mine.state_dict().keys()
    for name, tensor in mine.state_dict().items():
        assert tensor.dtype == wanted[name].dtype and torch.equal(tensor, wanted[name]), name


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline of FLUX.1 without the weights of its text encoders and its VAE, and these in files beside it."""
    folder = tmp_path_factory.mktemp("saved")
    pipe = tiny.flux()
    pipe.save_pretrained(folder / "pipe")
    for name in ("text_encoder", "text_encoder_2", "vae"):
        next((folder / "pipe" / name).glob("*.safetensors")).unlink()
    clip = copy_weights(pipe.text_encoder)
    # As the authors and ComfyUI have them, whatever this version of transformers calls its modules.
    clip = {f"text_model.{name.removeprefix('text_model.')}": tensor for name, tensor in clip.items()}
    save_file(clip, folder / "clip.safetensors")
    t5 = copy_weights(pipe.text_encoder_2)
    save_file(t5, folder / "t5.safetensors")
    save_encoder_gguf(pipe.text_encoder_2, "t5encoder", folder / "t5.gguf")
    save_file(copy_weights(pipe.vae), folder / "vae.safetensors")
    matrix = "encoder.block.0.layer.0.SelfAttention.q"
    save_file({name: t5[name] for name in t5 if not name.startswith(matrix)}, folder / "lacking.safetensors")
    save_file(t5 | {f"{matrix}.weight": t5[f"{matrix}.weight"].char()}, folder / "integers.safetensors")
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 64, "num_layers": 2}
    umt5 = transformers.UMT5EncoderModel(transformers.UMT5Config(**sizes, feed_forward_proj="gated-gelu"))
    save_file(copy_weights(umt5), folder / "umt5.safetensors")
    return folder


@on_ranks(2)
def test_images_of_encoders_in_files(saved: Path) -> None:
    """A failure means that a rank has another part of a text encoder than it computes, or other weights."""
    folder = str(saved)
    warnings.simplefilter("ignore")
    place = f"{folder}/pipe"
    pipe: Any = tiny.flux()
    pipe.text_encoder_2 = transformers.T5EncoderModel.from_pretrained(
        f"{place}/text_encoder_2", gguf_file=f"{folder}/t5.gguf", config=pipe.text_encoder_2.config
    )
    want = run(pipe, "flux")
    files = {"text_encoder": "clip.safetensors", "text_encoder_2": "t5.gguf", "vae": "vae.safetensors"}
    files = {name: f"{folder}/{file}" for name, file in files.items()}
    problems = []
    for text in ("each", "first", "split"):
        plan = Plan(pipefusion=2, warmup=99, text=text)  # type: ignore[arg-type]
        loaded: Any = ditile.load(place, plan=plan, components=files)
        got = run(ditile.parallelize(loaded, plan), "flux")
        if not torch.equal(got, want):
            problems.append(f"text={text} makes another image")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("name", "file", "message"),
    [
        ("text_encoder_2", "lacking.safetensors", "lacks 1 weight.*SelfAttention.q.weight"),
        ("text_encoder_2", "integers.safetensors", r"SelfAttention.q.weight \(I8\) is of weights that are quantized"),
        ("text_encoder_2", "umt5.safetensors", r"it has \d+ more weight.*, such as encoder.block.1.*; take a file of"),
        ("tokenizer", "t5.gguf", "tokenizer of .* is a .*, which is not read from one file"),
    ],
)
def test_files_that_do_not_fit_are_refused(
    saved: Path, name: str, file: str, message: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure means random weights, a traceback or a table before the line, or a dry run of what cannot be loaded."""
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [caplog.handler])
    files = {"text_encoder": "clip.safetensors", "text_encoder_2": "t5.safetensors", "vae": "vae.safetensors"}
    files |= {name: file}
    files = {name: str(saved / file) for name, file in files.items()}
    with pytest.raises((LoadError, ModelError), match=message) as refused:
        ditile.load(str(saved / "pipe"), components=files)
    assert "\n" not in str(refused.value)
    # As a dry run does, by the header.
    with pytest.raises((LoadError, ModelError), match=message):
        PlanSubject.from_configs(
            "pipe", find_model_source(str(saved / "pipe"), weights=False, components=files), components=files
        )
    assert not caplog.records

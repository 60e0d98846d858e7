"""Modular pipelines: folders of them, whole or by share; and what a runner does that one class has no need of."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import torch.distributed as dist
from diffusers import ComponentsManager
from diffusers.modular_pipelines import PipelineState
from diffusers.modular_pipelines.minimax_h3.modular_blocks_minimax_h3 import MiniMaxH3Blocks
from PIL import Image

import ditile
from ditile import LoadError, ModelError, Plan
from ditile.cli import main
from ditile.model.hooks.placeholders import is_placeholder
from ditile.model.pipeline_calls import find_denoisers
from ditile.plan.errors import DitileError, StoppedError
from ditile.planner.subject import PlanSubject
from ditile.runner.callbacks import StepWatch
from ditile.runner.load import choose_text_workflow
from ditile.runner.runner import build_single_runner
from tests.pool import Pool, on_ranks
from tests.runner.cases import same
from tests.tiny import flux
from tests.zoo import ZOO
from tests.zoo.modular import echo, echo_call, minimax_h3, modular
from tests.zoo.pictures import flux_2_vae
from tests.zoo.rows import list_tensors

pytestmark = pytest.mark.filterwarnings("ignore")
INDEX = "modular_model_index.json"
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
DRAW = ("generate", "a red ring", "--height", "48", "--width", "80", "--steps", "3", "--seed", "7", "--threads", "1")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("modular") / "flux"
    modular(diffusers.FluxAutoBlocks(), **flux().components).save_pretrained(str(folder), overwrite_modular_index=True)
    return folder


@pytest.fixture
def copied(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In another place than its index says."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(saved, tmp_path / "copied"))


def flux_call(**changes: Any) -> dict[str, Any]:
    return ZOO["flux-modular"].call() | {"output": "latents"} | changes


def draw(pipe: Any) -> torch.Tensor:
    latents: torch.Tensor = pipe(**flux_call())
    return latents


def edit_index(**values: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        (folder / INDEX).write_text(json.dumps({**index, **values}))

    return edit


def test_a_folder_is_the_pipeline_that_was_saved(copied: Path, saved: Path) -> None:
    """Components that are there are read there, wherever the index says that they were; others where it says."""
    wanted = draw(modular(diffusers.FluxAutoBlocks(), **flux().components))
    shutil.rmtree(copied / "vae")
    pipe = ditile.load(str(copied))
    assert isinstance(pipe, diffusers.FluxModularPipeline) and torch.equal(draw(pipe), wanted)
    assert pipe.get_component_spec("vae").pretrained_model_name_or_path == str(saved)
    assert ditile.load(str(copied), dtype="bfloat16").transformer.dtype == torch.bfloat16


def draw_share(folder: str) -> tuple[torch.Tensor, int]:
    """On a rank: latents, and how many blocks it has not read."""
    plan = Plan(pipefusion=2, warmup=9, text="first")
    pipe = ditile.load(folder, plan=plan)
    emptied = sum(map(is_placeholder, pipe.transformer.transformer_blocks))
    emptied += sum(map(is_placeholder, pipe.transformer.single_transformer_blocks))
    return draw(ditile.parallelize(pipe, plan)), emptied


def test_a_rank_reads_its_share(pool: Pool, saved: Path) -> None:
    """Bit for bit what one rank draws, and no rank has all blocks."""
    wanted = draw(ditile.load(str(saved)))
    for latents, emptied in pool.run(draw_share, 2, str(saved)):
        assert torch.equal(latents, wanted) and emptied > 0


def test_a_workflow_reads_its_own_transformer_alone(tmp_path: Path) -> None:
    """A failure means a model of twice the memory that was planned for, or the weights of the other one."""
    # A transformer for text and one for references.
    blocks, both = MiniMaxH3Blocks(), minimax_h3()
    blocks.sub_blocks.pop("text_encoder")
    modular(blocks, **both.components).save_pretrained(str(tmp_path), overwrite_modular_index=True)
    edit_index(_blocks_class_name="MiniMaxH3Blocks")(tmp_path)
    assert choose_text_workflow(str(tmp_path)) == "t2va" and choose_text_workflow("shapes-flux") is None
    both, text, references = (ditile.load(str(tmp_path), workflow=name) for name in (None, "t2va", "ref2va"))
    assert find_denoisers(both).keys() == {"transformer", "transformer_ref"}
    for pipe, name in ((text, "transformer"), (references, "transformer_ref")):
        (model,) = find_denoisers(pipe).values()
        wanted = getattr(both, name).state_dict()
        assert all(torch.equal(weight, wanted[key]) for key, weight in model.state_dict().items())
    runner = ditile.parallelize(text, Plan())
    assert runner.pipe is text and not hasattr(text, "transformer_ref")
    runner.restore()
    with pytest.raises(ModelError, match="Workflow 'x' not found"):
        ditile.load(str(tmp_path), workflow="x")
    with pytest.raises(ModelError, match="is no modular pipeline"):
        ditile.load("shapes-flux", workflow="t2va")
    # Weights in whose place a file is given may be anything.
    (path,) = (tmp_path / "transformer").glob("*.safetensors")
    own = path.rename(tmp_path / "own.safetensors")
    path.write_bytes(own.read_bytes()[:-8])
    assert choose_text_workflow(str(tmp_path), {"transformer": str(own)}) == "t2va"


REFUSED: dict[str, tuple[Callable[[Path], Any], type[DitileError], str]] = {
    "cut short": (lambda folder: (folder / WEIGHTS).write_bytes(b"1234"), LoadError, "not a whole safetensors file"),
    "a pickle": (lambda folder: (folder / WEIGHTS).rename((folder / WEIGHTS).with_suffix(".bin")), LoadError, "pickle"),
    "code": (
        lambda folder: (folder / "modular_config.json").write_text(
            json.dumps({"auto_map": {"ModularPipelineBlocks": "blocks.Blocks"}})
        ),
        ModelError,
        "trust_remote_code",
    ),
    "elsewhere, and not there": (
        edit_index(vae=["diffusers", "AutoencoderKL", {
            "pretrained_model_name_or_path": "/nowhere/at/all", "subfolder": "ae",
            "type_hint": ["diffusers", "AutoencoderKL"],
        }]),
        LoadError,
        "/nowhere/at/all",
    ),
}  # fmt: skip
"""What is done to a folder, the error and what it says."""


@pytest.mark.parametrize("damage", REFUSED)
def test_a_folder_that_will_not_do_is_one_line(
    copied: Path, damage: str, capsys: pytest.CaptureFixture[str], forked_ranks: None
) -> None:
    """Where diffusers would log a traceback and go on without the component."""
    spoil, error, says = REFUSED[damage]
    spoil(copied)
    with pytest.raises(error, match=says):
        ditile.load(str(copied))
    capsys.readouterr()
    assert main.main([*DRAW, "--model", str(copied), "--out", "a.png"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert sum(line.startswith("ditile: ") for line in lines) == 1 and "Traceback" not in "\n".join(lines)
    assert not Path("a.png").exists()


def test_the_command_draws_what_python_draws(
    copied: Path, capfd: pytest.CaptureFixture[str], forked_ranks: None
) -> None:
    """On two ranks and one, from text and from a picture."""
    Image.new("RGB", (80, 48), "red").save("red.png")
    model = ("--model", str(copied))
    assert main.main([*DRAW, *model, "--out", "one.png"]) == 0
    assert main.main([*DRAW, *model, "--pipefusion", "2", "--warmup", "3", "--out", "two.png"]) == 0
    runner = ditile.parallelize(ditile.load(str(copied)))
    call = {"height": 48, "width": 80, "num_inference_steps": 3}
    drawn = runner(prompt="a red ring", generator=torch.Generator().manual_seed(7), output="images", **call)[0]
    for name in ("one.png", "two.png"):
        assert np.array_equal(np.asarray(Image.open(name)), np.asarray(drawn))
    capfd.readouterr()
    assert main.main([*DRAW, *model, "--image", "red.png", "--strength", "0.7", "--out", "edit.png"]) == 0
    assert "pipeline: FluxModularPipeline" in capfd.readouterr().err
    assert main.main([*DRAW, *model, "--mask", "red.png", "--image", "red.png", "--out", "no.png"]) == 2


def test_a_pipeline_of_blocks_alone_is_planned_for_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """FLUX.3: two branches of guidance, and a token for 16 pixels. A failure means that diffusers' newest models are
    refused or priced for another call; one that steps its latents itself is refused in one line."""
    flux_3 = ZOO["flux-3"].make()
    blocks = diffusers.Flux3AutoBlocks()
    for name in ("prompt_upsampler", "text_encoder"):
        blocks.sub_blocks.pop(name)
    folder = tmp_path / "flux3"
    modular(blocks, transformer=flux_3.transformer, vae=flux_2_vae()).save_pretrained(
        str(folder), overwrite_modular_index=True
    )
    edit_index(_blocks_class_name="Flux3AutoBlocks")(folder)
    subject = PlanSubject.from_configs("flux3", folder)
    pixels = subject.token_side
    shape = subject.make_call_shape({"height": 4 * pixels, "width": 6 * pixels, "max_sequence_length": 80})
    assert (pixels, shape.grid.num_tokens, shape.text, shape.calls) == (16, 24, 80, 2)
    words = ("--model", str(folder), "--height", str(4 * pixels), "--width", str(6 * pixels))
    assert main.main(["plan", *words, "--hardware", "l40-pcie", "--devices", "2", "--json", "-"]) == 0
    assert "cfg=2" in capsys.readouterr().out
    pipe = echo()
    with pytest.raises(ModelError, match="has no part `scheduler` that it steps"):
        ditile.parallelize(pipe, Plan())
    assert pipe(**echo_call()).isfinite().all()
    pipe.save_pretrained(str(tmp_path / "echo"), overwrite_modular_index=True)
    capsys.readouterr()
    assert main.main(["plan", "--model", str(tmp_path / "echo"), "--hardware", "l40-pcie"]) == 2
    error = capsys.readouterr().err
    assert "EchoModularPipeline, whose calls are not planned for" in error and error.count("\n") == 1


PATCHES = Plan(patches=3, warmup=1)


@on_ranks(2)
def test_a_stop_on_one_rank_ends_the_call_on_both() -> None:
    """And the next call is right; `output_on` gives rank 0 alone the result."""
    runner = ditile.parallelize(ZOO["flux-modular"].make(), Plan(pipefusion=2, patches=3, warmup=1))
    wanted = runner(**flux_call())
    assert (runner(**flux_call(), output_on="first") is None) == (dist.get_rank() == 1)
    stop = StepWatch(on_step=lambda step, _: runner.stop() if step == 1 and dist.get_rank() == 1 else None)
    with pytest.raises(StoppedError):
        runner(**flux_call(num_inference_steps=8), watch=stop)
    assert torch.equal(runner(**flux_call()), wanted)
    assert type(runner.pipe._blocks.sub_blocks["denoise"]).__name__ == "FluxCoreDenoiseStep"


@pytest.mark.parametrize("name", ["qwen-image-modular", "flux-inpaint", "wan-2.2"])
def test_two_threads_count_steps_apart(name: str) -> None:
    """Each runner counts its own steps by `enumerate`, of a tree of blocks or of one function: blends, sigmas and
    boundaries of the two calls have other lengths. A failure means that one call is drawn by the steps of another."""
    calls = [{"num_inference_steps": steps} for steps in (3, 5)]
    pipes = [ZOO[name].make() for _ in calls]
    runners = [build_single_runner(pipe, PATCHES) for pipe in pipes]
    make = ZOO[name].call
    wanted = [list_tensors(runner(**make() | call)) for runner, call in zip(runners, calls, strict=True)]
    found: dict[int, list[torch.Tensor]] = {}
    together = threading.Barrier(2)

    def draw(index: int) -> None:
        for _ in range(3):
            together.wait(30)
            found[index] = list_tensors(runners[index](**make() | calls[index]))

    threads = [threading.Thread(target=draw, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(2):
        same(found[index], wanted[index])


def draw_both_workflows() -> list[torch.Tensor]:
    """On one of three ranks, or alone: a video of each checkpoint, by one runner."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    pipe = minimax_h3()
    runner = ditile.parallelize(pipe, Plan(pipefusion=ranks, patches=2, warmup=9)) if ranks > 1 else pipe
    drawn: list[torch.Tensor] = []
    for name in ("minimax-h3", "minimax-h3-references"):
        state = PipelineState({"references": []} if name.endswith("references") else {})
        drawn += list_tensors(runner(**ZOO[name].call() | {"state": state}))
    return drawn


def test_both_checkpoints_of_a_family_are_divided(pool: Pool) -> None:
    """MiniMax-H3 with both of its transformers: what is given says which one a call takes. Bit for bit."""
    wanted = draw_both_workflows()
    assert len(wanted) == 4 and wanted[0].shape == wanted[2].shape and not torch.equal(wanted[0], wanted[2])
    for drawn in pool.run(draw_both_workflows, 3):
        assert all(torch.equal(one, other) for one, other in zip(drawn, wanted, strict=True))


def test_a_manager_offloads_what_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Components come to their device when they are called, and leave for others: hooks move the model of each call.

    The picture, modules and weights are the same.
    """
    # A ComponentsManager asks how much of its device is free, which torch does not say of a CPU.
    monkeypatch.setattr(torch.cpu, "mem_get_info", lambda _: (0, 1), raising=False)
    manager, moved, wanted = ComponentsManager(), list[str](), draw(ZOO["flux-modular"].make())
    offloaded = diffusers.FluxAutoBlocks().init_pipeline(components_manager=manager)
    parts = {name: part for name, part in flux().components.items() if name in offloaded.component_names}
    offloaded.update_components(**parts)

    def offload_all(hooks: list[Any], model_id: str, **_: Any) -> list[Any]:
        moved.append(model_id.rsplit("_", 1)[0])
        return hooks

    manager.enable_auto_cpu_offload(device="cpu", offload_strategy=offload_all)
    runner = build_single_runner(offloaded, Plan(patches=3, warmup=9))
    model, weights = offloaded.transformer, list(offloaded.transformer.parameters())
    moved.clear()
    assert torch.equal(runner(**flux_call()), wanted) and "transformer" in moved
    assert offloaded.transformer is model
    assert all(one is other for one, other in zip(model.parameters(), weights, strict=True))
    runner.restore()
    assert torch.equal(offloaded(**flux_call()), wanted)

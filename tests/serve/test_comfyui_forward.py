"""ComfyUI's calls reach diffusers' transformers in the right arguments, and nothing of them is lost silently.

A failure means that a picture of ComfyUI is another one once its model runs elsewhere. `test_comfyui_itself` compares
with ComfyUI's own models where it is installed; here are figures that those have answered.
"""

from __future__ import annotations

import functools
import importlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.serve.comfy import FOLDER, InterruptProcessingException, install_modules, load_nodes
from tests.serve.comfyui_pairs import (
    FIGURES,
    PAIRS,
    LocalConnection,
    build_transformer,
    call_transformer,
    describe_output,
    make_call,
)

PACKAGE = "custom_nodes_ditile_forward"
load_nodes(PACKAGE)
FAMILIES = importlib.import_module(f"{PACKAGE}.forward_families")
CLIENT = importlib.import_module(f"{PACKAGE}.forward_client")
WORKER = importlib.import_module(f"{PACKAGE}.forward_worker")
FLUX = PAIRS["flux"]


@pytest.fixture
def model_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The node's module of models, with what of ComfyUI it is made of."""

    class ModelPatcher:
        def __init__(self, model: Any, *_: Any) -> None:
            self.model = model
            self.model_options: dict[str, Any] = {"transformer_options": {}}
            self.object_patches: dict[str, Any] = {}

        def clone(self) -> Any:
            # ComfyUI's versions before 2026 name the class here.
            copy = ModelPatcher(self.model)
            copy.model_options = {"transformer_options": dict(self.model_options["transformer_options"])}
            return copy

        def add_object_patch(self, name: str, obj: Any) -> None:
            self.object_patches[name] = obj

        def pre_run(self) -> None:
            pass

    def make_executor(original: Any, _: Any, wrappers: list[Any]) -> Any:
        execute = functools.reduce(lambda inner, outer: functools.partial(outer, inner), reversed(wrappers), original)
        return SimpleNamespace(execute=execute)

    contents: dict[str, dict[str, Any]] = {
        "comfy": {},
        "comfy.model_detection": {},
        "comfy.model_management": {"throw_exception_if_processing_interrupted": lambda: None},
        "comfy.model_patcher": {"ModelPatcher": ModelPatcher},
        "comfy.patcher_extension": {
            "WrapperExecutor": SimpleNamespace(new_class_executor=make_executor),
            "WrappersMP": SimpleNamespace(DIFFUSION_MODEL="diffusion_model"),
            "get_all_wrappers": lambda _, options: options.get("wrappers", []),
        },
    }
    install_modules(monkeypatch, contents)
    name = f"{PACKAGE}.forward_model"
    yield importlib.import_module(name)
    del sys.modules[name]


def call_remote(remote: Any, options: Mapping[str, Any] | None = None, **extra: Any) -> torch.Tensor:
    """Return the answer to ComfyUI's call of FLUX."""
    x, timestep, text = make_call(FLUX)
    options = options or {}
    answer: torch.Tensor = remote(x, timestep, context=text, transformer_options=options, **FLUX.extra | extra)
    return answer


def call_adapter(name: str) -> Any:
    """Return what the adapter and diffusers' transformer answer to the call of a pair."""
    pair = PAIRS[name]
    transformer = build_transformer(pair)
    family = FAMILIES.find_family(pair.model)
    FAMILIES.check_call(family, pair.extra, {})
    call = FAMILIES.Call(*make_call(pair), pair.extra, transformer.config)
    with torch.inference_mode():
        return family.decode(call_transformer(transformer, family.encode(call)), call)


@pytest.mark.parametrize("name", PAIRS)
def test_an_adapter_answers_as_comfyuis_own_model(name: str) -> None:
    """The same weights in diffusers' class here, and in ComfyUI's where the figures were recorded."""
    figures = json.loads(FIGURES.read_text("utf-8"))
    assert describe_output(call_adapter(name)) == pytest.approx(figures[name], rel=1e-4, abs=1e-5)


def test_a_connection_is_of_one_run_and_its_loras(model_module: Any) -> None:
    """Each step has its LoRAs, and a run begins anew; wrappers go round the call."""
    connection = LocalConnection(build_transformer(FLUX))
    remote = model_module.RemoteTransformer(lambda: connection, connection.hello(), lambda: None)
    expected = call_adapter("flux")

    def call(*loras: tuple[str, float], wrappers: Any = ()) -> torch.Tensor:
        return call_remote(remote, {model_module.LORAS: list(loras), "wrappers": list(wrappers)}, control=None)

    assert torch.equal(call(), expected)
    call(("fox", 0.5))
    call(("fox", 0.5))
    remote.begin_run()
    doubled = call(wrappers=[lambda inner, *args, **more: 2 * inner(*args, **more)])
    assert torch.equal(doubled, 2 * expected)
    assert connection.log == ["connect", {}, {"fox": 0.5}, {"fox": 0.5}, "close", "connect", {}]


def test_a_model_refuses_what_would_have_no_effect(model_module: Any) -> None:
    """In one line, where the user looks for the node that does it."""
    connection = LocalConnection(build_transformer(FLUX))
    remote = model_module.RemoteTransformer(lambda: connection, connection.hello(), lambda: None)
    patcher = model_module.RemotePatcher(SimpleNamespace(diffusion_model=remote))
    x = torch.zeros(1)
    call = functools.partial(call_remote, remote)
    rows: list[tuple[Callable[[], Any], str]] = [
        (lambda: call(control={"input": []}), "a ControlNet cannot be handed"),
        (lambda: call(siglip_feats=[x]), "'siglip_feats' cannot be handed"),
        (lambda: call({"patches": {"attn1_patch": [print]}}), r"patches \(attn1_patch\) changes the inside"),
        (lambda: call({"patches_replace": {"dit": {}}}), r"patches_replace \(dit\)"),
        (lambda: call({"rope_options": {"scale_x": 2.0}}), "rope_options"),
        (lambda: call({"a2v_cross_attn": False}), "a2v_cross_attn switches off"),
        (lambda: call(ref_latents=[x], ref_latents_method="uxo"), "method 'uxo' cannot be handed over"),
        (lambda: call(guidance=None), "needs a guidance"),
        (lambda: patcher.clone().add_patches({}, 0.8), "use ditile LoRA"),
        (lambda: patcher.add_hook_patches(None, {}, 1.0), "hooks cannot"),
        (lambda: patcher.add_object_patch("diffusion_model.img_in", None), "cannot be replaced"),
        (lambda: patcher.get_key_patches(), "cannot be merged"),
        (lambda: model_module.add_lora(patcher, "cat", 1.0), "'cat' is not on the worker; it has fox, owl"),
        (lambda: model_module.add_lora(model_module.add_lora(patcher, "fox", 1.0), "fox", 1.0), "there twice"),
        (lambda: model_module.add_lora(SimpleNamespace(), "fox", 1.0), "use LoraLoaderModelOnly"),
        (lambda: FAMILIES.find_family("UNet2DConditionModel"), "UNet2DConditionModel has no adapter"),
        (lambda: FAMILIES.describe_qwen({"use_layer3d_rope": True}), "Qwen-Image-Layered has no adapter"),
        (lambda: FAMILIES.describe_ltx2({"cross_attn_mod": True}), "LTX-2.3 and later have no adapter"),
    ]
    for act, message in rows:
        with pytest.raises(FAMILIES.FamilyError, match=message) as caught:
            act()
        assert "\n" not in str(caught.value)
    assert connection.log == []
    assert patcher.clone().add_patches({}, 0.0) == []
    patcher.add_object_patch("model_sampling", "shift 3")


def test_another_model_on_the_worker_ends_the_run(model_module: Any) -> None:
    """A worker that was started again with other weights' config must not draw with the latents of the first."""
    first, second = (LocalConnection(build_transformer(PAIRS[name])) for name in ("flux", "flux schnell"))
    remote = model_module.RemoteTransformer(lambda: second, first.hello(), lambda: None)
    with pytest.raises(CLIENT.ForwardError, match="has another model now"):
        call_remote(remote)
    assert second.log == ["connect", "close"]


def test_cancel_leaves_a_step_in_progress(model_module: Any, tmp_path: Path) -> None:
    """ComfyUI's own exception comes through within the step, and its connection ends, at both ends."""
    description = json.loads(json.dumps(LocalConnection(build_transformer(FLUX)).hello()))
    is_called, is_left = threading.Event(), threading.Event()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "sock"))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                CLIENT.receive_message(connection)
                answer = description | {"ok": True, "protocol": CLIENT.PROTOCOL}
                prefix, _ = CLIENT.encode_message(answer, [])
                connection.sendall(prefix)
                CLIENT.receive_message(connection)
                is_called.set()
                if connection.recv(1) == b"":
                    is_left.set()

        server = threading.Thread(target=serve)
        server.start()

        def check() -> None:
            if is_called.is_set():
                raise InterruptProcessingException

        client = CLIENT.ForwardClient(f"unix:{tmp_path}/sock")
        remote = model_module.RemoteTransformer(lambda: client, description, check)
        num_threads = threading.active_count()
        with pytest.raises(InterruptProcessingException):
            call_remote(remote)
        server.join(60)
        assert is_left.is_set() and threading.active_count() < num_threads


def test_a_worker_ends_with_its_guard(tmp_path: Path) -> None:
    """However ComfyUI ends, its end of the guard's input is closed."""
    mark = tmp_path / "ended"
    command = f"trap 'echo > {mark}; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
    arguments = [sys.executable, str(FOLDER / "forward_worker.py"), "bash", "-c", command]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as guard:
        assert guard.stdin is not None and guard.stdout is not None
        assert guard.stdout.readline() == b"ready\n"
        guard.stdin.close()
        assert guard.wait(60) == 0
    assert mark.exists()
    # A worker that ends first takes its guard along, which has nothing to say of it.
    ending = [*arguments[:2], "bash", "-c", "exit 3"]
    with subprocess.Popen(ending, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as guard:
        assert guard.stderr is not None
        assert (guard.wait(60), guard.stderr.read()) == (3, b"")


def test_a_worker_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its own line. No value of a workflow is taken for a flag or by a shell."""
    program = tmp_path / "ditile"
    program.write_text('#!/bin/sh\necho "ditile: loading"\necho "ditile: no model $3"\necho later\nexit 2\n', "utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("DITILE_COMMAND", str(program))
    options = WORKER.WorkerOptions("--help; touch x", plan="$(touch y)")
    pool = WORKER.WorkerPool()
    with pytest.raises(WORKER.WorkerError, match=r"did not start: ditile: no model --model=--help; touch x$"):
        pool.start(options, lambda: None)
    assert not pool.has_ended(options)
    monkeypatch.setenv("DITILE_COMMAND", str(tmp_path / "none"))
    with pytest.raises(WORKER.WorkerError, match="install ditile"):
        pool.start(options, lambda: None)

"""`ditile serve --forward`: answers are those of the plain transformer, and bad input ends one connection at most."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock

import psutil
import pytest
import torch
from diffusers import FluxTransformer2DModel, PixArtTransformer2DModel
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor

from ditile.cli.main import main
from ditile.model.known import ASSETS
from ditile.plan.errors import ModelError, StoppedError
from ditile.plan.plan import Plan
from ditile.plan.single_calls import choose_call_plan
from ditile.runner.requests.cache_options import CacheOptions
from ditile.serve.forward.addresses import listen_on_address
from ditile.serve.forward.server import ForwardServer
from ditile.serve.link import WorkerSetup
from ditile.serve.options import ServeOptions
from examples.comfyui.forward_client import (
    ForwardClient,
    ForwardError,
    ForwardLostError,
    ForwardRefusedError,
    encode_message,
    encode_value,
    view_bytes,
)

SECONDS = 60.0
TOLERANCE = 1e-5
KEY = "a key of letters"
SIDE = 8
CLASSES = {"shapes-flux": FluxTransformer2DModel, "shapes-pixart": PixArtTransformer2DModel}


class Served(NamedTuple):
    """A running server."""

    address: str
    server: ForwardServer
    ends: list[BaseException]


@contextlib.contextmanager
def serve(address: str, model: str, plan: str = "", key: str | None = None, **values: Any) -> Iterator[Served]:
    """A server in a thread, with ranks of its own."""
    given = Plan.parse(plan) if plan else Plan()
    options = ServeOptions(model=model, threads=1, forward=address, **values)
    keys = [("one", key.encode())] if key else []
    ends: list[BaseException] = []
    with listen_on_address(address, keys) as (listener, place):
        setup = WorkerSetup(options=options, plan=choose_call_plan(given), cache=CacheOptions())
        server = ForwardServer(setup, listener, keys, f"{model} on {place}", str(given))

        def run() -> None:
            try:
                server.run_ranks()
            except BaseException as error:
                ends.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield Served(place, server, ends)
        finally:
            server._failure = StoppedError("the test ends")
            thread.join(SECONDS)
            assert not thread.is_alive()


def load_plain(model: str) -> Any:
    return CLASSES[model].from_pretrained(ASSETS / model / "transformer").eval()


def make_call(config: Any, *, rows: int = 2, seed: int = 0, text: int = 5) -> dict[str, Any]:
    """The arguments of a forward of one of the bundled models."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    time_ = torch.full((rows,), 0.5)
    if "caption_channels" in config:
        return {
            "hidden_states": noise(rows, config["in_channels"], 2 * SIDE, 2 * SIDE),
            "encoder_hidden_states": noise(rows, text, config["caption_channels"]),
            "encoder_attention_mask": torch.ones(rows, text, dtype=torch.bool),
            "timestep": time_ * 900,
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        }
    ids = torch.zeros(SIDE * SIDE, 3)
    ids[:, 1] = torch.arange(SIDE * SIDE) // SIDE
    ids[:, 2] = torch.arange(SIDE * SIDE) % SIDE
    return {
        "hidden_states": noise(rows, SIDE * SIDE, config["in_channels"]),
        "encoder_hidden_states": noise(rows, text, config["joint_attention_dim"]),
        "pooled_projections": noise(rows, config["pooled_projection_dim"]),
        "timestep": time_,
        "img_ids": ids,
        "txt_ids": torch.zeros(text, 3),
    }


@torch.no_grad()
def answer(plain: Any, call: dict[str, Any]) -> Tensor:
    prediction: Tensor = plain(**call, return_dict=False)[0]
    return prediction


def measure(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("shapes-flux", "ulysses=2"),
        ("shapes-flux", "tensor=2"),
        ("shapes-pixart", "cfg=2"),
        ("shapes-pixart", "ring=2"),
        ("shapes-flux", ""),
    ],
)
def test_answers_are_those_of_the_plain_transformer(tmp_path: Path, model: str, plan: str) -> None:
    """Calls of one shape, of another, of one row and in bfloat16's place; a failure means a wrong image in a graph."""
    plain = load_plain(model)
    with (
        serve(f"unix:{tmp_path}/a.sock", model, plan) as served,
        ForwardClient(served.address, timeout=SECONDS) as client,
    ):
        hello = client.hello()
        assert hello["model"] == type(plain).__name__
        assert hello["ranks"] == max(1, Plan.parse(plan or "ulysses=1").world)
        assert hello["dtype"] == "float32"
        for rows, seed, text in ((2, 0, 5), (2, 1, 5), (1, 2, 7), (2, 0, 5)):
            call = make_call(hello["config"], rows=rows, seed=seed, text=text)
            assert measure(client.forward(call), answer(plain, call)) < TOLERANCE, (rows, seed, text)


def test_loras_belong_to_a_call(tmp_path: Path) -> None:
    """Two clients that take turns each get their own LoRAs, at their strength."""
    plain = load_plain("shapes-flux")
    torch.manual_seed(3)
    plain.add_adapter(LoraConfig(r=2, lora_alpha=2, init_lora_weights=False, target_modules=["to_q", "to_k"]))
    state = {f"transformer.{name}": value for name, value in get_peft_model_state_dict(plain).items()}
    save_file(state, tmp_path / "one.safetensors")
    with serve(f"unix:{tmp_path}/a.sock", "shapes-flux", "tensor=2", lora_dir=str(tmp_path)) as served:
        first = ForwardClient(served.address, timeout=SECONDS)
        with first, ForwardClient(served.address, timeout=SECONDS) as second:
            hello = first.hello()
            assert hello["loras"] == ["one"]
            call = make_call(hello["config"])
            loras: dict[str, Any] = {"one": 0.5}
            got = [first.forward(call, loras), second.forward(call), first.forward(call, loras)]
            with pytest.raises(ForwardRefusedError, match="lora='two' is unknown"):
                first.forward(call, {"two": 1.0})
            with pytest.raises(ForwardRefusedError, match="loras.one='x': Input should be a valid number"):
                first.forward(call, {"one": "x"})  # type: ignore[dict-item]
            with pytest.raises(ForwardRefusedError, match="loras=.*: Input should be"):
                first._exchange({"op": "forward", "loras": ["one"]}, [])
            got.append(first.forward(call, loras))
    plain.set_adapters(["default"], [0.5])
    with_lora = answer(plain, call)
    plain.disable_adapters()
    without = answer(plain, call)
    assert measure(with_lora, without) > 10 * TOLERANCE
    for found, expected in zip(got, (with_lora, without, with_lora, with_lora), strict=True):
        assert measure(found, expected) < TOLERANCE


def pack(header: Any, length: int | None = None, magic: bytes = b"DITILE02", num_bytes: int = 0) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<8sIQ", magic, len(text) if length is None else length, num_bytes) + text


FLOAT = {"dtype": "float32", "shape": [4]}
# What is sent, what the answer says (empty: nothing), and whether the connection goes on.
BAD_MESSAGES = [
    ("wrong magic", pack({"op": "hello"}, magic=b"GET / HT"), "begins with b'GET / HT'", False),
    ("a long header", pack(b"{}", length=2**21), "longer than 1048576", False),
    ("too many bytes", pack({}, num_bytes=2**63), "bytes are more than", False),
    ("bytes said and not sent", pack({"op": "forward", "tensors": [FLOAT]}, num_bytes=16) + bytes(7), "in the", False),
    ("no JSON", pack(b"{]"), "Invalid JSON", True),
    ("a list", pack([1]), "should be an object", True),
    ("nested", pack(b"[" * 100_000), "recursion limit", True),
    ("nested arguments", pack(b'{"op": "forward", "arguments": {"x": ' + b"[" * 10_000), "recursion limit", True),
    ("an unknown type", pack({"op": "forward", "tensors": [FLOAT | {"dtype": "object"}]}), "tensors.0.dtype=", True),
    ("a negative size", pack({"op": "forward", "tensors": [FLOAT | {"shape": [-1]}]}), "tensors.0.shape.0=-1", True),
    ("more bytes than tensors", pack({"op": "forward"}, num_bytes=5) + bytes(5), "to sum exactly to 5", True),
    ("more tensors than bytes", pack({"op": "forward", "tensors": [FLOAT]}), "to sum exactly to 0", True),
    ("no such op", pack({"op": "exec"}), "op='exec': Input should be 'hello' or 'forward'", True),
    ("an unknown field", pack({"op": "forward", "lora": {}}), "lora={}: Extra inputs", True),
    ("another protocol", pack({"op": "hello", "protocol": 1}), "protocol=1: Input should be 2", True),
    ("no arguments", pack({"op": "forward", "arguments": 3}), "arguments=3: Input should be", True),
    ("no such tensor", pack({"op": "forward", "arguments": {"x": {"tensor": 0}}}), "is neither", True),
    ("no form", pack({"op": "forward", "arguments": {"x": {"pickle": "gASV"}}}), "is neither", True),
    ("another family", pack({"op": "forward", "arguments": {"cap_feats": 1}}), "unexpected keyword|missing", True),
]


def exchange(address: str, content: bytes) -> tuple[str, bool]:
    """The error of the answer, and whether the connection answers a hello after it."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(SECONDS)
        connection.connect(address.removeprefix("unix:"))
        connection.sendall(content)
        if content.endswith(bytes(7)):
            connection.shutdown(socket.SHUT_WR)
        file = connection.makefile("rb")
        _, length, _ = struct.unpack("<8sIQ", file.read(20))
        error = json.loads(file.read(length))["error"]
        goes_on = False
        with contextlib.suppress(OSError):
            connection.sendall(pack({"op": "hello", "protocol": 2}))
            goes_on = len(file.read(20)) == 20
        return error, goes_on


def test_bad_messages_harm_nobody_else(tmp_path: Path) -> None:
    """Each row is answered in one line, whoever is connected meanwhile is served, and nobody waits for who left."""
    plain = load_plain("shapes-flux")
    with serve(f"unix:{tmp_path}/a.sock", "shapes-flux", "ulysses=2") as served:
        assert os.stat(tmp_path / "a.sock").st_mode & 0o777 == 0o600
        with ForwardClient(served.address, timeout=SECONDS) as client:
            call = make_call(client.hello()["config"])
            client.forward(call)
            for name, content, message, goes_on in BAD_MESSAGES:
                error, still = exchange(served.address, content)
                assert pytest.approx(still) == goes_on, name
                assert "\n" not in error, name
                assert any(part in error for part in message.split("|")), (name, error)
            # A shape that the model does not take, in the middle of a chain of calls.
            with pytest.raises(ForwardRefusedError, match="FluxTransformer2DModel does not take these arguments"):
                client.forward(call | {"hidden_states": call["hidden_states"][..., :3]})
            tensors: list[Tensor] = []
            arguments = {name: encode_value(value, tensors) for name, value in call.items()}
            prefix, contents = encode_message({"op": "forward", "arguments": arguments}, tensors)
            with socket.socket(socket.AF_UNIX) as vanishing:
                vanishing.connect(served.address.removeprefix("unix:"))
                vanishing.sendall(prefix + b"".join(bytes(view_bytes(content)) for content in contents))
            assert measure(client.forward(call), answer(plain, call)) < TOLERANCE


def test_a_port_asks_for_a_key(tmp_path: Path) -> None:
    with serve("127.0.0.1:0", "shapes-flux", key=KEY) as served:
        with ForwardClient(served.address, key=KEY, timeout=SECONDS) as client:
            config = client.hello()["config"]
            assert client.forward(make_call(config)).shape == (2, SIDE * SIDE, config["in_channels"])
        for key in ("another key", None):
            refuses = pytest.raises(ForwardRefusedError, match="the key is not known")
            with ForwardClient(served.address, key=key) as client, refuses:
                client.hello()
        with ForwardClient(served.address) as client, pytest.raises(ForwardError, match="must be hello|bytes are more"):
            client.forward({"x": torch.zeros(1)})


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("0.0.0.0:8000", "is not on this machine"),
        ("192.168.1.2:8000", "is not on this machine"),
        ("localhost:x", "is not on this machine"),
        ("127.0.0.1:0", "is reached by all users of this machine"),
        ("127.0.0.1:99999", "is reached by all users of this machine"),
        ("unix:/nowhere/a.sock", "cannot listen there"),
        ("unix:{own}/" + "a" * 200, "cannot listen there"),
        ("unix:{open}/a.sock", "others can write to"),
        ("unix:{own}/file", "cannot listen there .*in use"),
        ("unix:a.sock", "has no absolute path"),
        ("unix:~nobody-at-all/a.sock", "has no absolute path"),
    ],
)
def test_addresses_that_others_reach_are_refused(tmp_path: Path, address: str, message: str) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "file").touch()
    place = address.format(open=tmp_path / "open", own=tmp_path)
    with pytest.raises(ModelError, match=message), listen_on_address(place, []):
        pass
    assert (tmp_path / "file").exists()


def test_a_dead_socket_is_replaced_and_a_living_one_is_not(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/a.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(f"{tmp_path}/a.sock")
    refuses = pytest.raises(ModelError, match="another server has it")
    with listen_on_address(address, []), refuses, listen_on_address(address, []):
        pass
    assert not (tmp_path / "a.sock").exists()


def test_a_connection_that_cannot_be_accepted_does_not_end_the_server() -> None:
    server: Any = SimpleNamespace(_is_ending=False, _listener=Mock())

    def accept() -> None:
        server._is_ending = server._listener.accept.call_count == 3
        raise OSError(errno.EMFILE, "")

    server._listener.accept.side_effect = accept
    ForwardServer._accept_connections(server)
    assert server._is_ending


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--distrifusion", "2"], "distrifusion=2 reads keys"),
        (["--cache"], "a cache skips work"),
        (["--max-batch", "2"], "max_batch=2 is for a server of whole images"),
        (["--forward-component", "unet"], "has no component 'unet'"),
        (["--forward", "10.0.0.1:1"], "is not on this machine"),
    ],
)
def test_options_are_refused_in_one_line(capfd: Any, tmp_path: Path, flags: list[str], message: str) -> None:
    words = ["serve", "--forward", f"unix:{tmp_path}/a.sock", "--model", "shapes-flux", *flags]
    assert main(words) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("ditile: ")]
    assert message in lines[-1]


@contextlib.contextmanager
def start_process(folder: Path, *flags: str) -> Iterator[tuple[Any, ForwardClient]]:
    """Yield a server in a process of its own, and a client."""
    address = f"unix:{folder}/a.sock"
    words = ["serve", "--forward", address, "--model", "shapes-flux", "--threads", "1", *flags]
    with subprocess.Popen([sys.executable, "-m", "ditile", *words], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            lines = list(itertools.takewhile(lambda line: f"on {address}" not in line, process.stderr))
            assert lines == ["ditile: shapes-flux: the ranks load its transformer ..\n"]
            with ForwardClient(address, timeout=SECONDS) as client:
                yield process, client
        finally:
            process.kill()


def check_end(process: Any, ask: Callable[[], Any], folder: Path, code: int) -> None:
    """Check that a server ends in seconds, without its socket; a client is told that it was lost."""
    with pytest.raises(ForwardLostError):
        for _ in range(100):
            ask()
            time.sleep(0.1)
    assert process.wait(SECONDS) == code
    assert not (folder / "a.sock").exists()


def test_a_rank_that_is_killed_ends_the_server(tmp_path: Path) -> None:
    """With exit code 1 and the reason."""
    with start_process(tmp_path, "--ulysses", "2") as (process, client):
        call = make_call(client.hello()["config"])
        client.forward(call)
        ranks = [child for child in psutil.Process(process.pid).children() if "ditile-rank" in child.cmdline()]
        assert len(ranks) == 2
        ranks[1].send_signal(signal.SIGKILL)
        check_end(process, lambda: client.forward(call), tmp_path, 1)
        assert "killed by SIGKILL" in process.stderr.read()


def test_weights_of_a_file_are_served_until_a_signal(tmp_path: Path) -> None:
    """A file that is not the model's own gives its own answers; SIGTERM ends the server with exit code 0."""
    torch.manual_seed(5)
    plain = FluxTransformer2DModel.from_config(load_plain("shapes-flux").config).eval()
    save_file(plain.state_dict(), tmp_path / "other.safetensors")
    flags = ("--tensor", "2", "--component", f"transformer={tmp_path}/other.safetensors")
    with start_process(tmp_path, *flags) as (process, client):
        call = make_call(client.hello()["config"])
        assert measure(client.forward(call), answer(plain, call)) < TOLERANCE
        process.send_signal(signal.SIGTERM)
        check_end(process, client.hello, tmp_path, 0)

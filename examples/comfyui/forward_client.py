"""A client of `ditile serve --forward`: the transformer runs there, on many devices; the sampler stays here.

It needs the standard library and torch. A message is 8 bytes of magic, the lengths of its header and of its tensors,
the header as JSON, and the bytes of the tensors one after another. Nothing of a message is ever run as code.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch

PROTOCOL = 2
MAGIC = b"DITILE02"
# The magic, and the lengths of the header and of the tensors in little-endian order.
PREFIX = struct.Struct("<8sIQ")
MAX_HEADER_BYTES = 2**20
MAX_TENSOR_BYTES = 2**32
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "int64": torch.int64,
    "int32": torch.int32,
    "bool": torch.bool,
    "uint8": torch.uint8,
    "float8_e4m3fn": torch.float8_e4m3fn,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
LOOPBACK = ("127.0.0.1", "::1", "localhost")
CONNECT_SECONDS = 10.0


class ForwardError(Exception):
    """Something went wrong between this client and the server; the text says what."""


class ForwardRefusedError(ForwardError):
    """The server refused a request, in its own words; the connection is usable as before."""


class ForwardLostError(ForwardError):
    """There is no server, or the connection to it was lost; `connect` opens a new one."""


class ForwardClient:
    """Calls the transformer of one server.

    A client belongs to one thread at a time. Each call blocks until the answer is there; a caller that is interrupted
    closes the client, and the server goes on to serve the next one.

    Args:
        address: of the server: unix:/path, or 127.0.0.1:PORT.
        key: an API key of the server; needed over TCP alone.
        timeout: seconds within which the server must answer. The first call of a server compiles, which takes long.
    """

    def __init__(self, address: str, key: str | None = None, timeout: float = 600.0) -> None:
        self.address = address
        self._key = key
        self._timeout = timeout
        self._socket: socket.socket | None = None

    def connect(self) -> None:
        """Connect to the server, unless it is connected.

        Raises:
            ForwardError: if the address is none of this machine.
            ForwardLostError: if there is no server.
        """
        if self._socket is not None:
            return
        family, target = parse_address(self.address)
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.settimeout(CONNECT_SECONDS)
            connection.connect(target)
            if family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(self._timeout)
        except OSError as error:
            connection.close()
            raise ForwardLostError(f"no server at {self.address}: {error}; start ditile serve --forward") from None
        self._socket = connection

    def hello(self) -> dict[str, Any]:
        """Return what the server holds: `model`, `config`, `dtype`, `plan`, `ranks` and the names of `loras`.

        Over TCP this must be the first request, since it sends the key.

        Raises:
            ForwardError: if the server refuses it, has another protocol, or is lost.
        """
        request: dict[str, Any] = {"op": "hello", "protocol": PROTOCOL}
        if self._key is not None:
            request["key"] = self._key
        answer, _ = self._exchange(request, [])
        if answer.get("protocol") != PROTOCOL:
            raise ForwardError(f"the server speaks protocol {answer.get('protocol')!r}, this client {PROTOCOL}")
        return answer

    def forward(self, arguments: Mapping[str, Any], loras: Mapping[str, float] | None = None) -> Any:
        """Return the prediction of the transformer.

        Args:
            arguments: keyword arguments of the forward of diffusers' class, as `hello` names it: tensors of any device,
                numbers, strings, booleans, None, and lists and dicts of these.
            loras: the strengths of LoRAs of the server's folder, by the names that `hello` lists.

        Returns:
            A tensor in the CPU's memory, or a list of tensors.

        Raises:
            ForwardRefusedError: if the transformer does not take the arguments, or a LoRA is unknown or does not fit.
            ForwardLostError: if the server is lost.
        """
        tensors: list[torch.Tensor] = []
        encoded = {name: encode_value(value, tensors) for name, value in arguments.items()}
        request = {"op": "forward", "arguments": encoded, "loras": dict(loras or {})}
        answer, received = self._exchange(request, tensors)
        return received if answer.get("is_list") else received[0]

    def close(self) -> None:
        """Close the connection; `connect` opens a new one."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def interrupt(self) -> None:
        """Wake another thread that waits for an answer: its call raises `ForwardLostError`."""
        connection = self._socket
        if connection is not None:
            # It may be lost already. Closing it here would let that thread read from whatever gets its number next.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> ForwardClient:
        self.connect()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # ComfyUI drops a model without a word.
        self.close()

    def _exchange(
        self, request: dict[str, Any], tensors: Sequence[torch.Tensor]
    ) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """Send a request, and return the header and the tensors of its answer."""
        self.connect()
        assert self._socket is not None
        # Encoding comes first: what cannot be sent leaves the connection as it is.
        prefix, contents = encode_message(request, tensors)
        try:
            self._socket.sendall(prefix)
            for content in contents:
                if content.numel():
                    self._socket.sendall(view_bytes(content))
            header, received = receive_message(self._socket)
        except TimeoutError:
            self.close()
            raise ForwardLostError(f"{self.address} did not answer in {self._timeout:.0f} s") from None
        except OSError as error:
            self.close()
            raise ForwardLostError(f"the connection to {self.address} was lost: {error}") from None
        except BaseException:
            # Whoever is interrupted in the middle of an answer cannot read the next one.
            self.close()
            raise
        if header.get("ok") is not True:
            raise ForwardRefusedError(str(header.get("error", "the server gave no reason")))
        return header, received


def parse_address(address: str) -> tuple[socket.AddressFamily, Any]:
    """Return the socket's family and target of an address.

    Raises:
        ForwardError: if it is neither unix:/path nor an address of this machine.
    """
    if address.startswith("unix:"):
        path = address.removeprefix("unix:")
        if not path.startswith("/"):
            raise ForwardError(f"address {address!r} has no absolute path; try unix:/run/user/1000/ditile.sock")
        return socket.AF_UNIX, path
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if host not in LOOPBACK or not port.isdecimal():
        raise ForwardError(f"address {address!r} is not on this machine; give unix:/path or 127.0.0.1:PORT")
    if host == "::1":
        return socket.AF_INET6, (host, int(port))
    return socket.AF_INET, (host, int(port))


def encode_value(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return a value as JSON; its tensors are appended to `tensors`.

    Raises:
        ForwardError: if a value has no form in a message.
    """
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [encode_value(item, tensors) for item in value]
    if isinstance(value, Mapping):
        return {"dict": {str(key): encode_value(item, tensors) for key, item in value.items()}}
    raise ForwardError(f"an argument of type {type(value).__name__} cannot be sent; give tensors, numbers or strings")


def encode_message(header: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> tuple[bytes, list[torch.Tensor]]:
    """Return the first bytes of a message, and its tensors as they are sent.

    Raises:
        ForwardError: if the dtype of a tensor has no name, or the header is too long.
    """
    contents = []
    entries = []
    for tensor in tensors:
        if tensor.dtype not in DTYPE_NAMES:
            raise ForwardError(f"a tensor of {tensor.dtype} cannot be sent; try one of {', '.join(DTYPES)}")
        contents.append(tensor.detach().to("cpu").contiguous())
        entries.append({"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape)})
    try:
        text = json.dumps({**header, "tensors": entries}, allow_nan=False).encode()
    except ValueError:
        raise ForwardError("an argument is a NaN or infinite number, which cannot be sent; give a tensor") from None
    if len(text) > MAX_HEADER_BYTES:
        raise ForwardError(f"the arguments need a header of {len(text)} bytes, more than {MAX_HEADER_BYTES}")
    num_bytes = sum(content.numel() * content.element_size() for content in contents)
    return PREFIX.pack(MAGIC, len(text), num_bytes) + text, contents


def receive_message(connection: socket.socket) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Return the header and the tensors of the next message.

    Raises:
        ForwardLostError: if the connection ends, or carries something else.
    """
    magic, length, num_bytes = PREFIX.unpack(_receive_bytes(connection, PREFIX.size))
    if magic != MAGIC or length > MAX_HEADER_BYTES:
        raise ForwardLostError("the answer is none of ditile serve --forward; is there another server?")
    try:
        header = json.loads(_receive_bytes(connection, length))
        shapes = [
            (DTYPES[entry["dtype"]], [int(size) for size in entry["shape"]]) for entry in header.get("tensors", [])
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ForwardLostError(
            "the header of the answer cannot be read; are client and server of one version?"
        ) from None
    if any(size < 0 for _, shape in shapes for size in shape):
        raise ForwardLostError("the answer has a tensor of negative size")
    if num_bytes > MAX_TENSOR_BYTES or num_bytes != sum(dtype.itemsize * math.prod(shape) for dtype, shape in shapes):
        raise ForwardLostError(f"the answer has {num_bytes} bytes of tensors, which are not those of its header")
    tensors = []
    for dtype, shape in shapes:
        tensor = torch.empty(shape, dtype=dtype)
        if tensor.numel():
            _receive_into(connection, view_bytes(tensor))
        tensors.append(tensor)
    return header, tensors


def view_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in the CPU's memory, which must outlive them."""
    num_bytes = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * num_bytes).from_address(tensor.data_ptr())).cast("B")


def _receive_bytes(connection: socket.socket, length: int) -> bytes:
    content = bytearray(length)
    _receive_into(connection, memoryview(content))
    return bytes(content)


def _receive_into(connection: socket.socket, buffer: memoryview) -> None:
    while buffer:
        count = connection.recv_into(buffer)
        if count == 0:
            raise ForwardLostError("the server closed the connection; its log says why")
        buffer = buffer[count:]

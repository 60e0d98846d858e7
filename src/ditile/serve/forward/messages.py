"""The messages of `ditile serve --forward`: JSON and the bytes of tensors. Nothing here imports torch.

A message is 8 bytes of magic, the length of its header in four bytes and that of its tensors in eight (little-endian),
the header in UTF-8 JSON, and the bytes of the tensors one after another. Nothing is pickled.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from ditile.plan.errors import quote_value
from ditile.plan.option_classes import JsonObject

PROTOCOL: Final = 2
MAGIC = b"DITILE02"
PREFIX = struct.Struct("<8sIQ")
MAX_HEADER_BYTES = 2**20
# The name of the file that holds the bytes of all tensors, in a message to or from a rank.
CONTENT = "content"
# The longest pause within a message, in seconds.
SILENT_SECONDS = 30.0
# Within these limits the product of the sizes is computed quickly.
Shape = Annotated[list[Annotated[int, Field(ge=0, lt=2**40)]], Field(max_length=16)]


class MessageError(Exception):
    """A request cannot be served; the connection can go on."""


class StreamError(Exception):
    """The connection must be closed: its next message cannot be found, or its client has no key."""


class TensorEntry(BaseModel):
    """The description of a tensor."""

    dtype: Literal["bfloat16", "float16", "float32", "int64", "int32", "bool", "uint8", "float8_e4m3fn"]
    shape: Shape


class ForwardRequest(BaseModel):
    """The header of a request.

    Attributes:
        key: a key of the server, which a port asks for once in a connection.
        arguments: the arguments of the transformer's forward, by name.
        tensors: the tensors among the arguments, in the order of their bytes.
        loras: the name of a LoRA of the call -> its strength.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    op: Literal["hello", "forward"]
    protocol: Literal[2] = PROTOCOL
    key: str = ""
    arguments: dict[str, Any] = {}
    tensors: list[TensorEntry] = []
    loras: dict[str, FiniteFloat] = {}


def parse_request(header: bytearray) -> ForwardRequest:
    """Parse the header of a request. Raises `MessageError` for the first wrong value."""
    try:
        return ForwardRequest.model_validate_json(header)
    except ValidationError as invalid:
        row = invalid.errors(include_url=False)[0]
    name = ".".join(map(str, row["loc"])) or "header"
    raise MessageError(f"{name}={quote_value(row['input'])}: {row['msg']}")


def receive_message(
    connection: socket.socket, max_bytes: int, idle_seconds: float | None = None
) -> tuple[bytearray, bytearray] | None:
    """Return the header and the tensors of the next message; None if the peer has closed the connection before it.

    Args:
        max_bytes: the most bytes of its tensors.
        idle_seconds: seconds to wait until it begins; None waits forever.

    Raises:
        StreamError: if it is not a message, is too large, or ends early.
        OSError: if the connection is lost, or its time limit is over.
    """
    connection.settimeout(idle_seconds)
    first = connection.recv(1)
    if not first:
        return None
    connection.settimeout(SILENT_SECONDS)
    magic, length, num_bytes = PREFIX.unpack(first + _receive_bytes(connection, PREFIX.size - 1))
    if magic != MAGIC:
        raise StreamError(f"a message begins with {magic!r} and not with {MAGIC!r}; use protocol {PROTOCOL}")
    if length > MAX_HEADER_BYTES:
        raise StreamError(f"a header of {length} bytes is longer than {MAX_HEADER_BYTES}")
    if num_bytes > max_bytes:
        raise StreamError(f"tensors of {num_bytes} bytes are more than {max_bytes}; see --forward-bytes")
    return _receive_bytes(connection, length), _receive_bytes(connection, num_bytes)


def send_message(connection: socket.socket, header: JsonObject, content: bytes = b"") -> None:
    """Send a header, and the bytes of its tensors."""
    text = json.dumps(header).encode()
    connection.settimeout(SILENT_SECONDS)
    connection.sendall(PREFIX.pack(MAGIC, len(text), len(content)) + text)
    connection.sendall(content)


def _receive_bytes(connection: socket.socket, length: int) -> bytearray:
    """Receive `length` bytes. Raises `StreamError` if the peer closes the connection before their end."""
    content = bytearray(length)
    rest = memoryview(content)
    while rest:
        count = connection.recv_into(rest)
        if count == 0:
            raise StreamError("the client has gone in the middle of a message")
        rest = rest[count:]
    return content

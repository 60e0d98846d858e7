"""The messages of `ditile serve --forward`: JSON and the bytes of tensors. Nothing here imports torch.

A message is 8 bytes of magic, the length of its header in four bytes (little-endian), the header in UTF-8 JSON, and the
bytes of its tensors one after another, in the order of the header's `tensors`. Nothing is pickled.
"""

from __future__ import annotations

import json
import math
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ditile.plan.errors import quote_value
from ditile.plan.option_classes import JsonObject

PROTOCOL = 1
MAGIC = b"DITILE01"
PREFIX = struct.Struct("<8sI")
MAX_HEADER_BYTES = 2**20
# Bytes of a number of each type.
DTYPE_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "int64": 8,
    "int32": 4,
    "bool": 1,
    "uint8": 1,
    "float8_e4m3fn": 1,
}
# The file of a message to or from a rank that has the bytes of all tensors.
CONTENT = "content"
MAX_TENSORS = 4096
# A message that began goes on within this time.
SILENT_SECONDS = 30.0
MAX_DIMS = 16
MAX_DEPTH = 32


class MessageError(Exception):
    """A request cannot be served; the connection can go on."""


class StreamError(Exception):
    """The next message of a connection cannot be found, so it is closed."""


@dataclass(frozen=True, slots=True)
class ForwardMessage:
    """A message: its header, and the bytes of all of its tensors."""

    header: JsonObject
    content: bytearray


def receive_message(
    connection: socket.socket, max_bytes: int, idle_seconds: float | None = None
) -> ForwardMessage | None:
    """Return the next message of a connection; None if its peer has closed it between two messages.

    Args:
        max_bytes: the most bytes of its tensors.
        idle_seconds: seconds until it begins; None waits for good.

    Raises:
        StreamError: if it is not a message, is too large, or ends early.
        OSError: if the connection is lost, or its time limit is over.
    """
    connection.settimeout(idle_seconds)
    first = connection.recv(1)
    if not first:
        return None
    connection.settimeout(SILENT_SECONDS)
    magic, length = PREFIX.unpack(first + _receive_bytes(connection, PREFIX.size - 1))
    if magic != MAGIC:
        raise StreamError(f"a message begins with {bytes(magic)!r} and not with {MAGIC!r}; use protocol {PROTOCOL}")
    if length > MAX_HEADER_BYTES:
        raise StreamError(f"a header of {length} bytes is longer than {MAX_HEADER_BYTES}")
    try:
        header = json.loads(_receive_bytes(connection, length))
    except (ValueError, RecursionError):
        raise StreamError("the header is not JSON") from None
    if not isinstance(header, dict):
        raise StreamError("the header is not a JSON object")
    num_bytes = sum(size for _, _, size in list_tensors(header))
    if num_bytes > max_bytes:
        raise StreamError(f"tensors of {num_bytes} bytes are more than {max_bytes}; see --forward-bytes")
    return ForwardMessage(header, _receive_bytes(connection, num_bytes))


def list_tensors(header: JsonObject) -> list[tuple[str, list[int], int]]:
    """Return the type, shape and number of bytes of each tensor of a message.

    Raises:
        StreamError: if the header does not describe them.
    """
    entries = header.get("tensors", [])
    if not isinstance(entries, list) or len(entries) > MAX_TENSORS:
        raise StreamError(f"tensors={quote_value(entries)} is not a list of at most {MAX_TENSORS}")
    tensors = []
    for entry in entries:
        dtype = entry.get("dtype") if isinstance(entry, dict) else None
        shape = entry.get("shape") if isinstance(entry, dict) else None
        if not isinstance(dtype, str) or dtype not in DTYPE_BYTES or not _is_shape(shape):
            raise StreamError(f"{quote_value(entry)} is no tensor; give a shape, and one of {', '.join(DTYPE_BYTES)}")
        assert isinstance(shape, list)
        tensors.append((dtype, shape, DTYPE_BYTES[dtype] * math.prod(shape)))
    return tensors


def encode_header(header: JsonObject) -> bytes:
    """Return the bytes of a message before those of its tensors."""
    text = json.dumps({"tensors": [], **header}).encode()
    return PREFIX.pack(MAGIC, len(text)) + text


def decode_value(value: Any, tensors: Sequence[Any], depth: int = 0) -> Any:
    """Return what JSON of a message stands for. Raises `MessageError` if it stands for nothing."""
    if depth > MAX_DEPTH:
        raise MessageError(f"an argument is nested deeper than {MAX_DEPTH}")
    if isinstance(value, list):
        return [decode_value(item, tensors, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    items = value.get("dict")
    if isinstance(items, dict):
        return {name: decode_value(item, tensors, depth + 1) for name, item in items.items()}
    index = value.get("tensor")
    if type(index) is not int or not 0 <= index < len(tensors):
        raise MessageError(
            f"{quote_value(value)} is neither {{'tensor': i}} with i below {len(tensors)} nor {{'dict': {{..}}}}"
        )
    return tensors[index]


def _is_shape(shape: Any) -> bool:
    if not isinstance(shape, list) or len(shape) > MAX_DIMS:
        return False
    # A product of such numbers is counted exactly, so a huge one is refused before anything is allocated.
    return all(type(size) is int and 0 <= size < 2**40 for size in shape)


def _receive_bytes(connection: socket.socket, length: int) -> bytearray:
    """Receive as many bytes. Raises `StreamError` if the peer closes the connection before."""
    content = bytearray(length)
    rest = memoryview(content)
    while rest:
        count = connection.recv_into(rest)
        if count == 0:
            raise StreamError("the client has gone in the middle of a message")
        rest = rest[count:]
    return content

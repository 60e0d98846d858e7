"""A rank of a forward server: it holds its part of the transformer, and makes one call after another.

Every rank gets every request in the same order, and answers each. Calls with the same shapes and LoRAs form a chain, in
which the strategies of the plan stay installed. Only messages end a chain, so all ranks end it before the same call.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ditile.distributed.transport import describe_dtype
from ditile.model.fingerprint import fingerprint
from ditile.plan.errors import DitileError, ModelError, join_error_lines, quote_value
from ditile.plan.option_classes import CallArguments, JsonObject
from ditile.runner.requests.prepare import prepare_transformer
from ditile.runner.transformer_calls import check_call_names
from ditile.serve.forward.messages import CONTENT
from ditile.serve.jobs import Files
from ditile.serve.link import Message, MessageLink, WorkerSetup
from ditile.serve.worker import Inbox, LoraCache

LOG = logging.getLogger("ditile")
# Exceptions that a model raises for tensors of shapes or types that it does not take.
CALL_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError)


class ForwardRank:
    """A rank with its part of the transformer."""

    def __init__(self, setup: WorkerSetup, link: MessageLink) -> None:
        options = setup.options
        self._link = link
        self._runner = prepare_transformer(
            options.model, options.forward_component, options, setup.plan, setup.cache, options.components
        )
        self._transformer = self._runner.pipe.transformer
        self._lora_cache = LoraCache(self._runner, setup)
        # None if it is unknown which LoRAs are in use.
        self._loras: dict[str, float] | None = {}
        self._device = torch.device(self._runner.devices[self._runner.mesh.rank])
        self._is_first = self._runner.mesh.rank == 0
        self._request: tuple[Message, Files] | None = None
        self._inbox = Inbox(link, reports=self._is_first)

    def serve(self) -> None:
        """Answer requests until the server dismisses this rank, or has gone."""
        if self._is_first:
            self._link.send_message(self._describe_model())
        self._request = self._inbox.wait()
        while self._request is not None:
            try:
                self._answer_chain(*self._request)
            except (DitileError, *CALL_ERRORS) as error:
                # Messages of the failed call may still be under way between GPUs.
                if self._runner.is_broken:
                    raise
                text = join_error_lines(error, 300)
                # ditile's own errors say what and why.
                if not isinstance(error, DitileError):
                    LOG.error("a call failed", exc_info=error)
                    model = type(self._transformer).__name__
                    text = f"{model} does not take these arguments: {type(error).__name__}: {text}"
                self._link.send_message({"error": text})
                self._request = self._inbox.wait()

    def _describe_model(self) -> JsonObject:
        values = dict(self._transformer.config)
        # Private items are of this machine, such as the folder of the weights.
        config = {name: value for name, value in values.items() if not name.startswith("_")}
        config = json.loads(json.dumps(config, default=str))
        dtype = describe_dtype(self._transformer)
        return {"model": type(self._transformer).__name__, "config": config, "dtype": dtype}

    def _answer_chain(self, header: Message, files: Files) -> None:
        """Answer a request and those that continue its chain, and leave the request after these in `_request`."""
        arguments = self._decode_arguments(header, files)
        if header["loras"] != self._loras:
            self._loras = None
            self._lora_cache.use_loras(header["loras"])
            self._loras = header["loras"]
        shapes = fingerprint(arguments, "memory")

        def take_prediction(prediction: Any) -> CallArguments | None:
            self._send_prediction(prediction)
            self._request = self._inbox.wait()
            if self._request is None or self._request[0]["loras"] != self._loras:
                return None
            # A request that does not fit is refused after this call, which an error here would break.
            with contextlib.suppress(*CALL_ERRORS):
                following = self._decode_arguments(*self._request)
                if fingerprint(following, "memory") == shapes:
                    return following
            return None

        self._runner(arguments=arguments, callback_on_prediction=take_prediction)

    def _decode_arguments(self, header: Message, files: Files) -> CallArguments:
        tensors = decode_tensors(header["tensors"], files[CONTENT], self._device)
        arguments = {name: decode_value(value, tensors) for name, value in header["arguments"].items()}
        arguments.pop("return_dict", None)
        check_call_names(self._transformer, arguments)
        return arguments

    def _send_prediction(self, prediction: Any) -> None:
        if not self._is_first:
            self._link.send_message({})
            return
        is_list = isinstance(prediction, list)
        tensors = prediction if is_list else [prediction]
        entries = []
        contents = []
        for tensor in tensors:
            entries.append({"dtype": describe_dtype(tensor), "shape": list(tensor.shape)})
            # numpy does not know bfloat16.
            raw_bytes = tensor.to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
            contents.append(raw_bytes.tobytes())
        self._link.send_message({"is_list": is_list, "tensors": entries}, {CONTENT: b"".join(contents)})


def decode_tensors(entries: Sequence[JsonObject], content: bytes, device: torch.device) -> list[Tensor]:
    """Return the tensors of a message, on a device. Raises `RuntimeError` if `content` has another number of bytes."""
    sizes = [getattr(torch, entry["dtype"]).itemsize * math.prod(entry["shape"]) for entry in entries]
    # torch's own `frombuffer` takes no empty buffer.
    raw_bytes = torch.from_numpy(np.frombuffer(bytearray(content), np.uint8)).to(device)
    tensors = []
    for entry, part in zip(entries, raw_bytes.split(sizes), strict=True):
        dtype: torch.dtype = getattr(torch, entry["dtype"])
        # Copied, because `view` needs aligned bytes, and those of a tensor may begin anywhere. Other bytes than 0 and 1
        # are no bools.
        part = part.bool() if dtype == torch.bool else part.clone().view(dtype)
        tensors.append(part.reshape(entry["shape"]))
    return tensors


def decode_value(value: Any, tensors: Sequence[Tensor]) -> Any:
    """Return what JSON of a message stands for. Raises `ModelError` if it stands for nothing."""
    match value:
        case list():
            return [decode_value(item, tensors) for item in value]
        case {"dict": dict() as items}:
            return {name: decode_value(item, tensors) for name, item in items.items()}
        case {"tensor": int() as index} if 0 <= index < len(tensors):
            return tensors[index]
        case dict():
            raise ModelError(
                f"{quote_value(value)} is neither {{'tensor': i}} with i below {len(tensors)} nor {{'dict': {{..}}}}"
            )
        case _:
            return value

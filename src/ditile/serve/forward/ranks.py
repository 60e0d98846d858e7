"""A rank of a forward server: it holds its part of the transformer, and makes one call after another.

Every rank gets every request in the same order. Calls with the same shapes and LoRAs form a chain, in which the
strategies of the plan stay installed. Only messages end a chain, so all ranks end it before the same call.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ditile.distributed import env
from ditile.model.fingerprint import fingerprint
from ditile.plan.errors import DitileError, ModelError, join_error_lines
from ditile.plan.option_classes import CallArguments, JsonObject
from ditile.runner.requests.prepare import prepare_transformer
from ditile.runner.transformer_calls import check_call_names
from ditile.serve.forward.messages import CONTENT, DTYPE_BYTES, decode_value, list_tensors
from ditile.serve.link import SocketLink, WorkerSetup
from ditile.serve.worker import IDLE_SECONDS, LoraCache

LOG = logging.getLogger("ditile")
# The exceptions of a model for tensors of other shapes or types than it takes.
CALL_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError)


@dataclass(frozen=True, slots=True)
class RankRequest:
    """A request as the ranks get it: its header, and the bytes of its tensors."""

    header: JsonObject
    content: bytes


class ForwardRank:
    """A rank with its part of the transformer.

    Args:
        setup: what to load, and the plan of single calls.
        link: to the server.
    """

    def __init__(self, setup: WorkerSetup, link: SocketLink) -> None:
        options = setup.options
        self._link = link
        self._runner = prepare_transformer(
            options.model, options.forward_component, options, setup.plan, setup.cache, options.components
        )
        self._transformer = self._runner.pipe.transformer
        permanent: dict[str, float] = {}
        if not setup.cache.fuse_lora:
            permanent = setup.cache.lora_scales
        self._loras = LoraCache(self._runner, options.lora_dir, options.max_loras, permanent)
        self._used_loras: dict[str, float] = {}
        self._device = torch.device(self._runner.devices[self._runner.mesh.rank])
        self._is_first = self._runner.mesh.rank == 0
        self._requests: queue.SimpleQueue[RankRequest | None] = queue.SimpleQueue()
        self._following: RankRequest | None = None

    def serve_calls(self) -> None:
        """Serve requests until the server dismisses this rank, or has gone."""
        threading.Thread(target=self._receive_requests, daemon=True).start()
        if self._is_first:
            self._link.send_message({"kind": "ready", **self._describe_model()})
        request = self._wait_for_request()
        while request is not None:
            self._following = None
            try:
                self._serve_request(request)
            except DitileError as error:
                if self._runner.is_broken:
                    raise
                self._report_failure(error)
            except CALL_ERRORS as error:
                # Messages of the failed call may still be under way between GPUs.
                if self._runner.is_broken:
                    raise
                LOG.error("a call failed", exc_info=error)
                self._report_failure(error)
            request = self._following or self._wait_for_request()

    def _describe_model(self) -> JsonObject:
        values = dict(self._transformer.config)
        # Private items are of this machine, such as the folder of the weights.
        config = {name: value for name, value in values.items() if not name.startswith("_")}
        config = json.loads(json.dumps(config, default=str))
        dtype = str(self._transformer.dtype).removeprefix("torch.")
        return {"model": type(self._transformer).__name__, "config": config, "dtype": dtype}

    def _receive_requests(self) -> None:
        with contextlib.ExitStack() as stack:
            # Whatever ends this thread, the rank leaves, since it would receive no more messages.
            stack.callback(self._requests.put, None)
            stack.enter_context(contextlib.suppress(EOFError, OSError))
            while True:
                header, files = self._link.receive_message()
                self._requests.put(RankRequest(header, files[CONTENT]))

    def _wait_for_request(self) -> RankRequest | None:
        while True:
            try:
                return self._requests.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                # An idle rank does not hang.
                if self._is_first:
                    env.report_progress()

    def _serve_request(self, request: RankRequest) -> None:
        header = request.header
        if header["op"] == "start":
            self._report("done")
            return
        if header["loras"] != self._used_loras:
            # If this fails, it is unknown which are in use.
            self._used_loras = {"": 0.0}
            self._loras.use_loras(header["loras"])
            self._used_loras = header["loras"]
        if header["op"] == "loras":
            self._report("done")
            return
        arguments = self._decode_arguments(request)
        chain = functools.partial(self._continue_chain, fingerprint(arguments, "memory"))
        self._runner(arguments=arguments, callback_on_prediction=chain)

    def _continue_chain(self, shapes: Any, prediction: Any) -> CallArguments | None:
        """Answer a call, and return the arguments of the next one if it belongs to the same chain."""
        self._answer(prediction)
        self._following = None
        request = self._wait_for_request()
        if request is None:
            # Whoever waits next must see it too.
            self._requests.put(None)
            return None
        self._following = request
        if request.header["op"] != "forward" or request.header["loras"] != self._used_loras:
            return None
        # What does not fit is refused outside of a call, which it would spoil.
        with contextlib.suppress(ModelError):
            arguments = self._decode_arguments(request)
            if fingerprint(arguments, "memory") == shapes:
                self._following = None
                return arguments
        return None

    def _decode_arguments(self, request: RankRequest) -> CallArguments:
        tensors = decode_tensors(request.header, request.content, self._device)
        arguments = {name: decode_value(value, tensors) for name, value in request.header["arguments"].items()}
        arguments.pop("return_dict", None)
        check_call_names(self._transformer, arguments)
        return arguments

    def _answer(self, prediction: Any) -> None:
        predictions = prediction if isinstance(prediction, list) else [prediction]
        tensors = describe_tensors(predictions)
        if not self._is_first:
            self._report("done")
            return
        output: Any = [{"tensor": index} for index in range(len(predictions))]
        if not isinstance(prediction, list):
            output = output[0]
        self._report("done", {CONTENT: encode_tensors(predictions)}, header={"output": output, "tensors": tensors})

    def _report_failure(self, error: Exception) -> None:
        text = join_error_lines(error, 300)
        # ditile's own errors say what and why.
        if not isinstance(error, DitileError):
            text = f"{type(self._transformer).__name__} does not take these arguments: {type(error).__name__}: {text}"
        self._report("failed", error=text)

    def _report(self, kind: str, files: dict[str, bytes] | None = None, **values: Any) -> None:
        self._link.send_message({"kind": kind, **values}, files)


def decode_tensors(header: JsonObject, content: bytes, device: torch.device) -> list[Tensor]:
    """Return the tensors of a message, on a device."""
    tensors = []
    start = 0
    for dtype_name, shape, size in list_tensors(header):
        dtype: torch.dtype = getattr(torch, dtype_name)
        if size == 0:
            tensors.append(torch.empty(shape, dtype=dtype, device=device))
            continue
        # Other bytes than 0 and 1 are no bool.
        stored = torch.uint8 if dtype == torch.bool else dtype
        # A copy, because the numbers of a tensor need not begin where a number of its type may.
        flat = torch.frombuffer(bytearray(content[start : start + size]), dtype=stored)
        tensors.append(flat.reshape(shape).to(device=device, dtype=dtype))
        start += size
    return tensors


def describe_tensors(tensors: Sequence[Tensor]) -> list[JsonObject]:
    """Return how a message describes tensors. Raises `ModelError` for a type that it has not."""
    described = []
    for tensor in tensors:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPE_BYTES:
            raise ModelError(f"a prediction in {dtype} cannot be sent; load the model in another dtype")
        described.append({"dtype": dtype, "shape": list(tensor.shape)})
    return described


def encode_tensors(tensors: Sequence[Tensor]) -> bytes:
    """Return the bytes of tensors, one after another."""
    parts = []
    for tensor in tensors:
        # numpy does not know bfloat16.
        numbers = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
        parts.append(numbers.tobytes())
    return b"".join(parts)

"""One rank of a call of a real model, whose configs are read and whose weights are not."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from ditile.model.hooks.block_hooks import TransformerHooks
from ditile.parallel.pipefusion.block_offload import HostCopies
from ditile.plan.plan import Plan
from ditile.planner.recording.configs import PipelineConfigs
from ditile.planner.recording.recorded import silence_libraries
from ditile.runner.requests.pipelines import convert_value_errors
from ditile.runner.runner import parallelize
from tests.simulated_gpu.gpu import CALL, SimulatedGpu, SimulationRecord
from tests.simulated_gpu.messages import GPUS_PER_HOST, SimulatedMessages, simulate_gpu
from tests.simulated_gpu.tensors import SimulatedTensor

SOME = 0.01
"""What is in tensors whose numbers must be known and decide nothing. Guidance would divide zeros by each other."""


class SimulatedCall(NamedTuple):
    """What one rank did in a call.

    Attributes:
        record: what was seen.
        weight_bytes: of its parameters on the GPU, text encoders left out.
        key_bytes: of its stale keys and values.
    """

    record: SimulationRecord
    weight_bytes: int
    key_bytes: int


def simulate_rank(
    source: Path | str,
    plan: Plan,
    rank: int,
    call: Mapping[str, Any],
    *,
    dtype: torch.dtype = torch.bfloat16,
    memory_bytes: int = 80 << 30,
    within: AbstractContextManager[Any] | None = None,
    config: Mapping[str, Any] | None = None,
) -> SimulatedCall:
    """Runs one rank of a call of a pipeline on a simulated GPU, from embeddings of a text to latents.

    Args:
        source: a folder or hub id, of which only configs are read.
        plan: for all ranks.
        rank: which.
        call: the arguments of the pipeline's call; a prompt among them is not read.
        dtype: of its weights.
        memory_bytes: of the GPU.
        within: is entered for the call.
        config: replaces some of the transformer's config, such as the number of its blocks.

    Raises:
        LoadError, ModelError, PlanError: if the model, the call or the plan does not fit.
        SimulationError: if a GPU would refuse what the rank does, or a number decides what to do that only other ranks
            know.
    """
    gpu = SimulatedGpu(rank % GPUS_PER_HOST)
    messages = SimulatedMessages(gpu, rank, plan.world) if plan.world > 1 else None
    configs = PipelineConfigs.read_source(source)
    if config:
        configs = replace(configs, transformer={**configs.transformer, **config})
    parts, hooks = configs.build_parts(configs.build_transformer())
    with simulate_gpu(gpu, messages, memory_bytes), torch.no_grad(), silence_libraries():
        for name, part in parts.items():
            _give_weights(
                part, [] if name == "vae" else [each for each in hooks if each.transformer is part], dtype, gpu
            )
        recorder = configs.make_recorder(parts, hooks)

        def make_embeddings(*shape: int) -> Tensor:
            return torch.full(shape, SOME, dtype=dtype)

        def make_host_memory(_: HostCopies, size: int) -> Tensor:
            return SimulatedTensor(torch.empty(size, dtype=torch.uint8, device="meta"), gpu, torch.device("cpu"), None)

        arguments = recorder.make_arguments(call, make_embeddings)
        with mock.patch.object(HostCopies, "allocate_host_memory", make_host_memory):
            runner = parallelize(recorder.pipe, plan, device=gpu.device)
        weight_bytes = gpu.record.live_bytes
        steps = {"num_inference_steps": call.get("num_inference_steps", 4), "generator": torch.Generator()}
        given = {name: _move_tensors(value, gpu.device) for name, value in (arguments | steps).items()}
        gpu.record.enter_place(CALL)
        with convert_value_errors(recorder.pipe), within or nullcontext():
            runner(**given)
        report = runner.report
    return SimulatedCall(gpu.record, weight_bytes, 0 if report is None else report.key_bytes)


def _give_weights(model: nn.Module, hooks: list[TransformerHooks], dtype: torch.dtype, gpu: SimulatedGpu) -> None:
    """Parameters on the CPU, as if they were loaded: without numbers in blocks, and one number elsewhere.

    A rehearsal passes blocks by, and sees which places become NaN behind the other parameters.
    """
    blocks = {id(module) for each in hooks for hook in each.chain for module in hook.block.modules()}
    for module in model.modules():
        has_numbers = bool(hooks) and id(module) not in blocks
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = _make_weight(tensor, dtype, gpu, has_numbers=has_numbers)  # type: ignore[assignment]
        # Tables that the forward itself moves to the device.
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                vars(module)[name] = torch.full(value.shape, SOME, dtype=value.dtype)


def _make_weight(tensor: Tensor, dtype: torch.dtype, gpu: SimulatedGpu, *, has_numbers: bool) -> Tensor:
    kind = dtype if tensor.is_floating_point() else tensor.dtype
    inner = (
        torch.full(tensor.shape, SOME, dtype=kind)
        if has_numbers
        else torch.empty_like(tensor, dtype=kind, device="meta")
    )
    weight: Tensor = inner if has_numbers else SimulatedTensor(inner, gpu, torch.device("cpu"), None)
    return nn.Parameter(weight, requires_grad=False) if isinstance(tensor, nn.Parameter) else weight


def _move_tensors(value: Any, device: torch.device) -> Any:
    """Tensors as text encoders would give them, on the device; that they get there is no wait of a call."""
    if isinstance(value, list):
        return [_move_tensors(each, device) for each in value]
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value

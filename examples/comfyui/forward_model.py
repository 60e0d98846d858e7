"""ComfyUI's MODEL of a transformer that runs elsewhere: its sampler, conditions and latents are ComfyUI's own.

The MODEL holds no weights. What ComfyUI's samplers call once a step, `diffusion_model`, sends the call to
`ditile serve --forward` and returns its answer. Nodes that would change weights or blocks are refused.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import comfy.model_detection
import comfy.model_management
import comfy.model_patcher
import comfy.patcher_extension
import torch

from .forward_client import DTYPES, ForwardClient, ForwardError
from .forward_families import Call, FamilyError, check_call, find_family

CHECK_SECONDS = 0.1
# A thread that is woken ends at once, unless it is connecting.
JOIN_SECONDS = 15.0
# Where a MODEL keeps its LoRAs, [(name, strength)]: these options are copied with a MODEL and given to each call.
LORAS = "ditile_loras"
ELSEWHERE = "the weights of this model are with its ditile worker"


class RemoteTransformer(torch.nn.Module):
    """Stands where ComfyUI's own transformer would be.

    Args:
        connect: makes a client of the worker.
        description: the worker's, of the connection that this was made with.
        check: raises if ComfyUI's user has pressed Cancel.
    """

    def __init__(
        self, connect: Callable[[], ForwardClient], description: Mapping[str, Any], check: Callable[[], None]
    ) -> None:
        super().__init__()
        self.family = find_family(description["model"])
        self.config = dict(description["config"])
        self.description = dict(description)
        # ComfyUI casts latents and conditions to it.
        self.dtype = read_dtype(description)
        unet_config = self.family.describe(self.config)
        self.patch_size = unet_config.get("patch_size", 2)
        # Wan's conditions read from it how many channels come from images.
        self.patch_embedding = torch.nn.Module()
        self.patch_embedding.weight = torch.empty(1, unet_config.get("in_dim", 0), device="meta")
        if unet_config["image_model"] == "ltxav":
            # The times of masked latents are cut by them.
            patchifiers = importlib.import_module("comfy.ldm.lightricks.symmetric_patchifier")
            self.patchifier = patchifiers.SymmetricPatchifier(1, start_end=True)
            self.a_patchifier = patchifiers.AudioPatchifier(1, start_end=True)
        self._connect = connect
        self._check = check
        self._connection: ForwardClient | None = None

    def begin_run(self) -> None:
        """Connect anew before the next step: the worker may have been started again since, with another model."""
        self._close_connection()

    def forward(self, x: Any, timestep: Any, context: Any = None, transformer_options: Any = None, **extra: Any) -> Any:
        """Return the prediction, as ComfyUI's own transformer would. Wrappers around it run here."""
        options = {} if transformer_options is None else transformer_options
        wrappers = comfy.patcher_extension.get_all_wrappers(comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL, options)
        executor = comfy.patcher_extension.WrapperExecutor.new_class_executor(self._forward, self, wrappers)
        return executor.execute(x, timestep, context, transformer_options=options, **extra)

    def _forward(
        self, x: Any, timestep: Any, context: Any = None, transformer_options: Any = None, **extra: Any
    ) -> Any:
        options = transformer_options or {}
        check_call(self.family, extra, options)
        present = {name: value for name, value in extra.items() if value is not None}
        call = Call(x, timestep, context, present, self.config)
        arguments = self.family.encode(call)
        output = self._run_interruptibly(lambda: self._send(arguments, dict(options.get(LORAS, ()))))
        prediction = self.family.decode(output, call)
        if isinstance(prediction, list):
            return [part.to(device=whole.device, dtype=whole.dtype) for part, whole in zip(prediction, x, strict=True)]
        return prediction.to(device=x.device, dtype=x.dtype)

    def _send(self, arguments: Mapping[str, Any], loras: Mapping[str, float]) -> Any:
        """Return the worker's prediction with these LoRAs."""
        if self._connection is None:
            self._connection = self._open_connection()
        return self._connection.forward(arguments, loras)

    def _open_connection(self) -> ForwardClient:
        """Return a connection of a new run.

        Raises:
            ForwardError: if another model is there now.
        """
        connection = self._connect()
        connection.connect()
        try:
            description = connection.hello()
            if any(description[name] != self.description[name] for name in ("model", "config", "dtype")):
                raise ForwardError(f"the worker has another model now, {description['model']}; load it again")
        except BaseException:
            connection.close()
            raise
        return connection

    def _close_connection(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _run_interruptibly(self, work: Callable[[], Any]) -> Any:
        """Return what the work returns, in a thread of its own while this one looks for Cancel."""
        results: list[Any] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                # Modes of gradients belong to a thread.
                with torch.inference_mode():
                    results.append(work())
            except BaseException as error:  # noqa: BLE001
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            while thread.is_alive():
                thread.join(CHECK_SECONDS)
                self._check()
        except BaseException:
            # The answer of the step in progress would be the first one that is read: it goes with its connection.
            if self._connection is not None:
                self._connection.interrupt()
            thread.join(JOIN_SECONDS)
            self._close_connection()
            raise
        if errors:
            self._close_connection()
            raise errors[0]
        return results[0]


class RemotePatcher(comfy.model_patcher.ModelPatcher):
    """ComfyUI's MODEL, which refuses what would change weights that it does not hold."""

    def clone(self, *args: Any, **kwargs: Any) -> Any:
        """Return a copy of the same kind, in ComfyUI's versions where `clone` names its own class, too."""
        copy = super().clone(*args, **kwargs)
        copy.__class__ = type(self)
        return copy

    def add_patches(self, patches: Any, strength_patch: float = 1.0, strength_model: float = 1.0) -> Any:
        """Refuse a LoRA of ComfyUI's own loaders, unless it is for the text encoder alone."""
        if strength_patch == 0:
            return []
        raise FamilyError(
            f"{ELSEWHERE}: use ditile LoRA (forward) in the place of this LoRA, or set its strength_model to 0"
        )

    def add_hook_patches(
        self, hook: Any, patches: Any, strength_patch: float = 1.0, strength_model: float = 1.0
    ) -> Any:
        """Refuse a hook for weights, unless its strength is 0."""
        if strength_patch == 0:
            return []
        raise FamilyError(f"{ELSEWHERE}: hooks cannot change them")

    def add_weight_wrapper(self, name: str, function: Any) -> None:
        """Refuse a function of weights."""
        raise FamilyError(f"{ELSEWHERE}: {name} cannot be wrapped")

    def add_object_patch(self, name: str, obj: Any) -> None:
        """Replace a part of the model, such as its sampling; those of the transformer are refused."""
        if name.partition(".")[0] == "diffusion_model":
            raise FamilyError(f"{ELSEWHERE}: {name} cannot be replaced")
        super().add_object_patch(name, obj)

    def get_key_patches(self, filter_prefix: str | None = None) -> Any:
        """Refuse to give weights to be merged."""
        raise FamilyError(f"{ELSEWHERE}: it cannot be merged")

    def pre_run(self) -> None:
        """Begin a sampling run."""
        self.model.diffusion_model.begin_run()
        super().pre_run()


def load_model(
    connect: Callable[[], ForwardClient],
    check: Callable[[], None] = comfy.model_management.throw_exception_if_processing_interrupted,
) -> RemotePatcher:
    """Return the MODEL of a worker.

    Raises:
        ForwardError: if there is no worker, or it refuses.
        FamilyError: if its model has no adapter, or this version of ComfyUI does not know it.
    """
    connection = connect()
    connection.connect()
    try:
        description = connection.hello()
    finally:
        connection.close()
    transformer = RemoteTransformer(connect, description, check)
    unet_config = transformer.family.describe(transformer.config)
    model_config = comfy.model_detection.model_config_from_unet_config(unet_config)
    if model_config is None:
        raise FamilyError(f"this version of ComfyUI does not know {description['model']}; update it")
    model_config.unet_config["disable_unet_model_creation"] = True
    model_config.set_inference_dtype(transformer.dtype, None)
    # Nothing of the transformer is in this machine's memory: ComfyUI need not make room for it.
    model_config.memory_usage_factor = 0.0
    offload_device = comfy.model_management.unet_offload_device()
    model = model_config.get_model({}, "", device=offload_device)
    model.diffusion_model = transformer
    model.state_dict_for_saving = refuse_saving
    logging.info("ditile: %s on %s ranks, plan %s", description["model"], description["ranks"], description["plan"])
    return RemotePatcher(model, comfy.model_management.get_torch_device(), offload_device)


def refuse_saving(*_: Any, **__: Any) -> None:
    """Refuse to write a checkpoint."""
    raise FamilyError(f"{ELSEWHERE}: it cannot be saved")


def add_lora(model: Any, name: str, strength: float) -> Any:
    """Return the MODEL with one more LoRA of its worker.

    Raises:
        FamilyError: if the MODEL is none of a worker, or the LoRA has no name, an unknown one, or is there twice.
    """
    if not isinstance(model, RemotePatcher):
        raise FamilyError("this model is ComfyUI's own; use LoraLoaderModelOnly for it")
    known = model.model.diffusion_model.description.get("loras", [])
    if name not in known:
        raise FamilyError(f"LoRA {name!r} is not on the worker; it has {', '.join(known) or 'none'}")
    copy = model.clone()
    options = copy.model_options["transformer_options"]
    loras = list(options.get(LORAS, ()))
    if name in dict(loras):
        raise FamilyError(f"LoRA {name!r} is there twice; add the strengths in one node")
    options[LORAS] = [*loras, (name, strength)]
    return copy


def read_dtype(description: Mapping[str, Any]) -> torch.dtype:
    """Return the type of the worker's activations; weights that are stored in fewer bits are computed in bfloat16."""
    dtype = DTYPES.get(str(description["dtype"]).removeprefix("torch."), torch.bfloat16)
    return dtype if dtype in (torch.float32, torch.float16) else torch.bfloat16

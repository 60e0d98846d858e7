"""Nodes for a transformer that runs on several cards, in ComfyUI's own graph: its model, and LoRAs of it.

torch and ComfyUI are imported by the functions that need them, as by ComfyUI's own nodes these are only listed.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from .client import find_key
from .forward_worker import WorkerError, WorkerOptions, WorkerPool
from .nodes import CATEGORY, check_interrupt

OWN = "the model's own"
# Of `ditile serve --dtype`.
WEIGHT_TYPES = ("", "bfloat16", "float16", "float32")
COMPONENTS = ("transformer", "transformer_2")
WORKERS = WorkerPool()


class DitileForwardModel:
    """A transformer on several cards, in the place of Load Diffusion Model."""

    CATEGORY = CATEGORY
    FUNCTION = "load_model"
    RETURN_TYPES = ("MODEL",)
    RETURN_NAMES = ("model",)
    DESCRIPTION = (
        "A transformer that ditile runs on several cards, for ComfyUI's own samplers: of a running "
        "`ditile serve --forward` by its address, or of one that is started with this model and ends with ComfyUI."
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        """The address of a worker, or what to start one with."""
        address = {"default": "", "tooltip": "of a running worker: unix:/path or 127.0.0.1:PORT; empty: start one"}
        model = {
            "default": "",
            "tooltip": "what to start: a published model, a folder, or a hub id that is on the disk",
        }
        component = {"default": COMPONENTS[0], "tooltip": "transformer_2: the model of low noise of Wan 2.2"}
        file = {"default": "", "tooltip": f"its weights, of models/diffusion_models; empty: {OWN}"}
        plan = {"default": "", "tooltip": 'such as "ulysses=2", "cfg=2 ulysses=2" or "tensor=2"; empty: by cards'}
        cards = {"default": 1, "min": 1, "max": 64, "tooltip": "cards that share each image, if there is no plan"}
        dtype = {"default": "", "tooltip": f"type of the weights; empty: {OWN}"}
        return {
            "required": {"address": ("STRING", address)},
            "optional": {
                "model_name": ("STRING", model),
                "component": (list(COMPONENTS), component),
                "file": (["", *list_weight_files()], file),
                "plan": ("STRING", plan),
                "cards": ("INT", cards),
                "weight_type": (list(WEIGHT_TYPES), dtype),
            },
        }

    @classmethod
    def IS_CHANGED(cls, address: str, **options: Any) -> Any:  # noqa: N802
        """What the worker holds: ComfyUI loads it again when that changes, or when a worker has ended."""
        if not address.strip():
            return float("nan") if WORKERS.has_ended(read_options(**options)) else ""
        from .forward_client import ForwardError

        try:
            with make_connect(address)() as client:
                return str(sorted(client.hello().items()))
        except ForwardError:
            return float("nan")

    def load_model(self, address: str, model_name: str = "", **options: Any) -> tuple[Any]:
        """Return a MODEL whose steps are computed by the worker.

        Raises:
            WorkerError: if there is neither an address nor a model, or the worker does not start.
            ForwardError: if there is no worker at the address, or it refuses the key.
            FamilyError: if ComfyUI cannot call its model.
        """
        address = address.strip()
        if bool(address) == bool(model_name.strip()):
            raise WorkerError("give the address of a worker, or the model to start one with, and not both")
        from .forward_model import load_model

        if address:
            return (load_model(make_connect(address)),)
        # Workers of models that ComfyUI has dropped end first: the cards may not hold both.
        gc.collect()
        worker = WORKERS.start(read_options(model_name, **options), check_interrupt)
        WORKERS.add_user(worker)
        try:
            model = load_model(make_connect(worker.address))
        except BaseException:
            WORKERS.remove_user(worker)
            raise
        weakref.finalize(model.model, WORKERS.remove_user, worker)
        return (model,)


class DitileForwardLoRA:
    """A LoRA of the worker; several are chained."""

    CATEGORY = CATEGORY
    FUNCTION = "add_lora"
    RETURN_TYPES = ("MODEL",)
    RETURN_NAMES = ("model",)
    DESCRIPTION = "A LoRA for a model of ditile, by its name in the worker's folder (ditile serve --lora-dir)."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        """Model, name and strength."""
        strength = {"default": 1.0, "min": -10.0, "max": 10.0, "step": 0.05}
        return {
            "required": {
                "model": ("MODEL",),
                "name": ("STRING", {"default": "", "tooltip": "its file's name without .safetensors"}),
                "strength": ("FLOAT", strength),
            }
        }

    def add_lora(self, model: Any, name: str, strength: float) -> tuple[Any]:
        """Return the MODEL with the LoRA.

        Raises:
            FamilyError: if the MODEL is not of ditile, or its worker has no such LoRA.
        """
        from .forward_model import add_lora

        return (add_lora(model, name.strip(), strength),)


def make_connect(address: str) -> Callable[[], Any]:
    """Return what makes a client of a worker. A key goes to its own address alone, see `client.find_key`.

    Raises:
        ForwardError: if the address is none of this machine.
    """
    from .forward_client import ForwardClient, parse_address

    address = address.strip()
    parse_address(address)
    key = None if address.startswith("unix:") else find_key(f"http://{address}")
    return lambda: ForwardClient(address, key)


def read_options(
    model_name: str = "",
    component: str = COMPONENTS[0],
    file: str = "",
    plan: str = "",
    cards: int = 1,
    weight_type: str = "",
) -> WorkerOptions:
    """Return what to start a worker with."""
    path = ""
    if file:
        import folder_paths

        path = folder_paths.get_full_path_or_raise("diffusion_models", file)
    # The folder is the user's and not the workflow's, as it is one of this machine.
    lora_dir = os.environ.get("DITILE_LORA_DIR", "")
    return WorkerOptions(model_name.strip(), component, path, plan.strip(), cards, weight_type, lora_dir)


def list_weight_files() -> list[str]:
    """Return the names of ComfyUI's diffusion models."""
    try:
        import folder_paths
    except ImportError:
        return []
    names: list[str] = folder_paths.get_filename_list("diffusion_models")
    return names


NODE_CLASS_MAPPINGS: Mapping[str, type] = {
    "DitileForwardModel": DitileForwardModel,
    "DitileForwardLoRA": DitileForwardLoRA,
}
NODE_DISPLAY_NAME_MAPPINGS: Mapping[str, str] = {
    "DitileForwardModel": "ditile load diffusion model",
    "DitileForwardLoRA": "ditile LoRA (forward)",
}

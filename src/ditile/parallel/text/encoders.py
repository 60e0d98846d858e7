"""Text encoders: on the first rank of an image only, or with their layers split. The pipeline encodes as before.

`first`: the first rank runs the encoder, and its result is broadcast. `split`: the pipeline calls the encoder on every
rank; the layers of other ranks pass their input through, and the last layer of each run sends its output to all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ditile.distributed.mesh import Mesh
from ditile.distributed.transport import broadcast_tensor, describe_dtype, gather_json
from ditile.model.hooks.compile import exclude_from_compile
from ditile.model.hooks.overrides import IN_CALL, override_attribute
from ditile.model.hooks.placeholders import ModuleContents, refuse_saving, restore_contents, turn_into_placeholder
from ditile.parallel.text.parts import (
    FREED,
    WHOLE,
    EncoderPlacement,
    assign_layer_ranks,
    empty_foreign_modules,
    find_encoder_layers,
    find_encoder_modules,
    install_guards,
    list_foreign_modules,
    read_placement,
    set_placeholder_parameter,
    store_placement,
)
from ditile.plan.errors import ModelError, StateError
from ditile.plan.option_classes import check_value
from ditile.plan.plan import Plan

After = Literal["keep", "offload", "free"]
Forward = Callable[..., Any]


def find_text_encoders(pipe: Any) -> dict[str, Any]:
    """Return the text encoders of a pipeline, by the name of the component."""
    encoders = {}
    for name, component in pipe.components.items():
        if name.startswith("text_encoder") and isinstance(component, nn.Module):
            encoders[name] = component
    return encoders


class TextEncoders:
    """The text encoders of a pipeline, of which a rank has a part."""

    def __init__(
        self,
        pipe: Any,
        plan: Plan,
        mesh: Mesh,
        device: torch.device,
        *,
        keep: bool = False,
        after: After = "keep",
    ) -> None:
        """Check the arguments without changing the encoders.

        Args:
            plan: says how the encoders are divided.
            mesh: the ranks of an image.
            device: where the encoders run.
            keep: whether the parts of other ranks are kept aside.
            after: what happens to the encoders when denoising begins: they stay; they wait on the CPU for the next
                call, where they may be edited as before; or they are freed for good, so that later calls need
                embeddings instead of prompts.

        Raises:
            ModelError: if an encoder cannot be split, or `after` is not known.
            StateError: if an encoder was loaded as another rank's part, or only in part although `keep` is set.
        """
        check_value(After, after, "text_after")
        self.encoders = find_text_encoders(pipe)
        self._place = EncoderPlacement.choose_placement(plan, mesh.image.index)
        self._after = after
        self._device = device
        self._keep = keep
        self._channel = _EncoderChannel(mesh, device)
        self._kept: list[tuple[nn.Module, ModuleContents]] = []
        self._guards = ExitStack()
        self._away = False  # offloaded in the current call
        for name, encoder in self.encoders.items():
            placement = read_placement(encoder)
            if placement not in (None, self._place):
                raise StateError(
                    f"{name} is what {placement} leaves, and here the plan needs {self._place}; load the pipeline for "
                    "this plan, or restore() its runner"
                )
            if placement is not None and self._keep:
                raise StateError(f"keep_weights=True, and only a part of {name} was loaded; load it without a plan")
            if self._place.mode == "split":
                list_foreign_modules(encoder, self._place)

    @property
    def has_freed_encoders(self) -> bool:
        """Return whether the encoders are freed for good."""
        return any(read_placement(encoder) == FREED for encoder in self.encoders.values())

    @property
    def stay_whole(self) -> bool:
        """Return whether this rank has all of every encoder, and keeps it."""
        return self._place == WHOLE and self._after != "free"

    def empty_foreign_parts(self) -> None:
        """Empty the parts of other ranks, unless they were never read, and refuse calls of a part by itself."""
        # A runner of whole encoders may be dropped without `restore`, so it leaves nothing on them.
        if self.stay_whole:
            return
        for name, encoder in self.encoders.items():
            # An encoder with a placement was read in part, so there is nothing to empty.
            if read_placement(encoder) is not None:
                continue
            if self._place != WHOLE:
                contents = empty_foreign_modules(encoder, self._place)
                if self._keep:
                    self._kept += contents
            install_guards(self._guards, encoder, name)

    def refill_foreign_parts(self) -> None:
        """Put back the contents that `empty_foreign_parts` kept."""
        for module, contents in reversed(self._kept):
            restore_contents(module, contents)
        self._kept.clear()
        self._guards.close()
        for encoder in self.encoders.values():
            store_placement(encoder, None)
            set_placeholder_parameter(encoder, None)

    @contextmanager
    def install_for_call(self, denoiser: nn.Module) -> Iterator[None]:
        """Let the encoders run for the length of a call.

        Unless the encoders stay, the first call of `denoiser` within the context releases them.
        """
        with ExitStack() as stack:
            if self._after == "offload":
                stack.callback(self._finish_offload)
                for encoder in self.encoders.values():
                    encoder.to(self._device)
            for encoder in self.encoders.values():
                # The guards recognise calls of the runner by this mark.
                override_attribute(stack, encoder, IN_CALL, True)
                if self._place.mode == "first":
                    broadcast = partial(self._channel.broadcast_forward, 0, encoder.forward)
                    override_attribute(stack, encoder, "forward", broadcast)
                elif self._place.mode == "split" and read_placement(encoder) != FREED:
                    _SplitEncoder(encoder, self._place, self._channel).install_forwards(stack)
            if self._after != "keep":
                # A pipeline encodes its prompts before it denoises: the first call of the denoiser ends the encoding.
                release = exclude_from_compile(lambda *_: self._release_encoders())
                stack.callback(denoiser.register_forward_pre_hook(release).remove)
            yield

    def _release_encoders(self) -> None:
        """Offload or free the encoders when denoising begins."""
        if self._away or self.has_freed_encoders:
            return
        self._away = self._after == "offload"
        for encoder in self.encoders.values():
            # The dtype is read first: an encoder without parameters has no dtype.
            dtype = encoder.dtype
            set_placeholder_parameter(encoder, None)
            if self._after == "offload":
                encoder.to("cpu")
            else:
                for child in encoder.children():
                    turn_into_placeholder(child)
                store_placement(encoder, FREED)
                refuse_saving(self._guards, encoder)
            # The pipeline still asks the encoders for its device.
            set_placeholder_parameter(encoder, dtype, self._device)

    def _finish_offload(self) -> None:
        """Restore the state that the encoders had before the call, on the CPU."""
        if self._away and not self._place.has_no_weights:  # without weights it always has the placeholder
            for encoder in self.encoders.values():
                set_placeholder_parameter(encoder, None)
        self._away = False


class _EncoderChannel:
    """The channel from one rank of an image to the others: headers use the control group, tensors the image's group."""

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        # A failed call replaces the groups of the mesh, so they are looked up for each message.
        self._mesh = mesh
        self._axis = mesh.image
        self._device = device

    def broadcast_result(self, source: int, make: Callable[[], Any]) -> Any:
        """Return on every rank the result of `make` on rank `source`.

        Tensors are sent as they are, their containers as JSON.

        Raises:
            StateError: if `make` raised on that rank.
            ModelError: if its result cannot be described.
        """
        if self._axis.index != source:
            header = gather_json(None, self._mesh.control)[source]
            if "raised" in header:
                raise StateError(f"the text encoder raised on rank {self._axis.ranks[source]}: {header['raised']}")
            leaves = []
            for leaf in header["leaves"]:
                if isinstance(leaf, dict):
                    empty = torch.empty(leaf["shape"], dtype=getattr(torch, leaf["dtype"]), device=self._device)
                    leaf = self._broadcast_tensor(empty, source)
                leaves.append(leaf)
            return pytree.tree_unflatten(leaves, pytree.treespec_loads(header["structure"]))
        try:
            result = make()
            # transformers registers its output classes, so that pytree takes outputs apart and names their classes.
            leaves, structure = pytree.tree_flatten(result)
            header = {"structure": pytree.treespec_dumps(structure), "leaves": list(map(_describe_leaf, leaves))}
        except BaseException as error:
            # The others wait for a header, so one is sent whatever happens here.
            message = " ".join(str(error).split())
            gather_json({"raised": f"{type(error).__name__}: {message}"}, self._mesh.control)
            raise
        gather_json(header, self._mesh.control)
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                self._broadcast_tensor(leaf.to(self._device), source)
        return result

    def broadcast_forward(self, source: int, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a forward on rank `source`."""
        return self.broadcast_result(source, lambda: forward(*args, **kwargs))

    def _broadcast_tensor(self, tensor: Tensor, source: int) -> Tensor:
        # A single rank does not broadcast, so there is a group.
        assert self._axis.group is not None
        return broadcast_tensor(tensor, source, self._axis.group, self._mesh.traffic, "text")


class _SplitEncoder:
    """An encoder whose layers are split over the ranks, for the length of a call."""

    def __init__(self, encoder: Any, place: EncoderPlacement, channel: _EncoderChannel) -> None:
        self._encoder = encoder
        self._index = place.index
        self._channel = channel
        self._layers = find_encoder_layers(encoder)
        self._owners = assign_layer_ranks(len(self._layers), place.weights)
        self._extras: tuple[Any, ...] | None = None  # what the first layer returns besides its tokens
        self._returns_states = False  # whether the result has the output of every layer

    def install_forwards(self, stack: ExitStack) -> None:
        """Override the forwards of the encoder, of the modules before its layers, and of its layers."""
        encoder = self._encoder
        override_attribute(stack, encoder, "forward", partial(self._forward_encoder, encoder.forward))
        # The first rank has the embeddings; the other ranks get their outputs.
        first_names = find_encoder_modules(type(encoder)).first
        for name, module in encoder.named_modules():
            if name.rpartition(".")[2] in first_names:
                broadcast = partial(self._channel.broadcast_forward, 0, module.forward)
                override_attribute(stack, module, "forward", broadcast)
        for index, layer in enumerate(self._layers):
            override_attribute(stack, layer, "forward", partial(self._forward_layer, index, layer.forward))

    def _forward_encoder(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        config = self._encoder.config
        if kwargs.get("output_attentions", config.output_attentions):
            raise ModelError("text=split has no attention weights of the layers of other ranks; use text=first")
        # With hidden states, every layer's output is part of the result, not only the output of the last layer of each
        # run.
        self._returns_states = bool(kwargs.get("output_hidden_states", config.output_hidden_states))
        return forward(*args, **kwargs)

    def _forward_layer(self, index: int, forward: Forward, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run a layer on its rank and pass its input on elsewhere; send the output to ranks that need it."""
        owner = self._owners[index]
        if index == 0:
            # All ranks get everything that the first layer returns: in T5 the position bias, which every layer adds.
            out = self._channel.broadcast_forward(owner, forward, hidden_states, *args, **kwargs)
            self._extras = out[1:] if isinstance(out, tuple) else None
            return out

        def forward_without_extras() -> Any:
            out = forward(hidden_states, *args, **kwargs)
            return out[0] if isinstance(out, tuple) else out

        is_last_of_run = self._owners[index + 1 : index + 2] != [owner]
        if is_last_of_run or self._returns_states:
            return self._append_extras(self._channel.broadcast_result(owner, forward_without_extras))
        if owner == self._index:
            return forward(hidden_states, *args, **kwargs)
        return self._append_extras(hidden_states)

    def _append_extras(self, hidden_states: Tensor) -> Any:
        if self._extras is None:
            return hidden_states
        return (hidden_states, *self._extras)


def _describe_leaf(leaf: Any) -> Any:
    """Describe a leaf of an output for JSON: a tensor, which is sent afterwards, by its dtype and shape."""
    if isinstance(leaf, Tensor):
        return {"dtype": describe_dtype(leaf), "shape": list(leaf.shape)}
    if leaf is None or isinstance(leaf, bool | int | float | str):
        return leaf
    raise ModelError(f"a text encoder returned a {type(leaf).__name__}, which does not travel; use text=each")

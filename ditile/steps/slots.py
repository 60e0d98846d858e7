"""Slots: a cache's place around the blocks of a transformer, on the instances, until it is taken away.

A slot overrides `forward` of one block. While nothing is to be done at a block, which is nearly always, it costs one
attribute and one call. What was installed later (offloading hooks, a runner's seats) lies around it and stays.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from ditile.seats import State
from ditile.spec import Flow

Handle = Callable[["Slot", tuple[Any, ...], dict[str, Any]], Any]
"""Runs a block, or does not: (slot, positional arguments, named arguments) -> what the block returns."""


class Slot:
    """One block.

    Args:
        index: its place in the chain.
        block: the module.
        flow: how it passes tokens on.

    Attributes:
        handle: what is done in place of a call; None calls the block.
        forward: the block's own.
    """

    __slots__ = ("_at", "_forward_before", "_is_tuple", "block", "flow", "forward", "handle", "has_text", "index")

    def __init__(self, index: int, block: nn.Module, flow: Flow) -> None:
        self.index, self.block, self.flow = index, block, flow
        self.handle: Handle | None = None
        names = [name for name in inspect.signature(type(block).forward).parameters if name != "self"]
        self._at = {name: k for k, name in enumerate(names)}
        self.has_text = "text" in flow.returns
        self._is_tuple = len(flow.returns) > 1

    def install(self) -> None:
        """Lays the slot around the block."""
        self._forward_before = vars(self.block).get("forward")
        self.forward = forward = self.block.forward

        def slotted(*args: Any, **kwargs: Any) -> Any:
            handle = self.handle
            if handle is None:
                return forward(*args, **kwargs)
            return handle(self, args, kwargs)

        slotted._ditile_slot = self  # type: ignore[attr-defined]
        vars(self.block)["forward"] = slotted

    def remove(self) -> None:
        """Takes it away; where something else lies around it by now, it stays and does nothing."""
        self.handle = None
        if getattr(vars(self.block).get("forward"), "_ditile_slot", None) is not self:
            return
        if self._forward_before is None:
            del vars(self.block)["forward"]
        else:
            vars(self.block)["forward"] = self._forward_before

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> State:
        """The tokens that a call brings."""
        image, text = self.flow.image, self.flow.text
        found = kwargs[image] if image in kwargs else args[self._at[image]]
        if not self.has_text or text is None:
            return State(found, None)
        return State(found, kwargs[text] if text in kwargs else args[self._at[text]])

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], state: State) -> State:
        """Runs the block on other tokens than a call brings."""
        named = dict(zip(self._at, args, strict=False)) | kwargs
        named[self.flow.image] = state.image
        if self.has_text and self.flow.text is not None:
            named[self.flow.text] = state.text
        return self.unpack(self.forward(**named))

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """All arguments by name."""
        return dict(zip(self._at, args, strict=False)) | kwargs

    def unpack(self, out: Any) -> State:
        """The tokens that a block returned."""
        self._is_tuple = isinstance(out, tuple | list)
        if not self._is_tuple:
            return State(out, None)
        named = dict(zip(self.flow.returns, out, strict=True))
        return State(named["image"], named.get("text"))

    def pack(self, state: State) -> Any:
        """The same in the form in which the block returns them."""
        if not self._is_tuple:
            return state.image
        return tuple(state.text if name == "text" else state.image for name in self.flow.returns)

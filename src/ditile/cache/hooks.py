"""Hooks of a cache around the blocks of a transformer, on the instances, until they are removed.

A hook overrides `forward` of one block. At most blocks it has nothing to do, and then costs one attribute and one call.
Hooks that are installed later (for offloading, or by a runner) wrap it and stay when it is removed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import nn

from ditile.model.hooks.block_policy import TokenState
from ditile.model.hooks.compile import (
    COMPILED_CALL_ATTRIBUTE,
    CompileFunction,
    get_compiled_call,
    normalize_call_strides,
)
from ditile.model.hooks.overrides import (
    find_forward_attribute,
    hide_attribute,
    is_override_lost,
    list_parameter_names,
    locate_override,
    override_attribute,
)
from ditile.plan.anatomy import Flow
from ditile.plan.errors import ModelError, StateError

BlockHandler = Callable[["CacheHook", tuple[Any, ...], dict[str, Any]], Any]
"""Runs or skips a block: (hook, positional arguments, named arguments) -> what the block returns."""


class CacheHook:
    """The hook of one block.

    Args:
        index: its place in the chain.
        flow: how it passes tokens on.

    Attributes:
        handle: runs in place of the block; None runs the block.
        forward: the block's own.
    """

    def __init__(self, index: int, block: nn.Module, flow: Flow) -> None:
        self.index = index
        self.block = block
        self.flow = flow
        self.handle: BlockHandler | None = None
        self._parameters = list_parameter_names(block)
        places = {name: place for place, name in enumerate(self._parameters)}
        self.has_text = "text" in flow.returns
        self._is_tuple = len(flow.returns) > 1
        self._image = flow.image
        self._image_at = places.get(flow.image, -1)
        self._text = flow.text if self.has_text else None
        self._text_at = places.get(flow.text or "", -1)
        self._text_first = flow.returns[0] == "text"
        self._image_out = flow.returns.index("image")
        self._text_out = flow.returns.index("text") if self.has_text else -1
        # This is the attribute that holds the hook, and the value that it had before.
        self._name = ""
        self._before: Any = None
        self._mine: Any = None
        self._stock: Any = None
        self._is_compiled = False

    def install_hook(self, compile_: CompileFunction | None = None) -> None:
        """Install the hook around the block. A block with a compiled call gets it there.

        Args:
            compile_: compiles the block's forward, where the block was not compiled by itself.
        """
        self.remove_hook()
        name = find_forward_attribute(self.block)
        if get_compiled_call(self.block) is not None:
            name = COMPILED_CALL_ATTRIBUTE
        self._name = name
        self._before = vars(self.block).get(name)
        inner = self._stock = getattr(self.block, name)
        if name == COMPILED_CALL_ATTRIBUTE:
            inner = normalize_call_strides(inner)
        elif compile_ is not None:
            inner = normalize_call_strides(compile_(inner))
        self.forward: Callable[..., Any] = inner

        def call_with_hook(*args: Any, **kwargs: Any) -> Any:
            handle = self.handle
            # After a second installation something may still call the first hook, which must do nothing.
            if handle is None or self._mine is not call_with_hook:
                return inner(*args, **kwargs)
            return handle(self, args, kwargs)

        call_with_hook.compiled_with = self._compile_inner_forward  # type: ignore[attr-defined]
        self._mine = vars(self.block)[name] = call_with_hook

    def renew_hook(self, compile_: CompileFunction | None) -> None:
        """Install the hook again if it is lost or out of date. It is lost with a hook that was removed below it, and
        out of date if the block or the whole model was compiled since, or is no longer compiled."""
        if self._locate_hook() is None:
            is_due = is_override_lost(self.block, self._mine)
        else:
            compiled_call = None
            if self._name == COMPILED_CALL_ATTRIBUTE:
                compiled_call = self._mine
            is_same_call = get_compiled_call(self.block) is compiled_call
            is_due = not is_same_call or compile_ is not None or self._is_compiled
        if is_due:
            self.install_hook(compile_)
            self._is_compiled = compile_ is not None

    def remove_hook(self) -> None:
        """Remove the hook. A hook that something else wraps by now stays and does nothing."""
        self.handle = None
        place = None
        if self._name:
            place = self._locate_hook()
        if place is None:
            return
        # Without an attribute of its own the block shows its class's method again.
        if place == (self.block, self._name) and self._before is None:
            del vars(self.block)[self._name]
        else:
            setattr(*place, self._stock)
        self._name = ""

    def lift_hook(self, stack: ExitStack) -> None:
        """Take the hook off until a stack is closed. Raises `StateError` if something unknown wraps it."""
        place = self._locate_hook()
        if place is None and not is_override_lost(self.block, self._mine):
            name = type(self.block).__name__
            raise StateError(f"a {name} that is cached cannot be copied: something wraps its hook; call disable_cache")
        if place == (self.block, self._name) and self._before is None:
            hide_attribute(stack, *place)
        elif place is not None:
            override_attribute(stack, *place, self._stock)

    def _locate_hook(self) -> tuple[Any, str] | None:
        """Return the owner and the attribute that hold the hook. None if something unknown wraps it, or it is lost."""
        if vars(self.block).get(COMPILED_CALL_ATTRIBUTE) is self._mine:
            return self.block, COMPILED_CALL_ATTRIBUTE
        return locate_override(self.block, self._mine)

    def _compile_inner_forward(self, compile_: CompileFunction) -> Any:
        """Compile the forward inside the hook, because the hook itself must not be traced."""
        self.install_hook(compile_)
        self._is_compiled = True
        return self._mine

    def read_tokens(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TokenState:
        """Return the tokens `[rows, tokens, channels]` among the arguments of a call."""
        image = kwargs[self._image] if self._image in kwargs else args[self._image_at]
        if self._text is None:
            return TokenState(image, None)
        text = kwargs[self._text] if self._text in kwargs else args[self._text_at]
        return TokenState(image, text)

    def copy_tokens(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TokenState:
        """Copy the tokens of a call, to be used after it has run. Some blocks write into their inputs."""
        image, text = self.read_tokens(args, kwargs)
        if text is not None:
            text = text.clone()
        return TokenState(image.clone(), text)

    def bind_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return all arguments by name."""
        return dict(zip(self._parameters, args, strict=False)) | kwargs

    def unpack_tokens(self, out: Any) -> TokenState:
        """Return the tokens in a block's result. Raises `ModelError` if it has another number of streams."""
        # What a block returns is only known once it has run.
        self._is_tuple = isinstance(out, (tuple, list))  # noqa: UP038 - in half the time
        if not self._is_tuple:
            return TokenState(out, None)
        if len(out) != len(self.flow.returns):
            raise ModelError(f"{type(self.block).__name__} returned {len(out)} streams and not {self.flow.returns}")
        text = None
        if self.has_text:
            text = out[self._text_out]
        return TokenState(out[self._image_out], text)

    def pack_tokens(self, state: TokenState) -> Any:
        """Return tokens in the form of the block's result."""
        image, text = state
        if not self._is_tuple:
            return image
        if not self.has_text:
            return (image,)
        if self._text_first:
            return (text, image)
        return (image, text)

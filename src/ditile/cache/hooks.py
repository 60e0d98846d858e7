"""Hooks of a cache around the blocks of a transformer, on the instances, for the length of a call or of an image.

Most hooks have nothing to do in a call, and then cost one attribute and one call. The hooks of a runner wrap them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import nn

from ditile.model.hooks.block_policy import TokenState
from ditile.model.hooks.compile import COMPILED_INSIDE_ATTRIBUTE, CompileFunction, ForwardCall, wrap_block_call
from ditile.model.hooks.overrides import list_parameter_names
from ditile.plan.anatomy import Flow
from ditile.plan.errors import ModelError

BlockHandler = Callable[["CacheHook", tuple[Any, ...], dict[str, Any]], Any]
"""Runs or skips a block: (hook, positional arguments, named arguments) -> what the block returns."""


class CacheHook:
    """The hook of one block.

    Args:
        index: the block's place in the chain.
        flow: how the block passes tokens on.

    Attributes:
        handle: runs in place of the block; None runs the block.
        forward: the block's own forward.
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

    def install_hook(self, stack: ExitStack, compile_: CompileFunction | None) -> None:
        """Install the hook around the block until the stack is closed.

        Args:
            compile_: compiles the block's forward, unless the block itself is compiled.
        """

        def wrap(forward: ForwardCall) -> ForwardCall:
            self.forward = forward

            def call_with_hook(*args: Any, **kwargs: Any) -> Any:
                handle = self.handle
                if handle is None:
                    return forward(*args, **kwargs)
                return handle(self, args, kwargs)

            setattr(call_with_hook, COMPILED_INSIDE_ATTRIBUTE, True)
            return call_with_hook

        wrap_block_call(stack, self.block, compile_, wrap)

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

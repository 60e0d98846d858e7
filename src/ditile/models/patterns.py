"""The six ways in which blocks take and return their tokens, under the names that cache-dit gave them."""

from __future__ import annotations

from enum import Enum

from ditile.errors import ModelError
from ditile.plan.spec import Flow

_ONE, _TWO = ("hidden_states",), ("hidden_states", "encoder_hidden_states")


class ForwardPattern(Enum):
    """What a block's forward takes, and what it returns; the values are those of the number in the name."""

    Pattern_0 = 0
    Pattern_1 = 1
    Pattern_2 = 2
    Pattern_3 = 3
    Pattern_4 = 4
    Pattern_5 = 5

    @property
    def flow(self) -> Flow:
        """The same as a `Flow`, with diffusers' usual names of parameters."""
        return _FLOWS[self.value]

    @property
    def takes(self) -> tuple[str, ...]:
        """Parameters that take tokens."""
        return _ONE if self.flow.text is None else _TWO

    @property
    def gives(self) -> tuple[str, ...]:
        """What is returned, in order."""
        names = {"image": "hidden_states", "text": "encoder_hidden_states"}
        return tuple(names[stream] for stream in self.flow.returns)

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.takes)} -> {', '.join(self.gives)})"


_FLOWS = (
    Flow(("image", "text")),
    Flow(("text", "image")),
    Flow(("image",)),
    Flow(("image",), text=None),
    Flow(("image", "text"), text=None),
    Flow(("text", "image"), text=None),
)


def find_flow_pattern(flow: Flow) -> ForwardPattern:
    """The pattern of a flow, whatever its parameters are called.

    Raises:
        ModelError: if there is none.
    """
    for pattern in ForwardPattern:
        if pattern.flow.returns == flow.returns and (pattern.flow.text is None) == (flow.text is None):
            return pattern
    raise ModelError(f"no pattern returns {flow.returns}; known are 'image' alone, and 'image' and 'text' in any order")

"""Which part of a text encoder there is on a rank (everything, nothing, a run of its layers), and who may call it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from ditile.errors import StateError
from ditile.hooks.opaque import exclude_from_compile

_PLACE = "_place_by_ditile"
"""The attribute of an encoder that says which part of it there is."""
IN_CALL = "_called_by_ditile"
"""The attribute of an encoder that says that a runner is in the middle of a call."""


@dataclass(frozen=True, slots=True)
class EncoderPlacement:
    """Which part of the text encoders a rank holds: mode, place among the ranks of its image, and their number."""

    mode: str = "each"
    index: int = 0
    ranks: int = 1

    @classmethod
    def choose_placement(cls, mode: str, index: int, ranks: int) -> EncoderPlacement:
        """The part of a rank; all of it where nothing is shared."""
        return WHOLE if mode == "each" or ranks == 1 else cls(mode, index, ranks)

    @property
    def has_no_weights(self) -> bool:
        """Whether the rank holds nothing."""
        return self.mode == "first" and self.index > 0

    def __str__(self) -> str:
        return f"text={self.mode} on rank {self.index} of {self.ranks}" if self != FREED else "text_after=free"


WHOLE = EncoderPlacement()
FREED = EncoderPlacement("freed")


def read_placement(encoder: nn.Module) -> EncoderPlacement | None:
    """The place that an encoder was left at; None if it is whole."""
    return vars(encoder).get(_PLACE)


def store_placement(encoder: nn.Module, place: EncoderPlacement | None) -> None:
    """Notes which part of an encoder there is."""
    vars(encoder).pop(_PLACE, None)
    if place is not None:
        vars(encoder)[_PLACE] = place


def install_call_guard(encoder: nn.Module, name: str) -> RemovableHandle:
    """Refuses calls of an encoder that is not there, or of which a call outside of a runner would find a part alone."""

    def refuse_partial_call(encoder: nn.Module, *_: Any) -> None:
        place = read_placement(encoder)
        if place == FREED:
            raise StateError(
                f"{name} was freed when denoising first began; pass prompt embeddings, or use text_after='offload'"
            )
        divided = place is not None and (place.mode == "split" or place.has_no_weights)
        if divided and IN_CALL not in vars(encoder):
            raise StateError(
                f"of {name} there is only what {place} leaves, so it works in calls of the runner alone; give the "
                "runner the prompt, or plan with text=each"
            )

    return encoder.register_forward_pre_hook(exclude_from_compile(refuse_partial_call))

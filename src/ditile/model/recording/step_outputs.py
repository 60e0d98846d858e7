"""What calls of a step compute for all its patches: the tape of one patch writes it, and those of the others read it.

A module that is given the same with each patch, such as one that makes a modulation of the time, is part of the first
tape of a step. What it returns stays in the memory of that tape, where the tapes of the other patches were recorded to
read it. So they may be played only in steps in which that tape was played before.
"""

from __future__ import annotations

from collections.abc import Hashable, MutableMapping
from weakref import WeakKeyDictionary

from torch import nn

from ditile.distributed.recording.tape import Tape
from ditile.model.hooks.generation import Generation
from ditile.model.hooks.kv_store import RememberedOutput

Outputs = dict[Hashable, RememberedOutput]
"""What modules returned, by module and branch."""


class StepOutputs:
    """The calls of the current step, of the model and branch that are called now.

    Attributes:
        tapes: that were made or played in it, and write something for others.
        looked: what modules returned in calls that were only watched.
    """

    def __init__(self) -> None:
        self.tapes: set[Tape] = set()
        self.looked: Outputs = {}
        self._calls: dict[Hashable, tuple[set[Tape], Outputs]] = {}
        self._outputs: MutableMapping[Tape, Outputs] = WeakKeyDictionary()
        self._step = -1
        self._epoch: object = None

    def enter_call(self, now: Generation, model: nn.Module) -> None:
        """A call begins; those of other steps are forgotten."""
        if self._step != now.micro_step.step or self._epoch is not now.memory.epoch:
            self._step = now.micro_step.step
            # Something may have changed the model since.
            self._epoch = now.memory.epoch
            self._calls = {}
        self.tapes, self.looked = self._calls.setdefault((id(model), now.branch), (set(), {}))

    def list_outputs(self) -> Outputs:
        """What tapes have written in this step."""
        outputs: Outputs = {}
        for tape in self.tapes:
            for known in self._outputs[tape].values():
                known.renew(self._step)
            outputs.update(self._outputs[tape])
        return outputs

    def keep_outputs(self, tape: Tape, outputs: Outputs) -> None:
        """Keeps what a new tape computed beyond what `list_outputs` gave it, as long as the tape is kept."""
        given: set[Hashable] = set()
        for other in self.tapes:
            given |= self._outputs[other].keys()
            # What this tape writes into must not be read by tapes after it.
            self._outputs[other] = _select_unchanged(self._outputs[other])
        own: Outputs = {}
        for key, known in _select_unchanged(outputs).items():
            if key not in given:
                own[key] = known
        if own:
            self._outputs[tape] = own
            self.tapes.add(tape)

    def note_play(self, tape: Tape) -> None:
        """A tape was played."""
        if tape in self._outputs:
            self.tapes.add(tape)


def _select_unchanged(outputs: Outputs) -> Outputs:
    """The outputs into which nothing was written since."""
    unchanged: Outputs = {}
    for key, known in outputs.items():
        if known.is_unchanged:
            unchanged[key] = known
    return unchanged

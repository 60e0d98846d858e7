"""Outputs computed in a step for all its patches: the tape of one patch writes them, and the others' tapes read them.

A module with the same inputs for each patch, such as one that makes a modulation of the time, is part of the first tape
of a step. That tape ends with a copy of the module's output, and the tapes of the other patches were recorded to read
it. So they may only be played in steps after that tape was played.

The copies are outside of the memory that tapes share. There a tape writes into any memory that was free when it was
recorded, so it could overwrite an output between the tape that makes the output and one that reads it.
"""

from __future__ import annotations

from collections.abc import Hashable, MutableMapping
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from ditile.distributed.recording.segments import list_tensors
from ditile.distributed.recording.tape import Recording, Tape
from ditile.model.hooks.generation import Generation
from ditile.model.hooks.kv_store import READ_VERSION, RememberedOutput

Outputs = dict[Hashable, RememberedOutput]
"""Outputs of modules, by module and branch."""


class StepOutputs:
    """The outputs shared in the current step, of the model and the branch that are being called.

    Attributes:
        tapes: weak references to the tapes that were made or played in the step, and write something for others.
        looked: outputs of modules in calls that were only watched.
    """

    def __init__(self) -> None:
        self.tapes: set[ref[Tape]] = set()
        self.looked: Outputs = {}
        self._calls: dict[Hashable, tuple[set[ref[Tape]], Outputs]] = {}
        self._outputs: MutableMapping[Tape, Outputs] = WeakKeyDictionary()
        self._step = -1
        self._epoch: object = None

    def enter_call(self, now: Generation, model: nn.Module) -> None:
        """Begin a call, and forget those of other steps."""
        if self._step != now.micro_step.step or self._epoch is not now.memory.epoch:
            self._step = now.micro_step.step
            # Something may have changed the model since.
            self._epoch = now.memory.epoch
            self._calls = {}
        self.tapes, self.looked = self._calls.setdefault((id(model), now.branch), (set(), {}))

    def forget_step(self) -> None:
        """Forget the calls of the last step. Nothing reads their outputs any more."""
        self.tapes = set()
        self.looked = {}
        self._calls = {}

    def list_outputs(self) -> Outputs:
        """List the outputs of tapes in this step."""
        outputs: Outputs = {}
        for tape in self._list_tapes():
            for known in self._outputs[tape].values():
                # The tape has computed this output again, in the same memory.
                known.step = self._step
                known.versions = tuple(map(READ_VERSION, known.tensors))
            outputs.update(self._outputs[tape])
        return outputs

    def keep_outputs(self, recording: Recording, outputs: Outputs) -> None:
        """Keep the outputs that a new tape adds to those from `list_outputs`, until the tape is dropped.

        The call must be over. The tape then ends with a copy of these outputs, and the copy replaces them.
        """
        shared_keys: set[Hashable] = set()
        for other in self._list_tapes():
            shared_keys |= self._outputs[other].keys()
            # Later tapes must not read an output that this call has written into.
            self._outputs[other] = _select_unchanged(self._outputs[other])
        own: Outputs = {}
        for key, known in _select_unchanged(outputs).items():
            if key not in shared_keys:
                own[key] = known
        if own:
            # They are copied to memory that no other tape writes into, now and at the end of each play.
            tensors: dict[int, Tensor] = {}
            for tensor in list_tensors([known.output for known in own.values()]):
                tensors[id(tensor)] = tensor
            if tensors:
                originals = list(tensors.values())
                copies = list(map(torch.empty_like, originals))
                with recording.record_within():
                    torch._foreach_copy_(copies, originals)
                recording.tape.held.append(copies)
                # Some outputs are also inputs of modules with other outputs, so readers must get the copies there too.
                replacements = dict(zip(tensors, copies, strict=True))
                for known in own.values():
                    known.replace_tensors(replacements)
            self._outputs[recording.tape] = own

    def note_play(self, tape: Tape) -> None:
        """Note that a tape was made or played."""
        if tape in self._outputs:
            self.tapes.add(ref(tape))

    def _list_tapes(self) -> list[Tape]:
        tapes = [reference() for reference in self.tapes]
        return [tape for tape in tapes if tape is not None]


def _select_unchanged(outputs: Outputs) -> Outputs:
    """Return the outputs that were not written to since they were remembered."""
    unchanged: Outputs = {}
    for key, known in outputs.items():
        if known.versions == tuple(map(READ_VERSION, known.tensors)):
            unchanged[key] = known
    return unchanged

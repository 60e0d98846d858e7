"""Finds modules that could be computed once in a step, and that no column of their class's row names:

    python -m tests.zoo.once

Each pipeline of the collection draws with patches and nothing remembered. A module whose output has the same numbers in
every patch of each step does not see the latents. Columns also name modules of calls that the collection has not.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ditile.model.anatomies import find_anatomy
from ditile.model.hooks.block_hooks import TransformerHooks
from ditile.plan.anatomy import Anatomy
from ditile.plan.errors import DitileError
from ditile.plan.plan import Plan
from ditile.runner.runner import build_single_runner
from tests.zoo import ZOO

OF_LATENTS = {
    "JoyImageEditPlusTransformer3DModel": ["img_in"],
    "LTX2VideoTransformer3DModel": ["audio_proj_in", "audio_norm_out", "audio_proj_out"],
    "Kandinsky6Transformer3DModel": ["audio_embeddings", "audio_out_layer"],
    "LongCatAudioDiTTransformer": ["latent_embed"],
    "WanVACETransformer3DModel": ["vace_blocks.*.proj_in"],
}
"""Modules that see tokens of a patch, which these small calls have alike in all patches, such as those of a sound."""
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


class Calls:
    """What the modules of a transformer return, by step and patch."""

    def __init__(self, hooks: TransformerHooks, now: Any) -> None:
        self._hooks, self._now = hooks, now
        self._digests: dict[str, dict[Any, list[str]]] = defaultdict(lambda: defaultdict(list))
        self._poisoned: dict[str, bool] = {}
        self._follows: set[str] = set()
        self._blocks = tuple(f"{name}." for name in hooks.anatomy.lists)
        self._has_left = False
        attentions = [
            f"{hook.name.partition(':')[2] or hook.name}.{path}."
            for hook in hooks.chain
            for path, _ in hook.list_attentions()
        ]
        for name, module in hooks.transformer.named_modules():
            # What holds the attention to tokens of others is no candidate.
            if name and name not in hooks.anatomy.lists and not any(path.startswith(f"{name}.") for path in attentions):
                module.register_forward_hook(lambda _, args, output, name=name: self._note(name, output))
        hooks.chain[-1].block.register_forward_hook(lambda *_: setattr(self, "_has_left", True))
        hooks.transformer.register_forward_pre_hook(lambda *_: setattr(self, "_has_left", False))

    def _note(self, name: str, output: Any) -> None:
        leaves = list(output) if isinstance(output, tuple) else [output]
        if any(not isinstance(leaf, Tensor) for leaf in leaves):
            self._digests[name]["other"] = []
            return
        if self._now.is_surveyed:
            self._poisoned[name] = all(bool(torch.isnan(leaf).any()) for leaf in leaves)
            return
        if self._has_left:
            self._follows.add(name)
        step, patch = self._now.micro_step
        if patch is not None:
            numbers = b"".join(leaf.detach().float().contiguous().numpy().tobytes() for leaf in leaves)
            self._digests[name][step, self._now.branch].append(hashlib.sha256(numbers).hexdigest())

    def judge(self) -> dict[str, str]:
        """Name of a module -> its column, "" for none."""
        found = {}
        for name, by_step in self._digests.items():
            is_once = "other" not in by_step and all(len(each) == 2 for each in by_step.values())
            if is_once and all(len(set(each)) == 1 for each in by_step.values()):
                found[name] = "per_step"
            elif is_once and not name.startswith(self._blocks) and name in self._follows:
                found[name] = "head"
            elif is_once and not name.startswith(self._blocks) and self._poisoned.get(name):
                found[name] = "embeds"
            else:
                found[name] = ""
        return found


def draw(name: str) -> dict[str, tuple[nn.Module, dict[str, str]]]:
    """Class of a transformer -> the model, and the column of each of its modules."""
    entry = ZOO[name]
    pipe, judged = entry.make(), {}
    runner = build_single_runner(pipe, Plan(patches=2, warmup=1))
    for hooks in runner._parts.block_hooks.models:
        hooks.anatomy = replace(hooks.anatomy, constant=(), per_step=(), embeds=(), head=())
        judged[type(hooks.transformer).__name__] = (hooks, Calls(hooks, runner._parts.loop.generation))
    call = entry.call()
    runner(**call | {"num_inference_steps": max(3, call.get("num_inference_steps", 3))})
    return {cls: (hooks.transformer, calls.judge()) for cls, (hooks, calls) in judged.items()}


def list_patterns(model: nn.Module, judged: dict[str, str], column: str) -> set[str]:
    """Patterns of the outermost modules in a column; those without weights cost nothing."""
    names = {name for name, each in judged.items() if each == column}
    outermost = {name for name in names if not any(name.startswith(f"{other}.") for other in names)}
    heavy = {name for name in outermost if next(model.get_submodule(name).parameters(), None) is not None}
    return {NUMBER.sub("*", name) for name in heavy}


def is_inside(pattern: str, others: Iterable[str]) -> bool:
    """Whether a pattern names what another one has."""
    return any(f"{pattern}.".startswith(f"{other}.") for other in others)


def find_missing() -> dict[str, list[str]]:
    """Class of a transformer -> patterns that its row lacks, of modules that are computed once in each of its calls."""
    found: dict[str, set[str]] = defaultdict(set)
    others: dict[str, set[str]] = defaultdict(set)
    rows: dict[str, Anatomy] = {}
    for name in ZOO:
        try:
            drawn = draw(name)
        except DitileError as error:
            # Not every pipeline can be computed in patches.
            print(f"{name}: {error}", flush=True)
            continue
        for cls, (model, judged) in drawn.items():
            found[cls] |= list_patterns(model, judged, "per_step")
            others[cls] |= {NUMBER.sub("*", key) for key, each in judged.items() if each != "per_step"}
            row = find_anatomy(model)
            assert row is not None
            rows[cls] = row
    missing = {}
    for cls, patterns in sorted(found.items()):
        row = rows[cls]
        known = {*row.constant, *row.per_step, *row.embeds, *row.head, *OF_LATENTS.get(cls, ())}
        lacking = sorted(each for each in patterns - others[cls] if not is_inside(each, known))
        if lacking:
            missing[cls] = lacking
    return missing


def main() -> int:
    warnings.simplefilter("ignore")
    missing = find_missing()
    for cls, patterns in missing.items():
        print(f"{cls} lacks {', '.join(patterns)}")
    return int(bool(missing))


if __name__ == "__main__":
    raise SystemExit(main())

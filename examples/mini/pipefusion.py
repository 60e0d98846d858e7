"""PipeFusion (arXiv 2405.14430): blocks are divided into stages, and patches of the image follow each other through.

A patch attends to fresh keys of itself and the patches before it, and to keys that are one step old of those behind it.
The text goes with the first patch, so its keys are always fresh. At least as many patches as stages keep every stage
busy. One process already shows the approximation: a patch attends to the same keys on any number of stages.
docs/pipefusion.md; docs/design.md, "Order is data".
"""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from guidance import Guidance
from mesh import Axis
from model import Model, Part, Prompt, Tokens, attend_to_all
from torch import Tensor


class StaleKeys:
    """Attention of the current tokens to all tokens, by the newest k and v this rank has for each.

    Attributes:
        part: the tokens of the call under way, set before it.
        branch: its branch of guidance.
    """

    def __init__(self, text: int, image: int) -> None:
        self.part = Part(slice(0, text), slice(0, image))
        self.branch = 0
        self._text = text
        self._length = text + image
        self._kept: dict[tuple[int, int], Tensor] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output of the queries `[B, S, N, H]`, and keep their keys and values."""
        fresh = torch.stack([k, v])
        kept = self._kept.get((self.branch, layer))
        if kept is None:
            # The first step is synchronous: all tokens are here.
            kept = self._kept[self.branch, layer] = fresh.new_empty(2, k.shape[0], self._length, *k.shape[2:])
        text, image = self.part
        texts = text.stop - text.start
        kept[:, :, text] = fresh[:, :, :texts]
        kept[:, :, self._text + image.start : self._text + image.stop] = fresh[:, :, texts:]
        return attend_to_all(layer, q, *kept)


def cut_patches(rows: int, patches: int, text: int, tokens_per_row: int) -> list[Part]:
    """Cut the rows of an image into patches of like work. The text goes with the first one."""
    if not 1 <= patches <= rows:
        raise ValueError(f"patches={patches}: an image of {rows} rows of tokens has 1 to {rows} patches")
    text_rows = text / tokens_per_row
    # (rows + text_rows) / patches is an even share; the first patch pays for the text out of its own.
    first = min(max(round((rows + text_rows) / patches - text_rows), 1), rows - (patches - 1))
    sizes = [first]
    if patches > 1:
        base, more = divmod(rows - first, patches - 1)
        sizes += [base + 1] * more + [base] * (patches - 1 - more)
    parts, row = [], 0
    for index, size in enumerate(sizes):
        end = text if index == 0 else 0
        parts.append(Part(slice(0, end), slice(row * tokens_per_row, (row + size) * tokens_per_row)))
        row += size
    return parts


def cut_stages(blocks: int, stages: int) -> list[range]:
    """Cut the blocks into runs of like length. (ditile counts their work.)"""
    ends = [round(blocks * stage / stages) for stage in range(stages + 1)]
    return [range(start, end) for start, end in zip(ends, ends[1:])]  # noqa: B905


class Pipeline:
    """A stage and its neighbours.

    Args:
        model: whose attention is `keys`.
        axis: the stages.
        guidance: the branches of each step.
        patches: parts of the image, in order.
        warmup: first steps, which compute the whole image at once and are exact.
    """

    def __init__(
        self, model: Model, keys: StaleKeys, axis: Axis, guidance: Guidance, patches: list[Part], warmup: int
    ) -> None:
        if warmup < 1:
            raise ValueError(f"warmup={warmup}: one exact step must fill the keys that later steps reuse")
        self._model, self._keys, self._axis, self._guidance = model, keys, axis, guidance
        self._own = cut_stages(len(model.blocks), axis.size)[axis.index]
        self._patches = patches
        self._whole = Part(slice(0, patches[0].text.stop), slice(0, patches[-1].image.stop))
        self._warmup = warmup
        self._is_first = axis.index == 0
        self._is_last = axis.index == axis.size - 1
        self._sends: deque[tuple[dist.Work, Tensor]] = deque()

    @torch.no_grad()
    def denoise(self, scheduler: Any, latents: Tensor, image_ids: Tensor, prompts: list[Prompt]) -> Tensor:
        """Return the latents after the last step; they are right on the last stage.

        Args:
            scheduler: with its timesteps set.
            latents: `[B, image tokens, C]`, overwritten by the last stage, which steps them, and by the first,
                which receives them for its next step.
            image_ids: positions of the image tokens.
            prompts: of the branches that this rank computes.
        """
        patch_schedulers: list[Any] = []
        for step, timestep in enumerate(scheduler.timesteps):
            is_synchronous = step < self._warmup
            if not patch_schedulers and not is_synchronous:
                # Each patch is stepped by a scheduler of its own, as if it were the whole image. That is right for
                # Euler, whose step treats each value by itself; this example knows no other scheduler.
                patch_schedulers = [copy.deepcopy(scheduler) for _ in self._patches]
            for index, part in enumerate([self._whole] if is_synchronous else self._patches):
                # The last stage always returns patch by patch; a whole step takes them all.
                if step:
                    self._take_stepped(latents, self._patches if is_synchronous else [part])
                outputs = [self._run_stage(n, latents, image_ids, timestep, part) for n in enumerate(prompts)]
                if not self._is_last:
                    continue
                prediction = self._guidance.combine(outputs)
                stepper = scheduler if is_synchronous else patch_schedulers[index]
                patch = latents[:, part.image]
                latents[:, part.image] = stepper.step(prediction, timestep, patch, return_dict=False)[0]
                if step + 1 < len(scheduler.timesteps):
                    self._return_stepped(latents, self._patches if is_synchronous else [part])
        self._wait_for_sends(0)
        return latents

    def _run_stage(
        self, branch: tuple[int, Prompt], latents: Tensor, image_ids: Tensor, timestep: Tensor, part: Part
    ) -> Tensor:
        """Return what this stage makes of a part: the prediction on the last stage, nothing of use on others."""
        number, prompt = branch
        self._keys.branch, self._keys.part = number, part
        context = self._model.embed_context(timestep.expand(latents.shape[0]), prompt, image_ids, part)
        tokens = self._model.embed_tokens(latents, prompt, part)
        if not self._is_first:
            # Embedded only for its shape, which is that of what arrives.
            both = self._axis.receive(torch.cat(tokens, dim=1), self._axis.index - 1)
            tokens = Tokens(*both.split([tokens.text.shape[1], tokens.image.shape[1]], dim=1))
        tokens = self._model.run_blocks(self._own, tokens, context)
        if self._is_last:
            return self._model.predict(tokens, context)
        self._send(torch.cat(tokens, dim=1), self._axis.index + 1)
        return tokens.image

    def _take_stepped(self, latents: Tensor, parts: list[Part]) -> None:
        """Receive stepped patches from the last stage, on the first one."""
        if self._is_first and not self._is_last:
            for part in parts:
                latents[:, part.image] = self._axis.receive(latents[:, part.image], self._axis.size - 1)

    def _return_stepped(self, latents: Tensor, parts: list[Part]) -> None:
        """Send stepped patches to the first stage, from the last one."""
        if not self._is_first:
            for part in parts:
                self._send(latents[:, part.image], 0)

    def _send(self, x: Tensor, to: int) -> None:
        # A copy: what is sent must stay as it is until it has arrived.
        message = x.clone(memory_format=torch.contiguous_format)
        self._sends.append((self._axis.send(message, to), message))
        # Anything older than a full step has made the round trip, so it has arrived: 8 per patch is four steps of two
        # branches.
        self._wait_for_sends(8 * len(self._patches))

    def _wait_for_sends(self, remaining: int) -> None:
        while len(self._sends) > remaining:
            self._sends.popleft()[0].wait()

"""The cost of each block for a stage, counted from its linear layers and the tokens that each of them gets.

A linear layer multiplies every weight with every token. Fewer tokens than the `RIDGE` do not make it faster, because a
device then needs longer to read the weights than to use them (roofline model, Williams et al. 2009). That is why FLUX's
double blocks cost more than its single ones under PipeFusion, though they do as many operations: in every patch but the
first, half of their weights meet two dummy tokens. `benchmarks.blocks` measures instead of counting.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from ditile.model.call_families import find_call_family
from ditile.model.hooks.block_hooks import TransformerHooks
from ditile.model.hooks.block_policy import BlockHook
from ditile.parallel.block_formats import measure_weight
from ditile.plan.layout import DUMMY_TEXT, Grid, Joint, Layout
from ditile.plan.plan import Plan
from ditile.plan.shape import CallFamily
from ditile.plan.stages import cut_stages

RIDGE = {1: 256, 2: 256, 4: 32}
"""Tokens below which reading the weights takes longer than using them, by the bytes of a number.

The number for 16 bits and less is that of data-centre GPUs (600 TFLOP/s, 3 TB/s); the number for 32 bits lies between
those of GPUs and of CPUs.
"""

LATENT_SIDE = 128
"""The side of the latents that a model was made for, if its config does not give it."""


class BlockCosts(NamedTuple):
    """The cost of each block in a step, and of the other work of the first and the last stage, in one unit."""

    blocks: tuple[float, ...]
    first: float = 0.0
    last: float = 0.0


class BlockMatrices(NamedTuple):
    """A block's matrix entries by the tokens that they meet, and whether each attention layer sees the text."""

    matrices: Mapping[str, int]
    attentions: Sequence[bool]


@dataclass(frozen=True)
class CostModel:
    """The sizes from which a model's costs are counted under any plan.

    Attributes:
        blocks: the matrices of each block; those of placeholders follow from the model's config.
        first, last: matrix entries of the embedding of the latents, and of the head.
        side: the number of token rows, and of tokens in each row, in the image that the model was made for.
        text: the number of text tokens in joint attention.
        joint: where the text tokens are in the sequence.
        width: channels of a token.
        itemsize: bytes of a number.
    """

    blocks: Sequence[BlockMatrices]
    first: int
    last: int
    side: int
    text: int
    joint: Joint
    width: int
    itemsize: int

    @classmethod
    def from_model_hooks(cls, hooks: TransformerHooks, family: CallFamily) -> CostModel:
        """Build the cost model of a model, whose blocks may be placeholders."""
        head: Any = hooks.transformer.get_submodule("proj_out")
        # A quantized Linear multiplies in another type than that of its weight.
        dtype: Any = getattr(head, "compute_dtype", None) or head.weight.dtype
        itemsize = min(dtype.itemsize, 4)  # `RIDGE` has no number for wider types
        if hooks.has_placeholders():
            hooks = hooks.copy_to_meta()
        config = dict(hooks.transformer.config)  # type: ignore[arg-type]
        text = 0
        if family.joint != "none":
            text = family.conditioning({}).text
        return cls(
            blocks=[_count_block_matrices(hooks, hook, has_text=text > 0) for hook in hooks.chain],
            first=sum(_iterate_matrix_sizes(hooks.transformer.get_submodule(family.image_tokens))),
            last=sum(_iterate_matrix_sizes(hooks.transformer.get_submodule("proj_out"))),
            side=int(config.get("sample_size") or LATENT_SIDE) // family.latent_per_token(config),
            text=text,
            joint=family.joint,
            width=int(config["num_attention_heads"] * config["attention_head_dim"]),
            itemsize=itemsize,
        )

    def count_costs(self, patches: int, ridge: int) -> BlockCosts:
        """Count the multiplications of a step with one row of the batch.

        The size and text are those that the model was made for.

        Args:
            patches: the number of patches M.
            ridge: tokens below which a linear layer gets no faster.
        """
        grid = Grid(self.side, self.side)
        layout = Layout.cut_into_patches(grid, min(patches, self.side), self.text, self.joint)
        # A matrix costs as if at least `ridge` tokens met it in each micro-step.
        tokens = {"image": 0, "text": 0, "both": 0}
        for patch in range(layout.num_patches):
            image = layout.count_rows(patch) * self.side
            text = self.text
            if text and not layout.carries_text(patch):
                text = DUMMY_TEXT
            tokens["image"] += max(image, ridge)
            tokens["text"] += max(text, ridge)
            tokens["both"] += max(image + text, ridge)
        costs = []
        for block in self.blocks:
            cost = float(sum(size * tokens[stream] for stream, size in block.matrices.items()))
            scores = 0
            for sees_text in block.attentions:
                # The scores of all queries and keys, and the products of scores and values.
                scores += 2 * self.width * (layout.image_tokens + sees_text * layout.text) ** 2
            costs.append(cost + float(scores))
        first = float(self.first * tokens["image"])
        last = float(self.last * tokens["image"])
        return BlockCosts(tuple(costs), first, last)


def divide_blocks(hooks: TransformerHooks, plan: Plan, cost_model: CostModel | None = None) -> list[range]:
    """Return the blocks of each stage under a plan.

    They are the same on every rank, whichever blocks are placeholders there.
    """
    if plan.pipefusion == 1 or plan.stage_blocks is not None:
        return cut_stages([1.0] * len(hooks.chain), plan.pipefusion, plan.stage_blocks)
    family = find_call_family(hooks.transformer)
    if cost_model is None and family is not None:
        cost_model = CostModel.from_model_hooks(hooks, family)
    if cost_model is None:
        if hooks.has_placeholders():
            hooks = hooks.copy_to_meta()
        # If the sizes of the model's images are not known, the cost of a block is its number of weights.
        sizes = []
        for hook in hooks.chain:
            sizes.append(float(sum(math.prod(measure_weight(weight)) for weight in hook.block.parameters())))
        costs = BlockCosts(tuple(sizes))
    else:
        costs = cost_model.count_costs(plan.num_patches, RIDGE[cost_model.itemsize])
    return cut_stages(costs.blocks, plan.pipefusion, None, plan.stage_weights, (costs.first, costs.last))


def _count_block_matrices(hooks: TransformerHooks, hook: BlockHook, *, has_text: bool) -> BlockMatrices:
    """Count the matrix entries that a block multiplies in every micro-step; attention sees text only if `has_text`."""
    anatomy = hooks.anatomy
    text_modules = []
    for path, _ in hook.block.named_modules():
        if _is_inside_any(path, anatomy.text_modules):
            text_modules.append(path)
    # If no module sees only the text, a block that has the text computes it together with the image.
    takes_text = hook.anatomy.text is not None or hook.anatomy.joint != "none"
    stream = "both" if takes_text and not text_modules else "image"
    matrices = Counter[str]()
    # Constants, and modules that depend only on the step, are computed once for all patches.
    computed_once = (*anatomy.constant, *anatomy.per_step)
    for path, module in hook.block.named_modules():
        if module._modules or _is_inside_any(f"{hook.name}.{path}", computed_once):
            continue
        size = sum(_iterate_matrix_sizes(module))
        if size and path in text_modules:
            matrices["text"] += size
        elif size:
            matrices[stream] += size
    return BlockMatrices(matrices, [has_text and hook.sees_text(path) for path, _ in hook.list_attentions()])


def _iterate_matrix_sizes(module: nn.Module) -> Iterator[int]:
    """Yield the number of entries of each matrix in a module."""
    for part in module.modules():
        weight: Any = part._parameters.get("weight")
        if isinstance(part, nn.Linear | nn.Conv2d) and weight is not None:
            yield math.prod(measure_weight(weight))


@functools.cache
def _is_inside_any(path: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a module matches one of the patterns, or is inside a match."""
    for pattern in patterns:
        expression = re.escape(pattern).replace(r"\*", r"[^.]+")
        if re.match(rf"{expression}(\.|$)", path):
            return True
    return False

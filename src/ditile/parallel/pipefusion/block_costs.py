"""What each block costs a stage, counted from its linear layers and the tokens that each of them sees.

A linear layer multiplies every weight with every token. Few tokens do not make it faster: a device needs as long to
read a weight as to use it some number of times, its `RIDGE` (roofline model, Williams et al. 2009). That is why FLUX's
double blocks cost more than its single ones under PipeFusion, though they do as many operations: in every patch but the
first, half of their weights meet two dummy tokens. `benchmarks.blocks` measures instead of counting.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from ditile.model.hooks.block_hooks import TransformerHooks
from ditile.model.hooks.block_policy import BlockHook
from ditile.plan.layout import DUMMY_TEXT, Grid, Joint, Layout
from ditile.plan.plan import Plan
from ditile.plan.stages import cut_stages

RIDGE = {1: 256, 2: 256, 4: 32}
"""Tokens below which reading the weights takes longer than using them, by the bytes of a number.

For 16 bits and less that of data-centre GPUs (600 TFLOP/s, 3 TB/s); for 32 bits between those and CPUs.
"""

LATENT_SIDE = 128  # of the picture that a model was made for, where its config does not say


class BlockCosts(NamedTuple):
    """Cost of each block in a step, and of what the first and the last stage do besides; in one unit."""

    blocks: tuple[float, ...]
    first: float = 0.0
    last: float = 0.0


class MicroStepTokens(NamedTuple):
    """Tokens of a micro-step: of the image, of the text (or the dummies for it)."""

    image: int
    text: int


class BlockMatrices(NamedTuple):
    """A block: entries of its matrices by the tokens that they meet; whether each attention layer sees the text."""

    matrices: Mapping[str, int]
    attentions: Sequence[bool]


@dataclass(frozen=True)
class CostModel:
    """What the costs of a model are counted from, whatever the plan.

    Attributes:
        blocks: the matrices of each block; those of placeholders follow from the model's config.
        first, last: entries of the matrices that embed the latents, and of the head's.
        side: token rows, and tokens in each, of the picture that the model was made for.
        text: tokens of its text in joint attention.
        joint: where they are.
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
    def from_model_hooks(cls, hooks: TransformerHooks) -> CostModel:
        """The cost model of a model, whose blocks may be placeholders."""
        head: Any = hooks.transformer.get_submodule(hooks.spec.out)
        itemsize = min(head.weight.dtype.itemsize, 4)
        if hooks.has_placeholders():
            hooks = hooks.copy_to_meta()
        spec, config = hooks.spec, dict(hooks.transformer.config)  # type: ignore[arg-type]
        ends = [hooks.transformer.get_submodule(name) for name in (spec.image_tokens, spec.out)]
        first, last = (sum(_iterate_matrix_sizes(module)) for module in ends)
        return cls(
            blocks=[_count_block_matrices(hooks, hook) for hook in hooks.chain],
            first=first,
            last=last,
            side=int(config.get("sample_size") or LATENT_SIDE) // spec.latent_per_token(config),
            text=0 if spec.joint == "none" else spec.conditioning({}).text,
            joint=spec.joint,
            width=int(config["num_attention_heads"] * config["attention_head_dim"]),
            itemsize=itemsize,
        )

    def count_costs(self, patches: int, ridge: int) -> BlockCosts:
        """Multiplications of a step with one row of the batch, at the size and text that the model was made for.

        Args:
            patches: M.
            ridge: tokens below which a linear layer gets no faster.
        """
        layout = Layout.cut_into_patches(Grid(self.side, self.side), min(patches, self.side), self.text, self.joint)
        dummies = DUMMY_TEXT if self.text else 0
        micros = [
            MicroStepTokens(layout.count_rows(p) * self.side, self.text if layout.carries_text(p) else dummies)
            for p in range(layout.num_patches)
        ]
        tokens = {
            "image": sum(max(micro.image, ridge) for micro in micros),
            "text": sum(max(micro.text, ridge) for micro in micros),
            "both": sum(max(micro.image + micro.text, ridge) for micro in micros),
        }
        scores = {sees: 2 * self.width * (layout.image_tokens + sees * layout.text) ** 2 for sees in (False, True)}
        blocks = tuple(
            float(sum(size * tokens[stream] for stream, size in block.matrices.items()))
            + float(sum(scores[sees] for sees in block.attentions))
            for block in self.blocks
        )
        return BlockCosts(blocks, float(self.first * tokens["image"]), float(self.last * tokens["image"]))


def divide_blocks(hooks: TransformerHooks, plan: Plan, cost_model: CostModel | None = None) -> list[range]:
    """The blocks of each stage under a plan; the same on every rank, whichever blocks are placeholders there."""
    if plan.pipefusion == 1 or plan.stage_blocks is not None:
        return cut_stages([1.0] * len(hooks.chain), plan.pipefusion, plan.stage_blocks)
    if cost_model is None and hooks.spec.example is None:
        if hooks.has_placeholders():
            hooks = hooks.copy_to_meta()
        # Nothing is known of the sizes of its pictures, so a weight costs the same wherever it is.
        sizes = [float(sum(p.numel() for p in hook.block.parameters())) for hook in hooks.chain]
        return cut_stages(sizes, plan.pipefusion, None, plan.stage_weights)
    cost_model = cost_model or CostModel.from_model_hooks(hooks)
    costs = cost_model.count_costs(plan.num_patches, RIDGE[cost_model.itemsize])
    return cut_stages(costs.blocks, plan.pipefusion, None, plan.stage_weights, (costs.first, costs.last))


def _count_block_matrices(hooks: TransformerHooks, hook: BlockHook) -> BlockMatrices:
    """The linear layers that run in every micro-step, and the attention."""
    rare = (*hooks.spec.constant, *hooks.spec.per_step)
    sees_text = hook.anatomy.text is not None
    of_text = hooks.spec.text_modules if _has_text_modules(hook, hooks.spec.text_modules) else ()
    other = "both" if (sees_text or hook.anatomy.joint != "none") and not of_text else "image"
    matrices = Counter[str]()
    for path, module in hook.block.named_modules():
        size = sum(_iterate_matrix_sizes(module)) if not module._modules else 0
        if size and not any(_is_inside_pattern(f"{hook.name}.{path}", pattern) for pattern in rare):
            matrices["text" if any(_is_inside_pattern(path, pattern) for pattern in of_text) else other] += size
    joint = hooks.spec.joint != "none" and hooks.spec.conditioning({}).text > 0
    return BlockMatrices(matrices, [joint and hook.sees_text(path) for path, _ in hook.list_attentions()])


def _has_text_modules(hook: BlockHook, patterns: Sequence[str]) -> bool:
    """Whether a block has modules that see the text alone."""
    paths = [path for path, _ in hook.block.named_modules()]
    return any(_is_inside_pattern(path, pattern) for path in paths for pattern in patterns)


def _iterate_matrix_sizes(module: nn.Module) -> Iterator[int]:
    """Entries of the matrices in a module."""
    for part in module.modules():
        weight: Any = part._parameters.get("weight")
        if isinstance(part, nn.Linear | nn.Conv2d) and weight is not None:
            yield weight.numel()


@functools.cache
def _is_inside_pattern(path: str, pattern: str) -> bool:
    """Whether a module is the pattern's, or inside of it."""
    names = path.split(".")
    wanted = pattern.split(".")
    return len(names) >= len(wanted) and all(w in ("*", n) for n, w in zip(names, wanted, strict=False))

"""Muon and AdamW: fp32 masters, an EMA of the masters, clipping, and a learning rate that
follows the budget.

Muon (https://kellerjordan.github.io/posts/muon) takes the matrices inside the blocks, AdamW the rest. From the
same weights on the same batches of shapes-flux (180 steps, fresh moments) the loss was 0.122 against AdamW's 0.153
over the first 30 steps, and 0.102 against 0.110 over steps 120 to 150, for 11 % more time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class MasterOptimiser:
    """Keeps fp32 master weights and their EMA beside a module's working weights, of whatever type.

    The working weights get the gradients; a step updates the masters and rounds them back.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        lr: float,
        weight_decay: float = 0.0,
        ema: float = 0.995,
        clip: float = 1.0,
    ):
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self.work = [p for _, p in named]
        self.masters = [p.detach().float().clone().requires_grad_(True) for p in self.work]
        self.ema = [p.detach().clone() for p in self.masters]
        self.lr, self.decay, self.clip, self.steps = lr, ema, clip, 0
        hidden = [_is_hidden(name, p) for name, p in named]
        matrices = [m for m, yes in zip(self.masters, hidden, strict=True) if yes]
        others = [m for m, yes in zip(self.masters, hidden, strict=True) if not yes]
        self.parts: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.98), weight_decay=weight_decay, fused=True)
        ]
        if matrices:
            muon = torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
            self.parts.append(muon)

    @torch.no_grad()
    def step(self, scale: float) -> bool:
        """One update at `scale` times the learning rate; False if skipped, the gradient not being finite."""
        grads = [
            torch.zeros_like(m) if w.grad is None else w.grad.float()
            for w, m in zip(self.work, self.masters, strict=True)
        ]
        for w in self.work:
            w.grad = None
        norm = float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads))))
        if norm != norm or norm == float("inf"):
            return False
        torch._foreach_mul_(grads, min(1.0, self.clip / (norm + 1e-6)))
        for master, grad in zip(self.masters, grads, strict=True):
            master.grad = grad
        for part in self.parts:
            part.param_groups[0]["lr"] = self.lr * scale
            part.step()
        self.steps += 1
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        torch._foreach_lerp_(self.ema, [m.detach() for m in self.masters], 1 - decay)
        self._show(self.masters)
        return True

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The module holds the EMA inside the block."""
        self._show(self.ema)
        try:
            yield
        finally:
            self._show(self.masters)

    def load_average(self) -> None:
        """End of training: the module keeps the EMA."""
        self._show(self.ema)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on: masters, EMA, moments, number of steps."""
        masters = [m.detach() for m in self.masters]
        return {"masters": masters, "ema": self.ema, "parts": [p.state_dict() for p in self.parts], "steps": self.steps}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        torch._foreach_copy_([m.detach() for m in self.masters], state["masters"])
        torch._foreach_copy_(self.ema, state["ema"])
        for part, kept in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(kept)
        self.steps = state["steps"]
        self._show(self.masters)

    @torch.no_grad()
    def _show(self, values: list[torch.Tensor]) -> None:
        for work, value in zip(self.work, values, strict=True):
            work.copy_(value)


def learning_rate(progress: float, *, warmup: float = 0.02, hold: float = 0.45) -> float:
    """Factor on the learning rate at a fraction of the budget: up, held, then linearly down to 1 %."""
    if progress < warmup:
        return progress / warmup + 1e-3
    if progress < hold:
        return 1.0
    return 0.01 + 0.99 * max(0.0, (1 - progress) / (1 - hold))


def _is_hidden(name: str, parameter: torch.Tensor) -> bool:
    """A matrix between two hidden states of a transformer: not an embedding, a modulation or the head."""
    return parameter.ndim == 2 and "transformer_blocks" in name and "norm" not in name

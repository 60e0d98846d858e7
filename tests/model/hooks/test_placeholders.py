"""Placeholders: what is taken out of a module, and what stays."""

from __future__ import annotations

from torch import nn

from ditile.model.hooks.placeholders import is_placeholder, restore_contents, turn_into_placeholder


def test_a_placeholder_keeps_what_is_computed_with_outside_of_it() -> None:
    """A failure means that a stage holds weights of others, or lacks some that its forward needs."""
    norm = nn.ModuleDict({"emb": nn.Linear(2, 3), "linear": nn.Linear(3, 4)})
    block = nn.ModuleDict({"norm": norm, "ff": nn.Linear(4, 4)})
    names = list(block.state_dict())
    contents = turn_into_placeholder(block, ["norm.emb"])
    assert is_placeholder(block) and is_placeholder(block.get_submodule("norm"))
    assert list(block.state_dict()) == ["norm.emb.weight", "norm.emb.bias"]
    assert block.get_submodule("norm.emb") is norm["emb"]
    restore_contents(block, contents)
    assert list(block.state_dict()) == names and not is_placeholder(block) and not is_placeholder(norm)
    assert block.get_submodule("norm") is norm

"""A rank reads its share of the weights of every class and no more, and it is the share that it would cut itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ditile.distributed.mesh import Axis
from ditile.distributed.transport import Traffic
from ditile.model.anatomies import find_anatomy, find_derived_cuts
from ditile.model.call_families import find_call_family
from ditile.model.hooks.block_hooks import LOADED_ATTRIBUTE
from ditile.model.pipeline_calls import DENOISER_NAME
from ditile.parallel.tensor.sharding import find_tensor_table, shard_weights
from ditile.plan.errors import ModelError
from ditile.plan.plan import Plan
from ditile.runner.load import Component, load_model
from ditile.runner.weights.checkpoint import locate_in_folder
from ditile_lab.study.record import list_chain
from tests.zoo import ZOO
from tests.zoo.entry import Entry

pytestmark = pytest.mark.filterwarnings("ignore")


# What diffusers adds for an IP-adapter is saved with a transformer, and cannot be read from there.
NAMES = [name for name in ZOO if not name.endswith("ip-adapter")]


def save_transformers(one: Entry, folder: Path) -> dict[str, nn.Module]:
    """The transformers of an entry that a plan divides, each saved to a folder of its name."""
    pipe = one.make()
    models = {name: getattr(pipe, name) for name in one.transformers if DENOISER_NAME.fullmatch(name)}
    for name, model in models.items():
        model.save_pretrained(folder / name)
    return models


def load_share(model: nn.Module, folder: Path, plan: Plan, rank: int) -> Any:
    """What a rank of a plan reads."""
    cls, locate = type(model), locate_in_folder(folder)
    config = folder / "config.json"
    part = Component(folder.parent, folder.name, "diffusers", cls.__name__, cls, locate, config, {})
    return load_model(part, plan, rank, torch.float32)


def count_bytes(tensors: dict[str, Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors.values())


def list_held(model: nn.Module) -> dict[str, Tensor]:
    """What this rank has of the weights: `state_dict` of a part of a model is refused."""
    held: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(path, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                held[name] = buffer
    return held


def list_saved(model: nn.Module) -> dict[str, Tensor]:
    return {name: x for name, x in list_held(model).items() if x.is_floating_point()}


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_reads_its_share(name: str, tmp_path: Path) -> None:
    """By `tensor=2` half of each Linear that is cut, by `pipefusion=2` its blocks; what every rank has is read by both.

    A failure: a rank needs memory for the whole, or has a part of another rank's.
    """
    for part, model in save_transformers(ZOO[name], tmp_path).items():
        if find_anatomy(model) is None:
            with pytest.raises(ModelError, match="not in the table of known anatomies"):
                load_share(model, tmp_path / part, Plan(tensor=2), 0)
            continue
        table = find_tensor_table(model, find_derived_cuts(model))
        whole = list_saved(model)
        of_tensor = [load_share(model, tmp_path / part, Plan(tensor=2), rank) for rank in range(2)]
        of_stages = [load_share(model, tmp_path / part, Plan(pipefusion=2), rank) for rank in range(2)]
        check_shares(model, table, of_tensor)
        check_stages(whole, of_stages)


def check_shares(model: Any, table: Any, loaded: list[Any]) -> None:
    """Shares are those that `shard_weights` cuts, bytes were counted, and of a block's Linears each reads nearly half.

    Tables written by hand leave modulations whole, which are a quarter of FLUX.
    """
    whole = list_saved(model)
    for rank, share in enumerate(loaded):
        own = type(model).from_config(model.config)
        own.load_state_dict(model.state_dict())
        shard_weights(own, table, Axis("tensor", (0, 1), rank), Traffic(), sum_over_ranks=lambda x: x)
        cut = list_saved(own)
        read = list_saved(share)
        assert cut.keys() == read.keys()
        assert all(torch.equal(cut[key], read[key]) for key in cut)
        assert vars(share)[LOADED_ATTRIBUTE].bytes_read == count_bytes(list_held(share))
        divided = [key for key in whole if whole[key].shape != cut[key].shape]
        assert count_bytes({key: cut[key] for key in divided}) * 2 == count_bytes({key: whole[key] for key in divided})
        linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        linears = {name for name in linears if name.startswith(tuple(f"{block.name}." for block in list_chain(model)))}
        of_blocks = {key: x for key, x in whole.items() if key.rpartition(".")[0] in linears}
        limit = 0.55 if find_call_family(model) is None else 0.75
        assert count_bytes({key: cut[key] for key in of_blocks}) <= limit * count_bytes(of_blocks)


def check_stages(whole: dict[str, Tensor], loaded: list[Any]) -> None:
    """Together the stages have the whole, and a block is on one of them."""
    read = [list_saved(stage) for stage in loaded]
    assert read[0].keys() | read[1].keys() == whole.keys()
    assert all(torch.equal(x, whole[key]) for stage in read for key, x in stage.items())
    shared = read[0].keys() & read[1].keys()
    blocks = {key: x for key, x in whole.items() if key not in shared}
    for stage, held in zip(loaded, read, strict=True):
        assert count_bytes({key: held[key] for key in blocks if key in held}) <= 0.8 * count_bytes(blocks)
        assert vars(stage)[LOADED_ATTRIBUTE].bytes_read == count_bytes(list_held(stage))

"""Memory of a rank while it loads: peaks of anonymous and of file-backed memory, and the bytes that it reads.

    python -m benchmarks.loading --ranks 4

A checkpoint of several gigabytes is written first, shard by shard, and deleted afterwards: it has FLUX.1-dev's and
T5-XXL's widths with fewer blocks, in bfloat16. Each rank, and one process that loads everything, prints a line of JSON:
its share, the peaks above the level before, the limit of each peak (1.1 times the share, and 64 MiB), and the bytes
that it read from the transformer's files. It needs Linux, whose memory numbers are read every millisecond.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from safetensors.torch import save_file
from torch import nn
from transformers import T5Config, T5EncoderModel

from ditile.distributed.launch import launch
from ditile.model.anatomies import build_block_hooks
from ditile.model.hooks.placeholders import init_on_meta_device
from ditile.model.known import ASSETS
from ditile.plan.plan import Plan
from ditile.runner.load import load
from ditile.runner.model_files import DTYPES

SHARD = 512 * 2**20
KINDS = ("RssAnon", "RssFile")


class Peaks:
    """The highest resident memory, above the level at entry, sampled by a thread.

    Attributes:
        bytes: by kind of `KINDS`.
    """

    def __init__(self) -> None:
        self.bytes = dict.fromkeys(KINDS, 0)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_over, daemon=True)

    def __enter__(self) -> Peaks:
        gc.collect()
        # Memory that the process has freed and not returned would be used again, and so not be seen.
        ctypes.CDLL(None).malloc_trim(0)
        self._before = resident()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._update_peaks()

    def _sample_until_over(self) -> None:
        while not self._over.wait(0.001):
            self._update_peaks()

    def _update_peaks(self) -> None:
        for kind, now in resident().items():
            self.bytes[kind] = max(self.bytes[kind], now - self._before[kind])


def resident() -> dict[str, int]:
    """Bytes of this process in memory, by kind."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Rss"))
    found = {name.rstrip(":"): int(kilobytes) * 1024 for name, kilobytes, _ in lines}
    return {kind: found[kind] for kind in KINDS}


def compute_peak_limit(share: int) -> int:
    """What a peak may be, in bytes."""
    return int(1.1 * share) + 64 * 2**20


def write_pipeline(folder: Path, *, heads: int, double: int, single: int, layers: int, dtype: torch.dtype) -> int:
    """Writes a FLUX pipeline of constant weights, one shard in memory at a time, and returns the bytes of its weights.

    Args:
        heads: of 128 channels each.
        double, single: blocks of the transformer.
        layers: of a T5 encoder of T5-XXL's widths; none leaves a small one.
    """
    shutil.copytree(ASSETS / "shapes-flux", folder, ignore=lambda *_: ["transformer"], dirs_exist_ok=True)
    with init_on_meta_device():
        transformer: Any = FluxTransformer2DModel(
            num_layers=double, num_single_layers=single, num_attention_heads=heads, guidance_embeds=True
        )
        config = T5Config(
            d_model=4096, d_kv=64, d_ff=10240, num_heads=64, num_layers=max(layers, 1), feed_forward_proj="gated-gelu"
        )
        encoder: Any = T5EncoderModel(config)
    transformer.save_config(folder / "transformer")
    _write_weight_shards(transformer, folder / "transformer", "diffusion_pytorch_model", dtype)
    if layers:
        shutil.rmtree(folder / "text_encoder_2")
        config.save_pretrained(folder / "text_encoder_2")
        _write_weight_shards(encoder, folder / "text_encoder_2", "model", dtype)
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors"))


def measured(folder: str, text: str, dtype: str) -> dict[str, Any]:
    """On a rank: what it loads for its stage, or everything if `text` is "whole", and what that takes."""
    torch.set_num_threads(1)
    # Before peaks are measured: some memory is allocated once, for imports and in the first load.
    load("shapes-flux", dtype=dtype)
    plan = None if text == "whole" else Plan(pipefusion=_count_started_ranks(), text=text)  # type: ignore[arg-type]
    began = time.perf_counter()
    with Peaks() as peaks:
        pipe: Any = load(folder, dtype=dtype, plan=plan)
    seconds = time.perf_counter() - began
    modules = [part for part in pipe.components.values() if isinstance(part, nn.Module)]
    share = sum(_count_module_bytes(module) for module in modules)
    loaded = build_block_hooks(pipe.transformer).loaded_blocks
    return {
        "share": share,
        **peaks.bytes,
        "limit": compute_peak_limit(share),
        "seconds": round(seconds, 2),
        "transformer": _count_module_bytes(pipe.transformer),
        "transformer_read": loaded.bytes_read if loaded else None,
    }


def _count_started_ranks() -> int:
    from ditile.distributed import env

    place = env.read_torchrun_place()
    return place.world if place is not None else 1


def _count_module_bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in (*module.parameters(), *module.buffers()))


def _write_weight_shards(model: nn.Module, folder: Path, stem: str, dtype: torch.dtype) -> None:
    names: dict[str, str] = {}
    folder.mkdir(exist_ok=True)
    for number, shapes in enumerate(_split_into_shards(model, dtype.itemsize)):
        file = f"{stem}-{number:05}.safetensors"
        tensors = {name: torch.full(shape, 0.01, dtype=dtype) for name, shape in shapes.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        names |= dict.fromkeys(tensors, file)
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def _split_into_shards(model: nn.Module, item: int) -> Iterator[dict[str, torch.Size]]:
    shard: dict[str, torch.Size] = {}
    size = 0
    for name, parameter in model.named_parameters():
        if shard and size + parameter.numel() * item > SHARD:
            yield shard
            shard = {}
            size = 0
        shard[name] = parameter.shape
        size += parameter.numel() * item
    yield shard


def main() -> None:
    """Writes the checkpoint, loads it on every rank, and prints one line for each."""
    parser = argparse.ArgumentParser(description="What a rank holds while it loads.")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--text", default="split", choices=("each", "first", "split"))
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="bfloat16 is that of the files")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        size = write_pipeline(Path(folder), heads=24, double=2, single=4, layers=3, dtype=torch.bfloat16)
        print(json.dumps({"checkpoint": size, "ranks": wanted.ranks, "text": wanted.text}))
        for rank, result in enumerate(launch(measured, wanted.ranks, (folder, wanted.text, wanted.dtype), threads=1)):
            print(json.dumps({"rank": rank, **result}))
        print(json.dumps({"rank": "whole", **launch(measured, 1, (folder, "whole", wanted.dtype), threads=1)[0]}))


if __name__ == "__main__":
    main()

"""FLUX with the flags that cache-dit's examples document, alone or on all ranks that torchrun starts.

    python examples/run_flux_cp.py --cache --Fn 8 --Bn 0 --rdt 0.08
    python examples/run_flux_cp.py --model-path shapes-flux --steps 20 --cache --Fn 1 --rdt 0.2 --w 4
    torchrun --nproc_per_node=2 examples/run_flux_cp.py --cache --parallel-type ulysses --attn flash --uaa

`ditile generate` takes the same flags, and more; this is what lies behind them. The flags are read by the command
line's own parser (`CacheOptions`), which is not a public name: a script of yours makes `ditile.DBCacheConfig` and its
like, or calls `ditile.load_configs`.
"""

import argparse
import statistics
import sys
import time

import torch
import torch.distributed as dist

import ditile
from ditile.plan.flag_parser import add_arguments, collect_arguments
from ditile.runner.model_files import defaults
from ditile.runner.requests.cache_options import CacheOptions

PROMPT = "A cat holding a sign that says hello world"


def parse_arguments() -> argparse.Namespace:
    """Those of the cache are the fields of `CacheOptions`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model-path", default="black-forest-labs/FLUX.1-dev", help="a hub id, folder or bundled model"
    )
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--negative-prompt")
    for name in ("steps", "height", "width"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--attn", help="attention kernel: native, _native_cudnn, flash, sage")
    parser.add_argument("--ulysses-anything", "--uaa", action="store_true", help="any number of tokens and heads")
    parser.add_argument("--compile", action="store_true", help="torch.compile the blocks")
    parser.add_argument("--out", default="flux.png")
    add_arguments(parser, CacheOptions, title="cache")
    return parser.parse_args()


def prepare_runner(args: argparse.Namespace, cache: CacheOptions) -> ditile.Runner:
    """A pipeline on this rank, divided, with what was asked for."""
    plan = ditile.Plan(**cache.collect_plan_values({"uaa": True} if args.ulysses_anything else {}))
    whole = cache.lora is not None and plan.tensor > 1  # a LoRA is cut with the weights that it belongs to
    pipe = ditile.load(args.model_path, plan=None if whole else plan)
    if cache.lora is not None:
        ditile.load_lora(pipe, cache.lora)
        if cache.fuse_lora:
            pipe.fuse_lora()
            pipe.unload_lora_weights()
    if args.compile:
        ditile.set_compile_configs(compute_comm_overlap=not cache.disable_compute_comm_overlap)
    runner = ditile.parallelize(pipe, plan, attention=cache.choose_attention_backend(args.attn), compile=args.compile)
    configs = cache.build_cache_arguments()
    configs.pop("attention_backend", None)  # the runner has it
    if configs["cache_config"] is not None or "quantize_config" in configs:
        ditile.enable_cache(runner, **configs)
    return runner


def main() -> None:
    """Draws one picture; with --perf four times, the first of which does not count. Rank 0 saves it."""
    args = parse_arguments()
    cache = CacheOptions(**collect_arguments(CacheOptions, args))
    runner = prepare_runner(args, cache)
    given = {
        "num_inference_steps": args.steps,
        "height": args.height,
        "width": args.width,
        "prompt": args.prompt,
        "negative_prompt": args.negative_prompt,
    }
    call = defaults(args.model_path) | {name: value for name, value in given.items() if value is not None}
    seconds = []
    for _ in range(4 if cache.perf else 1):
        began = time.perf_counter()
        result = runner(**call, generator=torch.Generator("cpu").manual_seed(0), output="first")
        seconds.append(time.perf_counter() - began)
    reports = runner.reports()
    if cache.build_cache_arguments()["cache_config"] is not None:
        ditile.summary(runner)  # all ranks call it, and rank 0 prints
    if result is not None:
        result.images[0].save(args.out)
        print(f"{args.out}: {statistics.median(seconds[1:] or seconds):.2f} s under {runner.plan}")
        if cache.track_memory:
            print("peak memory:", ", ".join(f"{report['peak_memory_bytes'] / 2**20:.0f} MiB" for report in reports))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except ditile.DitileError as error:
        sys.exit(f"run_flux_cp.py: {error}")

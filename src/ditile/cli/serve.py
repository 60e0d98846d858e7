"""`ditile serve`: checks the options, and runs the server in this process, which never imports torch."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import sys
from collections.abc import Mapping

from ditile.distributed import env
from ditile.plan.errors import ModelError
from ditile.plan.extras import require_extra
from ditile.plan.option_classes import JsonObject
from ditile.plan.plan import Plan
from ditile.runner.model_files import check_weight_source, find_model_source
from ditile.runner.requests.cache_options import CacheOptions
from ditile.serve.options import ServeOptions


def serve_model(options: ServeOptions, plan: Plan, cache: CacheOptions) -> int:
    """Serve a model until a signal stops the process, and return the exit code.

    Raises:
        DitileError: if a package is missing, an option does not fit, or the server cannot listen.
    """
    options = dataclasses.replace(options, attention=cache.choose_attention_backend(options.attention))
    if options.forward is not None:
        from ditile.serve.forward.server import run_forward_server

        return run_forward_server(options, plan, cache)
    require_extra("serve", "the server")
    find_model_source(options.model, components=options.components)
    for choice in cache.loras.values():
        check_weight_source(choice.source, "lora")
    if options.text_after == "free":
        raise ModelError("text_after='free': every request has a prompt to encode; use offload or keep")
    from ditile.serve.server import run_server

    predict = functools.partial(predict_call, options.model, plan, options.components, options.profile)
    return run_server(options, plan, cache, predict)


async def predict_call(
    model: str, plan: Plan, components: Mapping[str, str] | None = None, profile: str | None = None
) -> JsonObject:
    """Return the prediction of `ditile plan` for a plan on this machine, as JSON types; empty if the machine was never
    measured.

    It runs in a process of its own, as it needs torch.
    """
    if profile is None and not env.find_profile_path().exists():
        return {}
    flags = [f"--component={name}={file}" for name, file in (components or {}).items()]
    if profile is not None:
        flags.append(f"--profile={profile}")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ditile", "plan", "--model", model, *flags),
        *("--price", str(plan), "--devices", str(plan.world), "--json", "-"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        answer, _ = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    # If the model cannot be planned, there is no prediction.
    if process.returncode != 0:
        return {}
    return {"predicted": json.loads(answer)}

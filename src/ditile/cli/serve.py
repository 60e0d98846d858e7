"""`ditile serve`: checks the options, and runs the server in this process, which never imports torch."""

from __future__ import annotations

import dataclasses
import importlib.util

from ditile.errors import ModelError
from ditile.plan.plan import Plan
from ditile.requests.cache_options import CacheOptions
from ditile.requests.options import check_lora_source
from ditile.runner.load import find_model_source
from ditile.serve.options import ServeOptions

PACKAGES = ("fastapi", "uvicorn", "sse_starlette", "prometheus_client", "multipart")


def serve_model(options: ServeOptions, plan: Plan, cache: CacheOptions) -> int:
    """Serves a model until the process is told to end; returns the exit code.

    Raises:
        DitileError: if a package is missing, an option does not fit, or the server cannot listen.
    """
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise ModelError(f"the server needs {', '.join(missing)}, not installed here; pip install 'ditile[serve]'")
    find_model_source(options.model)
    if cache.lora is not None:
        check_lora_source(cache.lora)
    if cache.perf:
        raise ModelError("perf measures `ditile generate`; leave it out")
    if options.text_after == "free":
        raise ModelError("text_after='free': every request has a prompt to encode; use offload or keep")
    from ditile.serve.run import run_server

    options = dataclasses.replace(options, attention=cache.choose_attention_backend(options.attention))
    return run_server(options, plan, cache, {"cache": cache.describe_settings()})

"""The flags of `ditile serve`. Nothing here imports torch."""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path
from typing import Annotated

from pydantic import Field

from ditile.distributed import env
from ditile.plan.errors import ModelError
from ditile.plan.extras import require_extra
from ditile.plan.option_classes import Count, Seconds, define_option, options
from ditile.runner.model_files import DENOISERS
from ditile.runner.requests.facts import ModelFacts
from ditile.runner.requests.options import EngineOptions, PlannedOptions, SourceOptions

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")
"""An origin as browsers send it: a scheme, a host and perhaps a port, without a path."""
# The size of a large photo. Each pixel takes some bytes of the server's memory during decoding.
MAX_UPLOAD_PIXELS = 2**24
FOR_SECOND = f"{DENOISERS[1]}="
"""What a request writes before the name of a LoRA for the second of two transformers, as in --lora."""


@options()
class ServeOptions(PlannedOptions, EngineOptions, SourceOptions):
    """The options of a server: model, clients and limits."""

    forward: str | None = define_option(
        None, "serve calls of the transformer alone, as ComfyUI's nodes make them, on unix:/path or 127.0.0.1:PORT",
        metavar="ADDRESS",
    )  # fmt: skip
    forward_component: str = define_option(
        "transformer", "with --forward: the transformer of a pipeline with two, such as transformer_2", metavar="NAME"
    )
    forward_bytes: Count = define_option(2**31, "with --forward: bytes of the tensors of a call")
    host: str = define_option("127.0.0.1", "the address to listen on; any but this machine's own asks for keys")
    port: Annotated[int, Field(ge=0, lt=2**16)] = define_option(8000, "the port to listen on; 0 takes a free one")
    api_key: str | None = define_option(
        None, "a file with a key on each line, as key or name:key; or DITILE_API_KEY", reads=True
    )
    insecure: bool = define_option(False, "listen on other addresses without keys")
    cors: str | None = define_option(None, "origins whose pages may call the server, with commas", metavar="ORIGINS")
    state: str | None = define_option(
        None, "folder for jobs and results, which outlive the server; by default one for each model and port",
        metavar="DIR",
    )  # fmt: skip
    keep_results: Seconds = define_option(3600.0, "seconds for which results are kept")
    replicas: Count = define_option(1, "groups of ranks, each with the whole plan")
    ray: str | None = define_option(
        None, "replicas on a Ray cluster: its host:port; without one this machine's, which is started if needed",
        metavar="ADDRESS", implied="local",
    )  # fmt: skip
    ray_max_replicas: Count | None = define_option(
        None, "with --ray: replicas while many jobs wait; --replicas by default"
    )
    idle_unload: Seconds | None = define_option(
        None, "seconds without a request after which the ranks end, and are started again for the next one"
    )
    lora_dir: str | None = define_option(
        None, "folder of LoRAs (.safetensors) that requests may name", metavar="DIR", reads=True
    )
    max_loras: Count = define_option(4, "LoRAs that stay loaded")
    max_queue: Count = define_option(64, "jobs that may wait; with --forward connections")
    max_batch: Count = define_option(1, "images of one shape made at once; at least the plan's data")
    max_pixels: Count | None = define_option(
        None, "pixels of an image or of a frame; by default four times as many as the model's own size has"
    )
    max_steps: Count = define_option(200, "steps of a request")
    max_images: Count = define_option(10, "images or videos of a request")
    max_frames: Count = define_option(1024, "frames of a video")
    max_prompt: Count = define_option(8192, "letters of a prompt")
    max_body: Count = define_option(2**26, "bytes of a request")
    timeout: Seconds = define_option(
        3600.0, "seconds after which a job is ended; with --forward the longest wait for a turn"
    )
    drain: Seconds = define_option(60.0, "seconds that running jobs get when a signal stops the server")
    exit_on_failure: bool = define_option(
        False, "end with exit code 1 when the ranks have failed three starts in the same way"
    )
    no_page: bool = define_option(False, "serve no web page")

    def __post_init__(self) -> None:
        limit = self.ray_max_replicas
        if limit is not None and self.ray is None:
            raise ModelError(f"ray_max_replicas={limit} is for a Ray cluster; add --ray, or give replicas={limit}")
        if limit is not None and limit < self.replicas:
            raise ModelError(f"ray_max_replicas={limit} is below replicas={self.replicas}; try {self.replicas}")
        if self.ray is not None:
            has_port = self.ray.rpartition(":")[2].isdecimal()
            # An address with a scheme is for Ray's client, which needs no cluster on this machine.
            if "://" in self.ray or not (self.ray == "local" or has_port):
                raise ModelError(f"ray={self.ray!r} is not an address of a cluster, such as 10.0.0.1:6379")
            require_extra("ray", f"ray={self.ray!r}")
        if self.lora_dir is not None:
            if not os.path.isdir(self.lora_dir):
                raise ModelError(f"lora_dir={self.lora_dir!r} is not a folder; give one that has .safetensors files")
            require_extra("lora", f"lora_dir={self.lora_dir!r}")
        origins = self.list_origins()
        for origin in origins:
            if origin != "*" and _ORIGIN.fullmatch(origin) is None:
                raise ModelError(f"cors={origin!r} is not an origin; try cors=https://www.example.org, or with a port")
        has_key = self.api_key is not None or env.read_api_key() is not None
        if "*" in origins and not has_key:
            raise ModelError(
                "cors='*' lets any page of the web send requests here and read results; name origins, or give "
                "--api-key FILE"
            )
        if not self.is_loopback and not has_key and not self.insecure:
            raise ModelError(
                f"host={self.host!r} is reached by others; give --api-key FILE or DITILE_API_KEY, or --insecure"
            )

    @property
    def max_replicas(self) -> int:
        """Return the largest number of replicas. Each runs one batch at a time."""
        return self.ray_max_replicas or self.replicas

    @property
    def is_loopback(self) -> bool:
        """Return whether the server can be reached only from this machine."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def max_upload_pixels(self) -> int:
        """Return the largest number of pixels that an uploaded image may have."""
        return self.max_pixels or MAX_UPLOAD_PIXELS

    def list_origins(self) -> list[str]:
        """Return the origins whose pages may call the server."""
        origins = [origin.strip() for origin in (self.cors or "").split(",")]
        return list(filter(None, origins))

    def find_state_folder(self) -> Path:
        """Return the folder for jobs and results."""
        if self.state is not None:
            return Path(self.state)
        name = re.sub(r"[^\w.-]|_", "-", Path(self.model).name)
        return env.find_data_folder() / "serve" / f"{name}-{self.port}"

    def list_lora_stems(self) -> list[str]:
        """Return the names of the files in the folder of LoRAs."""
        if self.lora_dir is None:
            return []
        loras = Path(self.lora_dir).glob("[!.]*.safetensors")
        return sorted(path.stem for path in loras if path.is_file())

    def list_lora_names(self, facts: ModelFacts) -> list[str]:
        """Return the names of the LoRAs that requests may use.

        A model with two transformers has each file twice, the second time for its second transformer.
        """
        names = self.list_lora_stems()
        if facts.has_second_transformer:
            names += [f"{FOR_SECOND}{name}" for name in names]
        return names

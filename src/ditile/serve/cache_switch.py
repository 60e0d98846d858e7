"""Switches the cache for each request: the server's own, or one whose steps the request sets by number or bounds."""

from __future__ import annotations

import io
from dataclasses import replace

from PIL import Image

from ditile.cache.config import FittedScheduleConfig
from ditile.distributed.transport import gather_json
from ditile.plan.errors import DitileError, ModelError
from ditile.plan.option_classes import JsonObject
from ditile.planner.choose import choose_promise_of_request
from ditile.planner.promise import Promise
from ditile.runner.caching import disable_cache, enable_cache
from ditile.runner.runner import Runner
from ditile.serve.link import BatchJob, WorkerSetup


class CacheSwitch:
    """The cache of the running request; by default the server's own.

    Attributes:
        is_replaced: whether a request has its own cache in place of the server's.
        has_cache: whether steps or blocks are skipped now.
    """

    def __init__(self, runner: Runner, setup: WorkerSetup) -> None:
        self._runner = runner
        self._setup = setup
        self._own_configs = setup.cache.build_cache_arguments()
        self.is_replaced = False
        self.has_cache = self._own_configs["cache_config"] is not None

    def install_for_job(self, job: BatchJob) -> JsonObject:
        """Install the cache of a job's request; every rank calls it.

        Returns:
            The promise in the form of `Promise.to_json_dict`, or the number of computed steps; empty without either.

        Raises:
            ModelError: if the server has a cache that the request cannot replace, or nothing keeps the bounds.
        """
        request = job.request
        own_config = self._own_configs["cache_config"]
        if request.computed_steps is None and not request.bounds.is_given:
            if self.is_replaced:
                disable_cache(self._runner)
                self.is_replaced = False
                self.has_cache = own_config is not None
                if own_config is not None:
                    enable_cache(self._runner, own_config, self._own_configs.get("calibrator_config"))
            return {}
        if own_config is not None and not isinstance(own_config, FittedScheduleConfig):
            raise ModelError(
                "this server has a cache of its own; leave computed_steps, within_seconds and min_psnr out"
            )
        # The server's --cache-line may name the file of a schedule, as --schedule does.
        schedule = self._setup.cache.schedule if own_config is None else own_config.schedule
        disable_cache(self._runner)
        self.is_replaced = True
        self.has_cache = False
        if request.computed_steps is not None:
            self._enable(FittedScheduleConfig(steps=request.computed_steps, schedule=schedule))
            return {"computed_steps": request.computed_steps}
        promise = self._choose_promise(job, schedule)
        if promise.cache_config is not None:
            self._enable(promise.cache_config)
        return promise.to_json_dict()

    def _enable(self, config: FittedScheduleConfig) -> None:
        """Install a cache on all ranks or on none, since a host may lack the file of the schedule."""
        refusal = ""
        try:
            enable_cache(self._runner, config)
        except DitileError as error:
            refusal = str(error)
        refusals = gather_json(refusal, self._runner.mesh.everyone)
        if any(refusals):
            disable_cache(self._runner)
            raise ModelError(next(filter(None, refusals)))
        self.has_cache = True

    def _choose_promise(self, job: BatchJob, schedule: str | None) -> Promise:
        """Return the promise of rank 0 for all ranks, since each host has a profile of its own."""
        answer: JsonObject = {}
        if self._runner.mesh.rank == 0:
            # The planner needs only the sizes of images.
            sizes = []
            for name in job.request.options.image or ():
                with Image.open(io.BytesIO(job.inputs[name])) as image:
                    sizes.append(f"{image.width}x{image.height}")
            image_sizes = tuple(sizes) or None
            options = replace(job.request.options, model=self._setup.options.model, image=image_sizes, mask=None)
            try:
                promise = choose_promise_of_request(
                    job.request.bounds,
                    options,
                    self._setup.plan,
                    schedule,
                    cuda_graphs=self._setup.options.cuda_graphs,
                )
                answer = {"promise": promise.to_json_dict()}
            except DitileError as error:
                answer = {"refusal": str(error)}
        answer = gather_json(answer, self._runner.mesh.everyone)[0]
        if "refusal" in answer:
            raise ModelError(answer["refusal"])
        return Promise.from_json_dict(answer["promise"], self._setup.options.model, schedule)

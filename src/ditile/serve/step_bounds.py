"""How many steps each request computes, where it says so itself: by their number, or by bounds on time or loss."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ditile.cache.config import FittedScheduleConfig
from ditile.distributed.transport import gather_json
from ditile.plan.errors import DitileError, ModelError
from ditile.plan.option_classes import JsonObject
from ditile.planner.choose import choose_promise_of_request
from ditile.planner.promise import Promise
from ditile.runner.caching import disable_cache, enable_cache

if TYPE_CHECKING:
    from ditile.runner.runner import Runner
    from ditile.serve.jobs import Request
    from ditile.serve.link import WorkerSetup


class StepBounds:
    """The computed steps of requests; a request that says nothing has the server's own cache.

    Args:
        runner: whose cache is replaced for a request.
        setup: the server's plan and cache.

    Attributes:
        is_replaced: whether the cache is that of a request.
    """

    def __init__(self, runner: Runner, setup: WorkerSetup) -> None:
        self._runner = runner
        self._setup = setup
        self._own_configs = setup.cache.build_cache_arguments()
        self.is_replaced = False

    @property
    def has_cache(self) -> bool:
        """Whether steps or blocks are left out now."""
        return self.is_replaced or self._own_configs["cache_config"] is not None

    def use_bounds(self, request: Request) -> JsonObject:
        """Installs the cache of a request; every rank calls it.

        Returns:
            What is promised, as of `Promise.to_json_dict`, or the number of computed steps alone; empty without either.

        Raises:
            ModelError: if the server has a cache that the request cannot replace.
            PlanError: if nothing keeps the bounds.
        """
        if request.computed_steps is None and not request.bounds.is_given:
            self._restore_own_cache()
            return {}
        own_config = self._own_configs["cache_config"]
        if own_config is not None and not isinstance(own_config, FittedScheduleConfig):
            raise ModelError(
                "this server has a cache of its own; leave computed_steps, within_seconds and min_psnr out"
            )
        config: FittedScheduleConfig | None = FittedScheduleConfig(
            steps=request.computed_steps, schedule=self._setup.cache.schedule
        )
        promised: JsonObject = {"computed_steps": request.computed_steps}
        if request.computed_steps is None:
            promise = self._choose_promise(request)
            config = promise.cache_config
            promised = promise.to_json_dict()
        disable_cache(self._runner)
        self.is_replaced = True
        if config is not None:
            enable_cache(self._runner, config)
        return promised

    def _restore_own_cache(self) -> None:
        if not self.is_replaced:
            return
        disable_cache(self._runner)
        self.is_replaced = False
        if self._own_configs["cache_config"] is not None:
            enable_cache(self._runner, self._own_configs["cache_config"], self._own_configs.get("calibrator_config"))

    def _choose_promise(self, request: Request) -> Promise:
        """The promise of rank 0, which all ranks keep: each host has a profile of its own."""
        schedule = self._setup.cache.schedule
        answer: JsonObject = {}
        if self._runner.mesh.rank == 0:
            # Images that a request starts from are not in the seconds, so their files are not needed.
            options = replace(request.options, model=self._setup.model, image=None, mask=None)
            try:
                promise = choose_promise_of_request(
                    request.bounds,
                    options,
                    self._setup.plan,
                    schedule,
                    cuda_graphs=self._setup.engine.cuda_graphs,
                )
                answer = {"promise": promise.to_json_dict()}
            except DitileError as error:
                answer = {"refusal": str(error)}
        answer = gather_json(answer, self._runner.mesh.everyone)[0]
        if "refusal" in answer:
            raise ModelError(answer["refusal"])
        return Promise.from_json_dict(answer["promise"], schedule)

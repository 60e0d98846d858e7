"""The options of `ditile calibrate`. Nothing here imports torch."""

from __future__ import annotations

from ditile.plan.option_classes import Ranks, define_option, options
from ditile.runner.requests.options import Dtype


@options()
class CalibrateOptions:
    """The options of `ditile calibrate`, which measures a machine."""

    out: str | None = define_option(
        None, "where to keep it; where `ditile plan` looks for it by default", metavar="FILE"
    )
    name: str | None = define_option(None, "of the machine; its device's by default")
    ranks: Ranks | None = define_option(None, "ranks that compute at once; its GPUs or cores by default")
    threads: Ranks = define_option(1, "CPU threads of each rank")
    dtype: Dtype | None = define_option(None, "float32 on CPUs, otherwise bfloat16")

"""The options of `ditile calibrate`. Nothing here imports torch."""

from __future__ import annotations

from ditile.plan.errors import ModelError
from ditile.plan.option_classes import Ranks, define_option, options
from ditile.runner.requests.options import Dtype

ALONE_HERE = "here"
"""A value in place of a file: ranks are measured one by one on this machine."""


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
    alone: str | None = define_option(
        None,
        "fit what a GPU's host needs to ranks measured alone: here, or to a file of `ditile bench --alone`",
        implied=ALONE_HERE,
        reads=True,
    )
    hardware: str | None = define_option(
        None, "alone: whose other figures are kept, such as h200-nvlink; this machine's, as calibrated, by default"
    )

    def __post_init__(self) -> None:
        if self.hardware is not None and self.alone is None:
            raise ModelError(f"hardware={self.hardware!r} is for --alone; otherwise this machine is measured")
        if self.hardware is not None and "," in self.hardware:
            first = self.hardware.partition(",")[0]
            raise ModelError(f"hardware={self.hardware!r} names several devices, and --alone fits one; try {first}")
        if self.ranks is not None and self.alone is not None:
            raise ModelError(f"ranks={self.ranks} compute together, and --alone is for one; leave one of them out")

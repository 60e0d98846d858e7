"""The result of `ditile verify`. Nothing here imports torch: the process that started the ranks shows it too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class Check:
    """One line of a verdict; `ok` is None if there is nothing to check, and `says` is the finding."""

    name: str
    ok: bool | None
    says: str


@dataclass(frozen=True, slots=True)
class PlanVerdict:
    """The result of `ditile verify` for a plan, the same on every rank."""

    title: str
    checks: list[Check]

    @property
    def is_proven(self) -> bool:
        """Return whether some check holds, and none failed."""
        answers = {check.ok for check in self.checks}
        return True in answers and False not in answers


def build_verdict_table(verdict: PlanVerdict) -> Table:
    """Build a table of the verdict with a tick or a cross for every check."""
    from rich.table import Table

    table = Table(title=verdict.title, title_justify="left", title_style="")
    for title in ("", "check", "found"):
        table.add_column(title, overflow="fold")
    marks = {True: "✓", False: "✗", None: "-"}
    names: dict[bool | None, list[str]] = {True: [], False: [], None: []}
    for check in verdict.checks:
        table.add_row(marks[check.ok], check.name, check.says)
        names[check.ok].append(check.name)
    if not verdict.is_proven:
        table.add_row("✗", "not proven", f"failed: {'; '.join(names[False]) or 'nothing holds'}")
        return table
    summary = f"all {len(names[True])} checks hold"
    if names[None]:
        summary += f", {len(names[None])} do not apply"
    table.add_row("✓", "proven", summary)
    return table

"""What `ditile verify` has to say: a line for each check, and whether all of them hold."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the verdict: true, false, or None where there is nothing to check."""

    name: str
    ok: bool | None
    says: str


@dataclass(frozen=True, slots=True)
class PlanVerdict:
    """What came out, the same on every rank."""

    title: str
    checks: list[Check]

    @property
    def is_proven(self) -> bool:
        """Whether nothing is false."""
        return all(check.ok is not False for check in self.checks)


def build_verdict_table(verdict: PlanVerdict) -> Table:
    """The verdict with a tick or a cross for every check."""
    table = Table(title=verdict.title, title_justify="left")
    for title in ("", "check", "found"):
        table.add_column(title, overflow="fold")
    for check in verdict.checks:
        table.add_row({True: "✓", False: "✗", None: "-"}[check.ok], check.name, check.says)
    table.add_row("✓" if verdict.is_proven else "✗", "proven" if verdict.is_proven else "not proven", "")
    return table

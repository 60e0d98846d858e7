"""The table that `print(runner)` shows."""
from __future__ import annotations
from typing import Any
def describe(parts: Any) -> str:
    return str(parts.plan)

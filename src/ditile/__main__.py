"""`python -m ditile` is the command `ditile`."""

from __future__ import annotations

import sys

from ditile.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

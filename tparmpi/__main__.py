"""`python -m tparmpi` is the `tparmpi` command."""

from __future__ import annotations

import sys

from tparmpi.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

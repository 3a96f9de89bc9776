"""Print the calls that ranks recorded: ``python -m tparmpi.comm.post_mortem [FILE …]``.

Without arguments, of all records on this node, those of jobs that run included.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tparmpi.comm import ring


def main(arguments: Sequence[str]) -> int:
    """Print each file's calls; return the exit code. Local."""
    paths = [Path(argument) for argument in arguments]
    parent = ring.folder()
    if not paths and parent is not None:
        paths = sorted(parent.glob(f"*{ring.SUFFIX}"))
    code = 0
    for path in paths:
        found = ring.read(path)
        if found is None:
            print(f"{path}: no record of a rank's calls", file=sys.stderr)
            code = 1
            continue
        state = "runs" if found.is_alive else "is gone"
        print(f"{path}: rank {found.rank} of {found.size}, process {found.pid} {state}")
        for line in found.lines():
            print(f"  {line}")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

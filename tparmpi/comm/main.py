"""Running a command so that all ranks leave with one code."""

from __future__ import annotations

from collections.abc import Callable

from tparmpi.comm import exits, failure
from tparmpi.errors import TparmpiError

_INTERRUPTED = 130


def run_main(main: Callable[[], int | None]) -> int:
    """Run a command's main function; return the exit code, the same on every rank.

    Collective over all ranks. A `TparmpiError` is printed as one sentence, once where
    all ranks have the same, and marked with its rank where they have not. A rank that
    ends with an error or a nonzero code while others go on ends the job. Any other
    exception is raised.

    Parameters
    ----------
    main
        Returns an exit code; None stands for 0.
    """
    try:
        code = main() or 0
    except TparmpiError as error:
        return failure.refuse(f"tparmpi: {error}", error.exit_code)
    except KeyboardInterrupt:
        return failure.refuse("tparmpi: interrupted", _INTERRUPTED)
    except SystemExit as error:
        if error.code is not None and not isinstance(error.code, int):
            return failure.refuse(str(error.code), 1)
        code = exits.code_of(error)
    return failure.leave(code)

"""Main function of the conversion programs: an error is one sentence and an exit status, without a stack trace."""

import contextlib
import errno
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from speculative.convert.errors import ConvertError
from speculative.error_text import engine_lines

NOTHING = 1 << 20  # bytes free on a full disk, at most


def run(job: Callable[[], None], out: Path, debug: bool, interrupted: str) -> int:
    """Run `job`, which writes to `out`; return the exit status: 0 done, 1 failed, 2 bad usage, 130 interrupted.

    An error is printed as one line, after a stack trace with `debug`; `interrupted` is what Ctrl-C prints.
    """
    try:
        job()
        return 0
    except KeyboardInterrupt:
        print(f"\ninterrupted; {interrupted}", file=sys.stderr)
        return 130
    except Exception as error:
        if debug:
            traceback.print_exc()
        print(f"error: {_sentence(error, out)}", file=sys.stderr)
        return error.status if isinstance(error, ConvertError) else 1


def run_child(job: Callable[[], None]) -> int:
    """Run `job` in a child process of a program, which shows the last line of an error; return the exit status."""
    try:
        job()
        return 0
    except (ConvertError, ValueError, RuntimeError, OSError) as error:
        print(engine_lines(error)[-1], file=sys.stderr)
        return 1


def _sentence(error: Exception, out: Path) -> str:
    if isinstance(error, ConvertError):
        return str(error)
    # safetensors' error, and OpenVINO's, which does not say why
    is_other_library = "os error 28" in str(error) or ("iostream error" in str(error) and _is_full(out))
    if is_other_library or (isinstance(error, OSError) and error.errno == errno.ENOSPC):
        return f"the disk of {out} is full; free space and run the same command again"
    if isinstance(error, PermissionError) and error.filename:  # on Windows also of a file that a program has open
        return (
            f"{error.filename} cannot be accessed ({error.strerror}); change its permissions, or end the programs that "
            "use it, and run the same command again"
        )
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which takes seconds to import
        return "the memory of --device is too small; free some, or give a smaller --length or --draft-vocabulary"
    return f"{type(error).__name__}: {engine_lines(error)[0]}; --debug shows where"


def _is_full(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return shutil.disk_usage(next(parent for parent in (folder, *folder.parents) if parent.exists())).free < NOTHING
    return False

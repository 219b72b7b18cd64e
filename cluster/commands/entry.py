"""Entry of the `holdfast` command: handles Ctrl-C before the command line is imported and after its command ends.

Python would print a traceback of its imports; this prints one line and exits with 130. Imports before `main` are not
covered, so they are few.
"""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Final

from holdfast.worker.process_memory import importing, set_aside
from holdfast.worker.replica.processes import open_standard_streams

EXIT_INTERRUPTED: Final = 130

_STDERR: Final = 2  # file descriptor


def main() -> None:
    """Entry point of the console script."""
    is_ignored = signal.getsignal(signal.SIGINT) is not signal.default_int_handler  # as below `nohup`: it stays so
    if not is_ignored:
        signal.signal(signal.SIGINT, _end)
    with importing():
        from holdfast.cluster.commands import cli

    open_standard_streams()
    run = cli.command if is_ignored else _interruptible(cli.command)
    code = cli.exit_code(lambda: run(sys.argv[1:]))
    exec("")  # under `-m`, Python ends by SIGINT if text under `exec` was interrupted before, such as a dataclass's
    set_aside()  # the collections at an interpreter's end would look at each object of torch several times
    sys.exit(code)


def _interruptible(run: Callable[[Sequence[str]], object]) -> Callable[[Sequence[str]], object]:
    """`run`, in which Ctrl-C is a `KeyboardInterrupt`, by Python's own handler: asyncio looks for that one."""

    def call(arguments: Sequence[str]) -> object:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return run(arguments)
        finally:
            signal.signal(signal.SIGINT, _end)

    return call


def _end(_signum: int, _frame: FrameType | None) -> None:
    """Ends the process at once. Nothing is open at this point, and no exception passes through an import."""
    os.write(_STDERR, b"holdfast: interrupted\n")
    os._exit(EXIT_INTERRUPTED)

"""Recent warnings and errors of this process, kept for a state dump: when, where and what; an exception by its class.

What an exception says may quote a request. What may not live here: what is logged, and log files.
"""

import logging
import time
from collections import deque
from typing import Final

MOST: Final = 100
MAX_LENGTH: Final = 500


class RecentErrors(logging.Handler):
    """The last `MOST` records of at least WARNING of the loggers that it is added to."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: deque[str] = deque(maxlen=MOST)

    @property
    def lines(self) -> list[str]:
        """Oldest first."""
        return list(self._lines)

    def emit(self, record: logging.LogRecord) -> None:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        error = "" if record.exc_info is None or record.exc_info[0] is None else f" ({record.exc_info[0].__name__})"
        self._lines.append(f"{when} {record.levelname} {record.name}: {record.getMessage()}{error}"[:MAX_LENGTH])

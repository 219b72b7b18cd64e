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
        try:
            self._lines.append(_line(record)[:MAX_LENGTH])
        except Exception:  # as every handler: whoever logs goes on, whatever is wrong with the record
            self.handleError(record)


def _line(record: logging.LogRecord) -> str:
    when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    kind = record.exc_info[0] if record.exc_info else None  # False, where a caller says so
    error = "" if kind is None else f" ({kind.__name__})"
    return f"{when} {record.levelname} {record.name}: {record.getMessage()}{error}"

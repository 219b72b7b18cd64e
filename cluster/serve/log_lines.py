"""Log formats of a cluster's processes: time, level, message; of an exception where it came from, and not what it says.

What an exception says may quote a request, and what users send is in no log. What may not live here: what is logged,
and where it is kept, which is Ray's business.
"""

import json
import logging
import traceback
from datetime import UTC, datetime
from types import TracebackType
from typing import Final, Literal, TypeAlias

FORMAT: Final = "%(asctime)s %(levelname)s %(message)s"

_Info: TypeAlias = "tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]"


class DiscreetFormatter(logging.Formatter):
    """Writes the stack and the class of an exception and of those behind it."""

    def formatException(self, ei: _Info) -> str:
        error, parts = ei[1], list[str]()
        while error is not None and len(parts) < 10:
            stack = "".join(traceback.format_tb(error.__traceback__))
            parts.insert(0, f"{stack}{type(error).__module__}.{type(error).__qualname__}")
            error = error.__cause__ or error.__context__
        return "\n-- and then:\n".join(parts)


class JsonFormatter(DiscreetFormatter):
    """One object a line. What a record has as `details` (a mapping, such as the request's id) is among its fields."""

    def format(self, record: logging.LogRecord) -> str:
        said = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(dict(getattr(record, "details", {})) | said, default=str)


def date_log_lines(log_format: Literal["text", "json"] = "text") -> None:
    """From now on this process writes warnings and errors with the time. Not for libraries: logs are their caller's."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else DiscreetFormatter(FORMAT))
    logging.basicConfig(handlers=[handler])

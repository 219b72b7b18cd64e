"""Log level of a process: how much this package logs, by order of the cluster's operators."""

import logging
from typing import Final, Literal

from holdfast.worker.errors import InvalidRequestError

LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
LOG_LEVELS: Final[tuple[LogLevel, ...]] = ("DEBUG", "INFO", "WARNING", "ERROR")

PACKAGE: Final = "holdfast"
"""The parent of all of Holdfast's loggers."""


def log_level(name: str) -> LogLevel:
    """The level of that name, in any case. Raises `InvalidRequestError` for a level that there is not."""
    for known in LOG_LEVELS:
        if known == name.upper():
            return known
    raise InvalidRequestError("log_level", name, f"must be one of {', '.join(LOG_LEVELS)}")


def set_log_level(level: LogLevel) -> None:
    """Sets the level of this package's loggers in this process."""
    logging.getLogger(PACKAGE).setLevel(level)

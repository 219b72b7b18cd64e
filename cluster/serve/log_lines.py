"""Log format of a cluster's processes: time, level, message.

What may not live here: what is logged, and where it is kept, which is Ray's business.
"""

import logging
from typing import Final

FORMAT: Final = "%(asctime)s %(levelname)s %(message)s"


def date_log_lines() -> None:
    """From now on this process writes warnings and errors with the time. Not for libraries: logs are their caller's."""
    logging.basicConfig(format=FORMAT)

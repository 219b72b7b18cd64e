"""What a log may tell of a client's own words: names of fields, and nothing that could be a sentence.

What may not live here: logging.
"""

from typing import Final

LONGEST: Final = 64


def loggable(name: str) -> str:
    """The name of a field that is not known, where it could be one."""
    return name if name.isidentifier() and len(name) <= LONGEST else "(not shown: no identifier)"

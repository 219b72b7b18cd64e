"""Violation error of the simulator, and the assertion that raises it.

What may not live here: the invariants, which stand where they are checked.
"""


class Violation(Exception):
    """An invariant does not hold. The message says which, and what was found."""


def require(holds: bool, promise: str) -> None:
    """Raises `Violation` unless the promise holds."""
    if not holds:
        raise Violation(promise)

"""The word for a broken promise. What is promised, is said where it is checked."""


class Violation(Exception):
    """A promise was broken. The message says which, and what was found."""


def require(holds: bool, promise: str) -> None:
    """Raises `Violation` unless the promise holds."""
    if not holds:
        raise Violation(promise)

"""What a decoder may answer to bytes that are wrong: an error of our tree, or a ValueError, with a short text."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from holdfast.worker.errors import HoldfastError, InternalError

MAX_TEXT: Final = 4096
"""Characters of an error's text, however long the input is."""


@contextmanager
def refused() -> Iterator[None]:
    """Lets pass what refuses an input. Anything else is a failure of the decoder."""
    try:
        yield
    except InternalError:
        raise
    except (HoldfastError, ValueError) as error:
        assert len(str(error)) <= MAX_TEXT, f"an error of {len(str(error))} characters: {str(error)[:200]}"  # noqa: PT017

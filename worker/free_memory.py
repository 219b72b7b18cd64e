"""Free memory of the process, given back to the system: glibc keeps what large messages took, in each thread's arena.

What may not live here: when it is given back.
"""

import ctypes
from collections.abc import Callable
from functools import cache


def give_back() -> None:
    """Takes milliseconds, without Python's lock. Does nothing where the C library is not glibc."""
    _trim()(0)


@cache
def _trim() -> Callable[[int], int]:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return lambda _: 0
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return trim  # type: ignore[no-any-return]

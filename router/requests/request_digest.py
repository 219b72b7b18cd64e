"""Digest of a request's bytes: the same for a request that is sent again, whoever sends it.

What may not live here: what is done with it (`poison_watch.py`).
"""

from collections.abc import Iterator
from hashlib import blake2b
from typing import Final, TypeAlias

WHOLE_BYTES: Final = 2**18
"""Bytes up to this are hashed whole. Of more, so many at both ends and pieces between: no loop waits for 32 MB."""

PIECES: Final = 64
PIECE_BYTES: Final = 2**12

_OF_A_SUBMISSION: Final = frozenset((2, 7, 10, 11))
"""Fields of `GenerateRequest` that change when it is sent again: `request_id`, `timeout_ms`, `resume`, `attempt`."""

_MAX_FIELDS: Final = 64


Part: TypeAlias = bytes | memoryview


def request_digest(kind: str, *parts: Part) -> str:
    """Of a request to the path or method `kind`, whose bytes are these. Nothing is copied."""
    size = sum(map(len, parts))
    digest = blake2b(kind.encode(), digest_size=16)
    digest.update(b"%d:" % size)
    for part in parts:
        if size <= 2 * WHOLE_BYTES:
            digest.update(part)
        else:
            _add_samples(digest, memoryview(part), len(parts))
    return digest.hexdigest()


def _add_samples(digest: blake2b, part: memoryview, num_parts: int) -> None:
    """Of one of several parts: both of its ends, and pieces between."""
    num_whole = WHOLE_BYTES // num_parts
    if len(part) <= 2 * num_whole:
        digest.update(part)
        return
    digest.update(part[:num_whole])
    step = max(1, (len(part) - 2 * num_whole) * num_parts // PIECES)
    for at in range(num_whole, len(part) - num_whole, step):
        digest.update(part[at : at + PIECE_BYTES])
    digest.update(part[-num_whole:])


def lasting_parts(message: bytes) -> list[memoryview]:
    """A serialized `GenerateRequest` without what changes when it is sent again. What is none stays as it is."""
    view = memoryview(message)
    try:
        kept = [(begin, end) for number, begin, end in _fields(message) if number not in _OF_A_SUBMISSION]
    except (IndexError, ValueError):
        return [view]
    return [view[begin:end] for begin, end in kept]


def _fields(message: bytes) -> Iterator[tuple[int, int, int]]:
    """(number, begin, end) of each field of a message. Raises `IndexError`, `ValueError` for what is none."""
    at, size = 0, len(message)
    for _ in range(_MAX_FIELDS):
        if at == size:
            return
        begin = at
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == 2:  # bytes
            length, at = _varint(message, at)
            at += length
        elif kind == 0:
            _, at = _varint(message, at)
        else:  # the message has no others
            raise ValueError("another kind of field")
        if at > size:
            raise ValueError("cut off")
        yield tag >> 3, begin, at
    raise ValueError("too many fields")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = message[at]
    at += 1
    if value < 128:
        return value, at
    value &= 127
    for shift in range(7, 70, 7):
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("too long")

"""Record at the end of a body by which a client goes on with a held stream: read within bounds, ids in pieces.

A parser holds Python's lock to its end, and a record may have a million token ids: so these are taken out, and read
apart. What may not live here: what a record means (`router/held_stream.py`).
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from holdfast.router.config import LimitsConfig
from holdfast.router.held_stream import RESUME, Identity, Noted, NotedSequence
from holdfast.router.wire.json_bounds import JsonBounds, token_ids
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.request import FinishReason
from holdfast.worker.wire.bound import Bound

_IDS: Final = re.compile(rb'"t"\s*:\s*\[([0-9,\s]*)\]')
_REST: Final = JsonBounds(
    {"sequences": Bound(count=2**16, size=2**21)}, Bound(count=16, size=2**12), Bound(count=2**16), string=2**12
)
"""Bounds of a record without its token ids."""


def read_record(content: bytes, limits: LimitsConfig) -> Noted:
    """What a client says it has, as `Noted.content` writes it. Raises `InvalidRequestError`."""
    lists = list[list[int]]()
    rest, position, num_left = list[bytes](), 0, limits.max_prompt_tokens
    for found in _IDS.finditer(content):
        ids = token_ids(RESUME, b"[%b]" % found[1])
        num_left -= len(ids)
        if num_left < 0:
            limit = f"must have at most {limits.max_prompt_tokens} token ids (limits.max_prompt_tokens)"
            raise InvalidRequestError(RESUME, "more", limit)
        rest += (content[position : found.start(1)], b"%d" % len(lists))
        position = found.end(1)
        lists.append(cast("list[int]", ids))  # there are no brackets inside
    text = b"".join((*rest, content[position:]))
    try:
        _REST.check(text)
    except InvalidRequestError as error:
        raise InvalidRequestError(RESUME, error.value, error.limit) from None
    try:
        return _noted(json.loads(text), lists)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError) as error:
        raise InvalidRequestError(RESUME, content[:100], f"is not what a client of ours sends: {error!r}") from None


def _noted(said: Mapping[str, Any], lists: Sequence[list[int]]) -> Noted:
    return Noted(
        identity=_checked(Identity.of(said["id"])),
        sequences={int(index): _sequence(one, lists) for index, one in said["sequences"].items()},
        fingerprint=_checked(said["p"], str),
        num_events=_checked(said["e"], int),
        age_s=float(said["age"]),
    )


def _sequence(said: Mapping[str, Any], lists: Sequence[list[int]]) -> NotedSequence:
    (number,), reason = said["t"], said["f"]
    ids = lists[_checked(number, int)]
    return NotedSequence(ids, _checked(said["c"], int), reason and str(FinishReason(reason)))


def _checked(value: Any, kind: type | None = None) -> Any:
    if value is None or (kind is not None and type(value) is not kind) or (kind is int and value < 0):
        raise ValueError(f"{value!r} cannot be there")
    return value

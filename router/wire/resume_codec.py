"""Codec of resume records: the `Resume` message of gRPC, and over HTTP the same fields as JSON.

Over HTTP a record follows the body of a request that continues a stream; a *mark*, a comment after the events of each
delta, holds the addition to the client's record.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, TypeAlias, cast

from holdfast.router.resume import Identity, ResumeRecord, SequenceDelta, SequenceRecord
from holdfast.router.wire.json_bounds import JsonBounds, token_ids
from holdfast.v1 import inference_pb2
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.request import FinishReason
from holdfast.worker.wire.bound import Bound

HOLD: Final = "x-holdfast-hold"
"""Request header: the number of the submission, from 1. Response header: the stream's identity, as `Identity` writes
it."""

RESUME: Final = "x-holdfast-resume"
"""Request header: bytes at the end of the body that are its client's resume record, and not the body's own."""

REPLICAS: Final = "x-holdfast-replicas"
"""Header of a request that holds: `1` asks marks to name the replica that made the tokens."""

MARK: Final = b": resume "

FINISH_REASONS: Final = {
    None: inference_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: inference_pb2.FINISH_REASON_ABORT,
}
FINISH_REASONS_READ: Final = {int(number): reason for reason, number in FINISH_REASONS.items()}

_NAMES: Final = {reason: reason and str(reason) for reason in FINISH_REASONS}
_PIECE: Final = 2**16  # numbers


def _fields(record: ResumeRecord, reasons: Mapping[FinishReason | None, Any]) -> dict[str, Any]:
    """The fields of the message `Resume`, with finish reasons as one of the two forms has them."""
    sequences = [
        {
            "token_ids": one.token_ids,
            "text_length": one.text_length,
            "finish_reason": reasons[one.finish_reason],
        }
        for one in record.sequences
    ]
    return {"sequences": sequences, "system_fingerprint": record.fingerprint}


# --- gRPC ---


def resume_message(record: ResumeRecord) -> inference_pb2.Resume:
    """The fields that are not in it stand in the request: its id, its timeout, the time that a chat sees."""
    return inference_pb2.Resume(**_fields(record, FINISH_REASONS))


def resume_record(message: inference_pb2.Resume) -> ResumeRecord:
    """Raises `InvalidRequestError`, naming the field."""
    sequences = [_sequence(index, one) for index, one in enumerate(message.sequences)]
    return ResumeRecord(sequences=sequences, fingerprint=message.system_fingerprint)


def _sequence(index: int, message: inference_pb2.SequenceProgress) -> SequenceRecord:
    number = message.finish_reason
    if number not in FINISH_REASONS_READ:
        said = "FINISH_REASON_STOP, FINISH_REASON_LENGTH or FINISH_REASON_ABORT"
        limit = f"must be unset, or what a stream's last chunk may say: {said}"
        raise InvalidRequestError(f"resume.sequences[{index}].finish_reason", number, limit)
    return SequenceRecord(
        token_ids=list(in_pieces(message.token_ids)),
        text_length=message.text_length,
        finish_reason=FINISH_REASONS_READ[number],
    )


def in_pieces(numbers: Sequence[int]) -> Iterator[int]:
    """All of a repeated field. A copy at one go would hold Python's lock to its end."""
    return chain.from_iterable(numbers[start : start + _PIECE] for start in range(0, len(numbers), _PIECE))


# --- JSON: a record ---

_WRITE: Final = json.JSONEncoder(separators=(",", ":")).encode
_TOKEN_IDS: Final = re.compile(rb'"token_ids"\s*:\s*\[([0-9,\s]*)\]')
_REST: Final = JsonBounds(
    {"sequences": Bound(count=2**16, size=2**21)}, Bound(count=16, size=2**12), Bound(count=2**16), string=2**12
)
"""Bounds of a record without its token ids."""


def resume_json(record: ResumeRecord) -> bytes:
    """Resume record that stands behind the body of a request. It must have an identity."""
    assert record.identity is not None, "a router has said it"
    said = {
        "identity": record.identity.text,
        "age_s": round(record.age_s, 3),
        "num_events": record.num_events,
        **_fields(record, _NAMES),
    }
    return _WRITE(said).encode()


def read_resume_json(content: bytes, max_token_ids: int) -> ResumeRecord:
    """A record as `resume_json` writes it, with `max_token_ids` in all sequences at most (limits.max_prompt_tokens).

    Raises `InvalidRequestError`.
    """
    lists = list[list[int]]()
    rest, position, num_left = list[bytes](), 0, max_token_ids
    for found in _TOKEN_IDS.finditer(content):
        ids = token_ids(RESUME, b"[%b]" % found[1])
        num_left -= len(ids)
        if num_left < 0:
            limit = f"must have at most {max_token_ids} token ids (limits.max_prompt_tokens)"
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
        return _read(json.loads(text), lists)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError) as error:
        raise InvalidRequestError(RESUME, content[:100], f"is not what a Holdfast client sends: {error!r}") from None


def _read(said: Mapping[str, Any], lists: Sequence[list[int]]) -> ResumeRecord:
    """`said` has, instead of each list of token ids, one with its place in `lists`."""
    if (identity := Identity.of(said["identity"])) is None:
        raise ValueError("the identity was not written by a router")
    return ResumeRecord(
        sequences=[_read_sequence(one, lists) for one in said["sequences"]],
        fingerprint=_text(said["system_fingerprint"]),
        num_events=_count(said["num_events"]),
        identity=identity,
        age_s=float(said["age_s"]),
    )


def _read_sequence(said: Mapping[str, Any], lists: Sequence[list[int]]) -> SequenceRecord:
    (number,) = said["token_ids"]
    return SequenceRecord(
        token_ids=lists[_count(number)],
        text_length=_count(said["text_length"]),
        finish_reason=_reason(said["finish_reason"]),
    )


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} must be an integer of at least 0")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"{value!r} must be a text")
    return value


def _reason(value: str | None) -> FinishReason | None:
    return None if value is None else FinishReason(value)


# --- JSON: marks ---


@dataclass(frozen=True, slots=True)
class StreamFailure:
    """Content of a mark behind an event of an error."""

    may_retry: bool
    retry_after_s: float | None


Mark: TypeAlias = SequenceDelta | StreamFailure


@dataclass
class MarkWriter:
    """Writes the marks of one stream. A fingerprint is written where it differs from that of the mark before."""

    _fingerprint: str | None = None

    def line(self, delta: SequenceDelta, replica_id: str = "") -> bytes:
        """The comment, as a separate event. Fields at their defaults are left out, as protobuf does."""
        said: dict[str, Any] = {"first_token_index": delta.first_token_index, "token_ids": delta.token_ids}
        if delta.text_length:
            said["text_length"] = delta.text_length
        if delta.finish_reason is not None:
            said["finish_reason"] = str(delta.finish_reason)
        if delta.sequence_index:
            said["sequence_index"] = delta.sequence_index
        if delta.fingerprint != self._fingerprint:
            self._fingerprint = said["system_fingerprint"] = delta.fingerprint
        if delta.num_events:
            said["num_events"] = delta.num_events
        if delta.is_last:
            said["is_last"] = True
        if replica_id:
            said["replica_id"] = replica_id
        return b"%b%b\n\n" % (MARK, _WRITE(said).encode())


def failure_line(failure: StreamFailure) -> bytes:
    """The mark behind an event that says an error."""
    said = {"may_retry": failure.may_retry, "retry_after_s": failure.retry_after_s}
    return b"%b%b\n\n" % (MARK, _WRITE(said).encode())


def read_mark(content: bytes) -> Mark:
    """The JSON of a mark. Raises `ValueError` for a comment that no router writes."""
    try:
        said = json.loads(content.decode())
        if "may_retry" in said:
            after_s = said["retry_after_s"]
            return StreamFailure(bool(said["may_retry"]), None if after_s is None else float(after_s))
        get, ids = said.get, said["token_ids"]
        first, length, index, events = counts = (
            said["first_token_index"],
            get("text_length", 0),
            get("sequence_index", 0),
            get("num_events", 0),
        )
        if type(ids) is not list or {*map(type, counts), *map(type, ids)} != {int} or min(*counts, *ids) < 0:
            raise ValueError("its numbers must be integers of at least 0")
        fingerprint, reason = get("system_fingerprint"), _reason(get("finish_reason"))
        if fingerprint is not None:
            _text(fingerprint)
        return SequenceDelta(first, ids, length, reason, index, fingerprint, events, get("is_last") is True)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"a stream has a mark that no router writes: {str(error)[:200]}") from None

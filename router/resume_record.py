"""Resume record: the output of a request that its client has received. Any router continues after it, and keeps no
state for that. Clients of both APIs keep one and send it; `wire/resume_codec.py` writes it as protobuf and as JSON.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self

from holdfast.worker.request import FinishReason

MAX_SEQUENCES: Final = 2**16
"""Most sequences of one record: each prompt of a list, times n."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What all answers to one request have in common, whichever router gives them."""

    request_id: str
    created: int
    """Seconds since 1970: what its chunks say, and what a chat template takes for the time."""

    @property
    def text(self) -> str:
        """For a header, and for a record."""
        return f"{self.request_id} {self.created}"

    @classmethod
    def of(cls, text: str) -> Self | None:
        """None for a text that no Holdfast router has written."""
        request_id, _, created = text.rpartition(" ")
        return cls(request_id, int(created)) if request_id and created.isdecimal() else None


@dataclass(slots=True, kw_only=True)
class SequenceRecord:
    """The output of one sequence that the client has."""

    token_ids: list[int] = field(default_factory=list)
    text_length: int = 0
    """In characters. The text may lag behind the tokens."""
    finish_reason: FinishReason | None = None
    """Set if the client has the sequence's last chunk."""


class SequenceDelta(NamedTuple):
    """New output of one sequence, as far as a record counts it."""

    first_token_index: int
    token_ids: Sequence[int]
    text_length: int
    """In characters, of the new text."""
    finish_reason: FinishReason | None = None
    sequence_index: int = 0
    fingerprint: str | None = None
    """None: that of the output before."""
    num_events: int = 0
    """Where the events of a stream are numbered: all of them so far."""
    is_last: bool = False
    """The stream is complete."""


@dataclass(slots=True, kw_only=True)
class ResumeRecord:
    """The output of a request that the client has."""

    sequences: list[SequenceRecord] = field(default_factory=list)
    """By sequence index; of missing ones the client has nothing."""
    fingerprint: str = ""
    """`ModelInfo.fingerprint` of the replica that the last tokens came from; empty if not known."""
    num_events: int = 0
    """Where the events of a stream are numbered: those that the client has."""
    identity: Identity | None = None
    """Over HTTP, where the body does not say it."""
    age_s: float = 0.0
    """Over HTTP, where the body's timeout stays the same: seconds since the first submission."""
    is_over: bool = False
    """The client has the whole stream: there is nothing to resume."""

    def sequence(self, index: int) -> SequenceRecord:
        """The record of one sequence, which is not to be changed."""
        return self.sequences[index] if index < len(self.sequences) else SequenceRecord()

    def part(self, first: int, count: int) -> "ResumeRecord":
        """The record of the sequences from `first` on, `count` at most: those of one prompt of a list."""
        sequences = self.sequences[first : first + count]
        return ResumeRecord(sequences=sequences, fingerprint=self.fingerprint, num_events=self.num_events)

    def merge(self, delta: SequenceDelta) -> bool:
        """Adds new output. False if there is none, because its sequence was complete before.

        Raises `ValueError` for a gap, an overlap, or an index that no stream has.
        """
        index, ids = delta.sequence_index, delta.token_ids
        if index >= MAX_SEQUENCES:
            raise ValueError(f"sequence {index} cannot be there: a stream has at most {MAX_SEQUENCES}")
        while len(self.sequences) <= index:
            self.sequences.append(SequenceRecord())
        sequence = self.sequences[index]
        self.num_events, self.is_over = delta.num_events, self.is_over or delta.is_last
        if sequence.finish_reason is not None:
            return False
        if delta.first_token_index != len(sequence.token_ids):
            place = f"at token {delta.first_token_index}, not {len(sequence.token_ids)}"
            raise ValueError(f"sequence {index} does not continue where it was cut off: {place}")
        sequence.token_ids += ids
        sequence.text_length += delta.text_length
        sequence.finish_reason = delta.finish_reason
        if delta.fingerprint is not None:
            self.fingerprint = delta.fingerprint
        return True

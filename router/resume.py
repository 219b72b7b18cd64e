"""Resumption of a stream: the record of the output that its client has received, and the request that continues after
it.

Clients of both APIs keep a record and send it; `wire/resume_codec.py` writes it as protobuf and as JSON. Routers keep
no state for this. The text state is a function of the tokens, so the received tokens are pushed again, and text that
the client does not have yet is sent first.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, Self

from holdfast.router.events import CaughtUp, TextState
from holdfast.router.generation import OutputDelta, Usage
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.parameters import GREEDY_TEMPERATURE
from holdfast.worker.request import EngineRequest, FinishReason
from holdfast.worker.sampling_params import SamplingParams

MAX_SEQUENCES: Final = 2**16
"""Most sequences of one record: each prompt of a list, times n."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Facts that all answers to one request have in common, whichever router gives them."""

    request_id: str
    created: int
    """Seconds since 1970: the `created` time of its chunks, and the time for chat templates."""

    @property
    def text(self) -> str:
        """Text for a header, and for a record."""
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
    """Length in characters. The text may lag behind the tokens."""
    finish_reason: FinishReason | None = None
    """Set if the client has the sequence's last chunk."""


class SequenceDelta(NamedTuple):
    """New output of one sequence, as far as a record counts it."""

    first_token_index: int
    token_ids: Sequence[int]
    text_length: int
    """Length of the new text in characters."""
    finish_reason: FinishReason | None = None
    sequence_index: int = 0
    fingerprint: str | None = None
    """None: that of the output before."""
    num_events: int = 0
    """All events so far, where a stream's events are numbered."""
    is_last: bool = False
    """The stream is complete."""


@dataclass(slots=True, kw_only=True)
class ResumeRecord:
    """The output of a request that the client has."""

    sequences: list[SequenceRecord] = field(default_factory=list)
    """Records by sequence index; of missing ones the client has nothing."""
    fingerprint: str = ""
    """`ModelInfo.fingerprint` of the replica that the last tokens came from; empty if not known."""
    num_events: int = 0
    """Events that the client has, where a stream's events are numbered."""
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


def check_record(resume: ResumeRecord, request_id: str, params: SamplingParams) -> None:
    """Raises `InvalidRequestError` if a record cannot be the beginning of the request's output."""
    if len(resume.sequences) > params.n:
        raise InvalidRequestError("resume.sequences", len(resume.sequences), f"the request has n = {params.n}")
    if not request_id and params.seed is None and params.temperature >= GREEDY_TEMPERATURE:
        limit = "must be that of the stream that was cut off, as its chunks say it: the seed is derived from it"
        raise InvalidRequestError("request_id", request_id, limit)
    for index, sequence in enumerate(resume.sequences):
        if params.max_tokens is not None and len(sequence.token_ids) > params.max_tokens:
            limit = f"must have at most max_tokens = {params.max_tokens} tokens"
            raise InvalidRequestError(f"resume.sequences[{index}].token_ids", len(sequence.token_ids), limit)


def resumed(
    sibling: EngineRequest, text: TextState, resume: ResumeRecord, echo_length: int = 0
) -> tuple[EngineRequest, CaughtUp]:
    """A sequence of a request that continues after its client's output; `text` must be a new state. Raises what
    `catch_up` raises.
    """
    index = sibling.sequence_index
    caught_up = catch_up(text, resume, index, echo_length)
    return replace(sibling, output_token_ids=tuple(resume.sequence(index).token_ids)), caught_up


def catch_up(text: TextState, resume: ResumeRecord, index: int, echo_length: int = 0) -> CaughtUp:
    """Pushes the received tokens of one sequence into its new text state.

    The first `echo_length` characters of the client's text are the prompt's, which come with the first token. Raises
    `InvalidRequestError` if the tokens and the text length do not fit each other.
    """
    received, name = resume.sequence(index), f"resume.sequences[{index}]"
    if received.finish_reason is not None:
        return CaughtUp(fingerprint=resume.fingerprint, finish_reason=received.finish_reason)
    piece = text.push(received.token_ids)
    if piece.num_tokens < len(received.token_ids):
        limit = f"must be at most {piece.num_tokens} tokens: a stop string is complete there"
        raise InvalidRequestError(f"{name}.token_ids", len(received.token_ids), limit)
    least, most = (echo_length, echo_length + len(piece.text)) if received.token_ids else (0, 0)
    if not least <= received.text_length <= most:
        limit = f"must be in [{least}, {most}]: so much text is certain after {piece.num_tokens} tokens"
        raise InvalidRequestError(f"{name}.text_length", received.text_length, limit)
    num_sent = received.text_length - least
    return CaughtUp(
        sent_text=piece.text[:num_sent],
        unsent_text=piece.text[num_sent:],
        fingerprint=resume.fingerprint,
        finish_reason=FinishReason.STOP if piece.stopped else None,
    )


def check_ends(field: str, token_ids: Sequence[int], request: EngineRequest, eos_token_ids: Collection[int]) -> None:
    """Raises `InvalidRequestError` for an output that continues after a token that ends it."""
    params = request.sampling_params
    goes_on = params.ignore_eos and not request.grammar
    ends = {*params.stop_token_ids, *(() if goes_on else eos_token_ids)}
    for index, token_id in enumerate(token_ids[:-1]):
        if token_id in ends:
            raise InvalidRequestError(field, token_id, f"must end with token {index}, which ends the output")


def received_delta(
    request: EngineRequest, caught_up: CaughtUp, resume: ResumeRecord, echo: str = ""
) -> OutputDelta | None:
    """All that the client has of a sequence, as one delta; None if it has nothing of it."""
    received = resume.sequence(request.sequence_index)
    if not received.token_ids and received.finish_reason is None:
        return None
    return OutputDelta(
        request_id=request.request_id,
        first_token_index=0,
        token_ids=request.output_token_ids,
        text=echo + caught_up.sent_text,
        finish_reason=received.finish_reason,
        sequence_index=request.sequence_index,
        system_fingerprint=resume.fingerprint,
    )


def final_delta(request: EngineRequest, caught_up: CaughtUp) -> OutputDelta:
    """The last delta of a resumed sequence that was already complete."""
    num_tokens = len(request.output_token_ids)
    return OutputDelta(
        request_id=request.request_id,
        first_token_index=num_tokens,
        token_ids=(),
        text=caught_up.unsent_text,
        finish_reason=caught_up.finish_reason,
        usage=Usage(num_prompt_tokens=len(request.prompt_token_ids), num_completion_tokens=num_tokens),
        system_fingerprint=caught_up.fingerprint,
    )

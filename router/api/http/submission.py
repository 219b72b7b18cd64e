"""Submission of a request, and its answer as a stream of events, resumable after the loss of the router."""

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Final, Protocol, Self

from holdfast.router.api.http.event_stream import EVENT_IDS, LAST_EVENT_ID, EventIds
from holdfast.router.api.http.server import Connection
from holdfast.router.config import LimitsConfig
from holdfast.router.dispatch.request_stream import merged
from holdfast.router.generation import OutputDelta
from holdfast.router.request import GenerationRequest, check_request_id
from holdfast.router.requests.answer import SampledAnswer
from holdfast.router.requests.poison_watch import PoisonWatch, begin_reading
from holdfast.router.resume import Identity, ResumeRecord, SequenceDelta
from holdfast.router.router_losses import ROUTERS_LOST, routers_lost
from holdfast.router.wire.resume_codec import HOLD, REPLICAS, RESUME, MarkWriter, read_resume_json
from holdfast.worker.errors import InvalidRequestError

SUBMISSION: Final = "holdfast.submission"
"""Key of the submission in the scope of a request of this process."""

_SHORTEST_S = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """Which request this is, the number of this attempt, and what its client has of the answer."""

    identity: Identity
    attempt: int = 0
    """0: the client does not come again."""
    record: ResumeRecord | None = None
    tells_replicas: bool = False
    """A mark names the replica that generated its tokens."""
    event_ids: EventIds | None = None
    """Event ids of a client that may reconnect with the id of its last event."""
    _held: dict[int, list[tuple[OutputDelta, bytes]]] = field(default_factory=dict)
    """Deltas by choice, with their events, whose tokens the encoder holds back. No client can resume after them."""
    _marks: MarkWriter = field(default_factory=MarkWriter)

    @classmethod
    def read(cls, headers: Mapping[str, str], content: bytes, limits: LimitsConfig) -> tuple[Self, bytes]:
        """The submission, and the body without the resume record. Raises `InvalidRequestError`, naming the header."""
        attempt, tells_replicas = _number(headers, HOLD), headers.get(REPLICAS) == "1"
        if (size := _number(headers, RESUME)) and attempt:
            if size > len(content):
                raise InvalidRequestError(RESUME, size, f"must be at most the body's size, {len(content)}")
            record = read_resume_json(content[-size:], limits.max_prompt_tokens)
            assert record.identity is not None, "it was read with one"
            known = cls(identity=record.identity, attempt=attempt, record=record, tells_replicas=tells_replicas)
            return known, content[:-size]
        identity = Identity(uuid.uuid4().hex, int(time.time()))
        if not attempt and (event_ids := EventIds.asked_by(headers, identity)) is not None:
            return cls(identity=event_ids.identity, event_ids=event_ids), content
        return cls(identity=identity, attempt=attempt, tells_replicas=tells_replicas), content

    def named(self, request_id: str, limits: LimitsConfig) -> "Submission":
        """The submission with the id that a body gives its request, if any. Raises `InvalidRequestError`."""
        if not request_id or self.record is not None:
            return self
        if self.event_ids is not None:
            message = f"must not be set with {EVENT_IDS} or {LAST_EVENT_ID}: event ids contain the request's id"
            raise InvalidRequestError("request_id", request_id, message)
        check_request_id(request_id, limits)
        return replace(self, identity=Identity(request_id, self.identity.created))

    @property
    def is_held(self) -> bool:
        return self.attempt > 0

    @property
    def is_over(self) -> bool:
        """The client has the whole stream, by the id of its last event."""
        return self.event_ids is not None and self.event_ids.is_over

    @property
    def is_recomputed(self) -> bool:
        """Whether the client resumes after an event id, so that the tokens up to it are computed again."""
        return self.event_ids is not None and bool(self.event_ids.sequences)

    def until_there(self, request: GenerationRequest, first: int) -> GenerationRequest | None:
        """The request whose choices are from number `first` on, up to where the client is; None if it has nothing."""
        assert self.event_ids is not None, "it comes again"
        places, params = self.event_ids.sequences, request.sampling_params
        num_tokens = max((places[at].num_tokens for at in range(first, first + params.n) if at in places), default=0)
        if not num_tokens:
            return None
        if params.max_tokens is not None and num_tokens > params.max_tokens:
            raise InvalidRequestError(LAST_EVENT_ID, num_tokens, f"must be of at most max_tokens = {params.max_tokens}")
        return replace(request, sampling_params=params.first_tokens(num_tokens))

    def with_tokens(self, tokens: Mapping[int, tuple[int, ...]]) -> "Submission":
        """The submission with the tokens that its client has of each choice. Raises `InvalidRequestError` if these are
        not the tokens it had.
        """
        assert self.event_ids is not None, "it comes again"
        return replace(self, record=self.event_ids.record(tokens))

    @property
    def num_events(self) -> int:
        return self.record.num_events if self.record is not None else 0

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response."""
        return {HOLD: self.identity.text} if self.is_held else {}

    @property
    def marks(self) -> bool:
        """Whether events say where their client is after them."""
        return self.is_held or self.event_ids is not None

    def marked(self, events: bytes, output_delta: OutputDelta, encoder: "Encoder", *, is_last: bool) -> bytes:
        """The events of a delta, with the mark of the client's position after them.

        While the encoder holds tokens back, events wait with them, to be sent again after a loss of the router.
        """
        choice = output_delta.sequence_index
        if encoder.holds(choice):
            self._held.setdefault(choice, []).append((output_delta, events))
            return b""
        if choice in self._held:
            earlier, waiting = zip(*self._held.pop(choice), strict=True)
            output_delta, events = merged([*earlier, output_delta]), b"".join((*waiting, events))
        delta = SequenceDelta(
            first_token_index=output_delta.first_token_index,
            token_ids=output_delta.token_ids,
            text_length=len(output_delta.text),
            finish_reason=output_delta.finish_reason,
            sequence_index=choice,
            fingerprint=output_delta.system_fingerprint,
            num_events=encoder.num_events,
            is_last=is_last,
        )
        if self.event_ids is not None:
            return self.event_ids.marked(events, delta)
        return events + self._marks.line(delta, output_delta.replica_id if self.tells_replicas else "")

    def of(
        self, request: GenerationRequest, *, number: int = 0, num_prompts: int = 1, choices: int = 1
    ) -> GenerationRequest:
        """A request of the body as it is submitted: number `number` of `num_prompts`, each with this number of
        choices.
        """
        if not self.marks and not request.request_id:
            return request
        request_id, resume, timeout_s = self.identity.request_id, None, request.timeout_s
        if self.record is not None:
            resume = self.record.part(number * choices, choices)
            timeout_s = None if timeout_s is None else max(_SHORTEST_S, timeout_s - self.record.age_s)
        if num_prompts > 1:
            request = request.as_part(number, f"{request_id}.{number}")
        return replace(
            request,
            request_id=request_id,
            chat=None if request.chat is None else replace(request.chat, now_s=self.identity.created),
            timeout_s=timeout_s,
            attempt=self.attempt,
            resume=resume,
        )


class Encoder(Protocol):
    """Writes the events of one stream. Its state does not depend on how the output is cut into deltas."""

    num_events: int
    """Events so far, where events are numbered."""

    def of(self, delta: OutputDelta) -> bytes:
        """The events of a delta, whose `sequence_index` is the number of its choice. If the choice had ended before,
        only the usage is left to send.
        """

    def plain(self, delta: OutputDelta) -> bytes | None:
        """The events of a delta before the end, whose choice has begun, if they are text in a frame that was made
        before. None: `of` is to write them.
        """

    def holds(self, choice: int) -> bool:
        """Whether tokens of a choice's last delta are sent with a later one: the log-probabilities of tokens whose
        text is held back.
        """

    async def end(self) -> bytes:
        """Bytes after the last delta."""


async def answer_events(
    opening: AbstractAsyncContextManager[SampledAnswer],
    encoder_of: Callable[[SampledAnswer], Encoder],
    submission: Submission,
    connection: Connection | None,
) -> AsyncGenerator[bytes, None]:
    """The events of one answer, delta by delta; of a resumed one, the events that its client does not have. It is open
    as long as they are read.
    """
    async with opening as answer:
        encoder = encoder_of(answer)
        catch_up(encoder, answer.received, submission)
        async for events in encoded(answer, encoder, submission, [answer], connection):
            yield events


async def encoded(
    deltas: AsyncIterator[OutputDelta],
    encoder: Encoder,
    submission: Submission,
    sinks: Sequence[SampledAnswer],
    connection: Connection | None,
) -> AsyncGenerator[bytes, None]:
    """The events of one or several answers, whose deltas come with the numbers of their choices. Those of one
    answer the sink writes to the connection, where there is one, as soon as the response has begun.
    """
    num_open = len(sinks)
    take = None if connection is None or num_open > 1 else taking(sinks[0], encoder, submission, connection)
    async for delta in deltas:
        num_open -= delta.usage is not None
        events = encoder.of(delta)
        if not num_open:
            events += await encoder.end()
        if submission.marks:
            events = submission.marked(events, delta, encoder, is_last=not num_open)
        if events:
            yield events
            if take is not None:
                sinks[0].take = take


def taking(
    sink: SampledAnswer, encoder: Encoder, submission: Submission, connection: Connection
) -> Callable[[OutputDelta], bool]:
    """Writes events of plain deltas as chunks of a response that has begun, while the client keeps up."""
    plain, marks, marked = encoder.plain, submission.marks, submission.marked
    takes_chunks, write_chunk = connection.takes_chunks, connection.write_chunk

    def take(delta: OutputDelta) -> bool:
        if sink.waiter.done() or not takes_chunks() or (events := plain(delta)) is None:
            return False
        write_chunk(marked(events, delta, encoder, is_last=False) if marks else events)
        return True

    return take


def catch_up(encoder: Encoder, received: Iterable[OutputDelta], submission: Submission) -> None:
    """Advances an encoder to the client's position without sending the events that the client has."""
    for delta in received:
        encoder.of(delta)
    encoder.num_events = submission.num_events


def note_reading(watch: PoisonWatch, path: str, headers: Mapping[str, str], content: bytes) -> None:
    """A request is read from here on. A client's resume record is not part of the request's digest.

    Raises as `PoisonWatch.begin` does, and `InvalidRequestError` for a header.
    """
    num_record = _number(headers, RESUME) if HOLD in headers else 0
    own = memoryview(content)[: max(0, len(content) - num_record)]
    begin_reading(watch, path, own).suspect(routers_lost(headers.get(ROUTERS_LOST, "0")))


def _number(headers: Mapping[str, str], name: str) -> int:
    """Number in a header; 0 without the header. Raises `InvalidRequestError`."""
    value = headers.get(name, "0")
    if not value.isascii() or not value.isdecimal() or len(value) > 9:
        raise InvalidRequestError(name, value[:100], "must be a number")
    return int(value)

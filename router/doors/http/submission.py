"""Submission of a request, and its answer as a stream of events: also of a client that holds on to its stream.

What may live here: the headers and the record by which a client comes again (`router/held_stream.py`), and marks behind
events. What may not: what events say (the encoders), the HTTP server.
"""

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Protocol, Self

from holdfast.router.dispatch.output_stream import Taker
from holdfast.router.doors.http.event_stream import Shortcut
from holdfast.router.events import Deliver
from holdfast.router.held_stream import HOLD, REPLICAS, RESUME, Identity, Mark, Noted
from holdfast.router.request import GenerationRequest
from holdfast.router.requests.answer import SampledAnswer
from holdfast.worker.errors import InvalidRequestError

_SHORTEST_S = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """Which request this is, the how manieth time it is sent, and what its client has of the answer."""

    identity: Identity
    attempt: int = 0
    """0: the client does not come again."""
    noted: Noted | None = None
    tells_replicas: bool = False
    """Marks say which replica has made what they stand for."""

    @classmethod
    def read(cls, headers: Mapping[str, str], content: bytes) -> tuple[Self, bytes]:
        """With the body's own bytes. Raises `InvalidRequestError`, naming the header."""
        attempt, tells_replicas = _number(headers, HOLD), headers.get(REPLICAS) == "1"
        if (size := _number(headers, RESUME)) and attempt:
            if size > len(content):
                raise InvalidRequestError(RESUME, size, f"must be at most the body's size, {len(content)}")
            noted = Noted.read(content[-size:])
            known = cls(identity=noted.identity, attempt=attempt, noted=noted, tells_replicas=tells_replicas)
            return known, content[:-size]
        identity = Identity(uuid.uuid4().hex, int(time.time()))
        return cls(identity=identity, attempt=attempt, tells_replicas=tells_replicas), content

    @property
    def is_held(self) -> bool:
        return self.attempt > 0

    @property
    def num_events(self) -> int:
        return self.noted.num_events if self.noted is not None else 0

    @property
    def headers(self) -> dict[str, str]:
        """Of the response."""
        return {HOLD: self.identity.text} if self.is_held else {}

    def mark(self, delivery: Deliver, encoder: "Encoder", *, is_last: bool) -> bytes:
        """What stands behind the events of a delivery."""
        return Mark(
            choice=delivery.sequence_index,
            token_ids=delivery.token_ids,
            num_chars=len(delivery.text),
            finish_reason=delivery.finish_reason,
            fingerprint=delivery.fingerprint,
            num_events=encoder.num_events,
            is_last=is_last,
            replica_id=delivery.replica_id if self.tells_replicas else "",
        ).line

    def of(
        self, request: GenerationRequest, *, number: int = 0, num_prompts: int = 1, choices: int = 1
    ) -> GenerationRequest:
        """A request of the body as it is submitted now: number `number` of `num_prompts`, each of so many choices."""
        if not self.is_held:
            return request
        request_id, resume, timeout_s = self.identity.request_id, None, request.timeout_s
        if self.noted is not None:
            resume = self.noted.resume(number * choices, choices)
            timeout_s = None if timeout_s is None else max(_SHORTEST_S, timeout_s - self.noted.age_s)
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
    """Writes the events of one stream. Its state does not depend on how the output is cut into deliveries."""

    num_events: int
    """Where events are numbered: so far."""

    def of(self, delivery: Deliver) -> bytes:
        """The events of a delivery, whose `sequence_index` is the number of its choice. Of one whose choice was over
        before there is nothing to say but the usage.
        """

    def plain(self, delivery: Deliver) -> bytes | None:
        """The events of a delivery before the end, whose choice has begun, if they are text in a frame that was made
        before. None: `of` is to write them.
        """

    def end(self) -> bytes:
        """What comes after the last delivery."""


async def answer_events(
    opening: AbstractAsyncContextManager[SampledAnswer],
    encoder_of: Callable[[SampledAnswer], Encoder],
    submission: Submission,
    shortcut: Shortcut,
) -> AsyncGenerator[bytes, None]:
    """The events of one answer, delivery by delivery; of a resumed one those that its client does not have. It is open
    as long as they are read. What is plain goes by the shortcut, where there is one, while the next one is waited for.
    """
    is_held = submission.is_held
    async with opening as answer:
        encoder = encoder_of(answer)
        catch_up(encoder, answer.received, submission)
        answer.hand_to(straight(answer, encoder, shortcut, submission))
        encoded = encoder.of
        async for delivery in answer:
            events, is_last = encoded(delivery), delivery.usage is not None
            if is_last:
                events += encoder.end()
            if is_held:
                events += submission.mark(delivery, encoder, is_last=is_last)
            if events:
                yield events


def straight(answer: SampledAnswer, encoder: Encoder, shortcut: Shortcut, submission: Submission) -> Taker:
    """Writes plain deliveries while the answer's reader waits, which therefore has written all before them."""
    has_output, plain, is_held, mark = answer.has_output, encoder.plain, submission.is_held, submission.mark

    def take(delivery: Deliver) -> bool:
        waiter, connection = has_output.waiter, shortcut.connection
        if connection is None or waiter is None or waiter.done() or (events := plain(delivery)) is None:
            return False
        return connection.write_chunk(events + mark(delivery, encoder, is_last=False) if is_held else events)

    return take


async def numbered_events(
    deliveries: AsyncIterator[Deliver], num_answers: int, encoder: Encoder, submission: Submission
) -> AsyncGenerator[bytes, None]:
    """The events of one or several answers, whose deliveries come with the numbers of their choices."""
    async for delivery in deliveries:
        num_answers -= delivery.usage is not None
        events = encoder.of(delivery)
        if not num_answers:
            events += encoder.end()
        if submission.is_held:
            events += submission.mark(delivery, encoder, is_last=not num_answers)
        yield events


def catch_up(encoder: Encoder, received: Iterable[Deliver], submission: Submission) -> None:
    """Brings an encoder to where the client is: what it would say of that is not said again."""
    for delivery in received:
        encoder.of(delivery)
    encoder.num_events = submission.num_events


def _number(headers: Mapping[str, str], name: str) -> int:
    value = headers.get(name, "0")
    if not value.isascii() or not value.isdecimal() or len(value) > 9:
        raise InvalidRequestError(name, value[:100], "must be a number")
    return int(value)

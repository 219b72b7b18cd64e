"""Timeline of one request: when it was opened, and each attempt at it; and where its time went. A pure record. A
request has a handful of entries, whatever the length of its output.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter
from typing import Final

from holdfast.router.generation import RequestFigures

_sent_s: Final = attrgetter("sent_s")


class Cause(StrEnum):
    """Why an attempt has ended before its request."""

    LOST = "lost"
    """Its replica failed, or its link was cut."""
    RETURNED = "returned"
    """Its replica was full, or drained."""
    MOVED = "moved"
    """Its replica was leaving, and another one had room."""
    UNREAD = "unread"
    """Its client did not read the output."""


@dataclass(slots=True)
class AttemptTimes:
    """One attempt. Times are in seconds of the router's clock."""

    replica_id: str
    sent_s: float
    num_tokens: int
    """Tokens of the output that the attempt continues."""
    first_output_s: float | None = None
    queued_s: float = 0.0
    """Seconds that it waited in its replica before it ran, if it brought output."""
    ended_s: float | None = None
    """None: it has ended with its request, or is still running."""
    cause: Cause | None = None
    num_draft_tokens: int = 0
    """Draft tokens that were verified, as far as the replica has reported."""
    num_accepted_tokens: int = 0
    """Draft tokens among them that were accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """Durations of a request's phases in seconds. Their sum is its duration."""

    queue_s: float = 0.0
    """Seconds in the router, until it was first sent to a replica."""
    replica_queue_s: float = 0.0
    """Seconds in its first replica, until it first ran."""
    prefill_s: float = 0.0
    """Seconds from there to its first output."""
    decode_s: float = 0.0
    failover_s: float = 0.0
    """Seconds from each end of an attempt to the first output of the next one; and all of an attempt without output."""
    suspended_s: float = 0.0
    """Until it was sent to a replica again after its client had not read."""


@dataclass(slots=True)
class Timeline:
    """Filled by the dispatcher, read by statistics."""

    opened_s: float = 0.0
    attempts: list[AttemptTimes] = field(default_factory=list)
    num_cached_tokens: int = 0
    """Tokens of the prompt that were cached for the first attempt that brought a token."""
    num_disk_tokens: int = 0
    """Tokens among them whose blocks came from the disk."""

    @property
    def num_failovers(self) -> int:
        """Times it was sent to a replica again, except after its client had not read."""
        return sum(one.cause is not Cause.UNREAD for one in self.attempts[:-1])

    def figures(self, ended_s: float) -> RequestFigures:
        """Figures of a request that has ended, for its client."""
        phases, first_token_s = self.phases(ended_s), ended_s
        num_draft_tokens = num_accepted_tokens = 0
        for one in self.attempts:
            if one.first_output_s is not None:
                first_token_s = min(first_token_s, one.first_output_s)
            num_draft_tokens += one.num_draft_tokens
            num_accepted_tokens += one.num_accepted_tokens
        return RequestFigures(
            queue_s=phases.queue_s + phases.replica_queue_s,
            prompt_s=phases.prefill_s,
            first_token_s=first_token_s - self.opened_s,
            decode_s=phases.decode_s,
            total_s=ended_s - self.opened_s,
            num_disk_tokens=self.num_disk_tokens,
            num_draft_tokens=num_draft_tokens,
            num_accepted_tokens=num_accepted_tokens,
            num_attempts=len(self.attempts),
        )

    def phases(self, ended_s: float) -> Phases:
        """Phases of a request that has ended."""
        if not self.attempts:
            return Phases(queue_s=ended_s - self.opened_s)
        first, queue_s = self.attempts[0], self.attempts[0].sent_s - self.opened_s
        decode_s = suspended_s = replica_queue_s = prefill_s = 0.0
        for one, again_s in zip(self.attempts, [*map(_sent_s, self.attempts[1:]), ended_s], strict=True):
            if one.first_output_s is not None:
                decode_s += (ended_s if one.ended_s is None else one.ended_s) - one.first_output_s
            if one.cause is Cause.UNREAD:
                suspended_s += again_s - (one.ended_s or 0.0)
        if first.first_output_s is not None:
            replica_queue_s = min(first.queued_s, first.first_output_s - first.sent_s)
            prefill_s = first.first_output_s - first.sent_s - replica_queue_s
        elif len(self.attempts) == 1 and first.ended_s is None:
            prefill_s = ended_s - first.sent_s
        known_s = queue_s + replica_queue_s + prefill_s + decode_s + suspended_s
        return Phases(
            queue_s=queue_s,
            replica_queue_s=replica_queue_s,
            prefill_s=prefill_s,
            decode_s=decode_s,
            failover_s=max(0.0, ended_s - self.opened_s - known_s),
            suspended_s=suspended_s,
        )


def longest(timelines: Iterable[Timeline]) -> Timeline | None:
    """The timeline with the most attempts among a request's siblings; None if there are none."""
    return max(timelines, key=lambda one: len(one.attempts), default=None)

"""Poison watch of a router: finds the request that ends routers while they read it. A core without IO.

What `router/dispatch/failures.py` is for replicas, this is for routers, with the same levels. A request is *read* from
its last byte until it is admitted: decoded, checked, tokenized. A router notes each request that it reads in a journal
that outlives the process (`Journal`). A process that finds the journal of an ended router learns which requests were
being read then:

    one router lost     the request is a suspect, and runs on trial: no other suspect is read at the same time
    two, or proof       it is convicted, and refused

Proof is a loss on trial, and the end of a router that hung, or had no memory, while it read nothing else. A suspect
that is admitted is cleared. The connections of a process close before its end is seen: a request that is sent again in
between has to wait while the journal of that process has it (`is_read_elsewhere`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, Protocol, TypeAlias

from holdfast.router.router_losses import MAX_ROUTERS_LOST, RouterLoss
from holdfast.worker.errors import OnTrialError, RequestQuarantinedError
from holdfast.worker.request import PoisonRisk

WHOLE_BYTES: Final = 2**18
"""Messages up to this size are hashed whole. Of larger ones this number of bytes at both ends and pieces between are
hashed: no event loop waits for 32 MB."""

PIECES: Final = 64  # hashed between the ends
PIECE_BYTES: Final = 2**12

_SUBMISSION_FIELDS: Final = frozenset((2, 7, 10, 11))
"""Fields of `GenerateRequest` that change when it is sent again: `request_id`, `timeout_ms`, `resume`, `attempt`."""

_MAX_FIELDS: Final = 64  # of a message that are looked at


Part: TypeAlias = bytes | memoryview


def request_digest(kind: str, *parts: Part) -> str:
    """Digest of a request to the path or method `kind`, with these bytes. Nothing is copied."""
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
    """Adds both ends of one of several parts, and pieces between them."""
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
    """A serialized `GenerateRequest` without what changes when it is sent again. A value that is not a digest is passed
    on unchanged.
    """
    view = memoryview(message)
    try:
        kept = [(begin, end) for number, begin, end in _fields(message) if number not in _SUBMISSION_FIELDS]
    except (IndexError, ValueError):
        return [view]
    return [view[begin:end] for begin, end in kept]


def _fields(message: bytes) -> Iterator[tuple[int, int, int]]:
    """(number, begin, end) of each field of a message. Raises `IndexError`, `ValueError` for malformed bytes."""
    at, size = 0, len(message)
    for _ in range(_MAX_FIELDS):
        if at == size:
            return
        begin = at
        tag, at = message[at], at + 1
        if tag > 127:
            tag, at = _varint(message, begin)
        kind = tag & 7
        if kind == 2:  # bytes
            length, at = message[at], at + 1
            if length > 127:
                length, at = _varint(message, at - 1)
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


FORGET_S: Final = 600.0
"""Seconds after the last loss until a request is cleared of suspicion."""

MAX_LOSSES: Final = 1024
"""Most losses that are known at a time; older ones are forgotten first."""

RETRY_S: Final = 0.05
"""When to come again while another suspect is on trial: it is read within that time, or has ended the router."""

HUNG_S: Final = 2.0
"""A router that has not turned its loop for so long when it ended has hung."""


class Journal(Protocol):
    """Journal of a router's reads, which can be read after the process has ended in any way."""

    def enter(self, digest: str, poison_risk: PoisonRisk, *, is_known_good: bool) -> int:
        """Notes a request that is read from here on, and returns the number of its place."""

    def clear(self, place: int) -> None:
        """Clears the entry of a request that is no longer being read."""


class NoJournal:
    """Stand-in for a router without a crash journal."""

    def enter(self, digest: str, poison_risk: PoisonRisk, *, is_known_good: bool) -> int:
        return 0

    def clear(self, place: int) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One request in the journal of a router that has ended."""

    digest: str
    poison_risk: PoisonRisk = PoisonRisk.NONE
    is_known_good: bool = False


def losses_of(entries: Sequence[Entry], router: str, now: float, *, is_own_fault: bool) -> tuple[RouterLoss, ...]:
    """Losses for the requests that a router was reading when it ended.

    `is_own_fault`: it hung, or had no memory; it was not killed for another reason. One on trial is the cause, and
    the others are not even suspected.
    """
    on_trial = {entry.digest: entry for entry in entries if entry.poison_risk is PoisonRisk.ON_TRIAL}
    suspects = on_trial or {entry.digest: entry for entry in entries}
    is_proof = bool(on_trial) or (is_own_fault and len(suspects) == 1)
    return tuple(
        RouterLoss(digest=one.digest, router=router, at_s=now, is_proof=is_proof, is_first=one.is_known_good)
        for one in suspects.values()
    )


class PoisonWatch:
    """One router's state of requests that routers were lost with, and its current trial."""

    def __init__(self, journal: Journal | None = None, now: Callable[[], float] = lambda: 0.0) -> None:
        """`now`: seconds since 1970, on all machines of the cluster about alike, and without jumps."""
        self.journal: Journal = journal or NoJournal()
        self.now = now
        self._losses: dict[str, dict[str, RouterLoss]] = {}
        """Losses by digest and router."""
        self._cleared: dict[tuple[str, str], float] = {}
        """Losses that are void here, because the request was admitted after them, and when it was."""
        self._is_trial_on = False
        self.num_refused = 0
        self.num_trials = 0
        self.on_change: Callable[[], None] = lambda: None
        """Called when there are new losses."""
        self.is_read_elsewhere: Callable[[str, float], bool] = lambda digest, silent_s: False
        """Whether a router that was not seen to end reads the request, and has not turned its loop for `silent_s`."""

    @property
    def is_on(self) -> bool:
        """Whether requests are recognized: there is a journal, or something to look for."""
        return bool(self._losses) or not isinstance(self.journal, NoJournal)

    # --- known losses ---

    def note(self, losses: Iterable[RouterLoss]) -> None:
        """Merges losses that this router has found, or that other routers have reported. Known losses have no
        effect.
        """
        now, is_news = self.now(), False
        for loss in losses:
            known = self._losses.get(loss.digest, {})
            if loss.router in known or self._is_void(loss, known.values(), now):
                continue
            self._losses[loss.digest] = {loss.router: loss} if loss.is_first else {**known, loss.router: loss}
            is_news = True
        if is_news:
            if sum(map(len, self._losses.values())) > MAX_LOSSES:
                self._forget(now)
            self.on_change()

    def _is_void(self, loss: RouterLoss, known: Iterable[RouterLoss], now: float) -> bool:
        is_cleared = (loss.digest, loss.router) in self._cleared
        is_before = any(one.is_first and one.at_s >= loss.at_s for one in known)
        return is_cleared or is_before or now - loss.at_s > FORGET_S

    def known_losses(self) -> tuple[RouterLoss, ...]:
        """Losses to report to other routers."""
        self._forget(self.now())
        return tuple(sorted(loss for known in self._losses.values() for loss in known.values()))

    def _forget(self, now: float) -> None:
        """Forgets old losses, and the oldest of too many."""
        newest = sorted((max(one.at_s for one in known.values()), digest) for digest, known in self._losses.items())
        num_too_many = max(0, sum(map(len, self._losses.values())) - MAX_LOSSES)
        for number, (at_s, digest) in enumerate(newest):
            if now - at_s > FORGET_S or number < num_too_many:
                del self._losses[digest]
        for key in [key for key, at_s in self._cleared.items() if now - at_s > FORGET_S]:
            del self._cleared[key]

    # --- requests that are read ---

    def begin(self, digest: str) -> "Reading":
        """A request is read from here on.

        Raises `RequestQuarantinedError` for a convicted request, and `OnTrialError` for a suspect while another one is
        on trial, and for a request that may be the cause of another router's hang.
        """
        self.await_others(digest, HUNG_S)
        known = self._losses.get(digest)
        if known is None:
            return Reading(self, digest, PoisonRisk.NONE)
        if len(known) >= MAX_ROUTERS_LOST or any(one.is_proof for one in known.values()):
            self.num_refused += 1
            raise RequestQuarantinedError(_convicted(len(known)))
        self.begin_trial()
        return Reading(self, digest, PoisonRisk.ON_TRIAL)

    def await_others(self, digest: str, silent_s: float) -> None:
        """Raises `OnTrialError` while a router that has been silent for so long reads the same request."""
        if self.is_read_elsewhere(digest, silent_s):
            raise OnTrialError("another router is reading this request, which may crash it", RETRY_S)

    def begin_trial(self) -> None:
        """Raises `OnTrialError` while another suspect is on trial."""
        if self._is_trial_on:
            message = "another request that may have crashed a router is being read here; they are read one at a time"
            raise OnTrialError(message, RETRY_S)
        self._is_trial_on = True
        self.num_trials += 1

    def is_known_good(self, digest: str) -> bool:
        """Whether it was read here after a loss, and this router lives."""
        return bool(self._cleared) and any(cleared == digest for cleared, _ in self._cleared)

    def end_trial(self, digest: str, *, is_cleared: bool) -> None:
        """The suspect is no longer being read."""
        self._is_trial_on = False
        if is_cleared and (known := self._losses.pop(digest, None)) is not None:
            self._cleared |= dict.fromkeys(((digest, router) for router in known), self.now())
            self.on_change()


class Reading:
    """One request while it is read. Ended by `admitted`, or by `end` if it is refused, whichever is first."""

    __slots__ = ("_num_left", "_place", "_watch", "digest", "poison_risk")

    def __init__(self, watch: PoisonWatch, digest: str, poison_risk: PoisonRisk) -> None:
        self.digest = digest
        self.poison_risk = poison_risk
        self._watch: PoisonWatch | None = watch
        self._num_left = 1
        self._place = watch.journal.enter(digest, poison_risk, is_known_good=watch.is_known_good(digest))

    def suspect(self, num_lost: int) -> None:
        """Notes the number of routers that its client reports as lost with it. Raises `OnTrialError` as
        `PoisonWatch.begin` does.
        """
        watch = self._watch
        if watch is None or not num_lost or self.poison_risk is not PoisonRisk.NONE:
            return
        watch.await_others(self.digest, 0.0)
        watch.begin_trial()
        watch.journal.clear(self._place)
        self.poison_risk = PoisonRisk.ON_TRIAL
        self._place = watch.journal.enter(self.digest, self.poison_risk, is_known_good=False)

    def expect(self, num_requests: int) -> None:
        """Notes the number of requests in the message; each of them is admitted."""
        self._num_left = num_requests

    def admitted(self) -> None:
        """Counts one admitted request; the last one ends the reading as harmless."""
        self._num_left -= 1
        if self._num_left == 0:
            self.end(is_cleared=True)

    def end(self, *, is_cleared: bool) -> None:
        """`is_cleared`: it was read to its end, admitted or refused, without a crash of the router."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.journal.clear(self._place)
            if self.poison_risk is PoisonRisk.ON_TRIAL:
                watch.end_trial(self.digest, is_cleared=is_cleared)


CURRENT_READING: Final[ContextVar[Reading | None]] = ContextVar("holdfast_reading", default=None)
"""Request that the running task is reading, if any."""


def begin_reading(watch: PoisonWatch, kind: str, *content: Part) -> Reading:
    """A request to the path or method `kind` is read by the running task from here on. Raises as `PoisonWatch.begin`.

    `content` are the bytes by which it is recognized when it is sent again.
    """
    reading = watch.begin(request_digest(kind, *content) if watch.is_on else "")
    CURRENT_READING.set(reading)
    return reading


def expect_prompts(num_prompts: int) -> None:
    """Notes the number of prompts of the request that the running task reads."""
    if (reading := CURRENT_READING.get()) is not None:
        reading.expect(num_prompts)


def end_reading(error: BaseException | None = None) -> None:
    """Ends the running task's reading, with an error if given."""
    if (reading := CURRENT_READING.get()) is not None:
        reading.end(is_cleared=error is None or isinstance(error, Exception))
        CURRENT_READING.set(None)


def _convicted(num_lost: int) -> str:
    routers = "a router has ended" if num_lost == 1 else f"{num_lost} routers have ended, one after the other,"
    refused = f"it is refused for {FORGET_S / 60:g} minutes, since it may end all of them"
    return f"{routers} while reading this request; {refused}"

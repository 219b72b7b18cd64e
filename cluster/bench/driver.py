"""Driver of a load: sends sessions when they are due, and records what came when.

Without coordinated omission: in an open loop a request is due at its scheduled time, whatever came of the requests
before it, and its latencies count from then, even where it had to wait on our side for one of `max_in_flight` places or
for the processor.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from holdfast.cluster.bench.sender import Ask, Sender, SendFailed
from holdfast.cluster.bench.summary import RequestRecord
from holdfast.cluster.bench.workload import Calibration, PromptTexts, Session
from holdfast.worker.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadLimits:
    """Limits on how sessions are sent."""

    concurrency: int | None = None
    """Users of a closed loop; None: an open loop, by the sessions' own times."""
    max_in_flight: int = 4096
    """Most sessions in flight in an open loop. Sessions above it wait, and the wait counts."""
    duration_s: float | None = None
    """A closed loop begins no session after it. None: until the sessions are over."""
    think_s: float = 0.0
    """Between an answer and the next turn of its session."""
    timeout_s: float | None = None
    """After which a request is given up, from when it was sent."""


class Driver:
    """One run. `on_change(due, ended)` gets the number of requests that have been due and the number that have
    ended.
    """

    def __init__(
        self,
        sender: Sender,
        texts: PromptTexts,
        limits: LoadLimits,
        on_change: Callable[[int, int], None] = lambda due, ended: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`clock` is in seconds; an event loop's own time is too coarse, which uvloop counts in milliseconds."""
        self._sender = sender
        self._texts = texts
        self._limits = limits
        self._on_change = on_change
        self._clock = clock
        self._num_ended = 0
        self.records: list[RequestRecord] = []

    async def run(self, sessions: Iterable[Session]) -> list[RequestRecord]:
        """The records of all requests, in the order in which they were due."""
        self._began_s = self._clock()
        async with asyncio.TaskGroup() as tasks:
            if self._limits.concurrency is not None:
                shared = iter(sessions)
                for _ in range(self._limits.concurrency):
                    tasks.create_task(self._user(shared))
            else:
                places = asyncio.Semaphore(self._limits.max_in_flight)
                for session in sessions:
                    await self._sleep_until(session.start_s)
                    tasks.create_task(self._session(session, session.start_s, places))
        return sorted(self.records, key=lambda record: record.due_s)

    @property
    def ended(self) -> list[RequestRecord]:
        """The records of the requests that had ended when a run was interrupted, in the order in which they were
        due.
        """
        over = (record for record in self.records if record.end_s and not record.is_cut)
        return sorted(over, key=lambda record: record.due_s)

    # --- inside ---

    def _now(self) -> float:
        return self._clock() - self._began_s

    async def _sleep_until(self, time_s: float) -> None:
        if (left := time_s - self._now()) > 0:
            await asyncio.sleep(left)

    async def _user(self, sessions: Iterator[Session]) -> None:
        """A user of a closed loop: the next session begins when the one before is over."""
        limit_s = self._limits.duration_s
        while limit_s is None or self._now() < limit_s:
            session = next(sessions, None)
            if session is None:
                return
            await self._session(session, self._now())

    async def _session(self, session: Session, due_s: float, places: asyncio.Semaphore | None = None) -> None:
        spoken: list[str] = []
        for index, turn in enumerate(session.turns):
            spoken.append(self._texts.text(session, index))
            record = RequestRecord(session=session.number, turn=index, due_s=due_s)
            self.records.append(record)
            self._on_change(len(self.records), self._num_ended)
            if places is None:
                text = await self._request(record, Ask(tuple(spoken), turn.num_output_tokens))
            else:
                async with places:
                    text = await self._request(record, Ask(tuple(spoken), turn.num_output_tokens))
            self._num_ended += 1
            self._on_change(len(self.records), self._num_ended)
            if text is None or index == len(session.turns) - 1:
                return
            spoken.append(text)
            due_s = self._now() + self._limits.think_s + session.turns[index + 1].pause_s
            await self._sleep_until(due_s)

    async def _request(self, record: RequestRecord, ask: Ask) -> str | None:
        """The answer's text; None: it failed, and with it its session."""
        piece_s, now, began_s = record.piece_s, self._clock, self._began_s

        def on_piece(*, is_silent_end: bool = False) -> None:
            if is_silent_end:
                record.silent_end_s = now() - began_s
            else:
                piece_s.append(now() - began_s)

        record.sent_s = self._now()
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                reply = await self._sender.send(ask, on_piece)
        except TimeoutError:
            record.error, record.message = "timeout", f"no end within {self._limits.timeout_s:g} s"
        except asyncio.CancelledError:
            record.is_cut = True
            raise
        except SendFailed as failed:
            record.error, record.message = failed.kind, failed.message
        else:
            record.num_output_tokens = len(piece_s) if reply.num_output_tokens is None else reply.num_output_tokens
            record.num_prompt_tokens = reply.num_prompt_tokens
            record.num_cached_tokens = reply.num_cached_tokens
            if not piece_s:
                record.error, record.message = "no output", "the answer ended without any"
            return reply.text
        finally:
            record.end_s = self._now()
        return None


_FEW_WORDS: Final = 8
_MANY_WORDS: Final = (192, 32)
"""The second is for models of a short context."""
_PATIENCE_S: Final = 120.0
_WAY_OUT: Final = (
    "is the server up there, and does it take --protocol and --model? `holdfast serve` starts a Holdfast server"
)


async def calibrate(sender: Sender, seed: int) -> Calibration:
    """One word is one token where the server does not count. Raises `ConfigurationError` if it does not answer."""
    texts = PromptTexts(seed, Calibration())
    few = await _num_tokens(sender, texts, _FEW_WORDS)
    if few is None:
        return Calibration()
    for num_words in _MANY_WORDS:
        try:
            many = await _num_tokens(sender, texts, num_words)
        except ConfigurationError:
            if num_words == _MANY_WORDS[-1]:
                raise
        else:
            return Calibration() if many is None else Calibration.of([(_FEW_WORDS, few), (num_words, many)])
    raise AssertionError


async def _num_tokens(sender: Sender, texts: PromptTexts, num_words: int) -> int | None:
    ask = Ask((texts.words(f"probe {num_words}", num_words),), 1)
    try:
        async with asyncio.timeout(_PATIENCE_S):
            return (await sender.send(ask, lambda *, is_silent_end=False: None)).num_prompt_tokens
    except TimeoutError:
        message = f"no answer within {_PATIENCE_S:g} s"
    except SendFailed as failed:
        message = f"{failed.kind}: {failed.message}"
    raise ConfigurationError(f"--server: a first request of {num_words} words has failed ({message}); {_WAY_OUT}")

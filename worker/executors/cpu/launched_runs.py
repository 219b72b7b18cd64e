"""Launched runs of a decoder: steps that a thread of the library runs, in turn, until they are collected."""

from collections import deque
from dataclasses import dataclass

from holdfast.worker.executors.cpu.decoder import Decoder
from holdfast.worker.executors.cpu.exchange import check_step
from holdfast.worker.executors.cpu.prefault import KvPrefault
from holdfast.worker.executors.cpu.running_step import RunningStep


@dataclass(slots=True, eq=False)
class LaunchedRun:
    """A step that was launched."""

    decoder: Decoder
    step: RunningStep
    ahead: KvPrefault
    """The thread that makes memory of the cache ready, between steps."""
    last_block: int
    """The last one that it uses."""
    outcome: int | None = None
    """The library's; None: it was not awaited."""


class LaunchedRuns:
    """The steps in flight, the oldest first."""

    def __init__(self) -> None:
        self._in_flight: deque[LaunchedRun] = deque()
        self._is_awaiting = False

    def __bool__(self) -> bool:
        return bool(self._in_flight)

    def launch(self, decoder: Decoder, step: RunningStep, ahead: KvPrefault, last_block: int) -> LaunchedRun:
        """Starts a step. Raises `ReplicaError` where it cannot be run."""
        decoder.launch(step)
        self._in_flight.append(launched := LaunchedRun(decoder, step, ahead, last_block))
        if ahead.is_on:
            ahead.begin_step()
        return launched

    def collect(self, launched: LaunchedRun) -> None:
        """Waits for the oldest one, which this is. Raises `ReplicaError` if it has failed."""
        oldest = self._in_flight.popleft()
        assert oldest is launched, "steps are collected in the order of their launches"
        try:
            check_step(self._landed(launched))
        finally:
            if launched.ahead.is_on:
                launched.ahead.end_step(launched.last_block)

    def land(self) -> None:
        """Waits for all, which are collected later or never. Returns at once where another thread waits for one."""
        if not self._is_awaiting:
            for launched in self._in_flight:
                self._landed(launched)

    def _landed(self, launched: LaunchedRun) -> int:
        """Its outcome, once it is there. Those launched before it have landed."""
        if launched.outcome is None:
            self._is_awaiting = True
            try:
                launched.outcome = launched.decoder.outcome_of_launched()
            finally:
                self._is_awaiting = False
        return launched.outcome

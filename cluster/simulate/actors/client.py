"""Simulated client: one request, followed to its end across the deaths of routers.

Everything it receives is compared at once with the expected completion (`cluster/simulate/oracle/oracle.py`).
"""

import random
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final

from holdfast.cluster.client.retry_policy import RetryPolicy
from holdfast.cluster.simulate.actors.messages import Admitted, Generate, Straggler
from holdfast.cluster.simulate.actors.router import SimulatedRouter
from holdfast.cluster.simulate.kernel.network import Connection, Network
from holdfast.cluster.simulate.kernel.timeline import Violation, require
from holdfast.cluster.simulate.oracle.oracle import ExpectedCompletion, expected_completion
from holdfast.router.dispatch.request_state import siblings
from holdfast.router.events import Fail
from holdfast.router.generation import OutputDelta, Usage
from holdfast.router.resume import ResumeRecord, SequenceDelta, SequenceRecord
from holdfast.worker.errors import (
    CapacityError,
    DeadlineExceededError,
    HoldfastError,
    OverloadedError,
    ReplicaError,
    RequestAbortedError,
    RequestQuarantinedError,
    RequestSupersededError,
    UnknownModelError,
    VersionGoneError,
)
from holdfast.worker.model_info import version_of
from holdfast.worker.request import EngineRequest

SITE: Final = "clients"
PATIENCE_S: Final = 120.0
"""`connect_s` and `reconnect_s` of its retries: longer than any fault keeps all routers away."""
RETRY_S: Final = 0.2
"""After which the caller of a client comes again, where the client itself gives up."""
HELD_UP_SHARE: Final = 0.03
HELD_UP_S: Final = 1.0
"""`HELD_UP_SHARE` of the calls are delayed, for `HELD_UP_S` at most; their clients submit again long before that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """A request and how its client will behave."""

    request: EngineRequest
    arrival_s: float
    timeout_s: float
    cancel_after: int | None
    """The client cancels at this number of tokens; None: it stays to the end."""
    is_poison: bool = False
    """Whether the request kills the replicas that run it."""
    grace_s: float = 0.0
    """Seconds after its timeout that the client still waits for the router to report it."""


@dataclass(slots=True)
class CheckedSequence:
    """One completion: its received and its expected output."""

    expected: ExpectedCompletion
    record: SequenceRecord
    text: str = ""

    @property
    def num_tokens(self) -> int:
        return len(self.record.token_ids)

    @property
    def is_finished(self) -> bool:
        return self.record.finish_reason is not None


class SimulatedClient:
    """One request's client. `outcome` says how it ended."""

    def __init__(
        self,
        planned: PlannedRequest,
        network: Network,
        routers: list[SimulatedRouter],
        rng: random.Random,
        max_model_len: int,
    ) -> None:
        self.planned = planned
        self.outcome: str | None = None
        """`completed`, `cancelled`, `expired`, `shed` or `quarantined`; None while it goes on."""
        self.num_connections = 0
        self.is_notified = False
        """Whether its router has reported that its time is up, or that it may come again only after that."""
        self.stragglers: list[Straggler] = []
        """Calls of the client that were held up on their way."""
        self._network = network
        self._timeline = network.timeline
        self._routers = routers
        self._router = rng.randrange(len(routers))
        self._max_model_len = max_model_len
        self._sequences: list[CheckedSequence] = []
        self._record = ResumeRecord()
        self.num_restarted = 0
        """Times that its version was gone before the end."""
        self._is_new = True
        """Whether there is nothing to resume."""
        self._connection: Connection | None = None
        self._deadline_s = 0.0
        self.clock_error_s = 0.0
        """Error of the routers' clocks in seconds: a deadline may come this much early."""
        self.hopeless_s = 0.0
        """Time that its prompt may take: this long before the deadline a replica may expire it as hopeless."""

    def begin(self) -> None:
        """The request is made."""
        now = self._timeline.now
        self._deadline_s = now + self.planned.timeout_s
        self._retry_policy = RetryPolicy(
            num_routers=len(self._routers),
            connect_s=PATIENCE_S,
            reconnect_s=PATIENCE_S,
            timeout_s=self.planned.timeout_s,
            draw=self._network.rng.random,
            now=now,
        )
        self._timeline.at(self._deadline_s + self.planned.grace_s, self._time_up)
        self._expect_all()
        if self.planned.cancel_after == 0:
            self._timeline.after(0.05, self._leave)
        self._connect()

    @property
    def num_tokens(self) -> int:
        """Received, of all completions."""
        return sum(sequence.num_tokens for sequence in self._sequences)

    @property
    def is_falsely_quarantined(self) -> bool:
        """Whether the request was quarantined although it is not poisonous."""
        return self.outcome == "quarantined" and not self.planned.is_poison

    def _expect_all(self) -> None:
        every = [expected_completion(sibling, self._max_model_len) for sibling in siblings(self.planned.request)]
        self._record, self._is_new = ResumeRecord(sequences=[SequenceRecord() for _ in every]), True
        self._sequences = list(map(CheckedSequence, every, self._record.sequences))

    # --- as an endpoint ---

    def receive(self, connection: Connection, message: Any) -> None:
        """Takes a message of the router's. Raises Violation for one after the end."""
        if self.outcome is not None:
            raise Violation(f"{self}: {message} came after the end")
        match message:
            case Admitted():
                self._retry_policy.note_taken()
            case OutputDelta():
                self._retry_policy.note_news()
                self._take(message)
            case Fail():
                self._fail(message.error)
                if connection is self._connection:
                    self._connection = None  # it was answered: that its router hangs up then is no loss

    def closed(self, connection: Connection) -> None:
        if self.outcome is not None or connection is not self._connection:
            return
        try:
            if connection.has_broken:
                self._retry_policy.note_router_lost()
        except RequestQuarantinedError:
            self._over("quarantined")
        else:
            self._retry()

    def __str__(self) -> str:
        return self.planned.request.request_id

    # --- inside ---

    def _connect(self) -> None:
        if self.outcome is not None:
            return
        self.num_connections += 1
        router = self._routers[self._router]
        path = self._network.path(SITE, router.site)
        call = Generate(
            request=self.planned.request,
            resume=self._resume(),
            timeout_s=self._left_s(),
            attempt=self.num_connections,
            num_routers_lost=self._retry_policy.num_routers_lost,
        )
        self._is_new = False
        if not self.planned.is_poison and self._network.rng.random() < HELD_UP_SHARE:
            self._leave_behind(Straggler(call, self._network, path, router))
        else:
            self._connection = Connection(self._network, path, (self, router))
            self._retry_policy.note_sent()
            self._connection.send(self, call)

    def _leave_behind(self, straggler: Straggler) -> None:
        """A call is delayed: submits again at the same router, as a rule before the delayed call arrives."""
        self.stragglers.append(straggler)
        self._timeline.after(self._network.rng.uniform(RETRY_S, HELD_UP_S), straggler.arrive)
        self._timeline.after(RETRY_S, self._connect)

    def _retry(self, hint_s: float | None = None) -> bool:
        """Goes on as a client does that has lost its router, or was sent away for a while. False: it gives up."""
        pause_s = self._retry_policy.pause_s(self._timeline.now, hint_s)
        if pause_s is not None:  # else its time is up before it can come again
            self._reconnect(pause_s)
        return pause_s is not None

    def _reconnect(self, after_s: float = RETRY_S) -> None:
        """Goes on at the next router."""
        if self._connection is not None:
            self._connection.close(self)
            self._connection = None
        self._router = (self._router + 1) % len(self._routers)
        self._timeline.after(after_s, self._connect)

    def _resume(self) -> ResumeRecord | None:
        """The current resume record: the call may arrive when more output has come."""
        return None if self._is_new else deepcopy(self._record)

    def _left_s(self) -> float:
        return max(0.0, self._deadline_s - self._timeline.now)

    def _take(self, delta: OutputDelta) -> None:
        sequence = self._sequences[delta.sequence_index]
        if sequence.is_finished:
            is_news = bool(delta.token_ids or delta.text)
            require(not is_news, f"{self}: {delta} came after the end of that completion")
        else:
            self._take_news(sequence, delta)
        if delta.usage is not None:
            self._check_end(delta.usage)
            self._over("completed")
        elif self.planned.cancel_after is not None and self.num_tokens >= self.planned.cancel_after:
            self._leave()

    def _take_news(self, sequence: CheckedSequence, delta: OutputDelta) -> None:
        expected = sequence.expected
        first, end = delta.first_token_index, delta.first_token_index + len(delta.token_ids)
        before = self._record.fingerprint
        self._merge(delta)
        if delta.token_ids != expected.token_ids[first:end]:
            raise Violation(f"{self}: tokens {delta.token_ids} at {first}, expected {expected.token_ids}")
        self._check_reports(expected, delta)
        sequence.text += delta.text
        if before and version_of(delta.system_fingerprint) != version_of(before):
            raise Violation(f"{self}: {delta} is of another version than the earlier output: {before}")
        if delta.replayed_without_guarantee:
            raise Violation(f"{self}: {delta} says that it may differ")
        if not expected.text.startswith(sequence.text):
            raise Violation(f"{self}: text {sequence.text!r}, expected {expected.text!r}")
        if delta.finish_reason is not None:
            require(end == len(expected.token_ids), f"{self}: {end} tokens of {expected}")
            require(sequence.text == expected.text, f"{self}: text {sequence.text!r} of {expected}")
            reason = delta.finish_reason
            require(reason is expected.finish_reason, f"{self}: ended by {reason}, expected {expected}")

    def _merge(self, output_delta: OutputDelta) -> None:
        delta = SequenceDelta(
            first_token_index=output_delta.first_token_index,
            token_ids=output_delta.token_ids,
            text_length=len(output_delta.text),
            finish_reason=output_delta.finish_reason,
            sequence_index=output_delta.sequence_index,
            fingerprint=output_delta.system_fingerprint,
        )
        try:
            self._record.merge(delta)
        except ValueError as error:
            raise Violation(f"{self}: {error}") from None

    def _check_reports(self, expected: ExpectedCompletion, delta: OutputDelta) -> None:
        """Checks that each token comes with its logprobs, and those of the prompt once, with the first."""
        first, end = delta.first_token_index, delta.first_token_index + len(delta.token_ids)
        if delta.logprobs != expected.logprobs[first:end]:
            raise Violation(f"{self}: logprobs {delta.logprobs} at {first}, expected {expected.logprobs[first:end]}")
        of_prompt = (None, *expected.prompt_logprobs) if first == 0 and expected.prompt_logprobs else ()
        if delta.prompt_logprobs != of_prompt:
            raise Violation(f"{self}: prompt logprobs {delta.prompt_logprobs} at {first}, expected {of_prompt}")

    def _check_end(self, usage: Usage) -> None:
        """Checks the usage: it counts the prompt once, and the tokens of all completions."""
        for number, sequence in enumerate(self._sequences):
            require(sequence.is_finished, f"{self}: the answer is over, and completion {number} is not")
        counts = (usage.num_prompt_tokens, usage.num_completion_tokens)
        require(counts == (len(self.planned.request.prompt_token_ids), self.num_tokens), f"{self}: {usage}")

    def _fail(self, error: HoldfastError) -> None:
        match error:
            case OverloadedError():
                self.is_notified = True
                self._retry(error.retry_after_s)
            case CapacityError() if self.num_connections > 1:
                # It has come before, and may have output.
                if not self._retry(error.retry_after_s):
                    self.is_notified = True
                    if self._left_s() > PATIENCE_S:
                        self._over("shed")
            case CapacityError():
                require(not self.num_tokens, f"{self}: {error}, after {self.num_tokens} tokens")
                self._over("shed")
            case DeadlineExceededError():
                is_due = self._timeline.now + self.clock_error_s + self.hopeless_s >= self._deadline_s
                require(is_due, f"{self}: {error}, {self._left_s():.3f} s before its time")
                self.is_notified = True
                self._over("expired")
            case RequestQuarantinedError():
                self._over("quarantined")
            case RequestSupersededError():
                raise Violation(f"{self}: {error}, and it was the newest")
            case VersionGoneError():
                require(self.num_tokens > 0, f"{self}: {error}, and it could have begun on any version")
                self.num_restarted += 1
                self._expect_all()
                self._reconnect()
            case ReplicaError() | RequestAbortedError():
                self._retry(error.retry_after_s)
            case UnknownModelError():
                self._reconnect()  # its router has no replica yet: the caller comes again
            case _:
                raise Violation(f"{self}: {type(error).__name__}: {error}")

    def _leave(self) -> None:
        if self.outcome is None:
            self._over("cancelled")

    def _time_up(self) -> None:
        if self.outcome is None:
            self._over("expired")

    def _over(self, outcome: str) -> None:
        self.outcome = outcome
        for straggler in self.stragglers:
            straggler.give_up()
        if self._connection is not None:
            self._connection.close(self)

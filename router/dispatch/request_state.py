"""The open requests of a router: one record each, with all that it would take to carry a request on elsewhere.

What may live here: what was asked, the tokens so far, which attempt runs where, and the books that find them again.
What may not: decisions (`dispatch.py`), clocks, IO.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from holdfast.router.dispatch.deadlines import Deadlines
from holdfast.router.events import CaughtUp, Deliver, Likelihood, ReplicaFacts, TextState, Usage
from holdfast.router.replicas.prefix_index import PromptPrefix
from holdfast.router.replicas.replica_registry import ReplicaState
from holdfast.worker.request import EngineRequest, FinishReason, TokenLogprob
from holdfast.worker.suspicion import Suspicion


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One run of a request on one replica. The number is never used twice by this router."""

    number: int
    replica: ReplicaState
    sent_at: float
    """By the clock of whoever drives the core, in seconds."""


@dataclass(slots=True, kw_only=True, eq=False)
class RequestState:
    """One open request. Its text state is a function of its output tokens: nothing else would have to be rebuilt."""

    request: EngineRequest
    model: str
    text: TextState
    client_attempt: int = 0
    """Which submission of the request this is, as its client counts; 0: the client does not come again."""
    output_token_ids: list[int] = field(default_factory=list)
    """Begins with those of the request, if it is resumed."""
    unsent_text: str = ""
    """Text of a resumed request that goes out with the first delivery."""
    num_cached_tokens: int = 0
    attempt: Attempt | None = None
    """None while the request is queued."""
    prefix: PromptPrefix = field(init=False)
    """By which the replicas that have its prompt cached are found."""
    fingerprint: str = ""
    """Of the last replica that it ran on, here or, of a resumed request, behind another router."""
    identity_guaranteed: bool = True
    is_retry: bool = False
    """The last attempt came to nothing by its replica's fault: the next one is counted."""
    num_steps: int = 0
    """Steps with output in the last attempt."""
    num_refusals: int = 0
    """Attempts in a row that a replica gave up by itself, with no output in between."""
    num_replicas_lost: int = 0
    """Replicas that died suddenly under it, ever; and without progress in between. Kept by `quarantine.py`."""
    num_replicas_lost_in_a_row: int = 0
    is_suspect: bool = False

    def __post_init__(self) -> None:
        self.prefix = PromptPrefix(self.request)

    @classmethod
    def opened(
        cls, request: EngineRequest, model: str, text: TextState, caught_up: CaughtUp, client_attempt: int = 0
    ) -> "RequestState":
        """A request that has just come in, with the output that its client has already."""
        return cls(
            request=request,
            model=model,
            text=text,
            client_attempt=client_attempt,
            output_token_ids=list(request.output_token_ids),
            unsent_text=caught_up.unsent_text,
            fingerprint=caught_up.fingerprint,
        )

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def continuation(self, time_left_s: float | None = None, suspicion: Suspicion = Suspicion.NONE) -> EngineRequest:
        """What a replica must be asked so that it goes on after the tokens so far, for so long at most."""
        return replace(
            self.request,
            output_token_ids=tuple(self.output_token_ids),
            time_left_s=time_left_s,
            suspicion=suspicion,
        )

    def take(
        self,
        token_ids: tuple[int, ...],
        finish_reason: FinishReason | None,
        logprobs: tuple[TokenLogprob, ...] = (),
        prompt_logprobs: Sequence[Likelihood] = (),
    ) -> Deliver | None:
        """Appends new output. Returns what the client gets of it: None if nothing is new.

        A stop string that is now complete ends the output, whatever came after it. `logprobs` are cut as the tokens.
        """
        first_token_index = len(self.output_token_ids)
        piece = self.text.push(token_ids)
        kept, text = token_ids[: piece.num_tokens], self.unsent_text + piece.text
        self.output_token_ids.extend(kept)
        if piece.stopped:
            finish_reason = FinishReason.STOP
        elif finish_reason is not None:
            text += self.text.finish()
        if not kept and finish_reason is None:
            return None
        self.unsent_text = ""
        return Deliver(
            request_id=self.request_id,
            first_token_index=first_token_index,
            token_ids=kept,
            text=text,
            finish_reason=finish_reason,
            usage=None if finish_reason is None else self._usage(),
            logprobs=logprobs[: piece.num_tokens],
            prompt_logprobs=self._of_prompt(prompt_logprobs) if first_token_index == 0 else (),
            num_cached_tokens=self.num_cached_tokens,
            fingerprint=self.fingerprint,
            identity_guaranteed=self.identity_guaranteed,
        )

    def note_replica(self, facts: ReplicaFacts) -> None:
        """The request goes on at a replica. With output, that must be one that works the same to the bit."""
        if self.output_token_ids and not (facts.row_invariant and facts.fingerprint == self.fingerprint):
            self.identity_guaranteed = False
        self.fingerprint = facts.fingerprint

    def _of_prompt(self, said: Sequence[Likelihood]) -> tuple[TokenLogprob, ...]:
        if self.request.sampling_params.prompt_logprobs is None:
            return ()
        later_tokens = self.request.prompt_token_ids[1:]
        return tuple(item.of(token_id) for token_id, item in zip(later_tokens, said, strict=True))

    def _usage(self) -> Usage:
        num_prompt_tokens, num_completion_tokens = len(self.request.prompt_token_ids), len(self.output_token_ids)
        return Usage(
            num_prompt_tokens=num_prompt_tokens,
            num_completion_tokens=num_completion_tokens,
            num_cached_tokens=self.num_cached_tokens,
        )


class RequestTable:
    """The records, by request id and by attempt, and their deadlines."""

    def __init__(self) -> None:
        self.deadlines = Deadlines()
        self._records: dict[str, RequestState] = {}
        self._by_attempt: dict[int, RequestState] = {}
        self._last_attempt = 0

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._records

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __getitem__(self, request_id: str) -> RequestState:
        return self._records[request_id]

    def get(self, request_id: str) -> RequestState | None:
        return self._records.get(request_id)

    def add(self, record: RequestState, deadline: float) -> None:
        assert record.request_id not in self._records, f"{record.request_id} is open already"
        self._records[record.request_id] = record
        self.deadlines.set(record.request_id, deadline)

    def remove(self, record: RequestState) -> None:
        assert record.attempt is None, "an attempt ends before its request does"
        del self._records[record.request_id]
        self.deadlines.drop(record.request_id)

    def begin_attempt(self, record: RequestState, replica: ReplicaState, now: float) -> Attempt:
        assert record.attempt is None, "a request runs in one place at a time"
        self._last_attempt += 1
        record.attempt = Attempt(number=self._last_attempt, replica=replica, sent_at=now)
        record.num_steps = 0
        record.note_replica(replica.facts)
        self._by_attempt[self._last_attempt] = record
        num_tokens = len(record.request.prompt_token_ids) + len(record.output_token_ids)
        replica.note_sent(self._last_attempt, num_tokens - replica.cached.num_cached_tokens(record.prefix))
        return record.attempt

    def end_attempt(self, record: RequestState) -> Attempt:
        """From here on, whatever a replica says of the attempt is not found any more."""
        attempt = record.attempt
        assert attempt is not None, "only an attempt that runs can end"
        record.attempt = None
        del self._by_attempt[attempt.number]
        attempt.replica.attempts.remove(attempt.number)
        return attempt

    def running(self, replica: ReplicaState, attempt: int) -> RequestState | None:
        """The request that an attempt is for, unless the attempt has ended, or is another replica's."""
        return self._by_attempt.get(attempt) if attempt in replica.attempts else None

    def on(self, replica: ReplicaState) -> list[RequestState]:
        """The requests that run on a replica, first sent first."""
        return [self._by_attempt[attempt] for attempt in sorted(replica.attempts)]

    def check_integrity(self) -> None:
        """Asserts that the books agree with the records."""
        assert len(self.deadlines) == len(self._records)
        running = {key: record.attempt for key, record in self._records.items() if record.attempt is not None}
        assert len(running) == len(self._by_attempt)
        for request_id, attempt in running.items():
            assert request_id in self.deadlines
            assert self._by_attempt[attempt.number] is self._records[request_id]
            assert attempt.number in attempt.replica.attempts

"""The state of one open request: a table of transitions, and all that it would take to carry the request on elsewhere.

What may live here: what was asked, the tokens so far, which attempt runs where. What may not: decisions
(`dispatch.py`), the books that find requests (`request_table.py`), clocks, IO.

                SEND      OUTPUT    CLEAR    GIVE_BACK  LOSE      SUSPECT  MOVE      FINISH
    QUEUED      SENT
    RETURNED    SENT
    RETRYING    SENT
    HELD        ON_TRIAL
    SENT                  RUNNING            RETURNED   RETRYING  HELD     SENT
    RUNNING               RUNNING            RETURNED   RETRYING  HELD     SENT      FINISHED
    ON_TRIAL              ON_TRIAL  RUNNING  HELD       HELD               ON_TRIAL  FINISHED

and from each of these FAIL leads to FAILED, CANCEL to CANCELLED, HAND_OVER to HANDED_OVER. What is not in the table
cannot happen: it is a fault of ours, and an `InternalError`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum
from typing import Final

from holdfast.router.events import CaughtUp, Deliver, TextState, Usage
from holdfast.router.replicas.prefix_index import PromptPrefix
from holdfast.router.replicas.replica_registry import ReplicaState
from holdfast.worker.errors import InternalError
from holdfast.worker.model_info import ModelInfo
from holdfast.worker.request import EngineRequest, FinishReason, Priority, TokenLogprob
from holdfast.worker.service_order.tenants import Tenant
from holdfast.worker.suspicion import Suspicion


class RequestStatus(Enum):
    """Where a request is in its life."""

    QUEUED = "queued"
    """It waits for its first replica."""
    RETURNED = "returned"
    """It waits for another replica: the last one was full, or has left in good order."""
    RETRYING = "retrying"
    """It waits for another replica, by the fault of the last one: sending it again counts against the budget."""
    HELD = "held"
    """A suspect that waits for its trial. That is a retry too, and counts."""
    SENT = "sent"
    """It has an attempt, which has brought nothing yet."""
    RUNNING = "running"
    """It has an attempt, which has brought output."""
    ON_TRIAL = "on trial"
    """It has an attempt, and if the replica dies now, it is the culprit."""
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    HANDED_OVER = "handed over"
    """Its client goes on with it at another router."""

    @property
    def is_waiting(self) -> bool:
        """It is in the queue."""
        return self in _WAITING

    @property
    def is_retry(self) -> bool:
        """Sending it again counts against the budget."""
        return self in _RETRIES

    @property
    def has_attempt(self) -> bool:
        return self in _WITH_ATTEMPT


_WAITING: Final = {RequestStatus.QUEUED, RequestStatus.RETURNED, RequestStatus.RETRYING, RequestStatus.HELD}
_RETRIES: Final = {RequestStatus.RETRYING, RequestStatus.HELD}
_WITH_ATTEMPT: Final = {RequestStatus.SENT, RequestStatus.RUNNING, RequestStatus.ON_TRIAL}


class Standing(IntEnum):
    """What brought a request into the queue. Within a class, the smaller goes first."""

    RETURNED = 0
    RESUMED = 1
    ARRIVED = 2


class RequestEvent(Enum):
    """What can happen to an open request."""

    SEND = "send"
    """It leaves the queue for a replica."""
    OUTPUT = "output"
    """Its attempt has brought something."""
    CLEAR = "clear"
    """Its attempt has brought enough: it is no suspect any more."""
    GIVE_BACK = "give back"
    """Its attempt came to nothing, and nobody is at fault."""
    LOSE = "lose"
    """Its attempt came to nothing by its replica's fault."""
    SUSPECT = "suspect"
    """Its replica died, not the first one in a row under it."""
    MOVE = "move"
    """Another replica goes on with it at once."""
    FINISH = "finish"
    FAIL = "fail"
    CANCEL = "cancel"
    HAND_OVER = "hand over"


_ENDS: Final = {
    RequestEvent.FAIL: RequestStatus.FAILED,
    RequestEvent.CANCEL: RequestStatus.CANCELLED,
    RequestEvent.HAND_OVER: RequestStatus.HANDED_OVER,
}
_RUNS: Final = {
    RequestEvent.OUTPUT: RequestStatus.RUNNING,
    RequestEvent.GIVE_BACK: RequestStatus.RETURNED,
    RequestEvent.LOSE: RequestStatus.RETRYING,
    RequestEvent.SUSPECT: RequestStatus.HELD,
    RequestEvent.MOVE: RequestStatus.SENT,
}
TRANSITIONS: Final[Mapping[RequestStatus, Mapping[RequestEvent, RequestStatus]]] = {
    RequestStatus.QUEUED: {RequestEvent.SEND: RequestStatus.SENT, **_ENDS},
    RequestStatus.RETURNED: {RequestEvent.SEND: RequestStatus.SENT, **_ENDS},
    RequestStatus.RETRYING: {RequestEvent.SEND: RequestStatus.SENT, **_ENDS},
    RequestStatus.HELD: {RequestEvent.SEND: RequestStatus.ON_TRIAL, **_ENDS},
    RequestStatus.SENT: {**_RUNS, **_ENDS},
    RequestStatus.RUNNING: {**_RUNS, RequestEvent.FINISH: RequestStatus.FINISHED, **_ENDS},
    RequestStatus.ON_TRIAL: {
        RequestEvent.OUTPUT: RequestStatus.ON_TRIAL,
        RequestEvent.CLEAR: RequestStatus.RUNNING,
        RequestEvent.GIVE_BACK: RequestStatus.HELD,
        RequestEvent.LOSE: RequestStatus.HELD,
        RequestEvent.MOVE: RequestStatus.ON_TRIAL,
        RequestEvent.FINISH: RequestStatus.FINISHED,
        **_ENDS,
    },
    RequestStatus.FINISHED: {},
    RequestStatus.FAILED: {},
    RequestStatus.CANCELLED: {},
    RequestStatus.HANDED_OVER: {},
}


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
    status: RequestStatus = RequestStatus.QUEUED
    attempt: Attempt | None = None
    """Set where the status says that there is one."""
    urgency: tuple[float, int] = (0.0, 0)
    """When it is due, and its number in the order of arrival."""
    tenant: Tenant = field(init=False, repr=False)
    """Whom its tokens are charged to; set by the queue."""
    service_class: Priority = field(init=False)
    waits_since_s: float = 0.0
    waited_s: float = 0.0
    prefix: PromptPrefix = field(init=False)
    """By which the replicas that have its prompt cached are found."""
    fingerprint: str = ""
    """Of the last replica that it ran on, here or, of a resumed request, behind another router."""
    identity_guaranteed: bool = True
    num_steps: int = 0
    """Steps with output in the last attempt."""
    num_refusals: int = 0
    """Attempts in a row that a replica gave up by itself, with no output in between."""
    num_replicas_lost: int = 0
    """Replicas that died suddenly under it, ever; and without progress in between. Kept by `quarantine.py`."""
    num_replicas_lost_in_a_row: int = 0

    def __post_init__(self) -> None:
        self.prefix = PromptPrefix(self.request)
        self.service_class = self.request.priority

    @classmethod
    def opened(
        cls,
        request: EngineRequest,
        model: str,
        text: TextState,
        caught_up: CaughtUp,
        client_attempt: int = 0,
        urgency: tuple[float, int] = (0.0, 0),
    ) -> "RequestState":
        """A request that has just come in, with the output that its client has already."""
        return cls(
            request=request,
            model=model,
            text=text,
            client_attempt=client_attempt,
            urgency=urgency,
            output_token_ids=list(request.output_token_ids),
            unsent_text=caught_up.unsent_text,
            fingerprint=caught_up.fingerprint,
        )

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def standing(self) -> Standing:
        """Among those of its class, while it waits."""
        if self.status is not RequestStatus.QUEUED:
            return Standing.RETURNED
        return Standing.RESUMED if self.output_token_ids else Standing.ARRIVED

    def note(self, event: RequestEvent) -> None:
        """Raises `InternalError` for what cannot happen to it now."""
        try:
            self.status = TRANSITIONS[self.status][event]
        except KeyError:
            impossible = f"request {self.request_id} is {self.status.value}: {event.value!r} cannot happen to it"
            raise InternalError(impossible) from None

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
        prompt_logprobs: tuple[TokenLogprob, ...] = (),
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

    def note_replica(self, facts: ModelInfo) -> None:
        """The request goes on at a replica. With output, that must be one that works the same to the bit."""
        if self.output_token_ids and not (facts.row_invariant and facts.fingerprint == self.fingerprint):
            self.identity_guaranteed = False
        self.fingerprint = facts.fingerprint

    def _of_prompt(self, said: tuple[TokenLogprob, ...]) -> tuple[TokenLogprob, ...]:
        """Raises ValueError unless there is one for each token that was asked about."""
        if self.request.sampling_params.prompt_logprobs is None:
            return ()
        if len(said) != len(self.request.prompt_token_ids) - 1:
            raise ValueError(f"{len(said)} logprobs for a prompt of {len(self.request.prompt_token_ids)} tokens")
        return said

    def _usage(self) -> Usage:
        num_prompt_tokens, num_completion_tokens = len(self.request.prompt_token_ids), len(self.output_token_ids)
        return Usage(
            num_prompt_tokens=num_prompt_tokens,
            num_completion_tokens=num_completion_tokens,
            num_cached_tokens=self.num_cached_tokens,
        )

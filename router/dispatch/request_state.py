"""State of one open request, with all data that another replica needs to continue it; and the siblings of a request for
several completions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from holdfast.router.dispatch.prefix_index import NO_MATCH, PrefixMatch, PromptPrefix
from holdfast.router.dispatch.replica_state import ReplicaState
from holdfast.router.dispatch.request_status import TRANSITIONS, RequestEvent, RequestStatus, Standing
from holdfast.router.dispatch.timeline import Timeline
from holdfast.router.events import FRESH, CaughtUp, TextState
from holdfast.router.generation import OutputDelta, Usage
from holdfast.router.text.text_stream import shown_tokens, stop_reason
from holdfast.worker.errors import InternalError
from holdfast.worker.model_info import version_of, with_adapter
from holdfast.worker.parameters import MAX_SEED
from holdfast.worker.request import (
    BlockSource,
    EngineRequest,
    FinishReason,
    PoisonRisk,
    Priority,
    RequestKey,
    SequenceKey,
    TokenLogprob,
)
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.waiting_queue import Tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One submission of a request to one replica. A router never uses a number twice."""

    number: int
    replica: ReplicaState
    sent_at: float
    """Time in seconds by the clock of the core's caller."""


@dataclass(slots=True, kw_only=True, eq=False)
class RequestState:
    """One sequence of a request: made by admission, open from `Dispatch.submit` on. Its text state is a function of its
    output tokens.
    """

    request: EngineRequest
    model: str
    text: TextState
    caught_up: CaughtUp = FRESH
    """Output that the client of a resumed request has."""
    deadline: float = math.inf
    """Time in seconds by the clock of the core's caller."""
    client_attempt: int = 0
    """Number of this submission, as the client counts; 0: the client does not submit again."""
    output_token_ids: list[int] = field(init=False)
    """All so far, beginning with those of a resumed request."""
    early_prompt_logprobs: list[TokenLogprob] = field(default_factory=list, repr=False)
    """Log-probabilities of the prompt in this attempt that came before its first token."""
    has_first_token: bool = field(init=False)
    """Whether the client has a token; that of a resumed request may come from another router."""
    unsent_text: str = field(init=False)
    """Text of a resumed request that goes out with the first delta."""
    num_cached_tokens: int = 0
    status: RequestStatus = RequestStatus.QUEUED
    attempt: Attempt | None = None
    """Set where the status says that there is one."""
    urgency: tuple[float, int] = (0.0, 0)
    """Due time, then order of arrival: the last keys of the queue's order."""
    tenant: Tenant = field(init=False, repr=False)
    """Tenant that is charged for its tokens; set by the queue."""
    service_class: Priority = field(init=False)
    """Better than that of the request after a long wait."""
    timeline: Timeline = field(default_factory=Timeline)
    waits_since_s: float = 0.0
    waited_s: float = 0.0
    key: SequenceKey = field(init=False)
    """Key by which it is found; no client can write another client's."""
    request_key: RequestKey = field(init=False)
    _prefix: PromptPrefix | None = field(default=None, repr=False)
    prefix_match: PrefixMatch = NO_MATCH
    """Replicas that had its prompt cached when one was chosen last."""
    fingerprint: str = field(init=False)
    """Model fingerprint of the last replica that it ran on; of a resumed request, perhaps behind another router."""
    replayed_without_guarantee: bool = False
    bound_version: str = field(init=False)
    """Version of the output that the client of a resumed request has, also in other sequences."""
    parked_for: str = ""
    """The version whose replicas it waits for, beside the queue; empty while it is not parked."""
    replica_id: str = ""
    """The last replica that it ran on."""
    next_replica_id: str = ""
    """The replica that is to decode it, while another one computes its prompt."""
    handed_on: tuple[int, float] = (0, 0.0)
    """The attempt that it was handed on to, and the seconds that its blocks were to take."""
    num_steps: int = 0
    """Steps with output in the last attempt, as far as they matter: up to `NUM_STEPS_TO_CLEAR`."""
    num_refusals: int = 0
    """Attempts in a row, without output in between, that replicas gave up while they stayed up."""
    num_replicas_lost: int = 0
    """Replicas that crashed while they ran it. Counted by `failures.py`."""
    num_replicas_lost_in_a_row: int = 0
    """The same, since it was last cleared by progress."""
    last_loss: tuple[str, float] = ("", -math.inf)
    """Host and time of the last of them."""
    is_suspect: bool = False
    """Whether it has crashed too many replicas and may only run on trial. Set by `failures.py`."""

    def __post_init__(self) -> None:
        request, caught_up = self.request, self.caught_up
        self.key = SequenceKey(request.tenant, request.request_id, request.part, request.sequence_index)
        self.request_key = request.key
        self.service_class = request.priority
        self.output_token_ids = list(request.output_token_ids)
        self.has_first_token = bool(request.output_token_ids)
        self.unsent_text = caught_up.unsent_text
        self.fingerprint = caught_up.fingerprint
        self.bound_version = version_of(caught_up.fingerprint) if caught_up.fingerprint else ""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def prefix(self) -> PromptPrefix:
        """Block hashes of the prompt, for prefix-aware routing: made when they are first asked for."""
        if self._prefix is None:
            self._prefix = PromptPrefix(self.request)
        return self._prefix

    @property
    def standing(self) -> Standing:
        """Place within its priority class while it waits."""
        if self.status is not RequestStatus.QUEUED:
            return Standing.RETURNED
        return Standing.RESUMED if self.output_token_ids else Standing.ARRIVED

    @property
    def version(self) -> str:
        """The version that generated its output, and the only one that may continue it; empty without output."""
        return version_of(self.fingerprint) if self.output_token_ids else self.bound_version

    def note(self, event: RequestEvent) -> None:
        """Makes the transition. Raises `InternalError` for an event that is not in the table."""
        try:
            self.status = TRANSITIONS[self.status][event]
        except KeyError:
            impossible = f"request {self.request_id} is {self.status.value}: {event.value!r} cannot happen to it"
            raise InternalError(impossible) from None

    def note_prompt_logprobs(self, logprobs: tuple[TokenLogprob, ...]) -> None:
        """The next of a prompt whose log-probabilities come in pieces, before the first token of an attempt."""
        self.early_prompt_logprobs += logprobs

    def continuation(
        self,
        time_left_s: float | None = None,
        poison_risk: PoisonRisk = PoisonRisk.NONE,
        block_source: BlockSource | None = None,
    ) -> EngineRequest:
        """The request to a replica that continues after the output so far, within `time_left_s`."""
        is_new = self.output_token_ids == [*self.request.output_token_ids] and block_source is None
        if is_new and poison_risk is PoisonRisk.NONE and time_left_s in (None, math.inf):
            return self.request
        return replace(
            self.request,
            output_token_ids=tuple(self.output_token_ids),
            time_left_s=time_left_s,
            poison_risk=poison_risk,
            block_source=block_source,
        )

    def take(
        self,
        token_ids: tuple[int, ...],
        finish_reason: FinishReason | None,
        logprobs: tuple[TokenLogprob, ...] = (),
        prompt_logprobs: tuple[TokenLogprob, ...] = (),
    ) -> OutputDelta | None:
        """Appends output. Returns the delta for the client, or None if nothing is new.

        A complete stop string ends the output; tokens after it are dropped. `logprobs` are cut as the tokens. A token
        that ends the output is no text, special or not.
        """
        first_token_index = len(self.output_token_ids)
        shown = token_ids
        if finish_reason is FinishReason.STOP:
            shown = shown_tokens(token_ids, finish_reason, self.request.sampling_params)
        piece = self.text.push(shown)
        num_kept = piece.num_tokens if piece.stopped else len(token_ids)
        kept, text = token_ids[:num_kept], self.unsent_text + piece.text
        self.output_token_ids += kept
        if piece.stopped:
            finish_reason = FinishReason.STOP
        elif finish_reason is not None:
            text += self.text.finish()
        if not kept and finish_reason is None:
            return None
        self.unsent_text = ""
        usage = None
        if finish_reason is not None:
            usage = Usage(
                num_prompt_tokens=len(self.request.prompt_token_ids),
                num_completion_tokens=len(self.output_token_ids),
                num_cached_tokens=self.num_cached_tokens,
            )
        has_prompt_logprobs = first_token_index == 0 and self.request.sampling_params.prompt_logprobs is not None
        fields = (
            self.request.request_id,
            first_token_index,
            kept,
            text,
            finish_reason,
            usage,
            logprobs[:num_kept],
            self._of_prompt(prompt_logprobs) if has_prompt_logprobs else (),
            0,  # the sequence's index is its request stream's to say
            self.num_cached_tokens,
            self.fingerprint,
            self.replayed_without_guarantee,
            self.replica_id,
            self.key,
            self.stop_reason if finish_reason is FinishReason.STOP else None,
            None,
            None,
            b"",
        )
        return tuple.__new__(OutputDelta, fields)  # by names it takes four times as long, for every token

    def take_one(self, token_id: int) -> OutputDelta:
        """Like `take`, for one token that is neither the first nor the last. Called for nearly every token."""
        output = self.output_token_ids
        index = len(output)
        text = None if self.unsent_text else self.text.push_one(token_id)
        if text is None:
            delta = self.take((token_id,), None)
            assert delta is not None, "it has a token"
            return delta
        output.append(token_id)
        fields = (
            self.request.request_id,
            index,
            (token_id,),
            text,
            None,
            None,
            (),
            (),
            0,
            self.num_cached_tokens,
            self.fingerprint,
            self.replayed_without_guarantee,
            self.replica_id,
            self.key,
            None,
            None,
            None,
            b"",
        )
        return tuple.__new__(OutputDelta, fields)

    def with_figures(self, delta: OutputDelta, now: float) -> OutputDelta:
        """The last delta, whose usage tells how the request went."""
        assert delta.usage is not None, "the last delta has the usage"
        return delta._replace(usage=replace(delta.usage, figures=self.timeline.figures(now)))

    @property
    def stop_reason(self) -> str | int | None:
        """Same as the function of this name, of the output so far."""
        return stop_reason(self.request.sampling_params, self.output_token_ids, self.text.matched)

    def note_replica(self, replica: ReplicaState) -> None:
        """The request runs on a replica now. If it has output, only a bitwise-identical replica keeps the guarantee."""
        fingerprint = replica.fingerprint
        if self.request.adapter is not None:
            fingerprint = with_adapter(fingerprint, self.request.adapter.digest)
        is_identical = replica.facts.row_invariant and fingerprint == self.fingerprint
        if self.output_token_ids and not is_identical:
            self.replayed_without_guarantee = True
        self.fingerprint, self.replica_id = fingerprint, replica.facts.replica_id

    def _of_prompt(self, logprobs: tuple[TokenLogprob, ...]) -> tuple[TokenLogprob | None, ...]:
        """The prompt's log-probabilities by position, of which `logprobs` are the last. Raises ValueError if their
        number is wrong.
        """
        if self.early_prompt_logprobs:
            logprobs = (*self.early_prompt_logprobs, *logprobs)
            self.early_prompt_logprobs.clear()
        if len(logprobs) != len(self.request.prompt_token_ids) - 1:
            raise ValueError(f"{len(logprobs)} logprobs for a prompt of {len(self.request.prompt_token_ids)} tokens")
        return (None, *logprobs) if logprobs else ()


def siblings(request: EngineRequest) -> tuple[EngineRequest, ...]:
    """One request for each sequence to sample: the request itself if it is one, else those of one group, by index.

    Each samples with its own seed: number i gives the result of a single request with seed + i. Only the first
    reports the prompt's log-probabilities, which are the same for all.
    """
    count = request.sampling_params.num_sequences
    if count == 1:
        return (request,)
    return tuple(
        replace(
            request,
            sequence_index=index,
            group_id=request.key,
            sampling_params=_params_of(request.sampling_params, index),
        )
        for index in range(count)
    )


def best(logprobs: Sequence[Sequence[float]], n: int) -> list[int]:
    """Indices of the `n` sequences with the highest mean log-probability, best first; of equal ones the lower index.

    `logprobs[i]` are those of sequence i's tokens. A sequence without tokens is the worst.
    """
    means = [math.fsum(values) / len(values) if values else -math.inf for values in logprobs]
    return sorted(range(len(means)), key=lambda index: (-means[index], index))[:n]


def _params_of(params: SamplingParams, index: int) -> SamplingParams:
    assert params.seed is not None, "the seed is chosen before there are siblings"
    is_ranked = params.num_sequences > params.n
    return params.with_changes(
        n=1,
        best_of=None,
        seed=(params.seed + index) % (MAX_SEED + 1),
        logprobs=0 if is_ranked and params.logprobs is None else params.logprobs,
        prompt_logprobs=params.prompt_logprobs if index == 0 else None,
    )

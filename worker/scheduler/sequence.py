"""Sequence: the state of one request inside a worker: its tokens, the number of computed ones, and its blocks."""

import math
from array import array
from collections.abc import Hashable
from enum import Enum
from typing import ClassVar

from holdfast.worker.block_hash import HashChain
from holdfast.worker.cache.window_blocks import WindowTable
from holdfast.worker.draws import DrawParams, LogitsSettings
from holdfast.worker.request import EngineRequest, FinishReason, TokenDelta, TokenLogprob
from holdfast.worker.step_plan import DEAD_END, NO_TOKEN, PENDING, ScheduledSequence, confirmed
from holdfast.worker.waiting_queue import DUE_AFTER_S, Tenant


class SequenceStatus(Enum):
    """The state of a sequence in its life cycle.

    WAITING ───admit──> RUNNING ──end, abort──> FINISHED
       │  <──preempt──     │                       ^
       └───────────────────abort───────────────────┘
    """

    WAITING = "waiting"
    """Owns no blocks and has nothing computed: it is new, or it was preempted and will be replayed with its outputs."""
    RUNNING = "running"
    """Owns blocks, some perhaps shared; every step may compute some of its tokens."""
    FINISHED = "finished"
    """Ended or aborted, and reported. Never runs again; its blocks are free, unless its policy still holds them."""


class Sequence:
    """Mutable state of one request. Compared by identity.

    The last of `token_ids` is never computed when a step begins: computing it is what draws the next token. So a
    prompt, a decode and a replay differ only in the number of tokens left to compute.
    """

    tenant: Tenant
    """The account that its tokens are charged to; set whenever it joins the waiting queue."""
    standing: ClassVar[int] = 0
    """The same for all: a preempted sequence keeps its place among those of its tenant."""

    __slots__ = (
        *("_looks_back", "_outputs", "adapter_slot", "attempt", "awaits_result", "block_ids", "cuts", "deadline_s"),
        *("due_s", "has_dead_end", "hash_chain", "is_broken", "is_pending", "is_whole", "logits_settings"),
        *("max_len", "num_accepted_tokens", "num_admitted_tokens", "num_cached_tokens", "num_computed_tokens"),
        *("num_discarded_tokens", "num_disk_tokens", "num_draft_tokens", "num_prompt_tokens", "num_rolling_blocks"),
        *("pool_rows", "pooled", "prompt_logprobs", "queued_s", "request", "sequence_id", "service_class"),
        *("state_slot", "status", "stop_token_ids", "tenant", "to_pin", "token_ids", "urgency", "waited_s"),
        *("waits_since_s", "window"),
    )

    def __init__(
        self,
        sequence_id: int,
        request: EngineRequest,
        *,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        arrived_s: float = 0.0,
        attempt: Hashable = None,
        adapter_slot: int = 0,
    ) -> None:
        """`attempt` identifies it to its submitter; None: the request's own id."""
        params = request.sampling_params
        max_tokens = max_model_len if params.max_tokens is None else params.max_tokens
        self.sequence_id = sequence_id
        """Also the order of arrival."""
        self.request = request
        self.attempt = request.request_id if attempt is None else attempt
        self.status = SequenceStatus.WAITING
        self.is_broken = False
        """No token can follow: its logits came out as NaN or infinity, or its grammar has a dead end."""
        self.has_dead_end = False
        """Whether it is broken because no token fits its grammar."""
        self.is_pending = False
        """The last of `token_ids` is `PENDING`: the step in flight draws it (`foresee`)."""
        self.awaits_result = False
        """The step in flight has it, and its next action depends on the result: no step is planned for it before."""
        self._begin_waits(arrived_s)
        self.token_ids = [*request.prompt_token_ids, *request.output_token_ids]
        """Prompt and output."""
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self._begin_memory(adapter_slot)
        self.max_len = min(self.num_prompt_tokens + max_tokens, max_model_len)
        """Maximum length, prompt included."""
        self._begin_outputs(eos_token_ids)

    def _begin_waits(self, arrived_s: float) -> None:
        """No wait is over yet."""
        request = self.request
        time_left_s = math.inf if request.time_left_s is None else max(0.0, request.time_left_s)
        self.deadline_s = arrived_s + time_left_s
        """Deadline: it is dropped after this time."""
        self.due_s = arrived_s + min(time_left_s, DUE_AFTER_S)
        """Due time: within tenant and class, the earlier is served first."""
        self.urgency = (self.due_s, self.sequence_id)
        """Smaller goes first among those of one tenant and class: by deadline, then by arrival."""
        self.service_class = request.priority
        """Priority class, which improves with waiting (`service_order/`)."""
        self.waits_since_s = arrived_s
        self.waited_s = 0.0
        """Seconds of all earlier waits together."""
        self.queued_s = 0.0
        """`waited_s` when it first ran, until it is reported with the first tokens."""

    def _begin_outputs(self, eos_token_ids: frozenset[int]) -> None:
        """No output is drawn, pooled or reported yet."""
        request = self.request
        self.stop_token_ids = request.stop_token_ids(eos_token_ids)
        self.logits_settings = LogitsSettings.of(request, eos_token_ids)
        """Settings of its logits processors; None: it needs none."""
        self._looks_back = self.logits_settings is not None and self.logits_settings.look_back
        self._outputs = array("q")  # of `token_ids`, where draws look back at them: those of the last draw
        asks = request.sampling_params.prompt_logprobs is not None and not request.output_token_ids
        self.pool_rows: range | None = None
        """Positions whose states are pooled, of a pooling request (`prompt_outputs.py`); None: it draws an output."""
        self.is_whole = False
        """One step computes all of its prompt."""
        self.pooled = b""
        """Sums over the computed ones, float64."""
        self.prompt_logprobs: list[TokenLogprob] | None = [] if asks else None
        """Log-probabilities from the prompt's second token on, reported with the first output token; None: not
        requested, or reported."""

    def _begin_memory(self, adapter_slot: int) -> None:
        """Nothing is computed, and no memory taken but the slot of an adapter."""
        request = self.request
        self.num_computed_tokens = 0
        """Tokens whose keys and values are in the blocks."""
        self.num_discarded_tokens = 0
        """Tokens that were computed once and lost by a preemption; computing them again is waste."""
        self.num_cached_tokens = 0
        """Tokens found in the prefix cache when it, or the sequence that it was forked from, was first admitted."""
        self.num_disk_tokens = 0
        """Tokens of its prompt that were brought back from the disk before it was submitted."""
        self.num_draft_tokens = self.num_accepted_tokens = 0
        """Guessed tokens that were verified, and those of them that came true."""
        self.hash_chain = HashChain(request.cache_salt, request.tenant, request.adapter_digest)
        """Hashes of its full blocks: their keys in the prefix cache."""
        self.block_ids: tuple[int, ...] = ()
        """Block of positions 0 to block_size - 1, and so on. A tuple, so that plans can share it instead of copying."""
        self.window: WindowTable | None = None
        """Blocks of window layers while it runs, if they have separate blocks."""
        self.adapter_slot = adapter_slot
        """Slot of its adapter until it ends; 0 without an adapter."""
        self.state_slot: int | None = None
        """Slot of its state while it runs, for a model that keeps states."""
        self.cuts: tuple[int, ...] = ()
        """Positions, ascending, at which a step ends that computes it, whatever else has room (`kept_prefixes.py`)."""
        self.num_admitted_tokens = 0
        """Tokens when it was admitted last."""
        self.num_rolling_blocks = 0
        """Number of blocks before the snapshot of its state that the next snapshot replaces; 0: there is none."""
        self.to_pin = request.kept_prefixes if request.cache_ttl_s or request.cache_marks else ()
        """Prefixes, the shortest first, whose blocks are pinned once they are computed; pinned ones are removed."""

    @property
    def is_extended(self) -> bool:
        """Whether it went on from a cached prefix: others are likely to."""
        return 0 < self.num_prompt_tokens <= 2 * self.num_cached_tokens

    @property
    def service_order(self) -> tuple[int, float, int]:
        """Order among the running sequences: the smaller is served first and preempted last. Fixed while it runs."""
        return self.service_class, self.due_s, self.sequence_id

    @property
    def max_num_slots(self) -> int:
        """Cache slots that it may need: one for each token but the last, which is sampled and never computed."""
        return self.max_len - 1

    @property
    def num_output_tokens(self) -> int:
        """Includes a pending one."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens to compute before the next one is sampled; 1 for a sequence that decodes."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_missing_prompt_logprobs(self) -> int:
        """Prompt tokens whose logprobs are requested and not computed yet."""
        return 0 if self.prompt_logprobs is None else self.num_prompt_tokens - 1 - len(self.prompt_logprobs)

    @property
    def num_skippable_tokens(self) -> int:
        """First tokens that may come from another sequence or the cache. Never all: the last one must be computed to
        sample the next, and a token whose successor's logprob is requested, or whose state is pooled, must be computed.
        """
        if self.pool_rows is not None:
            return 0 if self.is_whole else self.pool_rows.start
        if num_missing := self.num_missing_prompt_logprobs:
            return self.num_prompt_tokens - num_missing - 1
        return len(self.token_ids) - 1

    @property
    def decodes_plainly(self) -> bool:
        """Whether its next token is drawn after one token more, by its settings and its position alone."""
        num_tokens = len(self.token_ids)
        return (
            self.logits_settings is None
            and num_tokens == self.num_computed_tokens + 1
            and num_tokens > self.num_prompt_tokens  # with the first output token, more is reported
            and self.prompt_logprobs is None
            and self.num_computed_tokens >= self.num_discarded_tokens
        )

    @property
    def finish_reason(self) -> FinishReason | None:
        """The finish reason; None while more tokens are to come."""
        if self.token_ids[-1] in self.stop_token_ids and self.num_output_tokens > 0:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.token_ids) >= self.max_len else None

    @property
    def is_about_to_end(self) -> bool:
        """Whether its next token is the last that there is room for."""
        return len(self.token_ids) + 1 >= self.max_len

    def draw_params(self) -> DrawParams:
        """Parameters for sampling the next token, a function of the request and its outputs alone."""
        sampling, settings = self.request.sampling_params, self.logits_settings
        index = len(self.token_ids) - self.num_prompt_tokens
        if settings is None:
            return DrawParams(sampling, index)
        if self._looks_back:
            self._outputs.extend(self.token_ids[self.num_prompt_tokens + len(self._outputs) :])
            return DrawParams(sampling, index, settings, self._outputs[:])
        return DrawParams(sampling, index, settings if settings.apply_after(index) else None)

    def take_prompt_logprobs(self) -> tuple[TokenLogprob, ...]:
        """The prompt's log-probabilities, to report with the first output token; only once."""
        logprobs, self.prompt_logprobs = self.prompt_logprobs or (), None
        return tuple(logprobs)

    def foresee(self, num_tokens: int, num_draws: int) -> bool:
        """Continues as if a step in flight had computed this many tokens and sampled the next one, if it samples; the
        token is `PENDING` until the step is committed. False, with nothing changed, if that is impossible: its next
        step depends on the result, or there is none.
        """
        assert num_draws <= 1, "with drafts, how far a step goes is not known before its result"
        draws = num_draws > 0
        looks_back = self.prompt_logprobs is not None or (draws and self._looks_back)
        self.awaits_result = looks_back or (draws and self.is_about_to_end)
        if self.awaits_result:
            return False
        self.num_computed_tokens += num_tokens
        if draws:
            self.token_ids.append(PENDING)
            self.is_pending = True
        return True

    def advance(self, scheduled: ScheduledSequence, drawn: tuple[int, ...]) -> tuple[int, ...]:
        """Takes a step's computed and sampled tokens of this sequence; returns the gained tokens.

        Tokens after one that ends the sequence, or after a rejected draft, are dropped, and the positions computed for
        them count as not computed. A draw without a token (`NO_TOKEN`, `DEAD_END`) breaks the sequence.
        """
        old_len = len(self.token_ids)
        for token_id in drawn if len(drawn) <= 1 else confirmed(scheduled.token_ids, drawn):
            if token_id < 0 and self._breaks(token_id):
                break
            self.token_ids.append(token_id)
            if self.finish_reason is not None:
                break
        num_run = scheduled.first_position + len(scheduled.token_ids)
        self.num_computed_tokens = min(num_run, len(self.token_ids) - 1)
        return tuple(self.token_ids[old_len:])

    def commit(
        self, scheduled: ScheduledSequence, drawn: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]
    ) -> TokenDelta | None:
        """`advance`, as a delta to report; None if the sequence gained no token.

        The log-probabilities of dropped tokens are dropped with them.
        """
        if self.num_computed_tokens > scheduled.first_position:  # it was foreseen
            return self._fill_in(drawn, logprobs) if drawn else None
        first_token_index = len(self.token_ids) - self.num_prompt_tokens
        token_ids = self.advance(scheduled, drawn)
        if not token_ids:
            return None
        return TokenDelta(
            attempt=self.attempt,
            first_token_index=first_token_index,
            token_ids=token_ids,
            finish_reason=self.finish_reason,
            num_cached_tokens=self.num_cached_tokens if first_token_index == 0 else 0,
            logprobs=logprobs[: len(token_ids)],
            prompt_logprobs=() if self.prompt_logprobs is None else self.take_prompt_logprobs(),
            queued_s=self.take_queued_s(),
            num_disk_tokens=self.num_disk_tokens if first_token_index == 0 else 0,
        )

    def _breaks(self, drawn: int) -> bool:
        """Whether no token was drawn. The sequence is broken then."""
        if drawn not in (NO_TOKEN, DEAD_END):
            return False
        self.is_broken, self.has_dead_end = True, drawn == DEAD_END
        return True

    def take_queued_s(self) -> float:
        """Seconds that it had waited when it first ran; 0 once that was reported."""
        queued_s, self.queued_s = self.queued_s, 0.0
        return queued_s

    def decode(self, drawn: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]) -> TokenDelta | None:
        """Like `commit`, for a step that computed its last token and drew one, not its first unless it was foreseen."""
        if self.is_pending:
            return self._fill_in(drawn, logprobs)
        if len(drawn) > 1:
            return self._decode_several(drawn)
        (token_id,) = drawn
        if token_id < 0 and self._breaks(token_id):
            return None
        token_ids = self.token_ids
        index = len(token_ids) - self.num_prompt_tokens
        token_ids.append(token_id)
        self.num_computed_tokens += 1
        reason = None
        if token_id in self.stop_token_ids:
            reason = FinishReason.STOP
        elif len(token_ids) >= self.max_len:
            reason = FinishReason.LENGTH
        return TokenDelta(self.attempt, index, drawn, reason, 0, logprobs)

    def _decode_several(self, drawn: tuple[int, ...]) -> TokenDelta | None:
        """Like `decode`, for several steps: takes the tokens up to its last, or to one that could not be sampled."""
        if drawn[0] < 0 and self._breaks(drawn[0]):
            return None
        token_ids, num_before = self.token_ids, len(self.token_ids)
        reason = None
        for token_id in drawn:
            if token_id == NO_TOKEN:  # the next step finds it again, as its first
                self.is_broken = self.state_slot is not None  # its state is behind what came after
                break
            token_ids.append(token_id)
            if token_id in self.stop_token_ids:
                reason = FinishReason.STOP
            elif len(token_ids) >= self.max_len:
                reason = FinishReason.LENGTH
            if reason is not None:
                break
        num_taken = len(token_ids) - num_before
        self.num_computed_tokens += num_taken
        return TokenDelta(self.attempt, num_before - self.num_prompt_tokens, drawn[:num_taken], reason, 0, ())

    def _fill_in(self, drawn: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]) -> TokenDelta | None:
        """Like `commit`, for a step that was foreseen: the pending token is known now."""
        (token_id,) = drawn
        if token_id < 0 and self._breaks(token_id):
            return None
        self.token_ids[-1] = token_id
        self.is_pending = False
        index = len(self.token_ids) - self.num_prompt_tokens - 1
        num_cached = self.num_cached_tokens if index == 0 else 0
        return TokenDelta(
            self.attempt,
            index,
            drawn,
            self.finish_reason,
            num_cached,
            logprobs,
            (),
            self.take_queued_s(),
            self.num_disk_tokens if index == 0 else 0,
        )

    def last_delta(self, reason: FinishReason) -> TokenDelta:
        """The final delta of a request that ends without another token."""
        return TokenDelta(
            attempt=self.attempt,
            first_token_index=self.num_output_tokens - self.is_pending,
            token_ids=(),
            finish_reason=reason,
        )

"""Scheduler of one replica, a state machine without IO: requests come in, step plans go out, results come back.

The loop around it is `plan = plan()`, `result = run(plan)`, `deltas = commit(plan, result)`; adding and aborting are
safe at any point of it. Where the device runs a step while the host plans the next, `plan_ahead` comes before the
`commit`, and two plans are in flight.
"""

import math
from collections.abc import Hashable
from dataclasses import replace
from itertools import repeat

from holdfast.worker.cache.block_pool import BlockAllocator
from holdfast.worker.cache.state_slots import StateSlots
from holdfast.worker.cache.window_blocks import WindowBlocks
from holdfast.worker.config import SchedulerConfig
from holdfast.worker.errors import InvalidRequestError, QueueFullError
from holdfast.worker.model_info import Window, most_tokens
from holdfast.worker.pooling import PoolingKind
from holdfast.worker.request import EngineLoad, EngineRequest, FinishReason, Priority, TokenDelta
from holdfast.worker.scheduler.acceptance import DeadlineWatch, DroppedRequest, DropReason, check_can_end, check_fits
from holdfast.worker.scheduler.batching import POLICIES, MakePolicy, Share, StepLimits
from holdfast.worker.scheduler.kept_prefixes import Pinning
from holdfast.worker.scheduler.planned_step import NOBODY, DecodeBatch, ShareCommit, StepInFlight, scheduled_sequence
from holdfast.worker.scheduler.prompt_outputs import begin_pooling, bound_prompt_logprobs
from holdfast.worker.scheduler.queues import SequenceQueues
from holdfast.worker.scheduler.sequence import Sequence, SequenceStatus
from holdfast.worker.scheduler.speculation import NO_DRAFTS, Drafter, Drafts
from holdfast.worker.step_plan import NO_ROWS, StepPlan, StepResult
from holdfast.worker.step_update import EngineStats


class Scheduler:
    """Plans every step of one replica. Not thread-safe."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        prefix_caching: bool = True,
        num_state_slots: int = 0,
        state_blocks: int = 0,
        window: Window | None = None,
        drafter: Drafter | None = None,
        make_policy: MakePolicy | None = None,
        pooling: PoolingKind | None = None,
        whole_prompts: bool = False,
    ) -> None:
        """`num_state_slots`: slots for states of sequences; 0: the model keeps none. `state_blocks`: number of blocks
        whose memory one slot occupies; 0: slots have separate memory. `window`: of the layers with sliding-window
        attention, if they have separate blocks. `drafter` drafts tokens; None: no speculation. `make_policy` makes the
        batching policy; None: the policy that the settings name. `pooling`: the outputs of a pooling model; None:
        requests draw outputs. `whole_prompts`: one step computes all of a prompt, and nothing of it is cached.
        """
        self._max_num_waiting, self._max_model_len = config.max_num_waiting, max_model_len
        self._eos_token_ids, self._pooling = eos_token_ids, (pooling, whole_prompts)
        num_drafts = 0 if drafter is None else drafter.num_speculative_tokens
        self._drafter = drafter if num_drafts else None
        most = int(config.pinned_share * num_blocks)
        is_cached = prefix_caching and not whole_prompts
        self._allocator = BlockAllocator(num_blocks, block_size, prefix_caching=is_cached, max_num_pins=most)
        self._slots: StateSlots | None = None
        if num_state_slots:
            most = math.ceil(config.pinned_share * num_state_slots)
            self._slots = StateSlots(num_state_slots, self._allocator, state_blocks, max_num_pins=most)
        self._most_tokens = most_tokens(num_blocks - state_blocks, block_size, window)
        self._queues = SequenceQueues(
            self._allocator,
            slots=self._slots,
            windows=None if window is None else WindowBlocks(self._allocator, window),
            turn_ends=eos_token_ids,
            aging_s=config.aging_s,
            tenant_shares=config.tenant_shares,
        )
        self._decode_batch = DecodeBatch(self._queues)
        self._share_commit = ShareCommit(self._queues, self._drafter, self._drop_broken)
        self.deadlines = DeadlineWatch(self._queues)
        self.prefix_cache = self._allocator.prefix_cache
        """Prefix cache, for reading its blocks and changes; only the scheduler changes it."""
        self.counts = self._queues.counts
        """Counts, in place: by the scheduler, and by the engine whose scheduler it is."""
        self.dropped: list[DroppedRequest] = []
        """Requests that have been dropped since `take_dropped`, to be rejected. To be read only."""
        self.policy = (make_policy or POLICIES[config.policy])(StepLimits.of(config, num_drafts))
        """Batching policy. Its `limits` are those of the next plan, and may be replaced between two plans."""
        self.adapter_slots: dict[str, int] = {}
        """Slots of resident adapters, by digest; requests with others are not added."""
        self._sequences: dict[Hashable, Sequence] = {}  # open requests, by key
        self._in_flight: list[StepInFlight] = []  # plans that are not committed, at most two, the older first
        self._num_added = self._num_plans = 0

    # --- Requests ---

    def add(
        self, request: EngineRequest, now: float = 0.0, attempt: Hashable = None, num_disk_tokens: int = 0
    ) -> TokenDelta | None:
        """Adds a request; its tokens come out of `commit`. `now` is in seconds of a clock that does not go back;
        `attempt` is the key to know it by, None the request's own id; `num_disk_tokens` of its tokens were brought back
        from the disk for it.

        Returns None, or the request's one and only delta where nothing is left to do: a continued request whose earlier
        outputs were already complete. Raises `InvalidRequestError` if the request can never run here or its key is in
        use, `QueueFullError` if too many wait; then nothing has changed.
        """
        attempt = request.request_id if attempt is None else attempt
        if attempt in self._sequences:
            raise InvalidRequestError("request_id", attempt, "is in use by a request that has not ended")
        if request.grammar:
            check_can_end(request, self._eos_token_ids)
        sequence = Sequence(
            self._num_added,
            request,
            max_model_len=self._max_model_len,
            eos_token_ids=self._eos_token_ids,
            arrived_s=now,
            attempt=attempt,
            adapter_slot=0 if request.adapter is None else self.adapter_slots[request.adapter.digest],
        )
        sequence.num_disk_tokens = num_disk_tokens
        if request.pooling is not None:
            begin_pooling(sequence, *self._pooling)
        if (reason := sequence.finish_reason) is not None and request.output_token_ids:
            self.counts.num_finished += 1
            return sequence.last_delta(reason)
        check_fits(sequence, num_slots=self._most_tokens, max_model_len=self._max_model_len)
        if self._queues.waiting.num_waiting >= self._max_num_waiting:
            raise QueueFullError(f"{self._queues.waiting.num_waiting} requests are waiting, which is the maximum")
        self._num_added += 1
        self._sequences[attempt] = sequence
        self._queues.waiting.advance(now)
        self._queues.add(sequence)
        if sequence.deadline_s < math.inf:
            self.deadlines.watch(sequence)
        return None

    def abort(self, attempt: Hashable) -> TokenDelta | None:
        """Ends a request now and frees its blocks; None if it is not open.

        Between `plan` and `commit` the step continues with these blocks, and `commit` then ignores its results for the
        request and frees them.
        """
        sequence = self._sequences.get(attempt)
        if sequence is None:
            return None
        self._drop(sequence)
        self.counts.num_aborted += 1
        return sequence.last_delta(FinishReason.ABORT)

    def abort_all(self) -> list[TokenDelta]:
        """`abort` for every request."""
        deltas = (self.abort(attempt) for attempt in list(self._sequences))
        return [delta for delta in deltas if delta is not None]

    # --- Steps ---

    def plan(self, now: float = 0.0, max_steps: int = 1) -> StepPlan | None:
        """The plan of the next step; None if there is nothing to do. While no other plan is in flight. It may be for up
        to `max_steps` steps where all sequences decode and none waits.

        Requests whose deadline has passed by `now` are `dropped` first, and waiting requests that cannot reach their
        first token in time, by `deadlines.tokens_per_s`.
        """
        assert not self._in_flight, "the last plan has not been committed"
        self._let_time_pass(now)
        if not self._sequences:
            return None
        shares = self.policy.schedule(self._queues)
        assert shares, "requests are alive and the policy found nothing to do"
        if len(shares) > 1 and self._queues.num_uncomputed_tokens > len(shares):  # else all decode
            shares = bound_prompt_logprobs(shares)
        return self._plan_of(shares, 1 if self._queues.waiting.num_waiting else max_steps)

    def plan_ahead(self, now: float = 0.0) -> StepPlan | None:
        """The plan of the step after the one in flight, whose result is not known yet; None: commit that one first.
        To be run and committed after it. To be called once for each step.

        In place of the tokens that the step in flight draws it has `PENDING`. Sequences that need those are left out.
        A sequence that turns out to have ended in that step is computed in vain: `commit` ignores it.
        """
        assert len(self._in_flight) == 1, "one plan is in flight, and one is ahead of it"
        self._let_time_pass(now)
        (step,) = self._in_flight
        if not self._sequences or self._drafter is not None:
            return None
        if self._slots is not None or self._queues.windows is not None:
            return None  # states are copied, and passed blocks returned, once the step has landed
        step.foresee(self._queues)
        self._decode_batch.foresee()
        if step.holds_up_too_many:
            return None
        shares = bound_prompt_logprobs(self.policy.schedule_ahead(self._queues))
        return self._plan_of(shares) if shares else None

    def commit(self, plan: StepPlan, result: StepResult) -> list[TokenDelta]:
        """Takes the result of the oldest plan in flight; returns a delta for each sequence that gained tokens."""
        assert self._in_flight, "there is no plan in flight"
        step = self._in_flight.pop(0)
        assert plan.step_id == result.step_id == step.plan.step_id, "the result is not that of the oldest plan"
        self._queues.land()
        for sequence in step.left_out:
            sequence.awaits_result = False
        if result.drafts:
            plan = plan.with_drafts(result.drafts)
        self.counts.num_tokens_computed += plan.num_tokens
        self.counts.num_steps += step.rows.num_steps - 1  # its first was counted when it was planned
        members, num_rows = step.sequences, len(plan.decodes.token_ids)
        num_planned = num_rows + len(plan.others)
        assert len(members) == num_planned == len(result.token_ids), "a result has tokens for all sequences"
        deltas: list[TokenDelta] = []
        if num_rows:
            deltas, broken = self._decode_batch.commit(
                step.rows, result.token_ids, result.logprobs, was_foreseen=step.is_foreseen
            )
            for sequence in broken:
                self._drop_broken(sequence)
        elif step.rows.sequences:  # they were computed with drafts
            self._decode_batch.forget()
        if plan.others:
            deltas += self._share_commit.take(
                members[num_rows:], plan.others, result.without_first(num_rows) if num_rows else result
            )
        num_finished = self.counts.num_finished
        for delta in deltas:
            if delta.finish_reason is not None:
                self._finish(delta.attempt)
        if self.counts.num_finished > num_finished:
            self.policy.release(self._queues)
        return deltas

    def take_dropped(self) -> list[DroppedRequest]:
        """The `dropped` requests since the last call."""
        dropped, self.dropped = self.dropped, []
        return dropped

    @property
    def caches(self) -> tuple[BlockAllocator, StateSlots | None]:
        """Blocks, and slots of a model that keeps states: for what lies below the cache."""
        return self._allocator, self._slots

    @property
    def pinning(self) -> Pinning:
        """Prefixes that are pinned."""
        return self._queues.pinning

    def running_requests(self) -> dict[int, EngineRequest]:
        """The requests that run, by the ids that their sequences have in plans."""
        return {sequence.sequence_id: sequence.request for sequence in self._queues.running}

    def adapters_in_use(self) -> set[str]:
        """Digests of the adapters of requests that have not ended."""
        adapters = (sequence.request.adapter for sequence in self._sequences.values())
        return {adapter.digest for adapter in adapters if adapter is not None}

    def forget_cache(self) -> None:
        """Evicts the whole prefix cache: it belongs to other weights. No request may be open."""
        assert not self._sequences, "running requests need its cache"
        self.policy.release(self._queues)
        if self._slots is not None:
            self._slots.forget_cached()
        self._allocator.forget_cached()

    # --- State ---

    @property
    def has_work(self) -> bool:
        """Whether any request is open, or a plan in flight must be committed."""
        return bool(self._sequences or self._in_flight)

    @property
    def has_full_step(self) -> bool:
        """Whether open requests have as many tokens to compute as a step may have."""
        return self._queues.num_uncomputed_tokens >= self.policy.limits.max_num_batched_tokens

    def num_awaited_blocks(self, priority: Priority) -> int:
        """Most blocks that waiting requests of this class or a better one take; 0: none waits for memory or a slot."""
        num_waiting = self._queues.waiting.num_up_to(priority)
        return num_waiting and num_waiting + self._allocator.num_blocks_for(self._queues.num_uncomputed_tokens)

    def can_preempt(self, priority: Priority) -> bool:
        """Whether a sequence of a worse class runs, which a request of this one may preempt."""
        return any(sequence.service_class > priority for sequence in self._queues.running[-1:])

    def load(self) -> EngineLoad:
        """The load of this replica now."""
        return EngineLoad(
            num_running=len(self._sequences) - self._queues.waiting.num_waiting,
            num_waiting=self._queues.waiting.num_waiting,
            num_waiting_tokens=self._queues.num_uncomputed_tokens,
            num_free_blocks=self._queues.num_free,
            num_total_blocks=self._allocator.num_blocks,
        )

    def stats(self) -> EngineStats:
        """The counts and the levels of now, exact between two steps; later ones do not change it. O(running
        sequences).
        """
        load, of_slots = self.load(), {} if self._slots is None else self._slots.stats()
        return replace(
            self.counts,
            step_counts=tuple(self.counts.step_counts),
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            num_waiting_tokens=load.num_waiting_tokens,
            num_used_blocks=load.num_total_blocks - load.num_free_blocks,
            num_free_blocks=load.num_free_blocks,
            num_cached_blocks=self._allocator.num_cached,
            num_pinned_blocks=len(self._allocator.pins.by_block),
            num_total_blocks=load.num_total_blocks,
            num_wasted_slots=self._queues.num_wasted_slots(),
            num_evictions=self.prefix_cache.num_evictions,
            num_resident_adapters=len(self.adapter_slots),
            **of_slots,  # type: ignore[arg-type]
        )

    def check_integrity(self) -> None:
        """Raises AssertionError unless requests, queues and blocks agree. O(blocks + requests)."""
        self._queues.check_integrity()
        if not self._in_flight:
            self._decode_batch.check_integrity()
        counted = self._queues.num_uncomputed_tokens
        found = sum(sequence.num_uncomputed_tokens for sequence in self._sequences.values())
        assert counted == found, f"{found} tokens are not computed, and {counted} were counted"
        queued = [*self._queues.waiting, *self._queues.running]
        alive = {sequence.attempt for sequence in queued if sequence.status is not SequenceStatus.FINISHED}
        assert alive == self._sequences.keys(), f"queues and requests differ: {alive ^ self._sequences.keys()}"
        if not alive and not self._in_flight:
            assert self._allocator.num_used == 0, f"{self._allocator.num_used} blocks are used by no request"
            num_remembered = 0 if self._drafter is None else self._drafter.num_remembered
            assert num_remembered == 0, "speculation remembers sequences that have ended"

    # --- Internals ---

    def _plan_of(self, shares: list[Share], max_steps: int = 1) -> StepPlan:
        """Plan of the next step for each of its sequences. It is in flight from here on."""
        self._num_plans += 1
        self.counts.num_steps += 1
        drafts: list[Drafts] = []
        if self._drafter is not None:
            drafts = self._drafter.drafts(shares, self._queues, self.policy.limits)
        if drafts:
            self._decode_batch.forget()
            rows, in_rows, others = NO_ROWS, NOBODY, shares
        else:
            rows, in_rows, others = self._decode_batch.split(shares, max_steps)
        sequences, scheduled = [*in_rows.sequences], []
        for (sequence, num_tokens), drafted in zip(others, drafts or repeat(NO_DRAFTS), strict=False):
            sequences.append(sequence)
            scheduled.append(scheduled_sequence(sequence, num_tokens, drafted, self._queues))
        plan = StepPlan(
            step_id=self._num_plans,
            decodes=rows,
            others=scheduled,
            block_copies=self._queues.take_block_copies(),
            window_copies=() if self._queues.windows is None else self._queues.take_window_copies(),
            state_copies=() if self._slots is None else self._slots.take_copies(),
        )
        if self._slots is not None and self._slots.blocks_per_slot:
            plan.idle_blocks, plan.idle_slots = self._slots.take_idle()
        self._in_flight.append(StepInFlight(plan, in_rows, sequences))
        self._queues.take_off(sequences)
        return plan

    def _let_time_pass(self, now: float) -> None:
        """Classes improve with waiting, and requests whose time is up are dropped."""
        self._queues.waiting.advance(now)
        pinning = self._queues.pinning
        pinning.now = now
        if now >= pinning.next_end_s:
            pinning.end(now)
        while (sequence := self.deadlines.next_expired(now)) is not None:
            self._drop(sequence)
            self.dropped.append(DroppedRequest(sequence.attempt, sequence.request, DropReason.EXPIRED))
            self.counts.num_expired += 1

    def _drop_broken(self, sequence: Sequence) -> None:
        """Drops a sequence. If its logits are not finite, neither may its keys and values be: no other sequence may
        reuse its cached prefix.
        """
        reason = DropReason.DEAD_END if sequence.has_dead_end else DropReason.NOT_FINITE
        if reason is DropReason.NOT_FINITE:
            self._queues.forget_prefix(sequence)
        self._drop(sequence)
        self.dropped.append(DroppedRequest(sequence.attempt, sequence.request, reason))

    def _drop(self, sequence: Sequence) -> None:
        """Removes a sequence that has not finished by itself."""
        del self._sequences[sequence.attempt]
        self.deadlines.forget(sequence)
        self._queues.remove(sequence)
        if self._drafter is not None:
            self._drafter.forget(sequence)
        self.policy.release(self._queues)

    def _finish(self, attempt: Hashable) -> None:
        sequence = self._sequences.pop(attempt)
        self._queues.finish(sequence)
        if sequence.deadline_s < math.inf:
            self.deadlines.forget(sequence)
        if self._drafter is not None:
            self._drafter.forget(sequence)
        self.counts.num_finished += 1

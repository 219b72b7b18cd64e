"""Engine core, the engine without its thread: a state machine that tells the scheduler's outputs to their listeners.

    submit, abort ─► scheduler.plan ─► (the caller runs it) ─► commit ─► take_updates

A caller whose device runs one step while the next is planned asks for that one by `scheduler.plan_ahead`, before the
`commit`. The core adds to the scheduler who waits for each request, and whether the replica itself is at fault.
"""

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from typing import Final

from holdfast.worker.block_hash import root_hash
from holdfast.worker.cache.prefix_cache import CacheFeed
from holdfast.worker.engine.block_tier import BlockTier
from holdfast.worker.engine.held_requests import AdapterDesk, HeldRequest, HeldRequests
from holdfast.worker.engine.inbox import OutputQueue
from holdfast.worker.engine.request_guards import NonFiniteGuard, NumbersCheck, Suspects, no_numbers
from holdfast.worker.errors import DeadlineExceededError, HoldfastError, InvalidRequestError
from holdfast.worker.request import EngineRequest, FinishReason, TokenDelta
from holdfast.worker.scheduler.acceptance import BestSpeeds, DropReason
from holdfast.worker.scheduler.scheduler import Scheduler
from holdfast.worker.step_plan import StepPlan, StepResult
from holdfast.worker.step_update import (
    NO_STEPS,
    TOKEN_TIMES_S,
    Rejection,
    StepListener,
    StepUpdate,
)
from holdfast.worker.structured_outputs import dead_end

STATS_EVERY_STEPS: Final = 32
"""Steps between statistics of a busy engine; they are also computed when it becomes idle."""


class EngineCore:
    """A scheduler and its listeners' output queues. Not thread-safe, but for `load`, `reported_stats`, `listeners` and
    the scheduler's `has_work`.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        """The scheduler, for plans and statistics. Requests are added and removed, and results committed, through the
        core."""
        self._output_queues: dict[StepListener, OutputQueue] = {}  # in order of attaching
        self._feeds: dict[StepListener, CacheFeed] = {}  # the subscribers of the cache
        self._owners: dict[Hashable, StepListener] = {}  # by the keys of requests that have not ended
        self.suspects: Suspects[StepListener] = Suspects()
        """While it `has_news`, it must be sent to the listeners before a plan is run: the step may end the process."""
        self._non_finite_guard = NonFiniteGuard()
        self.numbers_check: NumbersCheck | None = None
        """Check for non-finite logits. Without one, several requests without finite logits are proof against the
        replica."""
        self.tier: BlockTier | None = None
        """Block tier, if blocks can be moved (`put_below`)."""
        self.adapters: AdapterDesk | None = None
        """Desk of adapters, where they are served (`serve_adapters`)."""
        self.held = HeldRequests()
        """Requests that wait for blocks or for an adapter. To be read only."""
        self._counts = scheduler.counts
        self._step_counts = self._counts.step_counts = [*NO_STEPS]
        self._speeds = BestSpeeds(scheduler.deadlines, self._counts)
        self._step_id = 0
        self._reported_step_id = 0  # of the last step that was reported to listeners
        self._stats_step_id = 0  # of the last step whose statistics were reported
        self.load = scheduler.load()
        """Load as last reported, for a listener without requests here. Read only."""
        self.reported_stats = scheduler.stats()
        """Statistics last computed for listeners."""

    def put_below(self, tier: BlockTier) -> None:
        """Blocks can be moved to the cache and from it. Before any request comes."""
        self.tier = self.held.tier = tier

    def serve_adapters(self, desk: AdapterDesk) -> None:
        """Requests may have adapters. Before any request comes."""
        self.adapters = self.held.adapters = desk

    # --- listeners ---

    @property
    def listeners(self) -> list[StepListener]:
        """The listeners that are attached now, in order of attaching."""
        return list(self._output_queues)

    def attach(self, listener: StepListener) -> None:
        """Sends `listener` an update after every step from now on. Does nothing if it is attached already."""
        self._output_queues.setdefault(listener, OutputQueue())

    def detach(self, listener: StepListener) -> None:
        """`listener` gets no further updates, and its requests are aborted."""
        self._reject_dropped()
        self._output_queues.pop(listener, None)
        self._feeds.pop(listener, None)
        self.held.drop(listener)
        for attempt in [attempt for attempt, owner in self._owners.items() if owner is listener]:
            self.abort(attempt)

    def follow_cache(self, listener: StepListener) -> None:
        """The updates of an attached listener report the prefix cache's content: first all of it, then changes."""
        output_queue = self._output_queues.get(listener)
        if output_queue is not None:
            # Earlier events that have not been taken follow, and agree with this on each block.
            allocator, slots = self.scheduler.caches
            blocks, states = allocator.prefix_cache.block_hashes, () if slots is None else slots.snapshot_hashes
            if self.tier is not None and self.tier.has_store:
                blocks, states = (*blocks, *self.tier.block_hashes), (*states, *self.tier.snapshot_hashes)
            adapters = () if self.adapters is None else self.adapters.digests
            output_queue.cache = self._feeds[listener] = CacheFeed(blocks, states, adapters)

    # --- requests ---

    def submit(self, request: EngineRequest, listener: StepListener, now: float, attempt: Hashable = None) -> None:
        """Takes in a request of `listener`, which gets its outcome in any case. `now` as for `plan`.

        `attempt` is the key that the request is known by from here on, None its own id.
        """
        attempt = request.request_id if attempt is None else attempt
        if request.adapter is not None and not self._has_adapter(request, listener, now, attempt):
            return
        if self.tier is not None and listener is self.numbers_check:
            self.tier.leave_out(root_hash(request.cache_salt, request.tenant, request.adapter_digest))
        may_be_held = self.tier is not None and (self.tier.has_store or request.block_source is not None)
        if attempt in self.held.for_blocks:
            self._release(attempt)
        elif may_be_held and self.held.hold_for_blocks(attempt, request, listener, now):
            return
        self._submit(request, listener, now, attempt)

    def fetch_ahead(
        self, request: EngineRequest, now: float, listener: StepListener | None = None, attempt: Hashable = None
    ) -> None:
        """Fetches blocks from the source of a request that comes later, as far as there is room. Then `listener` gets
        `attempt`.
        """
        self.held.fetch_ahead(request, now, listener, attempt)
        self.held.tell_fetched(self._output_queues)

    def _has_adapter(self, request: EngineRequest, listener: StepListener, now: float, attempt: Hashable) -> bool:
        """Whether the adapter of a request is resident; if it is not, the request waits for it, or is refused."""
        assert request.adapter is not None
        if self.adapters is None:
            limit = "this replica serves no adapters (model.enable_lora)"
            self._refuse(attempt, InvalidRequestError("model", request.adapter.name, limit), listener)
            return False
        if self.adapters.is_ready(request.adapter):
            return True
        self.adapters.hold(attempt, HeldRequest(request, listener, now))
        return False

    def adapters_in_use(self) -> set[str]:
        """Digests of the adapters of open requests, including requests that wait for their prefix."""
        of_held = {held.request.adapter_digest for held in self.held.for_blocks.values()}
        return self.scheduler.adapters_in_use() | of_held

    def adapter_loaded(self, ticket: int) -> None:
        """Ends the load of an adapter, between two steps: requests that waited for it continue, or are refused."""
        assert self.adapters is not None
        ready, failure = self.adapters.loaded(ticket)
        self._reported_step_id = -1  # its statistics have changed
        self._counts.num_adapter_loads, self._counts.adapter_load_s = self.adapters.num_loaded, self.adapters.load_s
        for attempt, one in ready:
            if failure is None:
                self.submit(one.request, one.listener, one.arrived_s, attempt)
            else:
                self._refuse(attempt, failure, one.listener)
        self.adapters.advance()

    def _submit(
        self, request: EngineRequest, listener: StepListener, now: float, attempt: Hashable, num_disk_tokens: int = 0
    ) -> None:
        self._counts.num_requests += 1
        if listener not in self._output_queues:
            return  # detached meanwhile: no one waits for an answer
        poison_risk, suspects = request.poison_risk, self.suspects
        try:
            if poison_risk or suspects.requests:
                suspects.check(poison_risk, listener)
            finished = self.scheduler.add(request, now, attempt, num_disk_tokens)
        except HoldfastError as error:
            self._refuse(attempt, error, listener)
            return
        self._owners[attempt] = listener
        if poison_risk:
            suspects.add(attempt, poison_risk, listener)
        if finished is not None:
            self._keep([finished])

    def _release(self, attempt: Hashable) -> None:
        """Submits a held request as a new one with the same deadline."""
        held = self.held.take(attempt)
        num_disk_tokens = 0 if held.restore is None else held.restore.num_hit_tokens
        self._submit(held.request, held.listener, held.arrived_s, attempt, num_disk_tokens)

    def abort(self, attempt: Hashable) -> None:
        """Ends a request; its last delta says `ABORT`. Unknown keys are ignored."""
        if attempt in self.held.for_blocks:
            self._release(attempt)
        if attempt in self.held.for_adapters:
            self._end_awaiting(attempt)
            return
        delta = self.scheduler.abort(attempt)
        if delta is not None:
            self._keep([delta])
            self._note_ended()
        elif attempt in self._non_finite_guard.in_doubt:
            self._non_finite_guard.in_doubt.remove(attempt)
            self._reject(attempt, no_numbers())

    def _end_awaiting(self, attempt: Hashable) -> None:
        """Ends a request that waits for its adapter, as if it had been aborted while it waited for a slot."""
        one = self.held.for_adapters.pop(attempt)
        output_queue = self._output_queues.get(one.listener)
        if output_queue is not None:
            num_tokens = len(one.request.output_token_ids)
            output_queue.deltas.append(TokenDelta(attempt, num_tokens, (), FinishReason.ABORT))

    def _note_ended(self) -> None:
        """Notes the end of a request: its adapter's slot may go to another adapter that waits for one."""
        if self.adapters is not None and self.adapters.has_full:
            self.adapters.advance()

    def abort_all(self) -> None:
        """`abort` for every request."""
        for attempt in list(self.held.for_adapters):
            self._end_awaiting(attempt)
        for attempt in list(self.held.for_blocks):
            self._release(attempt)
        self._keep(self.scheduler.abort_all())
        self._reject_in_doubt()

    # --- below the cache ---

    def tend_tier(self, now: float, step_s: float | None = None) -> bool:
        """Between two steps: copies blocks to the store and from it, and to other replicas and from them, and releases
        requests whose blocks have arrived. `step_s`: seconds of the last step; None: the engine is idle. Whether it has
        news that a request waits for elsewhere.
        """
        if self.tier is None:
            return False
        if self.tier.has_store:
            self._note_cache_events()
        self.tier.sendings.advance(step_s, now)
        for attempt in self.held.has_blocks(step_s, now):
            self._release(attempt)
        has_news = self.held.tell_fetched(self._output_queues)
        if self.tier.has_store:
            self.tier.store_some(step_s)
        self.tier.report(self._counts)
        return has_news

    def most_idle_s(self, now: float, most_s: float) -> float:
        """Seconds to wait for a command, if there is nothing to run."""
        if self.tier is None or not self.tier.moves:
            return most_s
        due_s = min(self.tier.restores.next_due_s, self.tier.sendings.next_due_s)
        return min(most_s, max(0.001, due_s - now))

    def forget_cache(self) -> None:
        """Forgets the cache, which belongs to other weights now. No request may be open."""
        for attempt in list(self.held.for_blocks):
            self._release(attempt)
        self.scheduler.forget_cache()
        if self.tier is not None:
            self._note_cache_events()
            self.tier.forget()

    # --- steps ---

    def commit(self, plan: StepPlan, result: StepResult, step_s: float) -> int:
        """Takes in the result of the oldest plan in flight, and its seconds. Returns the number of tokens gained.

        Raises `ReplicaError` if the model's logits are NaN or infinite and no single request is the cause.
        """
        self._step_id = plan.step_id
        self._counts.step_time_s += step_s
        if step_s > 0:
            self._speeds.note(plan, step_s, self.scheduler.policy.limits.max_num_batched_tokens)
        deltas = self.scheduler.commit(plan, result)
        if self.scheduler.dropped:
            self._reject_dropped(has_others=bool(deltas))
        if deltas and self._non_finite_guard.in_a_row:
            self._non_finite_guard.settle()
        num_tokens = self._keep(deltas)
        if self.adapters is not None:
            self._note_ended()
        return num_tokens

    def _reject_dropped(self, *, has_others: bool = False) -> None:
        """Rejects requests that the scheduler has dropped; `has_others`: other requests got tokens in the step that
        dropped these. Raises as `commit`.
        """
        not_finite = []
        for one in self.scheduler.take_dropped():
            if one.reason is DropReason.NOT_FINITE:
                not_finite.append(one)
            else:
                self._reject(one.attempt, dead_end() if one.reason is DropReason.DEAD_END else _too_late())
        if not_finite:
            check, owners, guard = self.numbers_check, self._owners, self._non_finite_guard
            for attempt in guard.judge(not_finite, check, owners, has_others=has_others):
                self._reject(attempt, no_numbers())

    def settle(self) -> None:
        """The replica is well: the requests without finite logits are themselves at fault."""
        self._non_finite_guard.settle()
        self._reject_in_doubt()

    def _reject_in_doubt(self) -> None:
        for attempt in self._non_finite_guard.take_in_doubt():
            self._reject(attempt, no_numbers())

    def _reject(self, attempt: Hashable, error: HoldfastError) -> None:
        """Keeps a rejection for the owner of a request, which ends it."""
        self.suspects.drop(attempt)
        self._refuse(attempt, error, self._owners.pop(attempt))

    def _refuse(self, attempt: Hashable, error: HoldfastError, listener: StepListener) -> None:
        """Keeps a rejection of a request that `listener` does not own, or no longer."""
        output_queue = self._output_queues.get(listener)
        if output_queue is not None:
            output_queue.rejections.append(Rejection(attempt=attempt, error=error))

    def note_turn(self, plan_s: float, run_s: float, commit_s: float, num_steps: int = 1) -> None:
        """Notes the times of a plan's steps for the next statistics: to plan, to run, and to commit and deliver."""
        self._counts.plan_time_s += plan_s
        self._counts.commit_time_s += commit_s
        step_s = (plan_s + run_s + commit_s) / num_steps
        self._step_counts[bisect_left(TOKEN_TIMES_S, step_s)] += num_steps  # of each step, so no call more

    def take_updates(self) -> list[tuple[StepListener, StepUpdate]]:
        """The updates to send now, by listener: to all after a step or a change of load, else to those with news."""
        if self.scheduler.dropped:
            self._reject_dropped()
        before, self.load = self.load, self.scheduler.load()
        if self.suspects.requests:
            self.load = self.suspects.load_for(None, self.load)
        concerns_all = self._step_id != self._reported_step_id or self.load != before or self.suspects.has_news
        self._reported_step_id, self.suspects.has_news = self._step_id, False
        stats = None
        is_due = not self.scheduler.has_work or self._step_id >= self._stats_step_id + STATS_EVERY_STEPS
        if concerns_all and is_due:
            self._stats_step_id = self._step_id
            stats = self.reported_stats = self.scheduler.stats()
        if self._feeds or (self.tier is not None and self.tier.has_store):
            self._note_cache_events()
        updates = []
        for listener, output_queue in self._output_queues.items():
            if concerns_all or output_queue.has_news:
                of_new = self.scheduler.stats() if stats is None and output_queue.is_new else stats
                load = self.suspects.load_for(listener, self.load) if self.suspects.requests else self.load
                updates.append((listener, output_queue.take(self._step_id, load, of_new)))
        return updates

    # --- state ---

    def check_integrity(self) -> None:
        """Raise AssertionError unless scheduler, blocks and output queues agree. For idle times, as the scheduler's."""
        self.scheduler.check_integrity()
        left_behind = [attempt for attempt, owner in self._owners.items() if owner not in self._output_queues]
        assert not left_behind, f"no listener has the requests {left_behind}"
        load = self.scheduler.load()
        num_ending = len(self.scheduler.dropped) + len(self._non_finite_guard.in_doubt)
        num_alive = load.num_running + load.num_waiting + num_ending
        assert num_alive == len(self._owners), f"{num_alive} requests are alive, and {len(self._owners)} are waited for"

    # --- internals ---

    def _keep(self, deltas: Sequence[TokenDelta]) -> int:
        """Keeps each delta for the owner of its request; returns their number of tokens."""
        if self.suspects.requests:
            self.suspects.note(deltas)
        owners, output_queues = self._owners, self._output_queues
        num_tokens = 0
        for delta in deltas:
            num_tokens += len(delta.token_ids)
            attempt = delta.attempt
            listener = owners[attempt] if delta.finish_reason is None else owners.pop(attempt)
            output_queue = output_queues.get(listener)
            if output_queue is not None:
                output_queue.deltas.append(delta)
        self._counts.num_tokens_generated += num_tokens
        return num_tokens

    def _note_cache_events(self) -> None:
        """Keeps the prefix cache's events for its subscribers; without any, they are not collected."""
        blocks, slots = self.scheduler.caches
        events, states = blocks.prefix_cache.take_events(), [] if slots is None else slots.take_events()
        if self.tier is not None and self.tier.has_store:
            self.tier.note(events, states)
            events, states = self.tier.seen(events, states)
        adapters = {} if self.adapters is None else self.adapters.take_changes()
        for feed in self._feeds.values():
            feed.note(events, states)
            feed.note_adapters(adapters)


def _too_late() -> DeadlineExceededError:
    return DeadlineExceededError("the request's time was up in the replica")

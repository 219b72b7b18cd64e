"""A machine that plays requests, steps, time, drafts and aborts at random against a scheduler, and looks at everything.

Requests come alone, several of one prompt, with prefixes in common and as later turns of earlier ones, some asking for
logprobs of their prompt, of any tenant and class, with and without a deadline. The pseudo-model's tokens come out wrong
if a block is shared, copied, lost or replayed badly.
"""

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from holdfast.cluster.simulate.oracle.pseudo_runner import run_each
from holdfast.worker.cache.prefix_cache import BlockStored
from holdfast.worker.config import SchedulerConfig
from holdfast.worker.errors import InvalidRequestError, QueueFullError
from holdfast.worker.request import EngineRequest, FinishReason, TokenDelta
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.scheduler.batching import ContinuousBatching, MakePolicy, MemoryAwareBatching
from holdfast.worker.scheduler.scheduler import Scheduler
from holdfast.worker.scheduler.speculation import Speculation
from holdfast.worker.step_plan import NO_ROWS, ScheduledSequence, StepPlan, StepResult
from tests.pseudo_model import PseudoRunner, pseudo_completion
from tests.worker.scheduler.expectations import EOS, VOCAB_SIZE, Expected, wishes
from tests.worker.schedulers import dropped

MAX_PROMPT_LOGPROBS = 5

MAX_STEPS = 5000
"""Far more than any example needs: reaching it means that somebody starves."""


class SchedulerMachine(RuleBasedStateMachine):
    make_policy: MakePolicy = ContinuousBatching
    may_cache_prefixes = True
    max_steps = 1

    @initialize(
        num_blocks=st.integers(8, 24),
        block_size=st.integers(1, 4),
        max_num_batched_tokens=st.sampled_from([24, 16, 7, 3, 1]),
        max_num_seqs=st.sampled_from([8, 6, 4, 1]),
        max_model_len=st.sampled_from([32, 32, 24, 8]),
        prefix_caching=st.sampled_from([True, True, True, False]),
        aging_s=st.sampled_from([0.5, 3.0, 1000.0]),
        tokens_per_s=st.sampled_from([None, None, 5.0]),
    )
    def start(
        self,
        num_blocks,
        block_size,
        max_num_batched_tokens,
        max_num_seqs,
        max_model_len,
        prefix_caching,
        aging_s,
        tokens_per_s,
    ):
        self.now = 100.0
        self.config = SchedulerConfig(
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_num_waiting=8,
            aging_s=aging_s,
            tenant_shares={"a": 2.0},
        )
        self.num_slots, self.block_size, self.max_model_len = num_blocks * block_size, block_size, max_model_len
        self.scheduler = Scheduler(
            self.config,
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            eos_token_ids=frozenset({EOS}),
            prefix_caching=prefix_caching and self.may_cache_prefixes,
            drafter=self.speculation(),
            make_policy=type(self).make_policy,
        )
        self.scheduler.deadlines.tokens_per_s = tokens_per_s
        self.runner = PseudoRunner(num_blocks, block_size, VOCAB_SIZE)
        self.expected: dict[str, Expected] = {}
        self.by_sequence_id: list[Expected] = []
        self.last_running: list[Expected] = []
        self.salt_of_block: dict[int, str] = {}
        self.known_to_router: set[bytes] = set()
        self.take_events()

    def speculation(self) -> Speculation | None:
        return None

    def further_params(self, seed: int) -> dict[str, object]:
        return {}

    # --- What happens ---

    @rule(wishes=st.lists(wishes, min_size=2, max_size=6))
    def add(self, wishes):
        for wish in wishes:
            self.add_group(**wish)

    @rule(
        data=st.data(),
        num_steps=st.integers(1, 8),
        step_s=st.sampled_from([0.0, 0.1, 1.0]),
        abort=st.sampled_from([*["nobody"] * 8, "one", "one midway", "one midway", "all midway"]),
        with_drafts=st.booleans(),
    )
    def run(self, data, num_steps, step_s, abort, with_drafts):
        if abort == "one":
            self.abort_one(data)
        for _ in range(num_steps):
            self.now += step_s
            plan = self.plan()
            if plan is None:
                return
            self.check_plan(plan)
            plan = self.with_drafts(plan, data) if with_drafts else plan
            result = self.run_checked(plan)
            if abort == "one midway":
                self.abort_one(data)
            elif abort == "all midway":
                self.abort_all()
            self.take(self.scheduler.commit(plan, result))

    @rule()
    def take_events(self):
        """What a router keeps of it is what is cached."""
        for event in self.scheduler.prefix_cache.take_events():
            if isinstance(event, BlockStored):
                assert event.block_hash not in self.known_to_router
                self.known_to_router.add(event.block_hash)
            else:
                self.known_to_router.remove(event.block_hash)
        assert self.known_to_router == self.scheduler._allocator.prefix_cache._block_ids.keys()

    def plan(self) -> StepPlan | None:
        """The next step, and who was dropped before it."""
        plan = self.scheduler.plan(self.now, self.max_steps)
        for request_id in dropped(self.scheduler):
            expected = self.expected[request_id]
            assert expected.is_alive, "a request ends once"
            is_late = expected.sequence.deadline_s <= self.now
            assert is_late or (self.scheduler.deadlines.tokens_per_s and not expected.received)
            expected.has_expired = True
        assert (plan is None) == (not self.alive())
        assert all(expected.sequence.deadline_s > self.now for expected in self.alive().values())
        return plan

    def run_checked(self, plan: StepPlan) -> StepResult:
        """Run a step, looking at what it writes over and at what it leaves behind."""
        for sequence in plan.sequences:
            self.check_blocks(sequence)
        result = run_each(plan, self.runner.run)
        for sequence in plan.sequences:
            expected = self.by_sequence_id[sequence.sequence_id]
            before = (*expected.request.prompt_token_ids, *expected.received)[: sequence.first_position]
            assert self.runner.read_back(sequence) == [*before, *sequence.token_ids]
        return result

    def check_blocks(self, sequence: ScheduledSequence) -> None:
        """It writes to its own blocks only, which nobody can find, and reads none of another salt."""
        salt = self.by_sequence_id[sequence.sequence_id].request.cache_salt
        num_full = sequence.first_position // self.block_size
        for block_id in sequence.block_ids[:num_full]:
            assert self.salt_of_block[block_id] == salt
        for block_id in sequence.block_ids[num_full:]:
            assert self.scheduler._allocator.ref_count(block_id) == 1
            assert block_id not in self.scheduler._allocator.prefix_cache.contents
            self.salt_of_block[block_id] = salt

    def add_group(self, prompt, turn_of, num_before, **wish):
        if turn_of is not None and self.expected:
            earlier = list(self.expected.values())[turn_of % len(self.expected)]
            prompt = (*earlier.request.prompt_token_ids, *earlier.received, *prompt)[:24]
        group_id = f"g{len(self.expected)}" if len(num_before) > 1 else ""
        for index, number in enumerate(num_before):
            request, outputs = self.request_of(prompt, number, {**wish, "seed": wish["seed"] + index})
            self.add_one(replace(request, group_id=group_id), outputs)

    def request_of(self, prompt, num_before, wish) -> tuple[EngineRequest, list[int]]:
        """A request that goes on after `num_before` tokens, if it has so many, and all tokens that it must get."""
        stop = [*wish["stop_ids"], *([] if wish["ignore_eos"] else [EOS])]
        num_tokens = self.num_tokens_for(prompt, wish["max_tokens"])
        outputs = pseudo_completion(prompt, wish["seed"], num_tokens, VOCAB_SIZE, stop)
        params = SamplingParams(
            stop_token_ids=wish["stop_ids"],
            **{name: wish[name] for name in ("seed", "max_tokens", "ignore_eos", "prompt_logprobs")},
            **self.further_params(wish["seed"]),
        )
        request = EngineRequest(
            request_id=f"r{len(self.expected)}",
            prompt_token_ids=prompt,
            output_token_ids=tuple(outputs[:num_before]),
            sampling_params=params,
            cache_salt=wish["salt"],
            **{name: wish[name] for name in ("priority", "tenant", "time_left_s")},
        )
        return request, outputs

    def num_tokens_for(self, prompt, max_tokens) -> int:
        return max(0, min(max_tokens or self.max_model_len, self.max_model_len - len(prompt)))

    def add_one(self, request: EngineRequest, outputs: list[int]) -> None:
        prompt = request.prompt_token_ids
        num_tokens = self.num_tokens_for(prompt, request.sampling_params.max_tokens)
        fits = len(prompt) < self.max_model_len and len(prompt) + num_tokens - 1 <= self.num_slots
        was_complete = 0 < len(outputs) == len(request.output_token_ids)
        try:
            delta = self.scheduler.add(request, self.now)
        except InvalidRequestError:
            assert not fits
        except QueueFullError:
            assert self.scheduler.load().num_waiting >= self.config.max_num_waiting
        else:
            assert fits or was_complete
            assert (delta is not None) == was_complete
            expected = Expected(request, outputs, self.scheduler._sequences.get(request.request_id))
            self.expected[request.request_id] = expected
            if was_complete:
                expected.take(delta)
            else:
                self.by_sequence_id.append(expected)

    def abort_one(self, data):
        if self.alive():
            request_id = data.draw(st.sampled_from(sorted(self.alive())))
            self.take_aborts([self.scheduler.abort(request_id)], {request_id})

    def abort_all(self):
        alive = set(self.alive())
        self.take_aborts(self.scheduler.abort_all(), alive)

    def take(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            self.expected[delta.attempt].take(delta)

    def take_aborts(self, deltas: list[TokenDelta], request_ids: set[str]) -> None:
        assert {delta.attempt for delta in deltas} == request_ids
        assert all(delta.finish_reason is FinishReason.ABORT and not delta.token_ids for delta in deltas)
        self.take(deltas)

    def with_drafts(self, plan: StepPlan, data) -> StepPlan:
        """The plan with drafted tokens to verify, right and wrong ones, where the last block has room for them."""
        sequences = []
        for sequence in plan.sequences:
            room = len(sequence.block_ids) * self.block_size - sequence.first_position - len(sequence.token_ids)
            if sequence.num_draws == 1 and room > 0:
                sequence = self.drafted(sequence, data.draw(st.lists(st.booleans(), max_size=room)))
            sequences.append(sequence)
        return replace(plan, decodes=NO_ROWS, others=tuple(sequences))

    def drafted(self, sequence: ScheduledSequence, are_right: list[bool]) -> ScheduledSequence:
        expected = self.by_sequence_id[sequence.sequence_id]
        future = expected.outputs[len(expected.received) :]
        drafts = tuple((t + (not right)) % VOCAB_SIZE for t, right in zip(future, are_right, strict=False))
        return replace(sequence, token_ids=sequence.token_ids + drafts, num_draws=1 + len(drafts))

    # --- What must hold ---

    def alive(self) -> dict[str, Expected]:
        return {key: expected for key, expected in self.expected.items() if expected.is_alive}

    def check_plan(self, plan: StepPlan) -> None:
        assert 1 <= plan.num_tokens <= self.config.max_num_batched_tokens * plan.num_steps
        assert 1 <= plan.num_steps <= self.max_steps
        assert 1 <= len(plan.sequences) <= self.config.max_num_seqs
        assert sum(len(s.prompt_logprobs.token_ids) for s in plan.sequences if s.prompt_logprobs) <= MAX_PROMPT_LOGPROBS
        self.scheduler.check_integrity()
        for sequence in plan.sequences:
            self.check_scheduled(sequence)
        self.check_first_is_served([self.by_sequence_id[sequence.sequence_id] for sequence in plan.sequences])

    def check_scheduled(self, sequence: ScheduledSequence) -> None:
        expected = self.by_sequence_id[sequence.sequence_id]
        tokens = (*expected.request.prompt_token_ids, *expected.received)
        if expected.num_cached_tokens is None:
            expected.num_cached_tokens = sequence.first_position
        num_drafts = max(0, sequence.num_draws - 1)
        end = sequence.first_position + len(sequence.token_ids) - num_drafts
        assert sequence.token_ids[: end - sequence.first_position] == tokens[sequence.first_position : end]
        assert len(sequence.block_ids) == -(-(end + num_drafts) // self.block_size)
        assert (sequence.draw is not None) == (sequence.num_draws > 0) == (end == len(tokens))
        if num_drafts:
            assert sequence.first_position == len(tokens) - 1, "only who decodes is drafted"
            longest = min(expected.request.sampling_params.max_tokens or 99, self.max_model_len)
            assert len(expected.received) + num_drafts < longest, "a draft that could not be kept"
        if sequence.draw is not None:
            assert sequence.draw.first_output_index == len(expected.received)

    def check_first_is_served(self, members: list[Expected]) -> None:
        """The first in line of those that ran is never held up, but by a better class, which runs or for which room is
        being made: by this, nobody starves.
        """
        remaining = [expected for expected in self.last_running if expected.is_alive]
        if remaining and type(self).make_policy in (ContinuousBatching, MemoryAwareBatching):
            first = min(remaining, key=lambda expected: expected.sequence.service_order)
            others = [*(expected.sequence for expected in members), *self.scheduler._queues.waiting]
            best_class = min(sequence.service_class for sequence in others)
            assert first in members or best_class < first.sequence.service_class
        self.note_running()

    def note_running(self) -> None:
        running = self.scheduler._queues.running
        self.last_running = [self.by_sequence_id[sequence.sequence_id] for sequence in running]

    @invariant()
    def nothing_is_lost(self):
        self.scheduler.check_integrity()
        load, stats = self.scheduler.load(), self.scheduler.stats()
        assert load.num_running <= self.config.max_num_seqs
        assert load.num_running + load.num_waiting == len(self.alive())
        assert stats.num_aborted + stats.num_finished + stats.num_expired == len(self.expected) - len(self.alive())
        assert stats.num_prefix_hit_tokens <= stats.num_prefix_query_tokens
        if type(self).make_policy in (ContinuousBatching, MemoryAwareBatching):
            assert stats.num_wasted_slots <= load.num_running * (self.block_size - 1)
        else:
            assert stats.num_preemptions == stats.num_prefix_hit_tokens == stats.num_forked_tokens == 0

    def teardown(self):
        num_steps = 0
        while (plan := self.plan()) is not None:
            self.check_plan(plan)
            self.take(self.scheduler.commit(plan, self.run_checked(plan)))
            self.nothing_is_lost()
            num_steps += 1
            assert num_steps < MAX_STEPS, f"still alive: {sorted(self.alive())}"
        assert not self.alive(), "everything finishes"
        stats = self.scheduler.stats()
        assert (stats.num_free_blocks, stats.num_used_blocks, stats.num_wasted_slots) == (stats.num_total_blocks, 0, 0)
        self.take_events()
        assert stats.num_cached_blocks == len(self.known_to_router)

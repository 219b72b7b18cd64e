"""Bugs that tests plant in the real deciders, to see whether the simulator finds them."""

import math
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from holdfast.cluster.simulate.actors import disk as disk_module
from holdfast.cluster.simulate.actors import transfers as transfers_module
from holdfast.cluster.simulate.actors.client import SimulatedClient
from holdfast.cluster.simulate.actors.disk import SimulatedDisk
from holdfast.cluster.simulate.actors.mover import SimulatedMover
from holdfast.cluster.simulate.oracle.pseudo_model import PseudoMatcher
from holdfast.router.dispatch import request_stream as request_stream_module
from holdfast.router.dispatch.dispatch import Dispatch
from holdfast.router.dispatch.dispatch_host import DispatchHost
from holdfast.router.dispatch.replica_state import ReplicaState
from holdfast.router.dispatch.request_state import RequestState
from holdfast.router.dispatch.request_stream import RequestStream
from holdfast.router.dispatch.request_table import RequestTable
from holdfast.router.events import Action
from holdfast.router.resume import ResumeRecord, SequenceDelta
from holdfast.router.text.text_stream import TextStream
from holdfast.worker.cache import prefix_cache as prefix_cache_module
from holdfast.worker.cache.block_pool import BlockAllocator
from holdfast.worker.cache.pins import Pins
from holdfast.worker.cache.state_slots import StateSlots
from holdfast.worker.cache.window_blocks import WindowBlocks, WindowTable
from holdfast.worker.draws import DrawParams
from holdfast.worker.engine.engine_core import EngineCore, OutputQueue
from holdfast.worker.engine.sendings import Sendings
from holdfast.worker.errors import HoldfastError
from holdfast.worker.grammar_matchers import GrammarMatchers, Matcher
from holdfast.worker.model_info import Window
from holdfast.worker.request import TokenDelta
from holdfast.worker.scheduler import sequence as sequence_module
from holdfast.worker.scheduler.kept_prefixes import Pinning
from holdfast.worker.scheduler.queues import SequenceQueues
from holdfast.worker.scheduler.sequence import Sequence
from holdfast.worker.step_plan import StateCopy
from holdfast.worker.step_update import StepListener, StepUpdate


def drop_the_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a replica says of an attempt that has ended is taken for news of the request's next attempt."""
    begin, ended = RequestTable.begin_attempt, dict[tuple[int, Hashable], RequestState]()

    def begin_attempt(self: RequestTable, record: RequestState, *args: Any) -> object:
        attempt = begin(self, record, *args)
        ended[id(self), attempt.number] = record
        return attempt

    def running(self: RequestTable, replica: ReplicaState, attempt: Hashable) -> RequestState | None:
        record = ended.get((id(self), attempt))
        is_open = record is not None and self.get(record.request_id) is record and record.attempt is not None
        return record if is_open else None

    monkeypatch.setattr(RequestTable, "begin_attempt", begin_attempt)
    monkeypatch.setattr(RequestTable, "running", running)


def reuse_a_freed_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that is still shared is handed out again when the first of its owners has gone."""
    free = BlockAllocator.free

    def free_too_early(self: BlockAllocator, block_ids: tuple[int, ...], **order: bool) -> None:
        for block_id in block_ids:
            if self._ref_counts[block_id] > 1:
                self._ref_counts[block_id] = 1
        free(self, block_ids, **order)

    monkeypatch.setattr(BlockAllocator, "free", free_too_early)


def hand_out_a_block_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Now and then a block that is owned already is handed out once more; the books look right."""
    allocate, last = BlockAllocator.allocate, dict[int, list[int]]()

    def allocate_twice(self: BlockAllocator, num_blocks: int) -> list[int]:
        block_ids = allocate(self, num_blocks)
        before = last.get(id(self))
        last[id(self)] = list(block_ids)
        return [before[0], *block_ids[1:]] if before and len(block_ids) > 2 else block_ids

    monkeypatch.setattr(BlockAllocator, "allocate", allocate_twice)


def forget_the_stop_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """On failover the text state starts anew after the tokens so far, without what it had held back."""
    continuation = RequestState.continuation

    def forgetful(self: RequestState, *args: Any) -> object:
        if self.output_token_ids:
            assert isinstance(self.text, TextStream)
            if self.text._matcher is not None:
                self.text._matcher._held = ""
        return continuation(self, *args)

    monkeypatch.setattr(RequestState, "continuation", forgetful)


def restart_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A continued request draws with the noise of output position 0, 1, ... again."""
    draw_params = Sequence.draw_params

    def restarted(self: Sequence) -> DrawParams:
        params = draw_params(self)
        num_before = len(self.request.output_token_ids)
        return replace(params, first_output_index=params.first_output_index - num_before)

    monkeypatch.setattr(Sequence, "draw_params", restarted)


def fork_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A completion that forks from its sibling in mid-block finds nothing in the block that it goes on in."""
    take = SequenceQueues.take_block_copies

    def forgetful(self: SequenceQueues) -> tuple[()]:
        take(self)
        return ()

    monkeypatch.setattr(SequenceQueues, "take_block_copies", forgetful)


def believe_a_wrong_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several drafts, one that was wrong does not make those after it wrong as well."""

    def believed(token_ids: tuple[int, ...], drawn: tuple[int, ...]) -> tuple[int, ...]:
        return drawn if len(drawn) > 1 and token_ids[-1] == drawn[-2] else confirmed(token_ids, drawn)

    confirmed = sequence_module.confirmed
    monkeypatch.setattr(sequence_module, "confirmed", believed)


def forget_that_a_completion_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that resumes does not say which of its completions have ended."""

    def forgetful(self: SimulatedClient) -> ResumeRecord | None:
        record = resume(self)
        for sequence in () if record is None else record.sequences:
            sequence.finish_reason = None
        return record

    resume = SimulatedClient._resume
    monkeypatch.setattr(SimulatedClient, "_resume", forgetful)


def count_one_character_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client's record counts one character less of each piece."""

    def shorter(self: ResumeRecord, delta: SequenceDelta) -> bool:
        is_end = delta.finish_reason is not None
        return merge(self, delta if is_end else delta._replace(text_length=max(0, delta.text_length - 1)))

    merge = ResumeRecord.merge
    monkeypatch.setattr(ResumeRecord, "merge", shorter)


def forget_the_grammar_at_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that comes with output begins its grammar anew."""
    matcher_after = GrammarMatchers._matcher_after

    def forgetful(self: GrammarMatchers, sequence_id: int, draw: DrawParams, step_id: int) -> Matcher:
        if sequence_id not in self._matched:
            matcher_after(self, sequence_id, replace(draw, output_token_ids=()), step_id)
            self._matched[sequence_id].token_ids = draw.output_token_ids
        return matcher_after(self, sequence_id, draw, step_id)

    monkeypatch.setattr(GrammarMatchers, "_matcher_after", forgetful)


def keep_drafts_in_the_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar that has read drafts goes on after them, also if they were wrong."""
    monkeypatch.setattr(PseudoMatcher, "rollback", lambda self, num_tokens: True)


def count_from_the_failover_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Penalties and bad words do not see the output that a continued request came with."""
    draw_params = Sequence.draw_params

    def forgetful(self: Sequence) -> DrawParams:
        params, num_before = draw_params(self), len(self.request.output_token_ids)
        is_counted = params.logits_settings is not None and not params.logits_settings.grammar
        return replace(params, output_token_ids=params.output_token_ids[num_before:]) if is_counted else params

    monkeypatch.setattr(Sequence, "draw_params", forgetful)


def drop_the_logprobs_of_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several tokens that a step confirms, only the first has its logprobs."""
    commit = Sequence.commit

    def dropping(*args: Any) -> TokenDelta | None:
        delta = commit(*args)
        return delta and replace(delta, logprobs=delta.logprobs[:1])

    monkeypatch.setattr(Sequence, "commit", dropping)


def skip_what_is_to_be_rated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cached prefix is not computed, though its logprobs are asked for."""
    monkeypatch.setattr(Sequence, "num_skippable_tokens", property(lambda self: len(self.token_ids) - 1))


def let_a_straggler_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two submissions of a request, the one that comes later goes on, also if its client sent it first."""
    supersede = Dispatch.supersede
    monkeypatch.setattr(
        Dispatch, "supersede", lambda self, request_id, attempt, now: supersede(self, request_id, 10**6, now)
    )


def forget_what_a_sibling_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The usage of a request with several completions is that of the one which ended last."""
    monkeypatch.setattr(request_stream_module, "together", lambda usages, share_prompt: usages[-1])


def leave_siblings_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a request's last completion finds no room, those that were opened before it go on for nobody."""

    open_all = RequestStream.open

    def forgetful(self: RequestStream, *args: Any, **named: Any) -> None:
        close, self.close = self.close, lambda: None
        open_all(self, *args, **named)
        self.close = close

    monkeypatch.setattr(RequestStream, "open", forgetful)


def leave_the_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timer that rings too early to find anything due is not set again."""

    def tick(self: DispatchHost) -> None:
        self._timer, self._timer_due = None, math.inf
        actions = self.dispatch.tick(self.now())
        if actions:
            self.perform(actions)

    monkeypatch.setattr(DispatchHost, "_tick", tick)


def keep_the_later_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadline that is due before those that are open is not waited for."""
    set_timer = DispatchHost._set_timer

    def set_once(self: DispatchHost) -> None:
        if self._timer is None:
            set_timer(self)

    monkeypatch.setattr(DispatchHost, "_set_timer", set_once)


def break_under_a_storm(monkeypatch: pytest.MonkeyPatch) -> None:
    """What meets an alarm that is as good as due fails, and is dealt with as a fault of the router."""
    set_timer = DispatchHost._set_timer

    def fail_if_near(self: DispatchHost) -> None:
        due = self.dispatch.next_tick
        if due is not None and 0 < due - self.now() < 0.0005:
            raise RuntimeError("a handle without a time")
        set_timer(self)

    monkeypatch.setattr(DispatchHost, "_set_timer", fail_if_near)


def lose_what_a_slow_reader_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what came since a reader last looked, it gets the newest."""
    monkeypatch.setattr(request_stream_module, "merged", lambda deltas: deltas[-1])


def forget_tokens_beside_a_rejection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener that is told of a rejection is not told the tokens of the same step."""
    take = OutputQueue.take

    def forgetful(self: OutputQueue, *args: object) -> StepUpdate:
        update = take(self, *args)
        return replace(update, deltas=()) if update.rejections else update

    monkeypatch.setattr(OutputQueue, "take", forgetful)


def tell_tokens_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a busy step has said last is said again after the next one; a router would not mind."""
    take = OutputQueue.take

    def repeat(self: OutputQueue, *args: object) -> StepUpdate:
        update = take(self, *args)
        self.deltas = list(update.deltas[3:4])
        return update

    monkeypatch.setattr(OutputQueue, "take", repeat)


def keep_it_from_the_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose time is up is dropped without a word; a router would find out by itself."""

    def reject(self: EngineCore, attempt: Hashable, error: HoldfastError) -> None:
        del self._owners[attempt]

    monkeypatch.setattr(EngineCore, "_reject", reject)


def keep_a_refusal_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that cannot take a request in tells nobody."""

    def refuse(self: EngineCore, attempt: Hashable, error: HoldfastError, listener: StepListener) -> None:
        pass

    monkeypatch.setattr(EngineCore, "_refuse", refuse)


def serve_those_who_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The requests that came through a link go on when it has broken."""

    def detach(self: EngineCore, listener: StepListener) -> None:
        self._output_queues.pop(listener, None)

    monkeypatch.setattr(EngineCore, "detach", detach)


def go_on_at_any_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request with output that has lost its replica goes on wherever there is room."""
    monkeypatch.setattr(RequestState, "version", "")


def refuse_who_waits_for_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a model has no replica, its requests are refused as if all replicas were busy."""

    def fail_late(self: Dispatch, now: float) -> list[Action]:
        late = iter(lambda: self._queue.pop_late(now), None)
        return [action for state in late for action in self._endings.fail(state, self._queue.too_late(state))]

    monkeypatch.setattr(Dispatch, "_fail_late", fail_late)


def hash_without_the_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of all tenants are found for each other, in memory and on the disk."""
    root, module = prefix_cache_module.root_hash, prefix_cache_module
    monkeypatch.setattr(module, "root_hash", lambda salt, tenant="", adapter="": root(salt, adapter=adapter))


def trust_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No digest is checked of what is read from the disk."""
    monkeypatch.setattr(disk_module, "is_whole", lambda row, digest: True)


def trust_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No digest is checked of blocks from other replicas."""
    monkeypatch.setattr(transfers_module, "is_whole", lambda row, digest: True)


def take_blocks_of_any_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica sends the blocks that it has in place of those that were asked for."""

    def place_of(self: Sendings, name: bytes) -> int | None:
        return next(iter(self._cache._block_ids.values()), None)

    monkeypatch.setattr(Sendings, "_place_of", place_of)


def store_without_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas of all releases find each other's blocks on the disk."""
    init, names = SimulatedMover.__init__, SimulatedDisk.names

    def of_any_kind(self: SimulatedMover, disk: Any, transfers: Any, kind: str, *args: Any) -> None:
        init(self, disk, transfers, "any", *args)

    monkeypatch.setattr(SimulatedMover, "__init__", of_any_kind)
    monkeypatch.setattr(SimulatedDisk, "names", lambda self, kind: names(self, "any"))


def give_back_what_a_window_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence gives back all blocks but the last, whatever its next tokens see."""
    give_back = WindowBlocks.give_back

    def careless(self: WindowBlocks, table: WindowTable, num_tokens: int) -> None:
        with pytest.MonkeyPatch.context() as inner:
            last = num_tokens // self.window.block_size - 1
            inner.setattr(Window, "first_block", lambda window, position: max(0, last))
            give_back(self, table, num_tokens)

    monkeypatch.setattr(WindowBlocks, "give_back", careless)


def let_pins_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pin stays when its time is up."""
    monkeypatch.setattr(Pins, "end", lambda self, now: [])


def pin_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another replica hands on is pinned on the account of no tenant."""
    keep = Pinning.keep
    monkeypatch.setattr(Pinning, "keep", lambda self, prefix, now: keep(self, prefix._replace(tenant=""), now))


def leave_the_state_of_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks, and sequences that begin from a snapshot, get a slot and no copy of the state."""
    monkeypatch.setattr(StateSlots, "take_copy", lambda slots, source: slots.take())


def keep_states_a_step_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots are copied once the next step has run."""
    take_copies, late = StateSlots.take_copies, WeakKeyDictionary[StateSlots, list[StateCopy]]()

    def delayed(slots: StateSlots) -> tuple[StateCopy, ...]:
        copies, due = take_copies(slots), late.get(slots, [])
        late[slots] = [copy for copy in copies if not slots._allocator.ref_count(copy[1])]
        return (*due, *(copy for copy in copies if copy not in late[slots]))

    monkeypatch.setattr(StateSlots, "take_copies", delayed)


def give_back_the_memory_of_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a slot goes to blocks although a snapshot is in it."""
    take_idle = StateSlots.take_idle

    def hasty(slots: StateSlots) -> tuple[tuple[int, ...], tuple[int, ...]]:
        blocks, idle = take_idle(slots)
        owners = slots._allocator.ref_count
        return blocks, idle or tuple(slot for slot in slots._lent if not owners(slot))

    monkeypatch.setattr(StateSlots, "take_idle", hasty)


def forget_what_a_state_weighs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiting sequence is admitted without a look at the blocks in whose place its state will be."""
    monkeypatch.setattr(SequenceQueues, "num_promised_blocks", lambda queues, num_tokens: 0)


BUGS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    bug.__name__: bug
    for bug in (
        hash_without_the_tenant,
        trust_the_disk,
        trust_transfers,
        take_blocks_of_any_prefix,
        store_without_the_version,
        let_pins_leak,
        pin_for_nobody,
        give_back_what_a_window_sees,
        leave_the_state_of_a_fork,
        keep_states_a_step_late,
        give_back_the_memory_of_snapshots,
        forget_what_a_state_weighs,
        drop_the_fence,
        reuse_a_freed_block,
        hand_out_a_block_twice,
        forget_the_stop_buffer,
        restart_the_noise,
        fork_without_a_copy,
        believe_a_wrong_draft,
        forget_that_a_completion_is_over,
        count_one_character_less,
        forget_the_grammar_at_a_replay,
        keep_drafts_in_the_grammar,
        count_from_the_failover_on,
        drop_the_logprobs_of_drafts,
        skip_what_is_to_be_rated,
        let_a_straggler_win,
        forget_what_a_sibling_cost,
        leave_siblings_open,
        leave_the_timer,
        keep_the_later_alarm,
        break_under_a_storm,
        lose_what_a_slow_reader_missed,
        forget_tokens_beside_a_rejection,
        tell_tokens_twice,
        keep_it_from_the_late,
        keep_a_refusal_to_itself,
        serve_those_who_have_left,
        go_on_at_any_version,
        refuse_who_waits_for_a_replica,
    )
}

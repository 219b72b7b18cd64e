"""Bugs that tests plant in the deciders of replicas, to see whether the simulator finds them."""

from collections.abc import Hashable
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from holdfast.cluster.simulate.actors import disk as disk_module
from holdfast.cluster.simulate.actors import transfers as transfers_module
from holdfast.cluster.simulate.actors.disk import SimulatedDisk
from holdfast.cluster.simulate.actors.mover import SimulatedMover
from holdfast.cluster.simulate.oracle.pseudo_model import PseudoMatcher
from holdfast.worker import block_hash as block_hash_module
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


def hash_without_the_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of all tenants are found for each other, in memory and on the disk."""
    root, module = block_hash_module.root_hash, block_hash_module
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


def shorten_pins_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pin that another one makes shorter stays until its first time is up."""

    def shorten(self: Pins, block_id: int, until_s: float) -> None:
        self.by_block[block_id] = self.by_block[block_id]._replace(until_s=until_s)

    monkeypatch.setattr(Pins, "shorten", shorten)


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

"""Batching policies: the interface, and continuous batching with chunked prefill and preemption."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import Final, NamedTuple, Protocol

from holdfast.worker.config import SchedulerConfig
from holdfast.worker.request import Priority
from holdfast.worker.scheduler.kept_prefixes import SharedPrefix
from holdfast.worker.scheduler.prompt_outputs import num_step_tokens
from holdfast.worker.scheduler.prompt_sharing import Siblings
from holdfast.worker.scheduler.queues import SequenceQueues
from holdfast.worker.scheduler.sequence import Sequence, SequenceStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Bounds of one step."""

    max_num_batched_tokens: int
    """Tokens, of prompts and of decodes together."""
    max_num_seqs: int
    """Running sequences. If lowered below the number that runs now, it only stops new admissions."""
    max_num_prefill_tokens: int | None = None
    """Prompt tokens of a step that also decodes; None: as `max_num_batched_tokens`."""
    num_speculative_tokens: int = 0
    """Draft tokens for one sequence."""

    @classmethod
    def of(cls, config: SchedulerConfig, num_speculative_tokens: int = 0) -> "StepLimits":
        """The limits of the settings."""
        return cls(
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            num_speculative_tokens=num_speculative_tokens,
        )


Share = tuple[Sequence, int]
"""A running sequence, and the number of its uncomputed tokens that the step computes: at least one."""


class BatchingPolicy(Protocol):
    """Decides the content of a step. Called by the scheduler alone."""

    limits: StepLimits
    """May be replaced between two steps."""

    def schedule(self, queues: SequenceQueues) -> list[Share]:
        """Chooses the next step, and admits and preempts as needed. Empty only if nothing waits or runs.

        At most `limits.max_num_seqs` shares with at most `limits.max_num_batched_tokens` tokens in all, or one share of
        more that must not be cut; blocks for all of them are allocated.
        """
        ...

    def schedule_ahead(self, queues: SequenceQueues) -> list[Share]:
        """Like `schedule`, while a step is in flight: skips sequences that wait for its result, and preempts none.
        Empty if there is nothing to do before that result, or if a sequence would have to be preempted.
        """
        ...

    def release(self, queues: SequenceQueues) -> None:
        """Called when running sequences have ended: frees the blocks of sequences that need not keep their place."""
        ...


MakePolicy = Callable[[StepLimits], BatchingPolicy]


class ContinuousBatching:
    """Continuous batching: each step decodes all running sequences, then prefills in chunks, class by class.

    Blocks are allocated for a sequence's existing tokens, not for tokens that it may generate. When blocks run out, a
    running sequence of the worst class is preempted: the one with the fewest computed tokens, of several the newest,
    but never the first in order of service. A waiting sequence without a place or blocks may preempt running sequences
    of worse classes. The class is `Sequence.service_class`: the request's priority, improved by aging. It is fixed
    while a sequence runs, so a sequence admitted in the class it has aged to is not preempted by that class.

    No request starves, however many others arrive:
      - *Each request reaches the best class*, after it has waited three times `aging_s` in all, or ends before. No
        other class preempts it there, so only this class matters.
      - *Each request becomes the most urgent.* Its `urgency` (due time, then arrival) is fixed, and requests that
        arrive after its due time stand behind it. So only finitely many are ever before it. It remains to show that
        the most urgent request, A, ends; then the next one is the most urgent.
      - *Once A runs, it ends.* It is the first of the running sequences: it is never preempted, it may take all other
        blocks, and `Scheduler.add` has checked that it fits alone. It gets a token in every step, because fewer
        sequences are admitted than a step has tokens, and the first is served first.
      - *While A waits, it is admitted in the end.* It is the first of its tenant. The counters of tenants that are
        served rise, its own does not, new tenants start at the smallest counter, and equal counters are ordered by
        urgency. So its tenant becomes the first, and A the first of the waiting. No other request is admitted before
        it. Of the running sequences in its class the first goes on until it ends, and the others give way, so A finds
        room, at the latest when it is alone. A is passed over only while a running sibling computes its prompt, and
        requests behind A do not hold that sibling up. The argument does not depend on which other sequence is
        preempted. Blocks that are only cached count as free, and shared blocks need not be allocated again. Nor does it
        depend on steps that are planned ahead: they preempt no sequence, who is not in one is in the next, and who ends
        while one is in flight gives its blocks back one step later.
    """

    def __init__(self, limits: StepLimits) -> None:
        self.limits = limits

    def schedule(self, queues: SequenceQueues) -> list[Share]:
        siblings = Siblings(queues)
        if queues.waiting.num_waiting and queues.running:
            self._make_way(queues, siblings)
        decodes, prefills, grown_out = self._split_running(queues)
        if grown_out and not _grow(queues, grown_out):
            decodes, prefills = _still_running(decodes), _still_running(prefills)
        return self._fill(queues, siblings, decodes, prefills)

    def schedule_ahead(self, queues: SequenceQueues) -> list[Share]:
        siblings = Siblings(queues)
        claim = self._claim(queues, siblings)
        decodes, prefills, grown_out = self._split_running(queues)
        is_short = len(grown_out) > queues.num_free
        if is_short or (claim is not None and not self._has_room(queues, claim.first, claim.prefix)):
            queues.waiting.return_all()
            return []
        _grow(queues, grown_out)
        return self._fill(queues, siblings, decodes, prefills)

    def release(self, queues: SequenceQueues) -> None:
        queues.release_finished()

    def _fill(
        self, queues: SequenceQueues, siblings: Siblings, decodes: list[Sequence], prefills: list[Sequence]
    ) -> list[Share]:
        """A step of these decodes, then chunks of these prefills and newcomers, class by class."""
        shares: list[Share] = list(zip(decodes, repeat(1), strict=False))
        if not prefills and not queues.waiting.num_waiting:
            return shares
        budget, most = max(0, self.limits.max_num_batched_tokens - len(shares)), self.limits.max_num_prefill_tokens
        if most is not None and shares:
            budget = min(budget, most)
        if not queues.waiting.num_ready:
            share_out(queues, prefills, budget, shares)
        else:
            prefills_of: dict[Priority, list[Sequence]] = defaultdict(list)
            for sequence in prefills:
                prefills_of[sequence.service_class].append(sequence)
            for service_class in Priority:
                if service_class in prefills_of:
                    budget = share_out(queues, prefills_of[service_class], budget, shares)
                # Once the first of a class was refused, no request of a worse class is the first of the waiting.
                budget = self._admit(queues, siblings, service_class, budget, shares)
        queues.waiting.return_all()
        return shares

    def _split_running(self, queues: SequenceQueues) -> tuple[list[Sequence], list[Sequence], list[Sequence]]:
        """The running sequences that decode, those with more to compute, and which of the first need one more block."""
        block_size, windows = queues.allocator.block_size, queues.windows
        decodes, prefills, grown_out = [], [], []
        for sequence in queues.running:
            if sequence.awaits_result:
                continue
            num_tokens = len(sequence.token_ids)
            if num_tokens > sequence.num_computed_tokens + 1:
                prefills.append(sequence)  # has had blocks for all of its tokens since it was admitted
                continue
            decodes.append(sequence)
            if num_tokens > len(sequence.block_ids) * block_size:
                grown_out.append(sequence)
            if windows is not None and sequence.window is not None:
                windows.extend(sequence.window, num_tokens)  # promised to it
        return decodes, prefills, grown_out

    def _admit(
        self, queues: SequenceQueues, siblings: Siblings, service_class: Priority, budget: int, shares: list[Share]
    ) -> int:
        """Admits waiting sequences of this class, in order, while there are places, tokens and blocks. Adds their
        shares; returns what is left of the budget.
        """
        while budget > 0 and queues.waiting.best_class is service_class and self._has_place(queues):
            if (first := siblings.first_ready()) is None:
                break
            sequence, prefix = first
            if sequence.service_class is not service_class or not self._has_memory(queues, sequence, prefix):
                break
            if sequence.is_whole and shares and sequence.num_uncomputed_tokens > budget:
                break  # the next step has room for it, or is for it alone
            queues.admit(sequence, queues.allocator.num_blocks_for(len(sequence.token_ids)), prefix)
            if sequence.request.group_id:
                siblings.add(sequence)
            num_tokens = _step_tokens(sequence) if sequence.is_whole else min(_step_tokens(sequence), budget)
            if queues.windows is not None:
                num_tokens = queues.extend_window(sequence, num_tokens)
            shares.append((sequence, num_tokens))
            budget -= num_tokens
        return budget

    def _has_place(self, queues: SequenceQueues) -> bool:
        """Whether each running sequence still gets a token in every step with one more running, and a state slot is
        free for it.
        """
        most = min(self.limits.max_num_seqs, self.limits.max_num_batched_tokens)
        return len(queues.running) < most and (queues.slots is None or queues.slots.num_free > 0)

    def _has_memory(self, queues: SequenceQueues, sequence: Sequence, prefix: SharedPrefix) -> bool:
        """Whether there are blocks enough to admit a waiting sequence that can begin with `prefix`.

        It gets blocks for all of its tokens at once, and one more is kept for everyone who runs already: a newcomer
        would often be the next victim as soon as the others grow, and its prefill would be lost.
        """
        return num_blocks_to_take(queues, sequence, prefix) + len(queues.running) <= queues.num_free

    def _make_way(self, queues: SequenceQueues, siblings: Siblings) -> None:
        """Preempts running sequences of worse classes for the first waiting one, if that makes room for it."""
        claim = self._claim(queues, siblings)
        if claim is None:
            return
        for victim in claim.worse:
            if self._has_room(queues, claim.first, claim.prefix):
                break
            queues.preempt(victim)

    def _claim(self, queues: SequenceQueues, siblings: Siblings) -> "_Claim | None":
        """The first waiting sequence, if running sequences of worse classes could make room for it."""
        best_class = queues.waiting.best_class
        if best_class is None or not queues.running or queues.running[-1].service_class <= best_class:
            return None
        ready = siblings.first_ready()
        if ready is None:
            return None
        first, prefix = ready
        worse = [sequence for sequence in reversed(queues.running) if sequence.service_class > first.service_class]
        worse.sort(key=lambda sequence: (-sequence.service_class, sequence.num_computed_tokens))
        # Blocks that several share are counted for each of them: then some may be preempted a little too early.
        num_in_reach = queues.num_free + sum(_num_held(queues, sequence) for sequence in worse)
        num_left = len(queues.running) - len(worse)
        if num_blocks_to_take(queues, first, prefix) + num_left > num_in_reach:
            return None
        return _Claim(first, prefix, worse)

    def _has_room(self, queues: SequenceQueues, sequence: Sequence, prefix: SharedPrefix) -> bool:
        return self._has_place(queues) and self._has_memory(queues, sequence, prefix)


class _Claim(NamedTuple):
    """Claim of a waiting sequence on the slots and blocks of running ones."""

    first: Sequence
    prefix: SharedPrefix
    worse: list[Sequence]
    """Sequences to preempt, in this order, as far as needed."""


def num_blocks_to_take(queues: SequenceQueues, sequence: Sequence, prefix: SharedPrefix) -> int:
    """Free blocks that a waiting sequence needs: all its blocks, less the used ones of its prefix, plus its reserved
    blocks in window layers, and the blocks that its state occupies.
    """
    num_shared = 0
    for block_id in prefix.block_ids:
        num_shared += queues.allocator.ref_count(block_id) > 0
    of_all = queues.allocator.num_blocks_for(len(sequence.token_ids)) - num_shared
    if queues.windows is None and queues.slots is None:
        return of_all
    return of_all + queues.num_promised_blocks(sequence.max_num_slots)


def _num_held(queues: SequenceQueues, sequence: Sequence) -> int:
    """Blocks that a running sequence keeps from others."""
    return len(sequence.block_ids) + queues.num_promised_blocks(sequence.max_num_slots)


def _step_tokens(sequence: Sequence) -> int:
    """Tokens of a running sequence that one step may compute: all uncomputed ones, unless there is a bound."""
    is_unbound = not sequence.cuts and sequence.prompt_logprobs is None
    return sequence.num_uncomputed_tokens if is_unbound else num_step_tokens(sequence)


def share_out(queues: SequenceQueues, sequences: Iterable[Sequence], budget: int, shares: list[Share]) -> int:
    """Divides a budget of tokens among sequences: each gets all it can use before the next gets any. Adds their shares;
    returns the remaining budget.
    """
    for sequence in sequences:
        if budget <= 0:
            break
        num_tokens = min(_step_tokens(sequence), budget)
        if queues.windows is not None:
            num_tokens = queues.extend_window(sequence, num_tokens)
        shares.append((sequence, num_tokens))
        budget -= num_tokens
    return budget


def _grow(queues: SequenceQueues, sequences: Iterable[Sequence]) -> bool:
    """Gives each of these running sequences one more block. False if a sequence, maybe one of them, was preempted."""
    num_preemptions = queues.counts.num_preemptions
    for sequence in sequences:
        while queues.num_free <= 0 and sequence.status is SequenceStatus.RUNNING:
            queues.preempt(_victim(queues.running))
        if sequence.status is SequenceStatus.RUNNING:
            queues.grow(sequence)
    return queues.counts.num_preemptions == num_preemptions


def _victim(running: list[Sequence]) -> Sequence:
    """The sequence to preempt when blocks run out: of the worst class, the one that loses least, never the first."""
    assert len(running) > 1, "a sequence that runs alone must fit the cache"
    worst = running[-1].service_class
    candidates = (sequence for sequence in reversed(running[1:]) if sequence.service_class == worst)
    return min(candidates, key=lambda sequence: sequence.num_computed_tokens)


def _still_running(sequences: list[Sequence]) -> list[Sequence]:
    return [sequence for sequence in sequences if sequence.status is SequenceStatus.RUNNING]


class MemoryAwareBatching(ContinuousBatching):
    """Continuous batching in which a newcomer must fit beside everyone's estimated peak, not their present blocks.

    It trades places for preemptions, as the schedulers with predicted output lengths do (Jaillet et al., "Online
    Scheduling for LLM Inference with KV Cache Constraints", 2025). The estimate is the running mean of the finished
    output lengths, at most a request's own bound; the bound itself before any request has finished, and for a request
    that is longer than the mean. All peaks are taken to come at once, and prefixes in common are not counted on. So
    while no estimate is too low, nothing is preempted for memory; else preemption works as in continuous batching. A
    better class preempts worse ones as there, too, and no request starves by the same argument: alone, all fit.
    """

    def __init__(self, limits: StepLimits) -> None:
        super().__init__(limits)
        self._num_finished = 0
        self._num_finished_tokens = 0

    def release(self, queues: SequenceQueues) -> None:
        for sequence in queues.running:
            if sequence.status is SequenceStatus.FINISHED:
                self._num_finished += 1
                self._num_finished_tokens += sequence.num_output_tokens
        super().release(queues)

    def _has_memory(self, queues: SequenceQueues, sequence: Sequence, prefix: SharedPrefix) -> bool:
        num_blocks = sum(self._peak_num_blocks(queues, member) for member in (*queues.running, sequence))
        return num_blocks <= queues.allocator.num_blocks and super()._has_memory(queues, sequence, prefix)

    def _peak_num_blocks(self, queues: SequenceQueues, sequence: Sequence) -> int:
        num_slots = sequence.max_num_slots
        if self._num_finished:
            num_expected = sequence.num_prompt_tokens + -(-self._num_finished_tokens // self._num_finished)
            if len(sequence.token_ids) < num_expected:
                num_slots = min(num_slots, num_expected - 1)
        return queues.allocator.num_blocks_for(num_slots) + queues.num_promised_blocks(sequence.max_num_slots)


POLICIES: Final[Mapping[str, MakePolicy]] = {"continuous": ContinuousBatching, "memory_aware": MemoryAwareBatching}
"""Policies by `SchedulerConfig.policy`."""

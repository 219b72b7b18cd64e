"""Prompt sharing by forking: one sequence of a request computes the prompt, and the others fork from it."""

from collections import defaultdict
from collections.abc import Hashable
from typing import Final

from holdfast.worker.cache.window_blocks import NOTHING_SEEN, WindowPrefix
from holdfast.worker.scheduler.kept_prefixes import SharedPrefix, tokens_to_next_cut
from holdfast.worker.scheduler.queues import SequenceQueues
from holdfast.worker.scheduler.sequence import Sequence, SequenceStatus
from holdfast.worker.step_plan import PromptLogprobParams


class Siblings:
    """The running sequences by group, valid for one admission. Costs nothing while no sequence has a group."""

    def __init__(self, queues: SequenceQueues) -> None:
        self._queues = queues
        self._groups: dict[Hashable, list[Sequence]] | None = None

    def prefix_of(self, sequence: Sequence) -> SharedPrefix | None:
        """The longest prefix that a waiting sequence can share; None: wait, a running sibling still computes it.

        The wait costs hardly any time, because both would compute the same. Sequences behind it need not wait. The
        wait ends: the sibling runs, so it either computes the prompt or stops running.
        """
        num_common = min(sequence.num_prompt_tokens, sequence.num_skippable_tokens)
        parent = None
        if num_common > 0 and sequence.request.group_id:
            siblings = self._siblings_of(sequence)
            parent = max(siblings, key=lambda sibling: sibling.num_computed_tokens, default=None)
            if self._queues.slots is not None:  # of which one may still be where the prompt ends
                parent = next((each for each in siblings if each.num_computed_tokens == num_common), parent)
        if parent is not None and parent.num_computed_tokens < num_common:
            return None
        cached = self._queues.cached_prefix(sequence)
        if parent is None or num_common < cached.num_tokens:
            return cached
        if self._queues.slots is not None and parent.num_computed_tokens != num_common:
            return cached  # the parent's state is not that behind the prompt any more
        return self._fork(parent, num_common) or cached

    def first_ready(self) -> tuple[Sequence, SharedPrefix] | None:
        """The first waiting sequence that need not wait for a sibling, and its shared prefix. Those before it are set
        aside, until `WaitingQueue.return_all`.
        """
        waiting = self._queues.waiting
        while waiting.num_ready:
            sequence = waiting.first()
            has_group = bool(sequence.request.group_id)
            prefix = self.prefix_of(sequence) if has_group else self._queues.cached_prefix(sequence)
            if prefix is not None:
                return sequence, prefix
            waiting.set_aside(sequence)
        return None

    def add(self, sequence: Sequence) -> None:
        """A sequence was admitted."""
        if self._groups is not None and sequence.request.group_id:
            self._groups[sequence.request.group_id].append(sequence)

    def _siblings_of(self, sequence: Sequence) -> list[Sequence]:
        """The running sequences of its group. That their prompts are equal is checked, because the group id is given by
        routers."""
        if self._groups is None:
            self._groups = defaultdict(list)
            for sibling in self._queues.running:
                self.add(sibling)
        block_size = self._queues.allocator.block_size
        group = self._groups[sequence.request.group_id]
        alive = (sibling for sibling in group if sibling.status is SequenceStatus.RUNNING)
        return [sibling for sibling in alive if _share_prompt(sequence, sibling, block_size)]

    def _fork(self, parent: Sequence, num_tokens: int) -> SharedPrefix | None:
        """Full blocks are shared. A last block that is not full is copied, because the fork writes to it next.

        None: the parent has given back what the next token sees in layers with a window.
        """
        seen: WindowPrefix | None = NOTHING_SEEN
        if self._queues.windows is not None and parent.window is not None:
            seen = self._queues.windows.fork(parent.window, num_tokens)
        if seen is None:
            return None
        num_whole = num_tokens // self._queues.allocator.block_size
        return SharedPrefix(parent.block_ids[:num_whole], num_tokens, parent, window=seen)


def _share_prompt(a: Sequence, b: Sequence, block_size: int) -> bool:
    """Whether prompts and salts are equal: full blocks by their hash, worked out once, as in the prefix cache."""
    if a.num_prompt_tokens != b.num_prompt_tokens:
        return False
    num_whole = a.num_prompt_tokens // block_size
    hashes = [each.hash_chain.hash_of(num_whole - 1, each.token_ids, block_size) for each in (a, b)]
    tails = [each.request.prompt_token_ids[num_whole * block_size :] for each in (a, b)]
    return hashes[0] == hashes[1] and tails[0] == tails[1]


MAX_PROMPT_LOGPROBS: Final = 128
"""Most prompt tokens whose logprobs one step reports, all sequences together: each takes a row of logits."""


def num_step_tokens(sequence: Sequence) -> int:
    """Tokens of a running sequence that one step may compute."""
    num_tokens = tokens_to_next_cut(sequence) if sequence.cuts else sequence.num_uncomputed_tokens
    return min(num_tokens, MAX_PROMPT_LOGPROBS) if sequence.num_missing_prompt_logprobs else num_tokens


def prompt_logprob_params(sequence: Sequence, num_tokens: int) -> PromptLogprobParams | None:
    """The prompt logprobs to compute with the next `num_tokens` tokens of a sequence; None: there are none."""
    num_logprobs = sequence.request.sampling_params.prompt_logprobs
    rows = prompt_logprob_rows(sequence, num_tokens)
    if num_logprobs is None or not rows:
        return None
    token_ids = tuple(sequence.token_ids[rows.start + 1 : rows.stop + 1])
    return PromptLogprobParams(
        first_row=rows.start - sequence.num_computed_tokens, token_ids=token_ids, num_logprobs=num_logprobs
    )


def bound_prompt_logprobs(shares: list[tuple[Sequence, int]]) -> list[tuple[Sequence, int]]:
    """The shares of a step, cut so that it reports at most `MAX_PROMPT_LOGPROBS` prompt logprobs, in order.

    Those that are asked for none stay as they are. One sequence alone is within the bound already.
    """
    num_asking = 0
    for sequence, _ in shares:
        if sequence.prompt_logprobs is not None and sequence.num_missing_prompt_logprobs:
            num_asking += 1
    if num_asking < 2:
        return shares
    left, bounded = MAX_PROMPT_LOGPROBS, []
    for sequence, num_tokens in shares:
        rows = prompt_logprob_rows(sequence, num_tokens)
        if len(rows) > left:
            num_tokens = rows.start + left - sequence.num_computed_tokens
        left -= min(len(rows), left)
        if num_tokens > 0:
            bounded.append((sequence, num_tokens))
    return bounded


def prompt_logprob_rows(sequence: Sequence, num_tokens: int) -> range:
    """Positions among the next `num_tokens` whose logits are needed for the logprob of the token after them."""
    end = sequence.num_computed_tokens + num_tokens
    first_missing = sequence.num_prompt_tokens - sequence.num_missing_prompt_logprobs
    return range(max(sequence.num_computed_tokens, first_missing - 1), min(end, sequence.num_prompt_tokens - 1))

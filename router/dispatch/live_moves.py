"""Live moves: blocks of a retiring replica's requests go ahead of them. A request that decodes runs on where it is
until the replica that takes it over has its blocks; then only its last tokens are missing there.

All tokens that a request gets while its blocks are copied are computed again, in one step that the streams beside it
wait for. So only a few requests of a replica are copied at a time, and the others are copied as far as they have come
by then. A request moves when its next token has come, so that its client waits from that token on, and not from the
last one before the news.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from holdfast.router.dispatch.replica_registry import ReplicaRegistry
from holdfast.router.dispatch.replica_state import ReplicaState
from holdfast.router.dispatch.request_state import RequestState
from holdfast.router.events import SendAhead
from holdfast.worker.step_update import FetchedAhead

MIN_COPY_S: Final = 0.02
"""Requests move at once from a replica whose blocks are all moved in less time; and more are copied at a time while
all that are on their way are moved in less."""

MAX_COPY_S: Final = 20.0
"""Time from the begin of the drain after which requests move with the blocks that are there."""

MAX_ROUNDS: Final = 4
"""Times that blocks of a request are copied: after the first time, those of the tokens that it got meanwhile."""

MIN_COPIES, MAX_COPIES = 2, 8
"""Requests of one replica that are copied at a time: one is announced while another is sent."""

MAX_TOKEN_S: Final = 0.5
"""Longest wait for the token after which a request moves: its replica may have preempted it."""


@dataclass(slots=True)
class _Copy:
    target: ReplicaState
    num_tokens: int
    moves_in_s: float
    """Seconds, as measured for other transfers."""
    round: int = 1
    num_there: int | None = None
    """Tokens whose blocks the target has; None: it has not said."""
    num_output: int = 0
    """Tokens of output when it had said so."""
    moves_by_s: float | None = None
    """When the request moves without a further token; None: not before the target has said."""


@dataclass(slots=True)
class _Leaving:
    """A retiring replica."""

    due_s: float
    """When its requests move in any case."""
    is_quick: bool
    """Whether all of its blocks are moved so soon that none goes ahead."""
    copies: dict[int, _Copy] = field(default_factory=dict)
    """Copies by the attempts that run meanwhile."""

    def is_full(self, replica: ReplicaState) -> bool:
        """Whether a further request waits until one of those that are copied has moved."""
        for attempt in self.copies.keys() - replica.attempts:  # those have ended
            del self.copies[attempt]
        if len(self.copies) < MIN_COPIES:
            return False
        return len(self.copies) >= MAX_COPIES or sum(one.moves_in_s for one in self.copies.values()) >= MIN_COPY_S


class Move(NamedTuple):
    """An order to move a request now."""

    target: ReplicaState
    has_blocks: bool
    """Whether its blocks are there, but for the last tokens."""


class LiveMoves:
    """Blocks that go ahead of requests, by the replicas that they leave."""

    def __init__(self, registry: ReplicaRegistry) -> None:
        self._registry = registry
        self._leaving: dict[ReplicaState, _Leaving] = {}

    def note_stay(self, replica: ReplicaState) -> None:
        """A replica is not retiring, or is lost: nothing that was copied counts any longer."""
        self._leaving.pop(replica, None)

    def note_fetched(self, fetched: Sequence[FetchedAhead]) -> None:
        """A replica has fetched blocks ahead, as far as it could."""
        for attempt, num_tokens in fetched:
            for leaving in self._leaving.values():
                if (copy := leaving.copies.get(attempt)) is not None:
                    copy.num_there = num_tokens

    def has_to_wait(self, state: RequestState, now: float) -> bool:
        """Whether a request that runs on a retiring replica runs on for now: its blocks are on their way, or will be
        once those of others are there, or its next token comes soon.
        """
        assert state.attempt is not None, "it runs on a replica"
        leaving = self._leaving.get(state.attempt.replica)
        if leaving is None or now >= leaving.due_s:
            return False
        copy = leaving.copies.get(state.attempt.number)
        if copy is None:
            return bool(state.output_token_ids) and leaving.is_full(state.attempt.replica)
        if not self._is_up(copy.target):
            return False
        if copy.num_there is None:
            return True
        if copy.moves_by_s is None:
            copy.num_output, copy.moves_by_s = len(state.output_token_ids), now + MAX_TOKEN_S
        return len(state.output_token_ids) == copy.num_output and now < copy.moves_by_s

    def advise(self, state: RequestState, chosen: ReplicaState, now: float) -> Move | SendAhead:
        """Next action for a request on a retiring replica that does not have to wait, and that the chosen replica could
        take over.
        """
        assert state.attempt is not None, "it runs on a replica"
        leaving = self._leaving.get(state.attempt.replica)
        if leaving is None:
            is_quick = _moves_in_s(state.attempt.replica, chosen) < MIN_COPY_S
            leaving = self._leaving[state.attempt.replica] = _Leaving(now + MAX_COPY_S, is_quick)
        copy = leaving.copies.pop(state.attempt.number, None)
        if copy is None:
            return self._begin(state, chosen, leaving, now)
        target = copy.target
        if not (self._is_up(target) and target.takes_more() and target.version == chosen.version):
            return Move(chosen, has_blocks=False)
        num_tokens, two_blocks = _num_tokens(state), 2 * target.facts.block_size
        if copy.num_there is None or copy.num_there < copy.num_tokens - two_blocks:
            return Move(target, has_blocks=False)
        is_far = num_tokens > copy.num_there + two_blocks and copy.round < MAX_ROUNDS and now < leaving.due_s
        return self._announce(state, target, leaving, copy.round + 1) if is_far else Move(target, has_blocks=True)

    def _is_up(self, target: ReplicaState) -> bool:
        return self._registry.get(target.facts.replica_id) is target

    def _begin(self, state: RequestState, chosen: ReplicaState, leaving: _Leaving, now: float) -> Move | SendAhead:
        assert state.attempt is not None, "it runs on a replica"
        replica = state.attempt.replica
        facts = chosen.facts
        can_copy = replica.sends_blocks_to(chosen) and facts.transfers_blocks and not facts.num_state_slots
        if not can_copy or not state.output_token_ids or leaving.is_quick or now >= leaving.due_s:
            return Move(chosen, has_blocks=False)
        return self._announce(state, chosen, leaving)

    def _announce(self, state: RequestState, target: ReplicaState, leaving: _Leaving, number: int = 1) -> SendAhead:
        """Has the target fetch the blocks of all tokens that a request has, for the first time or once more."""
        assert state.attempt is not None, "it runs on a replica"
        replica, num_tokens = state.attempt.replica, _num_tokens(state)
        moves_in_s = num_tokens * target.move_token_s(replica)
        leaving.copies[state.attempt.number] = _Copy(target, num_tokens, moves_in_s, number)
        source = replica.as_source(num_tokens, target, is_computing=True, is_leaving=True)
        request = state.continuation(block_source=source)
        return SendAhead(replica_id=target.facts.replica_id, attempt=state.attempt.number, request=request)


def _moves_in_s(replica: ReplicaState, target: ReplicaState) -> float:
    """Seconds in which all blocks that a replica's requests use are moved, as measured for other transfers."""
    num_used = replica.load.num_total_blocks - replica.load.num_free_blocks
    return num_used * replica.facts.block_size * target.move_token_s(replica)


def _num_tokens(state: RequestState) -> int:
    return len(state.request.prompt_token_ids) + len(state.output_token_ids)

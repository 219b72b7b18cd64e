"""Live moves: blocks of a retiring replica's requests go ahead of them. A request that decodes runs on where it is
until the replica that takes it over has its blocks; then only its last tokens are missing there.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

from holdfast.router.dispatch.replica_registry import ReplicaRegistry
from holdfast.router.dispatch.replica_state import ReplicaState
from holdfast.router.dispatch.request_state import RequestState
from holdfast.router.events import SendAhead
from holdfast.worker.step_update import FetchedAhead

MIN_COPY_S: Final = 0.02
"""Requests move at once from a replica whose blocks are all moved in less time."""

MAX_COPY_S: Final = 20.0
"""Time after which a request moves with the blocks that are there."""

MAX_COPIES: Final = 10_000
"""Requests whose blocks go ahead at a time; further ones move at once."""


@dataclass(slots=True)
class _Copy:
    source: ReplicaState
    target: ReplicaState
    num_tokens: int
    due_s: float
    num_there: int | None = None
    """Tokens whose blocks the target has; None: it has not said."""

    def is_open(self, attempt: int) -> bool:
        """Whether the attempt still runs at the source."""
        return attempt in self.source.attempts


class Move(NamedTuple):
    """An order to move a request now."""

    target: ReplicaState
    has_blocks: bool
    """Whether its blocks are there, but for the last tokens."""


class LiveMoves:
    """Blocks that go ahead of requests, by the attempts that run meanwhile."""

    def __init__(self, registry: ReplicaRegistry) -> None:
        self._registry = registry
        self._copies: dict[int, _Copy] = {}

    def note_fetched(self, fetched: FetchedAhead) -> None:
        """A replica has fetched blocks ahead, as far as it could."""
        if (copy := self._copies.get(fetched.attempt)) is not None:
            copy.num_there = fetched.num_tokens

    def has_to_wait(self, state: RequestState, now: float) -> bool:
        """Whether the blocks of a request that runs on a replica are on their way, and it runs on for now."""
        assert state.attempt is not None, "it runs on a replica"
        copy = self._copies.get(state.attempt.number)
        return copy is not None and copy.num_there is None and now < copy.due_s and self._is_up(copy.target)

    def advise(self, state: RequestState, chosen: ReplicaState, now: float) -> Move | SendAhead:
        """Next action for a request on a retiring replica that does not have to wait, and that the chosen replica could
        take over.
        """
        assert state.attempt is not None, "it runs on a replica"
        copy = self._copies.pop(state.attempt.number, None)
        if copy is None:
            return self._begin(state, chosen, now)
        target = copy.target
        if not (self._is_up(target) and target.takes_more() and target.version == chosen.version):
            return Move(chosen, has_blocks=False)
        least = copy.num_tokens - 2 * target.facts.block_size
        return Move(target, has_blocks=copy.num_there is not None and copy.num_there >= least)

    def _is_up(self, target: ReplicaState) -> bool:
        return self._registry.get(target.facts.replica_id) is target

    def _begin(self, state: RequestState, chosen: ReplicaState, now: float) -> Move | SendAhead:
        assert state.attempt is not None, "it runs on a replica"
        replica = state.attempt.replica
        load, facts = replica.load, chosen.facts
        can_copy = replica.sends_blocks_to(chosen) and facts.transfers_blocks and not facts.num_state_slots
        num_used = (load.num_total_blocks - load.num_free_blocks) * replica.facts.block_size
        if not (can_copy and state.output_token_ids and num_used * chosen.move_token_s(replica) >= MIN_COPY_S):
            return Move(chosen, has_blocks=False)
        if len(self._copies) >= MAX_COPIES:
            self._copies = {number: copy for number, copy in self._copies.items() if copy.is_open(number)}
            if len(self._copies) >= MAX_COPIES:
                return Move(chosen, has_blocks=False)
        num_tokens = len(state.request.prompt_token_ids) + len(state.output_token_ids)
        self._copies[state.attempt.number] = _Copy(replica, chosen, num_tokens, now + MAX_COPY_S)
        source = replica.as_source(num_tokens, chosen, is_computing=True, is_leaving=True)
        request = state.continuation(block_source=source)
        return SendAhead(replica_id=chosen.facts.replica_id, attempt=state.attempt.number, request=request)

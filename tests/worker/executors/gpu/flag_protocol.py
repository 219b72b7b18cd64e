"""The protocol of `kernels/ranks.py` as a small machine, and a search through every order of its operations.

A rank makes calls one after the other. In a call its programs run side by side: each writes its blocks, sets its flag
on all ranks, waits for all flags, reads the blocks of all ranks. Every single write, flag, wait and read of a block is
an operation, and what the compiler or the device might move past another is moved here by a mistake that is planted.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

PHASES = ("write", "flag", "wait", "read")


class Program(NamedTuple):
    """Where a program of a rank is in a call: its phase, and what is left of it."""

    phase: int
    left: frozenset


class Rank(NamedTuple):
    call: int
    programs: tuple[Program, ...]
    epochs: tuple[int, ...]
    """Launches that each program has seen, the present one included."""
    end: str
    """`running`, `stopped` (by a fault from outside), `lost` (it gave up waiting), `done`"""


class State(NamedTuple):
    ranks: tuple[Rank, ...]
    flags: tuple[int, ...]
    """[rank that looks, rank that sets, program]"""
    slots: tuple[int, ...]
    """[rank, slot, block]: the call whose value is there"""


@dataclass(frozen=True)
class Protocol:
    """The right one; those that are derived from it have one mistake."""

    calls: tuple[int, ...] = (1, 1, 1)
    """Blocks of each."""
    num_ranks: int = 2
    num_programs: int = 1
    num_stops: int = 0
    """Ranks that may stop anywhere, for ever."""
    phases: tuple[str, ...] = PHASES

    def blocks_of(self, program: int, size: int) -> frozenset:
        return frozenset(block for block in range(size) if block % self.num_programs == program)

    def slot(self, epoch: int) -> int:
        return epoch & 1

    def has_come(self, flag: int, epoch: int) -> bool:
        return flag >= epoch

    def sets_flags_of(self, rank: int) -> frozenset:
        """The ranks that it tells."""
        return frozenset(range(self.num_ranks))

    def waits_for(self, rank: int) -> frozenset:
        return frozenset(range(self.num_ranks))

    def written(self, rank: int, blocks: frozenset, call: int) -> frozenset:
        """What a rank writes of a program's blocks in a call."""
        return blocks

    def read(self, rank: int, blocks: frozenset, call: int) -> frozenset:
        """What it reads of them: pairs of a rank and a block."""
        return frozenset((peer, block) for peer in range(self.num_ranks) for block in blocks)

    def gives_up(self) -> bool:
        """Whether one that waits for a rank that has stopped comes back."""
        return True

    def start(self) -> State:
        most = max(self.calls)
        ranks = (Rank(0, (), (0,) * self.num_programs, "running"),) * self.num_ranks
        flags = (0,) * (self.num_ranks**2 * self.num_programs)
        state = State(ranks, flags, (-1,) * (self.num_ranks * 2 * most))
        for rank in range(self.num_ranks):
            state = self._begin(state, rank)
        return state

    def moves(self, state: State) -> Iterator[State | str]:
        """The states that follow, or what is wrong."""
        stopped = sum(rank.end == "stopped" for rank in state.ranks)
        for number, rank in enumerate(state.ranks):
            if rank.end != "running":
                continue
            if stopped < self.num_stops:
                yield _with_rank(state, number, rank._replace(end="stopped"))
            for place, program in enumerate(rank.programs):
                yield from self._moves_of(state, number, place, program)

    def _moves_of(self, state: State, number: int, place: int, program: Program) -> Iterator[State | str]:
        if program.phase == len(self.phases):
            return
        rank, phase = state.ranks[number], self.phases[program.phase]
        epoch = rank.epochs[place]
        for item in program.left:
            after: State | str | None = state
            if phase == "write":
                after = self._written(state, number, item, epoch)
            elif phase == "flag":
                index = self._flag(item, number, place)
                after = state._replace(flags=_put(state.flags, index, epoch))
            elif phase == "wait":
                after = self._waited(state, number, place, item, epoch)
            elif (found := state.slots[self._place(*item, epoch)]) != rank.call:
                after = f"rank {number} reads block {item[1]} of rank {item[0]}: of call {found}, not {rank.call}"
            if isinstance(after, State):
                after = self._advanced(after, number, place, program.left - {item})
            if after is not None:
                yield after

    def _written(self, state: State, number: int, block: int, epoch: int) -> State:
        place = self._place(number, block, epoch)
        return state._replace(slots=_put(state.slots, place, state.ranks[number].call))

    def _waited(self, state: State, number: int, place: int, peer: int, epoch: int) -> State | None:
        if self.has_come(state.flags[self._flag(number, peer, place)], epoch):
            return state
        gone = state.ranks[peer].end in ("stopped", "lost")
        return _with_rank(state, number, state.ranks[number]._replace(end="lost")) if gone and self.gives_up() else None

    def _advanced(self, state: State, number: int, place: int, left: frozenset) -> State:
        rank = state.ranks[number]
        if rank.end != "running":
            return state
        program = rank.programs[place]._replace(left=left)
        if not left:
            program = self._entered(program.phase + 1, number, place, rank)
        programs = (*rank.programs[:place], program, *rank.programs[place + 1 :])
        state = _with_rank(state, number, rank._replace(programs=programs))
        if all(each.phase == len(self.phases) for each in programs):
            return self._begin(_with_rank(state, number, rank._replace(call=rank.call + 1)), number)
        return state

    def _begin(self, state: State, number: int) -> State:
        """The next call of a rank: a kernel starts when the one before it has ended."""
        rank = state.ranks[number]
        if rank.call == len(self.calls):
            return _with_rank(state, number, rank._replace(end="done", programs=()))
        size = self.calls[rank.call]
        places = [place for place in range(self.num_programs) if self.blocks_of(place, size)]
        epochs = tuple(epoch + (place in places) for place, epoch in enumerate(rank.epochs))
        rank = rank._replace(epochs=epochs)
        ended = Program(len(self.phases), frozenset())
        programs = tuple(
            self._entered(0, number, place, rank) if place in places else ended for place in range(self.num_programs)
        )
        return _with_rank(state, number, rank._replace(programs=programs))

    def _entered(self, phase: int, number: int, place: int, rank: Rank) -> Program:
        """The phase, or the next one in which there is something to do."""
        if phase == len(self.phases):
            return Program(phase, frozenset())
        blocks = self.blocks_of(place, self.calls[rank.call])
        left = {
            "write": self.written(number, blocks, rank.call),
            "flag": self.sets_flags_of(number),
            "wait": self.waits_for(number),
            "read": self.read(number, blocks, rank.call),
        }[self.phases[phase]]
        return Program(phase, left) if left else self._entered(phase + 1, number, place, rank)

    def _flag(self, looks: int, sets: int, place: int) -> int:
        return (looks * self.num_ranks + sets) * self.num_programs + place

    def _place(self, rank: int, block: int, epoch: int) -> int:
        return (rank * 2 + self.slot(epoch)) * max(self.calls) + block


def explore(protocol: Protocol) -> tuple[int, str | None]:
    """How many states there are, and what goes wrong in one of them."""
    seen, open_states = set(), [protocol.start()]
    while open_states:
        state = open_states.pop()
        if state in seen:
            continue
        seen.add(state)
        following = list(protocol.moves(state))
        for after in following:
            if isinstance(after, str):
                return len(seen), after
        if not following and any(rank.end == "running" for rank in state.ranks):
            return len(seen), "a rank waits for ever"
        if not following and protocol.num_stops == 0 and any(rank.end != "done" for rank in state.ranks):
            return len(seen), "a rank has given up, and none has stopped"
        open_states += following
    return len(seen), None


def _with_rank(state: State, number: int, rank: Rank) -> State:
    return state._replace(ranks=_put(state.ranks, number, rank))


def _put(items: tuple, index: int, item: object) -> tuple:
    return (*items[:index], item, *items[index + 1 :])

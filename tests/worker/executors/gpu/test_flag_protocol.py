"""No order of operations breaks the protocol by which ranks meet in a kernel, and planted mistakes are found."""

import pytest

from tests.worker.executors.gpu.flag_protocol import Protocol, explore


@pytest.mark.parametrize(
    "protocol",
    [
        Protocol(calls=(1, 1, 1, 1)),
        Protocol(calls=(2, 1, 2), num_programs=1),
        Protocol(calls=(1, 2), num_programs=2),
        Protocol(calls=(1, 1, 1), num_stops=1),
        pytest.param(Protocol(calls=(1, 1, 1), num_ranks=3), marks=pytest.mark.slow),
        pytest.param(Protocol(calls=(1, 1), num_ranks=3, num_stops=2), marks=pytest.mark.slow),
        pytest.param(Protocol(calls=(1, 2, 3), num_programs=2), marks=pytest.mark.slow),
        pytest.param(Protocol(calls=(2, 1, 3, 2), num_programs=2), marks=pytest.mark.slow),
    ],
    ids=lambda protocol: f"{protocol.num_ranks} {protocol.num_programs} {protocol.calls} {protocol.num_stops}",
)
def test_all_orders_end_with_what_was_written(protocol):
    num_states, fault = explore(protocol)
    assert fault is None
    assert num_states > 50


class Scatters(Protocol):
    """Calls in pairs: a rank reads its own share of the blocks, then writes what it makes of them and reads the rest.

    As in the kernel, the second of a pair may begin for one program before the first has ended for others; here a call
    is whole, so there is one program.
    """

    def shares(self, rank, blocks):
        return frozenset(block for block in blocks if block % self.num_ranks == rank)

    def written(self, rank, blocks, call):
        return blocks if call % 2 == 0 else self.shares(rank, blocks)

    def read(self, rank, blocks, call):
        if call % 2 == 0:
            return frozenset((peer, block) for peer in range(self.num_ranks) for block in self.shares(rank, blocks))
        return frozenset((block % self.num_ranks, block) for block in blocks)


class ScattersInOneSlot(Scatters):
    """The parts of the next sum lie where others still read sums."""

    def slot(self, epoch):
        return 0


@pytest.mark.parametrize("calls", [(2, 2, 2, 2), (1, 1, 2, 2, 1, 1), (3, 3, 1, 1)])
def test_sums_that_are_scattered_are_safe_in_all_orders(calls):
    num_states, fault = explore(Scatters(calls=calls))
    assert fault is None
    assert num_states > 50


class OneSlot(Protocol):
    def slot(self, epoch):
        return 0


class OnlyTheLeaderSetsFlags(Protocol):
    """As if those that give nothing in a call need not tell that they have read."""

    def sets_flags_of(self, rank):
        return super().sets_flags_of(rank) if rank == 0 else frozenset()

    def waits_for(self, rank):
        return frozenset({0})


class WaitsForItsNeighbourAlone(Protocol):
    def waits_for(self, rank):
        return frozenset({(rank + 1) % self.num_ranks})


class WaitsForTheExactEpoch(Protocol):
    """A rank may be one ahead."""

    def has_come(self, flag, epoch):
        return flag == epoch


class SharesBlocksBySize(Protocol):
    """Programs take blocks that lie side by side: which ones depends on how many there are."""

    def blocks_of(self, program, size):
        share = -(-size // self.num_programs)
        return frozenset(range(program * share, min(size, (program + 1) * share)))


class NeverGivesUp(Protocol):
    def gives_up(self):
        return False


@pytest.mark.parametrize(
    ("protocol", "fault"),
    [
        (OneSlot(), "reads"),
        (ScattersInOneSlot(calls=(2, 2, 2, 2)), "reads"),
        (Protocol(phases=("flag", "write", "wait", "read")), "reads"),
        (Protocol(phases=("write", "flag", "read", "wait")), "reads"),
        (OnlyTheLeaderSetsFlags(), "reads"),
        (WaitsForItsNeighbourAlone(num_ranks=3), "reads"),
        (WaitsForTheExactEpoch(), "for ever"),
        pytest.param(SharesBlocksBySize(calls=(1, 2, 4), num_programs=2), "reads", marks=pytest.mark.slow),
        (NeverGivesUp(num_stops=1), "for ever"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Protocol) else value,
)
def test_a_planted_mistake_is_found(protocol, fault):
    _, found = explore(protocol)
    assert found is not None
    assert fault in found

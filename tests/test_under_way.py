"""A fault that comes before or after all streams is found out, by each of the helpers that strike under load."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from benchmarks.failover import Outcome, checked
from holdfast.cluster.demo.streams import Stream
from tests import loops
from tests.chaos.kinds import KINDS, Answer
from tests.chaos.load import Load
from tests.under_way import were_under_way


@pytest.mark.parametrize(
    ("streams", "at_least", "is_right"),
    [
        ([[1.0, 3.0]], 1, True),
        ([[2.0, 3.0], [1.0, 2.5], [0.0, 1.0]], 2, True),
        ([[2.0, 3.0], [1.0, 2.5], [0.0, 1.0]], 3, False),
        ([[0.0, 1.9]], 1, False),
        ([[0.0, 2.0]], 1, False),
        ([[2.1, 3.0]], 1, False),
        ([[]], 1, False),
        ([], 1, False),
    ],
)
def test_a_stream_is_under_way_from_its_first_chunk_to_its_last(streams, at_least, is_right):
    if is_right:
        were_under_way(streams, 2.0, at_least)
    else:
        with pytest.raises(AssertionError, match="under way when the fault came"):
            were_under_way(streams, 2.0, at_least)


@pytest.mark.parametrize("ended_before", [True, False])
def test_a_load_whose_streams_were_over_does_not_settle(ended_before):
    now_s = time.monotonic()
    load = Load(KINDS[:1], [Answer()])
    load._open = {
        0: Answer(usage=(1, 2), arrivals_s=[now_s - 2, now_s - 1] if ended_before else [now_s - 2, now_s + 1])
    }
    settling = load.settle(now_s, list(load._open.values()))
    if ended_before:
        with pytest.raises(AssertionError, match="under way when the fault came"):
            loops.run(settling)
    else:
        assert loops.run(settling) == [pytest.approx(1.0)]


def test_a_measurement_whose_streams_were_over_fails():
    open_then = Stream(1, "a", token_times_s=[1.0, 3.0], is_finished=True)
    over_before = Stream(2, "b", token_times_s=[1.0, 1.5], is_finished=True)
    assert checked(Outcome("a fault", 2.0, [open_then])).pauses_s == [2.0]
    with pytest.raises(SystemExit, match="1 of 2 streams had ended before"):
        checked(Outcome("a fault", 2.0, [open_then, over_before]))


def test_a_sweep_asks_again_for_a_blow_that_came_too_late():
    from tests.chaos.sweep import Sweep

    blows = []

    class Cluster:
        async def until_up(self) -> None: ...

        async def num_computed(self) -> dict[str, int]:
            return {}

    class Fault:
        name = "a blow"

        async def choose(self, cluster, is_over):
            return SimpleNamespace(id="r", send=lambda signal: None)

        async def strike(self, victim) -> None:
            blows.append(victim)
            await asyncio.sleep(0.05)  # the stream comes to its end meanwhile, without another chunk

        async def mend(self, cluster, victim) -> None: ...

    async def strikes() -> bool:
        from tests.chaos import sweep

        async def asked(client, kind, look=None) -> Answer:
            answer = Answer(arrivals_s=[time.monotonic()], usage=None)
            answer.sequences[0] = SimpleNamespace(token_ids=[1])
            if look is not None:
                look(answer)
            await asyncio.sleep(0.01)
            return answer

        original, sweep.ask = sweep.ask, asked
        try:
            row = SimpleNamespace(num_faults=0, pauses_s=[], judge=lambda *_: None, num_recomputed=0)
            return await Sweep(Cluster(), None, KINDS[0], Fault(), Answer(), 1.0, row).strike(1, 1.0)
        finally:
            sweep.ask = original

    assert not loops.run(strikes()), "no chunk came after the blow"
    assert len(blows) == 1

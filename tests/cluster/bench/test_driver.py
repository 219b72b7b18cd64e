"""The driver against a server in virtual time: what is sent when, and what a latency counts from."""

import asyncio
from contextlib import nullcontext
from itertools import islice

import pytest

from holdfast.cluster.bench.agents import AgentWorkload
from holdfast.cluster.bench.driver import Driver, LoadLimits
from holdfast.cluster.bench.runs import Bench, Plan
from holdfast.cluster.bench.sender import Ask, Reply, SendFailed
from holdfast.cluster.bench.summary import RequestRecord
from holdfast.cluster.bench.workload import Calibration, Lengths, PromptTexts, Session, Turn, Workload
from tests.virtual_loop import run


class Server:
    """Answers `places` requests at a time, with pieces `step_s` apart; it stands still from `stall_s[0]` to `[1]`."""

    def __init__(self, step_s: float = 1.0, places: int = 1000, stall_s: tuple[float, float] = (0.0, 0.0)) -> None:
        self.step_s, self.stall_s = step_s, stall_s
        self.places = asyncio.Semaphore(places)
        self.asks: list[Ask] = []
        self.num_open = self.most_open = 0

    async def send(self, ask: Ask, on_piece) -> Reply:
        self.asks.append(ask)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            async with self.places:
                for _ in range(ask.num_output_tokens):
                    await asyncio.sleep(self.step_s)
                    now = asyncio.get_running_loop().time()
                    if self.stall_s[0] <= now < self.stall_s[1]:
                        await asyncio.sleep(self.stall_s[1] - now)
                    on_piece()
        finally:
            self.num_open -= 1
        return Reply(text=f"answer {len(self.asks)}", num_output_tokens=ask.num_output_tokens, num_prompt_tokens=7)

    async def close(self) -> None: ...


def driven(make_server, sessions, **pace) -> tuple[Server, list[RequestRecord]]:
    async def main():
        server = make_server()
        loop = asyncio.get_running_loop()
        driver = Driver(server, PromptTexts(0, Calibration()), LoadLimits(**pace), clock=loop.time)
        return server, await driver.run(sessions)

    return run(main())


def each_second(count: int, tokens: int = 1) -> list[Session]:
    return [Session(number, (Turn(4, tokens),), float(number)) for number in range(count)]


def test_requests_of_an_open_loop_are_sent_when_they_are_due_whatever_the_server_does():
    server, records = driven(lambda: Server(stall_s=(2.0, 60.0)), each_second(20))
    assert [record.sent_s for record in records] == pytest.approx(range(20))
    assert server.most_open >= 18


def test_a_stall_is_seen_by_every_request_that_was_due_in_it():
    """A tool with coordinated omission would see one slow request: those that it did not send meanwhile are missing."""
    _, records = driven(lambda: Server(stall_s=(2.0, 12.0)), each_second(20))
    assert [record.ttft_s for record in records][:12] == pytest.approx([1, *range(11, 1, -1), 1])


@pytest.mark.parametrize("limit", ["of the tool", "of the server"])
def test_the_wait_for_a_place_counts_on_whichever_side_it_is(limit):
    """A server of one place and steps of 2 s falls behind by a second each second. So it does where the tool waits."""
    at_tool = limit == "of the tool"
    make = (lambda: Server(2.0)) if at_tool else (lambda: Server(2.0, places=1))
    _, records = driven(make, each_second(10), max_in_flight=1 if at_tool else 1000)
    assert [record.ttft_s for record in records] == pytest.approx([2 + number for number in range(10)])
    lateness = [record.sent_s - record.due_s for record in records]
    assert lateness == pytest.approx([number if at_tool else 0 for number in range(10)])


def test_a_closed_loop_has_as_many_requests_open_as_users():
    server, records = driven(Server, (Session(n, (Turn(4, 2),)) for n in range(12)), concurrency=3)
    assert server.most_open == 3
    assert [record.due_s for record in records] == pytest.approx([2.0 * (n // 3) for n in range(12)])
    assert all(record.e2e_s == pytest.approx(2.0) for record in records)


def test_a_closed_loop_begins_nothing_after_its_time_and_ends_what_it_began():
    endless = (Session(number, (Turn(4, 4),)) for number in range(10**9))
    _, records = driven(Server, endless, concurrency=2, duration_s=10.0)
    assert len(records) == 6
    assert max(record.end_s for record in records) == pytest.approx(12.0)


def test_turns_follow_each_other_with_all_that_was_said_and_time_to_think():
    session = Session(0, (Turn(4, 2), Turn(5, 3), Turn(6, 1)), 1.0)
    server, records = driven(Server, [session], think_s=10.0)
    assert [record.due_s for record in records] == pytest.approx([1.0, 13.0, 26.0])
    assert [record.ttft_s for record in records] == pytest.approx([1.0] * 3)
    first, second, third = server.asks
    assert (len(first.texts), len(second.texts), len(third.texts)) == (1, 3, 5)
    assert third.texts[:3] == second.texts
    assert second.texts[1] == "answer 1"


def test_latencies_are_as_the_field_defines_them():
    _, (record,) = driven(lambda: Server(0.5), [Session(0, (Turn(4, 5),), 3.0)])
    assert record.ttft_s == pytest.approx(0.5)
    assert record.e2e_s == pytest.approx(2.5)
    assert record.tpot_s == pytest.approx(0.5)
    assert record.gaps_s == pytest.approx([0.5] * 4)


class Failing(Server):
    async def send(self, ask: Ask, on_piece) -> Reply:
        if len(self.asks) == 1:
            self.asks.append(ask)
            on_piece()
            raise SendFailed("HTTP 503", "full")
        return await super().send(ask, on_piece)


def test_failures_end_their_session_and_no_other():
    sessions = [Session(number, (Turn(4, 1), Turn(4, 1)), 10.0 * number) for number in range(3)]
    _, records = driven(Failing, sessions)
    assert [(record.session, record.turn, record.error) for record in records] == [
        (0, 0, None), (0, 1, "HTTP 503"), (1, 0, None), (1, 1, None), (2, 0, None), (2, 1, None)
    ]  # fmt: skip


def test_an_interrupted_bench_keeps_the_runs_that_are_done_and_what_was_over_of_the_last():
    async def main() -> Bench:
        plan = Plan(
            workload=Workload(prompt_tokens=Lengths.parsed("p", "4"), output_tokens=Lengths.parsed("o", "3")),
            concurrency=(1, 2),
            num_sessions=4,
        )
        bench = Bench(plan, Server(), lambda *_: nullcontext(lambda *_: None), clock=asyncio.get_running_loop().time)
        await bench.prepare()
        began_s = asyncio.get_running_loop().time()
        running = asyncio.create_task(bench.run())
        await asyncio.sleep(12 + 4.5)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(16.5)
        return bench

    whole, cut = run(main()).runs
    assert (whole.interrupted, whole.completed, whole.failed) == (False, 4, 0)
    assert (cut.interrupted, cut.completed, cut.failed, cut.requests) == (True, 2, 0, 2)
    assert cut.duration_s == pytest.approx(3.0)


def test_a_request_without_an_end_is_given_up():
    server, (record,) = driven(lambda: Server(100.0), [Session(0, (Turn(4, 1),), 5.0)], timeout_s=30.0)
    assert (record.error, record.end_s) == ("timeout", pytest.approx(35.0))
    assert server.num_open == 0


def test_an_answer_without_output_is_a_failure():
    class Silent(Server):
        async def send(self, ask: Ask, on_piece) -> Reply:
            return Reply(num_output_tokens=3)

    _, (record,) = driven(Silent, [Session(0, (Turn(4, 1),))])
    assert record.error == "no output"


def test_agents_are_all_open_at_once_and_pause_before_each_turn():
    workload = AgentWorkload.scaled(0.001, num_turns=4)

    async def main():
        server = Server(step_s=0.001)
        plan = Plan(workload=workload, num_agents=6)
        watch = lambda *_: nullcontext(lambda *_: None)  # noqa: E731
        bench = Bench(plan, server, watch, clock=asyncio.get_running_loop().time)
        await bench.prepare()
        await bench.run()
        return bench.runs

    (run_,) = run(main())
    assert (run_.load.kind, run_.load.concurrency, run_.failed) == ("agents", 6, 0)
    assert run_.requests == workload.num_requests(6) > 12
    by_turn = {(one.session & 0xFFFF, one.turn): one for one in run_.each_request}
    sessions = list(islice(workload.sessions(), 6))
    for number, session in enumerate(sessions):
        assert by_turn[number, 0].due_s == pytest.approx(session.start_s, abs=0.01)
        for index, turn in enumerate(session.turns[1:], start=1):
            gap_s = by_turn[number, index].due_s - by_turn[number, index - 1].last_s
            assert gap_s == pytest.approx(turn.pause_s, abs=0.01)
    assert run_.turns.sessions == 6

"""What `holdfast bench` says of a server whose every token has a known time, against that time and another client's.

The server, the driver and the other client share a clock that only the server moves, so the machine's load is in no
figure. Our own API over gRPC is measured beside it, on the same schedule.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise

import httpx
import pytest

from holdfast.cluster.bench.driver import Driver, LoadLimits, calibrate
from holdfast.cluster.bench.runs import Target
from holdfast.cluster.bench.summary import RequestRecord
from holdfast.cluster.bench.workload import Calibration, PromptTexts, Session, Turn
from holdfast.v1 import engine_pb2
from tests.fakes import FakeReplica
from tests.router.site import site

NEAR = 0.05
TURNS_OF_THE_LOOP = 30
"""In so many, whoever reads from loopback has read what was written."""


@dataclass(frozen=True)
class Event:
    """Comes so long after the one before, and stands for so many tokens."""

    after_s: float
    num_tokens: int = 1
    text: str = "x"
    finish: str | None = None


def even(number: int, each_s: float = 0.02, **fields: object) -> list[Event]:
    return [Event(each_s, **fields) for _ in range(number)]


SCHEDULES: dict[str, list[Event]] = {
    "a token an event": [Event(0.1), *even(9), Event(0.02, finish="length")],
    "several tokens an event": [Event(0.1, 3), *even(9, 0.06, num_tokens=3), Event(0.06, 3, finish="length")],
    "the end comes by itself": [Event(0.1), *even(3), Event(0.0, 0, "", "length")],
    "an end token without text": [Event(0.1), *even(3), Event(0.02, 1, "", "stop")],
    "a token without text on the way": [Event(0.1), Event(0.02, 1, ""), *even(2), Event(0.02, finish="length")],
    "two tokens": [Event(0.3), Event(0.05, finish="length")],
}


class Clock:
    """Seconds, which the server alone moves."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_reads = 0

    def __call__(self) -> float:
        self.num_reads += 1
        return self.now_s


class Server:
    """Streams one schedule to everyone, as OpenAI's servers do; `is_split`: in pieces that end anywhere."""

    def __init__(self, clock: Clock, schedule: Sequence[Event], *, is_chat: bool, is_split: bool) -> None:
        self._clock, self._schedule, self._is_chat, self._is_split = clock, schedule, is_chat, is_split

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(length)
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
        writer.write(head)
        if self._is_chat:
            await self._say(writer, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for event in self._schedule:
            self._clock.now_s += event.after_s
            said = {"delta": {"content": event.text} if event.text else {}} if self._is_chat else {"text": event.text}
            await self._say(writer, {"choices": [{"index": 0, **said, "finish_reason": event.finish}]})
        self._clock.now_s += 1.0  # what a server does after the last token is no part of it
        usage = {"prompt_tokens": 3, "completion_tokens": sum(event.num_tokens for event in self._schedule)}
        await self._say(writer, {"choices": [], "usage": usage})
        writer.write(b"data: [DONE]\n\n")
        writer.close()

    async def _say(self, writer: asyncio.StreamWriter, event: dict) -> None:
        data = b"data: " + json.dumps(event).encode() + b"\n\n"
        for part in (data[:7], data[7:]) if self._is_split else (data,):
            writer.write(part)
            await writer.drain()
            for _ in range(TURNS_OF_THE_LOOP):
                await asyncio.sleep(0)


@asynccontextmanager
async def served(serve: Callable) -> AsyncIterator[str]:
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def by_bench(url: str, protocol: str, clock: Clock, model: str = "any", num_tokens: int = 99) -> RequestRecord:
    sender, _ = await Target.parsed(url, protocol).sender(model, {})
    session = Session(number=0, turns=(Turn(num_prompt_tokens=3, num_output_tokens=num_tokens),))
    driver = Driver(sender, PromptTexts(0, Calibration()), LoadLimits(concurrency=1), clock=clock)
    try:
        (record,) = await driver.run([session])
    finally:
        await sender.close()
    assert record.error is None, record.message
    return record


async def by_another(
    url: str, path: str, clock: Clock, model: str = "any", max_tokens: int = 99
) -> tuple[float, float]:
    """TTFT and TPOT as a few lines of httpx have them."""
    began_s, first_s, last_s, num_tokens = clock(), 0.0, 0.0, 0
    body = {"model": model, "stream": True, "max_tokens": max_tokens, "stream_options": {"include_usage": True}}
    body |= {"messages": []} if "chat" in path else {"prompt": "x"}
    async with httpx.AsyncClient(timeout=None) as client, client.stream("POST", url + path, json=body) as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            for choice in event["choices"]:
                has_text = bool(choice.get("text") or choice.get("delta", {}).get("content"))
                first_s = clock() if has_text and not first_s else first_s
                last_s = clock() if has_text or choice.get("finish_reason") else last_s
            num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
    return first_s - began_s, (last_s - first_s) / (num_tokens - 1)


@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("protocol", ["completions", "chat"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_figures_are_those_of_the_schedule_and_of_another_client(name, protocol, is_split):
    schedule = SCHEDULES[name]
    times = list(accumulate(event.after_s for event in schedule))
    ttft_s = next(time_s for time_s, event in zip(times, schedule, strict=True) if event.text)
    tpot_s = (times[-1] - ttft_s) / (sum(event.num_tokens for event in schedule) - 1)

    async def run() -> tuple[RequestRecord, tuple[float, float]]:
        clock = Clock()
        server = Server(clock, schedule, is_chat=protocol == "chat", is_split=is_split)
        async with served(server.serve) as url:
            record = await by_bench(url, protocol, clock)
            clock.now_s = 0.0
            path = "/v1/chat/completions" if protocol == "chat" else "/v1/completions"
            return record, await by_another(url, path, clock)

    record, another = asyncio.run(run())
    assert (record.ttft_s, record.tpot_s) == pytest.approx((ttft_s, tpot_s), rel=NEAR)
    assert (record.ttft_s, record.tpot_s) == pytest.approx(another, rel=NEAR)
    assert record.e2e_s == pytest.approx(times[-1], rel=NEAR)
    with_text = [time_s for time_s, event in zip(times, schedule, strict=True) if event.text]
    gaps = [later - earlier for earlier, later in pairwise(with_text)]
    assert record.gaps_s == pytest.approx(gaps, rel=NEAR)


def test_a_server_whose_end_comes_by_itself_can_be_calibrated():
    async def run() -> Calibration:
        server = Server(Clock(), SCHEDULES["the end comes by itself"], is_chat=False, is_split=False)
        async with served(server.serve) as url:
            sender, _ = await Target.parsed(url, "completions").sender("any", {})
            try:
                return await calibrate(sender, 0)
            finally:
                await sender.close()

    assert asyncio.run(run()) is not None


# --- our own router: gRPC, HTTP, and another client ---


def test_our_own_api_gives_the_same_figures_by_grpc_and_http():
    """The replica steps once the token before was read, by whoever it was for: 20 ms a step, and 80 ms the first."""
    clock, num_tokens = Clock(), 12

    class Paced(FakeReplica):
        async def _steps(self) -> None:
            while True:
                await self.until(lambda: bool(self.running))
                first = not any(self._num_done.get(attempt) for attempt in self.running)
                clock.now_s += 0.08 if first else 0.02
                seen, deltas = clock.num_reads, [self._advance(attempt) for attempt in list(self.running)]
                self.say(engine_pb2.StepUpdate(deltas=deltas, load=self._load()))
                while clock.num_reads == seen:
                    await asyncio.sleep(0.0005)

        async def until(self, condition: Callable[[], bool]) -> None:
            while not condition():
                await asyncio.sleep(0.0005)

    async def run() -> dict[str, tuple[float | None, float | None]]:
        figures: dict[str, tuple[float | None, float | None]] = {}
        async with site(await Paced.start(), http=True) as place:
            http = f"http://{place.router.http_address}"
            for name, where, protocol in (
                ("gRPC", place.router.address, "holdfast"),
                ("HTTP", http, "completions"),
            ):
                record = await by_bench(where, protocol, clock, "fake", num_tokens)
                figures[name] = record.ttft_s, record.tpot_s
            figures["another"] = await by_another(http, "/v1/completions", clock, "fake", num_tokens)
        return figures

    figures = asyncio.run(run())
    for name, found in figures.items():
        assert found == pytest.approx((0.08, 0.02), rel=NEAR), name

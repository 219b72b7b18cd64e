"""What a streamed token costs a router and a client in counts, on a fixed load: Python's calls, C's, messages, copies.

From the bytes of a link to the bytes of a chunk, and from those to what a caller gets; without sockets. Times are for
`benchmarks/router.py`. A count that grows is seen here, on any machine.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from typing import Any

from holdfast.cluster.bundled_model.bundled_model import BUNDLED, bundled_path
from holdfast.cluster.client.async_client import AsyncClient
from holdfast.router.api.grpc.server import InferenceServicer
from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.dispatch.dispatch import Dispatch
from holdfast.router.dispatch.dispatch_host import DispatchHost
from holdfast.router.events import SendAbort, SendSubmit
from holdfast.router.requests.request_processor import RequestProcessor
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.router.text.tokenizer_registry import TokenizerRegistry
from holdfast.v1 import engine_pb2, inference_pb2
from holdfast.worker.model_info import ReplicaFacts
from holdfast.worker.request import AttemptKey, EngineLoad, FinishReason, TokenDelta
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.step_update import StepUpdate
from holdfast.worker.wire.link_responses import (
    read_response,
    step_messages,
)
from tests import loops
from tests.counting import Counted, Ticks

NUM_STREAMS = 32
NUM_TOKENS = 40
WARM = 12
"""Steps after which what is made once is made."""
LOAD = EngineLoad(num_running=1, num_waiting=0, num_waiting_tokens=0, num_free_blocks=9, num_total_blocks=9)
FACTS = ReplicaFacts(
    replica_id="r0",
    model=BUNDLED,
    path=str(bundled_path(BUNDLED)),
    model_type="llama",
    max_model_len=1000,
    vocab_size=1000,
    eos_token_ids=frozenset(),
    dtype="float32",
    tensor_parallel_size=1,
    block_size=16,
    num_blocks=1000,
    kv_bytes_per_token=1,
    row_invariant=True,
)


class Outbox:
    """A link's end where messages to the replica are only noted."""

    def __init__(self) -> None:
        self.facts = FACTS
        self.attempts: list[int] = []

    def submit(self, action: SendSubmit) -> None:
        self.attempts.append(action.attempt)

    def abort(self, action: SendAbort) -> None:
        raise AssertionError("nothing is aborted here")

    def take_pins(self, action) -> None: ...


class Call:
    """A call's context that keeps what is written. With a gate, a write lasts until it opens."""

    def __init__(self, gate: asyncio.Event | None = None) -> None:
        self.written: list[bytes] = []
        self._gate = gate

    def time_remaining(self) -> None:
        return None

    def invocation_metadata(self) -> None:
        return None

    async def send_initial_metadata(self, metadata: object) -> None: ...

    async def write(self, chunk: bytes) -> None:
        self.written.append(chunk)
        if self._gate is not None:
            await self._gate.wait()


class Routed:
    """A router's parts between a link and its calls."""

    def __init__(self) -> None:
        dispatch = Dispatch(RouterConfig(), LimitsConfig(), random.Random(1).randrange)
        self.host = DispatchHost(dispatch, Ticks(), lambda: None)
        self.outbox = Outbox()
        self.tasks: list[asyncio.Task[None]] = []

    async def begin(self, calls: list[Call], **params: Any) -> None:
        tokenizers = TokenizerRegistry(Tokenizer.load, 10**6)
        await tokenizers.load(BUNDLED, FACTS.path)
        self.host.replica_up(self.outbox, FACTS, LOAD)
        servicer = InferenceServicer(RequestProcessor(self.host, tokenizers, LimitsConfig()), self.host)
        request = inference_pb2.GenerateRequest(
            text="Once", sampling_params=inference_pb2.SamplingParams(max_tokens=NUM_TOKENS, seed=1, **params)
        )
        for call in calls:
            self.tasks.append(asyncio.create_task(servicer.GenerateStream(request, call)))
        while len(self.outbox.attempts) < len(calls):
            await asyncio.sleep(0)

    def take(self, message: bytes) -> None:
        """What a link does with a message."""
        self.host.replica_update("r0", read_response(engine_pb2.LinkResponse.FromString(message)))


def step(attempts: list[int], index: int) -> StepUpdate:
    finish_reason = FinishReason.LENGTH if index == NUM_TOKENS - 1 else None
    deltas = [
        TokenDelta(
            attempt=AttemptKey("link-1", attempt),
            first_token_index=index,
            token_ids=(300 + index,),
            finish_reason=finish_reason,
        )
        for attempt in attempts
    ]
    return StepUpdate(load=LOAD, step_id=index, deltas=deltas)


def written(update: StepUpdate) -> bytes:
    (message,) = step_messages(update)
    return message.SerializeToString()


async def turns(count: int = 4) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def routed(calls_of: Callable[[], list[Call]] = lambda: [Call() for _ in range(NUM_STREAMS)]) -> tuple[Counter, list]:
    """Counts of one step, and what its calls were given in all."""

    async def run() -> tuple[Counter, list]:
        router, calls = Routed(), calls_of()
        await router.begin(calls)
        messages = [written(step(router.outbox.attempts, index)) for index in range(NUM_TOKENS)]
        for message in messages[:WARM]:
            router.take(message)
            await turns()
        with Counted() as counts:
            router.take(messages[WARM])
            await turns()
        for message in messages[WARM + 1 :]:
            router.take(message)
            await turns()
        await asyncio.gather(*router.tasks)
        return counts, calls

    return loops.run(run())


def test_a_token_takes_few_calls_from_a_link_to_a_chunk():
    counts, calls = routed()
    assert {len(call.written) for call in calls} == {NUM_TOKENS}, "a chunk for each token, where nothing waits"
    assert counts["encode"] == counts["take_one"] == NUM_STREAMS
    assert counts["_token_delta"] == counts["_advance"] == 0, "a link tells plain tokens in columns"
    assert counts["poll"] == counts["set"] == 0, "what a call waits for is written without its task"
    assert counts["all of Python"] <= 11 * NUM_STREAMS
    assert counts["all of C"] <= 19 * NUM_STREAMS
    assert counts["merged"] == 0, "nothing waits, so nothing is to be merged"
    assert counts["delta_message"] == 0, "only the parts that are new are written"


def test_tokens_that_wait_while_a_chunk_is_written_leave_in_one():
    gate = asyncio.Event()

    async def run() -> list[bytes]:
        router, call = Routed(), Call(gate)
        await router.begin([call])
        for index in range(NUM_TOKENS):
            router.take(written(step(router.outbox.attempts, index)))
            await turns()
        assert len(call.written) == 1
        gate.set()
        await asyncio.gather(*router.tasks)
        return call.written

    first, rest = map(inference_pb2.GenerateStreamResponse.FromString, loops.run(run(), "asyncio"))
    assert [first.first_token_index, rest.first_token_index] == [0, 1]
    assert [*first.token_ids, *rest.token_ids] == [300 + index for index in range(NUM_TOKENS)]
    assert (rest.finish_reason, rest.usage.completion_tokens) == (inference_pb2.FINISH_REASON_LENGTH, NUM_TOKENS)


def test_a_step_is_written_once_and_copied_nowhere():
    update = step(list(range(NUM_STREAMS)), 5)
    with Counted() as counts:
        written(update)
    assert counts["_add_delta"] == 0
    assert counts["all of Python"] <= 2 * NUM_STREAMS + 20
    assert counts["all of C"] <= 6 * NUM_STREAMS + 40


class PreparedTransport:
    """Answers every call with the same bytes."""

    def __init__(self, chunks: list[bytes]) -> None:
        self._chunks = chunks

    async def call(
        self,
        address: str,
        method: str,
        request: Any,
        on_taken: Callable[[], None] | None = None,
        num_routers_lost: int = 0,
    ) -> AsyncGenerator[Any, None]:
        for chunk in self._chunks:
            yield inference_pb2.GenerateStreamResponse.FromString(chunk)

    async def close(self) -> None: ...


def test_a_chunk_takes_few_calls_in_a_client():
    _, calls = routed()
    transport = PreparedTransport(calls[0].written)

    async def read() -> tuple[Counter, list[int]]:
        client = AsyncClient("nowhere", transport=transport)
        token_ids: list[int] = []
        counted = Counted()
        async for chunk in client.stream("Once", SamplingParams(max_tokens=NUM_TOKENS)):
            token_ids += chunk.token_ids
            if len(token_ids) == WARM:
                counted.begin()
            if len(token_ids) == NUM_TOKENS - 1:
                counted.end()
        return counted.calls, token_ids

    counts, token_ids = loops.run(read(), "asyncio")
    num_chunks = NUM_TOKENS - 1 - WARM
    assert token_ids == [300 + index for index in range(NUM_TOKENS)]
    assert counts["output_delta"] == num_chunks
    assert counts["replace"] == 0, "no chunk is made twice"
    assert counts["all of Python"] <= 9.5 * num_chunks
    assert counts["all of C"] <= 25 * num_chunks

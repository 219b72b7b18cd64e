"""Stand-ins that behave: a replica behind real gRPC, a tokenizer of bytes, and a wire that can be cut.

`FakeReplica` speaks the real link, but its model is a sum and its engine a loop of a few lines, so a test can hold it
still, look into it and kill it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress

import grpc
from tokenizers.pre_tokenizers import ByteLevel

from holdfast.router.links.replica_directory import ReplicaEndpoint
from holdfast.router.text.token_table import bytes_of_piece
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.v1 import engine_pb2

STOP, LENGTH, ABORT = 1, 2, 3


class ByteCodec:
    """Each byte of UTF-8 is a token."""

    vocab_size = 256
    special_token_ids: frozenset[int] = frozenset()

    def encode(self, text: str, add_special_tokens: bool, most: int | None = None) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return bytes(token_ids).decode(errors="replace")

    def token_id(self, token: str) -> int | None:
        return ord(" ") if token == "Ġ" else None

    def token(self, token_id: int) -> str:
        """As byte-level vocabularies write it."""
        return PIECES[token_id]


PIECES = {byte: piece for piece in ByteLevel.alphabet() for byte in bytes_of_piece(piece)}


def byte_tokenizer(path: str = "", chat_template: str | None = None) -> Tokenizer:
    return Tokenizer(ByteCodec(), special_tokens={}, chat_template=chat_template)


def fake_tokens(prompt: Sequence[int], seed: int, num_tokens: int) -> list[int]:
    """What a `FakeReplica` answers."""
    return [fake_token(prompt, seed, index) for index in range(num_tokens)]


def fake_token(prompt: Sequence[int], seed: int, index: int) -> int:
    """A small letter, a function of prompt, seed and its own position."""
    return ord("a") + (sum(prompt) + seed + 7 * index + index * index) % 26


class FakeReplica:
    """A replica on loopback, made by `start`. One token a step for every attempt; `resume` and `pause` its steps."""

    def __init__(self, replica_id: str, model: str, step_s: float) -> None:
        self.replica_id = replica_id
        self.model = model
        self.step_s = step_s
        self.max_model_len = 100_000
        self.chat_template = ""
        self.adapters: list[engine_pb2.Adapter] = []
        self.vocab_size = 256
        self.heartbeat_ms = 0
        self.frozen_after_ms = 1000
        """What its hello says. Heartbeats come by `beat` alone."""
        self.num_blocks = 100_000
        self.num_links = 0
        """Links that have ever been made to it."""
        self.num_followers = 0
        """Links whose router has asked for the prefix cache's events. There are none."""
        self.max_loras = 0
        self.kept: list[list[engine_pb2.Adapter]] = []
        """Adapters that routers have told it to keep, each time."""
        self.log_levels: list[str] = []
        """Those that routers have ordered."""
        self.after_hello: list[engine_pb2.LinkResponse | bytes] = []
        """What every new link is told next after the hello."""
        self.num_steps = 0
        self.num_tokens = 0
        self.running: dict[int, engine_pb2.Submit] = {}
        """Attempts by number. With several routers, numbers may be equal; these tests use one."""
        self.submits: list[engine_pb2.Submit] = []
        self.aborted: list[int] = []
        self.refusal: engine_pb2.Rejection | None = None
        """What every submission is answered with, if set."""
        self._num_done: dict[int, int] = {}
        self._outboxes: set[asyncio.Queue[engine_pb2.LinkResponse | bytes]] = set()
        self._changed = asyncio.Event()
        self._may_step = asyncio.Event()
        self._may_step.set()

    @classmethod
    async def start(
        cls, replica_id: str = "r0", model: str = "fake", *, step_s: float = 0.001, port: int = 0
    ) -> "FakeReplica":
        replica = cls(replica_id, model, step_s)
        options = [("grpc.so_reuseport", 0), ("grpc.http2.min_ping_interval_without_data_ms", 50)]
        replica._server = grpc.aio.server(options=options)
        link = grpc.stream_stream_rpc_method_handler(replica.Link, engine_pb2.LinkRequest.FromString, _serialized)
        handler = grpc.method_handlers_generic_handler("holdfast.v1.Engine", {"Link": link})
        replica._server.add_generic_rpc_handlers((handler,))
        replica.port = replica._server.add_insecure_port(f"127.0.0.1:{port}")
        await replica._server.start()
        replica._stepping = asyncio.create_task(replica._steps())
        return replica

    @property
    def endpoint(self) -> ReplicaEndpoint:
        return self.endpoint_at(self.port)

    def endpoint_at(self, port: int) -> ReplicaEndpoint:
        """As seen through something that listens at `port`."""
        return ReplicaEndpoint(
            replica_id=self.replica_id, address=f"127.0.0.1:{port}", model=self.model, model_path="/nowhere"
        )

    @property
    def is_idle(self) -> bool:
        return not self.running

    def pause(self) -> None:
        self._may_step.clear()

    def resume(self) -> None:
        self._may_step.set()

    async def kill(self) -> None:
        """Gone at once, in the middle of whatever was running."""
        self._stepping.cancel()
        with suppress(asyncio.CancelledError):
            await self._stepping
        await self._server.stop(None)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Returns once `condition`, of this replica's state, holds."""
        async with asyncio.timeout(10):
            while not condition():
                await self._changed.wait()

    async def Link(
        self, requests: AsyncIterator[engine_pb2.LinkRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[engine_pb2.LinkResponse | bytes]:
        outbox: asyncio.Queue[engine_pb2.LinkResponse | bytes] = asyncio.Queue()
        self._outboxes.add(outbox)
        self.num_links += 1
        self._tell()
        reader = asyncio.create_task(self._read(requests, outbox))
        try:
            yield self.hello()
            for message in self.after_hello:
                yield message
            while True:
                yield await outbox.get()
        finally:
            reader.cancel()
            self._outboxes.discard(outbox)
            self.running.clear()
            self._tell()

    def say(self, update: engine_pb2.StepUpdate) -> None:
        """Up every link, whatever is in it."""
        self.put(engine_pb2.LinkResponse(step=update))

    def put(self, message: engine_pb2.LinkResponse | bytes) -> None:
        """Up every link; bytes as they are."""
        for outbox in self._outboxes:
            outbox.put_nowait(message)

    def beat(self, progress: int, expected_gap_s: float = 0.0) -> None:
        """A heartbeat up every link."""
        heartbeat = engine_pb2.Heartbeat(progress=progress, expected_gap_s=expected_gap_s)
        self.put(engine_pb2.LinkResponse(heartbeat=heartbeat))

    async def _read(self, requests: AsyncIterator[engine_pb2.LinkRequest], outbox: asyncio.Queue) -> None:
        async for request in requests:
            if request.HasField("abort"):
                self.aborted.append(request.abort.attempt)
                self.running.pop(request.abort.attempt, None)
            elif request.HasField("follow_cache"):
                self.num_followers += 1
            elif request.HasField("kill"):
                self.killing = asyncio.create_task(self.kill())
            elif request.HasField("set_log_level"):
                self.log_levels.append(request.set_log_level.level)
            elif request.HasField("keep_adapters"):
                self.kept.append(list(request.keep_adapters.adapters))
            elif self.refusal is not None:
                self.refusal.attempt = request.submit.attempt
                self.say(engine_pb2.StepUpdate(rejections=[self.refusal], load=self._load()))
            else:
                self.submits.append(request.submit)
                self.running[request.submit.attempt] = request.submit
                self._num_done[request.submit.attempt] = len(request.submit.output_token_ids)
            self._tell()

    async def _steps(self) -> None:
        while True:
            await asyncio.sleep(self.step_s)
            await self._may_step.wait()
            if not self.running:
                await self._changed.wait()
                continue
            self.num_steps += 1
            deltas = [self._advance(attempt) for attempt in list(self.running)]
            self.say(engine_pb2.StepUpdate(step_id=self.num_steps, deltas=deltas, load=self._load()))
            self._tell()

    def _advance(self, attempt: int) -> engine_pb2.Delta:
        submit, done = self.running[attempt], self._num_done[attempt]
        self._num_done[attempt] += 1
        self.num_tokens += 1
        length = len(submit.prompt_token_ids) + done + 1
        is_over = done + 1 == submit.sampling_params.max_tokens or length >= self.max_model_len
        if is_over:
            del self.running[attempt]
        token_id = fake_token(submit.prompt_token_ids, submit.sampling_params.seed, done)
        finish_reason = LENGTH if is_over else 0
        if token_id in submit.sampling_params.stop_token_ids:
            self.running.pop(attempt, None)
            finish_reason = STOP
        return engine_pb2.Delta(
            attempt=attempt,
            first_token_index=done,
            token_ids=[token_id],
            finish_reason=finish_reason,
            logprobs=_logprobs(submit.sampling_params, token_id),
            prompt_logprobs=_prompt_logprobs(submit) if done == 0 else (),
        )

    def hello(self) -> engine_pb2.LinkResponse:
        """The first message of each of its links."""
        hello = engine_pb2.Hello(
            replica_id=self.replica_id,
            model=self.model,
            max_model_len=self.max_model_len,
            adapters=self.adapters,
            max_loras=self.max_loras,
            chat_template=self.chat_template,
            vocab_size=self.vocab_size,
            tensor_parallel_size=2,
            block_size=16,
            num_blocks=self.num_blocks,
            row_invariant=True,
            quantization="GGUF Q4_1",
            weight_bytes=3 << 20,
            heartbeat_ms=self.heartbeat_ms,
            frozen_after_ms=self.frozen_after_ms,
            load=self._load(),
        )
        return engine_pb2.LinkResponse(hello=hello)

    def _load(self) -> engine_pb2.Load:
        return engine_pb2.Load(num_running=len(self.running), num_free_blocks=9, num_total_blocks=9)

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _logprobs(params: engine_pb2.EngineSamplingParams, token_id: int) -> list[engine_pb2.EngineTokenLogprob]:
    """Where they are asked for: the token is the likeliest, and those after it come next."""
    if not params.HasField("logprobs"):
        return []
    top = [(token_id + place) % 256 for place in range(params.logprobs)]
    logprobs = [-0.5 - place for place in range(len(top))]
    return [engine_pb2.EngineTokenLogprob(logprob=-0.5, rank=1, top_token_ids=top, top_logprobs=logprobs)]


def _serialized(message: engine_pb2.LinkResponse | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


class Wire:
    """A TCP proxy in front of `port`. `go_dark` leaves both sides connected to nothing, as a lost network does."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._is_lit = True
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    async def start(cls, target_port: int) -> "Wire":
        wire = cls(target_port)
        wire._server = await asyncio.start_server(wire._connect, "127.0.0.1", 0)
        wire.port = wire._server.sockets[0].getsockname()[1]
        return wire

    def go_dark(self) -> None:
        self._is_lit = False

    async def stop(self) -> None:
        self._server.close()
        await self.cut()

    async def cut(self) -> None:
        """Breaks the connections that there are; new ones can be made."""
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            self._tasks.add(asyncio.create_task(self._pump(source, sink)))

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(2**16):
                if self._is_lit:
                    sink.write(data)
                    await sink.drain()
        finally:
            if self._is_lit:
                sink.close()


def _prompt_logprobs(submit: engine_pb2.Submit) -> list[engine_pb2.EngineTokenLogprob]:
    """Where they are asked for, of every prompt token but the first."""
    if not submit.sampling_params.HasField("prompt_logprobs"):
        return []
    num_top = submit.sampling_params.prompt_logprobs
    return [
        engine_pb2.EngineTokenLogprob(
            token_id=token_id,
            logprob=-0.5,
            rank=1,
            top_token_ids=[(token_id + place) % 256 for place in range(num_top)],
            top_logprobs=[-0.5 - place for place in range(num_top)],
        )
        for token_id in submit.prompt_token_ids[1:]
    ]

"""A client of one or several routers, for programs that run on asyncio. Streams survive the loss of a router.

What may live here: channels, and when to ask again. What may not: messages field by field (`wire.py`), how long to go
on trying (`retry_policy.py`), anything of Ray or of the engine; a client needs neither.
"""

import asyncio
import random
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final, TypeAlias, TypeVar, Unpack

import grpc

from holdfast.cluster.client.codec import chunk, generate_request, generation, resubmission
from holdfast.cluster.client.generation import Chunk, Generation
from holdfast.cluster.client.received import Received
from holdfast.cluster.client.retry_policy import RetryPolicy
from holdfast.cluster.client.statuses import error_of, is_worth_another_try
from holdfast.cluster.service_options import ServiceOptions
from holdfast.router.chat import Chat, Message
from holdfast.v1 import inference_pb2, inference_pb2_grpc
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.sampling_params import SamplingParams

AnswerT = TypeVar("AnswerT")
GenerateCall: TypeAlias = "grpc.aio.UnaryUnaryCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]"

KEEPALIVE_MS: Final = 1_200
"""Silence after which a router is pinged. Routers take no more than one ping in a second."""

PING_TIMEOUT_MS: Final = 1_500
"""A router that has not answered a ping for so long is left: at worst it was busy, and another one goes on as well."""

CHANNEL_OPTIONS: Final = (
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),  # the one that newer gRPC cores go by
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 64 * 2**20),
    # A router that comes back is found soon. A pool shared by the process would impose its own, longer pauses.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_retries", 0),
)


class AsyncClient:
    """Talks to one router at a time. Use it as an async context manager, on one event loop.

    When its router is lost, a stream goes on at another (or at the same one, once it is back) after the last token and
    character that was received; whoever iterates cannot tell. It gives up `reconnect_s` seconds after that if no router
    answers, after `connect_s` if none has ever taken the request, and at the request's own timeout.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        connect_s: float = 5.0,
        reconnect_s: float = 60.0,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """`address` is `host:port`, of one router or of several. `draw` is uniform in [0, 1)."""
        addresses = (address,) if isinstance(address, str) else tuple(address)
        if not addresses:
            raise ValueError("address = (): must name at least one router")
        self._channels = [grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) for address in addresses]
        self._stubs = [inference_pb2_grpc.InferenceStub(channel) for channel in self._channels]  # type: ignore[no-untyped-call]
        self._connect_s = connect_s
        self._reconnect_s = reconnect_s
        self._draw = draw
        self._at = int(draw() * len(addresses))  # clients spread over the routers

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close(None)

    async def stream(
        self,
        prompt: str | Sequence[int] | None = None,
        params: SamplingParams | None = None,
        *,
        messages: Sequence[Message] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        model: str = "",
        request_id: str = "",
        **service: Unpack[ServiceOptions],
    ) -> AsyncGenerator[Chunk, None]:
        """The completions as they come. Leaving the iteration, or cancelling the task, aborts the request.

        Instead of a prompt, `messages` may be given, each with `role` and `content`: the model's own chat template
        makes a prompt of them, with `chat_template_kwargs` (such as `enable_thinking`; `add_generation_prompt` is true
        unless it is there).
        With n > 1, chunks of different completions take turns. `best_of` and `beam_width` are for `generate` alone.
        Raises the error tree of `worker/errors.py`: `CallerError` for what a retry cannot mend, `CapacityError` and
        `ReplicaError` with `retry_after_s`.
        """
        params = params or SamplingParams()
        request = generate_request(
            asked_for(prompt, messages, chat_template_kwargs),
            params,
            model=model,
            request_id=request_id or uuid.uuid4().hex,  # chosen here, because an unseeded request draws by it
            **service,
        )
        retry_policy, received = self._retry_policy(service.get("timeout_s")), Received()
        while True:
            at = self._at
            try:
                async with aclosing(self._attempt(request, params, retry_policy)) as chunks:
                    async for piece in chunks:
                        if (news := received.take(piece)) is not None:
                            yield news
                return
            except grpc.aio.AioRpcError as error:
                await self._pause(at, error, retry_policy)
            request = resubmission(request, retry_policy.time_left_s(self._now()), received)

    async def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        params: SamplingParams | None = None,
        *,
        messages: Sequence[Message] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        model: str = "",
        request_id: str = "",
        **service: Unpack[ServiceOptions],
    ) -> Generation:
        """All completions, when they have ended. Cancelling the task aborts the request. Raises as `stream` does.

        If a router is lost, another one is asked anew: it comes to the same answer.
        """
        params = params or SamplingParams()
        request = generate_request(
            asked_for(prompt, messages, chat_template_kwargs),
            params,
            model=model,
            request_id=request_id or uuid.uuid4().hex,
            **service,
        )
        retry_policy = self._retry_policy(service.get("timeout_s"))
        while True:
            at = self._at
            try:
                return generation(await _whole(self._stubs[at].Generate(request), retry_policy), params)
            except grpc.aio.AioRpcError as error:
                await self._pause(at, error, retry_policy)
            request = resubmission(request, retry_policy.time_left_s(self._now()))

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "") -> str:
        """The text of token ids, without special tokens. Raises as `stream` does."""
        request = inference_pb2.DetokenizeRequest(model=model, token_ids=token_ids)
        answer = await self._ask(lambda stub: stub.Detokenize(request), self._retry_policy(timeout_s=0))
        return str(answer.text)

    async def get_load(self) -> inference_pb2.GetLoadResponse:
        """How busy a router and its replicas are, of the first router that answers. Raises as `stream` does."""
        request = inference_pb2.GetLoadRequest()
        return await self._ask(lambda stub: stub.GetLoad(request), self._retry_policy(timeout_s=0))

    async def list_models(self) -> inference_pb2.ListModelsResponse:
        """The models that are served, and by how many replicas. Raises as `stream` does."""
        request = inference_pb2.ListModelsRequest()
        return await self._ask(lambda stub: stub.ListModels(request), self._retry_policy(timeout_s=0))

    # --- inside ---

    async def _attempt(
        self, request: inference_pb2.GenerateRequest, params: SamplingParams, retry_policy: RetryPolicy
    ) -> AsyncGenerator[Chunk, None]:
        """What one router answers. Raises what gRPC raises."""
        call = self._stubs[self._at].GenerateStream(request)
        try:
            if await call.initial_metadata():  # comes when the request is taken, which may be long before a token
                retry_policy.note_word()
            async for message in call:
                retry_policy.note_word()
                yield chunk(message, params)
        finally:
            call.cancel()

    async def _ask(
        self, call: Callable[[inference_pb2_grpc.InferenceStub], Awaitable[AnswerT]], retry_policy: RetryPolicy
    ) -> AnswerT:
        """A unary call whose answer is the same whichever router gives it."""
        while True:
            at = self._at
            try:
                return await call(self._stubs[at])
            except grpc.aio.AioRpcError as error:
                await self._pause(at, error, retry_policy)

    async def _pause(self, at: int, error: grpc.aio.AioRpcError, retry_policy: RetryPolicy) -> None:
        """Gets ready for the next try, after what the router `at` has said. Raises if there is no use in one."""
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # a call that fails just then hides that its caller has gone
            raise asyncio.CancelledError from error
        failure, pause_s = error_of(error), None
        if is_worth_another_try(error, was_taken=retry_policy.was_taken):
            pause_s = retry_policy.pause_s(self._now(), failure.retry_after_s)
        if pause_s is None:
            raise failure from error
        self._leave(at)
        await asyncio.sleep(pause_s)

    def _leave(self, at: int) -> None:
        """Talks to the next router from here on, unless another task has moved on already."""
        if self._at == at:
            self._at = (at + 1) % len(self._stubs)

    def _retry_policy(self, timeout_s: float | None) -> RetryPolicy:
        return RetryPolicy(
            num_routers=len(self._stubs),
            connect_s=self._connect_s,
            reconnect_s=self._reconnect_s,
            timeout_s=timeout_s,
            draw=self._draw,
            now=self._now(),
        )

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def asked_for(
    prompt: str | Sequence[int] | None,
    messages: Sequence[Message] | None,
    chat_template_kwargs: Mapping[str, Any] | None,
) -> str | Sequence[int] | Chat:
    """What is to be completed. A chat is as of now, wherever it goes on. Raises `InvalidRequestError`."""
    if (prompt is None) == (messages is None):
        raise InvalidRequestError("prompt", prompt, "exactly one of prompt and messages must be given")
    if messages is not None:
        return Chat(messages=messages, template_kwargs=chat_template_kwargs or {}, now_s=int(time.time()))
    if chat_template_kwargs is not None:
        raise InvalidRequestError("chat_template_kwargs", chat_template_kwargs, "is for messages alone")
    return prompt  # type: ignore[return-value]  # one of the two is given


async def _whole(call: GenerateCall, retry_policy: RetryPolicy) -> inference_pb2.GenerateResponse:
    """The answer of a unary call. Raises what gRPC raises."""
    try:
        if await call.initial_metadata():
            retry_policy.note_word()
        answer: inference_pb2.GenerateResponse = await call
        return answer
    finally:
        call.cancel()

"""Asyncio client of one or several routers. Its streams survive the loss of a router."""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias, Unpack

import grpc

from holdfast.cluster.call_options import CallOptions, ServiceOptions
from holdfast.cluster.client.resumable_call import ResumableCall
from holdfast.cluster.client.retry_policy import RECONNECT_S, RetryPolicy, is_worth_another_try
from holdfast.cluster.client.submissions import bare_submission, submission
from holdfast.cluster.client.transport import CallFailed, GrpcTransport, Transport
from holdfast.router.chat import Message
from holdfast.router.generation import Generation, OutputDelta
from holdfast.router.request import GenerationRequest, truncating
from holdfast.router.resume import ResumeRecord, SequenceDelta
from holdfast.router.wire.pooling_codec import PooledOutputs, pool_message, pooled_outputs, score_message
from holdfast.router.wire.request_codec import generation_request_message
from holdfast.router.wire.response_codec import generation, output_delta
from holdfast.router.wire.statuses import error_of
from holdfast.v1 import inference_pb2
from holdfast.worker.errors import (
    InternalError,
    OnTrialError,
    RequestAbortedError,
    VersionGoneError,
)
from holdfast.worker.pooling import PoolingParams
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.wire.tls import Tls

MessageOf: TypeAlias = Callable[[GenerationRequest], Any]
"""Makes the message of a submission."""


class Clock(Protocol):
    """Clock of a client."""

    def now(self) -> float:
        """Seconds, from any moment on."""

    async def sleep(self, seconds: float) -> None: ...


class LoopClock:
    """The running event loop's time."""

    def now(self) -> float:
        """Time of the event loop in seconds."""
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        """Sleeps for seconds."""
        await asyncio.sleep(seconds)


class AsyncClient:
    """Talks to one router at a time. Use it as an async context manager, on one event loop.

    When its router is lost, a stream continues at another router (or at the same one, once it is back) after the last
    received token and character; the iterating caller sees a pause only. The client gives up `reconnect_s` seconds
    after the loss if no router serves the request, `connect_s` seconds after the start if no router has ever accepted
    it, and at the request's own timeout.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        connect_s: float = 5.0,
        reconnect_s: float = RECONNECT_S,
        api_key: str = "",
        tls: Tls | None = None,
        draw: Callable[[], float] = random.random,
        transport: Transport | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`address` is `host:port`, of one router or of several, also as text with commas between them. `api_key` goes
        with every call; `tls` has the CA and the client certificate; None: connections are not encrypted. `draw` is
        uniform in [0, 1).

        `transport` and `clock` are gRPC and the event loop's, unless a test brings its own.
        """
        self._addresses = tuple(address.split(",")) if isinstance(address, str) else tuple(address)
        if not self._addresses:
            raise ValueError("address = (): must name at least one router")
        self._transport = transport or GrpcTransport(api_key, tls)
        self._clock = clock or LoopClock()
        self._connect_s = connect_s
        self._reconnect_s = reconnect_s
        self._draw = draw
        self._at = int(draw() * len(self._addresses))  # clients spread over the routers

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections. Running streams end with an error."""
        await self._transport.close()

    async def stream(
        self,
        prompt: str | Sequence[int] | None = None,
        params: SamplingParams | None = None,
        *,
        messages: Sequence[Message] | None = None,
        model: str = "",
        request_id: str = "",
        **options: Unpack[CallOptions],
    ) -> AsyncGenerator[OutputDelta, None]:
        """The completions as they come. Leaving the iteration, or cancelling the task, aborts the request.

        Instead of a prompt, `messages` may be given, each with `role` and `content`: the model's chat template renders
        them. `CallOptions` has the other arguments: tools, variables of the template, priority, tenant, timeout. With n
        > 1, chunks of different completions take turns. `best_of` and `beam_width` are for `generate` alone. Raises the
        error tree of `worker/errors.py`, as the router raised it: `CallerError` for errors that a retry cannot fix,
        `CapacityError` and `ReplicaError` with `retry_after_s`.
        """
        request = submission(prompt, params, messages, model=model, request_id=request_id, **options)
        call, has_guarantee = self._resumable_call(request.timeout_s, ResumeRecord()), True
        while True:
            at = self._at
            try:
                async with aclosing(self._call("GenerateStream", request, call)) as answers:
                    async for message in answers:
                        one = output_delta(message)
                        if _merged(call, one):
                            has_guarantee = has_guarantee and not one.replayed_without_guarantee
                            yield one if has_guarantee else one._replace(replayed_without_guarantee=True)
                return
            except CallFailed as failure:
                if call.is_over:
                    return
                await self._pause(at, failure, call.retry_policy)

    async def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        params: SamplingParams | None = None,
        *,
        messages: Sequence[Message] | None = None,
        model: str = "",
        request_id: str = "",
        **options: Unpack[CallOptions],
    ) -> Generation:
        """All completions, when they have ended. Cancelling the task aborts the request. Takes and raises what `stream`
        does.

        If a router is lost, the request is sent to another one, which gives the same answer.
        """
        request = submission(prompt, params, messages, model=model, request_id=request_id, **options)
        return generation(await self._whole("Generate", request, generation_request_message))

    async def pool(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: PoolingParams | None = None,
        *,
        model: str = "",
        request_id: str = "",
        truncate_prompt_tokens: int | None = None,
        truncation_side: Literal["left", "right"] | None = None,
        **options: Unpack[ServiceOptions],
    ) -> PooledOutputs:
        """A vector, or scores by label, of each of 1 to 2,048 prompts, by a pooled model.

        `truncate_prompt_tokens` keeps the first tokens of longer prompts, with -1 up to the model's maximum length, and
        with a `truncation_side` of left the last ones. If a replica or a router is lost, another one computes the same
        result. Raises as `stream` does.
        """
        request = bare_submission(
            params, truncating(truncate_prompt_tokens, truncation_side), model, request_id, options
        )
        return pooled_outputs(await self._whole("Pool", request, partial(pool_message, prompts)))

    async def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        instruction: str = "",
        model: str = "",
        request_id: str = "",
        truncate_prompt_tokens: int | None = None,
        truncation_side: Literal["left", "right"] | None = None,
        **options: Unpack[ServiceOptions],
    ) -> list[float]:
        """A score for each document with its query, or with the only one. Otherwise as `pool`."""
        request = bare_submission(None, truncating(truncate_prompt_tokens, truncation_side), model, request_id, options)
        texts = [[one] if isinstance(one, str) else list(one) for one in (queries, documents)]
        return list(
            (await self._whole("Score", request, partial(score_message, texts[0], texts[1], instruction))).scores
        )

    async def abort(self, request_id: str) -> bool:
        """Aborts a request of any client; its output so far stays, with finish reason ABORT. The call goes to every
        router, since only the request's router knows it. Returns whether the request was found. Raises as `stream`
        does, where no router that answers knows it and some do not answer.
        """
        failure: CallFailed | None = None
        for address in self._addresses:
            message = inference_pb2.AbortRequest(request_id=request_id)
            try:
                if (await _only(self._transport.call(address, "Abort", message))).was_open:
                    return True
            except CallFailed as failed:
                if failed.status.code is not grpc.StatusCode.UNAVAILABLE:
                    raise error_of(failed.status) from failed
                failure = failed
        if failure is not None:
            raise error_of(failure.status) from failure
        return False

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "") -> str:
        """The text of token ids, without special tokens. Raises as `stream` does."""
        answer = await self._ask("Detokenize", inference_pb2.DetokenizeRequest(model=model, token_ids=token_ids))
        return str(answer.text)

    async def get_load(self) -> inference_pb2.GetLoadResponse:
        """Load of a router and its replicas, from the first router that answers. Raises as `stream` does."""
        answer: inference_pb2.GetLoadResponse = await self._ask("GetLoad", inference_pb2.GetLoadRequest())
        return answer

    async def list_models(self) -> inference_pb2.ListModelsResponse:
        """The models that are served, with the number of replicas of each. Raises as `stream` does."""
        answer: inference_pb2.ListModelsResponse = await self._ask("ListModels", inference_pb2.ListModelsRequest())
        return answer

    # --- inside ---

    async def _whole(self, method: str, request: GenerationRequest, message_of: MessageOf) -> Any:
        """The answer of a unary method, of whichever router gives it."""
        call = self._resumable_call(request.timeout_s)
        while True:
            at = self._at
            try:
                return await _only(self._call(method, request, call, message_of))
            except CallFailed as failure:
                await self._pause(at, failure, call.retry_policy, is_whole=True)

    def _call(
        self,
        method: str,
        request: GenerationRequest,
        call: ResumableCall,
        message_of: MessageOf = generation_request_message,
    ) -> AsyncGenerator[Any, None]:
        """The answer of the current router to the next submission. Raises `CallFailed`."""
        now = self._clock.now()
        resume = call.submit(now)
        if call.attempt > 1:
            time_left_s = call.retry_policy.time_left_s(now)
            request = replace(request, attempt=call.attempt, timeout_s=time_left_s, resume=resume)
        return self._sent(method, message_of(request), call.retry_policy)

    def _sent(self, method: str, message: Any, retry_policy: RetryPolicy) -> AsyncGenerator[Any, None]:
        return self._transport.call(
            self._addresses[self._at], method, message, retry_policy.note_taken, retry_policy.num_routers_lost
        )

    async def _ask(self, method: str, message: Any) -> Any:
        """The answer of a call that is the same whichever router gives it."""
        retry_policy = self._retry_policy(timeout_s=0)
        while True:
            at = self._at
            retry_policy.note_sent()
            try:
                return await _only(self._sent(method, message, retry_policy))
            except CallFailed as failure:
                await self._pause(at, failure, retry_policy)

    async def _pause(self, at: int, failure: CallFailed, retry_policy: RetryPolicy, *, is_whole: bool = False) -> None:
        """Prepares the next try after an error of the router `at`. Raises if there is no use in one.

        `is_whole`: the caller has nothing of the answer, which may therefore come from another version of the model.
        """
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # a call that fails just then hides that its caller has gone
            raise asyncio.CancelledError from failure
        error, pause_s = error_of(failure.status), None
        if failure.is_router_lost:
            retry_policy.note_router_lost()
        elif isinstance(error, RequestAbortedError):
            retry_policy.note_router_gone()
        elif isinstance(error, OnTrialError):
            retry_policy.note_suspected()
        may_begin_anew = is_whole and isinstance(error, VersionGoneError)
        if may_begin_anew or is_worth_another_try(failure.status, was_taken=retry_policy.was_taken):
            pause_s = retry_policy.pause_s(self._clock.now(), error.retry_after_s)
        if pause_s is None:
            raise error from failure
        self._leave(at)
        await self._clock.sleep(pause_s)

    def _leave(self, at: int) -> None:
        """Talks to the next router from here on, unless another task has moved on already."""
        if self._at == at:
            self._at = (at + 1) % len(self._addresses)

    def _resumable_call(self, timeout_s: float | None, record: ResumeRecord | None = None) -> ResumableCall:
        return ResumableCall(self._retry_policy(timeout_s), self._clock.now(), record)

    def _retry_policy(self, timeout_s: float | None) -> RetryPolicy:
        return RetryPolicy(
            num_routers=len(self._addresses),
            connect_s=self._connect_s,
            reconnect_s=self._reconnect_s,
            timeout_s=timeout_s,
            draw=self._draw,
            now=self._clock.now(),
        )


def _merged(call: ResumableCall, one: OutputDelta) -> bool:
    """Whether a chunk is new output. Raises `InternalError` for a gap or an overlap."""
    delta = SequenceDelta(
        first_token_index=one.first_token_index,
        token_ids=one.token_ids,
        text_length=len(one.text),
        finish_reason=one.finish_reason,
        sequence_index=one.sequence_index,
        fingerprint=one.system_fingerprint,
        is_last=one.usage is not None,
    )
    try:
        return call.merge(delta)
    except ValueError as error:
        raise InternalError(str(error)) from None


async def _only(answers: AsyncGenerator[Any, None]) -> Any:
    """The answer of a unary call. Raises the errors of the call."""
    async with aclosing(answers):
        async for message in answers:
            return message
    raise InternalError("a router has ended a call without an answer, and without an error")
